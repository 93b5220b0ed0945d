//! A volume of one side, as far as a mirror sees it: its content with the points that it holds, what was
//! granted to clients and to the target that takes slots, and what its pools keep.

use quoin_cluster::mirror::feed::{Feed, Slot};
use quoin_cluster::mirror::{Keepsake, Observed, Order, Stamp, Transfer};
use quoin_types::ids::PointId;

pub type Tag = u32;
/// Content: the last write of each block, 0 for none.
pub type Content = Vec<Tag>;

/// Effect of a change on the content that was there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    Nothing,
    /// The live view was overwritten; this is what it showed.
    Overwrote(Content),
    /// A member of a copy is cut.
    Cut(PointId),
    Kept(Keepsake),
    /// A slot came that lies behind the end of the volume.
    BehindTheEnd,
}

/// Returns true if two contents are the same, as far as both reach, and nothing is behind that.
pub fn is_same(one: &Content, other: &Content) -> bool {
    let shorter = one.len().min(other.len());
    let is_hole = |content: &Content| content[shorter..].iter().all(|tag| *tag == 0);
    one[..shorter] == other[..shorter] && is_hole(one) && is_hole(other)
}

#[derive(Clone, Debug)]
pub struct Volume {
    pub live: Content,
    pub points: Vec<(PointId, Content)>,
    pub at: Option<PointId>,
    /// Grows with each fence and each attachment: what was granted under a lower one is void.
    epoch: u64,
    fenced: u128,
    seen: Stamp,
    feed: Feed,
    /// The order to take slots that its controller has: the next target that opens the volume is told it.
    ordered: Option<(Transfer, u128, u64)>,
    /// Epoch under which the target was lent.
    feed_epoch: u64,
    /// Slots that are on media.
    stable_to: u64,
    /// Blocks under unsynced slots, with their former tags.
    unsynced: Vec<(usize, Tag)>,
    pub keepsake: Option<Keepsake>,
    pub lost: Option<(PointId, Content)>,
    /// Epoch of the client that may write.
    pub client: Option<u64>,
    serial: u64,
    /// Clients wrote what the live view shows.
    pub is_written: bool,
}

impl Volume {
    pub fn new(blocks: usize) -> Self {
        Self {
            live: vec![0; blocks],
            points: Vec::new(),
            at: None,
            epoch: 1,
            fenced: 0,
            seen: Stamp::default(),
            feed: Feed::default(),
            ordered: None,
            feed_epoch: 0,
            stable_to: 0,
            unsynced: Vec::new(),
            keepsake: None,
            lost: None,
            client: None,
            serial: 0,
            is_written: false,
        }
    }

    pub fn holds(&self, point: PointId) -> bool {
        self.points.iter().any(|(held, _)| *held == point)
    }

    pub fn content(&self, point: PointId) -> Option<&Content> {
        self.points.iter().find(|(held, _)| *held == point).map(|(_, content)| content)
    }

    pub fn is_writable(&self) -> bool {
        self.client == Some(self.epoch)
    }

    pub fn publish(&mut self) {
        if !self.is_writable() {
            self.epoch += 1;
            self.client = Some(self.epoch);
        }
    }

    pub fn write(&mut self, block: usize, tag: Tag) {
        self.live[block] = tag;
        self.at = None;
        self.is_written = true;
    }

    /// Makes it so large, unless it is larger.
    pub fn grow(&mut self, blocks: usize) {
        let blocks = blocks.max(self.live.len());
        self.live.resize(blocks, 0);
    }

    /// The live view is a point from here on.
    pub fn cut(&mut self, point: PointId) {
        self.sync();
        if !self.holds(point) {
            self.points.push((point, self.live.clone()));
        }
        self.at = Some(point);
    }

    pub fn sync(&mut self) {
        self.stable_to = self.feed.taken_to();
        self.unsynced.clear();
    }

    /// The target ends: slots that were not synced may be lost.
    pub fn kill_target(&mut self, keeps: bool) {
        if !keeps {
            while let Some((block, former)) = self.unsynced.pop() {
                self.live[block] = former;
            }
        }
        self.unsynced.clear();
        self.open();
    }

    /// Another target opens the volume, with the order of its controller.
    fn open(&mut self) {
        self.feed = Feed::default();
        self.stable_to = 0;
        if let Some((transfer, token, from)) = self.ordered {
            self.feed.order(transfer, token, from);
            self.feed_epoch = self.epoch;
            self.stable_to = from;
        }
    }

    /// Returns true unless a later order was seen.
    pub fn hears(&mut self, stamp: Stamp) -> bool {
        self.seen = self.seen.max(stamp);
        stamp == self.seen
    }

    /// Carries an order out, unless a later one was seen.
    pub fn obey(&mut self, stamp: Stamp, order: Order) -> Effect {
        if !self.hears(stamp) {
            return Effect::Nothing;
        }
        match order {
            Order::Fence(fence) => {
                if self.fenced != fence {
                    self.epoch += 1;
                    self.fenced = fence;
                    self.client = None;
                    self.sync();
                    self.open();
                }
                Effect::Nothing
            }
            Order::Keep { is_primary, begun } => {
                let keepsake = Keepsake { is_primary, begun };
                self.keepsake = Some(keepsake);
                Effect::Kept(keepsake)
            }
            Order::Cut(point) => {
                if self.holds(point) {
                    return Effect::Nothing;
                }
                self.cut(point);
                Effect::Cut(point)
            }
            Order::Drop(point) => {
                self.points.retain(|(held, _)| *held != point);
                if self.at == Some(point) {
                    self.at = None;
                }
                Effect::Nothing
            }
            Order::Revert(point) => {
                let Some(content) = self.content(point).cloned() else { return Effect::Nothing };
                if self.at == Some(point) {
                    return Effect::Nothing;
                }
                self.unsynced.clear();
                self.at = Some(point);
                let size = self.live.len();
                let former = std::mem::replace(&mut self.live, content);
                self.grow(size);
                Effect::Overwrote(former)
            }
            Order::Receive { transfer, token, from } => {
                self.ordered = Some((transfer, token, from));
                if self.feed.ordered() != Some((transfer, token)) {
                    self.feed.order(transfer, token, from);
                    self.feed_epoch = self.epoch;
                    self.stable_to = from;
                }
                Effect::Nothing
            }
            Order::Grow(blocks) => {
                self.grow(blocks as usize);
                Effect::Nothing
            }
            Order::Stop => {
                self.ordered = None;
                self.feed.stop();
                self.sync();
                Effect::Nothing
            }
            Order::KeepLost(point) => {
                if self.lost.as_ref().is_none_or(|(kept, _)| *kept != point) {
                    self.lost = Some((point, self.live.clone()));
                }
                Effect::Nothing
            }
        }
    }

    /// Takes one slot: `None` where it is refused.
    pub fn take(&mut self, slot: &Slot, write: Option<(usize, Tag)>) -> Option<Effect> {
        // The core refuses what is written under a lower epoch.
        let is_old =
            self.feed_epoch != self.epoch && !quoin_types::mutant::is("fed-under-an-old-epoch");
        if is_old || self.feed.take(slot).is_err() {
            return None;
        }
        let Some((block, tag)) = write else { return Some(Effect::Nothing) };
        if block >= self.live.len() {
            return Some(Effect::BehindTheEnd);
        }
        let former = self.live.clone();
        self.unsynced.push((block, self.live[block]));
        self.live[block] = tag;
        self.at = None;
        Some(Effect::Overwrote(former))
    }

    /// Makes it an ordinary volume. Its target stays, and remembers which orders it has seen.
    pub fn release(&mut self) {
        self.points.clear();
        (self.at, self.keepsake, self.lost, self.ordered) = (None, None, None, None);
        self.feed.stop();
        self.sync();
    }

    pub fn report(&mut self, seen_ms: u64) -> Observed {
        self.serial += 1;
        Observed {
            serial: self.serial,
            seen_ms,
            stamp: self.seen,
            points: self.points.iter().map(|(point, _)| *point).collect(),
            blocks: self.live.len() as u64,
            at: self.at,
            fenced: self.fenced,
            order: self.feed.ordered(),
            taken_to: self.feed.taken_to(),
            stable_to: self.stable_to,
            is_fed: self.feed.is_fed(),
            keepsake: self.keepsake,
            lost: self.lost.as_ref().map(|(point, _)| *point),
            is_published: self.is_writable(),
        }
    }
}
