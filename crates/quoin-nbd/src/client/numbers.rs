//! Numbers of the changing requests of a link (RepeatOnce): which number a request goes under, now
//! and when it is sent again, and which it has to wait for.
//!
//! It has no connection of its own: [`super::Link`] drives it, and so does the simulator.

use std::collections::HashMap;

use quoin_types::ClientId;

use super::register::{Register, RequestKey};

/// The request of an owner that keeps numbers for its next process.
#[derive(Clone, Copy, Debug)]
pub struct Keyed {
    pub key: RequestKey,
    /// The token of the piece before this one of a long request.
    pub follows: Option<u64>,
}

/// Number of a request that was sent or is going to be.
struct Numbered {
    number: u64,
    /// The owner says when its answer has arrived.
    is_keyed: bool,
}

/// The client of a link, and the numbers of its requests by their tokens.
pub struct Numbers {
    register: Register,
    by_token: HashMap<u64, Numbered>,
}

impl Numbers {
    pub fn new(register: Register) -> Self {
        Self { register, by_token: HashMap::new() }
    }

    /// The client to show to the server; 0: one that begins.
    pub fn shown(&self) -> ClientId {
        self.register.client().unwrap_or_default()
    }

    /// Returns true if this client's requests may be sent on: none is in doubt, or it is the one
    /// that numbered them. `None`: the server wants no numbers.
    pub fn may_go_on(&self, client: Option<ClientId>) -> bool {
        !self.register.is_outstanding() || client == self.register.client()
    }

    /// Takes the client of a new connection. Returns true if it begins: nothing that changes the
    /// volume is sent before a flush is answered ([`Numbers::has_begun`]). So no request is in doubt
    /// of a client that did not come to be.
    pub fn take_up(&mut self, client: Option<ClientId>) -> bool {
        match client.filter(|client| self.register.client() != Some(*client)) {
            None => false,
            Some(client) => {
                self.register.begin(client);
                true
            }
        }
    }

    /// The flush after the beginning was answered.
    pub fn has_begun(&mut self) {
        self.register.has_begun();
    }

    /// The number of a request and the lowest one without an answer, to be sent with it. A request
    /// that is sent again keeps its number. `None`: it waits until the client has begun, or for a
    /// number.
    pub fn number(&mut self, token: u64, keyed: Option<Keyed>) -> Option<(u64, u64)> {
        let follows = keyed.and_then(|keyed| keyed.follows);
        let number = match self.by_token.get(&token) {
            Some(numbered) => numbered.number,
            None if self.register.client().is_none() => return None,
            None => {
                let before =
                    follows.map(|token| self.by_token.get(&token).map_or(u64::MAX, |n| n.number));
                self.register.number(keyed.map(|keyed| keyed.key), before)?
            }
        };
        let is_keyed = keyed.is_some();
        self.by_token.entry(token).or_insert(Numbered { number, is_keyed });
        if let Some(before) = follows {
            // This piece is the one that the next process continues with.
            self.release(before);
        }
        Some((number, self.register.low()))
    }

    /// The server's answer has arrived. Returns true if a number became free by that.
    pub fn answered(&mut self, token: u64) -> bool {
        let is_over = self.by_token.get(&token).is_some_and(|numbered| !numbered.is_keyed);
        if is_over {
            self.release(token);
        }
        is_over
    }

    /// The answer has arrived where the request came from.
    pub fn release(&mut self, token: u64) {
        if let Some(numbered) = self.by_token.remove(&token) {
            self.register.release(numbered.number);
        }
    }

    /// A request that the last process may have sent is submitted again: it keeps its number.
    pub fn resume(&mut self, token: u64, key: RequestKey) {
        if let Some(number) = self.register.resume(key) {
            self.by_token.insert(token, Numbered { number, is_keyed: true });
        }
    }

    /// Offset of the piece at which the last process was, of each request by its key.
    pub fn reached(&self) -> HashMap<u64, u64> {
        self.register.reached()
    }

    /// Requests of the last process that were not submitted again had their answers.
    pub fn forget_left(&mut self) {
        self.register.forget_left();
    }
}
