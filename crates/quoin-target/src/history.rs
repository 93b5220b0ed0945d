//! The history socket: the content of snapshots, as it is stored, to programs of this host
//! ([`quoin_wire::history`]).
//!
//! The first frame says which way a stream goes: from a volume ([`Wanted`]), or into a copy ([`crate::feed`]).
//!
//! A stream is read by a thread of its own, from the target to its client and nowhere else, so the controller
//! has no byte of it to carry. The next part is asked of the volume's shard before the last one is written to
//! the client. The state machine gives the pace ([`ChangesRequest`]), as for a rebuild.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use quoin_encryption::ContentHash;
use quoin_reactor::descriptors::LISTENER_REST;
use quoin_replication::primary::{ChangesAnswer, ChangesRequest};
use quoin_types::ids::SnapshotId;
use quoin_types::message::{Content, Slot};
use quoin_types::{BLOCK_SIZE, VolumeId};
use quoin_wire::WireError;
use quoin_wire::history::{Block, Message, Part, Refused, Wanted};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::control::Control;
use crate::shard::Input;

/// Most streams at a time. Each holds two parts of some hundred KiB.
pub const STREAMS_MAX: usize = 16;
/// Time for what the client wants, once it has connected.
const WANTED_WITHIN: Duration = Duration::from_secs(5);
/// Time for a client to take a part.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);
/// Time for an answer. A volume that is served answers within it, also where replicas are passed over.
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_secs(20);
/// Pause before a part is asked for again where others are read.
const AGAIN: Duration = Duration::from_millis(20);

/// Blocks of a range that is hashed.
pub(crate) const RANGE_BLOCKS: u64 = (1 << 20) / BLOCK_SIZE as u64;

/// Hashes ranges of a snapshot, the first of which begins at this one. What is read is as it is stored.
pub(crate) fn hash_ranges(
    control: &Control,
    (volume, snapshot): (VolumeId, SnapshotId),
    first: u64,
    ranges: u32,
) -> Result<Vec<u8>, Refused> {
    let begin = first.saturating_mul(RANGE_BLOCKS);
    let end = begin.saturating_add(RANGE_BLOCKS.saturating_mul(ranges.into()));
    let mut hashes: Vec<ContentHash> = (0..ranges).map(|_| ContentHash::default()).collect();
    let wanted = Wanted { volume, from: None, to: snapshot, cursor: begin, want_data: ranges > 0 };
    let mut cursor = Some(begin);
    while let Some(at) = cursor.filter(|at| *at < end) {
        let part = Asked::begin(control, &wanted, at).wait(control, &wanted)?;
        part.check().map_err(|_| Refused::Changed)?;
        let held = part.ranges.iter().filter(|range| !range.hole);
        let places = held.flat_map(|range| range.lba..range.lba + range.blocks);
        for (lba, block) in places.zip(&part.blocks) {
            let Some(inside) = lba.checked_sub(begin).filter(|_| lba < end) else { continue };
            let hash = &mut hashes[(inside / RANGE_BLOCKS) as usize];
            hash.add((inside % RANGE_BLOCKS) as u32, &block.data);
        }
        cursor = part.next;
    }
    Ok(hashes.into_iter().flat_map(ContentHash::finish).collect())
}

/// Part that a shard was asked for.
pub struct Pull {
    pub request: ChangesRequest,
    /// Takes one answer; dropped without one where the volume is not served.
    pub answer: SyncSender<ChangesAnswer>,
}

/// Serves the socket until the task is ended.
pub(crate) async fn serve(listener: UnixListener, control: Arc<Control>) {
    let places = Arc::new(Semaphore::new(STREAMS_MAX));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(LISTENER_REST).await;
            continue;
        };
        let place = places.clone().try_acquire_owned().ok();
        let control = control.clone();
        let begun = stream.into_std().and_then(|stream| {
            stream.set_nonblocking(false)?;
            let thread = std::thread::Builder::new().name("history".to_owned());
            thread.spawn(move || answer(&control, stream, place)).map(drop)
        });
        if let Err(error) = begun {
            tracing::warn!(%error, "a stream of a snapshot cannot be begun");
        }
    }
}

fn answer(control: &Control, mut stream: UnixStream, place: Option<OwnedSemaphorePermit>) {
    let outcome = match place {
        Some(_) => answer_one(control, &mut stream),
        None => Message::Refused(Refused::Busy).write(&mut stream),
    };
    if let Err(error) = outcome {
        // A further stream begins where this one ended.
        tracing::debug!(%error, "a stream of a snapshot ended");
    }
}

fn answer_one(control: &Control, stream: &mut UnixStream) -> Result<(), WireError> {
    let failed = |source| WireError::Io { operation: "prepare a stream", source };
    stream.set_read_timeout(Some(WANTED_WITHIN)).map_err(failed)?;
    stream.set_write_timeout(Some(TAKEN_WITHIN)).map_err(failed)?;
    let wanted = match Message::read(stream)? {
        Some(Message::Wanted(wanted)) => wanted,
        Some(Message::Feed(feed)) => return crate::feed::serve(control, stream, feed),
        Some(_) => return Err(WireError::Malformed("first frame of a stream")),
        None => return Ok(()),
    };
    let mut coming = Some(Asked::begin(control, &wanted, wanted.cursor));
    while let Some(asked) = coming.take() {
        let part = match asked.wait(control, &wanted) {
            Ok(part) => part,
            Err(refused) => return Message::Refused(refused).write(stream),
        };
        coming = part.next.map(|cursor| Asked::begin(control, &wanted, cursor));
        Message::Part(part).write(stream)?;
    }
    Ok(())
}

/// Part that is on its way.
struct Asked {
    request: ChangesRequest,
    answer: Receiver<ChangesAnswer>,
}

impl Asked {
    fn begin(control: &Control, wanted: &Wanted, cursor: u64) -> Self {
        let (sender, answer) = sync_channel(1);
        let request = ChangesRequest {
            token: rand::random(),
            from: wanted.from,
            to: Some(wanted.to),
            cursor,
            want_data: wanted.want_data,
        };
        control.tell(wanted.volume, Input::Pull(wanted.volume, Pull { request, answer: sender }));
        Self { request, answer }
    }

    fn wait(mut self, control: &Control, wanted: &Wanted) -> Result<Part, Refused> {
        loop {
            match self.answer.recv_timeout(ANSWERED_WITHIN) {
                Ok(ChangesAnswer::Part { ranges, slots, next }) => {
                    return Ok(Part { ranges, blocks: blocks(slots), next });
                }
                Ok(ChangesAnswer::NoSnapshot) => return Err(Refused::NoSnapshot),
                Ok(ChangesAnswer::Damaged { lba }) => return Err(Refused::Damaged { lba }),
                Ok(ChangesAnswer::Busy) => {
                    std::thread::sleep(AGAIN);
                    self = Self::begin(control, wanted, self.request.cursor);
                }
                Err(_) => {
                    let token = self.request.token;
                    control.tell(wanted.volume, Input::PullGivenUp(wanted.volume, token));
                    return Err(Refused::NotServed);
                }
            }
        }
    }
}

fn blocks(slots: Vec<Slot>) -> Vec<Block> {
    let block = |slot: Slot| match slot.content {
        Content::Data { crc, data } => Some(Block { crc, data }),
        Content::Hole | Content::Bad => None,
    };
    slots.into_iter().filter_map(block).collect()
}

/// Answers of a volume that a stream waits for, by the tokens of their requests.
#[derive(Default)]
pub(crate) struct Pulls(std::collections::BTreeMap<u64, SyncSender<ChangesAnswer>>);

impl Pulls {
    pub fn insert(&mut self, pull: Pull) -> ChangesRequest {
        self.0.insert(pull.request.token, pull.answer);
        pull.request
    }

    /// The volume is not served now: the streams are told at once.
    pub fn end(&mut self) {
        self.0.clear();
    }

    pub fn give_up(&mut self, token: u64) {
        self.0.remove(&token);
    }

    /// Passes an answer on; `Some`: no stream waits for it.
    pub fn answer(&mut self, token: u64, answer: ChangesAnswer) -> Option<ChangesAnswer> {
        let Some(stream) = self.0.remove(&token) else { return Some(answer) };
        // A stream that has ended meanwhile needs none.
        let _ = stream.try_send(answer);
        None
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::message::ChangedRange;

    use super::*;

    fn part() -> ChangesAnswer {
        let range = ChangedRange { lba: 1, blocks: 1, hole: false };
        ChangesAnswer::Part { ranges: vec![range], slots: Vec::new(), next: None }
    }

    fn pull(token: u64) -> (Pull, Receiver<ChangesAnswer>) {
        let (answer, receiver) = sync_channel(1);
        let request = ChangesRequest { token, from: None, to: None, cursor: 0, want_data: false };
        (Pull { request, answer }, receiver)
    }

    #[test]
    fn an_answer_goes_to_the_stream_that_asked_and_others_to_the_controller() {
        let mut pulls = Pulls::default();
        let (first, stream) = pull(1);
        pulls.insert(first);
        assert_eq!(pulls.answer(2, part()), Some(part()));
        assert_eq!(pulls.answer(1, part()), None);
        assert_eq!(stream.try_recv(), Ok(part()));
        assert_eq!(pulls.answer(1, part()), Some(part()), "it is answered once");
    }

    #[test]
    fn a_stream_that_gave_up_or_ended_holds_nothing() {
        let mut pulls = Pulls::default();
        let (first, _) = pull(1);
        let (second, stream) = pull(2);
        pulls.insert(first);
        pulls.insert(second);
        pulls.give_up(1);
        drop(stream);
        assert_eq!(pulls.answer(2, part()), None);
        assert!(pulls.0.is_empty());
    }
}
