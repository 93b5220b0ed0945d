//! Epochs in which this target was the writer, to detect another writer since.

use quoin_types::ids::Epoch;

#[derive(Default)]
pub(super) struct Past {
    /// Epochs under which this target has appended an entry.
    own: Vec<Epoch>,
    /// The newest epoch granted before the oldest waiting request arrived.
    waits_since: Option<Epoch>,
}

impl Past {
    pub fn appends(&mut self, epoch: Epoch) {
        self.own.push(epoch);
    }

    /// Records that a request waits. Before the first grant the request cannot be ordered against
    /// epochs of others.
    pub fn waits(&mut self, granted: Epoch) {
        if granted > Epoch::ZERO {
            self.waits_since.get_or_insert(granted);
        }
    }

    pub fn nothing_waits(&mut self) {
        self.waits_since = None;
    }

    /// Returns true if the writer of `newest`, the epoch that a history ends in, came after this
    /// target had served, or after requests had begun to wait here. These requests must never
    /// overwrite its work.
    pub fn is_overtaken_by(&self, newest: Epoch) -> bool {
        let since = |epoch: Option<Epoch>| epoch.is_some_and(|epoch| epoch < newest);
        let waits =
            self.waits_since.filter(|_| !quoin_types::mutant::is("overtaken-only-where-it-served"));
        (since(self.own.first().copied()) || since(waits)) && !self.own.contains(&newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_overtaken_by_a_later_epoch_of_another_and_by_no_other() {
        let mut past = Past::default();
        assert!(!past.is_overtaken_by(Epoch(9)), "it has served nothing, and nothing waits");
        past.appends(Epoch(5));
        past.appends(Epoch(8));
        let by = [4, 5, 6, 8, 9].map(|epoch| past.is_overtaken_by(Epoch(epoch)));
        assert_eq!(by, [false, false, true, false, true]);
    }

    #[test]
    fn requests_that_wait_are_overtaken_by_epochs_after_the_one_that_they_came_in() {
        let mut past = Past::default();
        past.waits(Epoch::ZERO);
        assert!(!past.is_overtaken_by(Epoch(9)), "that may have been before they came");
        past.waits(Epoch(5));
        past.waits(Epoch(8));
        let by = [4, 5, 6, 9].map(|epoch| past.is_overtaken_by(Epoch(epoch)));
        assert_eq!(by, [false, false, true, true]);
        past.nothing_waits();
        assert!(!past.is_overtaken_by(Epoch(9)));
    }
}
