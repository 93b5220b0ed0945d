//! Volumes that the shards of this process have open, those that are being closed included.
//!
//! All that is known of an opening ends with it. A volume that was to be closed while it was gone already, and
//! waited to be opened again, is one that closes when it is to be closed the next time.

use std::collections::BTreeMap;

use quoin_types::VolumeId;

#[derive(Clone, Copy, Debug)]
struct Opening {
    shard: usize,
    is_read_only: bool,
    is_closing: bool,
}

#[derive(Default, Debug)]
pub(crate) struct Openings(BTreeMap<VolumeId, Opening>);

impl Openings {
    /// Notes that the volume is opened now; returns its shard, which is the one with the fewest.
    pub fn begin(&mut self, id: VolumeId, shards: usize, is_read_only: bool) -> usize {
        let load = |shard: &usize| self.0.values().filter(|o| o.shard == *shard).count();
        let shard = (0..shards).min_by_key(load).unwrap_or(0);
        self.0.insert(id, Opening { shard, is_read_only, is_closing: false });
        shard
    }

    pub fn contains(&self, id: VolumeId) -> bool {
        self.0.contains_key(&id)
    }

    pub fn shard(&self, id: VolumeId) -> Option<usize> {
        self.0.get(&id).map(|opening| opening.shard)
    }

    pub fn is_read_only(&self, id: VolumeId) -> bool {
        self.0.get(&id).is_some_and(|opening| opening.is_read_only)
    }

    /// Volumes and their shards.
    pub fn all(&self) -> Vec<(VolumeId, usize)> {
        self.0.iter().map(|(id, opening)| (*id, opening.shard)).collect()
    }

    /// Notes that the volume is closed from now on; true: nobody told its shard yet.
    pub fn close(&mut self, id: VolumeId) -> bool {
        let opening = self.0.get_mut(&id);
        opening.is_some_and(|opening| !std::mem::replace(&mut opening.is_closing, true))
    }

    pub fn is_closing(&self, id: VolumeId) -> bool {
        self.0.get(&id).is_some_and(|opening| opening.is_closing)
    }

    /// Forgets a volume that its shard has stopped.
    pub fn end(&mut self, id: VolumeId) {
        self.0.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId(5);

    #[test]
    fn a_volume_that_was_to_close_while_it_was_gone_closes_when_it_is_open_again() {
        let mut openings = Openings::default();
        openings.begin(VOLUME, 2, true);
        assert!(openings.close(VOLUME), "its target was fenced, and is not told yet");
        assert!(!openings.close(VOLUME), "once");
        openings.end(VOLUME);
        openings.begin(VOLUME, 2, true);
        assert!(!openings.is_closing(VOLUME));
        assert!(openings.close(VOLUME));
    }

    #[test]
    fn a_volume_goes_to_the_shard_with_the_fewest_and_keeps_nothing_of_its_opening_of_before() {
        let mut openings = Openings::default();
        let shards: Vec<usize> = (0..4).map(|n| openings.begin(VolumeId(n), 2, n == 0)).collect();
        assert_eq!(shards, [0, 1, 0, 1]);
        assert!(openings.is_read_only(VolumeId(0)) && !openings.is_read_only(VolumeId(1)));
        openings.end(VolumeId(0));
        assert!(!openings.is_read_only(VolumeId(0)) && !openings.close(VolumeId(0)));
        assert_eq!(openings.begin(VolumeId(9), 2, false), 0);
        assert_eq!(openings.shard(VolumeId(0)), None);
    }
}
