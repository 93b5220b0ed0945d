//! Writing a file.

use std::io::Write;

use crate::record::{Head, Record, Totals};
use crate::{Error, Header, Scan};

/// Writes records in the order of their offsets, then the end.
pub struct Writer<W: Write> {
    out: W,
    totals: Totals,
    size_bytes: u64,
    /// Length of the file so far.
    at: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a file with its header.
    ///
    /// # Errors
    /// The writer's, or a header that nobody could read.
    pub fn begin(mut out: W, header: &Header) -> Result<Self, Error> {
        let at = header.write(&mut out)?;
        Ok(Self { out, totals: Totals::default(), size_bytes: header.size_bytes, at })
    }

    /// Goes on behind the records of a file that was cut off; `out` writes at [`Scan::whole_bytes`].
    pub fn resume(out: W, scan: &Scan) -> Self {
        let Scan { header, totals, whole_bytes, .. } = scan;
        Self { out, totals: *totals, size_bytes: header.size_bytes, at: *whole_bytes }
    }

    pub fn get_ref(&self) -> &W {
        &self.out
    }

    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Length of the file so far.
    pub fn file_bytes(&self) -> u64 {
        self.at
    }

    /// # Errors
    /// The writer's, or a record that cannot follow those before it.
    pub fn record(&mut self, record: &Record) -> Result<(), Error> {
        let head = Head::of(record);
        head.follows(&self.totals, self.size_bytes, self.at)?;
        self.out.write_all(&head.encode())?;
        self.at += head.encode().len() as u64;
        if let Record::Data { data, .. } = record {
            self.out.write_all(data)?;
            self.at += data.len() as u64;
        }
        self.totals.add(&head);
        Ok(())
    }

    /// Ends the file; returns what it was written to.
    ///
    /// # Errors
    /// The writer's.
    pub fn end(mut self) -> Result<W, Error> {
        self.out.write_all(&Head::end(&self.totals).encode())?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// Passes on what was written, without an end.
    ///
    /// # Errors
    /// The writer's.
    pub fn flush(&mut self) -> Result<(), Error> {
        Ok(self.out.flush()?)
    }
}
