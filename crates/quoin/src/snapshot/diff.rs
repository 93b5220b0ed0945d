//! `quoin snapshot diff`: ranges that differ between two snapshots.

use anyhow::{Result, bail};
use quoin_api::control::SnapshotPart;
use serde::Serialize;

use super::get_of;
use super::pull::{Pull, Source};
use crate::client::{ClientOptions, Cluster, get_volume};
use crate::output::{self, Format, Row};
use crate::size::show_size;

pub const HELP: &str = "Example:\n  quoin snapshot diff db monday tuesday\n\
                        A range is of whole blocks of 4 KiB that were written, or became a hole, \
                        between the two.";

/// Ranges of one list. Neighbours are one range, so it takes a volume of some TiB to have more.
const RANGES_MAX: usize = 4_000_000;

#[derive(clap::Args)]
pub struct DiffOptions {
    /// The volume's name or id.
    volume: String,
    /// The older snapshot's name or id.
    from: String,
    /// The newer snapshot's name or id.
    to: String,
}

/// A range as `-o json` has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RangeView {
    offset: u64,
    length: u64,
    /// "data", or "hole": it reads as zeroes in the newer snapshot.
    change: &'static str,
}

impl Row for RangeView {
    const HEADER: &'static [&'static str] = &["OFFSET", "LENGTH", "CHANGE"];
    const NARROW: usize = 3;

    fn cells(&self) -> Vec<String> {
        vec![self.offset.to_string(), self.length.to_string(), self.change.to_owned()]
    }
}

/// All ranges as `-o json` has them; offsets and lengths in bytes.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DiffView {
    volume: String,
    from: String,
    to: String,
    size_bytes: u64,
    changed_bytes: u64,
    ranges: Vec<RangeView>,
}

/// Adds the ranges of a part; neighbours of one kind become one.
fn add(ranges: &mut Vec<RangeView>, part: &SnapshotPart) {
    for range in &part.ranges {
        let change = if range.hole { "hole" } else { "data" };
        match ranges.last_mut() {
            Some(last) if last.change == change && last.offset + last.length == range.offset => {
                last.length += range.length;
            }
            _ => ranges.push(RangeView { offset: range.offset, length: range.length, change }),
        }
    }
}

pub async fn run(
    cluster: &mut Cluster,
    options: &DiffOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let from = get_of(cluster, &volume, &options.from).await?;
    let to = get_of(cluster, &volume, &options.to).await?;
    let (since, source) = (Some(&from), Source::default());
    let mut pull = Pull { cluster, client, snapshot: &to, since, want_data: false, source };
    let (mut ranges, mut offset) = (Vec::new(), Some(0));
    let mut size_bytes = to.size_bytes;
    while let Some(at) = offset {
        let part = pull.part(at).await?;
        add(&mut ranges, &part);
        if ranges.len() > RANGES_MAX {
            bail!(
                "they differ in more than {RANGES_MAX} ranges: `quoin snapshot export --since` writes \
                 them into a file"
            );
        }
        (size_bytes, offset) = (part.size_bytes, part.next_offset);
    }
    let changed_bytes = ranges.iter().map(|range| range.length).sum();
    let (volume, from, to) = (from.volume_name, from.name, to.name);
    let view = DiffView { volume, from, to, size_bytes, changed_bytes, ranges };
    if matches!(format, Format::Json | Format::Yaml) {
        return output::print_one(format, &view, String::new);
    }
    output::print_list(format, &view.ranges, "nothing differs")?;
    if view.ranges.is_empty() {
        return Ok(());
    }
    output::print_line(&format!(
        "{} of {} differ, in {} range{}",
        show_size(changed_bytes),
        show_size(size_bytes),
        view.ranges.len(),
        if view.ranges.len() == 1 { "" } else { "s" }
    ))
}

#[cfg(test)]
mod tests {
    use quoin_api::control::SnapshotRange;

    use super::*;

    #[test]
    fn neighbours_of_one_kind_are_one_range_also_over_two_parts() {
        let range = |offset, length, hole| SnapshotRange {
            offset,
            length,
            hole,
            ..SnapshotRange::default()
        };
        let part = |ranges| SnapshotPart { ranges, ..SnapshotPart::default() };
        let mut all = Vec::new();
        add(&mut all, &part(vec![range(0, 4096, false), range(4096, 4096, true)]));
        add(&mut all, &part(vec![range(8192, 4096, true), range(20480, 4096, true)]));
        let of = |range: &RangeView| (range.offset, range.length, range.change);
        let found: Vec<_> = all.iter().map(of).collect();
        assert_eq!(found, [(0, 4096, "data"), (4096, 8192, "hole"), (20480, 4096, "hole")]);
        assert_eq!(all[0].cells().len(), RangeView::HEADER.len());
    }
}
