//! `quoin snapshot verify | unpack`: files of exported snapshots, without a cluster.

use anyhow::{Context, Result, anyhow, bail};
use quoin_export::{Header, Reader, Record};
use serde::Serialize;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::output::{self, Format};
use crate::private_file::Beside;
use crate::size::show_size;

const BUFFER_BYTES: usize = 1 << 20;
/// Zeroes that are written at once where a file system makes no holes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

#[derive(clap::Args)]
pub struct UnpackOptions {
    /// A whole export, and then exports of the changes since, each since the one before it.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The raw image to write; must not exist. Holes stay holes.
    #[arg(long, value_name = "IMAGE")]
    to: PathBuf,
}

/// A file as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FileView {
    file: String,
    volume: String,
    volume_id: String,
    snapshot: String,
    snapshot_id: String,
    cut_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    size_bytes: u64,
    data_bytes: u64,
    hole_bytes: u64,
    encrypted: bool,
}

impl FileView {
    fn of(file: &Path, reader: &Reader<BufReader<File>>) -> Self {
        let (header, totals) = (reader.header(), reader.totals());
        Self {
            file: file.display().to_string(),
            volume: header.volume.clone(),
            volume_id: header.volume_id.clone(),
            snapshot: header.point.snapshot.clone(),
            snapshot_id: header.point.snapshot_id.clone(),
            cut_at: header.point.cut_at.clone(),
            since: header.since.as_ref().map(|since| since.snapshot.clone()),
            size_bytes: header.size_bytes,
            data_bytes: totals.data_bytes,
            hole_bytes: totals.hole_bytes,
            encrypted: header.encryption.is_some(),
        }
    }

    fn text(&self) -> String {
        let since = match &self.since {
            Some(since) => format!("what changed since {since}"),
            None => "whole".to_owned(),
        };
        let Self { file, volume, snapshot, cut_at, .. } = self;
        let encrypted = if self.encrypted { ", encrypted" } else { "" };
        output::plain(&format!(
            "{file} is sound: snapshot {snapshot} of volume {volume}, as of {cut_at}, {since}; {} of \
             data of {}{encrypted}",
            show_size(self.data_bytes),
            show_size(self.size_bytes)
        ))
    }
}

fn open(file: &Path) -> Result<Reader<BufReader<File>>> {
    let opened = File::open(file).with_context(|| format!("open {}", file.display()))?;
    Reader::begin(BufReader::with_capacity(BUFFER_BYTES, opened))
        .map_err(|error| in_file(file, error))
}

fn in_file(file: &Path, error: quoin_export::Error) -> anyhow::Error {
    anyhow!("{}: {error}", file.display())
}

pub fn verify(files: &[PathBuf], format: Format) -> Result<()> {
    let mut views = Vec::new();
    for file in files {
        let mut reader = open(file)?;
        while reader.next_record().map_err(|error| in_file(file, error))?.is_some() {}
        let view = FileView::of(file, &reader);
        if matches!(format, Format::Table | Format::Wide) {
            output::print_line(&view.text())?;
        }
        views.push(view);
    }
    match format {
        Format::Table | Format::Wide => Ok(()),
        Format::Json | Format::Yaml => output::print_one(format, &views, String::new),
    }
}

/// # Errors
/// The file does not follow the one before it.
fn check_follows(before: Option<&Header>, header: &Header) -> Result<()> {
    let of =
        |header: &Header| format!("snapshot {} of volume {}", header.point.snapshot, header.volume);
    match (before, &header.since) {
        (None, None) => Ok(()),
        (None, Some(since)) => bail!(
            "it has only what changed since snapshot {}: name the files before it first, beginning \
             with a whole one",
            since.snapshot
        ),
        (Some(before), None) => bail!(
            "it is a whole one ({}), and follows one of {}: name a whole one first, and no other",
            of(header),
            of(before)
        ),
        (Some(before), Some(since)) if since.snapshot_id != before.point.snapshot_id => bail!(
            "it has what changed since snapshot {}, and follows {}",
            since.snapshot,
            of(before)
        ),
        (Some(before), Some(_)) if header.volume_id != before.volume_id => {
            bail!("it is of {}, and follows one of {}", of(header), of(before))
        }
        (Some(_), Some(_)) => Ok(()),
    }
}

pub fn unpack(options: &UnpackOptions, format: Format) -> Result<()> {
    let to = &options.to;
    if to.exists() {
        bail!("{} exists already: name another file with --to, or remove it", to.display());
    }
    // Nothing is made for files that cannot be one image.
    let mut before = None::<Header>;
    for file in &options.files {
        let reader = open(file)?;
        check_follows(before.as_ref(), reader.header())
            .with_context(|| file.display().to_string())?;
        before = Some(reader.header().clone());
    }
    // A half-made image must not be taken for a whole one.
    let image = Beside::of(to)
        .map_err(|error| anyhow!("cannot create {} ({error}): correct --to", to.display()))?;
    let view = apply_all(&options.files, &image.file)?;
    image.file.sync_all().context("sync the image")?;
    image.keep_as(to).with_context(|| format!("make {}", to.display()))?;
    output::print_one(format, &view, || {
        let FileView { snapshot, volume, cut_at, .. } = &view;
        let note = match view.encrypted {
            true => "\nits bytes are encrypted, as they were stored",
            false => "",
        };
        let shown = format!(
            "{} is snapshot {snapshot} of volume {volume}, as of {cut_at}: {}",
            to.display(),
            show_size(view.size_bytes)
        );
        output::plain(&shown) + note
    })
}

/// Writes all files into the image; returns what the last one is of.
fn apply_all(files: &[PathBuf], image: &File) -> Result<FileView> {
    let mut before = None::<Header>;
    let mut view = None;
    for file in files {
        let mut reader = open(file)?;
        check_follows(before.as_ref(), reader.header())
            .with_context(|| file.display().to_string())?;
        image.set_len(reader.header().size_bytes).context("set the image's size")?;
        while let Some(record) = reader.next_record().map_err(|error| in_file(file, error))? {
            // A block that was never written is a hole already.
            if before.is_some() || matches!(record, Record::Data { .. }) {
                apply(image, &record).context("write the image")?;
            }
        }
        view = Some(FileView::of(file, &reader));
        before = Some(reader.header().clone());
    }
    view.ok_or_else(|| anyhow!("no file was named"))
}

fn apply(image: &File, record: &Record) -> std::io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    let (offset, length) = match record {
        Record::Data { offset, data } => return image.write_all_at(data, *offset),
        Record::Hole { offset, length } => (*offset, *length),
    };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if fallocate(image, flags, offset, length).is_ok() {
        return Ok(());
    }
    zero(image, offset, offset + length)
}

/// Writes zeroes over what was written of a range, where the file system makes no holes. A file has as
/// many as its header says, so more than there is room for is refused first.
fn zero(image: &File, offset: u64, end: u64) -> std::io::Result<()> {
    use rustix::fs::SeekFrom;
    let mut at = offset;
    while at < end {
        at = match rustix::fs::seek(image, SeekFrom::Data(at)) {
            Ok(data) if data < end => data,
            Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(image, SeekFrom::Hole(at))?.min(end);
        let below = rustix::fs::fstatvfs(image)?;
        let has = image.metadata()?.blocks().saturating_mul(512);
        if hole - at > below.f_bavail.saturating_mul(below.f_frsize).saturating_add(has) {
            return Err(std::io::Error::other(
                "this file system makes no holes and has no room for the zeroes in their place",
            ));
        }
        while at < hole {
            let count = (hole - at).min(ZEROES.len() as u64);
            image.write_all_at(&ZEROES[..count as usize], at)?;
            at += count;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use quoin_export::{Point, Writer};

    use super::*;

    const BLOCK: u64 = quoin_export::BLOCK_BYTES;

    fn point(lsn: u64) -> Point {
        let snapshot_id = format!("{lsn:032x}");
        Point { snapshot: format!("s{lsn}"), snapshot_id, lsn, cut_at: String::new() }
    }

    fn header(lsn: u64, since: Option<u64>, blocks: u64) -> Header {
        Header {
            volume: "db".into(),
            volume_id: "f01".into(),
            point: point(lsn),
            since: since.map(point),
            size_bytes: blocks * BLOCK,
            encryption: None,
        }
    }

    fn write(file: &Path, header: &Header, records: &[Record]) {
        let mut writer = Writer::begin(File::create(file).unwrap(), header).unwrap();
        records.iter().for_each(|record| writer.record(record).unwrap());
        writer.end().unwrap();
    }

    fn data(lba: u64, fill: u8) -> Record {
        Record::Data { offset: lba * BLOCK, data: vec![fill; BLOCK as usize] }
    }

    #[test]
    fn a_whole_export_and_the_changes_since_are_one_image() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        write(&path("full"), &header(3, None, 8), &[data(1, 1), data(2, 2), data(5, 5)]);
        let hole = Record::Hole { offset: 2 * BLOCK, length: BLOCK };
        write(&path("more"), &header(7, Some(3), 12), &[data(1, 9), hole, data(11, 7)]);
        let to = path("img");
        let options = UnpackOptions { files: vec![path("full"), path("more")], to: to.clone() };
        unpack(&options, Format::Table).unwrap();
        let image = std::fs::read(&to).unwrap();
        assert_eq!(image.len() as u64, 12 * BLOCK);
        let at = |lba: u64| image[(lba * BLOCK) as usize];
        assert_eq!([at(0), at(1), at(2), at(5), at(11)], [0, 9, 0, 5, 7]);
        assert!(unpack(&options, Format::Table).is_err(), "it is not written over");
        verify(&options.files, Format::Json).unwrap();
    }

    #[test]
    fn what_lies_beside_an_image_is_left_alone_and_only_its_owner_reads_it() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        write(&path("full"), &header(3, None, 8), &[data(1, 1)]);
        std::fs::write(path("precious"), "kept").unwrap();
        std::fs::write(path("a.partial"), "kept").unwrap();
        std::os::unix::fs::symlink(path("precious"), path("b.partial")).unwrap();
        for (file, to) in [("none", "a"), ("full", "a"), ("none", "b"), ("full", "b")] {
            let options = UnpackOptions { files: vec![path(file)], to: path(to) };
            assert_eq!(unpack(&options, Format::Table).is_ok(), file == "full");
        }
        for name in ["precious", "a.partial", "b.partial"] {
            assert_eq!(std::fs::read(path(name)).unwrap(), b"kept", "{name}");
        }
        let mode = std::fs::metadata(path("a")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // A link in the place of the image is not written through, whether it leads anywhere or not.
        std::os::unix::fs::symlink(path("nowhere"), path("c")).unwrap();
        let options = UnpackOptions { files: vec![path("full")], to: path("c") };
        assert!(unpack(&options, Format::Table).is_err());
        assert!(!path("nowhere").exists());
    }

    #[test]
    fn a_small_file_of_huge_holes_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let blocks = 1 << 30;
        let hole = |lba: u64| Record::Hole { offset: lba * BLOCK, length: (blocks - lba) * BLOCK };
        write(&path("full"), &header(3, None, blocks), &[data(1, 1), hole(2)]);
        write(&path("more"), &header(7, Some(3), blocks), &[hole(0)]);
        let image = File::create_new(path("image")).unwrap();
        let files = [path("full"), path("more")];
        apply_all(&files, &image).unwrap();
        assert_eq!(image.metadata().unwrap().len(), blocks * BLOCK);
        assert!(image.metadata().unwrap().blocks() * 512 <= 1 << 20);
        // The same where the file system punches none: only what was written is written over.
        image.write_all_at(&[7; 4096], 5 * BLOCK).unwrap();
        zero(&image, 0, blocks * BLOCK).unwrap();
        let mut found = [1; 4096];
        image.read_exact_at(&mut found, 5 * BLOCK).unwrap();
        assert_eq!(found, [0; 4096]);
        assert!(image.metadata().unwrap().blocks() * 512 <= 1 << 20);
    }

    /// Chains of exports: what each block is in the end, by its last record alone.
    #[test]
    fn each_block_is_as_the_last_file_has_it_in_growing_volumes_up_to_their_last_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let hole =
            |lba: u64, blocks: u64| Record::Hole { offset: lba * BLOCK, length: blocks * BLOCK };
        let chains: [Vec<(u64, Vec<Record>)>; 7] = [
            vec![(8, vec![])],
            vec![(8, vec![data(7, 3)])],
            vec![(8, vec![hole(0, 7), data(7, 3)]), (8, vec![])],
            vec![(8, vec![data(7, 3)]), (8, vec![hole(7, 1)]), (8, vec![])],
            vec![(8, vec![data(0, 1), data(7, 3)]), (9, vec![data(8, 4)])],
            vec![
                (8, vec![data(0, 1), data(7, 3)]),
                (9, vec![]),
                (12, vec![hole(0, 8), data(11, 9)]),
            ],
            vec![(8, vec![data(3, 1)]), (8, vec![hole(2, 4)]), (8, vec![data(4, 5), hole(7, 1)])],
        ];
        for chain in chains {
            let mut expected = Vec::new();
            let mut files = Vec::new();
            for (number, (blocks, records)) in (0..).zip(&chain) {
                let file = path(&format!("{number}"));
                let since = (number > 0).then(|| number * 2 + 1);
                write(&file, &header(number * 2 + 3, since, *blocks), records);
                files.push(file);
                expected.resize(*blocks as usize, 0_u8);
                for record in records {
                    let (begin, end) = record.range();
                    let fill = if let Record::Data { data, .. } = record { data[0] } else { 0 };
                    expected[(begin / BLOCK) as usize..(end / BLOCK) as usize].fill(fill);
                }
            }
            let to = path("img");
            unpack(&UnpackOptions { files, to: to.clone() }, Format::Table).unwrap();
            let image = std::fs::read(&to).unwrap();
            let found: Vec<u8> = image.chunks(BLOCK as usize).map(|block| block[0]).collect();
            assert_eq!(found, expected, "{chain:?}");
            for block in image.chunks(BLOCK as usize) {
                assert!(block.iter().all(|byte| *byte == block[0]));
            }
            std::fs::remove_file(&to).unwrap();
        }
    }

    /// Zeroes where no hole can be made: up to the end of the range and not a byte further.
    #[test]
    fn zeroes_are_written_over_the_range_alone() {
        let dir = tempfile::tempdir().unwrap();
        let image = File::create_new(dir.path().join("image")).unwrap();
        let blocks = 64;
        for (begin, end) in [(0, 1), (1, 2), (0, 64), (63, 64), (15, 17), (1, 63), (5, 5)] {
            image.write_all_at(&vec![7; (blocks * BLOCK) as usize], 0).unwrap();
            zero(&image, begin * BLOCK, end * BLOCK).unwrap();
            let mut found = vec![1; (blocks * BLOCK) as usize];
            image.read_exact_at(&mut found, 0).unwrap();
            for (at, byte) in (0..).zip(&found) {
                let is_zero = (begin * BLOCK..end * BLOCK).contains(&at);
                assert_eq!(*byte == 0, is_zero, "{begin} to {end}: {at}");
            }
        }
    }

    #[test]
    fn a_file_of_another_volume_does_not_follow_though_its_snapshot_has_the_id() {
        let other = Header { volume_id: "f02".into(), ..header(7, Some(3), 8) };
        let first = header(3, None, 8);
        let refused = check_follows(Some(&first), &other).unwrap_err().to_string();
        assert!(refused.contains("follows one of snapshot s3"), "{refused}");
        assert!(check_follows(Some(&first), &header(7, Some(3), 8)).is_ok());
        assert!(check_follows(None, &first).is_ok());
        for (before, header) in [
            (None, header(7, Some(3), 8)),
            (Some(&first), header(7, None, 8)),
            (Some(&first), header(7, Some(4), 8)),
        ] {
            assert!(check_follows(before, &header).is_err());
        }
    }

    #[test]
    fn the_view_of_a_file_has_all_that_its_header_and_records_say() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("more");
        let hole = Record::Hole { offset: 2 * BLOCK, length: 3 * BLOCK };
        let encrypted = Header {
            encryption: Some(serde_json::json!({})),
            point: Point { cut_at: "2026-11-26T02:10:07Z".into(), ..point(7) },
            ..header(7, Some(3), 12)
        };
        write(&file, &encrypted, &[data(1, 9), hole, data(11, 7)]);
        let mut reader = open(&file).unwrap();
        while reader.next_record().unwrap().is_some() {}
        let view = FileView::of(&file, &reader);
        assert_eq!((view.data_bytes, view.hole_bytes), (2 * BLOCK, 3 * BLOCK));
        assert_eq!((view.size_bytes, view.encrypted), (12 * BLOCK, true));
        assert_eq!((view.since.as_deref(), view.snapshot.as_str()), (Some("s3"), "s7"));
        let text = view.text();
        for words in ["volume db", "what changed since s3", "2026-11-26", "encrypted", "48.0 KiB"] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn files_that_do_not_follow_each_other_or_are_damaged_leave_no_image() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        write(&path("full"), &header(3, None, 8), &[data(1, 1)]);
        write(&path("far"), &header(9, Some(7), 8), &[data(1, 9)]);
        write(&path("cut"), &header(9, Some(3), 8), &[data(1, 9)]);
        let cut = std::fs::read(path("cut")).unwrap();
        std::fs::write(path("cut"), &cut[..cut.len() - 9]).unwrap();
        for (files, why) in [
            (vec!["far"], "beginning with a whole one"),
            (vec!["full", "far"], "since snapshot s7"),
            (vec!["full", "full"], "name a whole one first"),
            (vec!["full", "cut"], "before the export was complete"),
            (vec!["full", "none"], "none"),
        ] {
            let files = files.into_iter().map(path).collect();
            let options = UnpackOptions { files, to: path("img") };
            let error = unpack(&options, Format::Table).unwrap_err();
            let text = output::sentence(&error);
            assert!(text.contains(why), "{text}");
            let left = std::fs::read_dir(dir.path()).unwrap().count();
            assert!(!path("img").exists() && left == 3, "{left}");
        }
        assert!(verify(&[path("cut")], Format::Table).is_err());
    }
}
