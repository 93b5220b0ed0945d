//! Lines between the mirror of the source and targets of the copy, by way of the mirror beside those, which
//! only passes on. A line keeps its order; whatever is on its way when it is cut may still arrive.

use std::collections::VecDeque;

use bytes::BytesMut;
use quoin_cluster::mirror::feeding::{Came, Stream};
use quoin_types::history::{Feed, Refused, Slots, Taken};

use super::{Copies, CopyEvent};
use crate::schedule::{Instant, MILLISECOND};

#[derive(Debug)]
enum Frame {
    Begin,
    Slots(Box<Slots>),
}

/// One stream, from its mirror to a target.
#[derive(Debug)]
pub(super) struct Line {
    /// The side that sends.
    from_side: usize,
    target: usize,
    feed: Feed,
    /// The stream as the target numbered it, and the life of that.
    begun: Option<(u32, Stream)>,
    /// Slots that were given to the target, and are not answered.
    unanswered: usize,
    to: VecDeque<Frame>,
    from: VecDeque<Result<Taken, Refused>>,
    last_due: [Instant; 2],
    /// Nothing is put on it any more.
    is_cut: bool,
}

impl Copies {
    /// Opens a line to one of the copy's targets.
    pub(super) fn open_line(&mut self, from: usize, feed: Feed) -> u64 {
        let number = self.counts.streams + 1;
        self.counts.streams = number;
        // The mirror tries one host, then the other; mostly the one that took the volume last.
        let owner = self.worlds[1 - from].control.record.owner;
        let target = if self.random.percent(80) { owner } else { 1 - owner };
        let line = Line {
            from_side: from,
            target,
            feed,
            begun: None,
            unanswered: 0,
            to: VecDeque::new(),
            from: VecDeque::new(),
            last_due: [0; 2],
            is_cut: false,
        };
        self.lines.insert(number, line);
        self.put(number, Frame::Begin);
        number
    }

    pub(super) fn put_slots(&mut self, line: u64, slots: Slots) {
        self.put(line, Frame::Slots(Box::new(slots)));
    }

    fn put(&mut self, number: u64, frame: Frame) {
        let due = self.now() + self.delay();
        if !self.is_linked {
            return;
        }
        let Some(line) = self.lines.get_mut(&number).filter(|line| !line.is_cut) else { return };
        line.to.push_back(frame);
        line.last_due[0] = due.max(line.last_due[0]);
        self.schedule.at(line.last_due[0], CopyEvent::ToTarget(number));
    }

    fn put_back(&mut self, number: u64, answer: Result<Taken, Refused>) {
        let due = self.now() + self.delay();
        let Some(line) = self.lines.get_mut(&number).filter(|line| !line.is_cut) else { return };
        line.from.push_back(answer);
        line.last_due[1] = due.max(line.last_due[1]);
        self.schedule.at(line.last_due[1], CopyEvent::FromTarget(number));
    }

    pub(super) fn deliver_to_target(&mut self, number: u64) {
        let Some(line) = self.lines.get_mut(&number) else { return };
        let (to, target) = (1 - line.from_side, line.target);
        let life = self.worlds[to].targets[target].life;
        if self.worlds[to].is_over() {
            return;
        }
        if self.worlds[to].targets[target].paused {
            let later = self.schedule.now() + 20 * MILLISECOND;
            line.last_due[0] = later.max(line.last_due[0]);
            return self.schedule.at(later, CopyEvent::ToTarget(number));
        }
        let Some(frame) = line.to.pop_front() else { return };
        match frame {
            Frame::Begin => {
                let feed = line.feed;
                let begun = self.worlds[to].begin_feed(target, &feed);
                let begun = begun.map(|(stream, taken)| {
                    let stream = Stream { number: stream, feed, from: taken.to };
                    if let Some(line) = self.lines.get_mut(&number) {
                        line.begun = Some((life, stream));
                    }
                    taken
                });
                self.say(to, || format!("line {number}: target {target} begins {begun:?}"));
                self.counts.refused += u64::from(begun.is_err());
                self.put_back(number, begun);
            }
            Frame::Slots(slots) => {
                let begun = line.begun.filter(|(of, _)| *of == life);
                let Some((_, stream)) = begun else {
                    return self.put_back(number, Err(Refused::NotServed));
                };
                line.unanswered += 1;
                let slots = self.spoil(*slots);
                let came = Came::of(&slots, stream.feed.base.is_none());
                self.counts.slots += 1;
                self.say(to, || {
                    let (place, next) = (came.place, came.next);
                    format!("line {number}: target {target} has slots {place} to {next:?}")
                });
                self.worlds[to].take_slots(target, &stream, came, number);
            }
        }
    }

    /// Sometimes a byte is another one.
    fn spoil(&mut self, mut slots: Slots) -> Slots {
        let is_spoiled = !self.is_calm() && self.random.one_in(300);
        if let Some(block) = slots.part.blocks.first_mut().filter(|_| is_spoiled) {
            let mut data = BytesMut::from(&block.data[..]);
            data[100] ^= 1;
            block.data = data.freeze();
        }
        slots
    }

    /// A target has answered slots.
    pub(super) fn answered(&mut self, to: usize, number: u64, answer: Result<Taken, Refused>) {
        self.say(to, || format!("line {number}: {answer:?}"));
        self.counts.refused += u64::from(answer.is_err());
        let Some(line) = self.lines.get_mut(&number).filter(|line| line.unanswered > 0) else {
            let detail = format!("slots of line {number} were answered twice: {answer:?}");
            return self.worlds[to].violate("OneReply", detail);
        };
        line.unanswered -= 1;
        self.put_back(number, answer);
    }

    pub(super) fn deliver_from_target(&mut self, number: u64) {
        let Some(line) = self.lines.get_mut(&number) else { return };
        let Some(answer) = line.from.pop_front() else { return };
        let from = line.from_side;
        if self.is_linked {
            self.heard_of(from, number, answer);
        }
    }

    /// The mirror of the source leaves a line: what is on its way may arrive, or not.
    pub(super) fn leave_line(&mut self, number: u64) {
        let is_lost = self.random.percent(50);
        let Some(line) = self.lines.get_mut(&number) else { return };
        line.is_cut = true;
        line.from.clear();
        if is_lost {
            line.to.clear();
        }
    }

    /// All lines end, and both ends learn of it.
    pub(super) fn cut_lines(&mut self) {
        let is_open = |(_, line): &(&u64, &Line)| !line.is_cut;
        let open = self.lines.iter().filter(is_open);
        let open: Vec<_> = open.map(|(number, line)| (line.from_side, *number)).collect();
        for (side, number) in open {
            self.leave_line(number);
            self.line_lost(side, number);
        }
    }
}
