use proptest::prelude::*;
use quoin_recorded::Recorded;

use super::*;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const RAISE: &str = "FORMAT in quoin-export/src/lib.rs";
const SIZE_BLOCKS: u64 = 64;

fn point(lsn: u64) -> Point {
    Point {
        snapshot: format!("s{lsn}"),
        snapshot_id: format!("{lsn:032x}"),
        lsn,
        cut_at: "2026-11-26T02:10:07Z".into(),
    }
}

fn header() -> Header {
    Header {
        volume: "db".into(),
        volume_id: "00000000000000000000000000000f01".into(),
        point: point(12),
        since: Some(point(9)),
        size_bytes: SIZE_BLOCKS * BLOCK_BYTES,
        encryption: None,
    }
}

fn data(lba: u64, blocks: u64) -> Record {
    Record::Data {
        offset: lba * BLOCK_BYTES,
        data: vec![lba as u8 + 1; (blocks * BLOCK_BYTES) as usize],
    }
}

fn hole(lba: u64, blocks: u64) -> Record {
    Record::Hole { offset: lba * BLOCK_BYTES, length: blocks * BLOCK_BYTES }
}

fn records() -> Vec<Record> {
    vec![data(0, 2), hole(2, 3), data(9, 1), hole(60, 4)]
}

fn written(records: &[Record]) -> Vec<u8> {
    let mut writer = Writer::begin(Vec::new(), &header()).unwrap();
    records.iter().for_each(|record| writer.record(record).unwrap());
    writer.end().unwrap()
}

fn read(file: &[u8]) -> Result<Vec<Record>, Error> {
    let mut reader = Reader::begin(file)?;
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record);
    }
    Ok(records)
}

#[test]
fn what_is_written_is_read_again_with_its_header_and_totals() {
    let file = written(&records());
    assert_eq!(read(&file).unwrap(), records());
    let scan = scan(&file[..]).unwrap();
    assert_eq!((scan.header, scan.is_complete), (header(), true));
    let Totals { records, data_bytes, hole_bytes, reached, .. } = scan.totals;
    assert_eq!((records, data_bytes, hole_bytes), (4, 3 * BLOCK_BYTES, 7 * BLOCK_BYTES));
    assert_eq!(reached, SIZE_BLOCKS * BLOCK_BYTES);
}

#[test]
fn a_file_that_was_cut_off_anywhere_is_continued_and_becomes_the_same_file() {
    let whole = written(&records());
    let header_bytes = Writer::begin(Vec::new(), &header()).unwrap().file_bytes() as usize;
    for length in (header_bytes..whole.len()).step_by(61) {
        let mut file = whole[..length].to_vec();
        assert!(matches!(read(&file), Err(Error::CutOff { .. })), "{length}");
        let found = scan(&file[..]).unwrap();
        assert!(!found.is_complete && found.whole_bytes <= length as u64);
        file.truncate(found.whole_bytes as usize);
        let mut writer = Writer::resume(file, &found);
        let rest = records().into_iter().skip(found.totals.records as usize);
        rest.for_each(|record| writer.record(&record).unwrap());
        assert_eq!(writer.end().unwrap(), whole, "{length}");
    }
}

#[test]
fn no_changed_byte_goes_unnoticed() {
    let whole = written(&records());
    for at in (0..whole.len()).step_by(7).chain(whole.len() - 28..whole.len()) {
        let mut file = whole.clone();
        file[at] ^= 0x10;
        assert!(read(&file).is_err(), "{at}");
    }
}

#[test]
fn records_that_are_missing_or_there_twice_are_noticed_by_the_end() {
    let mut writer = Writer::begin(Vec::new(), &header()).unwrap();
    let begin = writer.file_bytes() as usize;
    writer.record(&hole(2, 3)).unwrap();
    let second = writer.file_bytes() as usize;
    writer.record(&hole(5, 1)).unwrap();
    let file = writer.end().unwrap();
    assert!(read(&file).is_ok());
    let without: Vec<u8> = [&file[..begin], &file[second..]].concat();
    assert!(matches!(read(&without), Err(Error::Damaged { .. })));
    let twice: Vec<u8> = [&file[..second], &file[begin..]].concat();
    assert!(matches!(read(&twice), Err(Error::Damaged { .. })));
    let longer = [&file[..], b"x"].concat();
    assert!(matches!(read(&longer), Err(Error::Damaged { .. })));
}

#[test]
fn a_record_that_cannot_follow_those_before_it_is_not_written() {
    let mut writer = Writer::begin(Vec::new(), &header()).unwrap();
    writer.record(&data(4, 2)).unwrap();
    let refused = [
        data(5, 1),
        hole(0, 1),
        hole(64, 1),
        hole(6, u64::MAX / BLOCK_BYTES),
        Record::Hole { offset: 7 * BLOCK_BYTES, length: 0 },
        Record::Hole { offset: 7 * BLOCK_BYTES + 1, length: BLOCK_BYTES },
        Record::Data { offset: 7 * BLOCK_BYTES, data: vec![0; 100] },
    ];
    for record in refused {
        assert!(writer.record(&record).is_err(), "{:?}", record.range());
    }
    writer.record(&hole(6, 1)).unwrap();
    assert_eq!(writer.totals().records, 2);
}

#[test]
fn what_is_no_export_or_of_a_later_version_says_so() {
    assert!(matches!(read(b"words"), Err(Error::Foreign)));
    assert!(matches!(read(&written(&[])[..10]), Err(Error::CutOff { at: 10 })));
    assert!(matches!(read(&[0; 100]), Err(Error::Foreign)));
    let mut later = written(&[]);
    later[8] = 2;
    let sum = quoin_types::crc32c(&later[..20]);
    later[20..24].copy_from_slice(&sum.to_le_bytes());
    assert!(matches!(read(&later), Err(Error::Newer(2))));
    let odd = Header { size_bytes: 100, ..header() };
    assert!(Writer::begin(Vec::new(), &odd).is_err());
    let backwards = Header { since: Some(point(12)), ..header() };
    assert!(Writer::begin(Vec::new(), &backwards).is_err());
}

#[test]
fn the_format_is_the_recorded_one_and_every_recorded_one_is_read() {
    let records = [data(0, 1), hole(2, 3)];
    Recorded::current(CRATE, "export", FORMAT.into(), RAISE).holds("file", &written(&records));
    for version in Recorded::all(CRATE, "export", RAISE) {
        assert_eq!(read(&version.read("file")).unwrap(), records);
    }
}

/// Returns what a header of this size, and of snapshots at these places, is said to be.
fn refused(size_bytes: u64, since: Option<u64>, lsn: u64) -> Option<String> {
    let odd = Header { size_bytes, since: since.map(point), point: point(lsn), ..header() };
    let written = Writer::begin(Vec::new(), &odd).map(drop);
    // A reader says the same of a file that somebody else wrote.
    let text = serde_json::to_vec(&odd).unwrap();
    let mut file = b"QUOINEXP\x01\0\0\0".to_vec();
    file.extend((text.len() as u32).to_le_bytes());
    file.extend(quoin_types::crc32c(&text).to_le_bytes());
    file.extend(quoin_types::crc32c(&file).to_le_bytes());
    file.extend(text);
    let read = Reader::begin(&file[..]).map(drop);
    assert_eq!(
        written.as_ref().map_err(ToString::to_string),
        read.as_ref().map_err(ToString::to_string)
    );
    written.err().map(|error| error.to_string())
}

#[test]
fn a_header_is_taken_at_each_of_its_limits_and_refused_beyond_it_on_both_sides() {
    for (size_bytes, is_taken) in [
        (0, true),
        (BLOCK_BYTES - 1, false),
        (BLOCK_BYTES, true),
        (BLOCK_BYTES + 1, false),
        ((1 << 60) - BLOCK_BYTES, true),
        (1 << 60, true),
        ((1 << 60) + BLOCK_BYTES, false),
        (u64::MAX, false),
    ] {
        assert_eq!(refused(size_bytes, None, 12).is_none(), is_taken, "{size_bytes} bytes");
    }
    for (since, is_taken) in [(11, true), (12, false), (13, false)] {
        assert_eq!(refused(BLOCK_BYTES, Some(since), 12).is_none(), is_taken, "since {since}");
    }
    let of_length = |bytes: usize| {
        let bare = serde_json::to_vec(&Header { volume: String::new(), ..header() }).unwrap();
        Header { volume: "x".repeat(bytes - bare.len()), ..header() }
    };
    const MAX: usize = 256 << 10;
    for (bytes, is_taken) in [(MAX - 1, true), (MAX, true), (MAX + 1, false)] {
        let long = of_length(bytes);
        let written = Writer::begin(Vec::new(), &long).and_then(Writer::end);
        assert_eq!(written.is_ok(), is_taken, "{bytes} bytes");
        if let Ok(file) = &written {
            assert_eq!(*Reader::begin(&file[..]).unwrap().header(), long);
        }
        let mut fixed = written_with(b"");
        fixed[12..16].copy_from_slice(&(bytes as u32).to_le_bytes());
        let sum = quoin_types::crc32c(&fixed[..20]);
        fixed[20..24].copy_from_slice(&sum.to_le_bytes());
        let found = Reader::begin(&fixed[..]).map(drop).unwrap_err();
        let is_cut_off = matches!(found, Error::CutOff { .. });
        assert_eq!(is_cut_off, is_taken, "a description of {bytes} bytes: {found}");
    }
    for format in [0, FORMAT - 1, FORMAT + 1, u32::MAX] {
        let mut file = written(&[]);
        file[8..12].copy_from_slice(&format.to_le_bytes());
        let sum = quoin_types::crc32c(&file[..20]);
        file[20..24].copy_from_slice(&sum.to_le_bytes());
        assert!(matches!(read(&file), Err(Error::Newer(found)) if found == format), "{format}");
    }
}

/// The fixed part of a header alone, and what follows it.
fn written_with(rest: &[u8]) -> Vec<u8> {
    [&written(&[])[..24], rest].concat()
}

#[test]
fn a_record_reaches_the_last_block_and_its_longest_length_and_goes_no_further() {
    const MAX: u64 = DATA_BYTES_MAX as u64 / BLOCK_BYTES;
    let size_bytes = (2 * MAX + 4) * BLOCK_BYTES;
    let large = Header { size_bytes, ..header() };
    let last = size_bytes / BLOCK_BYTES;
    for (record, is_taken) in [
        (data(0, MAX - 1), true),
        (data(0, MAX), true),
        (data(0, MAX + 1), false),
        (hole(0, MAX + 1), true),
        (hole(0, last), true),
        (hole(0, last + 1), false),
        (hole(1, last - 1), true),
        (hole(1, last), false),
        (data(last - 1, 1), true),
        (data(last - 1, 2), false),
        (data(last, 1), false),
        (hole(last - 1, 1), true),
        (hole(last, 1), false),
        (data(last - MAX, MAX), true),
    ] {
        let mut writer = Writer::begin(Vec::new(), &large).unwrap();
        let taken = writer.record(&record);
        assert_eq!(taken.is_ok(), is_taken, "{:?}: {taken:?}", record.range());
        if is_taken {
            let file = writer.end().unwrap();
            assert_eq!(read(&file).unwrap(), std::slice::from_ref(&record));
            let found = scan(&file[..]).unwrap();
            assert_eq!((found.totals.reached, found.is_complete), (record.range().1, true));
            assert_eq!(found.whole_bytes, file.len() as u64 - 28);
        }
    }
    // Of a volume without a block there is nothing to tell.
    let empty = Header { size_bytes: 0, ..header() };
    let mut writer = Writer::begin(Vec::new(), &empty).unwrap();
    assert!(writer.record(&hole(0, 1)).is_err());
    assert_eq!(read(&writer.end().unwrap()).unwrap(), []);
}

/// Records that no writer makes, written by somebody else with sums that fit.
#[test]
fn a_reader_refuses_what_a_writer_would_not_write_though_its_sums_fit() {
    let head = |kind: u32, sum: u32, offset: u64, length: u64| {
        let mut bytes = [kind.to_le_bytes(), sum.to_le_bytes()].concat();
        bytes.extend(offset.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(quoin_types::crc32c(&bytes).to_le_bytes());
        bytes
    };
    let whole = written(&[]);
    let begin = &whole[..whole.len() - 28];
    let content = vec![9; BLOCK_BYTES as usize];
    let sum = quoin_types::crc32c(&content);
    let after = |record: Vec<u8>| read(&[begin, &record, &content].concat()).map(drop).unwrap_err();
    let size = SIZE_BLOCKS * BLOCK_BYTES;
    for (what, record, found) in [
        ("no kind", head(0, sum, 0, BLOCK_BYTES), "no known kind"),
        ("kind 4", head(4, sum, 0, BLOCK_BYTES), "no known kind"),
        ("no length", head(1, sum, 0, 0), "no whole blocks"),
        ("half a block", head(1, sum, 0, BLOCK_BYTES / 2), "no whole blocks"),
        ("within a block", head(2, 0, 1, BLOCK_BYTES), "no whole blocks"),
        ("behind the end", head(1, sum, size, BLOCK_BYTES), "out of order"),
        ("over the end", head(2, 0, size - BLOCK_BYTES, 2 * BLOCK_BYTES), "out of order"),
        ("over all", head(2, 0, BLOCK_BYTES, u64::MAX - BLOCK_BYTES + 1), "out of order"),
        ("other content", head(1, sum ^ 1, 0, BLOCK_BYTES), "checksum of the data"),
        ("an end with a record", head(3, 0, 1, 0), "missing, or are there twice"),
        ("an end with data", head(3, 0, 0, BLOCK_BYTES), "missing, or are there twice"),
        ("an end with a sum", head(3, 1, 0, 0), "missing, or are there twice"),
        ("an end before the end", head(3, 0, 0, 0), "something follows"),
    ] {
        let error = after(record).to_string();
        assert!(error.contains(found), "{what}: {error}");
    }
    // The same content at another place, in the same order, is another file.
    let [first, second] = [written(&[data(0, 1), hole(5, 1)]), written(&[data(1, 1), hole(5, 1)])];
    let mixed = [&first[..first.len() - 28], &second[second.len() - 28..]].concat();
    assert!(matches!(read(&mixed), Err(Error::Damaged { .. })));
}

#[test]
fn a_file_is_continued_at_every_byte_of_its_end() {
    let whole = written(&records());
    for length in whole.len() - 56..whole.len() {
        let found = scan(&whole[..length]).unwrap();
        assert!(!found.is_complete, "{length} of {}", whole.len());
        let is_last_there = length >= whole.len() - 28;
        assert_eq!(found.totals.records, if is_last_there { 4 } else { 3 }, "{length}");
        assert_eq!(found.totals.hole_bytes, if is_last_there { 7 } else { 3 } * BLOCK_BYTES);
        let kept = whole[..found.whole_bytes as usize].to_vec();
        let mut writer = Writer::resume(kept, &found);
        assert_eq!(writer.file_bytes(), found.whole_bytes);
        if !is_last_there {
            writer.record(&records()[3]).unwrap();
        }
        // A record that is there is not written again.
        assert!(writer.record(&hole(60, 4)).is_err());
        assert_eq!(writer.end().unwrap(), whole);
    }
    // A crash may leave anything behind what is whole.
    let found = scan(&[&whole[..whole.len() - 28], &[0; 28]].concat()[..]).unwrap();
    assert_eq!((found.totals.records, found.is_complete), (4, false));
    assert!(scan(&whole[..23]).is_err(), "there is no header to go on with");
    let complete = scan(&whole[..]).unwrap();
    assert!(complete.is_complete && complete.whole_bytes == whole.len() as u64 - 28);
}

/// A writer whose disk is full after some bytes.
struct Full(usize);

impl std::io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let taken = bytes.len().min(self.0);
        self.0 -= taken;
        if taken == 0 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        if self.0 == 0 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

#[test]
fn an_error_of_the_disk_is_one_of_the_export_wherever_it_comes() {
    let whole = written(&records()).len();
    for room in (0..=whole).step_by(7).chain(whole - 30..=whole) {
        let outcome = || -> Result<(), Error> {
            let mut writer = Writer::begin(Full(room), &header())?;
            records().iter().try_for_each(|record| writer.record(record))?;
            writer.end().map(drop)
        };
        assert!(matches!(outcome(), Err(Error::Io(_))), "{room} of {whole}");
    }
    let mut writer = Writer::begin(Full(whole + 1), &header()).unwrap();
    records().iter().for_each(|record| writer.record(record).unwrap());
    writer.end().unwrap();
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&bytes);
        let mut file = written(&records());
        for (at, byte) in bytes.iter().enumerate() {
            let at = (at * 97 + usize::from(*byte)) % file.len();
            file[at] = *byte;
        }
        let _ = scan(&file[..]);
    }
}
