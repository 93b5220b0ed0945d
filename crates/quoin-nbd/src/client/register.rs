//! Numbers of a client's changing requests, in memory that may outlive its process.
//!
//! A client of a shared volume numbers each request that changes the volume, and sends it again
//! under the same number, so that it takes effect once. The next process finds here under which
//! number the last one sent a request: by the key that the kernel gave the request, and by the
//! offset of the piece that was under way.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use quoin_types::ClientId;
use quoin_types::client::CLIENT_WINDOW;

/// Words of the client's id, its state, and the next number.
const HEAD_WORDS: usize = 4;
const STATE: usize = 2;
const NEXT: usize = 3;
/// Words of a slot: key, offset, and the number plus one; 0: the slot is free.
const SLOT_WORDS: usize = 3;
const SLOTS: usize = CLIENT_WINDOW as usize;
/// Requests that may begin; the rest is for further pieces of those that have.
const BEGUN_MAX: usize = SLOTS / 2;

/// States of the client.
const BEGINS: u64 = 1;
const BEGUN: u64 = 2;

/// The memory of a [`Register`].
pub trait Memory: Send {
    /// At least [`Register::WORDS`] words, zero at first.
    fn words(&self) -> &[AtomicU64];
}

impl Memory for Vec<AtomicU64> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// Names a request beyond this process: its key, which the kernel chose, and the offset of the
/// piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey {
    pub key: u64,
    pub offset: u64,
}

/// A client and its numbers.
pub struct Register {
    memory: Box<dyn Memory>,
    /// Slots of the numbers that have no answer yet.
    outstanding: BTreeMap<u64, usize>,
    free: Vec<usize>,
    /// Requests of the last process that the kernel has not sent again yet.
    left: HashMap<RequestKey, u64>,
    next: u64,
}

impl Register {
    pub const WORDS: usize = HEAD_WORDS + SLOTS * SLOT_WORDS;

    /// A register in the memory of this process.
    pub fn of_process() -> Self {
        Self::new(Box::new(Vec::from_iter((0..Self::WORDS).map(|_| AtomicU64::new(0)))))
    }

    /// A register as the last process left it.
    ///
    /// # Panics
    /// The memory is too small.
    pub fn new(memory: Box<dyn Memory>) -> Self {
        assert!(memory.words().len() >= Self::WORDS, "the memory of a register");
        let mut register = Self {
            memory,
            outstanding: BTreeMap::new(),
            free: Vec::new(),
            left: HashMap::new(),
            next: 0,
        };
        if register.get(STATE) != BEGUN {
            // Nothing was ever sent under a number.
            register.clear();
        }
        register.next = register.get(NEXT);
        for slot in (0..SLOTS).rev() {
            let Some(number) = register.get(place(slot) + 2).checked_sub(1) else {
                register.free.push(slot);
                continue;
            };
            let (key, offset) = (register.get(place(slot)), register.get(place(slot) + 1));
            register.outstanding.insert(number, slot);
            register.left.insert(RequestKey { key, offset }, number);
            register.next = register.next.max(number + 1);
        }
        register
    }

    fn get(&self, word: usize) -> u64 {
        self.memory.words()[word].load(Ordering::Acquire)
    }

    /// The next process sees the words in the order in which they were set.
    fn set(&self, word: usize, to: u64) {
        self.memory.words()[word].store(to, Ordering::Release);
    }

    fn clear(&mut self) {
        self.set(STATE, 0);
        for word in HEAD_WORDS..Self::WORDS {
            self.set(word, 0);
        }
        self.set(NEXT, 0);
    }

    /// The client, once it has begun for certain.
    pub fn client(&self) -> Option<ClientId> {
        let id = u128::from(self.get(0)) | u128::from(self.get(1)) << 64;
        (self.get(STATE) == BEGUN).then_some(ClientId(id))
    }

    /// Takes a client that begins. Nothing is sent under a number until it has.
    pub fn begin(&mut self, client: ClientId) {
        self.clear();
        self.outstanding.clear();
        self.left.clear();
        self.free = (0..SLOTS).rev().collect();
        self.next = 0;
        self.set(0, client.0 as u64);
        self.set(1, (client.0 >> 64) as u64);
        self.set(STATE, BEGINS);
    }

    /// The client has begun: its entry is on media.
    pub fn has_begun(&mut self) {
        self.set(STATE, BEGUN);
    }

    /// Returns true if a request has no answer.
    pub fn is_outstanding(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Lowest number without an answer.
    pub fn low(&self) -> u64 {
        self.outstanding.keys().next().copied().unwrap_or(self.next)
    }

    /// The number of a request that the last process sent.
    pub fn resume(&mut self, key: RequestKey) -> Option<u64> {
        self.left.remove(&key)
    }

    /// Numbers a request. `None`: too many have no answer. `follows`: the number of the piece before
    /// it of one request, which is released next: it holds up no further piece.
    pub fn number(&mut self, key: Option<RequestKey>, follows: Option<u64>) -> Option<u64> {
        let begun_max = if follows.is_some() { SLOTS } else { BEGUN_MAX };
        let window = CLIENT_WINDOW - if follows.is_some() { 0 } else { CLIENT_WINDOW / 8 };
        let mut others = self.outstanding.keys().filter(|number| Some(**number) != follows);
        let low = others.next().copied().unwrap_or(self.next);
        if self.outstanding.len() >= begun_max || self.next - low >= window {
            return None;
        }
        let slot = self.free.pop()?;
        let number = self.next;
        self.next += 1;
        let named = key.unwrap_or(RequestKey { key: 0, offset: 0 });
        self.set(place(slot), named.key);
        self.set(place(slot) + 1, named.offset);
        self.set(place(slot) + 2, number + 1);
        self.set(NEXT, self.next);
        self.outstanding.insert(number, slot);
        Some(number)
    }

    /// The answer has arrived where it is needed: the number is not used any more.
    pub fn release(&mut self, number: u64) {
        if let Some(slot) = self.outstanding.remove(&number) {
            self.set(place(slot) + 2, 0);
            self.free.push(slot);
        }
    }

    /// Offset of the last piece of each request that the last process sent, by key.
    pub fn reached(&self) -> HashMap<u64, u64> {
        let mut reached = HashMap::new();
        for left in self.left.keys() {
            let offset = reached.entry(left.key).or_insert(left.offset);
            *offset = left.offset.max(*offset);
        }
        reached
    }

    /// The kernel has sent again all that it will: the last process had answered the rest.
    pub fn forget_left(&mut self) {
        for number in std::mem::take(&mut self.left).into_values() {
            self.release(number);
        }
    }
}

fn place(slot: usize) -> usize {
    HEAD_WORDS + slot * SLOT_WORDS
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Shared(Arc<Vec<AtomicU64>>);

    impl Memory for Shared {
        fn words(&self) -> &[AtomicU64] {
            &self.0
        }
    }

    fn memory() -> Arc<Vec<AtomicU64>> {
        Arc::new((0..Register::WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    fn over(memory: &Arc<Vec<AtomicU64>>) -> Register {
        Register::new(Box::new(Shared(memory.clone())))
    }

    fn key(key: u64, offset: u64) -> Option<RequestKey> {
        Some(RequestKey { key, offset })
    }

    #[test]
    fn the_next_process_sends_a_request_under_the_number_that_it_had() {
        let memory = memory();
        let mut register = over(&memory);
        assert_eq!(register.client(), None);
        register.begin(ClientId(9));
        assert_eq!(register.client(), None, "it begins");
        register.has_begun();
        let numbers = [1, 2, 3].map(|k| register.number(key(k, 0), None).unwrap());
        assert_eq!(numbers, [0, 1, 2]);
        register.release(0);
        assert_eq!(register.low(), 1);
        drop(register);

        let mut register = over(&memory);
        assert_eq!((register.client(), register.low()), (Some(ClientId(9)), 1));
        assert_eq!(register.resume(key(3, 0).unwrap()), Some(2), "sent again");
        assert_eq!(register.resume(key(3, 0).unwrap()), None);
        assert_eq!(register.number(key(4, 0), None), Some(3), "a new one");
        register.forget_left();
        assert_eq!(register.low(), 2, "the kernel had the answer of the other one");
    }

    #[test]
    fn a_long_request_goes_on_with_the_piece_that_was_under_way() {
        let memory = memory();
        let mut register = over(&memory);
        register.begin(ClientId(9));
        register.has_begun();
        let first = register.number(key(7, 0), None).unwrap();
        let second = register.number(key(7, 4096), Some(first)).unwrap();
        let both = over(&memory).reached();
        assert_eq!(both[&7], 4096, "whether or not the first was released");
        register.release(first);
        let mut next = over(&memory);
        assert_eq!(next.reached(), HashMap::from([(7, 4096)]));
        assert_eq!(next.resume(key(7, 4096).unwrap()), Some(second));
    }

    #[test]
    fn a_client_that_had_not_begun_for_certain_is_forgotten() {
        let memory = memory();
        let mut register = over(&memory);
        register.begin(ClientId(9));
        drop(register);
        assert_eq!(over(&memory).client(), None);
    }

    #[test]
    fn no_more_requests_are_numbered_than_the_volume_remembers() {
        let mut register = Register::of_process();
        register.begin(ClientId(9));
        register.has_begun();
        let begun = (0..).map_while(|_| register.number(None, None)).count();
        assert_eq!(begun, BEGUN_MAX);
        assert!(register.number(None, Some(7)).is_some(), "what has begun goes on");
        for number in 1..=BEGUN_MAX as u64 {
            register.release(number);
        }
        while let Some(number) = register.number(None, Some(7)) {
            assert!(number < CLIENT_WINDOW, "the first one has no answer");
            register.release(number);
        }
        let next = register.number(None, Some(0)).expect("it follows the one that holds up others");
        assert_eq!(next, CLIENT_WINDOW);
        register.release(0);
        assert_eq!(register.low(), CLIENT_WINDOW);
        assert!(register.number(None, None).is_some());
    }
}
