//! State of the modelled world: the control plane's record, replicas, the targets' attempts and
//! what clients are owed. All of it is plain bytes, so that a state is compared, hashed and stored
//! without interpretation.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Replicas of a world at most, newcomers included.
pub const REPLICAS: usize = 5;
/// Attempts to open the volume: each is one epoch and one incarnation of some target.
pub const ATTEMPTS: usize = 4;
/// Entries that one attempt appends, at most.
pub const ENTRIES: usize = 7;

/// A set of replicas, one bit each.
pub type Set = u8;

pub fn count(set: Set) -> u8 {
    set.count_ones() as u8
}

pub fn has(set: Set, replica: usize) -> bool {
    set & (1 << replica) != 0
}

pub fn members(set: Set) -> impl Iterator<Item = usize> {
    (0..REPLICAS).filter(move |r| has(set, *r))
}

/// A position in the tree of histories: the first `count` entries of an attempt's own, after
/// all that the attempt's base holds. Equal places are equal histories; two histories are equal
/// only if their places are.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Place {
    /// 1-based; 0 is the empty history.
    pub attempt: u8,
    pub count: u8,
}

pub const WRITE: u8 = 1;
pub const VIEW: u8 = 2;
/// A View whose open may have lost what was never flushed.
pub const MARKED_VIEW: u8 = 3;

#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Entry {
    pub kind: u8,
    pub in_sync: Set,
    pub known: Set,
    pub cf: u8,
    pub joint_known: Set,
    /// 0: not joint.
    pub joint_cf: u8,
    pub version: u8,
}

impl Entry {
    pub fn is_view(&self) -> bool {
        self.kind >= VIEW
    }

    /// The rules that entries are counted under while this View is not over.
    pub fn rules(&self) -> impl Iterator<Item = (Set, u8)> {
        let joint = (self.joint_cf > 0).then_some((self.joint_known, self.joint_cf));
        [Some((self.known, self.cf)), joint].into_iter().flatten()
    }
}

pub const UNUSED: u8 = 0;
pub const OPENING: u8 = 1;
pub const RECOVERING: u8 = 2;
pub const SERVING: u8 = 3;
/// Closed, or provably unable to do anything that is seen.
pub const ENDED: u8 = 4;

pub const LINK_NONE: u8 = 0;
/// OpenAck is here; not fed (yet).
pub const LINK_ANSWERED: u8 = 1;
pub const LINK_FED: u8 = 2;

pub const NO_CHANGE: u8 = 0;
/// The joint View is appended.
pub const JOINT: u8 = 1;
/// The compare-and-swap is on its way; its outcome is unknown.
pub const SWAP_SENT: u8 = 2;
/// The compare-and-swap took effect, but the target has not received the answer.
pub const SWAP_DONE: u8 = 3;

/// Flags of an OpenAck.
pub const CONTINUOUS: u8 = 1;
pub const QUORUM: u8 = 2;
pub const DAMAGED: u8 = 4;

/// A membership: who counts, and by which factors.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Rule {
    pub known: Set,
    pub cf: u8,
    pub rf: u8,
}

/// Answers to the clients of an attempt.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Io {
    pub commit: u8,
    /// LSN that an unanswered flush waits for; 0: none.
    pub flush: u8,
    /// IO has started.
    pub served: u8,
}

/// The change of membership that an attempt makes.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Change {
    pub stage: u8,
    /// Index + 1 of the joint View.
    pub joint_at: u8,
}

/// The session of an attempt with a replica.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Link {
    pub state: u8,
    /// Position in the OpenAck, until the open is decided.
    pub ack: Place,
    pub ack_flags: u8,
    /// LSNs that the target knows for the replica, if it feeds it.
    pub applied: u8,
    pub durable: u8,
    /// The target's last LSN when the session began.
    pub tip: u8,
}

/// Attempt of a target to open the volume, and the serving that follows from it.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Attempt {
    pub phase: u8,
    pub epoch: u8,
    pub incarnation: u8,
    /// The membership that the epoch was granted with, or that it has changed to since.
    pub version: u8,
    pub rule: Rule,
    /// The membership before a forced change, while the record keeps it.
    pub old: Rule,
    /// The history that it continues, and that history's length.
    pub base: Place,
    pub start: u8,
    /// How many entries it has appended.
    pub length: u8,
    /// Index + 1 of its active View; 0: none yet.
    pub active: u8,
    pub marked: u8,
    pub io: Io,
    pub change: Change,
    /// Mutants only: replicas whose lease it believes to hold though they answered a newer one.
    pub late_grants: Set,
    pub links: [Link; REPLICAS],
    pub entries: [Entry; ENTRIES],
}

#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Replica {
    /// The attempt that it promised; 0: none.
    pub promised: u8,
    /// The session with that attempt is open.
    pub session: u8,
    pub log: Place,
    /// LSN up to which the log is on media.
    pub durable: u8,
    pub continuous: u8,
    pub quorum: u8,
    pub damaged: u8,
    /// The GUID is one that no record listed at first.
    pub newcomer: u8,
    /// The replica is gone for ever.
    pub gone: u8,
    /// Closed cleanly; a power cut takes nothing, not even the continuous flag.
    pub closed: u8,
    pub version: u8,
    /// Mutants only: LSN that is really on media, or what the base was folded to.
    pub hollow: u8,
    /// Mutants only: its content is not that of any history.
    pub mixed: u8,
}

/// The control plane's record of the volume.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Record {
    pub epoch: u8,
    pub version: u8,
    pub rule: Rule,
    pub retired: Set,
    /// The membership before a forced change, until a target has started IO under the new one.
    pub old: Rule,
}

/// How often each kind of step may still happen.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Budget {
    pub writes: u8,
    pub flushes: u8,
    pub power_cuts: u8,
    pub views: u8,
    pub changes: u8,
    pub closes: u8,
    pub rollbacks: u8,
    pub deaths: u8,
    pub damages: u8,
    pub sync_failures: u8,
    pub forced: u8,
    /// A person may agree to a loss.
    pub forced_consents: u8,
    /// Newcomers that the control plane takes off the record.
    pub drops: u8,
}

#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct State {
    pub record: Record,
    pub budget: Budget,
    /// The newest entry that a client knows of (from a write's answer or a read's content).
    pub owed: Place,
    /// The newest entry that a flush covered and replicas may fold, Views included.
    pub flushed: Place,
    /// A person agreed that acknowledged writes may be lost; the next start settles it.
    pub consented: u8,
    pub replicas: [Replica; REPLICAS],
    pub attempts: [Attempt; ATTEMPTS],
}

impl State {
    pub fn attempt(&self, number: u8) -> &Attempt {
        &self.attempts[usize::from(number) - 1]
    }

    /// The next attempt's index, if the bounds leave one.
    pub fn unused_attempt(&self, attempts: usize) -> Option<usize> {
        (0..attempts).find(|a| self.attempts[*a].phase == UNUSED)
    }

    /// Returns true if the session between the two is open at both ends.
    pub fn is_live(&self, a: usize, r: usize) -> bool {
        let replica = &self.replicas[r];
        usize::from(replica.promised) == a + 1
            && replica.session == 1
            && self.attempts[a].links[r].state != LINK_NONE
    }

    /// This state with replicas in a canonical order. Replicas are named in sets and arrays
    /// only, and no replica's state names another, so two with equal marks can be exchanged
    /// without a difference: sorting by marks finds one state of each orbit.
    pub fn canonical(&self, replicas: usize) -> State {
        let mut order: [usize; REPLICAS] = std::array::from_fn(|r| r);
        let mut marks = [Marks::default(); REPLICAS];
        for (r, mark) in marks.iter_mut().enumerate().take(replicas) {
            *mark = self.marks(r);
        }
        order[..replicas].sort_unstable_by(|x, y| marks[*x].cmp(&marks[*y]));
        if order.is_sorted() { *self } else { self.permuted(&order) }
    }

    /// All that distinguishes a replica, independent of its number.
    fn marks(&self, r: usize) -> Marks {
        let bit = |set: Set| u128::from(has(set, r));
        let mut sets = bit(self.record.rule.known)
            | bit(self.record.retired) << 1
            | bit(self.record.old.known) << 2;
        let mut shift = 3;
        let mut peers = [[0u8; 7]; ATTEMPTS];
        for (attempt, peer) in self.attempts.iter().zip(&mut peers) {
            if attempt.phase == UNUSED {
                continue;
            }
            sets |= (bit(attempt.rule.known)
                | bit(attempt.old.known) << 1
                | bit(attempt.late_grants) << 2)
                << shift;
            shift += 3;
            for entry in &attempt.entries[..usize::from(attempt.length)] {
                if entry.is_view() {
                    sets |=
                        (bit(entry.in_sync) | bit(entry.known) << 1 | bit(entry.joint_known) << 2)
                            << shift;
                    shift += 3;
                }
            }
            *peer = [
                attempt.links[r].state,
                attempt.links[r].ack.attempt,
                attempt.links[r].ack.count,
                attempt.links[r].ack_flags,
                attempt.links[r].applied,
                attempt.links[r].durable,
                attempt.links[r].tip,
            ];
        }
        let mut own = [0u8; size_of::<Replica>()];
        own.copy_from_slice(self.replicas[r].as_bytes());
        Marks { own, peers, sets }
    }

    fn permuted(&self, order: &[usize; REPLICAS]) -> State {
        let set = |old: Set| -> Set {
            order.iter().enumerate().fold(0, |new, (to, from)| new | (old >> from & 1) << to)
        };
        let mut new = *self;
        new.replicas = order.map(|r| self.replicas[r]);
        let record = &mut new.record;
        for field in [&mut record.rule.known, &mut record.retired, &mut record.old.known] {
            *field = set(*field);
        }
        for attempt in new.attempts.iter_mut().filter(|a| a.phase != UNUSED) {
            for field in [&mut attempt.rule.known, &mut attempt.old.known, &mut attempt.late_grants]
            {
                *field = set(*field);
            }
            attempt.links = order.map(|r| attempt.links[r]);
            for entry in &mut attempt.entries {
                entry.in_sync = set(entry.in_sync);
                entry.known = set(entry.known);
                entry.joint_known = set(entry.joint_known);
            }
        }
        new
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Marks {
    own: [u8; size_of::<Replica>()],
    peers: [[u8; 7]; ATTEMPTS],
    sets: u128,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanged_replicas_are_one_canonical_state() {
        let mut state = State::default();
        state.record.rule.known = 0b111;
        state.attempts[0].phase = SERVING;
        state.attempts[0].rule.known = 0b111;
        state.attempts[0].length = 1;
        state.attempts[0].entries[0] =
            Entry { kind: VIEW, in_sync: 0b011, known: 0b111, cf: 2, ..Entry::default() };
        for (link, applied) in state.attempts[0].links.iter_mut().zip([4, 2, 3]) {
            link.applied = applied;
        }
        state.replicas[1].durable = 2;
        let mut other = state.permuted(&[2, 0, 1, 3, 4]);
        assert_ne!(state, other);
        assert_eq!(state.canonical(3), other.canonical(3));
        other.attempts[0].links[1].applied += 1;
        assert_ne!(state.canonical(3), other.canonical(3));
    }
}
