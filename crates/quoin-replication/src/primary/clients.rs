//! Clients of a shared volume: which may change it, and requests that they send again (RepeatOnce).
//!
//! The table of clients is a part of the history ([`quoin_types::client`]). A client begins by an
//! entry, under a grant of its attachment, and ends by one, never to begin again: its target draws
//! the id of each anew.

use super::{Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::block::{BlockError, Operation, Request};
use quoin_types::client::Judged;
use quoin_types::entry::EntryKind;
use quoin_types::ids::{ClientId, Lsn};
use quoin_types::mutant;

use super::requests::Sequenced;

#[derive(Default)]
pub(super) struct Clients {
    /// Attachments whose clients may change the volume; `None`: not known yet.
    granted: Option<Granted>,
    /// Clients that begin when IO starts.
    beginning: Vec<ClientId>,
}

struct Granted {
    attachments: Vec<u64>,
    version: u64,
}

/// Answer to a request that has no further effect.
#[derive(Clone, Copy)]
pub(super) enum Repeated {
    /// It took effect: its last entry has this LSN.
    Executed(Lsn),
    Refused(BlockError),
}

impl Primary {
    /// Takes the attachments whose clients may change the volume; the clients of others end.
    pub(super) fn grant_clients(
        &mut self,
        attachments: Vec<u64>,
        version: u64,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if self.clients.granted.as_ref().is_some_and(|granted| version < granted.version) {
            return;
        }
        self.clients.granted = Some(Granted { attachments, version });
        if self.phase == Phase::Serving {
            self.clients_at_start(actions);
        }
    }

    /// The attachments of now. `None`: another target may have begun clients since of attachments
    /// that this one has not heard of; its epoch was granted by a newer record.
    fn attachments(&self) -> Option<&[u64]> {
        let granted = self.clients.granted.as_ref()?;
        let is_of_now = granted.version >= self.options.version
            || mutant::is("clients-ended-by-an-older-assignment");
        is_of_now.then_some(&granted.attachments)
    }

    /// Begins a client before all of its requests.
    pub(super) fn begin_client(&mut self, client: ClientId, actions: &mut Vec<PrimaryAction>) {
        self.clients.beginning.push(client);
        if self.phase == Phase::Serving {
            self.begin_clients(actions);
        }
    }

    /// Forgets a client that has not begun.
    pub(super) fn forget_client(&mut self, client: ClientId) {
        self.clients.beginning.retain(|other| *other != client);
    }

    /// Begins and ends clients when IO starts, before requests that waited.
    pub(super) fn clients_at_start(&mut self, actions: &mut Vec<PrimaryAction>) {
        self.end_clients();
        self.begin_clients(actions);
    }

    /// Ends the clients of attachments that are not granted.
    fn end_clients(&mut self) {
        let Some(granted) = self.attachments() else { return };
        let is_over = |client: &ClientId| !granted.contains(&client.attachment());
        let over: Vec<ClientId> = self.history.clients.clients().filter(is_over).collect();
        for client in over {
            self.end_client(client);
        }
    }

    fn end_client(&mut self, client: ClientId) {
        if !mutant::is("client-not-ended") {
            self.history.append_bare(self.opening.epoch, EntryKind::EndClient { client });
        }
    }

    fn begin_clients(&mut self, actions: &mut Vec<PrimaryAction>) {
        // None is granted where the attachments are not known: the host tries again.
        let granted = self.attachments().map(<[u64]>::to_vec).unwrap_or_default();
        for client in std::mem::take(&mut self.clients.beginning) {
            let attachment = client.attachment();
            let is_granted = granted.contains(&attachment);
            if is_granted {
                // Another instance of the node's attach follows.
                let is_older = |other: &ClientId| other.attachment() == attachment;
                let older: Vec<ClientId> =
                    self.history.clients.clients().filter(is_older).collect();
                for client in older {
                    self.end_client(client);
                }
            }
            if !is_granted || self.history.clients.is_full() {
                actions.push(PrimaryAction::Note(PrimaryNote::ClientRefused { client }));
                continue;
            }
            self.history.append_bare(self.opening.epoch, EntryKind::BeginClient { client });
        }
    }

    /// Decides whether a request takes effect, and from which block on: parts of it that took effect
    /// before are below.
    pub(super) fn judge_repeat(&self, request: &Request) -> Result<u64, Repeated> {
        let Some(origin) = &request.origin else { return Ok(0) };
        if !Self::is_write(&request.operation) {
            return Ok(0);
        }
        match self.history.clients.judge(origin) {
            Judged::Executed(_) | Judged::OutOfWindow if mutant::is("repeat-done-again") => Ok(0),
            Judged::New { from } => Ok(from),
            Judged::Executed(lsn) => Err(Repeated::Executed(lsn)),
            Judged::NoClient if mutant::is("client-used-after-its-end") => Ok(0),
            Judged::NoClient => Err(Repeated::Refused(BlockError::NoClient)),
            Judged::OutOfWindow => Err(Repeated::Refused(BlockError::OutOfWindow)),
        }
    }

    /// Answers a request that was sent again as its first one is answered, or refuses it.
    pub(super) fn answer_repeat(&mut self, request: &Request, answered: Repeated) {
        let token = request.token;
        // The whole request is answered, not the part of it that was admitted.
        self.requests.take_rest(token);
        match answered {
            Repeated::Executed(lsn) => {
                let fua = match request.operation {
                    Operation::Write { fua, .. }
                    | Operation::Trim { fua, .. }
                    | Operation::WriteZeroes { fua, .. } => fua,
                    Operation::Read { .. } | Operation::Flush | Operation::Status { .. } => false,
                };
                if mutant::is("repeat-answered-before-commit") {
                    return self.requests.wait_for_commit(Sequenced::unmeasured(Lsn::ZERO, token));
                }
                if fua {
                    self.commit.want_sync(lsn);
                }
                self.answer_at(Sequenced::unmeasured(lsn, token), fua);
            }
            Repeated::Refused(error) => self.requests.wait_for_lease(token, error),
        }
    }
}
