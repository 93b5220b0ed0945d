//! Clients of a volume that several hosts use at once, and the requests of theirs that took effect.
//!
//! A client sends a request again when its connection was lost before the answer. Another client
//! may have overwritten the blocks meanwhile, so what took effect must not be done again
//! (RepeatOnce). The entries of such clients name the request that they are of. The table of
//! clients is a function of the log, as the map is: each replica keeps one.

use std::collections::BTreeMap;

use bytes::{BufMut, BytesMut};

use crate::codec::{Malformed, Reader, Writer};
use crate::entry::EntryKind;
use crate::ids::{ClientId, Lsn};

/// Limit of clients of one volume that change it at the same time.
pub const CLIENTS_MAX: usize = 16;
/// Limit of the requests that a client has under way: numbers from the lowest one without an answer.
pub const CLIENT_WINDOW: u64 = 1024;
/// Limit of the numbers that a client may use.
const NUMBER_MAX: u64 = 1 << 62;

impl ClientId {
    /// A client of one attachment of a node.
    pub fn of_attachment(attachment: u64, random: u64) -> Self {
        Self(u128::from(attachment) << 64 | u128::from(random))
    }

    /// The attachment that the client belongs to.
    pub fn attachment(self) -> u64 {
        (self.0 >> 64) as u64
    }
}

/// The request of a client, however often it is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    pub client: ClientId,
    /// Number of the request among those of its client that change the volume.
    pub number: u64,
    /// The client has the answers of all requests with lower numbers.
    pub low: u64,
}

impl Origin {
    /// Checks what every request must say of itself.
    pub fn is_sound(&self) -> bool {
        self.low <= self.number && self.number <= NUMBER_MAX
    }
}

/// The part of a request that an entry is; a long request becomes several entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    pub origin: Origin,
    /// The block behind the entry's: entries of a request follow each other in the order of blocks.
    pub end: u64,
    pub is_last: bool,
}

impl Part {
    pub const BYTES: usize = 41;

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.origin.client.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.origin.number.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.origin.low.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.end.to_le_bytes());
        bytes[40] = u8::from(self.is_last);
        bytes
    }

    pub fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let origin = Origin {
            client: ClientId(r.u128("client of an entry")?),
            number: r.u64("request of an entry")?,
            low: r.u64("request of an entry")?,
        };
        if !origin.is_sound() {
            return Err(Malformed("request of an entry"));
        }
        let (end, is_last) = (r.u64("part of an entry")?, r.bool("part of an entry")?);
        Ok(Part { origin, end, is_last })
    }
}

/// A request that took effect, or the first parts of it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Executed {
    /// LSN of its last entry.
    pub lsn: Lsn,
    /// Block behind that entry's, from which a repeat continues; 0 if the request is whole.
    pub end: u64,
    pub is_whole: bool,
}

/// One client: its requests from `low` on that took effect.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClientRow {
    pub low: u64,
    pub executed: BTreeMap<u64, Executed>,
}

/// Verdict of the table on a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Judged {
    /// It has not taken effect, but below this block.
    New { from: u64 },
    /// It took effect; its last entry has this LSN.
    Executed(Lsn),
    /// Its client has no row: it never began, or has ended.
    NoClient,
    /// Its number is below the lowest without an answer, or too far above.
    OutOfWindow,
}

/// The clients of a volume as of one LSN.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClientTable {
    rows: BTreeMap<ClientId, ClientRow>,
}

impl ClientTable {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.rows.len() >= CLIENTS_MAX
    }

    pub fn has(&self, client: ClientId) -> bool {
        self.rows.contains_key(&client)
    }

    pub fn clients(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.rows.keys().copied()
    }

    pub fn row(&self, client: ClientId) -> Option<&ClientRow> {
        self.rows.get(&client)
    }

    /// Moves on by an entry. All replicas hold the same entries, so all have the same table; one
    /// that breaks a limit is left out by all of them.
    pub fn apply(&mut self, lsn: Lsn, kind: &EntryKind, part: Option<&Part>) {
        match kind {
            EntryKind::BeginClient { client } if !self.is_full() => {
                self.rows.entry(*client).or_default();
            }
            EntryKind::EndClient { client } => {
                self.rows.remove(client);
            }
            _ => {}
        }
        let Some(Part { origin, end, is_last }) = part else { return };
        let Some(row) = self.rows.get_mut(&origin.client) else { return };
        if origin.low > row.low {
            row.low = origin.low;
            row.executed = row.executed.split_off(&origin.low);
        }
        if origin.number < row.low || origin.number - row.low >= CLIENT_WINDOW {
            return;
        }
        let (end, is_whole) = (if *is_last { 0 } else { *end }, *is_last);
        row.executed.insert(origin.number, Executed { lsn, end, is_whole });
    }

    pub fn judge(&self, origin: &Origin) -> Judged {
        let Some(row) = self.rows.get(&origin.client) else { return Judged::NoClient };
        let low = row.low.max(origin.low);
        if origin.number < low || origin.number - low >= CLIENT_WINDOW {
            return Judged::OutOfWindow;
        }
        match row.executed.get(&origin.number) {
            Some(executed) if executed.is_whole => Judged::Executed(executed.lsn),
            Some(executed) => Judged::New { from: executed.end },
            None => Judged::New { from: 0 },
        }
    }

    /// Encodes the table:
    ///
    /// | size | field |
    /// |---|---|
    /// | 4 | clients |
    /// | 16 | of each: id |
    /// | 8 | lowest number without an answer |
    /// | 4 | requests that took effect |
    /// | 11 | of each: number above the lowest (2), LSN (8), 1 if it is whole (1) |
    /// | 8 | of one that is not whole: the block behind it |
    pub fn encode(&self, out: &mut BytesMut) {
        out.put_count(self.rows.len());
        for (client, row) in &self.rows {
            out.put_u128_le(client.0);
            out.put_u64_le(row.low);
            out.put_count(row.executed.len());
            for (number, executed) in &row.executed {
                out.put_u16_le((number - row.low) as u16);
                out.put_u64_le(executed.lsn.0);
                out.put_flag(executed.is_whole);
                if !executed.is_whole {
                    out.put_u64_le(executed.end);
                }
            }
        }
    }

    pub fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        const WHAT: &str = "clients";
        let count = r.count(28, WHAT)?;
        if count > CLIENTS_MAX {
            return Err(Malformed(WHAT));
        }
        let mut rows = BTreeMap::new();
        for _ in 0..count {
            let client = ClientId(r.u128(WHAT)?);
            let mut row = ClientRow { low: r.u64(WHAT)?, executed: BTreeMap::new() };
            if row.low > NUMBER_MAX {
                return Err(Malformed(WHAT));
            }
            for _ in 0..r.count(11, WHAT)? {
                let above = u64::from(r.u16(WHAT)?);
                let (lsn, is_whole) = (Lsn(r.u64(WHAT)?), r.bool(WHAT)?);
                let end = if is_whole { 0 } else { r.u64(WHAT)? };
                let executed = Executed { lsn, end, is_whole };
                let is_known = row.executed.insert(row.low + above, executed).is_some();
                if above >= CLIENT_WINDOW || is_known {
                    return Err(Malformed(WHAT));
                }
            }
            if rows.insert(client, row).is_some() {
                return Err(Malformed(WHAT));
            }
        }
        Ok(Self { rows })
    }

    /// Returns true if the table names no LSN beyond `last`.
    pub fn is_within(&self, last: Lsn) -> bool {
        self.rows.values().flat_map(|row| row.executed.values()).all(|e| e.lsn <= last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: ClientId = ClientId(7);

    fn part(number: u64, low: u64, end: u64, is_last: bool) -> Part {
        Part { origin: Origin { client: CLIENT, number, low }, end, is_last }
    }

    fn table() -> ClientTable {
        let mut table = ClientTable::default();
        table.apply(Lsn(1), &EntryKind::BeginClient { client: CLIENT }, None);
        table
    }

    fn judged(table: &ClientTable, number: u64, low: u64) -> Judged {
        table.judge(&Origin { client: CLIENT, number, low })
    }

    #[test]
    fn a_request_took_effect_once_its_last_part_did_and_is_known_until_its_answer_arrived() {
        let mut table = table();
        assert_eq!(judged(&table, 3, 0), Judged::New { from: 0 });
        table.apply(Lsn(2), &EntryKind::Write, Some(&part(3, 0, 8, false)));
        assert_eq!(judged(&table, 3, 0), Judged::New { from: 8 });
        table.apply(Lsn(3), &EntryKind::Write, Some(&part(3, 0, 9, true)));
        assert_eq!(judged(&table, 3, 0), Judged::Executed(Lsn(3)));
        table.apply(Lsn(4), &EntryKind::Trim, Some(&part(4, 4, 1, true)));
        assert_eq!(judged(&table, 3, 0), Judged::OutOfWindow, "its answer had arrived");
        assert_eq!(judged(&table, 4, 4), Judged::Executed(Lsn(4)));
        assert_eq!(judged(&table, 3 + CLIENT_WINDOW, 4), Judged::New { from: 0 });
        assert_eq!(judged(&table, 4 + CLIENT_WINDOW, 4), Judged::OutOfWindow);
        table.apply(Lsn(5), &EntryKind::EndClient { client: CLIENT }, None);
        assert_eq!(judged(&table, 4, 4), Judged::NoClient);
    }

    #[test]
    fn no_table_grows_beyond_its_limits_whatever_the_entries_say() {
        let mut table = ClientTable::default();
        for id in 0..2 * CLIENTS_MAX as u128 {
            let client = ClientId(id);
            table.apply(Lsn(1), &EntryKind::BeginClient { client }, None);
        }
        assert_eq!(table.clients().count(), CLIENTS_MAX);
        for number in 0..3 * CLIENT_WINDOW {
            table.apply(Lsn(2), &EntryKind::Write, Some(&part(number, 0, 1, true)));
        }
        let row = table.row(CLIENT).unwrap();
        assert_eq!(row.executed.len() as u64, CLIENT_WINDOW);
        let mut bytes = BytesMut::new();
        table.encode(&mut bytes);
        let mut reader = Reader::new(bytes.freeze());
        assert_eq!(ClientTable::decode(&mut reader).unwrap(), table);
        assert_eq!(reader.remaining(), 0);
    }

    #[test]
    fn a_table_out_of_its_limits_is_malformed() {
        let encoded = |clients: &[(u128, u64, &[u16])]| {
            let mut out = BytesMut::new();
            out.put_count(clients.len());
            for (client, low, numbers) in clients {
                out.put_u128_le(*client);
                out.put_u64_le(*low);
                out.put_count(numbers.len());
                for above in *numbers {
                    out.put_u16_le(*above);
                    out.put_u64_le(9);
                    out.put_u8(1);
                }
            }
            ClientTable::decode(&mut Reader::new(out.freeze())).is_ok()
        };
        assert!(encoded(&[(1, 5, &[0, 1]), (2, 0, &[])]));
        assert!(!encoded(&[(1, u64::MAX, &[])]), "more numbers than there may be");
        assert!(!encoded(&[(1, 5, &[CLIENT_WINDOW as u16])]), "above the window");
        assert!(!encoded(&[(1, 5, &[1, 1])]), "twice");
        assert!(!encoded(&[(1, 5, &[]), (1, 6, &[])]), "a client twice");
        let many: Vec<(u128, u64, &[u16])> = (0..17).map(|id| (id, 0, &[] as &[u16])).collect();
        assert!(!encoded(&many), "more clients than there may be");
    }
}
