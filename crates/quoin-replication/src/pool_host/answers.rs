//! Memory for answers that peers have not taken yet, and how it is shared.
//!
//! A connection that owes much is not read from, nor is any that owes answers once the pool as a
//! whole holds too much. One that owes nothing is always read from: it has taken its answers.

/// Answers one connection may owe before it is not read from.
const ONE_MAX: usize = 16 << 20;
/// Answers all connections may owe before those that owe any are not read from.
const ALL_MAX: usize = 256 << 20;

/// Bytes that all connections of a pool owe.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answers {
    owed_bytes: usize,
}

impl Answers {
    /// A connection owes `now` instead of `before`.
    pub fn changed(&mut self, before: usize, now: usize) {
        self.owed_bytes = self.owed_bytes - before + now;
    }

    /// Returns true if all answers were taken.
    pub fn is_empty(&self) -> bool {
        self.owed_bytes == 0
    }

    /// Returns true if a connection that owes so much is not read from.
    pub fn stalls(&self, own_bytes: usize) -> bool {
        own_bytes > ONE_MAX || (own_bytes > 0 && self.owed_bytes > ALL_MAX)
    }

    /// Returns true if one that was not read from is looked at again: not at each byte that is
    /// taken.
    pub fn goes_on(&self, own_bytes: usize) -> bool {
        own_bytes <= ONE_MAX / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_no_answers_is_not_read_from_and_holds_up_only_those_who_owe_some() {
        let mut answers = Answers::default();
        assert!(answers.is_empty() && !answers.stalls(ONE_MAX) && answers.stalls(ONE_MAX + 1));
        assert!(answers.goes_on(ONE_MAX / 2) && !answers.goes_on(ONE_MAX / 2 + 1));
        (0..17).for_each(|_| answers.changed(0, ONE_MAX));
        assert!(answers.stalls(1) && !answers.stalls(0));
        answers.changed(ONE_MAX, 0);
        assert!(!answers.stalls(1), "no more than all may owe");
        (0..16).for_each(|_| answers.changed(ONE_MAX, 0));
        assert!(answers.is_empty());
    }
}
