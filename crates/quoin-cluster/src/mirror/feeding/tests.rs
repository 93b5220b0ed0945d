//! The part alone, beside a volume of bytes that the test answers for.

use bytes::Bytes;
use proptest::prelude::*;
use quoin_types::history::{Block, Part, Slots};
use quoin_types::ids::{PointId, VolumeId};
use quoin_types::message::ChangedRange;
use quoin_types::{BLOCK_SHIFT, BLOCK_SIZE, crc32c};

use super::*;

const TRANSFER: Transfer = Transfer { point: PointId(2), base: Some(PointId(1)) };
const EVERYTHING: Transfer = Transfer { point: PointId(2), base: None };
const BLOCKS: u64 = 40;
const HERE: Here = Here { is_serving: true, blocks: BLOCKS };

/// Number of slots that were sent.
type Ticket = usize;

fn order(transfer: Transfer, version: u64) -> FeedOrder {
    FeedOrder { takes: Some((transfer, 9)), from_block: 0, stamp: Stamp { term: 1, version } }
}

fn feed_of(order: &FeedOrder) -> history::Feed {
    let (Transfer { point, base }, token) = order.takes.unwrap();
    history::Feed { volume: VolumeId(7), point, base, token }
}

/// Slots over these blocks: `None` is a hole, blocks in no pair are not named.
fn slots(place: u64, next: Option<u64>, named: &[(u64, Option<u8>)], end: Option<u64>) -> Slots {
    let range = |(lba, fill): &(u64, Option<u8>)| ChangedRange {
        lba: *lba,
        blocks: 1,
        hole: fill.is_none(),
    };
    let block = |fill: u8| {
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Block { crc: crc32c(&data), data }
    };
    let part = Part {
        ranges: named.iter().map(range).collect(),
        blocks: named.iter().filter_map(|(_, fill)| fill.map(block)).collect(),
        next,
    };
    Slots { place, part, end }
}

/// A volume that is fed, with the first byte of each block, and what is under way.
struct Bench {
    feeding: Feeding<Ticket>,
    sent: usize,
    answers: Vec<(Ticket, Result<Taken, Refused>)>,
    abandoned: usize,
    order: FeedOrder,
    stream: Stream,
    digest: u64,
    volume: Vec<u8>,
    under_way: Vec<(u64, Operation)>,
}

impl Bench {
    fn new(transfer: Transfer) -> Self {
        let order = order(transfer, 1);
        let stream = Stream { number: 0, feed: feed_of(&order), from: 0 };
        let feeding = Feeding::<Ticket>::new(Some(order), false);
        let volume = vec![0xee; BLOCKS as usize];
        let (sent, answers, under_way) = (0, Vec::new(), Vec::new());
        Self { feeding, sent, answers, abandoned: 0, order, stream, digest: 0, volume, under_way }
    }

    fn begun(transfer: Transfer) -> Self {
        let mut bench = Self::new(transfer);
        bench.begin().unwrap();
        bench
    }

    fn begin(&mut self) -> Result<Taken, Refused> {
        let feed = feed_of(&self.order);
        let (number, taken) = self.feeding.begin(HERE, &feed)?;
        (self.stream, self.digest) = (Stream { number, feed, from: taken.to }, 0);
        Ok(taken)
    }

    fn send(&mut self, slots: &Slots) -> Ticket {
        let came = Came::of(slots, self.stream.feed.base.is_none());
        self.send_as(self.stream, came)
    }

    fn send_as(&mut self, stream: Stream, came: Came) -> Ticket {
        self.take(HERE, &stream, came)
    }

    fn take(&mut self, here: Here, stream: &Stream, came: Came) -> Ticket {
        self.sent += 1;
        self.feeding.take(here, stream, came, self.sent);
        self.sent
    }

    /// Takes the answer to slots out.
    fn answer(&mut self, ticket: Ticket) -> Option<Result<Taken, Refused>> {
        self.answers.extend(self.feeding.answers());
        let index = self.answers.iter().position(|(of, _)| *of == ticket)?;
        Some(self.answers.remove(index).1)
    }

    /// Sends slots that are counted in the digest, the last ones with it.
    fn next(&mut self, place: u64, next: Option<u64>, named: &[(u64, Option<u8>)]) -> Ticket {
        let mut slots = slots(place, next, named, None);
        self.digest = Feed::digest(self.digest, slots.sum());
        slots.end = next.is_none().then_some(self.digest);
        self.send(&slots)
    }

    fn submit(&mut self) {
        while let Some(next) = self.feeding.next(true) {
            match next {
                Next::Submit(number, operation) => self.under_way.push((number, operation)),
                // Requests that are under way may have their place in the history.
                Next::Abandon => self.abandoned += 1,
            }
        }
    }

    /// Replies to one request; what it does shows then.
    fn reply(&mut self, index: usize, is_ok: bool) {
        let (number, operation) = self.under_way.remove(index);
        let at = |offset: u64| (offset >> BLOCK_SHIFT) as usize;
        match operation {
            Operation::Write { offset, data, .. } if is_ok => {
                for (n, block) in data.chunks(BLOCK_SIZE).enumerate() {
                    self.volume[at(offset) + n] = block[0];
                }
            }
            Operation::Trim { offset, length, .. } if is_ok => {
                self.volume[at(offset)..at(offset + length)].fill(0);
            }
            _ => {}
        }
        self.feeding.replied(number, is_ok);
    }

    fn reply_all(&mut self) {
        self.submit();
        while !self.under_way.is_empty() {
            self.reply(0, true);
            self.submit();
        }
    }

    fn progress(&self) -> (u64, u64, bool) {
        let progress = self.feeding.progress().unwrap();
        (progress.taken_to, progress.stable_to, progress.is_fed)
    }
}

#[test]
fn slots_count_once_they_are_written_and_the_transfer_is_fed_once_it_is_on_stable_media() {
    let mut bench = Bench::begun(TRANSFER);
    let first = bench.next(0, Some(10), &[(1, Some(7)), (2, Some(8)), (5, None)]);
    let second = bench.next(10, Some(20), &[]);
    let last = bench.next(20, None, &[(39, Some(9))]);
    bench.submit();
    let kinds: Vec<_> = bench.under_way.iter().map(|(_, operation)| operation.clone()).collect();
    assert!(matches!(kinds[0], Operation::Write { ref data, .. } if data.len() == 2 * BLOCK_SIZE));
    assert!(matches!(kinds[1], Operation::Trim { offset: 0x5000, length: 0x1000, .. }));
    assert!(matches!(kinds[2], Operation::Write { offset: 0x27000, .. }));
    assert_eq!(kinds.len(), 3);
    bench.reply(0, true);
    assert!(bench.answer(first).is_none() && bench.answer(second).is_none(), "a trim is missing");
    bench.reply(0, true);
    assert_eq!(bench.answer(first), Some(Ok(Taken { to: 10, stable_to: 0, is_fed: false })));
    assert_eq!(bench.answer(second), Some(Ok(Taken { to: 20, stable_to: 0, is_fed: false })));
    bench.reply(0, true);
    assert!(bench.answer(last).is_none() && bench.progress() == (20, 0, false));
    bench.submit();
    assert!(matches!(bench.under_way[..], [(_, Operation::Flush)]));
    bench.reply(0, true);
    assert_eq!(bench.answer(last), Some(Ok(Taken { to: 40, stable_to: 40, is_fed: true })));
    assert_eq!(bench.progress(), (40, 40, true));
    assert_eq!(bench.begin(), Ok(Taken { to: 40, stable_to: 40, is_fed: true }));
}

#[test]
fn slots_are_answered_in_their_order_where_later_ones_are_written_first() {
    let mut bench = Bench::begun(TRANSFER);
    let first = bench.next(0, Some(1), &[(0, Some(1))]);
    let second = bench.next(1, Some(2), &[(1, Some(2))]);
    bench.submit();
    bench.reply(1, true);
    assert!(bench.answer(second).is_none() && bench.progress() == (0, 0, false));
    bench.reply(0, true);
    assert!(bench.answer(first).is_some() && bench.answer(second).is_some());
    assert_eq!(bench.progress(), (2, 0, false));
}

#[test]
fn where_everything_is_sent_blocks_that_are_not_named_are_holes_and_otherwise_they_stay() {
    for (transfer, rest) in [(EVERYTHING, 0), (TRANSFER, 0xee)] {
        let mut bench = Bench::begun(transfer);
        bench.next(0, Some(8), &[(3, Some(7))]);
        bench.next(8, None, &[(9, Some(8))]);
        bench.reply_all();
        let mut expected = vec![rest; BLOCKS as usize];
        (expected[3], expected[9]) = (7, 8);
        assert_eq!(bench.volume, expected);
        assert_eq!(bench.progress(), (40, 40, true));
    }
}

#[test]
fn an_end_behind_the_last_block_ends_a_stream_that_goes_on_there() {
    let mut bench = Bench::begun(TRANSFER);
    bench.next(0, Some(BLOCKS), &[(0, Some(1))]);
    bench.reply_all();
    assert_eq!(bench.begin().unwrap().to, BLOCKS);
    let last = bench.next(BLOCKS, None, &[]);
    bench.reply_all();
    assert!(bench.answer(last).unwrap().unwrap().is_fed);
}

#[test]
fn nothing_is_taken_but_the_slots_of_the_stream_that_is_ordered() {
    let mut bench = Bench::new(TRANSFER);
    let begin = |bench: &mut Bench, here, feed| bench.feeding.begin(here, &feed).map(drop);
    let feed = feed_of(&bench.order);
    let away = Here { is_serving: false, ..HERE };
    assert_eq!(begin(&mut bench, away, feed), Err(Refused::NotServed));
    let wrong = history::Feed { token: 8, ..feed };
    assert_eq!(begin(&mut bench, HERE, wrong), Err(Refused::NotOrdered));
    let wrong = history::Feed { base: None, ..feed };
    assert_eq!(begin(&mut bench, HERE, wrong), Err(Refused::NotOrdered));
    bench.begin().unwrap();
    let good = slots(0, Some(5), &[(1, Some(1))], None);
    let mut refused = |stream: Stream, slots: &Slots| {
        let came = Came::of(slots, stream.feed.base.is_none());
        let ticket = bench.send_as(stream, came);
        bench.answer(ticket).unwrap().unwrap_err()
    };
    let stream = Stream { number: 1, feed, from: 0 };
    let other = Stream { feed: history::Feed { token: 8, ..feed }, ..stream };
    assert_eq!(refused(other, &good), Refused::NotOrdered);
    assert_eq!(refused(Stream { number: 2, ..stream }, &good), Refused::OutOfOrder);
    let mut changed = good.clone();
    changed.part.blocks[0].crc ^= 1;
    assert_eq!(refused(stream, &changed), Refused::Changed);
    for wrong in [
        slots(1, Some(5), &[], None),
        slots(0, Some(0), &[], None),
        slots(0, Some(3), &[(4, None)], None),
        slots(0, Some(BLOCKS + 1), &[], None),
        slots(0, None, &[(BLOCKS, Some(1))], Some(0)),
        slots(BLOCKS + 1, None, &[], Some(0)),
        slots(u64::MAX, None, &[], Some(0)),
    ] {
        assert_eq!(refused(stream, &wrong), Refused::OutOfOrder, "{wrong:?}");
    }
    assert_eq!(refused(stream, &slots(0, None, &[], Some(1))), Refused::Changed, "wrong digest");
    bench.submit();
    assert!(bench.under_way.is_empty(), "nothing of it is written");
    assert_eq!(
        Feeding::<Ticket>::new(Some(bench.order), true).begin(HERE, &feed),
        Err(Refused::NotServed)
    );
    assert_eq!(Feeding::<Ticket>::new(None, false).begin(HERE, &feed), Err(Refused::NotOrdered));
}

#[test]
fn no_more_slots_than_a_few_are_held() {
    let mut bench = Bench::begun(TRANSFER);
    let waiting: Vec<_> = (0..5).map(|n| bench.next(n, Some(n + 1), &[(n, Some(1))])).collect();
    assert_eq!(bench.answer(waiting[SLOTS_MAX]), Some(Err(Refused::Busy)));
    assert!(bench.answer(waiting[0]).is_none());
}

#[test]
fn a_late_order_changes_nothing_and_another_one_or_none_ends_what_is_under_way() {
    let mut bench = Bench::new(TRANSFER);
    bench.feeding.order(Some(order(TRANSFER, 5)), false);
    bench.begin().unwrap();
    let waiting = bench.next(0, Some(5), &[(1, Some(1))]);
    bench.submit();
    bench.feeding.order(Some(order(EVERYTHING, 4)), false);
    assert_eq!(bench.feeding.progress().unwrap().order, order(TRANSFER, 5));
    // The same one under a later stamp goes on.
    bench.feeding.order(Some(order(TRANSFER, 6)), false);
    assert!(bench.answer(waiting).is_none());
    bench.feeding.order(Some(order(EVERYTHING, 7)), false);
    assert_eq!(bench.answer(waiting), Some(Err(Refused::NotOrdered)));
    assert!(bench.feeding.abandons);
    bench.reply(0, true);
    assert_eq!(bench.progress(), (0, 0, false), "a reply of the former order counts nowhere");
    bench.feeding.order(None, false);
    assert_eq!(bench.feeding.progress(), None);
    bench.feeding.order(Some(order(TRANSFER, 6)), false);
    assert_eq!(bench.feeding.progress(), None, "the stamp is kept");
    let feed = feed_of(&order(TRANSFER, 6));
    assert_eq!(bench.feeding.begin(HERE, &feed), Err(Refused::NotOrdered));
}

#[test]
fn a_request_that_failed_and_a_new_epoch_have_the_transfer_begin_anew() {
    let mut bench = Bench::new(TRANSFER);
    let begin = FeedOrder { from_block: 3, ..order(TRANSFER, 2) };
    bench.feeding.order(None, false);
    bench.feeding.order(Some(begin), false);
    for fails in [true, false] {
        bench.begin().unwrap();
        bench.next(3, Some(5), &[(4, Some(1))]);
        bench.reply_all();
        let waiting = bench.next(5, Some(6), &[(5, Some(1))]);
        bench.submit();
        assert_eq!(bench.progress(), (5, 3, false));
        if fails {
            bench.reply(0, false);
            assert_eq!(bench.answer(waiting), Some(Err(Refused::Failed)));
        } else {
            bench.feeding.not_served();
            assert_eq!(bench.answer(waiting), Some(Err(Refused::NotServed)));
            bench.reply(0, true);
        }
        assert_eq!(bench.progress(), (3, 3, false));
        assert_eq!(bench.begin().unwrap().to, 3);
    }
}

#[test]
fn a_stream_that_follows_another_one_begins_at_what_is_written_and_ends_that() {
    let mut bench = Bench::begun(TRANSFER);
    bench.next(0, Some(5), &[(1, Some(1))]);
    bench.reply_all();
    let (former, waiting) = (bench.stream, bench.next(5, Some(9), &[(6, Some(1))]));
    bench.submit();
    assert_eq!(bench.begin().unwrap().to, 5);
    assert_eq!(bench.answer(waiting), Some(Err(Refused::OutOfOrder)));
    bench.reply(0, true);
    assert_eq!(bench.progress().0, 5);
    let came = Came::of(&slots(9, Some(10), &[], None), false);
    let late = bench.send_as(former, came);
    assert_eq!(bench.answer(late), Some(Err(Refused::OutOfOrder)));
    bench.next(5, None, &[(6, Some(1))]);
    bench.reply_all();
    assert_eq!(bench.progress(), (40, 40, true));
}

#[test]
fn a_digest_that_is_another_one_takes_back_what_the_transfer_had() {
    let mut bench = Bench::begun(TRANSFER);
    bench.next(0, Some(5), &[(1, Some(1))]);
    bench.reply_all();
    let wrong = slots(5, None, &[], Some(1));
    let last = bench.send(&wrong);
    assert_eq!(bench.answer(last), Some(Err(Refused::Changed)));
    assert_eq!(bench.progress(), (0, 0, false));
}

#[test]
fn what_is_written_is_flushed_after_some_mebibytes_and_progress_is_news_once_a_second() {
    let blocks = 1 << 20;
    let here = Here { is_serving: true, blocks };
    let mut bench = Bench::begun(TRANSFER);
    bench.volume = vec![0; blocks as usize];
    assert!(bench.feeding.is_news(Time(1)), "the order is");
    let second = Duration::from_secs(1);
    let mut now = Time(1) + second;
    for round in 0..3u64 {
        for n in 0..256 {
            let place = round * 256 + n;
            let came = Came::of(&slots(place, Some(place + 1), &[(place, None)], None), false);
            let stream = bench.stream;
            bench.take(here, &stream, came);
            assert!(!bench.feeding.is_news(now));
            bench.reply_all();
        }
        assert_eq!(bench.progress(), ((round + 1) * 256, (round + 1) * 256, false));
        assert!(bench.feeding.is_news(now) && !bench.feeding.is_news(now));
        now = now + second;
    }
}

#[test]
fn long_holes_are_cut_to_what_an_entry_may_cover_and_few_are_under_way() {
    let blocks = 1 << 34;
    let mut bench = Bench::begun(EVERYTHING);
    let came = Came::of(&slots(0, Some(blocks), &[], None), true);
    let (here, stream) = (Here { is_serving: true, blocks }, bench.stream);
    let waiting = bench.take(here, &stream, came);
    let mut covered = 0;
    while bench.answer(waiting).is_none() {
        bench.submit();
        assert!(!bench.under_way.is_empty() && bench.under_way.len() <= REQUESTS_MAX);
        for (number, operation) in std::mem::take(&mut bench.under_way) {
            if let Operation::Trim { offset, length, .. } = operation {
                assert!(offset >> BLOCK_SHIFT == covered && length >> BLOCK_SHIFT <= 1 << 18);
                covered += length >> BLOCK_SHIFT;
            }
            bench.feeding.replied(number, true);
        }
    }
    assert_eq!(covered, blocks);
}

/// Content that is sent.
#[derive(Clone, Debug)]
struct Sent {
    to: Vec<Option<u8>>,
    is_everything: bool,
    /// For each block whether slots begin there.
    cuts: Vec<bool>,
}

impl Sent {
    fn named(&self, block: u64) -> bool {
        // Of the rest some changed, by their number.
        match self.is_everything {
            true => self.to[block as usize].is_some(),
            false => !block.is_multiple_of(3),
        }
    }

    fn expected(&self, block: u64) -> u8 {
        match self.is_everything || self.named(block) {
            true => self.to[block as usize].unwrap_or(0),
            false => 0xee,
        }
    }

    /// Sends the slots from a place on; returns where the next ones begin.
    fn send(&self, bench: &mut Bench, place: u64) -> Option<u64> {
        let next = (place + 1..BLOCKS).find(|block| self.cuts[*block as usize]);
        let blocks = place..next.unwrap_or(BLOCKS);
        let named = blocks.filter(|block| self.named(*block));
        let named: Vec<_> = named.map(|block| (block, self.to[block as usize])).collect();
        bench.next(place, next, &named);
        next
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    let blocks = BLOCKS as usize;
    let fill = prop_oneof![Just(None), (1u8..200).prop_map(Some)];
    let to = prop::collection::vec(fill, blocks);
    let cuts = prop::collection::vec(any::<bool>(), blocks);
    (to, any::<bool>(), cuts).prop_map(|(to, is_everything, cuts)| Sent { to, is_everything, cuts })
}

proptest! {
    /// Whatever ends streams, requests and epochs, and in whatever order replies come.
    #[test]
    fn what_counts_as_taken_is_written_and_what_is_fed_is_what_was_sent(
        sent in sent(), steps in prop::collection::vec((0u8..20, any::<usize>()), 0..120),
    ) {
        let mut bench = Bench::new(if sent.is_everything { EVERYTHING } else { TRANSFER });
        let mut place = None;
        // In the end nothing breaks any more.
        let calm = (0..4000usize).map(|n| ((n % 10) as u8, 0));
        for (step, which) in steps.into_iter().chain(calm) {
            if bench.progress().2 {
                break;
            }
            match step {
                0..3 if bench.feeding.window.len() < SLOTS_MAX => {
                    if let Some(at) = place {
                        place = sent.send(&mut bench, at);
                    } else if bench.feeding.window.is_empty() {
                        let from = bench.progress().0;
                        bench.begin().unwrap();
                        place = Some(from);
                    }
                }
                0..6 => bench.submit(),
                6..16 => {
                    if let Some(index) = which.checked_rem(bench.under_way.len()) {
                        bench.reply(index, true);
                    }
                }
                16 => {
                    let from = bench.progress().0;
                    bench.begin().unwrap();
                    place = Some(from);
                }
                17 => {
                    if let Some(index) = which.checked_rem(bench.under_way.len()) {
                        bench.reply(index, false);
                        if !bench.feeding.is_open {
                            place = None;
                        }
                    }
                }
                18 => {
                    bench.feeding.not_served();
                    place = None;
                }
                _ => {
                    let stamp = bench.order.stamp;
                    let late = FeedOrder { stamp: Stamp { term: 0, ..stamp }, ..bench.order };
                    bench.feeding.order(Some(late), false);
                }
            }
            let (taken_to, stable_to, _) = bench.progress();
            prop_assert!(stable_to <= taken_to);
            for block in 0..taken_to {
                prop_assert_eq!(bench.volume[block as usize], sent.expected(block), "{}", block);
            }
        }
        prop_assert_eq!(bench.progress(), (BLOCKS, BLOCKS, true));
    }
}
