//! The mirror: the one process of a cluster that exchanges anything with other clusters.
//!
//! One runs beside each target. It keeps no state but its certificate: the controller tells it whom to
//! trust ([`control`]), and it tells the controller what it hears. The mirror that leads links to each peer
//! ([`dial`]); every mirror lets those of peers in ([`listen`]). Both ends of a link do the same
//! ([`link`]): they introduce themselves, say what changes, and ping. So addresses, keys and authorities
//! that change on one side are known on the other without anybody's doing. A link carries what the controllers
//! of both clusters say to each other ([`messages`]).
//!
//! The content of volumes goes by connections of their own ([`stream`]), from each mirror whose target serves
//! a volume to the one whose target serves the copy; no byte of it crosses a controller.
//!
//! A mirror trusts a foreign authority for mirrors of that authority's own cluster alone
//! ([`quoin_identity::TrustedPeers`]).

mod contacts;
mod control;
mod dial;
mod frame;
mod link;
mod listen;
mod messages;
pub mod metrics;
mod stream;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use quoin_api::control::{MirrorAssignment, PeerIntroduction};
use quoin_identity::{ClusterId, Contact, Identity, JoinRequest, Role, TrustedPeers};
use quoin_types::ids::VolumeId;
use tokio::net::TcpListener;
use tokio::sync::watch;

use contacts::Contacts;
use control::Control;
use frame::Frame;
use messages::{Inbox, Outbox};
use metrics::Metrics;
use stream::{Bandwidth, Book, Open, Places};

/// Options of a mirror.
#[derive(Clone, Debug)]
pub struct Options {
    /// The mirror's name, as in its certificate.
    pub name: String,
    /// Directory of certificate and key, present or after joining.
    pub identity: PathBuf,
    /// Join of a mirror that has no identity yet.
    pub join: Option<JoinRequest>,
    /// host:port of the controller's agent service.
    pub controller: String,
    /// Where mirrors of peers are let in.
    pub listen: SocketAddr,
    /// host:port that peers are told; none: the listening one, on the address by which the controller is
    /// reached where it listens on every address.
    pub advertise: Option<String>,
    /// Name of the node whose target runs on this host.
    pub node: String,
    /// Run directory of that target, with its history socket.
    pub run_dir: PathBuf,
    /// Metrics of the caller, who serves them.
    pub metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),
    #[error(
        "the identity in {dir} is of {holder}, not of mirror {name}: give --state another directory, or the \
         mirror its old name"
    )]
    OtherIdentity { dir: PathBuf, holder: String, name: String },
    #[error("cannot listen on {address}: {source}; choose another one with --listen")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// The controller's statement, with the way back.
    #[error("{0}")]
    Removed(String),
}

/// Parts that all of the process share.
pub(crate) struct Shared {
    pub options: Options,
    pub identity: Identity,
    pub trusted: Arc<TrustedPeers>,
    pub contacts: Contacts,
    /// Messages of controllers: for peers, and of peers.
    pub outbox: Outbox,
    pub inbox: Inbox,
    /// Transfers that are sent.
    pub book: Book,
    pub places: Arc<Places>,
    pub bandwidth: Bandwidth,
    /// Address that took each volume last.
    pub worked: Mutex<BTreeMap<VolumeId, String>>,
    /// Streams of peers that are taken.
    pub open: Open,
    /// Statement of this cluster about itself; empty before the controller has answered.
    pub own: watch::Sender<PeerIntroduction>,
    pub assignment: watch::Sender<Arc<MirrorAssignment>>,
}

impl Shared {
    pub fn new(options: Options, identity: Identity) -> Self {
        Self {
            identity,
            trusted: Arc::default(),
            contacts: Contacts::default(),
            outbox: Outbox::default(),
            inbox: Inbox::default(),
            book: Book::default(),
            places: Arc::default(),
            bandwidth: Bandwidth::default(),
            worked: Mutex::default(),
            open: Open::default(),
            own: watch::Sender::default(),
            assignment: watch::Sender::default(),
            options,
        }
    }

    /// Notes a frame that came by a link from a mirror of a peer.
    pub fn hear(&self, peer: ClusterId, frame: Frame) {
        self.contacts.heard(peer);
        match frame {
            Frame::Hello(said) if said.cluster_id == peer.to_string() => {
                self.contacts.said(peer, said);
            }
            Frame::Group { group, body } => self.inbox.push(peer, group, body),
            Frame::Hello(_) | Frame::Ping | Frame::Other(_) => {}
        }
    }
}

/// Runs until `shutdown`.
pub async fn run(options: Options, mut shutdown: watch::Receiver<bool>) -> Result<(), Error> {
    let identity = quoin_identity::load_or_join(&options.identity, options.join.as_ref()).await?;
    if identity.peer().role != Role::Mirror || identity.peer().name != options.name {
        return Err(Error::OtherIdentity {
            dir: options.identity.clone(),
            holder: identity.peer().to_string(),
            name: options.name.clone(),
        });
    }
    let failed = |source| Error::Listen { address: options.listen, source };
    let listener = TcpListener::bind(options.listen).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let (channel, source) = identity.controller_with_source(&options.controller)?;
    let shared = Arc::new(Shared::new(options, identity));
    let contact = Contact::new(&shared.options.controller);
    let control = Arc::new(Control { shared: shared.clone(), channel, source, contact, bound });
    tracing::info!(mirror = shared.options.name, address = %bound, "letting mirrors of peers in");

    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(listen::serve(shared.clone(), listener)?);
    tasks.spawn(dial::keep_links(shared.clone()));
    tasks.spawn(stream::keep::keep_sending(shared.clone()));
    let (renewing, down) = (shared.clone(), shutdown.clone());
    tasks.spawn(async move {
        renewing.identity.keep_renewed(renewing.options.controller.clone(), down).await;
    });
    let (reporting, down) = (control.clone(), shutdown.clone());
    let reports = tokio::spawn(async move { reporting.report(down).await });
    let removed = tokio::select! {
        followed = control.follow(shutdown.clone()) => followed.err(),
        _ = shutdown.wait_for(|down| *down) => None,
    };
    match removed {
        // The last report says that it leaves.
        None => drop(reports.await),
        Some(_) => reports.abort(),
    }
    tasks.shutdown().await;
    removed.map_or(Ok(()), |why| Err(Error::Removed(why)))
}
