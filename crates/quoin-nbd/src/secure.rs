//! TLS below a session: converts socket bytes to clear bytes and back, without I/O.

use std::io::{ErrorKind, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use quoin_types::block::Closed;
use rustls::ServerConnection;

use super::exports::{Proven, connection_secret};
use super::session::TlsPolicy;

/// One TLS connection and the clear bytes that its session has not consumed yet.
pub(super) struct Secure {
    connection: ServerConnection,
    pub(super) clear: BytesMut,
    identified: bool,
}

impl Secure {
    pub(super) fn new(policy: &TlsPolicy) -> Result<Self, Closed> {
        let TlsPolicy::Required(config) = policy else {
            return Err(Closed("TLS was started on a socket without TLS".into()));
        };
        let mut connection = ServerConnection::new(config.clone())
            .map_err(|error| Closed(format!("TLS cannot start: {error}")))?;
        // Written bytes are drained at once, so the buffer is bounded by one batch of replies.
        connection.set_buffer_limit(None);
        Ok(Self { connection, clear: BytesMut::new(), identified: false })
    }

    /// Decrypts a piece of `input` (not empty) into `clear`.
    pub(super) fn open(&mut self, input: &mut BytesMut) -> Result<(), Closed> {
        let failed = |what: &dyn std::fmt::Display| Closed(format!("TLS failed: {what}"));
        let mut rest = &input[..];
        let taken = self.connection.read_tls(&mut rest).map_err(|error| failed(&error))?;
        input.advance(taken);
        let state = self.connection.process_new_packets().map_err(|error| failed(&error))?;
        let mut left = state.plaintext_bytes_to_read();
        while left > 0 {
            let start = self.clear.len();
            self.clear.resize(start + left, 0);
            let read = match self.connection.reader().read(&mut self.clear[start..]) {
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                Err(error) => return Err(failed(&error)),
            };
            self.clear.truncate(start + read);
            left = if read == 0 { 0 } else { left - read };
        }
        if state.peer_has_closed() {
            return Err(Closed("client closed TLS".into()));
        }
        Ok(())
    }

    /// Returns what the handshake has proven, once: when it has just ended.
    pub(super) fn take_proven(&mut self) -> Result<Option<Proven<'_>>, Closed> {
        if self.identified || self.connection.is_handshaking() {
            return Ok(None);
        }
        self.identified = true;
        let secret = connection_secret(&self.connection)
            .map_err(|error| Closed(format!("TLS failed: {error}")))?;
        let certificates = self.connection.peer_certificates().unwrap_or_default();
        Ok(Some(Proven { certificates, secret }))
    }

    /// Encrypts `clear`, and adds the messages of TLS itself.
    pub(super) fn seal(
        &mut self,
        clear: Vec<Bytes>,
        output: &mut Vec<Bytes>,
    ) -> Result<(), Closed> {
        let failed = |error: std::io::Error| Closed(format!("TLS failed: {error}"));
        let mut writer = self.connection.writer();
        for bytes in &clear {
            writer.write_all(bytes).map_err(failed)?;
        }
        let mut sealed = Vec::new();
        while self.connection.wants_write() {
            self.connection.write_tls(&mut sealed).map_err(failed)?;
        }
        if !sealed.is_empty() {
            output.push(Bytes::from(sealed));
        }
        Ok(())
    }

    /// Sends the closing alert.
    pub(super) fn end(&mut self, output: &mut Vec<Bytes>) {
        self.connection.send_close_notify();
        // The connection is over either way.
        let _ = self.seal(Vec::new(), output);
    }
}
