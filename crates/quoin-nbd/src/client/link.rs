//! A connection that is established again whenever it breaks, with its unanswered requests sent
//! again.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use quoin_types::block::Operation;

use super::pipe::{Done, Pipe};
use super::{ClientError, ClientOptions, ExportInfo, RequestError};

const BACKOFF_MIN: Duration = Duration::from_millis(5);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// Time for the server to close a connection after the client's disconnect.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A link. Its owner bounds it: everything submitted is kept until it is answered.
pub struct Link {
    options: ClientOptions,
    state: State,
    /// Requests for the next connection, oldest first.
    held: VecDeque<(u64, Operation)>,
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
        let pipe = Pipe::connect(&options)?.hold_on_shutdown(options.reconnect);
        let info = pipe.info();
        Ok(Self {
            options,
            state: State::Up(pipe),
            held: VecDeque::new(),
            info,
            reconnects: 0,
            superseded: None,
        })
    }

    /// Resumes for an earlier process that had a connection to an export like `info`. The server
    /// need not be reachable now.
    pub fn resume(options: ClientOptions, info: ExportInfo) -> Self {
        let state = State::Down { next: Instant::now(), backoff: BACKOFF_MIN };
        Self { options, state, held: VecDeque::new(), info, reconnects: 0, superseded: None }
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
            + match &self.state {
                State::Up(pipe) | State::Closing { pipe, .. } => pipe.in_flight(),
                State::Down { .. } | State::Failed => 0,
            }
    }

    /// Queues a request; the next [`Link::drive`] sends it.
    pub fn submit(&mut self, token: u64, operation: Operation) {
        match &mut self.state {
            State::Up(pipe) => pipe.submit(token, operation),
            _ => self.held.push_back((token, operation)),
        }
    }

    /// Sends, receives and reconnects as far as is possible without blocking (except for the
    /// negotiation of a new connection).
    pub fn drive(&mut self, now: Instant, done: &mut Vec<Done>) {
        match &mut self.state {
            State::Up(pipe) => {
                let result = pipe.send().and_then(|()| pipe.receive(done));
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
            let lost = self.held.drain(..);
            done.extend(
                lost.map(|(token, _)| Done { token, result: Err(RequestError::Disconnected) }),
            );
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
        let mut tokens: Vec<u64> = self.held.drain(..).map(|(token, _)| token).collect();
        match self.state {
            State::Up(mut pipe) if pipe.in_flight() == 0 => pipe.disconnect(),
            State::Up(pipe) | State::Closing { pipe, .. } => {
                tokens.extend(pipe.into_pending().into_iter().map(|(token, _)| token));
            }
            State::Down { .. } | State::Failed => {}
        }
        let stopped = |token| Done { token, result: Err(RequestError::Stopped) };
        tokens.into_iter().map(stopped).collect()
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
            for request in pipe.into_pending().into_iter().rev() {
                self.held.push_front(request);
            }
        }
    }

    fn reconnect(&mut self, now: Instant) {
        let State::Down { backoff, .. } = self.state else { return };
        match self.try_reconnect() {
            Ok(mut pipe) => {
                tracing::info!(address = %self.options.address, resubmitted = self.held.len(),
                    "the NBD connection is restored");
                let known = self.info.since_epoch;
                self.info = pipe.info();
                if self.info.since_epoch == 0 {
                    self.info.since_epoch = known;
                }
                self.reconnects += 1;
                for (token, operation) in self.held.drain(..) {
                    pipe.submit(token, operation);
                }
                self.state = State::Up(pipe);
            }
            Err(error) => {
                if let ClientError::OtherUse { .. } = error {
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
        let pipe = Pipe::connect(&self.options)?.hold_on_shutdown(true);
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
