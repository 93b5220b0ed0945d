//! Volumes that several nodes have at once.
//!
//! One target serves the volume; the other nodes reach it over the network. It sits with the node
//! that attached the volume first, and moves when that one leaves or is lost
//! ([`crate::ownership::failover`]). Nodes share a volume only if all of them asked for that.

use crate::Refusal;
use crate::records::{AttachmentRecord, Sharing, VolumeRecord};

/// Most nodes that have one volume at once.
pub const NODES_MAX: usize = 64;
/// Most of them that may change the volume: as many as its replicas remember requests of.
pub const WRITERS_MAX: usize = quoin_types::client::CLIENTS_MAX;

/// Checks that a volume may be attached to another node beside those that have it.
///
/// # Refusals
/// Names the node that is in the way, and the way out.
pub fn check_beside(volume: &VolumeRecord, wanted: &AttachmentRecord) -> Result<(), Refusal> {
    let name = &volume.spec.name;
    let others = || volume.attachments.iter().filter(|a| a.node != wanted.node);
    let refused = |why: String| Err(Refusal::Precondition(format!("volume {name:?} {why}")));
    if let Some(other) =
        others().find(|a| a.sharing.is_exclusive() || wanted.sharing.is_exclusive())
    {
        let advice = match (other.sharing.is_exclusive(), wanted.sharing.is_exclusive()) {
            (true, true) => "a second node would be a second writer",
            (true, false) => "which has it for itself",
            (false, _) => "which shares it, and this node would have it for itself",
        };
        let node = &other.node;
        return refused(format!("is attached to node {node}, {advice}; detach it there first"));
    }
    if others().count() >= NODES_MAX {
        return refused(format!("is attached to {NODES_MAX} nodes, the most that can share one"));
    }
    let together = || others().chain([wanted]);
    let Some(writer) = others().find(|a| !a.read_only) else {
        let is_read_only = |a: &AttachmentRecord| a.sharing == Sharing::ReadOnly;
        if let Some(reader) = others().find(|a| is_read_only(a) && !wanted.read_only) {
            let node = &reader.node;
            return refused(format!(
                "is attached to node {node} for readers alone; attach it read-only, or detach it \
                 there first"
            ));
        }
        return Ok(());
    };
    let node = &writer.node;
    if !wanted.read_only && others().filter(|a| !a.read_only).count() >= WRITERS_MAX {
        return refused(format!(
            "is written by {WRITERS_MAX} nodes, the most that can write one; attach it read-only, or \
             detach it from one of them first"
        ));
    }
    if wanted.sharing == Sharing::ReadOnly {
        return refused(format!(
            "is written by node {node}, and is to be attached for readers alone; detach it there \
             first"
        ));
    }
    if !wanted.read_only && together().any(|a| a.sharing == Sharing::SingleWriter) {
        return refused(format!(
            "is written by node {node}, the one writer that it may have; attach it read-only, or \
             detach it there first"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attached(node: &str, sharing: Sharing, read_only: bool) -> AttachmentRecord {
        let (node, usage) = (node.to_owned(), String::new());
        AttachmentRecord {
            node,
            read_only,
            usage,
            device: false,
            sharing,
            replay: Default::default(),
            client: 0,
        }
    }

    /// Returns true if a second node may join, by what the first one and it ask for.
    fn joins(first: (Sharing, bool), second: (Sharing, bool)) -> bool {
        let mut volume = crate::records::recorded::volume();
        volume.attachments = vec![attached("h1", first.0, first.1)];
        check_beside(&volume, &attached("h2", second.0, second.1)).is_ok()
    }

    /// Proves CSI-ACCESSMODE-02, CSI-ACCESSMODE-04, CSI-ACCESSMODE-05: the rule itself.
    #[test]
    fn nodes_share_a_volume_only_if_all_asked_for_it_and_no_more_write_than_may() {
        use Sharing::{Exclusive, MultiWriter, ReadOnly, SingleWriter};
        const READS: bool = true;
        const WRITES: bool = false;
        for (first, second, is_fine) in [
            ((Exclusive, WRITES), (Exclusive, WRITES), false),
            ((Exclusive, READS), (Exclusive, READS), false),
            ((Exclusive, WRITES), (MultiWriter, WRITES), false),
            ((MultiWriter, WRITES), (Exclusive, READS), false),
            ((MultiWriter, WRITES), (MultiWriter, WRITES), true),
            ((MultiWriter, WRITES), (SingleWriter, WRITES), false),
            ((MultiWriter, WRITES), (SingleWriter, READS), true),
            ((SingleWriter, WRITES), (SingleWriter, WRITES), false),
            ((SingleWriter, WRITES), (SingleWriter, READS), true),
            ((SingleWriter, READS), (SingleWriter, WRITES), true),
            ((SingleWriter, READS), (MultiWriter, WRITES), true),
            ((ReadOnly, READS), (ReadOnly, READS), true),
            ((ReadOnly, READS), (SingleWriter, WRITES), false),
            ((ReadOnly, READS), (SingleWriter, READS), true),
            ((MultiWriter, WRITES), (ReadOnly, READS), false),
        ] {
            assert_eq!(joins(first, second), is_fine, "{first:?} beside {second:?}");
        }
    }

    #[test]
    fn a_third_node_does_not_become_a_second_writer_beside_a_single_one() {
        use Sharing::{MultiWriter, SingleWriter};
        let mut volume = crate::records::recorded::volume();
        volume.attachments =
            vec![attached("h1", SingleWriter, true), attached("h2", SingleWriter, false)];
        let refused = check_beside(&volume, &attached("h3", MultiWriter, false)).unwrap_err();
        assert!(refused.to_string().contains("node h2"), "{refused}");
        check_beside(&volume, &attached("h3", SingleWriter, true)).unwrap();
    }

    #[test]
    fn no_more_nodes_write_a_volume_than_its_replicas_remember_requests_of() {
        use Sharing::MultiWriter;
        let mut volume = crate::records::recorded::volume();
        let writer = |n: usize| attached(&format!("h{n}"), MultiWriter, false);
        volume.attachments = (0..WRITERS_MAX).map(writer).collect();
        let refused = check_beside(&volume, &writer(WRITERS_MAX)).unwrap_err();
        assert!(refused.to_string().contains("16 nodes"), "{refused}");
        check_beside(&volume, &attached("reader", MultiWriter, true)).unwrap();
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for sharing in Sharing::ALL {
            assert_eq!(Sharing::read(sharing.as_str()).unwrap(), sharing);
        }
        assert!(Sharing::read("all").unwrap_err().to_string().starts_with("sharing:"));
    }
}
