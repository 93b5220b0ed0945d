//! Budgets of each caller and of all together: bytes of messages that are not answered yet, and calls.
//!
//! A limit of a message bounds nothing where a caller may begin a thousand of them. Bytes are taken for
//! a whole message as its length is known, before it comes, and are given back with the answer. A caller
//! gets more only while three times as many are free as it would hold then: one alone gets a quarter of
//! all, and each further one that takes what it can get a quarter of what is left.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quoin_identity::{Peer, Shares};

/// Bytes of all messages of members that are not answered yet.
const BYTES_MAX: u64 = 192 << 20;
/// Free bytes that are required for each byte that the same caller holds.
const FREE_PER_HELD: u64 = 3;
/// Calls of all members, and of one, that are not answered yet.
const CALLS_MAX: usize = 8192;
const CALLS_A_MEMBER_MAX: usize = 512;

/// The budgets of one controller.
#[derive(Clone)]
pub(crate) struct Budgets {
    pub(super) bytes: ByteBudget,
    pub(super) calls: Shares<Peer>,
}

impl Budgets {
    pub(crate) fn new() -> Self {
        Self {
            bytes: ByteBudget::new(BYTES_MAX),
            calls: Shares::new(CALLS_MAX, CALLS_A_MEMBER_MAX),
        }
    }
}

/// A number of bytes that callers share. Clones share them too.
#[derive(Clone)]
pub(super) struct ByteBudget(Arc<Mutex<InUse>>);

struct InUse {
    capacity: u64,
    all: u64,
    /// An entry is there only while its caller holds something.
    by_caller: HashMap<Peer, u64>,
}

/// Bytes of one caller; free again when it is dropped.
pub(super) struct Reserved {
    budget: ByteBudget,
    caller: Peer,
    bytes: u64,
}

impl ByteBudget {
    pub(super) fn new(capacity: u64) -> Self {
        let in_use = InUse { capacity, all: 0, by_caller: HashMap::new() };
        Self(Arc::new(Mutex::new(in_use)))
    }

    /// Takes bytes for a caller; `None`: there are none for it now.
    pub(super) fn take(&self, caller: &Peer, bytes: u64) -> Option<Reserved> {
        let mut in_use = self.lock();
        let held = in_use.by_caller.get(caller).copied().unwrap_or(0);
        let would_hold = held.saturating_add(bytes);
        if would_hold.saturating_mul(FREE_PER_HELD) > in_use.capacity - in_use.all {
            return None;
        }
        in_use.all += bytes;
        in_use.by_caller.insert(caller.clone(), would_hold);
        drop(in_use);
        Some(Reserved { budget: self.clone(), caller: caller.clone(), bytes })
    }

    fn lock(&self) -> MutexGuard<'_, InUse> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut in_use = self.budget.lock();
        in_use.all -= self.bytes;
        if let Some(held) = in_use.by_caller.get_mut(&self.caller) {
            *held -= self.bytes;
            if *held == 0 {
                in_use.by_caller.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_identity::{ClusterId, Role};

    fn pool(n: usize) -> Peer {
        Peer::new(ClusterId(7), Role::Pool, &format!("p{n}")).unwrap()
    }

    fn take_all(budget: &ByteBudget, caller: &Peer, bytes: u64) -> Vec<Reserved> {
        std::iter::from_fn(|| budget.take(caller, bytes)).collect()
    }

    #[test]
    fn one_caller_gets_a_quarter_and_beside_several_that_take_all_they_can_a_report_fits() {
        let (report, mebibytes) = (4 << 20, BYTES_MAX >> 20);
        for hostile in [1, 4, 8] {
            let budget = ByteBudget::new(BYTES_MAX);
            let mut held: Vec<Reserved> = Vec::new();
            for n in 0..hostile {
                held.extend(take_all(&budget, &pool(n), 64 << 10));
            }
            let first: u64 =
                held.iter().filter(|r| r.caller == pool(0)).map(|r| r.bytes >> 10).sum();
            assert!(first >> 10 <= mebibytes / 4, "{first} KiB");
            assert!(budget.take(&pool(99), report).is_some(), "beside {hostile}");
            drop(held);
            let in_use = budget.lock();
            assert_eq!((in_use.all, in_use.by_caller.len()), (0, 0));
        }
    }

    #[test]
    fn the_largest_message_of_all_fits() {
        let budget = ByteBudget::new(BYTES_MAX);
        assert!(budget.take(&pool(0), super::super::gate::MESSAGE_BYTES_MAX as u64).is_some());
        assert!(budget.take(&pool(0), u64::MAX).is_none());
    }
}
