//! `quoin snapshot export`: a snapshot, or what changed in it, into a file, while the cluster runs.
//!
//! The file is the memory of how far the export is: the same command goes on where the last one ended,
//! whatever ended it. A raw image says nothing of that, so a small file lies beside it until it is
//! whole.

use anyhow::{Context, Result, anyhow, bail};
use quoin_api::control::{Snapshot, SnapshotPart, SnapshotRange};
use quoin_export::{DATA_BYTES_MAX, Header, Point, Record, Writer, scan};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufReader, BufWriter, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::get;
use super::pull::{Pull, Source};
use crate::client::{ClientOptions, Cluster, get_volume};
use crate::events::show_time;
use crate::output::{self, Format};
use crate::private_file;
use crate::size::show_size;

pub const HELP: &str = "Examples:\n  quoin snapshot export monday --to db.full\n  \
                        quoin snapshot export tuesday --since monday --to db.tuesday\n  \
                        quoin snapshot export monday --raw --to db.img\n\
                        Interrupted, the same command goes on where it was. quoin snapshot verify \
                        checks\nwhat was written, and quoin snapshot unpack makes a raw image of it. \
                        Of an encrypted\nvolume the bytes are written as they are stored: encrypted.";

/// Interval of lines about how far it is.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// Bytes after which what was written is made durable, so that a crash costs no more than them.
const SYNC_BYTES: u64 = 64 << 20;
/// Buffer of the file.
const BUFFER_BYTES: usize = 1 << 20;

#[derive(clap::Args)]
pub struct ExportOptions {
    /// The snapshot's name or id.
    snapshot: String,
    /// Only what changed since this older snapshot of the same volume, by its name or id.
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "raw")]
    since: Option<String>,
    /// The file to write. One that an interrupted export of the same left is gone on with; any other
    /// one is left alone.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// A raw image instead of Quoin's own format; holes stay holes.
    #[arg(long)]
    raw: bool,
}

/// Result of an export, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExportView {
    file: String,
    volume: String,
    snapshot: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    size_bytes: u64,
    data_bytes: u64,
    hole_bytes: u64,
    raw: bool,
    encrypted: bool,
}

impl ExportView {
    fn text(&self) -> String {
        let Self { file, volume, snapshot, data_bytes, hole_bytes, .. } = self;
        let data = show_size(*data_bytes);
        let mut text = match &self.since {
            Some(since) => format!(
                "what changed in snapshot {snapshot} of volume {volume} since {since} is in {file}: \
                 {data} of data, {} of holes",
                show_size(*hole_bytes)
            ),
            None => format!(
                "snapshot {snapshot} of volume {volume} is in {file}: {data} of data of {}",
                show_size(self.size_bytes)
            ),
        };
        if self.encrypted {
            text += "\nits bytes are encrypted, as they are stored";
        }
        if !self.raw {
            let file = output::quoted(file);
            text += &match &self.since {
                Some(_) => format!("\nnext: quoin snapshot verify {file}"),
                None => format!("\nnext: quoin snapshot unpack {file} --to IMAGE"),
            };
        }
        text
    }
}

/// Destination of an export.
trait Sink {
    /// Offset from which on the snapshot is missing; `None`: nothing is.
    fn next(&self) -> Option<u64>;
    /// Takes a part in, whose successor begins at `next`.
    fn take(&mut self, part: SnapshotPart) -> Result<()>;
    /// Makes what was taken in durable.
    fn sync(&mut self) -> Result<()>;
    /// Bytes of data that are in it, those of earlier runs included.
    fn data_bytes(&self) -> u64;
    /// Ends it; returns how many bytes of data and of holes are in it.
    fn end(self: Box<Self>) -> Result<(u64, u64)>;
}

pub async fn run(
    cluster: &mut Cluster,
    options: &ExportOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let snapshot = get(cluster, &options.snapshot).await?;
    let since = match &options.since {
        Some(since) => Some(get(cluster, since).await?),
        None => None,
    };
    if snapshot.phase == "Wished" {
        bail!("snapshot {} is not cut yet; it waits for {}", snapshot.name, snapshot.waiting_for);
    }
    if let Some(since) = &since {
        check_order(since, &snapshot)?;
    }
    let volume = get_volume(cluster, &snapshot.volume_id).await?;
    let encryption = volume.spec.and_then(|spec| spec.encryption);
    let encrypted = encryption.is_some();
    let mut sink: Box<dyn Sink> = match options.raw {
        true => Box::new(RawImage::open(&options.to, &snapshot)?),
        false => {
            let encryption = encryption.map(|message| {
                let encryption = quoin_encryption::Encryption::try_from(&message);
                let encryption = encryption.map_err(|rule| anyhow!("the volume's keys: {rule}"))?;
                Ok::<_, anyhow::Error>(serde_json::to_value(encryption)?)
            });
            let header = Header {
                volume: snapshot.volume_name.clone(),
                volume_id: snapshot.volume_id.clone(),
                point: point(&snapshot),
                since: since.as_ref().map(point),
                size_bytes: snapshot.size_bytes,
                encryption: encryption.transpose()?,
            };
            Box::new(Archive::open(&options.to, &header)?)
        }
    };
    let mut pull = Pull {
        cluster,
        client,
        snapshot: &snapshot,
        since: since.as_ref(),
        want_data: true,
        source: Source::default(),
    };
    copy(&mut pull, &mut *sink, &options.to).await?;
    let (data_bytes, hole_bytes) = sink.end()?;
    let view = ExportView {
        file: options.to.display().to_string(),
        volume: snapshot.volume_name.clone(),
        snapshot: snapshot.name.clone(),
        since: since.map(|since| since.name),
        size_bytes: snapshot.size_bytes,
        data_bytes,
        hole_bytes,
        raw: options.raw,
        encrypted,
    };
    output::print_one(format, &view, || view.text())
}

/// Copies all parts that the sink lacks.
async fn copy(pull: &mut Pull<'_>, sink: &mut dyn Sink, to: &Path) -> Result<()> {
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let (mut reported, mut unsynced) = (Instant::now(), 0);
    let size_bytes = pull.snapshot.size_bytes;
    while let Some(offset) = sink.next() {
        let part = tokio::select! {
            part = pull.part(offset) => part?,
            _ = interrupts.recv() => {
                sink.sync()?;
                bail!(Interrupted(to.display().to_string()));
            }
        };
        unsynced += part.ranges.iter().map(|range| range.data.len() as u64).sum::<u64>();
        sink.take(part)?;
        if unsynced >= SYNC_BYTES {
            sink.sync()?;
            unsynced = 0;
        }
        if reported.elapsed() >= REPORT_INTERVAL {
            let reached = sink.next().unwrap_or(size_bytes);
            let percent = u128::from(reached) * 100 / u128::from(size_bytes.max(1));
            let data = show_size(sink.data_bytes());
            eprintln!("{percent} % of the snapshot are through; {data} of data are in the file");
            reported = Instant::now();
        }
    }
    Ok(())
}

/// Interruption of an export by Ctrl-C.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: what is in {0} stays, and the same command goes on from there")]
pub struct Interrupted(String);

/// # Errors
/// They are not two snapshots of one volume in their order.
fn check_order(since: &Snapshot, snapshot: &Snapshot) -> Result<()> {
    if since.volume_id != snapshot.volume_id {
        bail!(
            "--since: snapshot {} is of volume {}, and {} of volume {}",
            since.name,
            since.volume_name,
            snapshot.name,
            snapshot.volume_name
        );
    }
    if since.lsn >= snapshot.lsn {
        bail!(
            "--since: snapshot {} was not cut before {}; exchange the two",
            since.name,
            snapshot.name
        );
    }
    Ok(())
}

fn point(snapshot: &Snapshot) -> Point {
    Point {
        snapshot: snapshot.name.clone(),
        snapshot_id: snapshot.id.clone(),
        lsn: snapshot.lsn,
        cut_at: snapshot.cut_at.as_ref().map(show_time).unwrap_or_default(),
    }
}

fn cannot_create(to: &Path, error: &std::io::Error) -> anyhow::Error {
    anyhow!("cannot create {} ({error}): correct --to", to.display())
}

/// A file of Quoin's own format.
struct Archive {
    writer: Writer<BufWriter<File>>,
    size_bytes: u64,
    gathered: Gathered,
    next: Option<u64>,
    is_complete: bool,
}

impl Archive {
    fn open(to: &Path, header: &Header) -> Result<Self> {
        let buffered = |file| BufWriter::with_capacity(BUFFER_BYTES, file);
        let size_bytes = header.size_bytes;
        let file = match private_file::create_new(to) {
            Ok(file) => {
                let writer = Writer::begin(buffered(file), header)?;
                return Ok(Self::begun(writer, size_bytes));
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                private_file::open_own(to)
            }
            Err(error) => return Err(cannot_create(to, &error)),
        };
        let mut file = file.map_err(|error| cannot_create(to, &error))?;
        let other = |why: String| {
            anyhow!("{} exists already, and {why}: name another file with --to", to.display())
        };
        let found = match scan(BufReader::with_capacity(BUFFER_BYTES, &file)) {
            Ok(found) => Some(found),
            // It ended within its header.
            Err(quoin_export::Error::CutOff { .. }) => None,
            Err(error) => return Err(other(error.to_string())),
        };
        let Some(found) = found else {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            let writer = Writer::begin(buffered(file), header)?;
            return Ok(Self::begun(writer, size_bytes));
        };
        if !is_of_same(&found.header, header) {
            let of = &found.header;
            let since = of.since.as_ref().map(|since| format!(" since {}", since.snapshot));
            return Err(other(format!(
                "is of snapshot {}{} of volume {}",
                of.point.snapshot,
                since.unwrap_or_default(),
                of.volume
            )));
        }
        let next = (!found.is_complete).then_some(found.totals.reached);
        if !found.is_complete {
            file.set_len(found.whole_bytes)?;
            eprintln!("goes on with {}, which has {}", to.display(), show_size(found.whole_bytes));
        }
        file.seek(SeekFrom::Start(found.whole_bytes))?;
        let writer = Writer::resume(buffered(file), &found);
        let is_complete = found.is_complete;
        Ok(Self { writer, size_bytes, gathered: Gathered::default(), next, is_complete })
    }

    fn begun(writer: Writer<BufWriter<File>>, size_bytes: u64) -> Self {
        let (next, is_complete) = (Some(0), false);
        Self { writer, size_bytes, gathered: Gathered::default(), next, is_complete }
    }
}

/// Keys may have been added since, and the volume been named otherwise.
fn is_of_same(one: &Header, other: &Header) -> bool {
    let id = |since: &Option<Point>| since.as_ref().map(|since| since.snapshot_id.clone());
    one.point.snapshot_id == other.point.snapshot_id
        && id(&one.since) == id(&other.since)
        && one.size_bytes == other.size_bytes
}

/// Records of ranges: neighbours are one record, and one of data ends at each multiple of its greatest
/// length. So a file is the same whatever parts its content came in.
#[derive(Default)]
struct Gathered {
    last: Option<Record>,
}

impl Gathered {
    /// Adds a range; returns the records that are complete.
    fn add(&mut self, range: SnapshotRange) -> Vec<Record> {
        let mut complete = Vec::new();
        if range.hole {
            self.add_piece(
                Record::Hole { offset: range.offset, length: range.length },
                &mut complete,
            );
            return complete;
        }
        let (mut offset, mut data) = (range.offset, &range.data[..]);
        while !data.is_empty() {
            let until_end = DATA_BYTES_MAX - (offset % DATA_BYTES_MAX as u64) as usize;
            let (piece, rest) = data.split_at(until_end.min(data.len()));
            self.add_piece(Record::Data { offset, data: piece.to_vec() }, &mut complete);
            (offset, data) = (offset + piece.len() as u64, rest);
        }
        complete
    }

    fn add_piece(&mut self, piece: Record, complete: &mut Vec<Record>) {
        let begin = piece.range().0;
        let is_next = self.last.as_ref().is_some_and(|last| last.range().1 == begin);
        match (&mut self.last, piece) {
            (Some(Record::Hole { length, .. }), Record::Hole { length: more, .. }) if is_next => {
                *length += more;
            }
            (Some(Record::Data { data, .. }), Record::Data { data: more, .. })
                if is_next && !begin.is_multiple_of(DATA_BYTES_MAX as u64) =>
            {
                data.extend_from_slice(&more);
            }
            (last, piece) => complete.extend(last.replace(piece)),
        }
    }
}

impl Sink for Archive {
    fn next(&self) -> Option<u64> {
        self.next.filter(|next| *next < self.size_bytes)
    }

    fn take(&mut self, part: SnapshotPart) -> Result<()> {
        for range in part.ranges {
            for record in self.gathered.add(range) {
                self.writer.record(&record)?;
            }
        }
        self.next = part.next_offset;
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.writer.flush()?;
        self.writer.get_ref().get_ref().sync_data().context("write the file")
    }

    fn data_bytes(&self) -> u64 {
        self.writer.totals().data_bytes
    }

    fn end(mut self: Box<Self>) -> Result<(u64, u64)> {
        if let Some(record) = self.gathered.last.take() {
            self.writer.record(&record)?;
        }
        let totals = *self.writer.totals();
        if !self.is_complete {
            let file = self.writer.end()?;
            file.get_ref().sync_all().context("write the file")?;
        }
        Ok((totals.data_bytes, totals.hole_bytes))
    }
}

/// How far a raw image is; lies beside it until it is whole.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Progress {
    snapshot_id: String,
    next: u64,
    data_bytes: u64,
}

/// A raw image.
struct RawImage {
    file: File,
    progress: Progress,
    progress_path: PathBuf,
    size_bytes: u64,
    next: Option<u64>,
}

impl RawImage {
    fn open(to: &Path, snapshot: &Snapshot) -> Result<Self> {
        let mut name = to.as_os_str().to_owned();
        name.push(".progress");
        let progress_path = PathBuf::from(name);
        let (file, progress) = match private_file::create_new(to) {
            Ok(file) => {
                file.set_len(snapshot.size_bytes).context("set the image's size")?;
                let snapshot_id = snapshot.id.clone();
                (file, Progress { snapshot_id, next: 0, data_bytes: 0 })
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let progress = private_file::read_own(&progress_path).ok();
                let progress = progress.and_then(|json| serde_json::from_slice(&json).ok());
                let Some(progress) = progress.filter(|p: &Progress| p.snapshot_id == snapshot.id)
                else {
                    bail!(
                        "{} exists already, and is no export of this snapshot that was interrupted: \
                         name another file with --to, or remove it",
                        to.display()
                    );
                };
                eprintln!("goes on with {} at byte {}", to.display(), progress.next);
                let file = private_file::open_own(to);
                (file.map_err(|error| cannot_create(to, &error))?, progress)
            }
            Err(error) => return Err(cannot_create(to, &error)),
        };
        let next = Some(progress.next);
        let mut image =
            Self { file, progress, progress_path, size_bytes: snapshot.size_bytes, next };
        image.sync()?;
        Ok(image)
    }
}

impl Sink for RawImage {
    fn next(&self) -> Option<u64> {
        self.next.filter(|next| *next < self.size_bytes)
    }

    fn take(&mut self, part: SnapshotPart) -> Result<()> {
        for range in &part.ranges {
            if range.offset.saturating_add(range.data.len() as u64) > self.size_bytes {
                bail!("the controller's answer cannot be: bytes behind the end of the snapshot");
            }
            self.file.write_all_at(&range.data, range.offset).context("write the image")?;
            self.progress.data_bytes += range.data.len() as u64;
        }
        self.next = part.next_offset;
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.file.sync_data().context("write the image")?;
        self.progress.next = self.next.unwrap_or(self.size_bytes);
        let json = serde_json::to_vec(&self.progress)?;
        private_file::replace(&self.progress_path, &json)
            .with_context(|| format!("write {}", self.progress_path.display()))
    }

    fn data_bytes(&self) -> u64 {
        self.progress.data_bytes
    }

    fn end(self: Box<Self>) -> Result<(u64, u64)> {
        self.file.sync_all().context("write the image")?;
        std::fs::remove_file(&self.progress_path)
            .with_context(|| format!("remove {}", self.progress_path.display()))?;
        Ok((self.progress.data_bytes, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 4096;

    fn snapshot() -> Snapshot {
        Snapshot {
            id: "5a".into(),
            name: "s".into(),
            volume_name: "db".into(),
            lsn: 9,
            size_bytes: 16 * BLOCK,
            ..Snapshot::default()
        }
    }

    fn header(since: Option<Point>) -> Header {
        Header {
            volume: "db".into(),
            volume_id: "f01".into(),
            point: point(&snapshot()),
            since,
            size_bytes: 16 * BLOCK,
            encryption: None,
        }
    }

    fn part(lba: u64, next: Option<u64>) -> SnapshotPart {
        let range = SnapshotRange {
            offset: lba * BLOCK,
            length: BLOCK,
            data: vec![lba as u8; BLOCK as usize],
            ..SnapshotRange::default()
        };
        let next_offset = next.map(|next| next * BLOCK);
        SnapshotPart { ranges: vec![range], next_offset, ..SnapshotPart::default() }
    }

    #[test]
    fn an_export_goes_on_with_its_own_file_alone_and_a_whole_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("db.full");
        let mut first = Archive::open(&to, &header(None)).unwrap();
        first.take(part(1, Some(3))).unwrap();
        // The last record may go on in the next part, and is written with it.
        first.take(part(4, Some(5))).unwrap();
        first.sync().unwrap();
        drop(first);
        let other = header(Some(Point { snapshot_id: "59".into(), lsn: 3, ..point(&snapshot()) }));
        let refused = Archive::open(&to, &other).err().unwrap().to_string();
        assert!(refused.contains("is of snapshot s of volume db"), "{refused}");
        let mut second = Archive::open(&to, &header(None)).unwrap();
        assert_eq!(second.next(), Some(2 * BLOCK), "behind its last record");
        second.take(part(5, None)).unwrap();
        assert_eq!(second.next(), None);
        assert_eq!(Box::new(second).end().unwrap(), (2 * BLOCK, 0));
        let whole = std::fs::read(&to).unwrap();
        let third = Archive::open(&to, &header(None)).unwrap();
        assert_eq!(third.next(), None);
        Box::new(third).end().unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), whole);
    }

    #[test]
    fn a_file_that_is_no_export_is_left_alone_and_an_empty_one_is_begun() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("notes.txt");
        std::fs::write(&to, "what somebody wrote").unwrap();
        assert!(Archive::open(&to, &header(None)).is_err());
        assert_eq!(std::fs::read(&to).unwrap(), b"what somebody wrote");
        std::fs::write(&to, "").unwrap();
        assert_eq!(Archive::open(&to, &header(None)).unwrap().next(), Some(0));
    }

    #[test]
    fn a_raw_image_goes_on_where_it_was_synced_and_has_no_file_beside_it_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("db.img");
        let mut first = RawImage::open(&to, &snapshot()).unwrap();
        first.take(part(1, Some(4))).unwrap();
        first.sync().unwrap();
        drop(first);
        let of_another = Snapshot { id: "5b".into(), ..snapshot() };
        assert!(RawImage::open(&to, &of_another).is_err());
        let mut second = RawImage::open(&to, &snapshot()).unwrap();
        assert_eq!(second.next(), Some(4 * BLOCK));
        second.take(part(7, None)).unwrap();
        assert_eq!(Box::new(second).end().unwrap(), (2 * BLOCK, 0));
        let image = std::fs::read(&to).unwrap();
        assert_eq!(image.len() as u64, 16 * BLOCK);
        let at = |lba: u64| image[(lba * BLOCK) as usize];
        assert_eq!((at(0), at(1), at(7), at(8)), (0, 1, 7, 0));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(RawImage::open(&to, &snapshot()).is_err(), "a whole image is not written over");
    }

    #[test]
    fn the_records_are_the_same_whatever_parts_their_content_came_in() {
        let range = |lba: u64, blocks: u64, hole: bool| SnapshotRange {
            offset: lba * BLOCK,
            length: blocks * BLOCK,
            hole,
            data: if hole { Vec::new() } else { vec![lba as u8; (blocks * BLOCK) as usize] },
            ..SnapshotRange::default()
        };
        let of = |ranges: Vec<SnapshotRange>| -> Vec<(u64, u64)> {
            let mut gathered = Gathered::default();
            let complete: Vec<Record> = ranges.into_iter().flat_map(|r| gathered.add(r)).collect();
            let all = complete.into_iter().chain(gathered.last);
            all.map(|record| record.range()).map(|(a, b)| (a / BLOCK, b / BLOCK)).collect()
        };
        let most = DATA_BYTES_MAX as u64 / BLOCK;
        let whole = of(vec![range(2, most + 3, false), range(most + 5, 9, true)]);
        assert_eq!(whole, [(2, most), (most, most + 5), (most + 5, most + 14)]);
        let parts = vec![
            range(2, 3, false),
            range(5, most - 4, false),
            range(most + 1, 4, false),
            range(most + 5, 2, true),
            range(most + 7, 7, true),
        ];
        assert_eq!(of(parts), whole);
        assert_eq!(of(vec![range(2, 1, false), range(4, 1, false)]), [(2, 3), (4, 5)], "a gap");
    }

    /// Content of a snapshot of 16 blocks by its last block: data, a hole and nothing at all, and what an export of
    /// it gets in parts that end at every block, of which each second one has nothing.
    fn parts_of(content: &[(u64, u64, bool)]) -> Vec<SnapshotPart> {
        let mut parts = Vec::new();
        for lba in 0..16 {
            let within =
                |(begin, blocks, _): &&(u64, u64, bool)| (*begin..begin + blocks).contains(&lba);
            let found = content.iter().find(within);
            let ranges = found.map(|(_, _, hole)| SnapshotRange {
                offset: lba * BLOCK,
                length: BLOCK,
                hole: *hole,
                data: if *hole { Vec::new() } else { vec![lba as u8 + 1; BLOCK as usize] },
                ..SnapshotRange::default()
            });
            let next_offset = (lba < 15).then_some((lba + 1) * BLOCK);
            let ranges = ranges.into_iter().collect();
            parts.push(SnapshotPart { ranges, next_offset, ..SnapshotPart::default() });
        }
        parts
    }

    /// Gives a sink the parts that it lacks, until as many were given; returns whether it has all.
    fn feed(sink: &mut dyn Sink, parts: &[SnapshotPart], mut count: usize) -> bool {
        while let Some(next) = sink.next() {
            if count == 0 {
                return false;
            }
            count -= 1;
            assert!(next.is_multiple_of(BLOCK));
            sink.take(parts[(next / BLOCK) as usize].clone()).unwrap();
        }
        true
    }

    #[test]
    fn an_export_is_whole_with_empty_parts_in_its_middle_and_its_last_block_wherever_it_was_cut() {
        let contents: [&[(u64, u64, bool)]; 7] = [
            &[],
            &[(15, 1, false)],
            &[(15, 1, true)],
            &[(0, 16, false)],
            &[(0, 16, true)],
            &[(0, 1, false), (3, 2, true), (5, 1, false), (15, 1, false)],
            &[(2, 3, false), (5, 4, true), (14, 2, true)],
        ];
        let dir = tempfile::tempdir().unwrap();
        for (number, content) in contents.iter().enumerate() {
            let parts = parts_of(content);
            let of_kind = |is_hole: bool| -> u64 {
                content
                    .iter()
                    .filter(|(_, _, hole)| *hole == is_hole)
                    .map(|one| one.1 * BLOCK)
                    .sum()
            };
            let figures = (of_kind(false), of_kind(true));
            let at_once = dir.path().join(format!("{number}.whole"));
            let mut sink = Archive::open(&at_once, &header(None)).unwrap();
            assert!(feed(&mut sink, &parts, usize::MAX));
            assert_eq!(Box::new(sink).end().unwrap(), figures, "{content:?}");
            let whole = std::fs::read(&at_once).unwrap();
            let read = scan(&whole[..]).unwrap();
            assert!(read.is_complete);
            assert_eq!((read.totals.data_bytes, read.totals.hole_bytes), figures);
            for interrupted in 0..=parts.len() {
                for lost in [0_usize, 1, 27, 28, 29, 5000] {
                    let to = dir.path().join("resumed");
                    let mut first = Archive::open(&to, &header(None)).unwrap();
                    feed(&mut first, &parts, interrupted);
                    first.sync().unwrap();
                    drop(first);
                    let length = std::fs::metadata(&to).unwrap().len();
                    let file = File::options().write(true).open(&to).unwrap();
                    file.set_len(length.saturating_sub(lost as u64)).unwrap();
                    let mut second = Archive::open(&to, &header(None)).unwrap();
                    assert!(feed(&mut second, &parts, usize::MAX));
                    assert_eq!(Box::new(second).end().unwrap(), figures);
                    let what =
                        format!("{content:?} cut after {interrupted} parts and {lost} bytes");
                    assert_eq!(std::fs::read(&to).unwrap(), whole, "{what}");
                    std::fs::remove_file(&to).unwrap();
                }
            }
            let image = dir.path().join("image");
            for interrupted in 0..=parts.len() {
                let mut first = RawImage::open(&image, &snapshot()).unwrap();
                feed(&mut first, &parts, interrupted);
                first.sync().unwrap();
                drop(first);
                let mut second = RawImage::open(&image, &snapshot()).unwrap();
                assert!(feed(&mut second, &parts, usize::MAX));
                assert_eq!(Box::new(second).end().unwrap(), (figures.0, 0));
                let bytes = std::fs::read(&image).unwrap();
                assert_eq!(bytes.len() as u64, 16 * BLOCK);
                for (lba, block) in bytes.chunks(BLOCK as usize).enumerate() {
                    let is_data = |(begin, blocks, hole): &&(u64, u64, bool)| {
                        (*begin..begin + blocks).contains(&(lba as u64)) && !hole
                    };
                    let fill = content.iter().find(is_data).map_or(0, |_| lba as u8 + 1);
                    assert!(block.iter().all(|byte| *byte == fill), "{content:?} {lba}");
                }
                std::fs::remove_file(&image).unwrap();
            }
        }
    }

    #[test]
    fn a_raw_image_takes_the_last_block_and_nothing_behind_it() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("db.img");
        let mut image = RawImage::open(&to, &snapshot()).unwrap();
        image.take(part(15, None)).unwrap();
        let refused = image.take(part(16, None)).unwrap_err().to_string();
        assert!(refused.contains("behind the end"), "{refused}");
        let mut far = part(16, None);
        far.ranges[0].offset = u64::MAX - BLOCK + 1;
        assert!(image.take(far).is_err());
        assert_eq!(std::fs::metadata(&to).unwrap().len(), 16 * BLOCK);
        let mut archive = Archive::open(&dir.path().join("db.full"), &header(None)).unwrap();
        // The last range is written with the one behind it, or at the end.
        archive.take(part(16, None)).unwrap();
        assert!(Box::new(archive).end().is_err());
    }

    #[test]
    fn a_file_of_another_size_or_since_another_snapshot_is_not_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("db.full");
        let since = |id: &str| Some(Point { snapshot_id: id.into(), lsn: 3, ..point(&snapshot()) });
        for (first, second, is_same) in [
            (header(None), header(None), true),
            (header(since("59")), header(since("59")), true),
            (header(since("59")), header(since("58")), false),
            (header(since("59")), header(None), false),
            (header(None), header(since("59")), false),
            (header(None), Header { size_bytes: 17 * BLOCK, ..header(None) }, false),
            (header(None), Header { volume: "renamed".into(), ..header(None) }, true),
            (
                header(None),
                Header {
                    point: Point { snapshot_id: "5b".into(), ..header(None).point },
                    ..header(None)
                },
                false,
            ),
        ] {
            let mut sink = Archive::open(&to, &first).unwrap();
            sink.sync().unwrap();
            drop(sink);
            let before = std::fs::read(&to).unwrap();
            assert_eq!(Archive::open(&to, &second).is_ok(), is_same, "{second:?}");
            assert_eq!(std::fs::read(&to).unwrap(), before);
            std::fs::remove_file(&to).unwrap();
        }
    }

    #[test]
    fn two_snapshots_in_the_wrong_order_are_refused_with_the_flag() {
        let older = Snapshot { lsn: 3, ..snapshot() };
        assert!(check_order(&older, &snapshot()).is_ok());
        let refused = check_order(&snapshot(), &older).unwrap_err().to_string();
        assert!(refused.contains("--since"), "{refused}");
        assert!(check_order(&snapshot(), &snapshot()).is_err(), "it is the same one");
        let of_another = Snapshot { volume_id: "f02".into(), ..older };
        assert!(check_order(&of_another, &snapshot()).is_err());
    }
}
