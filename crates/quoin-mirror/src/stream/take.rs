//! Streams of peers that this mirror takes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quoin_identity::ClusterId;
use quoin_types::ids::VolumeId;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use super::frame::Begin;
use super::history::socket;
use super::orders::check;
use super::receive::{End, Hooks, receive, refuse};
use crate::Shared;

/// Streams that are taken at a time.
const STREAMS_MAX: usize = 64;
/// Interval of the question whether a peer is trusted.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Streams that are taken now.
#[derive(Default, Debug)]
pub struct Open {
    count: AtomicUsize,
    /// The one of each transfer: a later one ends it.
    streams: Mutex<BTreeMap<Fed, (u64, oneshot::Sender<()>)>>,
    numbers: Mutex<u64>,
}

/// Volume that is fed, and the token of its order, which all members of a group have in common.
type Fed = (VolumeId, u128);

/// Place of a stream.
struct Place<'a> {
    open: &'a Open,
    fed: Fed,
    number: u64,
}

impl Open {
    /// A place for a stream, and the end of it that a later stream of the same transfer brings. `None`: too many
    /// are open.
    fn place(&self, fed: Fed) -> Option<(Place<'_>, oneshot::Receiver<()>)> {
        let has_room = |count: usize| (count < STREAMS_MAX).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        let number = {
            let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
            *numbers += 1;
            *numbers
        };
        let (later, replaced) = oneshot::channel();
        self.streams().insert(fed, (number, later));
        Some((Place { open: self, fed, number }, replaced))
    }

    fn streams(&self) -> MutexGuard<'_, BTreeMap<Fed, (u64, oneshot::Sender<()>)>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.open.count.fetch_sub(1, Ordering::Relaxed);
        let mut streams = self.open.streams();
        if streams.get(&self.fed).is_some_and(|(number, _)| *number == self.number) {
            streams.remove(&self.fed);
        }
    }
}

/// Serves a connection of a peer whose first frame began a stream.
pub(crate) async fn serve(
    shared: &Shared,
    stream: impl AsyncRead + AsyncWrite,
    peer: ClusterId,
    begin: Begin,
    is_trusted: impl Fn() -> bool,
) {
    let heard = || shared.contacts.heard(peer);
    heard();
    let ordered = check(&shared.assignment.borrow().takes, peer, &begin);
    let why = match ordered.map(|()| shared.open.place((begin.volume, begin.token))) {
        Ok(Some((_place, replaced))) => {
            let path = socket(&shared.options.run_dir);
            let took = |bytes| {
                shared.options.metrics.taken_bytes.inc_by(bytes);
            };
            let hooks = Hooks { heard: &heard, took: &took };
            let stopped = stopped(shared, peer, &begin, is_trusted, replaced);
            let _shown = shared.options.metrics.stream();
            let open = || UnixStream::connect(path);
            let end = receive(stream, &begin, open, &hooks, stopped).await;
            if end != End::Fed {
                let volume = begin.volume;
                tracing::debug!(%peer, %volume, ?end, "a stream of a peer ended early");
            }
            return;
        }
        Ok(None) => format!("not here: {STREAMS_MAX} streams are open, which is the most"),
        Err(why) => why.to_owned(),
    };
    let (mut reader, mut writer) = tokio::io::split(stream);
    refuse(&mut reader, &mut writer, &why).await;
}

/// Returns words once the stream may not go on.
async fn stopped(
    shared: &Shared,
    peer: ClusterId,
    begin: &Begin,
    is_trusted: impl Fn() -> bool,
    mut replaced: oneshot::Receiver<()>,
) -> String {
    let mut assignments = shared.assignment.subscribe();
    loop {
        if !is_trusted() {
            return "the mirror that sends is not trusted any more".to_owned();
        }
        if let Err(why) = check(&assignments.borrow_and_update().takes, peer, begin) {
            return why.to_owned();
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            changed = assignments.changed() => if changed.is_err() {
                return "this mirror ends".to_owned();
            },
            _ = &mut replaced => return "a later stream of the same transfer came".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_stream_ends_the_one_of_the_same_transfer_and_there_are_so_many_at_most() {
        let open = Open::default();
        let of = |volume| (VolumeId(volume), 7);
        let (first, mut replaced) = open.place(of(1)).unwrap();
        assert!(replaced.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        let (_second, mut stays) = open.place(of(1)).unwrap();
        assert!(replaced.try_recv() == Err(oneshot::error::TryRecvError::Closed));
        drop(first);
        assert!(stays.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        let places: Vec<_> =
            (2..=STREAMS_MAX as u128).map(|volume| open.place(of(volume))).collect();
        assert!(places.iter().all(Option::is_some) && open.place(of(1)).is_none());
        // Other members of the group end none of it.
        assert!(stays.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        drop(places);
        assert!(open.place(of(2)).is_some());
    }
}
