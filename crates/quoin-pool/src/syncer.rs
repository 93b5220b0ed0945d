//! The disk thread: one sync at a time, each serving all that asked before it began.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use quoin_reactor::Waker;
use quoin_reactor::spin::Spin;
use quoin_replication::replica::store::{IoFault, SyncTicket};
use quoin_store::disk::{Reader, Syncer as SyncDisk};

use crate::fetcher::Threads;
use crate::shard::Input;

pub struct Syncer {
    requests: Sender<SyncTicket>,
    thread: Option<JoinHandle<()>>,
    /// Where results go.
    inputs: Sender<Input>,
    waker: Waker,
}

impl Syncer {
    pub fn start(disk: SyncDisk, inputs: Sender<Input>, waker: Waker) -> std::io::Result<Self> {
        let (requests, taken) = channel();
        let (results, woken) = (inputs.clone(), waker.clone());
        let thread = std::thread::Builder::new()
            .name("disk".into())
            .spawn(move || run(disk, &taken, &results, &woken))?;
        Ok(Syncer { requests, thread: Some(thread), inputs, waker })
    }

    /// Threads that read, whose results go where those of syncs go.
    pub fn readers(&self, reader: Option<Reader>) -> Threads {
        Threads::new(reader, self.inputs.clone(), self.waker.clone())
    }

    /// Begins a sync; its result comes as [`Input::Synced`].
    pub fn begin(&self, ticket: SyncTicket) {
        // The thread ends only after this end was dropped.
        let _ = self.requests.send(ticket);
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        let (closed, _) = channel();
        self.requests = closed;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(mut disk: SyncDisk, requests: &Receiver<SyncTicket>, inputs: &Sender<Input>, waker: &Waker) {
    let mut spin = Spin::default();
    while let Some(ticket) = next(requests, &mut spin) {
        let result: Result<(), IoFault> = disk();
        if inputs.send(Input::Synced { ticket, result }).is_err() {
            return;
        }
        waker.wake();
    }
}

/// While writes wait for syncs, the next one is asked for as soon as the last one is told of.
fn next(requests: &Receiver<SyncTicket>, spin: &mut Spin) -> Option<SyncTicket> {
    let mut wait = spin.begin(None);
    let mut request = Err(TryRecvError::Empty);
    while request == Err(TryRecvError::Empty) && wait.should_poll() {
        request = requests.try_recv();
    }
    let request = match request {
        Err(TryRecvError::Empty) => requests.recv().ok(),
        request => request.ok(),
    };
    wait.end();
    request
}
