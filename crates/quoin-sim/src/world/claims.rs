//! What replicas and targets claim at each step, held against what they claimed before: each rule
//! is looked at where it would first be broken, not only where harm comes of it.

use quoin_core::entry::{Rule, SharedEntry};
use quoin_core::message::FromReplica;
use quoin_core::{Durability, EntryKind, Epoch, Lsn, Member, ReplicaGuid, View};

use super::World;

/// What a replica has told the targets of itself.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Said {
    guid: ReplicaGuid,
    pub applied: Lsn,
    pub durable: Lsn,
    /// What it once applied and may have lost with its cache since: it is not continuous before
    /// it has been given that again.
    owes: Lsn,
}

impl Said {
    /// Entries after `keep` are cut; the history goes to `tip`.
    pub fn cut(&mut self, keep: Lsn, tip: Lsn) {
        self.applied = self.applied.min(keep);
        self.durable = self.durable.min(keep);
        self.owes = self.owes.min(tip);
    }
}

/// What the world remembers of one life of a target, to hold it to its word.
#[derive(Default, Debug)]
pub(crate) struct Word {
    /// The version of the membership that it was granted or has swapped.
    pub membership: u64,
    /// The newest one that a replica has answered its present open with.
    pub heard: u64,
    /// A swap was sent, and its outcome is not known: the LSN it had sent by then.
    pub swapping: Option<Lsn>,
    /// The newest LSN it has sent.
    pub sent: Lsn,
    /// The View that was active when it was last looked at.
    active: Lsn,
}

impl World {
    /// What a replica says against what it has said: one that is continuous holds all that it
    /// ever applied, any holds all that it called durable, and Views are on media before they
    /// count as applied.
    pub(crate) fn check_said(&mut self, pool: usize, epoch: Epoch, message: &FromReplica) {
        let guid = self.pools[pool].member.guid;
        let media = self.setup.config.durability == Durability::Media;
        let excused = self.may_be_damaged(pool);
        let said = &mut self.pools[pool].said;
        if said.guid != guid {
            *said = Said { guid, ..Said::default() };
        }
        match message {
            FromReplica::Applied { applied, durable, .. } => {
                said.applied = said.applied.max(*applied);
                said.durable = said.durable.max(*durable);
                self.note_durable(guid, *durable);
                if !media && let Some(lsn) = self.unsynced_view(epoch, *durable, *applied) {
                    let detail = format!(
                        "pool {pool} has applied {applied}, a View at {lsn} is not on media yet"
                    );
                    self.violate("DurableFirst", detail);
                }
            }
            FromReplica::IncrementDone { position, .. } => {
                (said.applied, said.durable) = (position.lsn, position.lsn);
                self.note_durable(guid, position.lsn);
            }
            FromReplica::OpenAck(ack) => {
                self.note_durable(guid, ack.durable);
                if self.pools[pool].rolled_back == Some(guid) {
                    let detail = format!("pool {pool} answers from a disk that was rolled back");
                    return self.violate("RollbackNoticed", detail);
                }
                if !excused && !ack.damaged {
                    self.check_open_ack(pool, ack.position.lsn, ack.continuous, media);
                }
            }
            _ => {}
        }
    }

    fn check_open_ack(&mut self, pool: usize, at: Lsn, continuous: bool, media: bool) {
        let said = &mut self.pools[pool].said;
        let (applied, durable, owes) = (said.applied, said.durable, said.owes);
        // What was not durable may be gone; what is there counts from here.
        said.applied = at;
        said.owes = if continuous { Lsn::ZERO } else { owes.max(applied) };
        if at < durable {
            let detail = format!("pool {pool} opens at {at} and called {durable} durable");
            self.violate("DurableHolds", detail);
        } else if continuous && !media && at < applied.max(owes) {
            let applied = applied.max(owes);
            let detail = format!("pool {pool} is continuous at {at} and applied {applied}");
            self.violate("ContinuousHolds", detail);
        }
    }

    fn note_durable(&mut self, guid: ReplicaGuid, lsn: Lsn) {
        let known = self.durable_said.entry(guid.0).or_default();
        *known = (*known).max(lsn);
    }

    /// A View of this epoch's history that lies in what is applied and not durable.
    fn unsynced_view(&self, epoch: Epoch, durable: Lsn, applied: Lsn) -> Option<Lsn> {
        let path = self.lineage.path(epoch)?;
        self.lineage.view_between(path, durable, applied)
    }

    /// A View is active only when CF of its own in-sync set have it on media, under each rule.
    pub(crate) fn check_activation(&mut self, target: usize) {
        let Some(process) = &mut self.targets[target].process else { return };
        let Some((lsn, view)) = process.target.active_view() else { return };
        if std::mem::replace(&mut process.word.active, lsn) == lsn {
            return;
        }
        let rules = std::iter::once(&view.rule).chain(&view.joint);
        let holds = |member: &&Member, rule: &Rule| {
            rule.known.contains(member)
                && self.durable_said.get(&member.guid.0).is_some_and(|durable| *durable >= lsn)
        };
        let short = rules
            .map(|rule| (view.in_sync.iter().filter(|m| holds(m, rule)).count(), rule.cf))
            .find(|(count, cf)| *count < usize::from(*cf));
        if let Some((count, cf)) = short {
            let detail = format!("the View at {lsn} is active and on media of {count}, not {cf}");
            self.violate("OwnActivation", detail);
        }
    }

    /// No target serves under a membership that a replica's answer has shown to be an old one.
    pub(crate) fn check_record(&mut self, target: usize, epoch: Epoch) {
        let Some(process) = &self.targets[target].process else { return };
        let (own, heard) = (process.word.membership, process.word.heard);
        if own < heard {
            let detail = format!("epoch {epoch} serves under membership {own}, {heard} was heard");
            self.violate("MembershipMonotone", detail);
        }
    }

    /// While a swap's outcome is unknown every new View is under both rules.
    pub(crate) fn check_joint(&mut self, target: usize, entry: &SharedEntry) {
        let Some(process) = &mut self.targets[target].process else { return };
        let word = &mut process.word;
        word.sent = word.sent.max(entry.lsn);
        let EntryKind::View(view) = &entry.kind else { return };
        let View { joint: None, .. } = &**view else { return };
        if word.swapping.is_some_and(|after| entry.lsn > after) {
            let detail = format!("a View under one rule at {} while a swap is unknown", entry.lsn);
            self.violate("JointUntilKnown", detail);
        }
    }
}
