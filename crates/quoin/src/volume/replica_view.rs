//! Replicas as commands print them.

use quoin_api::control::Replica;
use quoin_types::Epoch;
use serde::Serialize;

use crate::output::Row;
use crate::size::show_size;

/// A copy of a volume.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaView {
    pub volume: String,
    pub id: String,
    pub guid: String,
    pub pool: String,
    pub node: String,
    #[serde(flatten)]
    standing: StandingView,
    pub position: String,
    pub used_bytes: u64,
    #[serde(flatten)]
    rebuild: RebuildView,
    #[serde(flatten)]
    repairs: RepairsView,
    #[serde(flatten)]
    writes: WritesView,
}

/// How a replica counts, and why it is where it is.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StandingView {
    phase: String,
    quorum: bool,
    /// On the known list.
    known: bool,
    /// Set if it is to leave, or if another one takes its place.
    leaving: bool,
    /// Cause of its creation here, where no user asked for it: healing or drain.
    cause: String,
    message: String,
}

/// Progress of a rebuild.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RebuildView {
    rebuilt_bytes: u64,
    rebuild_total_bytes: u64,
}

impl RebuildView {
    /// The progress in words; empty where nothing is known of it.
    fn sentence(&self) -> String {
        if self.rebuild_total_bytes == 0 {
            return String::new();
        }
        let percent =
            self.rebuilt_bytes.min(self.rebuild_total_bytes) * 100 / self.rebuild_total_bytes;
        format!("{percent}% of {}", show_size(self.rebuild_total_bytes))
    }
}

/// Bad blocks of a replica.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RepairsView {
    /// Known to be bad and not repaired yet.
    bad_blocks: u64,
    /// Bad copies that were replaced since the pool was started.
    repaired: u64,
}

/// Speed of a replica's writes.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WritesView {
    /// Average time to apply a write; 0: not known.
    write_us: u64,
    /// Set if that is much longer than the others take.
    slow: bool,
}

impl WritesView {
    /// Average time of a write, in words; empty where it is not known.
    fn time(&self) -> String {
        match self.write_us {
            0 => String::new(),
            us => format!("writes take {:.1} ms", us as f64 / 1000.0),
        }
    }

    fn cell(&self) -> String {
        [if self.slow { "slow, " } else { "" }, &self.time()].concat()
    }
}

impl From<Replica> for ReplicaView {
    fn from(replica: Replica) -> Self {
        Self {
            volume: replica.volume_name,
            id: replica.replica_id,
            guid: replica.guid,
            pool: replica.pool,
            node: replica.node,
            standing: StandingView {
                phase: replica.phase,
                quorum: replica.quorum,
                known: replica.known,
                leaving: replica.leaving,
                cause: replica.cause,
                message: replica.message,
            },
            position: format!("{}.{}", Epoch(replica.position_epoch), replica.position_lsn),
            used_bytes: replica.used_bytes,
            rebuild: RebuildView {
                rebuilt_bytes: replica.rebuilt_bytes,
                rebuild_total_bytes: replica.rebuild_total_bytes,
            },
            repairs: RepairsView { bad_blocks: replica.bad_blocks, repaired: replica.repaired },
            writes: WritesView { write_us: replica.write_us, slow: replica.slow },
        }
    }
}

impl ReplicaView {
    fn progress(&self) -> String {
        match self.standing.phase == "Rebuilding" {
            true => self.rebuild.sentence(),
            false => String::new(),
        }
    }

    /// Returns true if it is on the known list and has everything.
    pub fn counts_and_is_in_sync(&self) -> bool {
        self.standing.known && self.standing.phase == "InSync"
    }

    pub fn is_slow(&self) -> bool {
        self.writes.slow
    }

    pub fn sentence(&self) -> String {
        let StandingView { phase, leaving, message, .. } = &self.standing;
        let leaving = if *leaving { "leaving" } else { "" };
        let slow = if self.writes.slow { self.writes.cell() } else { String::new() };
        let more = [self.progress(), leaving.into(), slow, message.clone()];
        let more: Vec<_> =
            more.iter().filter(|part| !part.is_empty()).map(String::as_str).collect();
        let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join("; ")) };
        format!("{} in pool {} on {}: {phase}{more}", self.id, self.pool, self.node)
    }
}

impl Row for ReplicaView {
    const HEADER: &'static [&'static str] = &[
        "VOLUME", "POOL", "NODE", "PHASE", "QUORUM", "USED", "PROGRESS", "MESSAGE", "WRITES",
        "POSITION", "REPLICA", "GUID",
    ];
    const NARROW: usize = 8;

    fn cells(&self) -> Vec<String> {
        vec![
            self.volume.clone(),
            self.pool.clone(),
            self.node.clone(),
            self.standing.phase.clone(),
            if self.standing.quorum { "on" } else { "off" }.into(),
            show_size(self.used_bytes),
            self.progress(),
            self.standing.message.clone(),
            self.writes.cell(),
            self.position.clone(),
            self.id.clone(),
            self.guid.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rebuilding() -> Replica {
        Replica {
            replica_id: "aabb01".into(),
            pool: "pool-a".into(),
            node: "n1".into(),
            phase: "Rebuilding".into(),
            rebuilt_bytes: 1 << 20,
            rebuild_total_bytes: 4 << 20,
            leaving: true,
            write_us: 1500,
            slow: true,
            message: "bad: 1 block".into(),
            ..Replica::default()
        }
    }

    /// Scripts read them by their names.
    #[test]
    fn a_replicas_fields_lie_side_by_side_in_json_whatever_part_has_them() {
        let json = serde_json::to_value(ReplicaView::from(rebuilding())).unwrap();
        let mut names: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        let wanted = [
            "badBlocks",
            "cause",
            "guid",
            "id",
            "known",
            "leaving",
            "message",
            "node",
            "phase",
            "pool",
            "position",
            "quorum",
            "rebuildTotalBytes",
            "rebuiltBytes",
            "repaired",
            "slow",
            "usedBytes",
            "volume",
            "writeUs",
        ];
        assert_eq!(names, wanted);
        assert_eq!((&json["rebuiltBytes"], &json["slow"]), (&(1 << 20).into(), &true.into()));
    }

    #[test]
    fn a_replica_in_words_has_its_progress_only_while_it_is_rebuilt() {
        let words = ReplicaView::from(rebuilding()).sentence();
        let parts = "Rebuilding (25% of 4.0 MiB; leaving; slow, writes take 1.5 ms; bad: 1 block)";
        assert_eq!(words, format!("aabb01 in pool pool-a on n1: {parts}"));
        let in_sync = Replica { phase: "InSync".into(), slow: false, ..rebuilding() };
        let words = ReplicaView::from(in_sync).sentence();
        assert_eq!(words, "aabb01 in pool pool-a on n1: InSync (leaving; bad: 1 block)");
    }
}
