//! A connection that is established again whenever it breaks, with its unanswered requests sent
//! again.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use quoin_types::ClientId;
use quoin_types::block::Operation;

use super::numbers::{Keyed, Numbers};
use super::pipe::{Done, Pipe};
use super::register::Register;
use super::{ClientError, ClientOptions, ExportInfo, RequestError};

const BACKOFF_MIN: Duration = Duration::from_millis(5);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// Time for the server to close a connection after the client's disconnect.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Token of the flush after which a client has begun for certain; no owner has one like it.
const BEGINS: u64 = u64::MAX;

/// A request that waits for a connection, or for a number.
struct Held {
    token: u64,
    operation: Operation,
    keyed: Option<Keyed>,
}

/// The client to show to a server; `None`: its requests are not sent again, or change nothing.
fn shown(options: &ClientOptions, numbers: &Numbers) -> Option<ClientId> {
    (options.reconnect && !options.read_only).then(|| numbers.shown())
}

/// A link. Its owner bounds it: everything submitted is kept until it is answered.
pub struct Link {
    options: ClientOptions,
    state: State,
    /// Requests for the next connection, oldest first.
    held: VecDeque<Held>,
    /// Changing requests that wait until the client has begun, or for a number.
    waiting: VecDeque<Held>,
    numbers: Numbers,
    info: ExportInfo,
    reconnects: u64,
    /// Reason for which submitted requests may not be sent any more.
    superseded: Option<String>,
}

enum State {
    Up(Pipe),
    /// The server stops, or this side ended the connection: the link waits for its end.
    Closing {
        pipe: Pipe,
        until: Instant,
    },
    Down {
        next: Instant,
        backoff: Duration,
    },
    Failed,
}

impl Link {
    /// Connects once, so that the caller gets an error at once for a wrong address.
    pub fn connect(options: ClientOptions) -> Result<Self, ClientError> {
        Self::connect_with(options, Register::of_process())
    }

    /// Connects with a register that outlives this process.
    pub fn connect_with(options: ClientOptions, register: Register) -> Result<Self, ClientError> {
        let numbers = Numbers::new(register);
        let pipe = Pipe::negotiate(&options, shown(&options, &numbers))?;
        let pipe = pipe.hold_on_shutdown(options.reconnect);
        let mut link = Self::new(options, State::Failed, pipe.info(), numbers);
        link.take_up(pipe);
        Ok(link)
    }

    /// Resumes for an earlier process that had a connection to an export like `info`. The server
    /// need not be reachable now.
    pub fn resume(options: ClientOptions, info: ExportInfo, register: Register) -> Self {
        let state = State::Down { next: Instant::now(), backoff: BACKOFF_MIN };
        Self::new(options, state, info, Numbers::new(register))
    }

    fn new(options: ClientOptions, state: State, info: ExportInfo, numbers: Numbers) -> Self {
        Self {
            options,
            state,
            held: VecDeque::new(),
            waiting: VecDeque::new(),
            numbers,
            info,
            reconnects: 0,
            superseded: None,
        }
    }

    /// The export as it was at the last connection.
    pub fn info(&self) -> ExportInfo {
        self.info
    }

    /// Returns why the server's volume is not the one that this link was made for: another node
    /// used it meanwhile, so requests held here must never be sent. The owner stops the link.
    pub fn superseded(&self) -> Option<&str> {
        self.superseded.as_deref()
    }

    /// Number of reconnections.
    pub fn reconnects(&self) -> u64 {
        self.reconnects
    }

    pub fn connected(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    /// Returns the descriptor to wait for, if there is a connection.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Up(pipe) | State::Closing { pipe, .. } => Some(pipe.fd()),
            State::Down { .. } | State::Failed => None,
        }
    }

    pub fn wants_write(&self) -> bool {
        matches!(&self.state, State::Up(pipe) if pipe.wants_write())
    }

    /// Time at which [`Link::drive`] is due without any event on the descriptor.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Closing { until, .. } => Some(*until),
            State::Down { next, .. } => Some(*next),
            State::Up(_) | State::Failed => None,
        }
    }

    pub fn in_flight(&self) -> usize {
        self.held.len()
            + self.waiting.len()
            + match &self.state {
                State::Up(pipe) | State::Closing { pipe, .. } => pipe.in_flight(),
                State::Down { .. } | State::Failed => 0,
            }
    }

    /// Queues a request; the next [`Link::drive`] sends it.
    pub fn submit(&mut self, token: u64, operation: Operation) {
        self.pass(Held { token, operation, keyed: None });
    }

    /// Queues a request whose number the next process finds by its key. The owner calls
    /// [`Link::release`] once its answer has arrived where the request came from.
    pub fn submit_keyed(&mut self, token: u64, operation: Operation, keyed: Keyed) {
        // Now, not when there is a connection: what is left unclaimed counts as answered.
        self.numbers.resume(token, keyed.key);
        self.pass(Held { token, operation, keyed: Some(keyed) });
    }

    /// The answer to a keyed request has arrived.
    pub fn release(&mut self, token: u64) {
        self.numbers.release(token);
        // Nothing else may come from the server that would send what waits for a number.
        if !self.waiting.is_empty() {
            self.pass_waiting();
        }
    }

    /// Offset of the piece at which the last process was, of each request by its key.
    pub fn reached(&self) -> HashMap<u64, u64> {
        self.numbers.reached()
    }

    /// Requests of the last process that were not submitted again had their answers.
    pub fn forget_left(&mut self) {
        self.numbers.forget_left();
    }

    /// Sends a request, or has it wait for what it lacks.
    fn pass(&mut self, request: Held) {
        let State::Up(pipe) = &mut self.state else { return self.held.push_back(request) };
        let changes = matches!(
            request.operation,
            Operation::Write { .. } | Operation::Trim { .. } | Operation::WriteZeroes { .. }
        );
        if self.info.client.is_none() || !changes {
            return pipe.submit(request.token, request.operation);
        }
        let Some(numbers) = self.numbers.number(request.token, request.keyed) else {
            return self.waiting.push_back(request);
        };
        pipe.submit_numbered(request.token, request.operation, Some(numbers));
    }

    /// Passes requests on that waited for a number.
    fn pass_waiting(&mut self) {
        for request in std::mem::take(&mut self.waiting) {
            self.pass(request);
        }
    }

    /// Goes on over a new connection: what has no answer is sent again, oldest first.
    fn take_up(&mut self, mut pipe: Pipe) {
        if self.numbers.take_up(pipe.info().client) {
            pipe.submit(BEGINS, Operation::Flush);
        }
        self.state = State::Up(pipe);
        for request in std::mem::take(&mut self.held) {
            self.pass(request);
        }
        self.pass_waiting();
    }

    /// Takes note of answers: numbers become free, and the client may have begun.
    fn answered(&mut self, done: &mut Vec<Done>, before: usize) {
        let mut has_begun = None;
        let mut is_freed = false;
        for one in &done[before..] {
            if one.token == BEGINS {
                has_begun = Some(one.result.is_ok());
            } else {
                is_freed |= self.numbers.answered(one.token);
            }
        }
        if let Some(is_ok) = has_begun {
            done.retain(|one| one.token != BEGINS);
            match is_ok {
                true => self.numbers.has_begun(),
                // It is tried again over another connection.
                false => return self.close(Instant::now()),
            }
        }
        if (is_freed || has_begun.is_some() || !self.waiting.is_empty()) && self.connected() {
            self.pass_waiting();
        }
    }

    /// Sends, receives and reconnects as far as is possible without blocking (except for the
    /// negotiation of a new connection).
    pub fn drive(&mut self, now: Instant, done: &mut Vec<Done>) {
        let before = done.len();
        self.drive_state(now, done);
        self.answered(done, before);
    }

    fn drive_state(&mut self, now: Instant, done: &mut Vec<Done>) {
        match &mut self.state {
            State::Up(pipe) => {
                let result = pipe.send().and_then(|()| pipe.receive(done));
                if pipe.is_client_over() {
                    let address = self.options.address.clone();
                    let reason = "its attachment ended, or another one followed".to_owned();
                    let over = ClientError::ClientOver { address, reason };
                    self.superseded = Some(over.to_string());
                    return;
                }
                match result {
                    Err(error) => self.on_broken_connection(now, &error),
                    Ok(()) if pipe.stopping() => self.close(now),
                    Ok(()) => {}
                }
            }
            State::Closing { pipe, until } => {
                let expired = now >= *until;
                // Any error means that the connection has ended, which is what is awaited.
                if pipe.receive(done).is_err() {
                    self.down(now);
                } else if expired {
                    tracing::warn!(address = %self.options.address,
                        "the NBD server does not close an ended connection; disconnecting");
                    self.down(now);
                }
            }
            State::Down { next, .. } if now >= *next => self.reconnect(now),
            State::Down { .. } | State::Failed => {}
        }
        if matches!(self.state, State::Failed) {
            let lost = self.held.drain(..).chain(self.waiting.drain(..));
            let lost = lost.map(|held| held.token);
            done.extend(lost.map(|token| Done { token, result: Err(RequestError::Disconnected) }));
        }
    }

    /// Sends queued requests without reading answers. A broken connection is detected by the next
    /// [`Link::drive`], for which its descriptor is ready then.
    pub fn send(&mut self) {
        if let State::Up(pipe) = &mut self.state {
            // The error stays on the socket, and `drive` gets it.
            let _ = pipe.send();
        }
    }

    /// Ends the link; unanswered requests fail.
    pub fn stop(mut self) -> Vec<Done> {
        let held = self.held.drain(..).chain(self.waiting.drain(..));
        let mut tokens: Vec<u64> = held.map(|held| held.token).collect();
        match self.state {
            State::Up(mut pipe) if pipe.in_flight() == 0 => pipe.disconnect(),
            State::Up(pipe) | State::Closing { pipe, .. } => {
                tokens.extend(pipe.into_pending().into_iter().map(|(token, _)| token));
            }
            State::Down { .. } | State::Failed => {}
        }
        let stopped = |token| Done { token, result: Err(RequestError::Stopped) };
        tokens.into_iter().filter(|token| *token != BEGINS).map(stopped).collect()
    }

    fn on_broken_connection(&mut self, now: Instant, error: &std::io::Error) {
        tracing::info!(address = %self.options.address, in_flight = self.in_flight(), %error,
            "the NBD connection was lost");
        if error.kind() == std::io::ErrorKind::InvalidData {
            // The client ended the connection, so the server may still hold unread requests.
            self.close(now);
        } else {
            self.down(now);
        }
    }

    fn close(&mut self, now: Instant) {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Up(mut pipe) if self.options.reconnect => {
                pipe.stop_sending();
                self.state = State::Closing { pipe, until: now + CLOSE_TIMEOUT };
            }
            state => {
                self.state = state;
                self.down(now);
            }
        }
    }

    fn down(&mut self, now: Instant) {
        let next = if self.options.reconnect {
            State::Down { next: now, backoff: BACKOFF_MIN }
        } else {
            State::Failed
        };
        if let State::Up(pipe) | State::Closing { pipe, .. } =
            std::mem::replace(&mut self.state, next)
        {
            // Requests that wait were submitted later, and are numbered later.
            for request in std::mem::take(&mut self.waiting).into_iter().rev() {
                self.held.push_front(request);
            }
            for (token, operation) in pipe.into_pending().into_iter().rev() {
                if token != BEGINS {
                    // It keeps its number, if it has one.
                    self.held.push_front(Held { token, operation, keyed: None });
                }
            }
        }
    }

    fn reconnect(&mut self, now: Instant) {
        let State::Down { backoff, .. } = self.state else { return };
        match self.try_reconnect() {
            Ok(pipe) => {
                tracing::info!(address = %self.options.address, resubmitted = self.held.len(),
                    "the NBD connection is restored");
                let known = self.info.since_epoch;
                self.info = pipe.info();
                if self.info.since_epoch == 0 {
                    self.info.since_epoch = known;
                }
                self.reconnects += 1;
                self.take_up(pipe);
            }
            Err(error) => {
                if let ClientError::OtherUse { .. } | ClientError::ClientOver { .. } = error {
                    self.superseded = Some(error.to_string());
                }
                if backoff >= BACKOFF_MAX {
                    tracing::debug!(%error, "IO still waits for the server");
                } else {
                    tracing::info!(%error, held = self.held.len(), "IO waits for the server");
                }
                let next = now + backoff;
                self.state = State::Down { next, backoff: (backoff * 2).min(BACKOFF_MAX) };
            }
        }
    }

    fn try_reconnect(&self) -> Result<Pipe, ClientError> {
        let shown = shown(&self.options, &self.numbers);
        let pipe = Pipe::negotiate(&self.options, shown)?.hold_on_shutdown(true);
        if !self.numbers.may_go_on(pipe.info().client) {
            let reason = "it does not number requests any more".to_owned();
            return Err(ClientError::ClientOver { address: self.options.address.clone(), reason });
        }
        let (was, is) = (self.info.size_bytes, pipe.info().size_bytes);
        if is < was {
            return Err(ClientError::Shrunk { address: self.options.address.clone(), was, is });
        }
        let (was, is) = (self.info.since_epoch, pipe.info().since_epoch);
        if was != 0 && is != 0 && was != is {
            return Err(ClientError::OtherUse { address: self.options.address.clone(), was, is });
        }
        Ok(pipe)
    }
}
