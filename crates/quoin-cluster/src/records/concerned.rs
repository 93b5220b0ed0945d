//! Pools and nodes whose assignments a record is part of.

use std::collections::BTreeSet;

/// Nodes whose assignments contain a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Nodes {
    All,
    These(BTreeSet<String>),
}

impl Nodes {
    pub fn none() -> Self {
        Self::These(BTreeSet::new())
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::These(mut nodes), Self::These(more)) => {
                nodes.extend(more);
                Self::These(nodes)
            }
            _ => Self::All,
        }
    }
}

/// Pools and nodes whose assignments contain a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Concerned {
    Everybody,
    Some {
        pools: BTreeSet<String>,
        nodes: Nodes,
    },
    /// No assignment; only callers that wait for a status.
    Status,
    /// No assignment and no status.
    Nobody,
}

impl Concerned {
    /// All nodes, and no pool.
    pub fn all_nodes() -> Self {
        Self::Some { pools: BTreeSet::new(), nodes: Nodes::All }
    }

    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Everybody, _) | (_, Self::Everybody) => Self::Everybody,
            (Self::Nobody, other) | (other, Self::Nobody) => other,
            (Self::Status, other) | (other, Self::Status) => other,
            (Self::Some { mut pools, nodes }, Self::Some { pools: more, nodes: also }) => {
                pools.extend(more);
                Self::Some { pools, nodes: nodes.and(also) }
            }
        }
    }

    /// Pools and nodes that a record concerns before or after a change.
    pub fn by(before: Option<Self>, after: Option<Self>) -> Self {
        before.unwrap_or(Self::Nobody).and(after.unwrap_or(Self::Nobody))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(pool: &str, nodes: Nodes) -> Concerned {
        Concerned::Some { pools: [pool.to_owned()].into(), nodes }
    }

    #[test]
    fn a_change_concerns_those_before_it_and_those_after_it() {
        let these = |name: &str| Nodes::These([name.to_owned()].into());
        let both = Concerned::by(Some(some("a", these("n1"))), Some(some("b", these("n2"))));
        let pools = ["a".to_owned(), "b".to_owned()].into();
        let nodes = Nodes::These(["n1".to_owned(), "n2".to_owned()].into());
        assert_eq!(both, Concerned::Some { pools, nodes });
        let one = || some("a", these("n1"));
        assert_eq!(Concerned::by(None, Some(one())), one());
        assert_eq!(Concerned::by(Some(Concerned::Everybody), Some(one())), Concerned::Everybody);
        assert_eq!(Concerned::all_nodes().and(one()), some("a", Nodes::All));
    }
}
