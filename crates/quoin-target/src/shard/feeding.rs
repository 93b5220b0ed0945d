//! A copy of a volume that takes the slots of the one transfer that was ordered: the driver of
//! [`quoin_cluster::mirror::feeding`].
//!
//! Slots become requests of the state machine as they are: past the encryption, as the bytes are stored ones,
//! and past the limits of clients.

use quoin_cluster::mirror::feeding::{self, FeedOrder, Here, Next};
use quoin_replication::primary::{PrimaryAction, PrimaryEvent, PrimaryNote};
use quoin_types::block::Request;
use quoin_types::{Time, VolumeId};

use super::{Ask, Shard, Volume};
use crate::feed::{Answer, FeedInput};
use crate::tokens::Origin;

/// Key that stands for the transfer where others are those of clients; no source has it.
pub(super) const CLIENT: u64 = u64::MAX;

/// Transfer whose slots are answered to streams.
pub(super) type Feeding = feeding::Feeding<Answer>;

impl Volume {
    /// Submits what the transfer has ready. Returns true if there is something to report.
    pub(super) fn feed_on(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) -> bool {
        while let Some(next) = self.feeding.next(self.target.is_serving()) {
            let event = match next {
                Next::Abandon => PrimaryEvent::Abandon(self.export.tokens.of(CLIENT)),
                Next::Submit(token, operation) => {
                    let origin = Origin { client: CLIENT, token, kind: 0, came: now, offset: 0 };
                    let token = self.export.tokens.issue(origin);
                    PrimaryEvent::Submit(Request { token, operation, origin: None })
                }
            };
            self.target.on(now, event, actions);
        }
        for (answer, taken) in self.feeding.answers() {
            // A stream that has ended waits for none.
            let _ = answer.try_send(taken);
        }
        self.feeding.is_news(now)
    }

    fn here(&self) -> Here {
        Here { is_serving: self.target.is_serving(), blocks: self.target.volume_blocks() }
    }
}

impl Shard {
    /// Takes what a stream into a copy asks for. Dropped, its answer says that the volume is not served here.
    pub(super) fn feed(&mut self, id: VolumeId, input: FeedInput) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let here = volume.here();
        match input {
            FeedInput::Begin(feed, answer) => {
                let _ = answer.try_send(volume.feeding.begin(here, &feed));
            }
            FeedInput::Slots(stream, came, answer) => {
                volume.feeding.take(here, &stream, *came, answer);
            }
        }
        self.touch(id);
    }

    /// Takes the order that holds now.
    pub(super) fn order_feed(&mut self, id: VolumeId, order: Option<FeedOrder>, read_only: bool) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.feeding.order(order, read_only);
        // A report may be asked for in this very round: an order that ended is told once nothing of it is to come.
        let now = self.round.at(quoin_reactor::now());
        if volume.feed_on(now, &mut self.actions) {
            self.reports.ask(Ask::Changed);
        }
        self.act(id);
        self.touch(id);
    }

    pub(super) fn note_feed(&mut self, id: VolumeId, note: &PrimaryNote) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if note.is_of_another_epoch() {
            volume.feeding.not_served();
            self.touch(id);
        }
    }
}
