//! Requests for epochs, one after another for each volume.
//!
//! A volume that is closed and opened at once asks twice. The later opening serves, so its epoch has to be the
//! higher one: the controller counts reports under the last epoch alone.

use std::collections::BTreeMap;

use quoin_types::VolumeId;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

/// The last request of each volume that is under way.
#[derive(Default)]
pub(crate) struct EpochRequests(BTreeMap<VolumeId, oneshot::Receiver<()>>);

/// Place of a request behind the one before it. Dropped, it lets the next one come.
pub(crate) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _done: oneshot::Sender<()>,
}

impl EpochRequests {
    pub fn turn(&mut self, volume: VolumeId) -> Turn {
        self.0.retain(|_, done| matches!(done.try_recv(), Err(TryRecvError::Empty)));
        let (done, after) = oneshot::channel();
        Turn { before: self.0.insert(volume, after), _done: done }
    }
}

impl Turn {
    pub async fn comes(&mut self) {
        if let Some(before) = &mut self.before {
            // Nothing is ever sent: its end is the end of the request.
            let _ = before.await;
        }
        self.before = None;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const VOLUME: VolumeId = VolumeId(5);

    fn is_ready(future: impl Future<Output = ()>) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    #[test]
    fn an_epoch_is_asked_for_once_the_request_before_it_has_ended() {
        let mut requests = EpochRequests::default();
        let mut first = requests.turn(VOLUME);
        let mut second = requests.turn(VOLUME);
        let mut third = requests.turn(VOLUME);
        assert!(is_ready(first.comes()));
        {
            let mut waiting = pin!(second.comes());
            let mut context = Context::from_waker(Waker::noop());
            assert!(waiting.as_mut().poll(&mut context).is_pending());
            assert!(is_ready(requests.turn(VolumeId(6)).comes()), "of another volume");
            drop(first);
            assert!(waiting.as_mut().poll(&mut context).is_ready());
        }
        assert!(!is_ready(third.comes()), "the second one has not ended");
        drop((second, third));
        assert!(is_ready(requests.turn(VOLUME).comes()));
        assert_eq!(requests.0.len(), 1, "what ended is forgotten");
    }
}
