//! The mirror of a side: the stream that it sends, as the product's mirror does.

use std::collections::VecDeque;

use quoin_cluster::mirror::Transfer;
use quoin_cluster::mirror::sending::{self, Ended, Flight, Heard, Keeping};
use quoin_replication::primary::{ChangesAnswer, ChangesRequest, PrimaryEvent};
use quoin_types::history::{Block, Feed, Part, Refused, Slots, Taken};
use quoin_types::ids::{PointId, VolumeId};
use quoin_types::message::{self, Content};

use super::source::snapshot;
use super::{Copies, CopyEvent};
use crate::schedule::{Instant, MILLISECOND, SECOND};

/// Time without an answer after which a stream is ended.
const SILENT_MAX: u64 = 4 * SECOND;

/// A stream under way.
#[derive(Debug)]
struct Sending {
    line: u64,
    /// The copy has said where the stream begins.
    is_begun: bool,
    flight: Flight,
    ready: VecDeque<Slots>,
    /// Block at which the next part begins; `None`: the last one was read.
    place: Option<u64>,
    /// Token of the part that is asked for.
    asked: Option<u64>,
    heard_at: Instant,
}

/// The mirror of the source.
#[derive(Debug)]
pub(super) struct Sender {
    pub is_up: bool,
    life: u64,
    order: Option<(Transfer, u128)>,
    /// The point since which changes are read: a copy that has none of them is sent whole, under the name of its
    /// order.
    since: Option<PointId>,
    keeping: Keeping,
    cursor: u64,
    /// Place of the transfer as the present stream began.
    before: u64,
    stream: Option<Sending>,
    parts: u64,
}

impl Default for Sender {
    fn default() -> Self {
        Self {
            is_up: true,
            life: 0,
            order: None,
            since: None,
            keeping: Keeping::default(),
            cursor: 0,
            before: 0,
            stream: None,
            parts: 0,
        }
    }
}

impl Copies {
    /// The mirror sends what is ordered: the transfer, its token, and where it goes on.
    pub(super) fn send_on(
        &mut self,
        side: usize,
        ordered: Option<(Transfer, u128, u64)>,
        since: Option<PointId>,
    ) {
        let now = self.now();
        if !self.senders[side].is_up || self.worlds[side].is_over() {
            return;
        }
        let order = ordered.map(|(transfer, token, _)| (transfer, token));
        if self.senders[side].order != order {
            self.end_line(side);
            let sender = &mut self.senders[side];
            sender.life += 1;
            (sender.order, sender.since) = (order, since);
            sender.keeping = Keeping::default();
            sender.cursor = ordered.map_or(0, |(_, _, from)| from);
            if order.is_some() {
                self.schedule.at(now, CopyEvent::Stream(side, self.senders[side].life));
            }
        }
        let stream = self.senders[side].stream.as_ref();
        if stream.is_some_and(|stream| now > stream.heard_at + SILENT_MAX) {
            self.stream_ended(side, Ended::Failed);
        }
    }

    pub(super) fn kill_sender(&mut self, side: usize) {
        self.end_line(side);
        let (life, parts) = (self.senders[side].life + 1, self.senders[side].parts);
        self.senders[side] = Sender { is_up: false, life, parts, ..Sender::default() };
    }

    pub(super) fn end_line(&mut self, side: usize) {
        if let Some(stream) = self.senders[side].stream.take() {
            self.leave_line(stream.line);
        }
    }

    pub(super) fn begin_stream(&mut self, side: usize, life: u64) {
        let Some((transfer, token)) =
            self.senders[side].order.filter(|_| self.senders[side].life == life)
        else {
            return;
        };
        if self.senders[side].stream.is_some() || self.worlds[1 - side].is_over() {
            return;
        }
        let Transfer { point, base } = transfer;
        let line = self.open_line(side, Feed { volume: VolumeId(1), point, base, token });
        let heard_at = self.now();
        self.senders[side].before = self.senders[side].cursor;
        self.senders[side].stream = Some(Sending {
            line,
            is_begun: false,
            flight: Flight::default(),
            ready: VecDeque::new(),
            place: None,
            asked: None,
            heard_at,
        });
    }

    fn stream_ended(&mut self, side: usize, how: Ended) {
        self.end_line(side);
        let size = self.worlds[side].setup.volume_blocks;
        if how == Ended::All {
            self.senders[side].cursor = size;
        }
        let Sender { cursor, before, .. } = self.senders[side];
        let again = self.senders[side].keeping.ended(how, cursor > before, cursor >= size);
        let after = u64::try_from(again.after.as_nanos()).unwrap_or(u64::MAX).min(1000 * SECOND);
        let due = self.now() + after;
        self.schedule.at(due, CopyEvent::Stream(side, self.senders[side].life));
    }

    pub(super) fn line_lost(&mut self, side: usize, line: u64) {
        if self.senders[side].stream.as_ref().is_some_and(|stream| stream.line == line) {
            self.stream_ended(side, Ended::Failed);
        }
    }

    /// An answer of the other side.
    pub(super) fn heard_of(&mut self, side: usize, line: u64, answer: Result<Taken, Refused>) {
        let now = self.now();
        let Some(stream) = self.senders[side].stream.as_mut().filter(|stream| stream.line == line)
        else {
            return;
        };
        stream.heard_at = now;
        let Ok(taken) = answer else { return self.stream_ended(side, Ended::Failed) };
        if !stream.is_begun {
            if taken.is_fed {
                return self.stream_ended(side, Ended::All);
            }
            stream.is_begun = true;
            stream.place = Some(taken.to);
            self.senders[side].cursor = taken.to;
            return self.pump(side);
        }
        match stream.flight.taken(taken) {
            Ok(Heard::All) => self.stream_ended(side, Ended::All),
            Ok(Heard::To(block)) => {
                self.senders[side].cursor = self.senders[side].cursor.max(block);
                self.pump(side);
            }
            Err(wrong) => {
                let detail = format!("line {line}: {wrong}: {taken:?}");
                self.worlds[1 - side].violate("AnswersInOrder", detail);
            }
        }
    }

    /// Sends what may be on its way, and asks for the next part.
    fn pump(&mut self, side: usize) {
        while let Some(stream) = self.senders[side].stream.as_mut()
            && stream.flight.has_room()
            && let Some(mut slots) = stream.ready.pop_front()
        {
            stream.flight.close(&mut slots);
            stream.flight.sent(slots.part.next);
            let line = stream.line;
            self.put_slots(line, slots);
        }
        let Some(stream) = &self.senders[side].stream else { return };
        if stream.ready.is_empty() && stream.asked.is_none() && stream.place.is_some() {
            self.ask_part(side);
        }
    }

    fn ask_part(&mut self, side: usize) {
        let Some((Transfer { point, .. }, _)) = self.senders[side].order else { return };
        let base = self.senders[side].since;
        let Some(stream) = self.senders[side].stream.as_mut() else { return };
        let Some(cursor) = stream.place else { return };
        self.senders[side].parts += 1;
        let token = self.senders[side].parts;
        stream.asked = Some(token);
        let (from, to) = (base.map(snapshot), Some(snapshot(point)));
        let request = ChangesRequest { token, from, to, cursor, want_data: true };
        let owner = self.worlds[side].control.record.owner;
        if !self.worlds[side].has_target(owner) {
            return self.stream_ended(side, Ended::Failed);
        }
        self.worlds[side].feed_target(owner, vec![PrimaryEvent::Changes(request)]);
    }

    pub(super) fn ask_again(&mut self, side: usize, token: u64) {
        if self.senders[side].stream.as_ref().is_some_and(|stream| stream.asked == Some(token)) {
            self.ask_part(side);
        }
    }

    /// A target of the source has answered.
    pub(super) fn part_came(&mut self, side: usize, token: u64, answer: ChangesAnswer) {
        let blocks_max = self.blocks_max;
        let Some(stream) = self.senders[side].stream.as_mut().filter(|s| s.asked == Some(token))
        else {
            return;
        };
        let part = match answer {
            ChangesAnswer::Part { ranges, slots, next } => {
                Part { ranges, blocks: blocks(slots), next }
            }
            ChangesAnswer::Busy => {
                let due = self.now() + 20 * MILLISECOND;
                return self.schedule.at(due, CopyEvent::Part(side, token));
            }
            ChangesAnswer::NoSnapshot | ChangesAnswer::Damaged { .. } => {
                return self.stream_ended(side, Ended::Failed);
            }
        };
        let place = stream.place.unwrap_or(0);
        if part.check().is_err() || !sending::goes_on(&part, place) {
            let detail = format!("a part of the source does not go on at {place}: {part:?}");
            return self.worlds[side].violate("SnapshotComplete", detail);
        }
        (stream.asked, stream.place) = (None, part.next);
        stream.ready.extend(sending::cut(part, place, blocks_max));
        self.pump(side);
    }
}

fn blocks(slots: Vec<message::Slot>) -> Vec<Block> {
    let block = |slot: message::Slot| match slot.content {
        Content::Data { crc, data } => Some(Block { crc, data }),
        Content::Hole | Content::Bad => None,
    };
    slots.into_iter().filter_map(block).collect()
}
