//! Metrics by volume: which application is slow, and which one is not safe.
//!
//! A shard counts in plain integers of the volume that it serves, so no request takes a lock for them. They are copied
//! with each report to the controller, which is at most 5 s old. Their labels are the volume's name and what its
//! orchestrator calls it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use quoin_replication::primary::PrimaryStatus;
use quoin_telemetry::volume_labels::volume_labels;

use crate::metrics::KINDS;

/// Most volumes of a target that have metrics of their own: the first ones by name.
pub const VOLUMES_MAX: usize = 500;
/// Upper ends of the buckets of latencies, in microseconds; the last bucket has none.
const BUCKETS_US: [u64; 10] =
    [64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216];
/// Kinds of requests that have a histogram: reads, writes and flushes.
const TIMED: usize = 3;

/// Counts of the requests of one volume, since its target opened it.
#[derive(Clone, Default, Debug)]
pub struct Counts {
    /// Of each kind, in the order of [`KINDS`].
    requests: [u64; KINDS.len()],
    read_bytes: u64,
    written_bytes: u64,
    failed: u64,
    latencies: [Latency; TIMED],
}

#[derive(Clone, Default, Debug)]
struct Latency {
    /// Replies within each bucket and in none before it; the last: in none.
    within: [u64; BUCKETS_US.len() + 1],
    sum_us: u64,
}

impl Counts {
    /// Counts a request of a kind that reads or writes so many bytes.
    pub fn requested(&mut self, kind: u8, read_bytes: u64, written_bytes: u64) {
        self.requests[usize::from(kind)] += 1;
        self.read_bytes += read_bytes;
        self.written_bytes += written_bytes;
    }

    pub fn replied(&mut self, kind: u8, took: Duration, has_failed: bool) {
        self.failed += u64::from(has_failed);
        let Some(latency) = self.latencies.get_mut(usize::from(kind)) else { return };
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.iter().position(|end_us| took_us <= *end_us);
        latency.within[bucket.unwrap_or(BUCKETS_US.len())] += 1;
        latency.sum_us = latency.sum_us.saturating_add(took_us);
    }
}

/// A volume as it stands at a report.
#[derive(Clone, Debug)]
pub struct Standing {
    pub name: String,
    /// Names of it by its orchestrator: `pvc/name` and the like.
    pub claim: BTreeMap<String, String>,
    pub status: PrimaryStatus,
    pub counts: Counts,
}

/// Figures of one volume at its last report.
#[derive(Clone, Debug)]
struct Figures {
    labels: Vec<(String, String)>,
    counts: Counts,
    /// Entries that the replica which lacks most of them lacks.
    behind_entries: u64,
    is_waiting: bool,
}

/// Figures of the volumes of a target; cheap to clone.
#[derive(Clone, Default, Debug)]
pub struct VolumeMetrics(Arc<Mutex<BTreeMap<String, Figures>>>);

impl VolumeMetrics {
    /// Replaces all figures by those of these volumes.
    pub fn replace(&self, volumes: &[Standing]) {
        let mut all: BTreeMap<String, Figures> = BTreeMap::new();
        for Standing { name, claim, status, counts } in volumes {
            let figures = Figures {
                labels: volume_labels(name, claim),
                counts: counts.clone(),
                behind_entries: behind_entries(status),
                is_waiting: !status.waiting.is_empty(),
            };
            all.insert(name.clone(), figures);
            if all.len() > VOLUMES_MAX {
                all.pop_last();
            }
        }
        *self.figures() = all;
    }

    fn figures(&self) -> MutexGuard<'_, BTreeMap<String, Figures>> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

/// Entries that the replica which lacks most of them lacks; 0 for a volume that does not serve.
fn behind_entries(status: &PrimaryStatus) -> u64 {
    let last = status.last.lsn.0;
    let behind = status.replicas.iter().map(|replica| last.saturating_sub(replica.applied.0));
    behind.max().filter(|_| status.serving).unwrap_or(0)
}

impl Collector for VolumeMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let figures = self.figures();
        let all = || figures.values();
        let mut requests = encoder.encode_descriptor(
            "volume_requests",
            "Requests of a volume",
            None,
            MetricType::Counter,
        )?;
        for of in all() {
            for (kind, count) in KINDS.iter().zip(of.counts.requests) {
                let labels = with(&of.labels, ("operation", kind));
                ConstCounter::new(count).encode(requests.encode_family(&labels)?)?;
            }
        }
        type OfCounts = fn(&Counts) -> u64;
        let counters: [(&str, &str, Option<&Unit>, OfCounts); 3] = [
            ("volume_read", "Bytes read of a volume", Some(&Unit::Bytes), |c| c.read_bytes),
            ("volume_written", "Bytes written", Some(&Unit::Bytes), |c| c.written_bytes),
            ("volume_failed", "Requests answered with an error", None, |c| c.failed),
        ];
        for (name, help, unit, of_counts) in counters {
            let counter = MetricType::Counter;
            let mut descriptor = encoder.encode_descriptor(name, help, unit, counter)?;
            for of in all() {
                let counter = ConstCounter::new(of_counts(&of.counts));
                counter.encode(descriptor.encode_family(&of.labels)?)?;
            }
        }
        type OfFigures = fn(&Figures) -> u64;
        let gauges: [(&str, &str, OfFigures); 2] = [
            (
                "volume_replica_behind_entries",
                "Entries that the replica which lacks most of them lacks",
                |of| of.behind_entries,
            ),
            ("volume_waiting", "1 while the volume's IO waits", |of| u64::from(of.is_waiting)),
        ];
        for (name, help, of_figures) in gauges {
            let gauge = MetricType::Gauge;
            let mut descriptor = encoder.encode_descriptor(name, help, None, gauge)?;
            for of in all() {
                let gauge = ConstGauge::new(i64::try_from(of_figures(of)).unwrap_or(i64::MAX));
                gauge.encode(descriptor.encode_family(&of.labels)?)?;
            }
        }
        let mut latency = encoder.encode_descriptor(
            "volume_request_duration",
            "From taking a request of a volume to its reply",
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for of in all() {
            for (kind, latencies) in KINDS.iter().zip(&of.counts.latencies) {
                let labels = with(&of.labels, ("operation", kind));
                encode_latency(latencies, latency.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn with(labels: &[(String, String)], more: (&str, &str)) -> Vec<(String, String)> {
    let more = (more.0.to_owned(), more.1.to_owned());
    labels.iter().cloned().chain([more]).collect()
}

fn encode_latency(latency: &Latency, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
    let ends = BUCKETS_US.iter().map(|end_us| *end_us as f64 / 1e6).chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = ends.zip(latency.within).collect();
    let count = latency.within.iter().sum();
    encoder.encode_histogram::<NoLabelSet>(latency.sum_us as f64 / 1e6, count, &buckets, None)
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use quoin_replication::primary::{ReplicaStanding, ReplicaStatus};
    use quoin_types::Lsn;
    use quoin_types::membership::Member;

    use super::*;

    fn standing(name: &str) -> Standing {
        let claim = [("pvc/namespace", "shop"), ("pvc/name", "or\"ders"), ("pv/name", "pvc-1")];
        let replica = |applied| ReplicaStatus {
            member: Member::default(),
            standing: ReplicaStanding::InSync,
            applied: Lsn(applied),
            durable: Lsn(0),
            rebuilt_bytes: 0,
            rebuild_total_bytes: 0,
            write_took: None,
            slow: false,
        };
        let mut status = PrimaryStatus { serving: true, ..PrimaryStatus::default() };
        status.last.lsn = Lsn(100);
        status.replicas = vec![replica(100), replica(58), replica(90)];
        Standing {
            name: name.to_owned(),
            claim: claim.into_iter().map(|(key, name)| (key.to_owned(), name.to_owned())).collect(),
            status,
            counts: Counts::default(),
        }
    }

    fn shown(volumes: &[Standing]) -> String {
        let metrics = VolumeMetrics::default();
        metrics.replace(volumes);
        let mut registry = Registry::with_prefix("quoin_target");
        registry.register_collector(Box::new(metrics));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn a_volume_has_its_figures_under_its_name_and_its_claim() {
        let mut volume = standing("v");
        let counts = &mut volume.counts;
        counts.requested(0, 8192, 0);
        counts.requested(1, 0, 4096);
        counts.requested(1, 0, 4096);
        counts.replied(0, Duration::from_micros(64), false);
        counts.replied(1, Duration::from_micros(65), false);
        counts.replied(1, Duration::from_secs(60), true);
        let text = shown(&[volume]);
        let labels = "volume=\"v\",namespace=\"shop\",persistentvolumeclaim=\"or\\\"ders\",\
            persistentvolume=\"pvc-1\"";
        for (metric, value) in [
            (format!("requests_total{{{labels},operation=\"write\"}}"), "2"),
            (format!("read_bytes_total{{{labels}}}"), "8192"),
            (format!("written_bytes_total{{{labels}}}"), "8192"),
            (format!("failed_total{{{labels}}}"), "1"),
            (format!("replica_behind_entries{{{labels}}}"), "42"),
            (format!("waiting{{{labels}}}"), "0"),
            (format!("request_duration_seconds_count{{{labels},operation=\"write\"}}"), "2"),
            (
                format!(
                    "request_duration_seconds_bucket{{le=\"0.000064\",{labels},operation=\"read\"}}"
                ),
                "1",
            ),
            (
                format!(
                    "request_duration_seconds_bucket{{le=\"0.000064\",{labels},operation=\"write\"}}"
                ),
                "0",
            ),
            (
                format!(
                    "request_duration_seconds_bucket{{le=\"16.777216\",{labels},operation=\"write\"}}"
                ),
                "1",
            ),
            (
                format!(
                    "request_duration_seconds_bucket{{le=\"+Inf\",{labels},operation=\"write\"}}"
                ),
                "2",
            ),
        ] {
            let line = format!("quoin_target_volume_{metric} {value}");
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_volume_that_is_served_here_no_more_has_no_figures() {
        let metrics = VolumeMetrics::default();
        metrics.replace(&[standing("a"), standing("b")]);
        metrics.replace(&[standing("b")]);
        assert_eq!(metrics.figures().keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn more_volumes_than_the_limit_have_no_figures() {
        let volumes: Vec<Standing> =
            (0..=VOLUMES_MAX).rev().map(|n| standing(&format!("v{n:04}"))).collect();
        let metrics = VolumeMetrics::default();
        metrics.replace(&volumes);
        let figures = metrics.figures();
        assert_eq!(figures.len(), VOLUMES_MAX);
        assert!(
            figures.contains_key("v0000") && !figures.contains_key(&format!("v{VOLUMES_MAX:04}"))
        );
    }
}
