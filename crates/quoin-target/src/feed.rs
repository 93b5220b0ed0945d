//! Streams into a copy, on the history socket: the slots of the one transfer that the controller ordered.
//!
//! A stream is read by a thread of its own, which checks what comes and makes steps of it, and answered by a
//! second one, so that the next slots are read while earlier ones are written. The volume's shard writes the
//! steps as requests of its own (`crate::shard::feeding`).

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use quoin_cluster::mirror::feeding::{Came, SLOTS_MAX, Stream};
use quoin_wire::WireError;
use quoin_wire::history::{Feed, Message, Refused, Taken};

use crate::control::Control;
use crate::history::ANSWERED_WITHIN;
use crate::shard::Input;

/// Time for the next slots to come.
const SLOTS_WITHIN: Duration = Duration::from_secs(60);

/// Way back to the stream that slots came from; dropped unused where the volume is not served any more.
pub type Answer = SyncSender<Result<Taken, Refused>>;

/// Requests of a stream to the shard of its volume.
pub enum FeedInput {
    /// Answered with the number of the stream, and how far the transfer is.
    Begin(Feed, SyncSender<Result<(u64, Taken), Refused>>),
    Slots(Stream, Box<Came>, Answer),
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
    use quoin_types::ids::{PointId, VolumeId};
    use quoin_types::message::ChangedRange;
    use quoin_types::{BLOCK_SIZE, crc32c};
    use quoin_wire::history::{Block, Part, Slots};

    use super::*;

    fn block(fill: u8) -> Block {
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Block { crc: crc32c(&data), data }
    }

    fn range(lba: u64, blocks: u64, hole: bool) -> ChangedRange {
        ChangedRange { lba, blocks, hole }
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
