//! Reading a file.

use std::io::Read;

use quoin_types::crc32c;

use crate::header::fill;
use crate::record::{Follows, Head, RECORD_BYTES, Record, Totals};
use crate::{Error, Header};

/// Reads records in their order, each checked.
pub struct Reader<R: Read> {
    input: R,
    header: Header,
    totals: Totals,
    /// Place in the file behind the last whole record.
    at: u64,
    is_complete: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// It is none, or of a later format, or damaged.
    pub fn begin(mut input: R) -> Result<Self, Error> {
        let (header, at) = Header::read(&mut input)?;
        Ok(Self { input, header, totals: Totals::default(), at, is_complete: false })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// The next record; `None` behind the last one, where the file is complete.
    ///
    /// # Errors
    /// The file is damaged or cut off here.
    pub fn next_record(&mut self) -> Result<Option<Record>, Error> {
        if self.is_complete {
            return Ok(None);
        }
        let mut bytes = [0; RECORD_BYTES];
        if fill(&mut self.input, &mut bytes)? < bytes.len() {
            return Err(Error::CutOff { at: self.at });
        }
        let head = Head::decode(&bytes, self.at)?;
        let (record, length) = match head.follows(&self.totals, self.header.size_bytes, self.at)? {
            Follows::End => {
                if fill(&mut self.input, &mut [0])? > 0 {
                    let at = self.at + RECORD_BYTES as u64;
                    return Err(Error::Damaged { at, what: "something follows the end" });
                }
                self.is_complete = true;
                return Ok(None);
            }
            Follows::Hole { offset, length } => (Record::Hole { offset, length }, 0),
            Follows::Data { offset, length, sum } => {
                let mut data = vec![0; length];
                if fill(&mut self.input, &mut data)? < length {
                    return Err(Error::CutOff { at: self.at });
                }
                if crc32c(&data) != sum {
                    let what = "the checksum of the data does not fit";
                    return Err(Error::Damaged { at: self.at, what });
                }
                (Record::Data { offset, data }, length as u64)
            }
        };
        self.totals.add(&head);
        self.at += RECORD_BYTES as u64 + length;
        Ok(Some(record))
    }
}

/// Content of a file, as far as it is whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scan {
    pub header: Header,
    pub totals: Totals,
    /// Length of the header and the whole records.
    pub whole_bytes: u64,
    pub is_complete: bool,
}

/// Reads a file as far as it is whole, so that an export can go on there: behind it a crash may have
/// left anything.
///
/// # Errors
/// The reader's, or that the file has no whole header.
pub fn scan(input: impl Read) -> Result<Scan, Error> {
    let mut reader = Reader::begin(input)?;
    let is_complete = loop {
        match reader.next_record() {
            Ok(Some(_)) => {}
            Ok(None) => break true,
            Err(Error::CutOff { .. } | Error::Damaged { .. }) => break false,
            Err(error) => return Err(error),
        }
    };
    let Reader { header, totals, at, .. } = reader;
    Ok(Scan { header, totals, whole_bytes: at, is_complete })
}
