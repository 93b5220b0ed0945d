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
