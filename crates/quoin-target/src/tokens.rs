//! Tokens of the target, each of which names a client and one of its requests.

use quoin_types::Time;
use quoin_types::block::Token;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Key of the client's connection.
    pub client: u64,
    pub token: Token,
    /// Kind of the request for metrics, and its arrival.
    pub kind: u8,
    pub came: Time,
    /// Place of a read, which its answer does not name; 0 for other requests.
    pub offset: u64,
}

/// Tokens in use, reused after the reply. No allocation per request in the long run.
#[derive(Default)]
pub struct Tokens {
    slots: Vec<Option<Origin>>,
    free: Vec<u32>,
}

impl Tokens {
    /// Number of requests that have no reply yet.
    pub fn open(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn issue(&mut self, origin: Origin) -> Token {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Some(origin);
            return u64::from(slot);
        }
        self.slots.push(Some(origin));
        self.slots.len() as u64 - 1
    }

    /// Returns the origin of this reply; the token may be issued again afterwards.
    pub fn redeem(&mut self, token: Token) -> Option<Origin> {
        let origin = self.slots.get_mut(token as usize)?.take()?;
        self.free.push(token as u32);
        Some(origin)
    }

    /// Returns the requests that this client waits for.
    pub fn of(&self, client: u64) -> Vec<Token> {
        let origins = (0..).zip(&self.slots);
        let of_it = origins.filter(|(_, origin)| origin.is_some_and(|o| o.client == client));
        of_it.map(|(token, _)| token).collect()
    }

    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_stands_for_one_request_and_is_redeemed_once() {
        let mut tokens = Tokens::default();
        let origin = |client| Origin { client, token: 9, kind: 0, came: Time::ZERO, offset: 0 };
        let (a, b) = (origin(1), origin(2));
        let (first, second) = (tokens.issue(a), tokens.issue(b));
        assert_ne!(first, second);
        assert_eq!(tokens.redeem(first), Some(a));
        assert_eq!(tokens.redeem(first), None);
        assert_eq!(tokens.issue(b), first);
        assert_eq!((tokens.redeem(second), tokens.redeem(77), tokens.in_use()), (Some(b), None, 1));
    }
}
