//! Files of exported snapshots, whole and cut off.

use quoin_export::{Header, Point, Reader, Record, Writer, scan};

const BLOCK: u64 = quoin_export::BLOCK_BYTES;

pub fn run(input: &[u8]) {
    let Ok(found) = scan(input) else { return };
    assert!(found.whole_bytes <= input.len() as u64, "more than there is");
    assert!(found.totals.reached <= found.header.size_bytes, "beyond the snapshot");
    // The whole part can be written again, and is the same then.
    let Ok(mut reader) = Reader::begin(input) else { return };
    let Ok(mut writer) = Writer::begin(Vec::new(), reader.header()) else { return };
    while let Ok(Some(record)) = reader.next_record() {
        writer.record(&record).expect("a record that was read");
    }
    assert_eq!(writer.totals(), &found.totals);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let header = Header {
        volume: "db".to_owned(),
        volume_id: "f01".to_owned(),
        point: Point {
            snapshot: "s".to_owned(),
            snapshot_id: "5a".to_owned(),
            lsn: 9,
            cut_at: "2026-11-26T02:10:07Z".to_owned(),
        },
        since: None,
        size_bytes: 64 * BLOCK,
        encryption: None,
    };
    let Ok(mut writer) = Writer::begin(Vec::new(), &header) else { return Vec::new() };
    let data = vec![7; BLOCK as usize];
    for record in [
        Record::Data { offset: BLOCK, data },
        Record::Hole { offset: 4 * BLOCK, length: 2 * BLOCK },
    ] {
        let _ = writer.record(&record);
    }
    writer.end().into_iter().collect()
}
