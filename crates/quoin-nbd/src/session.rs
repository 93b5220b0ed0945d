//! The server's side of one connection: negotiation, then transmission, with TLS below if the
//! policy requires it.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use quoin_types::ClientId;
use quoin_types::block::{Closed, DeviceInfo, Frontend, Reply, Request};

use super::exports::Exports;
use super::negotiation::{Negotiation, Outcome};
use super::secure::Secure;
use super::transmission::Transmission;

/// Clients that may use the session.
#[derive(Clone)]
pub enum TlsPolicy {
    /// No TLS: for unix sockets, where the mode of the directory controls access, and for loopback
    /// TCP where an operator requested it by an explicit flag.
    Plain,
    /// Only `STARTTLS` and `ABORT` are answered before TLS is up; the configuration decides which
    /// client certificates are valid.
    Required(Arc<rustls::ServerConfig>),
}

/// Limits of one session's memory.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Limit of requests accepted and not yet replied to.
    pub requests_in_flight_max: usize,
    /// Limit of payload bytes (written, or to be read) of those; one more request is accepted while
    /// they are below it.
    pub bytes_in_flight_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { requests_in_flight_max: 1024, bytes_in_flight_max: 32 << 20 }
    }
}

/// One client's connection to one volume.
pub struct Session {
    exports: Box<dyn Exports>,
    /// The volume that the client opened.
    device: Option<DeviceInfo>,
    /// The client whose requests are numbered, and whether it begins.
    client: Option<(ClientId, bool)>,
    limits: Limits,
    policy: TlsPolicy,
    phase: Phase,
    secure: Option<Secure>,
}

enum Phase {
    Negotiation(Negotiation),
    Transmission(Transmission),
    Ended,
}

/// Result of a step: it decides whether the next bytes are still of the same kind.
enum Step {
    Taken,
    StartTls,
}

impl Session {
    /// Creates a session of a socket that serves one volume.
    pub fn new(info: DeviceInfo, policy: TlsPolicy) -> Self {
        Self::with_limits(info, policy, Limits::default())
    }

    pub fn with_limits(info: DeviceInfo, policy: TlsPolicy, limits: Limits) -> Self {
        Self::over(Box::new(info), policy, limits)
    }

    /// Creates a session whose client chooses among several volumes.
    pub fn over(exports: Box<dyn Exports>, policy: TlsPolicy, limits: Limits) -> Self {
        let required = matches!(policy, TlsPolicy::Required(_));
        let phase = Phase::Negotiation(Negotiation::new(required));
        Self { exports, device: None, client: None, limits, policy, phase, secure: None }
    }

    /// Returns the volume that the client has opened; `None` while it negotiates.
    pub fn device(&self) -> Option<&DeviceInfo> {
        self.device.as_ref()
    }

    /// Consumes clear bytes and produces clear bytes.
    fn step(
        &mut self,
        input: &mut BytesMut,
        requests: &mut Vec<Request>,
        output: &mut Vec<Bytes>,
    ) -> Result<Step, Closed> {
        if let Phase::Negotiation(negotiation) = &mut self.phase {
            match negotiation.receive(&*self.exports, input, output)? {
                Outcome::Continue => return Ok(Step::Taken),
                Outcome::StartTls => return Ok(Step::StartTls),
                Outcome::Transmit { device, structured, base_allocation, client } => {
                    let numbers = client.map(|(client, _)| client);
                    let transmission = Transmission::new(
                        &device,
                        self.limits,
                        structured,
                        base_allocation,
                        numbers,
                    );
                    self.client = client;
                    self.phase = Phase::Transmission(transmission);
                    self.device = Some(device);
                }
            }
        }
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.receive(input, requests, output)?,
            Phase::Negotiation(_) | Phase::Ended => {
                return Err(Closed("the session has ended".into()));
            }
        }
        Ok(Step::Taken)
    }

    /// Decrypts and consumes one piece after the other, so that no more clear bytes are buffered
    /// here than one request has.
    fn receive_secure(
        &mut self,
        secure: &mut Secure,
        input: &mut BytesMut,
        requests: &mut Vec<Request>,
        output: &mut Vec<Bytes>,
    ) -> Result<(), Closed> {
        loop {
            let mut clear = Vec::new();
            let taken = self.step(&mut secure.clear, requests, &mut clear);
            secure.seal(clear, output)?;
            taken?;
            if !self.wants_input() || input.is_empty() {
                return Ok(());
            }
            let decrypted = secure.open(input);
            if let Some(proven) = secure.take_proven()? {
                self.exports.identify(&proven);
            }
            secure.seal(Vec::new(), output)?;
            decrypted?;
        }
    }
}

impl Frontend for Session {
    fn receive(
        &mut self,
        input: &mut BytesMut,
        requests: &mut Vec<Request>,
        output: &mut Vec<Bytes>,
    ) -> Result<(), Closed> {
        if self.secure.is_none() {
            match self.step(input, requests, output) {
                Ok(Step::Taken) => return Ok(()),
                Ok(Step::StartTls) => match Secure::new(&self.policy) {
                    Ok(secure) => self.secure = Some(secure),
                    Err(closed) => {
                        self.phase = Phase::Ended;
                        return Err(closed);
                    }
                },
                Err(closed) => {
                    self.phase = Phase::Ended;
                    return Err(closed);
                }
            }
        }
        let Some(mut secure) = self.secure.take() else { return Ok(()) };
        let result = self.receive_secure(&mut secure, input, requests, output);
        if result.is_err() {
            self.phase = Phase::Ended;
            secure.end(output);
        }
        self.secure = Some(secure);
        result
    }

    fn complete(&mut self, reply: Reply, output: &mut Vec<Bytes>) {
        let Phase::Transmission(transmission) = &mut self.phase else { return };
        match &mut self.secure {
            None => transmission.complete(reply, output),
            Some(secure) => {
                let mut clear = Vec::new();
                transmission.complete(reply, &mut clear);
                if secure.seal(clear, output).is_err() {
                    self.phase = Phase::Ended;
                }
            }
        }
    }

    fn wants_input(&self) -> bool {
        match &self.phase {
            Phase::Negotiation(_) => true,
            Phase::Transmission(transmission) => transmission.wants_input(),
            // The driver calls once more, and learns that the session has ended.
            Phase::Ended => true,
        }
    }

    fn held_bytes(&self) -> usize {
        match &self.phase {
            Phase::Transmission(transmission) => transmission.held_bytes(),
            Phase::Negotiation(_) | Phase::Ended => 0,
        }
    }

    fn set_held_bytes_max(&mut self, bytes: usize) {
        self.limits.bytes_in_flight_max = bytes;
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.set_limits(self.limits);
        }
    }

    fn client(&self) -> Option<(ClientId, bool)> {
        self.client
    }

    fn device_changed(&mut self, info: &DeviceInfo) {
        // Each client keeps the right to write that it was given, whatever others have.
        let own = self.device.as_ref().map(|device| device.read_only);
        let info = &DeviceInfo { read_only: own.unwrap_or(info.read_only), ..info.clone() };
        self.exports.device_changed(info);
        if self.device.is_some() {
            self.device = Some(info.clone());
        }
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.device_changed(info);
        }
    }
}
