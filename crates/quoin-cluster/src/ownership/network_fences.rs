//! Fences of the network: nodes and clients in a block of addresses write no volume.
//!
//! A fence is a record. Its nodes are granted nothing from then on, and their grants are taken back at
//! once. That it holds is known of a volume once as many of its pools as a target needs have said for the
//! time of a lease that they promised the fence's epoch: sessions below it are over there, and a target
//! without one of those pools acknowledges nothing. Replicas are no writers, and stay in service.

use std::time::Duration;

use quoin_types::membership::open_quorum;
use quoin_types::{Epoch, Term, Time, mutant};

use crate::Refusal;
use crate::ownership::fencing;
use crate::ownership::grants::fence;
use crate::records::{Block, FenceRecord, NodeRecord, ReplicaRecord, VolumeRecord};

/// Most blocks that are fenced at once.
pub const FENCES_MAX: usize = 1024;

/// The epoch that a pool has promised for a replica, and since when it says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Promised {
    pub epoch: Epoch,
    pub since: Time,
    /// No lease of a target lives there.
    pub is_silent: bool,
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
    is_lent || is_held && (volume.is_granted() || !volume.grants.fenced_at_once)
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

/// The node that may be a volume's writer, by its last grant; `None`: no target has opened it.
pub fn holder(volume: &VolumeRecord) -> Option<&str> {
    let named = Some(volume.grants.holder.as_str()).filter(|holder| !holder.is_empty());
    let holder = named.or(volume.opened.owner.as_deref());
    holder.filter(|_| volume.phase.is_kept() && volume.opened.epoch != 0)
}

/// Checks that no target which had a volume when its nodes were fenced acknowledges anything any more.
/// `word`: the promise of the pool of a replica, where it is heard of.
///
/// # Errors
/// Says which pools are waited for.
pub fn check_cut(
    volume: &VolumeRecord,
    word: impl Fn(&ReplicaRecord) -> Option<Promised>,
    lease: Duration,
    now: Time,
) -> Result<(), String> {
    let name = &volume.spec.name;
    if volume.opened.epoch == 0 {
        return Ok(());
    }
    if is_closing(volume) {
        return Err(format!("the grant of volume {name} is not taken back yet"));
    }
    // Sessions end at once with such a fence, and with the next one that is opened.
    let fence = match volume.grants.fenced_at_once {
        true => Epoch(volume.grants.fenced),
        false => volume.epoch(),
    };
    let needed = match mutant::is("one-promise-is-enough-for-a-fence") {
        true => 1,
        false => usize::from(open_quorum(volume.membership.rf, volume.membership.cf)),
    };
    let known = volume.replicas.iter().filter(|replica| volume.is_known(replica));
    let (mut promised, mut over, mut missing) = (0, 0, Vec::new());
    for replica in known {
        match word(replica).filter(|word| word.epoch >= fence) {
            None => missing.push(replica.pool.as_str()),
            Some(word) => {
                promised += 1;
                // Answers of the pool from before may still be on their way to the target.
                let is_over = word.is_silent || now.since(word.since) >= lease;
                over += usize::from(is_over || mutant::is("fence-holds-before-the-lease-is-over"));
            }
        }
    }
    if over >= needed {
        return Ok(());
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

    const LEASE: Duration = Duration::from_secs(2);

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
                Some(Promised { epoch: Epoch(*epoch), since: ago(*ms), is_silent: false })
            };
            check_cut(&volume, word, LEASE, now)
        };
        assert_eq!(checked(&[(8, 2000), (9, 5000)]), Ok(()), "two of three, or later ones");
        let words = checked(&[(8, 60_000), (7, 60_000), (0, 60_000)]).unwrap_err();
        assert!(words.contains(&format!("pool {}, pool {}", known[1], known[2])), "{words}");
        assert!(checked(&[(8, 60_000)]).is_err(), "the others are not heard of");
        let words = checked(&[(8, 60_000), (8, 1999), (8, 1999)]).unwrap_err();
        assert!(words.contains("lease"), "{words}");
        assert!(checked(&[]).is_err());
    }

    #[test]
    fn a_session_that_may_be_closed_in_its_time_is_no_end_of_it_before_another_one_is_opened() {
        let mut volume = fenced_volume();
        let promised = |epoch| {
            move |_: &ReplicaRecord| {
                let (since, is_silent) = (Time::from_millis(59_999), true);
                Some(Promised { epoch: Epoch(epoch), since, is_silent })
            }
        };
        let now = Time::from_millis(60_000);
        volume.grants.fenced_at_once = false;
        let words = check_cut(&volume, promised(8), LEASE, now).unwrap_err();
        assert!(words.contains("taken back"), "{words}");
        let mut cut_now = volume.clone();
        cut(&mut cut_now, Term::default()).unwrap();
        assert!(check_cut(&cut_now, promised(8), LEASE, now).is_err());
        assert_eq!(check_cut(&cut_now, promised(9), LEASE, now), Ok(()));
        // Another node was granted it meanwhile, and opens it.
        (volume.opened.epoch, volume.grants.holder) = (9, "h2".to_owned());
        assert!(check_cut(&volume, promised(8), LEASE, now).is_err());
        assert_eq!(check_cut(&volume, promised(9), LEASE, now), Ok(()));
        assert_eq!(holder(&volume), Some("h2"));
        volume.opened.epoch = 0;
        assert_eq!((holder(&volume), check_cut(&volume, promised(0), LEASE, now)), (None, Ok(())));
    }
}
