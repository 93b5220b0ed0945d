//! Reads of the disk that the shard does not wait for.
//!
//! Where the system lets the pool have a ring ([`ReadRing`]), the shard begins them and takes their
//! results itself. Else threads make them. A thread begins with the first read that finds none at
//! rest, up to as many as there are reads at the same time; it stays then. A pool whose kernel has all
//! in its cache has none of them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use quoin_reactor::Waker;
use quoin_store::disk::Reader;
use quoin_store::disk::fetch::{Fetch, UNDER_WAY_MAX};
use quoin_store::disk::read_ring::{EndedRead, ReadRing};

use crate::shard::Input;

/// These threads do nothing but read.
const STACK_BYTES: usize = 128 << 10;

pub enum Fetchers {
    Ring(Box<ReadRing>),
    Threads(Threads),
}

impl Fetchers {
    /// Begins a read, with the next [`Fetchers::submit`] at the latest. Its result comes as
    /// [`Input::Fetched`], or from [`Fetchers::next_ended`] where there is a ring.
    pub fn begin(&mut self, fetch: Fetch) {
        match self {
            Self::Ring(ring) => ring.begin(fetch),
            Self::Threads(threads) => threads.begin(fetch),
        }
    }

    pub fn submit(&mut self) {
        if let Self::Ring(ring) = self {
            ring.submit();
        }
    }

    pub fn next_ended(&mut self) -> Option<EndedRead> {
        match self {
            Self::Ring(ring) => ring.next_ended(),
            Self::Threads(_) => None,
        }
    }

    /// How soon reads are to be submitted again that the kernel did not take.
    pub fn retry_in(&self) -> Option<Duration> {
        match self {
            Self::Ring(ring) => ring.retry_in(),
            Self::Threads(_) => None,
        }
    }

    /// Descriptor that is readable when [`Fetchers::next_ended`] has something to give.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Ring(ring) => Some(ring.as_fd()),
            Self::Threads(_) => None,
        }
    }
}

pub struct Threads {
    /// `None`: the disk never lacks anything.
    work: Option<Work>,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

/// Means of a thread.
#[derive(Clone)]
struct Work {
    reader: Reader,
    inputs: Sender<Input>,
    waker: Waker,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    wanted: Condvar,
}

#[derive(Default)]
struct State {
    reads: VecDeque<Fetch>,
    /// Threads that wait for one.
    at_rest: usize,
    ended: bool,
}

impl Threads {
    pub fn new(reader: Option<Reader>, inputs: Sender<Input>, waker: Waker) -> Self {
        let work = reader.map(|reader| Work { reader, inputs, waker });
        Threads { work, queue: Arc::default(), threads: Vec::new() }
    }

    fn begin(&mut self, fetch: Fetch) {
        let Some(work) = &self.work else { return };
        let mut state = self.queue.state();
        state.reads.push_back(fetch);
        if state.at_rest >= state.reads.len() {
            drop(state);
            return self.queue.wanted.notify_one();
        }
        drop(state);
        if self.threads.len() >= UNDER_WAY_MAX {
            return;
        }
        let (queue, own) = (self.queue.clone(), work.clone());
        let thread = std::thread::Builder::new().name("fetch".into()).stack_size(STACK_BYTES);
        match thread.spawn(move || run(&queue, &own)) {
            Ok(thread) => self.threads.push(thread),
            // One of the others takes it, or this thread where there is none.
            Err(_) if !self.threads.is_empty() => {}
            Err(error) => {
                tracing::error!(%error, "no thread for reads: the pool waits for its disk");
                while let Some(fetch) = self.queue.state().reads.pop_front() {
                    work.read(fetch);
                }
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        {
            let mut state = self.queue.state();
            state.ended = true;
            state.reads.clear();
        }
        self.queue.wanted.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next read; `None` at the end.
    fn next(&self) -> Option<Fetch> {
        let mut state = self.state();
        loop {
            if state.ended {
                return None;
            }
            if let Some(fetch) = state.reads.pop_front() {
                return Some(fetch);
            }
            state.at_rest += 1;
            state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.at_rest -= 1;
        }
    }
}

impl Work {
    fn read(&self, fetch: Fetch) {
        let began = Instant::now();
        let result = (self.reader)(&fetch);
        // The shard may have ended.
        let _ = self.inputs.send(Input::Fetched { id: fetch.id, result, took: began.elapsed() });
        self.waker.wake();
    }
}

fn run(queue: &Queue, work: &Work) {
    while let Some(fetch) = queue.next() {
        work.read(fetch);
    }
}
