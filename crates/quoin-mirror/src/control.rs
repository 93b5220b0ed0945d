//! The mirror's side of the control plane: whom to trust, and what is heard.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{MirrorAssignment, MirrorReport, WatchMirrorRequest};
use quoin_identity::{ClusterId, Contact, SourceAddress, TermChannel};
use quoin_types::ids::GroupId;
use tokio::sync::watch;
use tonic::Status;

use crate::Shared;

/// A mirror that says nothing for several of these does not run, to the controller.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Between attempts to reach a controller that is away.
const RETRY: Duration = Duration::from_millis(500);
/// Messages of peers that come within it go by one report.
const GATHER: Duration = Duration::from_millis(20);
/// Bytes of an assignment: all messages for one peer that are kept fit.
const ASSIGNMENT_BYTES_MAX: usize = 16 << 20;
const CALL_MAX: Duration = Duration::from_secs(5);

pub(crate) struct Control {
    pub shared: Arc<Shared>,
    pub channel: TermChannel,
    /// The address of this host by which the controller is reached.
    pub source: SourceAddress,
    pub contact: Contact,
    /// Where it listens.
    pub bound: SocketAddr,
}

/// Takes an assignment as the present one, and the messages in it.
pub(crate) fn obey(shared: &Shared, mut message: MirrorAssignment) {
    let mut peers = Vec::new();
    for peer in &message.peers {
        let Ok(cluster) = peer.cluster_id.parse::<ClusterId>() else { continue };
        let authorities = String::from_utf8_lossy(&peer.authorities_pem);
        match shared.trusted.set(cluster, &authorities, &peer.key_hashes) {
            Ok(()) => peers.push(cluster),
            Err(error) => {
                tracing::error!(peer = %cluster, %error, "a peer cannot be trusted");
            }
        }
    }
    for cluster in shared.trusted.clusters() {
        if !peers.contains(&cluster) {
            shared.trusted.remove(cluster);
        }
    }
    shared.contacts.keep(&peers);
    shared.outbox.keep(&peers);
    for said in std::mem::take(&mut message.messages) {
        let (peer, group) = (said.peer_cluster_id.parse(), said.group_id.parse::<GroupId>());
        match (peer, group) {
            (Ok(peer), Ok(group)) if peers.contains(&peer) => {
                shared.outbox.push(peer, group.0, said.body.into());
            }
            _ => tracing::debug!(peer = said.peer_cluster_id, "a message has nobody to go to"),
        }
    }
    let own = message.own.clone().unwrap_or_default();
    shared.own.send_if_modified(|said| {
        let is_news = *said != own;
        *said = own;
        is_news
    });
    shared.assignment.send_replace(Arc::new(message));
}

impl Control {
    /// Follows the assignments until `shutdown`; reconnects for ever.
    ///
    /// # Errors
    /// The controller's word that the mirror was removed.
    pub async fn follow(&self, shutdown: watch::Receiver<bool>) -> Result<(), String> {
        let tell = |why| self.shared.options.metrics.health.set("controller", Some(why));
        self.contact.follow(shutdown, RETRY, || self.follow_once(), tell).await
    }

    async fn follow_once(&self) -> Result<(), Status> {
        let shared = &self.shared;
        let client = AgentClient::new(self.channel.clone());
        let mut client = client.max_decoding_message_size(ASSIGNMENT_BYTES_MAX);
        let request = WatchMirrorRequest { mirror: shared.options.name.clone() };
        let mut assignments = client.watch_mirror(request).await?.into_inner();
        while let Some(message) = assignments.message().await? {
            self.contact.reached();
            shared.options.metrics.health.set("controller", None);
            let (identity, rules) = (&shared.identity, !message.does_not_rule);
            let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
            if identity.accept_controller_term(&message.term, rules).map_err(refused)? {
                obey(&self.shared, message);
            }
        }
        Ok(())
    }

    /// `None` before the controller was ever reached.
    fn address(&self) -> Option<String> {
        match &self.shared.options.advertise {
            Some(given) => Some(given.clone()),
            None if self.bound.ip().is_unspecified() => {
                let ip = self.source.ip()?;
                Some(SocketAddr::new(ip, self.bound.port()).to_string())
            }
            None => Some(self.bound.to_string()),
        }
    }

    /// Reports until `shutdown`, and then that it leaves.
    pub async fn report(&self, mut shutdown: watch::Receiver<bool>) {
        let shared = &self.shared;
        self.source.settle().await;
        loop {
            let leaving = *shutdown.borrow();
            let assigned = shared.assignment.borrow().peers.clone();
            let peers = shared.contacts.report(&assigned);
            shared.options.metrics.show(&peers);
            let (messages, messages_end) = shared.inbox.first();
            let mut request = tonic::Request::new(MirrorReport {
                mirror: shared.options.name.clone(),
                address: self.address().unwrap_or_default(),
                version: env!("CARGO_PKG_VERSION").into(),
                leaving,
                peers: peers.clone(),
                node: shared.options.node.clone(),
                messages,
                sent: shared.book.report(),
            });
            request.set_timeout(CALL_MAX);
            let told = AgentClient::new(self.channel.clone()).report_mirror(request).await;
            let was_taken = told.is_ok();
            match told {
                // A refusal of the whole report, as of its address, says nothing of the introductions.
                Ok(_) => {
                    shared.contacts.told(&peers);
                    shared.inbox.took(messages_end);
                    shared.options.metrics.health.set("reports", None);
                }
                Err(status) => {
                    shared.inbox.failed();
                    shared.options.metrics.health.set("reports", Some(status.message().to_owned()));
                    tracing::debug!(%status, "a report was not taken");
                }
            }
            if leaving {
                return;
            }
            let said = async {
                // After a failure nothing is said before the interval is over.
                if !was_taken {
                    std::future::pending::<()>().await;
                }
                shared.inbox.news().await;
                tokio::time::sleep(GATHER).await;
            };
            tokio::select! {
                () = tokio::time::sleep(REPORT_EVERY) => {}
                () = said => {}
                _ = shutdown.wait_for(|down| *down) => {}
            }
        }
    }
}
