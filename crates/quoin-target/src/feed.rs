//! Streams into a copy, on the history socket: the slots of the one transfer that the controller ordered.
//!
//! A stream is read by a thread of its own, which checks what comes and makes steps of it, and answered by a
//! second one, so that the next slots are read while earlier ones are written. The volume's shard writes the
//! steps as requests of its own (`crate::shard::feeding`).

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use quoin_types::{BLOCK_SIZE, WRITE_BLOCKS_MAX};
use quoin_wire::WireError;
use quoin_wire::history::{Block, Feed, Message, Refused, Slots, Taken};

use crate::control::Control;
use crate::history::ANSWERED_WITHIN;
use crate::shard::Input;

/// Most slots of a volume that are being written.
pub const SLOTS_MAX: usize = 4;
/// Time for the next slots to come.
const SLOTS_WITHIN: Duration = Duration::from_secs(60);
/// Most bytes of one write.
const WRITE_BYTES_MAX: usize = WRITE_BLOCKS_MAX as usize * BLOCK_SIZE;

/// Way back to the stream that slots came from; dropped unused where the volume is not served any more.
pub type Answer = SyncSender<Result<Taken, Refused>>;

/// A stream that began: its number, which the target gives, and its first frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stream {
    pub number: u64,
    pub feed: Feed,
    /// Block at which it begins.
    pub from: u64,
}

/// Requests of a stream to the shard of its volume.
pub enum FeedInput {
    /// Answered with the number of the stream, and how far the transfer is.
    Begin(Feed, SyncSender<Result<(u64, Taken), Refused>>),
    Slots(Stream, Box<Came>, Answer),
}

/// Step that makes the content of slots that of the volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    Data { lba: u64, data: BytesMut },
    Hole { lba: u64, blocks: u64 },
}

/// Slots as they came, ready to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Came {
    pub place: u64,
    /// Block at which the next slots begin; `None`: these are the last ones.
    pub next: Option<u64>,
    pub end: Option<u64>,
    /// Sum that came with the bytes, and sum of the bytes that came.
    pub sums: [u32; 2],
    pub steps: VecDeque<Step>,
    /// The steps cover the blocks before it.
    pub covered_to: u64,
}

impl Came {
    /// Makes steps of slots. Where everything is sent, blocks that no range names are holes.
    pub fn of(slots: &Slots, is_everything: bool) -> Self {
        let sum = slots.sum();
        let steps = Steps::of(slots, is_everything).filter(|_| slots.part.check().is_ok());
        let sums = [sum, if steps.is_some() { sum } else { !sum }];
        let Steps { steps, covered_to } = steps.unwrap_or_default();
        Self { place: slots.place, next: slots.part.next, end: slots.end, sums, steps, covered_to }
    }
}

#[derive(Default)]
struct Steps {
    steps: VecDeque<Step>,
    covered_to: u64,
}

impl Steps {
    /// `None`: the blocks are not those of the ranges.
    fn of(slots: &Slots, is_everything: bool) -> Option<Self> {
        let mut made = Self { steps: VecDeque::new(), covered_to: slots.place };
        let mut blocks = slots.part.blocks.iter();
        for range in &slots.part.ranges {
            let end = range.lba.checked_add(range.blocks)?;
            let gap = range.lba.checked_sub(made.covered_to)?;
            if is_everything {
                push_hole(&mut made.steps, made.covered_to, gap);
            }
            match range.hole {
                true => push_hole(&mut made.steps, range.lba, range.blocks),
                false => {
                    for lba in range.lba..end {
                        let left = blocks.len();
                        push_block(&mut made.steps, lba, blocks.next()?, left);
                    }
                }
            }
            made.covered_to = end;
        }
        blocks.next().is_none().then_some(made)
    }
}

/// Adds a hole, to the one before where it follows that.
pub fn push_hole(steps: &mut VecDeque<Step>, lba: u64, blocks: u64) {
    match steps.back_mut() {
        _ if blocks == 0 => {}
        Some(Step::Hole { lba: first, blocks: has }) if *first + *has == lba => *has += blocks,
        _ => steps.push_back(Step::Hole { lba, blocks }),
    }
}

/// Adds a block, to the write before where it follows that and fits.
fn push_block(steps: &mut VecDeque<Step>, lba: u64, block: &Block, blocks_left: usize) {
    if let Some(Step::Data { lba: first, data }) = steps.back_mut()
        && *first + (data.len() / BLOCK_SIZE) as u64 == lba
        && data.len() + block.data.len() <= WRITE_BYTES_MAX
    {
        return data.put_slice(&block.data);
    }
    let bytes = blocks_left.saturating_mul(BLOCK_SIZE).clamp(BLOCK_SIZE, WRITE_BYTES_MAX);
    let mut data = BytesMut::with_capacity(bytes);
    data.put_slice(&block.data);
    steps.push_back(Step::Data { lba, data });
}

/// Serves a stream into a copy until it ends.
pub(crate) fn serve(
    control: &Control,
    stream: &mut UnixStream,
    feed: Feed,
) -> Result<(), WireError> {
    let tell = |input| control.tell(feed.volume, Input::Feed(feed.volume, input));
    take(stream, feed, &tell)
}

/// Takes the slots of a stream whose first frame was read. `tell`: gives a request to the shard, or drops it.
///
/// # Errors
/// The stream fails, or holds what it may not.
pub fn take(
    stream: &mut UnixStream,
    feed: Feed,
    tell: &impl Fn(FeedInput),
) -> Result<(), WireError> {
    let failed = |source| WireError::Io { operation: "prepare a stream", source };
    let (answer, begun) = sync_channel(1);
    tell(FeedInput::Begin(feed, answer));
    let (number, taken) = match wait(&begun) {
        Ok(begun) => begun,
        Err(refused) => return Message::Refused(refused).write(stream),
    };
    Message::Taken(taken).write(stream)?;
    if taken.is_fed {
        return Ok(());
    }
    stream.set_read_timeout(Some(SLOTS_WITHIN)).map_err(failed)?;
    let mut writer = stream.try_clone().map_err(failed)?;
    // One more is waited for by the writer.
    let (passed_on, coming) = sync_channel(SLOTS_MAX - 1);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("history-answers".to_owned());
        let answering = thread.spawn_scoped(scope, move || {
            let outcome = give_answers(&mut writer, &coming);
            // The reader waits for slots that will not be taken.
            let _ = writer.shutdown(Shutdown::Both);
            outcome
        });
        let answering = answering.map_err(failed)?;
        let read = read_slots(stream, Stream { number, feed, from: taken.to }, &passed_on, tell);
        drop(passed_on);
        let written = answering.join().unwrap_or(Err(WireError::Closed));
        written.and(read)
    })
}

fn read_slots(
    stream: &mut UnixStream,
    of: Stream,
    passed_on: &SyncSender<Receiver<Result<Taken, Refused>>>,
    tell: &impl Fn(FeedInput),
) -> Result<(), WireError> {
    while let Some(message) = Message::read(stream)? {
        let Message::Slots(slots) = message else {
            return Err(WireError::Malformed("frame of a stream into a copy"));
        };
        let came = Came::of(&slots, of.feed.base.is_none());
        drop(slots);
        let (answer, receiver) = sync_channel(1);
        if passed_on.send(receiver).is_err() {
            return Ok(());
        }
        let is_last = came.next.is_none();
        tell(FeedInput::Slots(of, Box::new(came), answer));
        if is_last {
            break;
        }
    }
    Ok(())
}

fn give_answers(
    stream: &mut UnixStream,
    coming: &Receiver<Receiver<Result<Taken, Refused>>>,
) -> Result<(), WireError> {
    while let Ok(answer) = coming.recv() {
        match wait(&answer) {
            Ok(taken) => Message::Taken(taken).write(stream)?,
            Err(refused) => return Message::Refused(refused).write(stream),
        }
    }
    Ok(())
}

fn wait<T>(answer: &Receiver<Result<T, Refused>>) -> Result<T, Refused> {
    answer.recv_timeout(ANSWERED_WITHIN).unwrap_or(Err(Refused::NotServed))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use quoin_types::crc32c;
    use quoin_types::ids::{PointId, VolumeId};
    use quoin_types::message::ChangedRange;
    use quoin_wire::history::Part;

    use super::*;

    fn block(fill: u8) -> Block {
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Block { crc: crc32c(&data), data }
    }

    fn range(lba: u64, blocks: u64, hole: bool) -> ChangedRange {
        ChangedRange { lba, blocks, hole }
    }

    fn slots(ranges: &[ChangedRange], blocks: usize) -> Slots {
        let blocks = (0..blocks).map(|fill| block(fill as u8)).collect();
        Slots { place: 2, part: Part { ranges: ranges.to_vec(), blocks, next: None }, end: Some(0) }
    }

    /// Kind, first block and number of blocks of each step.
    fn shape(came: &Came) -> Vec<(char, u64, u64)> {
        let shape = |step: &Step| match step {
            Step::Data { lba, data } => ('d', *lba, (data.len() / BLOCK_SIZE) as u64),
            Step::Hole { lba, blocks } => ('h', *lba, *blocks),
        };
        came.steps.iter().map(shape).collect()
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_write_within_its_limit_and_so_are_holes_one_trim() {
        let ranges =
            [range(4, 2, false), range(6, 298, false), range(310, 5, true), range(315, 9, true)];
        let slots = slots(&ranges, 300);
        let changed = Came::of(&slots, false);
        assert_eq!(shape(&changed), [('d', 4, 256), ('d', 260, 44), ('h', 310, 14)]);
        assert_eq!((changed.covered_to, changed.sums), (324, [slots.sum(); 2]));
        let Some(Step::Data { data, .. }) = changed.steps.get(1) else { panic!() };
        assert!(data.chunks(BLOCK_SIZE).zip(0u8..).all(|(block, fill)| block[0] == fill));
        let everything = Came::of(&slots, true);
        let holes = [('h', 2, 2), ('d', 4, 256), ('d', 260, 44), ('h', 304, 20)];
        assert_eq!(shape(&everything), holes);
    }

    #[test]
    fn blocks_that_are_not_those_of_their_ranges_or_checksums_have_no_steps_and_another_sum() {
        let of = |ranges: &[ChangedRange], blocks| slots(ranges, blocks);
        let mut changed = of(&[range(4, 2, false)], 2);
        changed.part.blocks[1].crc ^= 1;
        for slots in [
            changed,
            of(&[range(4, 2, false)], 0),
            of(&[range(4, 2, false)], 1),
            of(&[range(4, 2, false)], 3),
            of(&[range(1, 2, false)], 2),
            of(&[range(4, 2, true), range(5, 1, true)], 0),
            of(&[range(u64::MAX, 2, true)], 0),
            of(&[range(4, u64::MAX / 2, false)], 2),
        ] {
            let came = Came::of(&slots, true);
            assert!(came.steps.is_empty() && came.sums[0] != came.sums[1], "{slots:?}");
        }
    }

    /// A shard that takes everything, and holds answers back until it has so many.
    fn served(held: usize, sent: &[Message]) -> (Vec<Message>, Result<(), WireError>) {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let (volume, point) = (VolumeId(7), PointId(2));
        let feed = Feed { volume, point, base: Some(PointId(1)), token: 9 };
        let sent = sent.to_vec();
        let client = std::thread::spawn(move || {
            for message in &sent {
                // The other side may end the stream before.
                let _ = message.write(&mut theirs);
            }
            let read = || Message::read(&mut theirs).ok().flatten();
            std::iter::from_fn(read).collect::<Vec<_>>()
        });
        let waiting = std::sync::Mutex::new(Vec::new());
        let outcome = take(&mut ours, feed, &|input| match input {
            FeedInput::Begin(_, answer) => answer.send(Ok((1, Taken::default()))).unwrap(),
            FeedInput::Slots(_, came, answer) => {
                let mut waiting = waiting.lock().unwrap();
                waiting.push((came, answer));
                assert!(waiting.len() <= SLOTS_MAX);
                if waiting.len() >= held {
                    for (came, answer) in waiting.drain(..) {
                        let taken = Taken { to: came.place, ..Taken::default() };
                        let is_good = came.sums[0] == came.sums[1];
                        let _ =
                            answer.send(if is_good { Ok(taken) } else { Err(Refused::Changed) });
                    }
                }
            }
        });
        drop(ours);
        (client.join().unwrap(), outcome)
    }

    fn part(place: u64, next: Option<u64>) -> Message {
        let part = Part { ranges: vec![range(place, 1, false)], blocks: vec![block(1)], next };
        Message::Slots(Slots { place, part, end: next.is_none().then_some(5) })
    }

    fn taken(to: u64) -> Message {
        Message::Taken(Taken { to, ..Taken::default() })
    }

    #[test]
    fn slots_are_read_while_others_are_written_and_answered_in_their_order() {
        let sent = [part(0, Some(1)), part(1, Some(2)), part(2, Some(3)), part(3, None)];
        for held in [1, 2, SLOTS_MAX] {
            let (answers, outcome) = served(held, &sent);
            assert_eq!(answers, [taken(0), taken(0), taken(1), taken(2), taken(3)]);
            outcome.unwrap();
        }
    }

    #[test]
    fn a_stream_ends_with_the_reason_for_which_slots_were_refused() {
        let Message::Slots(mut bad) = part(1, Some(2)) else { panic!() };
        bad.part.blocks[0] = Block { crc: 0, ..block(2) };
        let sent = [part(0, Some(1)), Message::Slots(bad), part(2, None)];
        let (answers, _) = served(1, &sent);
        assert_eq!(answers, [taken(0), taken(0), Message::Refused(Refused::Changed)]);
    }

    #[test]
    fn a_frame_that_is_none_of_a_stream_into_a_copy_ends_it() {
        let (answers, outcome) = served(1, &[part(0, Some(1)), taken(1)]);
        assert_eq!(answers, [taken(0), taken(0)]);
        assert!(outcome.is_err());
    }
}
