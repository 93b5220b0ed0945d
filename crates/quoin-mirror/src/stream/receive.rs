//! The receiving end of a stream.

use std::future::Future;
use std::time::Duration;

use quoin_types::BLOCK_SIZE;
use quoin_wire::history::{Feed, Message, Taken};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::frame::{Begin, Frame};
use super::pack::unpack;
use super::{BEGUN_WITHIN, IN_FLIGHT_MAX, SILENT_MAX, history};

/// Time for the other side to read the reason that ended a stream.
const REASON_READ_WITHIN: Duration = Duration::from_secs(2);

/// Parts that a stream of a peer is told to.
pub struct Hooks<'a> {
    /// A frame of the peer came.
    pub heard: &'a (dyn Fn() + Sync),
    /// So many bytes of content were taken.
    pub took: &'a (dyn Fn(u64) + Sync),
}

/// End of a stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// Everything was taken.
    Fed,
    /// The peer is told these words.
    Refused(String),
    /// The peer is gone, or speaks another language.
    Lost(String),
}

/// Takes a stream whose first frame was `begin` into the target that `open` connects to, until it ends or
/// `stopped` returns words.
pub async fn receive<T, F>(
    peer: impl AsyncRead + AsyncWrite,
    begin: &Begin,
    open: impl FnOnce() -> F,
    hooks: &Hooks<'_>,
    stopped: impl Future<Output = String>,
) -> End
where
    T: AsyncRead + AsyncWrite,
    F: Future<Output = std::io::Result<T>>,
{
    let (mut reader, mut writer) = tokio::io::split(peer);
    let end = tokio::select! {
        end = relay(&mut reader, &mut writer, begin, open, hooks) => end,
        why = stopped => End::Refused(why),
    };
    if let End::Refused(why) = &end {
        refuse(&mut reader, &mut writer, why).await;
    }
    // The peer may have gone first.
    let _ = timeout(REASON_READ_WITHIN, writer.shutdown()).await;
    end
}

/// Tells the peer why, and reads what is on its way, so that the words are not lost with it.
pub async fn refuse(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    why: &str,
) {
    let told = async {
        Frame::Refused(why.to_owned()).write(writer).await.ok()?;
        let mut passed = reader.take((IN_FLIGHT_MAX * super::frame::FRAME_BYTES_MAX) as u64);
        tokio::io::copy(&mut passed, &mut tokio::io::sink()).await.ok()
    };
    // A peer that does not end the stream is left.
    let _ = timeout(REASON_READ_WITHIN, told).await;
}

async fn relay<P, T, F>(
    reader: &mut ReadHalf<P>,
    writer: &mut WriteHalf<P>,
    begin: &Begin,
    open: impl FnOnce() -> F,
    hooks: &Hooks<'_>,
) -> End
where
    P: AsyncRead + AsyncWrite,
    T: AsyncRead + AsyncWrite,
    F: Future<Output = std::io::Result<T>>,
{
    let target = match open().await {
        Ok(target) => target,
        Err(error) => {
            let why = format!("not here: the target of this host does not answer: {error}");
            return End::Refused(why);
        }
    };
    let (mut from_target, mut to_target) = tokio::io::split(target);
    let Begin { volume, point, base, token, .. } = *begin;
    let feed = Message::Feed(Feed { volume, point, base, token });
    let begun = async {
        history::write(&mut to_target, &history::encode(&feed)?).await?;
        history::read(&mut from_target).await
    };
    let taken = match timeout(BEGUN_WITHIN, begun).await {
        Ok(Ok(Message::Taken(taken))) => taken,
        Ok(Ok(Message::Refused(refused))) => return End::Refused(format!("not here: {refused}")),
        Ok(Ok(_)) => return End::Refused("the target answers out of turn".to_owned()),
        Ok(Err(failed)) => return End::Refused(format!("the target takes nothing: {failed}")),
        Err(_) => return End::Refused("the target does not answer".to_owned()),
    };
    if let Err(end) = tell(writer, taken).await {
        return end;
    }
    if taken.is_fed {
        return End::Fed;
    }
    let window = Semaphore::new(IN_FLIGHT_MAX);
    tokio::select! {
        // A target says nothing where the peer does not: the peer is named first.
        biased;
        end = pass(reader, &mut to_target, &window, hooks) => end,
        end = answer(&mut from_target, writer, &window) => end,
    }
}

async fn tell(writer: &mut (impl AsyncWrite + Unpin), taken: Taken) -> Result<(), End> {
    Frame::Taken(taken).write(writer).await.map_err(|error| End::Lost(error.to_string()))
}

/// Passes slots of the peer to the target, a few ahead of what that took.
async fn pass(
    reader: &mut (impl AsyncRead + Unpin),
    target: &mut (impl AsyncWrite + Unpin),
    window: &Semaphore,
    hooks: &Hooks<'_>,
) -> End {
    loop {
        let packed = match timeout(SILENT_MAX, Frame::read(reader)).await {
            Ok(Ok(Frame::Slots(packed))) => packed,
            Ok(Ok(_)) => return End::Refused("a frame out of turn".to_owned()),
            Ok(Err(error)) => return End::Lost(error.to_string()),
            Err(_) => return End::Refused(format!("nothing came for {} s", SILENT_MAX.as_secs())),
        };
        (hooks.heard)();
        let Ok(place) = window.acquire().await else { return End::Lost("it ended".to_owned()) };
        place.forget();
        let unpacked = tokio::task::spawn_blocking(move || unpack(packed)).await;
        let (raw, slots) = match unpacked {
            Ok(Ok(unpacked)) => unpacked,
            Ok(Err(error)) => return End::Refused(error.to_string()),
            Err(error) => return End::Refused(format!("the slots cannot be unpacked: {error}")),
        };
        if let Err(failed) = history::write(target, &raw).await {
            return End::Refused(format!("the target takes nothing: {failed}"));
        }
        (hooks.took)((slots.part.blocks.len() * BLOCK_SIZE) as u64);
        if slots.end.is_some() {
            // The target's answer ends the stream.
            return std::future::pending().await;
        }
    }
}

/// Passes the target's answers to the peer.
async fn answer(
    target: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    window: &Semaphore,
) -> End {
    loop {
        let taken = match history::read(target).await {
            Ok(Message::Taken(taken)) => taken,
            Ok(Message::Refused(refused)) => return End::Refused(refused.to_string()),
            Ok(_) => return End::Refused("the target answers out of turn".to_owned()),
            Err(failed) => return End::Refused(format!("the target ended: {failed}")),
        };
        if let Err(end) = tell(writer, taken).await {
            return end;
        }
        if taken.is_fed {
            return End::Fed;
        }
        window.add_permits(1);
    }
}
