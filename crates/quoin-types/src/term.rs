//! Terms: they decide between two controllers of one cluster.
//!
//! A controller whose records were restored elsewhere may come back while the new one rules: a host
//! that is cut off cannot be distinguished from one that is lost. So each recovery of the records
//! begins a **term**, one above every term that the pools have heard of. Every message of a
//! controller carries its term. Members keep the highest term that they heard of on media, and
//! refuse messages of a former one. Two controllers that began the same number at the same time
//! differ by the id of the term: a member accepts the one that it hears of first, and refuses the
//! other.
//!
//! **The number is the upper part of every epoch**, so epochs of two terms are never equal, and
//! every epoch of a term is above all epochs of the terms before it, however many of them a former
//! controller still grants. So promises, fences, positions and histories, which compare epochs,
//! compare (term, epoch) in this order, on media as well.
//!
//! Term 0 is that of a cluster whose records were never recovered, and of versions without terms.

use std::fmt;

use crate::ids::{Epoch, TermId};
use crate::mutant;

/// Bits of an epoch, of 64, that count the openings of one term.
const OPENING_BITS: u32 = 40;
/// Highest number of a term, so that no epoch is above [`crate::EPOCH_MAX`].
pub const TERM_MAX: u64 = (1 << (62 - OPENING_BITS)) - 1;

/// The reign of one controller over the cluster, from one recovery of the records to the next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Term {
    pub number: u64,
    pub id: TermId,
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number)
    }
}

/// Relation of a term to the highest one heard of before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TermOrder {
    /// The same term.
    Same,
    /// A higher term: from now on the former one is refused.
    Higher,
    /// A lower term, which is over.
    Former,
    /// A term of the same number that another controller began; the other was heard of first.
    Rival,
}

impl TermOrder {
    /// Returns true if messages of this term are refused.
    pub fn is_refused(self) -> bool {
        matches!(self, TermOrder::Former | TermOrder::Rival)
    }
}

impl Term {
    /// Compares this term with `known`, the highest one of a member.
    pub fn compare_with(self, known: Term) -> TermOrder {
        match self.number.cmp(&known.number) {
            std::cmp::Ordering::Greater => TermOrder::Higher,
            std::cmp::Ordering::Less if mutant::is("former-term-believed") => TermOrder::Same,
            std::cmp::Ordering::Less => TermOrder::Former,
            std::cmp::Ordering::Equal if self.id == known.id => TermOrder::Same,
            std::cmp::Ordering::Equal if mutant::is("rival-term-believed") => TermOrder::Same,
            std::cmp::Ordering::Equal => TermOrder::Rival,
        }
    }

    /// Returns true if a controller that rules in this term ends once it hears of `proposed`.
    pub fn is_ended_by(self, proposed: Term) -> bool {
        proposed.number > self.number && !mutant::is("old-controller-goes-on")
    }

    /// Returns the number of a term that begins where these were heard of; `None`: no number is
    /// left.
    pub fn next_number(known: impl IntoIterator<Item = Term>) -> Option<u64> {
        let highest = known.into_iter().map(|term| term.number).max().unwrap_or_default();
        (highest < TERM_MAX).then_some(highest + 1)
    }

    /// Bound below every epoch that this term grants.
    pub fn floor(self) -> Epoch {
        Epoch(self.number << OPENING_BITS)
    }

    /// Version of what a record says by its generation. A restored record, whose generations may count
    /// from lower again, is never older than one of a term before.
    pub fn version_of(self, generation: u64) -> u64 {
        self.floor().0.saturating_add(generation)
    }

    /// Returns the epoch that follows `after` in this term. `None` if `after` is of a later term,
    /// or is the last of this one.
    pub fn next_epoch(self, after: Epoch) -> Option<Epoch> {
        let floor = if mutant::is("term-not-in-the-epoch") { Epoch::ZERO } else { self.floor() };
        let next = Epoch(after.max(floor).0.saturating_add(1));
        (next.term_number() <= self.number || mutant::is("term-not-in-the-epoch")).then_some(next)
    }
}

impl Epoch {
    /// Number of the term in which the epoch was granted.
    pub fn term_number(self) -> u64 {
        self.0 >> OPENING_BITS
    }
}

/// Writes `TERM/EPOCH`, and the epoch alone in term 0.
impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opening = self.0 & ((1 << OPENING_BITS) - 1);
        match self.term_number() {
            0 => write!(f, "{opening}"),
            term => write!(f, "{term}/{opening}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn term(number: u64, id: u128) -> Term {
        Term { number, id: TermId(id) }
    }

    #[test]
    fn a_lower_term_and_a_rival_of_the_same_number_are_refused() {
        for known in [Term::default(), term(1, 7), term(1, 9), term(5, 7)] {
            for proposed in [Term::default(), term(1, 7), term(1, 9), term(5, 7), term(5, 9)] {
                let order = proposed.compare_with(known);
                assert_eq!(order == TermOrder::Same, proposed == known);
                assert_eq!(order == TermOrder::Higher, proposed.number > known.number);
                assert_eq!(
                    order.is_refused(),
                    proposed.number < known.number
                        || (proposed.number == known.number && proposed.id != known.id)
                );
                assert_eq!(known.is_ended_by(proposed), proposed.number > known.number);
            }
        }
    }

    #[test]
    fn every_epoch_of_a_term_is_above_all_epochs_of_earlier_terms() {
        let mut last = Epoch(17);
        for number in [0, 1, 2, 3, TERM_MAX] {
            let term = term(number, 1);
            let first = term.next_epoch(last).unwrap();
            assert!(first > last && first.term_number() == number);
            assert_eq!(term.next_epoch(first), Some(first.next()));
            // Any number of epochs that a former controller still grants.
            last = Epoch(term.floor().0 + (1 << OPENING_BITS) - 2);
            assert_eq!(term.next_epoch(last).unwrap().term_number(), number);
            let used_up = last.next();
            assert_eq!(term.next_epoch(used_up), None, "the term has no epoch left");
            assert!(used_up <= crate::EPOCH_MAX);
        }
        assert_eq!(
            term(1, 1).next_epoch(term(2, 1).floor()),
            None,
            "the epoch belongs to another term"
        );
    }

    #[test]
    fn a_new_term_is_above_all_known_terms() {
        assert_eq!(Term::next_number([]), Some(1));
        assert_eq!(Term::next_number([term(3, 1), term(7, 2), Term::default()]), Some(8));
        assert_eq!(Term::next_number([term(TERM_MAX, 1)]), None);
    }

    #[test]
    fn an_epoch_is_shown_with_its_term_where_there_was_more_than_one() {
        assert_eq!(Epoch(4).to_string(), "4");
        assert_eq!(term(2, 1).next_epoch(Epoch(4)).unwrap().to_string(), "2/1");
    }
}
