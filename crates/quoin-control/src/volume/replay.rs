//! Replay of a file system's journal before the volume is mounted read-only.
//!
//! The file system of a clone, or of a node that was lost, is as after a power failure, and no journal
//! is replayed through a device that takes no writes. So the first of the nodes that are to mount it
//! read-only may write until it has replayed the journal and says so. No other node mounts the file
//! system meanwhile; if that node leaves before, the next one takes its place.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::state::records::VolumeRecord;
use crate::volume::attach::AttachmentRecord;
use crate::volume::sharing::Sharing;

/// Share of a read-only attachment in the replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replay {
    /// None: it was done, or is not asked for.
    #[default]
    None,
    /// Another node replays the journal; this one takes its place if it leaves.
    Awaited,
    /// The node may write until it has confirmed the replay.
    Due,
}

impl Replay {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// Decides the share of a new attachment, which is not among the volume's yet. Where others may
/// write beside it there is none.
pub(super) fn of_new(volume: &VolumeRecord, sharing: Sharing, is_asked_for: bool) -> Replay {
    let is_read_alone = matches!(sharing, Sharing::Exclusive | Sharing::ReadOnly);
    let is_under_way = volume.attachments.iter().any(|a| a.replay == Replay::Due);
    match is_asked_for && is_read_alone {
        true if volume.attachments.is_empty() => Replay::Due,
        true if is_under_way => Replay::Awaited,
        // No node writes beside those that may have it mounted.
        _ => Replay::None,
    }
}

/// Has another node do what a lost one was to do; the lost one is fenced.
pub(crate) fn take_from(attachments: &mut [AttachmentRecord], lost: &str) {
    for attachment in attachments.iter_mut().filter(|a| a.node == lost) {
        if attachment.replay == Replay::Due {
            attachment.replay = Replay::None;
        }
    }
    hand_on(attachments);
}

/// Has the next node that waits for the replay take it over where the one that was to do it has left.
pub(super) fn hand_on(attachments: &mut [AttachmentRecord]) {
    if attachments.iter().any(|a| a.replay == Replay::Due) {
        return;
    }
    if let Some(next) = attachments.iter_mut().find(|a| a.replay == Replay::Awaited) {
        next.replay = Replay::Due;
    }
}

/// Ends the replay, and with it the node's leave to write. Returns false where nothing changed.
///
/// # Errors
/// The volume is not attached to that node, or another node is to replay the journal.
pub(super) fn confirm(volume: &mut VolumeRecord, node: &str) -> Result<bool, Error> {
    let name = &volume.spec.name;
    let own = volume.attachments.iter().find(|a| a.node == node);
    let own = own.ok_or_else(|| {
        Error::Precondition(format!("volume {name:?} is not attached to node {node}"))
    })?;
    if own.replay != Replay::Due {
        return match volume.attachments.iter().find(|a| a.replay == Replay::Due) {
            Some(other) => {
                let node = &other.node;
                Err(Error::Aborted(format!("node {node} is to replay the journal of {name:?} now")))
            }
            None => Ok(false),
        };
    }
    volume.attachments.iter_mut().for_each(|a| a.replay = Replay::None);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(node: &str, replay: Replay) -> AttachmentRecord {
        AttachmentRecord {
            node: node.to_owned(),
            read_only: true,
            usage: String::new(),
            device: false,
            sharing: Sharing::ReadOnly,
            replay, client: 0 }
    }

    fn volume(attachments: Vec<AttachmentRecord>) -> VolumeRecord {
        VolumeRecord { attachments, ..crate::state::recorded::volume() }
    }

    fn shares(volume: &VolumeRecord) -> Vec<Replay> {
        volume.attachments.iter().map(|a| a.replay).collect()
    }

    #[test]
    fn one_node_replays_and_only_where_nobody_can_have_the_file_system_mounted() {
        for (others, is_asked_for, expected) in [
            (vec![], true, Replay::Due),
            (vec![], false, Replay::None),
            (vec![Replay::Due], true, Replay::Awaited),
            (vec![Replay::Due], false, Replay::None),
            (vec![Replay::None], true, Replay::None),
            (vec![Replay::None, Replay::Due], true, Replay::Awaited),
        ] {
            let others = others.iter().map(|replay| reader("h", *replay)).collect();
            let volume = volume(others);
            let share = of_new(&volume, Sharing::ReadOnly, is_asked_for);
            assert_eq!(share, expected, "{:?}", shares(&volume));
        }
        let alone = volume(vec![]);
        assert_eq!(of_new(&alone, Sharing::Exclusive, true), Replay::Due);
        for sharing in [Sharing::SingleWriter, Sharing::MultiWriter] {
            assert_eq!(of_new(&alone, sharing, true), Replay::None, "beside a writer");
        }
    }

    #[test]
    fn the_replay_passes_to_a_node_that_waits_for_it_and_to_no_other() {
        let mut left = volume(vec![
            reader("h2", Replay::None),
            reader("h3", Replay::Awaited),
            reader("h4", Replay::Awaited),
        ]);
        hand_on(&mut left.attachments);
        assert_eq!(shares(&left), [Replay::None, Replay::Due, Replay::Awaited]);
        hand_on(&mut left.attachments);
        assert_eq!(shares(&left), [Replay::None, Replay::Due, Replay::Awaited]);
    }

    #[test]
    fn a_lost_node_loses_its_leave_to_write_to_the_next_one_that_waits() {
        let mut record = volume(vec![reader("h1", Replay::Due), reader("h2", Replay::Awaited)]);
        take_from(&mut record.attachments, "h2");
        assert_eq!(shares(&record), [Replay::Due, Replay::Awaited], "another one is lost");
        take_from(&mut record.attachments, "h1");
        assert_eq!(shares(&record), [Replay::None, Replay::Due]);
        assert!(record.attachments[0].writes_nothing());
    }

    #[test]
    fn only_the_node_that_replays_ends_the_replay_and_it_ends_for_all() {
        let mut record = volume(vec![reader("h1", Replay::Due), reader("h2", Replay::Awaited)]);
        let early = confirm(&mut record, "h2").unwrap_err();
        assert!(early.to_string().contains("node h1"), "{early}");
        assert!(!record.attachments[0].writes_nothing(), "h1 replays");
        assert!(confirm(&mut record, "h1").unwrap());
        assert!(!confirm(&mut record, "h1").unwrap());
        assert_eq!(shares(&record), [Replay::None, Replay::None]);
        assert!(record.attachments.iter().all(AttachmentRecord::writes_nothing));
        let refused = confirm(&mut record, "h3").unwrap_err();
        assert!(refused.to_string().contains("not attached to node h3"), "{refused}");
    }
}
