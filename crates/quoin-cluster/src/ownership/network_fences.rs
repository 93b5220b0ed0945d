//! Fences of the network: nodes and clients in a block of addresses write no volume.
//!
//! A fence is a record. Its nodes are granted nothing from then on, and their grants are taken back at
//! once. That it holds is known of a volume once as many of its pools as a target needs have said for the
//! time of a lease that they promised the fence's epoch: sessions below it are over there, and a target
//! without one of those pools acknowledges nothing. The same word is needed of volumes that went to other
//! nodes before: a record names the nodes whose sessions may live on ([`servers`]) until it is known that
//! they do not. Replicas are no writers, and stay in service.

use std::time::Duration;

use quoin_types::membership::open_quorum;
use quoin_types::{Epoch, Term, Time, mutant};

use crate::Refusal;
use crate::ownership::fencing;
use crate::ownership::grants::fence;
use crate::records::{
    ANY_NODE, Block, FenceRecord, NodeRecord, ReplicaRecord, VolumePhase, VolumeRecord,
};

/// Most blocks that are fenced at once.
pub const FENCES_MAX: usize = 1024;

/// The epoch that a pool has promised for a replica, and since when it says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Promised {
    pub epoch: Epoch,
    pub since: Time,
    /// No lease of a target lives there.
    pub is_silent: bool,
    /// Since when no session is open there: one below the promise is opened no more. A target that closes its
    /// session gives up its lease with it.
    pub closed_since: Option<Time>,
}

impl Promised {
    /// The word of a pool that has removed the replica, since so long: it opens no session of it any more.
    pub fn removed(since: Time) -> Self {
        // The pool forgets the lease with the replica, so its time is waited for.
        Self { epoch: Epoch(u64::MAX), since, is_silent: false, closed_since: Some(since) }
    }

    /// Returns true if no session below the promise acknowledges anything any more. `may_close`: those that
    /// are open are closed in their time.
    fn is_over(&self, may_close: bool, bounds: Bounds, now: Time) -> bool {
        let has_been = |since: Time, lasts| now.since(since.max(self.since)) >= lasts;
        // Answers of the pool from before may still be on their way to the target.
        let ended = self.closed_since.or((!may_close).then_some(self.since));
        // A session that may be closed in its time has that time at the pool, and renews its lease in it
        // after a silence; clocks of hosts differ.
        let closes = 2 * bounds.closing + bounds.lease;
        ended.is_some_and(|since| self.is_silent || has_been(since, bounds.lease))
            || has_been(self.since, closes)
    }
}

/// Digest of a list of texts, by which a change of it is noticed; never 0.
pub fn digest<'a>(texts: impl IntoIterator<Item = &'a String>) -> u64 {
    // The hash is FNV-1a: two lists that are made alike on purpose harm only their maker.
    let mut digest: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in texts.into_iter().flat_map(|text| text.bytes().chain([b'\n'])) {
        digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    digest.max(1)
}

/// The first block that fences a node.
pub fn of_node<'a>(
    fences: impl IntoIterator<Item = &'a FenceRecord>,
    node: &NodeRecord,
) -> Option<Block> {
    fences.into_iter().find(|fence| fence.covers(node)).map(|fence| fence.block.0)
}

/// Checks that a node may have a volume.
///
/// # Errors
/// Names the fence, and the way out.
pub fn check_node<'a>(
    fences: impl IntoIterator<Item = &'a FenceRecord>,
    node: &NodeRecord,
) -> Result<(), Refusal> {
    match of_node(fences, node).filter(|_| !mutant::is("fenced-node-granted")) {
        None => Ok(()),
        Some(block) => Err(Refusal::Precondition(format!(
            "node {} is fenced by block {block}: it has no volume until `quoin fence remove {block}`",
            node.name
        ))),
    }
}

/// Returns true if what a fenced node was granted of a volume is to be taken back. A fence that was one
/// before is not made again.
pub fn is_due(volume: &VolumeRecord, node: &str) -> bool {
    let is_lent = volume.opened.owner.as_deref() == Some(node) && volume.attachments.is_empty();
    let is_held = fencing::concerns(volume, node) && volume.opened.epoch != 0;
    let may_close = || !volume.grants.fenced_at_once && last_epoch(volume, |n| n == node).is_some();
    is_lent || is_held && (volume.is_granted() || may_close())
}

/// Takes back the grants of a node in a fenced block.
///
/// # Errors
/// As those of [`fence`].
pub fn take_back(volume: &mut VolumeRecord, node: &str, term: Term) -> Result<(), Refusal> {
    match is_due(volume, node) {
        true => fencing::of_node(volume, node, true, term),
        false => Ok(()),
    }
}

/// Returns true if the volume is granted to no node, and its sessions may still be closed in their time.
pub fn is_closing(volume: &VolumeRecord) -> bool {
    volume.opened.epoch != 0 && !volume.is_granted() && !volume.grants.fenced_at_once
}

/// Cuts the sessions of a volume that [`is_closing`].
///
/// # Errors
/// As those of [`fence`].
pub fn cut(volume: &mut VolumeRecord, term: Term) -> Result<(), Refusal> {
    match is_closing(volume) {
        true => fence(volume, true, term),
        false => Ok(()),
    }
}

/// Returns true if sessions of a volume whose deletion was ordered are not cut yet.
pub fn is_deleted_in_use(volume: &VolumeRecord) -> bool {
    volume.phase == VolumePhase::Deleting
        && (volume.is_granted() || is_closing(volume))
        && last_epoch(volume, |_| true).is_some()
}

/// Cuts the sessions of a volume whose deletion was ordered: its replicas go, and no target serves it on.
///
/// # Errors
/// As those of [`fence`].
pub fn cut_deleted(volume: &mut VolumeRecord, term: Term) -> Result<(), Refusal> {
    match is_deleted_in_use(volume) {
        true => fence(volume, true, term),
        false => Ok(()),
    }
}

/// The nodes whose targets may acknowledge something of a volume, each with the last epoch under which it
/// may; [`ANY_NODE`]: others too. A volume that is being deleted has them as long as leases may live.
pub fn servers(volume: &VolumeRecord) -> impl Iterator<Item = (&str, u64)> {
    let (grants, epoch) = (&volume.grants, volume.opened.epoch);
    let is_opened = epoch != 0;
    // The epoch of a fence was granted to no node.
    let last = if volume.is_granted() { epoch } else { epoch.saturating_sub(1) };
    let holder = Some(grants.holder.as_str()).filter(|holder| !holder.is_empty());
    // Recovered records do not say which node holds the epoch.
    let unknown = holder.is_none().then_some(ANY_NODE);
    let holder = holder.or(volume.opened.owner.as_deref());
    let former = grants.former.iter().map(|(node, last)| (node.as_str(), *last));
    let all = holder.into_iter().chain(unknown).map(move |node| (node, last)).chain(former);
    all.filter(move |(_, last)| is_opened && *last >= grants.ended)
}

/// The last epoch under which targets of these nodes may acknowledge something of a volume; `None`: they
/// acknowledge nothing.
pub fn last_epoch(volume: &VolumeRecord, is_meant: impl Fn(&str) -> bool) -> Option<u64> {
    let meant = servers(volume).filter(|(node, _)| *node == ANY_NODE || is_meant(node));
    meant.map(|(_, last)| last).max()
}

/// How long sessions last without their target's cooperation.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Longest lease of a target.
    pub lease: Duration,
    /// Longest time for a session to be closed whose grant was taken back, and not at once.
    pub closing: Duration,
}

/// The last epoch below the present grant under which something may still be acknowledged.
pub fn last_former_epoch(volume: &VolumeRecord) -> Option<u64> {
    let all = servers(volume).map(|(_, last)| last);
    all.filter(|last| !volume.is_granted() || *last < volume.opened.epoch).max()
}

/// Checks that nothing is acknowledged any more under this epoch and earlier ones: as many of the pools as a
/// target needs to open the volume have promised a later one for long enough. `word`: the promise of the
/// pool of a replica, where it is heard of. Returns what they have promised.
///
/// # Errors
/// Says which pools are waited for.
pub fn check_ended(
    volume: &VolumeRecord,
    last: u64,
    word: impl Fn(&ReplicaRecord) -> Option<Promised>,
    bounds: Bounds,
    now: Time,
) -> Result<Epoch, String> {
    let name = &volume.spec.name;
    if last >= volume.opened.epoch {
        return Err(format!("the grant of volume {name} is not taken back yet"));
    }
    // Sessions end at once with such a fence, and with the next one that is opened.
    let fence = match volume.grants.fenced_at_once && volume.grants.fenced > last {
        true => Epoch(volume.grants.fenced),
        false => volume.epoch(),
    };
    let needed = match mutant::is("one-promise-is-enough-for-a-fence") {
        true => 1,
        false => usize::from(open_quorum(volume.membership.rf, volume.membership.cf)),
    };
    let may_close = is_closing(volume) && !mutant::is("silence-taken-for-a-session-s-end");
    let known = volume.replicas.iter().filter(|replica| volume.is_known(replica));
    // Of a volume that is being deleted, replicas of pools that were given up are in no record any more.
    let given_up = match volume.phase {
        VolumePhase::Deleting => {
            volume.membership.known.len().saturating_sub(known.clone().count())
        }
        _ => 0,
    };
    let (mut promised, mut over, mut missing) = (given_up, given_up, Vec::new());
    for replica in known {
        match word(replica).filter(|word| word.epoch >= fence) {
            None => missing.push(replica.pool.as_str()),
            Some(word) => {
                promised += 1;
                let is_over = word.is_over(may_close, bounds, now);
                over += usize::from(is_over || mutant::is("fence-holds-before-the-lease-is-over"));
            }
        }
    }
    if over >= needed {
        return Ok(fence);
    }
    Err(match promised >= needed {
        true => format!("the lease on volume {name} is not over yet"),
        false => format!(
            "{promised} pools of volume {name} have promised its fence, and {needed} must: pool {} has \
             not",
            missing.join(", pool ")
        ),
    })
}

/// Returns true if as many pools as a target needs to serve a volume say that no lease of one lives.
/// `word`: that of the pool of a replica.
pub fn is_silent(volume: &VolumeRecord, word: impl Fn(&ReplicaRecord) -> Option<Promised>) -> bool {
    let known = volume.replicas.iter().filter(|replica| volume.is_known(replica));
    let silent = known.filter(|replica| word(replica).is_some_and(|word| word.is_silent)).count();
    silent >= usize::from(open_quorum(volume.membership.rf, volume.membership.cf))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use quoin_types::Incarnation;

    use super::*;
    use crate::records::Text;

    fn node(name: &str, address: &str, host: &[&str]) -> NodeRecord {
        NodeRecord {
            name: name.to_owned(),
            address: address.to_owned(),
            topology: Default::default(),
            volumes_max: 0,
            version: String::new(),
            host_addresses: host.iter().map(|address| address.parse().unwrap()).collect(),
        }
    }

    fn fence_of(block: &str, nodes: &[&str]) -> FenceRecord {
        let nodes: BTreeSet<String> = nodes.iter().map(|node| (*node).to_owned()).collect();
        let volumes = BTreeSet::new();
        FenceRecord { block: Text(block.parse().unwrap()), since_ms: 0, nodes, volumes }
    }

    #[test]
    fn a_node_is_fenced_by_each_address_that_it_reports_and_stays_so_under_another_one() {
        crate::break_a_rule();
        let fences = [fence_of("192.0.2.0/28", &[]), fence_of("2001:db8::7/128", &["h9"])];
        for (covered, address, host) in [
            (true, "192.0.2.7:7402", &["198.51.100.7"][..]),
            (true, "192.0.2.7", &[]),
            (true, "", &["198.51.100.7", "192.0.2.15"]),
            (true, "[2001:db8::7]:7402", &[]),
            (false, "192.0.2.16:7402", &["198.51.100.7", "2001:db8::8"]),
            (false, "h1.example.org:7402", &[]),
            (false, "", &[]),
        ] {
            let node = node("h1", address, host);
            let refused = check_node(&fences, &node);
            assert_eq!(refused.is_err(), covered, "{node:?}");
            if let Err(refused) = refused {
                let words = refused.to_string();
                assert!(words.contains("h1") && words.contains("quoin fence remove"), "{words}");
            }
        }
        let moved = node("h9", "198.51.100.9", &[]);
        assert_eq!(of_node(&fences, &moved), "2001:db8::7/128".parse().ok());
    }

    const BOUNDS: Bounds =
        Bounds { lease: Duration::from_secs(2), closing: Duration::from_secs(30) };

    fn fenced_volume() -> VolumeRecord {
        let mut volume = crate::records::recorded::volume();
        (volume.opened.epoch, volume.grants.epochs_skipped) = (7, 0);
        (volume.grants.fenced, volume.grants.fenced_at_once) = (0, false);
        volume.opened.owner = Some("h1".to_owned());
        volume.opened.incarnation = Text(Incarnation(9));
        volume.grants.holder = "h1".to_owned();
        assert!(is_due(&volume, "h1") && !is_due(&volume, "h2"));
        take_back(&mut volume, "h1", Term::default()).unwrap();
        volume
    }

    #[test]
    fn grants_of_a_fenced_node_are_taken_back_once_and_again_after_another_grant() {
        let mut volume = fenced_volume();
        assert_eq!((volume.opened.epoch, volume.grants.fenced), (8, 8));
        assert!(volume.grants.fenced_at_once && !volume.is_granted());
        let fenced = volume.clone();
        take_back(&mut volume, "h1", Term::default()).unwrap();
        assert_eq!(volume, fenced, "a repeat");
        // The volume was detached before, and its session may still be closed in its time.
        volume.grants.fenced_at_once = false;
        take_back(&mut volume, "h1", Term::default()).unwrap();
        assert_eq!((volume.grants.fenced, volume.grants.fenced_at_once), (9, true));
        volume.opened.epoch = 10;
        assert!(is_due(&volume, "h1"));
        let mut lent = crate::records::recorded::volume();
        (lent.opened.owner, lent.opened.epoch) = (Some("h1".to_owned()), 0);
        lent.attachments.clear();
        take_back(&mut lent, "h1", Term::default()).unwrap();
        assert_eq!(lent.opened.owner, None, "what was lent goes to another node");
    }

    #[test]
    fn a_fence_holds_once_a_quorum_of_pools_has_promised_it_for_the_time_of_a_lease() {
        crate::break_a_rule();
        let mut volume = fenced_volume();
        (volume.membership.rf, volume.membership.cf) = (3, 2);
        let known: Vec<String> = volume
            .replicas
            .iter()
            .filter(|replica| volume.is_known(replica))
            .map(|replica| replica.pool.clone())
            .collect();
        assert!(known.len() >= 3, "{known:?}");
        let now = Time::from_millis(3_600_000);
        let ago = |ms| now - Duration::from_millis(ms);
        let checked = |words: &[(u64, u64)]| {
            let word = |replica: &ReplicaRecord| {
                let at = known.iter().position(|pool| *pool == replica.pool)?;
                let (epoch, ms) = words.get(at)?;
                Some(Promised {
                    epoch: Epoch(*epoch),
                    since: ago(*ms),
                    is_silent: false,
                    closed_since: None,
                })
            };
            check_ended(&volume, 7, word, BOUNDS, now)
        };
        assert_eq!(checked(&[(8, 2000), (9, 5000)]), Ok(Epoch(8)), "two of three, or later ones");
        let words = checked(&[(8, 60_000), (7, 60_000), (0, 60_000)]).unwrap_err();
        assert!(words.contains(&format!("pool {}, pool {}", known[1], known[2])), "{words}");
        assert!(checked(&[(8, 60_000)]).is_err(), "the others are not heard of");
        let words = checked(&[(8, 60_000), (8, 1999), (8, 1999)]).unwrap_err();
        assert!(words.contains("lease"), "{words}");
        assert!(checked(&[]).is_err());
    }

    /// The word of all pools, for so long.
    fn word(epoch: u64, ms: u64, is_silent: bool) -> impl Fn(&ReplicaRecord) -> Option<Promised> {
        let since = Time::from_millis(3_600_000) - Duration::from_millis(ms);
        move |_| Some(Promised { epoch: Epoch(epoch), since, is_silent, closed_since: None })
    }

    fn ended(
        volume: &VolumeRecord,
        last: u64,
        word: impl Fn(&ReplicaRecord) -> Option<Promised>,
    ) -> Result<u64, String> {
        let now = Time::from_millis(3_600_000);
        check_ended(volume, last, word, BOUNDS, now).map(|epoch| epoch.0)
    }

    fn named(volume: &VolumeRecord) -> Vec<(&str, u64)> {
        servers(volume).collect()
    }

    fn acquired(volume: &mut VolumeRecord, node: &str) {
        volume.opened.owner = Some(node.to_owned());
        let asked = crate::ownership::epochs::Acquire {
            node: node.to_owned(),
            incarnation: Incarnation(11),
            at_least: Epoch(0),
        };
        crate::ownership::epochs::acquire(volume, &asked, Term::default()).unwrap().unwrap();
    }

    #[test]
    fn a_session_that_may_be_closed_in_its_time_ends_when_that_time_is_over_and_not_by_a_silence() {
        crate::break_a_rule();
        let mut volume = fenced_volume();
        volume.grants.fenced_at_once = false;
        assert!(is_closing(&volume));
        assert_eq!(last_epoch(&volume, |node| node == "h1"), Some(7));
        assert!(ended(&volume, 7, word(8, 61_000, false)).unwrap_err().contains("lease"));
        assert_eq!(ended(&volume, 7, word(8, 62_000, false)), Ok(8));
        assert!(ended(&volume, 7, word(8, 61_000, true)).is_err(), "its target may be stopped");
        let mut cut_now = volume.clone();
        cut(&mut cut_now, Term::default()).unwrap();
        assert!(ended(&cut_now, 7, word(8, 62_000, true)).is_err(), "it is another fence");
        assert_eq!(ended(&cut_now, 7, word(9, 2000, false)), Ok(9));
    }

    #[test]
    fn a_node_that_had_a_volume_may_serve_it_until_a_quorum_has_promised_a_later_epoch() {
        crate::break_a_rule();
        let mut volume = fenced_volume();
        volume.grants.fenced_at_once = false;
        assert_eq!(named(&volume), [("h1", 7)]);
        acquired(&mut volume, "h2");
        assert_eq!((volume.opened.epoch, named(&volume)), (9, vec![("h2", 9), ("h1", 7)]));
        assert_eq!(last_former_epoch(&volume), Some(7));
        // The target of h2 has opened nothing yet: the session of h1 may be closed in its time.
        assert!(ended(&volume, 7, word(8, 60_000, true)).is_err());
        assert!(ended(&volume, 9, word(9, 60_000, true)).is_err(), "h2 is not fenced");
        acquired(&mut volume, "h3");
        assert_eq!(named(&volume), [("h3", 10), ("h1", 7), ("h2", 9)]);
        volume.grants.end_below(9);
        assert_eq!(named(&volume), [("h3", 10), ("h2", 9)]);
        assert_eq!(ended(&volume, 9, word(10, 2000, false)), Ok(10));
        volume.grants.end_below(10);
        assert_eq!(named(&volume), [("h3", 10)]);
        assert_eq!((last_former_epoch(&volume), last_epoch(&volume, |n| n == "h1")), (None, None));
        // A fence that cuts needs no word on the grants that came after it.
        take_back(&mut volume, "h3", Term::default()).unwrap();
        acquired(&mut volume, "h1");
        assert_eq!(named(&volume), [("h1", 12), ("h3", 10)]);
        assert_eq!(ended(&volume, 10, word(11, 2000, false)), Ok(11));
        volume.grants.end_below(11);
        assert_eq!(named(&volume), [("h1", 12)]);
        take_back(&mut volume, "h1", Term::default()).unwrap();
        volume.grants.end_below(13);
        assert_eq!(named(&volume), []);
        cut(&mut volume, Term::default()).unwrap();
        crate::ownership::grants::fence(&mut volume, true, Term::default()).unwrap();
        assert_eq!((volume.opened.epoch, named(&volume)), (14, vec![]), "another fence of nobody");
        acquired(&mut volume, "h2");
        assert_eq!(named(&volume), [("h2", 15)], "the session of h1 is over");
        acquired(&mut volume, "h2");
        assert_eq!(named(&volume), [("h2", 16)], "it has it again");
        volume.opened.epoch = 0;
        assert_eq!(named(&volume), [], "never opened");
    }

    #[test]
    fn any_node_may_serve_a_volume_whose_record_was_recovered_or_had_more_nodes_than_are_kept() {
        let mut volume = fenced_volume();
        (volume.grants.fenced, volume.grants.fenced_at_once) = (0, false);
        volume.grants.holder.clear();
        assert_eq!(named(&volume), [("h1", 8), (ANY_NODE, 8)]);
        assert_eq!(last_epoch(&volume, |node| node == "h7"), Some(8));
        acquired(&mut volume, "h2");
        assert_eq!(named(&volume), [("h2", 9), (ANY_NODE, 8)]);
        let mut volume = fenced_volume();
        for node in 0..200 {
            acquired(&mut volume, &format!("n{node}"));
        }
        assert!(last_epoch(&volume, |node| node == "n0").is_some());
        assert!(volume.grants.former.len() <= 64);
    }

    #[test]
    fn a_session_that_its_target_closed_is_over_at_once_and_one_that_broke_off_after_its_lease() {
        crate::break_a_rule();
        let mut volume = fenced_volume();
        volume.grants.fenced_at_once = false;
        let closed = |epoch, ms, is_silent| {
            let word = word(epoch, 5000, is_silent);
            let since = Some(Time::from_millis(3_600_000) - Duration::from_millis(ms));
            move |replica: &ReplicaRecord| Some(Promised { closed_since: since, ..word(replica)? })
        };
        assert_eq!(ended(&volume, 7, closed(8, 0, true)), Ok(8));
        assert!(ended(&volume, 7, closed(7, 0, true)).is_err(), "it may be opened again");
        assert!(ended(&volume, 7, closed(8, 1999, false)).is_err());
        assert_eq!(ended(&volume, 7, closed(8, 2000, false)), Ok(8));
    }

    #[test]
    fn a_volume_that_is_being_deleted_has_its_servers_until_the_leases_on_what_is_removed_are_over()
    {
        let mut volume = fenced_volume();
        volume.grants.fenced_at_once = false;
        volume.begin_deletion();
        assert_eq!(last_epoch(&volume, |node| node == "h1"), Some(7));
        assert!(ended(&volume, 7, word(8, 3000, false)).is_err());
        cut_deleted(&mut volume, Term::default()).unwrap();
        assert_eq!((volume.opened.epoch, volume.grants.fenced_at_once), (9, true));
        let removed = |ms| {
            let since = Time::from_millis(3_600_000) - Duration::from_millis(ms);
            move |_: &ReplicaRecord| Some(Promised::removed(since))
        };
        assert!(ended(&volume, 7, removed(1999)).is_err());
        assert_eq!(ended(&volume, 7, removed(2000)), Ok(9));
        volume.replicas.clear();
        assert_eq!(ended(&volume, 7, |_| None), Ok(9), "its pools were given up");
        volume.grants.end_below(9);
        assert_eq!(named(&volume), []);
        let mut lent = fenced_volume();
        lent.opened.epoch = 10;
        lent.begin_deletion();
        cut_deleted(&mut lent, Term::default()).unwrap();
        assert!(!lent.is_granted() && lent.grants.fenced_at_once);
        let once = lent.clone();
        cut_deleted(&mut lent, Term::default()).unwrap();
        assert_eq!(lent, once);
    }

    #[test]
    fn no_lease_lives_where_as_many_pools_as_a_target_needs_say_so() {
        let mut volume = fenced_volume();
        (volume.membership.rf, volume.membership.cf) = (3, 2);
        let known = |volume: &VolumeRecord| {
            let known = volume.replicas.iter().filter(|replica| volume.is_known(replica));
            known.map(|replica| replica.pool.clone()).collect::<Vec<_>>()
        };
        let pools = known(&volume);
        let silent = |count: usize| {
            let word = |replica: &ReplicaRecord| {
                let is_silent = pools[..count].contains(&replica.pool);
                let since = Time::from_millis(1);
                Some(Promised { epoch: Epoch(1), since, is_silent, closed_since: None })
            };
            is_silent(&volume, word)
        };
        assert!(!silent(1) && silent(2) && silent(3));
        assert!(!is_silent(&volume, |_| None));
    }
}
