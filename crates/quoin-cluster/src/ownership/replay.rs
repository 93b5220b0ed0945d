//! Replay of a file system's journal before the volume is mounted read-only.
//!
//! The file system of a clone, or of a node that was lost, is as after a power failure, and no journal
//! is replayed through a device that takes no writes. So the first of the nodes that are to mount it
//! read-only may write until it has replayed the journal and says so. No other node mounts the file
//! system meanwhile; if that node leaves before, the next one takes its place.
//!
//! A node that does not say so within [`REPLAY_MAX`] writes no more: its leave goes to the next one, and
//! it gets that answer to its call. The time begins anew with a start of the controller.

use std::time::Duration;

use quoin_types::Term;

use crate::Refusal;
use crate::ownership::grants::fence_last_writer;
use crate::records::{AttachmentRecord, Replay, Sharing, VolumeRecord};

/// Longest time for which a node that has a volume read-only may write to replay its journal.
pub const REPLAY_MAX: Duration = Duration::from_secs(300);

/// Says what an attachment's part in the replay is, while there is something to say.
pub fn in_words(replay: Replay) -> Option<String> {
    let within = REPLAY_MAX.as_secs();
    match replay {
        Replay::None | Replay::Awaited => None,
        Replay::Due => Some(format!(
            "read-only, but the node may write until it has replayed the journal, {within} s at most"
        )),
        Replay::Late => Some(format!(
            "the node has not replayed the journal within {within} s and writes no more; detach it"
        )),
    }
}

/// Decides the share of a new attachment, which is not among the volume's yet. Where others may
/// write beside it there is none.
pub fn of_new(volume: &VolumeRecord, sharing: Sharing, is_asked_for: bool) -> Replay {
    let is_read_alone = matches!(sharing, Sharing::Exclusive | Sharing::ReadOnly);
    let is_under_way = volume.attachments.iter().any(|a| a.replay == Replay::Due);
    let nobody_can = volume.attachments.iter().all(|a| a.replay == Replay::Late);
    match is_asked_for && is_read_alone {
        true if nobody_can => Replay::Due,
        true if is_under_way => Replay::Awaited,
        // No node writes beside those that may have it mounted.
        _ => Replay::None,
    }
}

/// Has another node do what a lost one was to do; the lost one is fenced.
pub fn take_from(attachments: &mut [AttachmentRecord], lost: &str) {
    for attachment in attachments.iter_mut().filter(|a| a.node == lost) {
        if attachment.replay == Replay::Due {
            attachment.replay = Replay::None;
        }
    }
    hand_on(attachments);
}

/// Has the next node that waits for the replay take it over where the one that was to do it has left.
pub fn hand_on(attachments: &mut [AttachmentRecord]) {
    if attachments.iter().any(|a| a.replay == Replay::Due) {
        return;
    }
    if let Some(next) = attachments.iter_mut().find(|a| a.replay == Replay::Awaited) {
        next.replay = Replay::Due;
    }
}

/// The node that may write to replay the journal.
pub fn due(volume: &VolumeRecord) -> Option<&str> {
    let due = volume.attachments.iter().find(|a| a.replay == Replay::Due);
    due.map(|attachment| attachment.node.as_str())
}

/// Ends the leave of a node that has not confirmed the replay in time; the next one that waits gets it.
/// Returns false where that node has no such leave.
///
/// # Errors
/// As those of [`fence_last_writer`].
pub fn end_late(volume: &mut VolumeRecord, node: &str, term: Term) -> Result<bool, Refusal> {
    let had_writers = volume.has_writers();
    let due = |a: &&mut AttachmentRecord| a.node == node && a.replay == Replay::Due;
    let Some(late) = volume.attachments.iter_mut().find(due) else { return Ok(false) };
    late.replay = Replay::Late;
    hand_on(&mut volume.attachments);
    fence_last_writer(volume, had_writers, true, term)?;
    Ok(true)
}

/// Ends the replay, and with it the node's leave to write. Returns false where nothing changed.
///
/// # Errors
/// The volume is not attached to that node, or another node is to replay the journal.
pub fn confirm(volume: &mut VolumeRecord, node: &str, term: Term) -> Result<bool, Refusal> {
    let name = &volume.spec.name;
    let own = volume.attachments.iter().find(|a| a.node == node);
    let own = own.ok_or_else(|| {
        Refusal::Precondition(format!("volume {name:?} is not attached to node {node}"))
    })?;
    if own.replay != Replay::Due {
        return match due(volume) {
            Some(node) => Err(Refusal::Aborted(format!(
                "node {node} is to replay the journal of {name:?} now"
            ))),
            None if own.replay == Replay::Late => Err(Refusal::Precondition(format!(
                "node {node} had {} s to replay the journal of {name:?} and is late: detach it there, \
                 and attach it again for another try",
                REPLAY_MAX.as_secs()
            ))),
            None => Ok(false),
        };
    }
    let had_writers = volume.has_writers();
    volume.attachments.iter_mut().for_each(|a| a.replay = Replay::None);
    fence_last_writer(volume, had_writers, false, term)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use quoin_types::TermId;

    use super::*;

    const TERM: Term = Term { number: 0, id: TermId(0) };

    fn reader(node: &str, replay: Replay) -> AttachmentRecord {
        AttachmentRecord {
            node: node.to_owned(),
            read_only: true,
            usage: String::new(),
            device: false,
            sharing: Sharing::ReadOnly,
            replay,
            client: 0,
        }
    }

    fn volume(attachments: Vec<AttachmentRecord>) -> VolumeRecord {
        VolumeRecord { attachments, ..crate::records::recorded::volume() }
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
    fn a_node_that_is_late_with_the_replay_writes_no_more_and_the_next_one_may() {
        let mut record = volume(vec![reader("h1", Replay::Due), reader("h2", Replay::Awaited)]);
        assert!(!end_late(&mut record, "h2", TERM).unwrap(), "it is not its turn");
        assert_eq!(due(&record), Some("h1"));
        assert!(end_late(&mut record, "h1", TERM).unwrap());
        assert_eq!(shares(&record), [Replay::Late, Replay::Due]);
        assert!(record.attachments[0].writes_nothing() && !record.attachments[1].writes_nothing());
        assert!(confirm(&mut record, "h1", TERM).unwrap_err().to_string().contains("node h2"));
        assert!(end_late(&mut record, "h2", TERM).unwrap());
        assert_eq!((shares(&record), due(&record)), (vec![Replay::Late; 2], None));
        let late = confirm(&mut record, "h2", TERM).unwrap_err().to_string();
        assert!(late.contains("300 s") && late.contains("detach it there"), "{late}");
        // No node has it mounted: one that comes now may try.
        assert_eq!(of_new(&record, Sharing::ReadOnly, true), Replay::Due);
        record.attachments[1].replay = Replay::Due;
        assert!(confirm(&mut record, "h2", TERM).unwrap());
        assert_eq!(shares(&record), [Replay::None, Replay::None]);
    }

    #[test]
    fn only_the_node_that_replays_ends_the_replay_and_it_ends_for_all() {
        let mut record = volume(vec![reader("h1", Replay::Due), reader("h2", Replay::Awaited)]);
        let early = confirm(&mut record, "h2", TERM).unwrap_err();
        assert!(early.to_string().contains("node h1"), "{early}");
        assert!(!record.attachments[0].writes_nothing(), "h1 replays");
        assert!(confirm(&mut record, "h1", TERM).unwrap());
        assert!(!confirm(&mut record, "h1", TERM).unwrap());
        assert_eq!(shares(&record), [Replay::None, Replay::None]);
        assert!(record.attachments.iter().all(AttachmentRecord::writes_nothing));
        let refused = confirm(&mut record, "h3", TERM).unwrap_err();
        assert!(refused.to_string().contains("not attached to node h3"), "{refused}");
    }
}
