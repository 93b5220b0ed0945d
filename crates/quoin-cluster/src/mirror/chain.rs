//! Generations of a group: each begins with a promotion, and two clusters that promoted apart from each
//! other have chains that fork.

use quoin_types::ids::PointId;
use quoin_types::mutant;
use std::fmt;

use super::GENERATIONS_MAX;

/// A cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClusterId(pub u128);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl std::str::FromStr for ClusterId {
    type Err = <PointId as std::str::FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(|PointId(id)| Self(id))
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterId({:x})", self.0)
    }
}

/// Reign of one cluster. Two clusters may begin the same number apart from each other, and one cluster may
/// begin a number again after a resync that discarded it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Generation {
    pub number: u64,
    pub cluster: ClusterId,
    /// Id of the claim that it began with.
    pub id: u128,
}

impl Generation {
    fn is(self, other: Self) -> bool {
        self == other
            || mutant::is("generation-without-its-cluster") && self.number == other.number
            || mutant::is("generation-without-its-claim")
                && (self.number, self.cluster) == (other.number, other.cluster)
    }
}

/// A generation, and the point that it began at: what it wrote lies behind that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Begun {
    pub generation: Generation,
    /// `None`: it is the first one.
    pub at: Option<PointId>,
}

/// The generations of a group, the oldest first; never empty.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Chain(Vec<Begun>);

/// Relation of one chain to another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Relation {
    Same,
    /// The end of this chain lies in the other chain, whose next generation began at this point.
    Behind {
        fork: Option<PointId>,
    },
    /// The end of the other chain lies in this chain.
    Ahead,
    /// Each has a generation that the other one lacks.
    Forked,
}

impl Chain {
    pub fn new(first: Begun) -> Self {
        Self(vec![first])
    }

    /// `None`: too few or too many.
    pub fn of(begun: Vec<Begun>) -> Option<Self> {
        (!begun.is_empty() && begun.len() <= GENERATIONS_MAX).then_some(Self(begun))
    }

    pub fn all(&self) -> &[Begun] {
        &self.0
    }

    pub fn top(&self) -> Begun {
        self.0[self.0.len() - 1]
    }

    /// Forgets the oldest generation where there are too many.
    pub fn push(&mut self, begun: Begun) {
        if self.0.len() == GENERATIONS_MAX {
            self.0.remove(0);
        }
        self.0.push(begun);
    }

    pub fn has(&self, generation: Generation) -> bool {
        self.place(generation).is_some()
    }

    fn place(&self, generation: Generation) -> Option<usize> {
        self.0.iter().rposition(|begun| begun.generation.is(generation))
    }

    /// The ends alone decide: a recovery may have left a gap in one of them.
    pub fn relation(&self, other: &Self) -> Relation {
        let (own, theirs) = (self.top().generation, other.top().generation);
        match (other.place(own), self.has(theirs)) {
            (Some(_), true) => Relation::Same,
            (Some(place), false) => {
                Relation::Behind { fork: other.0.get(place + 1).and_then(|next| next.at) }
            }
            (None, true) => Relation::Ahead,
            (None, false) => Relation::Forked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(number: u64, cluster: u128, at: u128) -> Begun {
        let generation = Generation { number, cluster: ClusterId(cluster), id: 0 };
        Begun { generation, at: (at != 0).then_some(PointId(at)) }
    }

    fn chain(of: &[Begun]) -> Chain {
        Chain::of(of.to_vec()).unwrap()
    }

    #[test]
    fn chains_of_equal_numbers_and_other_clusters_fork() {
        let first = begun(1, 1, 0);
        let a = chain(&[first, begun(2, 1, 7)]);
        let b = chain(&[first, begun(2, 2, 7)]);
        assert_eq!(a.relation(&b), Relation::Forked);
        assert_eq!(a.relation(&a), Relation::Same);
        let short = chain(&[first]);
        assert_eq!(short.relation(&b), Relation::Behind { fork: Some(PointId(7)) });
        assert_eq!(b.relation(&short), Relation::Ahead);
    }

    #[test]
    fn a_gap_that_a_recovery_left_does_not_make_a_fork() {
        let whole = chain(&[begun(1, 1, 0), begun(2, 2, 5), begun(3, 1, 6)]);
        let gap = chain(&[begun(1, 1, 0), begun(3, 1, 6)]);
        assert_eq!(gap.relation(&whole), Relation::Same);
        assert_eq!(
            chain(&[begun(1, 1, 0)]).relation(&gap),
            Relation::Behind { fork: Some(PointId(6)) }
        );
    }

    #[test]
    fn a_chain_forgets_its_oldest_generations() {
        let mut long = chain(&[begun(1, 1, 0)]);
        (2..100).for_each(|number| long.push(begun(number, 1, number.into())));
        assert_eq!(long.all().len(), GENERATIONS_MAX);
        assert_eq!(long.top().generation.number, 99);
        assert_eq!(Chain::of(Vec::new()), None);
        assert_eq!(Chain::of(vec![begun(1, 1, 0); GENERATIONS_MAX + 1]), None);
    }
}
