//! Block devices of volumes on the nodes: the use of the volume to which each device belongs, and
//! whether a process has the device in use.
//!
//! A device is made for one use of its volume ([`crate::records::Use`]) and fails after it.

use std::time::Duration;

use quoin_types::{Epoch, Term, Time, VolumeId, mutant};

use crate::Refusal;
use crate::records::VolumeRecord;

/// Device as its node reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSeen {
    pub volume: VolumeId,
    pub device: String,
    pub in_use: bool,
    pub mounts: Vec<String>,
    pub since_epoch: u64,
    /// 0: unknown.
    pub size_bytes: u64,
    /// Why all its IO fails; empty: it does not.
    pub dead: String,
}

/// Returns true if a device on a node was made for a use of the volume that is over.
pub fn is_over(volume: &VolumeRecord, node: &str, made_for: u64) -> bool {
    let is_attached = volume.attachments.iter().any(|a| a.node == node);
    volume.used.is_over(node, made_for, volume.opened.epoch, is_attached)
}

/// Returns true if a volume is attached to a node no more, or is there no more, so that nothing will
/// answer a device of it there. One that is taken away just now counts as attached.
pub fn is_detached(volume: Option<&VolumeRecord>, node: &str) -> bool {
    volume.is_none_or(|volume| volume.attachments.iter().all(|a| a.node != node))
}

/// Returns true if the present use of the volume is this node's, and the volume was opened in it.
fn was_opened_by(volume: &VolumeRecord, node: &str) -> bool {
    let since = volume.used.since_of(node);
    since != 0 && volume.opened.epoch >= since
}

/// Reports of a node since the controller started.
#[derive(Clone, Copy, Debug)]
pub struct NodeReports<'a> {
    pub is_online: bool,
    /// When the last one came; `None`: none did.
    pub last: Option<Time>,
    /// When it said last which devices it has; `None`: it did not say.
    pub devices_told: Option<Time>,
    pub devices: &'a [DeviceSeen],
}

/// Returns true if the node may have been granted an epoch that the record lacks: neither its use nor the
/// last epoch is of the present term, and records that were recovered do not know of what was granted last
/// before that.
fn may_lack_a_grant(volume: &VolumeRecord, node: &str, term: Term) -> bool {
    let is_of_before = |epoch: u64| Epoch(epoch).term_number() < term.number;
    let since = volume.used.since_of(node);
    since != 0
        && is_of_before(since)
        && is_of_before(volume.opened.epoch)
        && !mutant::is("grants-of-before-a-recovery-forgotten")
}

/// Refuses to detach a volume from a node that uses it, or may use it without having reported that.
/// `offline_after`: reports that are older say nothing.
///
/// # Errors
/// Says what uses it, or why that is not known.
pub fn check_unused(
    volume: &VolumeRecord,
    on: &str,
    reports: NodeReports<'_>,
    offline_after: Duration,
    (term, now): (Term, Time),
) -> Result<(), Refusal> {
    let name = &volume.spec.name;
    let is_there = reports.is_online;
    let used = reports.devices.iter().filter(|_| is_there).find(|device| {
        let is_over = is_over(volume, on, device.since_epoch);
        device.volume == volume.id.0 && device.in_use && !is_over
    });
    if let Some(DeviceSeen { device, mounts, .. }) = used {
        let device = if device.is_empty() { "a device" } else { device };
        let how = match mounts.as_slice() {
            [] => format!("as {device}: close it there"),
            mounts => format!("as {device}, mounted at {}: unmount it there", mounts.join(", ")),
        };
        return Err(Refusal::Precondition(format!(
            "volume {name:?} is in use on node {on} {how} first. With --node {on} --force it is \
             taken away all the same, and what uses it there loses what it has not synced"
        )));
    }
    // A node that cannot have opened the volume has nothing of it in its caches, unless it reaches it
    // at another one, or has what it opened before its grant was taken back: it was cut off, or was
    // detached just as a program opened the device, and attached once more.
    let is_cut = was_opened_by(volume, on) && !mutant::is("node-that-was-cut-off-detached");
    let may_be_open = volume.may_be_held_by(on) || may_lack_a_grant(volume, on, term);
    if !may_be_open && !volume.used.is_shared() && !is_cut {
        return Ok(());
    }
    let since = |last: Option<Time>| match last {
        Some(last) => format!("for {} s", now.since(last).as_secs()),
        None => "since the controller started".to_owned(),
    };
    let why = match (is_there, reports.devices_told) {
        (true, Some(told)) if now.since(told) < offline_after => return Ok(()),
        (true, _) if mutant::is("unsaid-devices-taken-for-none") => return Ok(()),
        (false, _) if mutant::is("silent-node-detached") => return Ok(()),
        (true, told) => format!(
            "node {on} has not said {} which devices it has (its attach process does not answer)",
            since(told)
        ),
        (false, _) => format!("node {on} has not reported {}", since(reports.last)),
    };
    Err(Refusal::Precondition(format!(
        "{why}, and may have volume {name:?} in use. See that it is down, or that its programs may \
         lose what they have not synced, and detach with --node {on} --force: from then on nothing \
         of that node reaches the volume"
    )))
}

#[cfg(test)]
mod tests {
    use quoin_types::TermId;

    use super::*;
    use crate::ownership::attachment::{self, Publish};
    use crate::ownership::fencing;
    use crate::ownership::grants::fence;

    /// Its caches have what it wrote, and it may come back with them.
    #[test]
    fn a_volume_is_not_detached_unasked_from_a_silent_node_that_was_cut_off_with_it() {
        let mut volume = crate::records::recorded::volume();
        volume.grants.holder = "node-1".to_owned();
        volume.used.begin("node-1", volume.opened.epoch, volume.opened.epoch);
        let reports =
            NodeReports { is_online: false, last: None, devices_told: None, devices: &[] };
        let (after, now) = (Duration::from_secs(3), Time::from_millis(1000));
        let at = (Term::default(), now);
        let refused =
            |volume: &VolumeRecord| check_unused(volume, "node-1", reports, after, at).is_err();
        assert!(refused(&volume), "it has the grant");
        let mut detached = volume.clone();
        fencing::of_node(&mut volume, "node-1", false, Term::default()).unwrap();
        assert!(!volume.may_be_held_by("node-1") && refused(&volume));
        // Detached, and attached again: the same use goes on before it is opened.
        fence(&mut detached, false, Term::default()).unwrap();
        assert!(!detached.may_be_held_by("node-1") && refused(&detached));
        // Attached for a use of its own that never began.
        volume.used.begin("node-2", volume.opened.epoch + 1, volume.opened.epoch);
        volume.attachments[0].node = "node-2".to_owned();
        assert!(check_unused(&volume, "node-2", reports, after, at).is_ok());
    }

    /// A node was attached before the records were copied, and granted an epoch after that.
    #[test]
    fn a_silent_node_keeps_what_it_may_have_been_granted_before_the_records_were_recovered() {
        crate::break_a_rule();
        let mut volume = crate::records::recorded::volume();
        (volume.opened, volume.grants) = Default::default();
        (volume.attachments, volume.used) = Default::default();
        let attach = |volume: &mut VolumeRecord, term| {
            let publish = Publish { node: "node-1".to_owned(), ..Publish::default() };
            attachment::attach(volume, &publish, term).unwrap();
        };
        let mut before = volume.clone();
        attach(&mut before, Term::default());
        let reports =
            NodeReports { is_online: false, last: None, devices_told: None, devices: &[] };
        let refused = |volume: &VolumeRecord, term| {
            let at = (term, Time::from_millis(1000));
            check_unused(volume, "node-1", reports, Duration::from_secs(3), at).is_err()
        };
        assert!(!refused(&before, Term::default()), "nobody has opened it");
        let term = Term { number: 1, id: TermId(5) };
        assert!(refused(&before, term));
        // Attached since: whatever was granted is in the record.
        attach(&mut volume, term);
        assert!(!refused(&volume, term));
    }
}
