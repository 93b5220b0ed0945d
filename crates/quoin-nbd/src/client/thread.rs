//! A link with a thread of its own, for callers without an event loop.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use quoin_types::block::{Operation, Payload};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::link::Link;
use super::pipe::Done;
use super::{ClientError, ClientOptions, ExportInfo, RequestError};

/// Called on the client's thread: it must not block.
pub type Completion = Box<dyn FnOnce(Result<Payload, RequestError>) + Send>;

/// A connection for use by many threads. Callers bound their requests in flight.
pub struct Client {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: OwnedFd,
    info: ExportInfo,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<(Operation, Completion)>,
    stopped: bool,
    /// Set until the thread takes the requests that it was woken for.
    woken: bool,
}

impl Client {
    /// Connects once, then starts the thread.
    pub fn connect(options: ClientOptions) -> Result<Self, ClientError> {
        let link = Link::connect(options)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| ClientError::Thread(error.into()))?;
        let shared = Arc::new(Shared { queue: Mutex::default(), wake, info: link.info() });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("nbd-client".into())
            .spawn(move || run(link, &theirs))
            .map_err(ClientError::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The export as it was at the first connection.
    pub fn info(&self) -> ExportInfo {
        self.shared.info
    }

    pub fn submit(&self, operation: Operation, completion: Completion) {
        let mut queue = self.shared.lock();
        if queue.stopped {
            drop(queue);
            return completion(Err(RequestError::Stopped));
        }
        queue.waiting.push((operation, completion));
        let woken = std::mem::replace(&mut queue.woken, true);
        drop(queue);
        if !woken {
            self.shared.wake();
        }
    }

    /// Submits an operation and waits for its result.
    pub fn call(&self, operation: Operation) -> Result<Payload, RequestError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(
            operation,
            Box::new(move |result| {
                // The receiver below waits for exactly this.
                let _ = sender.send(result);
            }),
        );
        receiver.recv().unwrap_or(Err(RequestError::Stopped))
    }

    pub fn read(&self, offset: u64, length: u32) -> Result<Bytes, RequestError> {
        match self.call(Operation::Read { offset, length })? {
            Payload::Data(chunks) => Ok(match <[Bytes; 1]>::try_from(chunks) {
                Ok([only]) => only,
                Err(chunks) => chunks.concat().into(),
            }),
            Payload::None | Payload::Status(_) => Ok(Bytes::new()),
        }
    }

    pub fn write(&self, offset: u64, data: Bytes, fua: bool) -> Result<(), RequestError> {
        self.call(Operation::Write { offset, data, fua }).map(|_| ())
    }

    pub fn flush(&self) -> Result<(), RequestError> {
        self.call(Operation::Flush).map(|_| ())
    }

    /// Ends the connection; unanswered requests fail with [`RequestError::Stopped`].
    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A completion that panicked has already been reported.
            let _ = thread.join();
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.halt();
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Full means that the thread has been woken already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

fn run(mut link: Link, shared: &Shared) {
    let mut completions: HashMap<u64, Completion> = HashMap::new();
    let mut token = 0;
    let mut done = Vec::new();
    loop {
        let (waiting, stopped) = {
            let mut queue = shared.lock();
            queue.woken = false;
            (std::mem::take(&mut queue.waiting), queue.stopped)
        };
        for (operation, completion) in waiting {
            token += 1;
            completions.insert(token, completion);
            link.submit(token, operation);
        }
        if stopped {
            return complete(&mut link.stop(), &mut completions);
        }
        link.drive(Instant::now(), &mut done);
        complete(&mut done, &mut completions);
        wait(&link, shared);
    }
}

fn complete(done: &mut Vec<Done>, completions: &mut HashMap<u64, Completion>) {
    for one in done.drain(..) {
        if let Some(completion) = completions.remove(&one.token) {
            completion(one.result);
        }
    }
}

fn wait(link: &Link, shared: &Shared) {
    let timeout = link.deadline().map(|at| {
        let left = at.saturating_duration_since(Instant::now());
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
    });
    let wake = shared.wake.as_fd();
    let mut fds = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
    if let Some(fd) = link.fd() {
        let write = if link.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
        fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN | write));
    }
    // An interrupted wait is one more turn of the loop.
    if poll(&mut fds, timeout.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::IN) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&shared.wake, &mut count);
    }
}
