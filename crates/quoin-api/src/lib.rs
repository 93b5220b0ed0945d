//! Messages between the parts of a cluster: generated gRPC messages and services, one module a
//! package, the options of a volume as types ([`volume`]), and segments of topology ([`topology`]).

pub mod topology;
pub mod volume;

/// The control plane's own services.
#[allow(clippy::all, clippy::pedantic)]
pub mod control {
    tonic::include_proto!("quoin.control.v1");

    // The `Debug` of messages with wrapped keys: their name only.
    include!(concat!(env!("OUT_DIR"), "/quoin.control.v1.redacted.rs"));

    /// The smallest volume that `mkfs.xfs` makes an XFS on.
    pub const XFS_BYTES_MIN: u64 = 300 << 20;

    /// First words of what a volume waits for ([`Volume::waiting_for`]) whose target has no key of it.
    pub const WAITS_FOR_KEY: &str = "its key";
}

/// The Container Storage Interface: 1.8 and what later editions added (see `csi.proto`).
#[allow(clippy::all, clippy::pedantic)]
pub mod csi {
    tonic::include_proto!("csi.v1");

    // The `Debug` of messages that carry secrets or mount flags: their name only.
    include!(concat!(env!("OUT_DIR"), "/csi.v1.redacted.rs"));

    /// The `.proto` source, for clients in other languages to generate their stubs from.
    pub const PROTO: &str = include_str!("../proto/csi.proto");
}

/// The part of etcd's v3 API that a store of records needs: clients alone.
#[allow(clippy::all, clippy::pedantic)]
pub mod etcd {
    tonic::include_proto!("etcdserverpb");
}

/// CSI-Addons: the services beside the Container Storage Interface, on a socket of their own.
pub mod csi_addons {
    /// Declares the module of each package, with the `Debug` of messages that carry secrets: their name
    /// only.
    macro_rules! packages {
        ($($package:ident)*) => {
            /// The packages of the interface, as paths of calls begin with them.
            pub const PACKAGES: &[&str] = &[$(stringify!($package)),*];
            $(
            #[allow(clippy::all, clippy::pedantic)]
            pub mod $package {
                include!(concat!(env!("OUT_DIR"), "/csi-addons/", stringify!($package), ".rs"));
                include!(concat!(
                    env!("OUT_DIR"), "/csi-addons/", stringify!($package), ".redacted.rs"
                ));
            }
        )*};
    }

    packages! {
        encryptionkeyrotation
        fence
        healer
        identity
        reclaimspace
        replication
        volumegroup
    }
}
