//! Pools are heard before nodes are ordered, after a controller's start.
//!
//! The records may be an old copy: of a restored disk, or of a restored engine. Pools keep a generation of each
//! volume's record, which grows with every change of it, and tell it with their first report. By an old copy
//! targets would close what they serve, so nodes get no order before the pools that are known have reported, or
//! some time is over for those that are away. Where a pool knows a newer record the records do not rule.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;

/// A pool that is away delays the orders of nodes for so long.
pub(crate) const CENSUS_TIME: Duration = Duration::from_secs(2);

/// Word of pools against the records.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) enum Doubt {
    #[default]
    None,
    /// A pool holds a volume that is in no record: one that was made since, or what is left of one.
    Suspected,
    /// Why they are old, in words.
    Behind(String),
}

/// Pools that have been heard since the start, and what they say against the records.
#[derive(Default)]
pub(crate) struct Census {
    heard: Mutex<Heard>,
    doubt: watch::Sender<Doubt>,
}

#[derive(Default)]
struct Heard {
    is_open: bool,
    pools: BTreeSet<String>,
}

impl Census {
    /// From now on nodes are not ordered.
    pub fn begin(&self) {
        self.heard().is_open = true;
    }

    /// Returns true if nodes may be ordered as far as pools say.
    pub fn is_over(&self) -> bool {
        !self.heard().is_open && *self.doubt.borrow() == Doubt::None
    }

    /// Notes that a pool told all that it has; true: for the first time since the start.
    pub fn hears(&self, pool: &str) -> bool {
        self.heard().pools.insert(pool.to_owned())
    }

    /// Ends it where all of these were heard. Returns true if that changed something.
    pub fn ends_with<'a>(&self, mut pools: impl Iterator<Item = &'a String>) -> bool {
        let mut heard = self.heard();
        heard.is_open && pools.all(|pool| heard.pools.contains(pool)) && {
            heard.is_open = false;
            true
        }
    }

    pub fn doubt(&self) -> watch::Receiver<Doubt> {
        self.doubt.subscribe()
    }

    /// Takes a doubt in; true: it is graver than what was known.
    pub fn doubts(&self, doubt: Doubt) -> bool {
        self.doubt.send_if_modified(|known| {
            let is_graver = match (&*known, &doubt) {
                (_, Doubt::None) | (Doubt::Behind(_), _) => false,
                (Doubt::None, _) => true,
                (Doubt::Suspected, doubt) => *doubt != Doubt::Suspected,
            };
            if is_graver {
                *known = doubt;
            }
            is_graver
        })
    }

    /// Nothing speaks against the records any more.
    pub fn clear(&self) {
        self.doubt.send_replace(Doubt::None);
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().expect("no holder of this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_ordered_once_all_known_pools_were_heard_and_none_doubts_the_records() {
        let census = Census::default();
        assert!(census.is_over(), "none was begun");
        census.begin();
        let pools = ["p1".to_owned(), "p2".to_owned()];
        assert!(census.hears("p1") && !census.hears("p1"));
        assert!(!census.ends_with(pools.iter()) && !census.is_over());
        assert!(census.hears("p2") && census.ends_with(pools.iter()) && census.is_over());
        assert!(!census.ends_with(pools.iter()), "it is over already");
        assert!(census.doubts(Doubt::Suspected) && !census.is_over());
        let behind = Doubt::Behind("p2 knows more".to_owned());
        assert!(census.doubts(behind.clone()) && !census.doubts(Doubt::Suspected));
        assert_eq!(*census.doubt().borrow(), behind);
        census.clear();
        assert!(census.is_over());
    }
}
