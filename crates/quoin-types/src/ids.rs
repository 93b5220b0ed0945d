//! Identifiers and numbers of the protocol, each with its own type.

use std::fmt;

macro_rules! id128 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u128);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:x})"), self.0)
            }
        }
        impl std::str::FromStr for $name {
            type Err = std::num::ParseIntError;
            /// Accepts the 32 hex digits that `Display` writes; dashes are ignored.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                u128::from_str_radix(&text.replace('-', ""), 16).map(Self)
            }
        }
    };
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            pub const ZERO: Self = Self(0);
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

id128!(/** A volume; means the same in every cluster. */ VolumeId);
id128!(/** Which copy of a volume: survives re-creation and moves. */ ReplicaId);
id128!(/** Which incarnation of a copy's data: new each time it is created. */ ReplicaGuid);
id128!(/** A pool of one host. */ PoolId);
id128!(/** A snapshot, visible or hidden. */ SnapshotId);
id128!(/** A group of volumes (one crash-consistent unit). */ GroupId);
id128!(/** A client of a volume that several hosts change at once ([`crate::client`]). */ ClientId);
id128!(/** One attempt at a point over several volumes. Chosen at random. */ PointId);
id128!(/** One term of one controller. Chosen at random; 0 in term 0. */ TermId);
id128!(/** One attempt of one target process to open a volume. Chosen at random. */ Incarnation);

number!(/** Grows each time a target opens a volume for writing; the fencing token. Its upper part is
the term in which it was granted ([`crate::term`]). */ Epoch);
number!(/** Log sequence number: gapless per volume; 0 is "before the first entry". */ Lsn);

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl SnapshotId {
    /// Upper half of the id of every boundary of a rebuild.
    const BOUNDARY: u64 = u64::from_be_bytes(*b"boundary");

    /// The id of a rebuild's boundary, with a random lower half.
    pub fn of_boundary(random: u64) -> Self {
        Self(u128::from(Self::BOUNDARY) << 64 | u128::from(random))
    }

    /// Returns true for ids made by [`SnapshotId::of_boundary`].
    pub fn is_of_boundary(self) -> bool {
        (self.0 >> 64) as u64 == Self::BOUNDARY
    }
}

/// Place in a volume's history: the epoch and LSN of the last entry, Views included.
/// Compared lexicographically.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Position {
    pub epoch: Epoch,
    pub lsn: Lsn,
}

/// Key that every frame of a session carries; a replica drops frames of any other session than its
/// current one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct SessionKey {
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    /// Nonce that the target chooses for each connection; never repeated within an incarnation.
    pub nonce: u64,
}

/// Key of one bulk connection of a session. The later one has the higher number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct BulkKey {
    pub session: SessionKey,
    /// Number chosen by the target, never repeated within a session.
    pub number: u64,
}
