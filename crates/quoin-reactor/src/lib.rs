//! An epoll loop for one thread: readiness, timers, and a waker for other threads.
//!
//! Readiness is level-triggered: a socket that was not drained is reported again, so a shard may
//! give each one a bounded turn. There is no periodic tick: without a timer, an idle loop sleeps
//! indefinitely. A busy one polls for a moment before it sleeps ([`crate::spin`]).
//!
//! [`descriptors`] handles the limit of open files, which every loop that accepts connections can
//! reach.

pub mod descriptors;
pub mod spin;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quoin_types::Time;
use quoin_types::key_map::KeyMap;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use crate::spin::Spin;

/// Number of a registered descriptor; chosen by the owner, returned with its readiness.
pub type Key = u64;
/// Limit of descriptors reported by one wait; the others come with the next.
const EVENTS_MAX: usize = 128;
/// Reserved for the waker.
const WAKER: Key = Key::MAX;

/// CLOCK_BOOTTIME: the clock of leases, which counts suspend.
pub fn now() -> Time {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Time(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interest {
    pub read: bool,
    pub write: bool,
}

impl Interest {
    pub const READ: Interest = Interest { read: true, write: false };

    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::empty();
        if self.read {
            flags |= EventFlags::IN | EventFlags::RDHUP;
        }
        if self.write {
            flags |= EventFlags::OUT;
        }
        flags
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready {
    pub key: Key,
    pub readable: bool,
    pub writable: bool,
    /// The connection was closed or failed: a read returns the reason.
    pub broken: bool,
}

/// Wakes a [`Reactor`] from any thread; several wakes before it runs are one.
#[derive(Clone)]
pub struct Waker(Arc<WakerInner>);

struct WakerInner {
    event: OwnedFd,
    pending: AtomicBool,
}

impl Waker {
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            // Fails only when the counter would overflow, and then the loop is awake anyway.
            let _ = rustix::io::write(&self.0.event, &1u64.to_ne_bytes());
        }
    }
}

pub struct Reactor {
    epoll: OwnedFd,
    waker: Waker,
    spin: Spin,
    polls: bool,
}

impl Reactor {
    pub fn new() -> std::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &event, EventData::new_u64(WAKER), EventFlags::IN)?;
        let waker = Waker(Arc::new(WakerInner { event, pending: AtomicBool::new(false) }));
        Ok(Reactor { epoll, waker, spin: Spin::default(), polls: true })
    }

    /// Chooses whether waits poll for a moment before they sleep. Polling wins the time of a wake for each
    /// request; where many are under way it wins nothing, since what comes meanwhile is taken together, and
    /// costs a core that the others who work on them want.
    pub fn set_polls(&mut self, polls: bool) {
        self.polls = polls;
    }

    pub fn polls(&self) -> bool {
        self.polls
    }

    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Registers a descriptor; `key` must not be `u64::MAX`.
    pub fn register(&self, fd: impl AsFd, key: Key, interest: Interest) -> std::io::Result<()> {
        debug_assert_ne!(key, WAKER);
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(key), interest.flags())?)
    }

    pub fn modify(&self, fd: impl AsFd, key: Key, interest: Interest) -> std::io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(key), interest.flags())?)
    }

    pub fn deregister(&self, fd: impl AsFd) {
        // Closing the descriptor removes it as well, so an error has no effect.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until a descriptor is ready, `timeout` has passed (`None`: no limit), or a wake came.
    /// Returns true if it was woken.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        ready: &mut Vec<Ready>,
    ) -> std::io::Result<bool> {
        ready.clear();
        let mut wait = self.spin.begin(timeout);
        let mut events = [const { MaybeUninit::uninit() }; EVENTS_MAX];
        let waited = loop {
            let should_poll = self.polls && wait.should_poll();
            let limit = if should_poll { Some(Duration::ZERO) } else { timeout };
            let waited = epoll::wait(&self.epoll, &mut events[..], limit.map(timespec).as_ref());
            match waited {
                Ok((events, _)) if should_poll && events.is_empty() => {}
                waited => break waited,
            }
        };
        wait.end();
        let events = match waited {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
        let mut woken = false;
        for event in events.iter() {
            let flags = event.flags;
            if event.data.u64() == WAKER {
                woken = true;
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&self.waker.0.event, &mut count);
                // The flag is cleared after the read: a later wake writes again, and an earlier one
                // is seen by the caller, which checks its queues after this returns. A plain store
                // could become visible after that check, and a wake between both would be lost.
                self.waker.0.pending.swap(false, Ordering::AcqRel);
                continue;
            }
            let broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
            ready.push(Ready {
                key: event.data.u64(),
                readable: broken || flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                writable: broken || flags.contains(EventFlags::OUT),
                broken,
            });
        }
        Ok(woken)
    }
}

/// One timer for each key, replaced by setting it again.
#[derive(Default)]
pub struct Timers {
    due: KeyMap<Time>,
    heap: BinaryHeap<Reverse<(Time, Key)>>,
}

impl Timers {
    pub fn set(&mut self, key: Key, at: Option<Time>) {
        match at {
            Some(at) => {
                if self.due.insert(key, at) != Some(at) {
                    self.heap.push(Reverse((at, key)));
                }
            }
            None => {
                self.due.remove(&key);
            }
        }
        // Replaced timers stay in the heap until they come up; keep them few.
        if self.heap.len() > 64 + 4 * self.due.len() {
            self.heap = self.due.iter().map(|(key, at)| Reverse((*at, *key))).collect();
        }
    }

    /// Removes and returns the next key whose time has come.
    pub fn pop(&mut self, now: Time) -> Option<Key> {
        while let Some(Reverse((at, key))) = self.heap.peek().copied() {
            let live = self.due.get(&key) == Some(&at);
            if live && at > now {
                return None;
            }
            self.heap.pop();
            if live {
                self.due.remove(&key);
                return Some(key);
            }
        }
        None
    }

    /// Time until the next timer; `None` if there is none.
    pub fn until_next(&mut self, now: Time) -> Option<Duration> {
        while let Some(Reverse((at, key))) = self.heap.peek().copied() {
            if self.due.get(&key) == Some(&at) {
                return Some(at.since(now));
            }
            self.heap.pop();
        }
        None
    }
}

/// Converts a duration for `poll` and `epoll_wait`.
pub fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn readiness_is_reported_with_the_key_of_its_descriptor() {
        let mut reactor = Reactor::new().unwrap();
        let (a, mut b) = UnixStream::pair().unwrap();
        reactor.register(&a, 7, Interest::READ).unwrap();
        let mut ready = Vec::new();
        assert!(!reactor.wait(Some(Duration::ZERO), &mut ready).unwrap());
        assert!(ready.is_empty());
        b.write_all(b"x").unwrap();
        reactor.wait(None, &mut ready).unwrap();
        assert_eq!((ready[0].key, ready[0].readable, ready[0].broken), (7, true, false));
        drop(b);
        reactor.wait(None, &mut ready).unwrap();
        assert!(ready[0].broken);
    }

    #[test]
    fn a_descriptor_is_ready_only_for_the_registered_interest() {
        let mut reactor = Reactor::new().unwrap();
        let (a, mut b) = UnixStream::pair().unwrap();
        b.write_all(b"x").unwrap();
        let mut ready = Vec::new();
        reactor.register(&a, 7, Interest { read: false, write: false }).unwrap();
        for (read, write) in [(false, true), (true, false), (true, true)] {
            reactor.modify(&a, 7, Interest { read, write }).unwrap();
            reactor.wait(Some(Duration::from_secs(20)), &mut ready).unwrap();
            let found: Vec<_> = ready.iter().map(|r| (r.readable, r.writable, r.broken)).collect();
            assert_eq!(found, [(read, write, false)]);
        }
        reactor.modify(&a, 7, Interest { read: false, write: false }).unwrap();
        reactor.wait(Some(Duration::ZERO), &mut ready).unwrap();
        assert!(ready.is_empty());
    }

    #[test]
    fn a_wake_from_another_thread_ends_the_wait_and_later_wakes_count_again() {
        let mut reactor = Reactor::new().unwrap();
        let mut ready = Vec::new();
        for _ in 0..3 {
            let waker = reactor.waker();
            let thread = std::thread::spawn(move || {
                waker.wake();
                waker.wake();
            });
            assert!(reactor.wait(None, &mut ready).unwrap());
            thread.join().unwrap();
            // The second wake may have come after the first was consumed.
            reactor.wait(Some(Duration::ZERO), &mut ready).unwrap();
        }
    }

    #[test]
    fn a_timer_that_is_set_again_fires_once_at_its_last_time() {
        let mut timers = Timers::default();
        timers.set(1, Some(Time(10)));
        timers.set(1, Some(Time(30)));
        timers.set(2, Some(Time(20)));
        timers.set(3, Some(Time(15)));
        timers.set(3, None);
        assert_eq!(timers.until_next(Time(0)), Some(Duration::from_nanos(20)));
        assert_eq!(timers.pop(Time(19)), None);
        assert_eq!(timers.pop(Time(40)), Some(2));
        assert_eq!(timers.pop(Time(40)), Some(1));
        assert_eq!(timers.pop(Time(40)), None);
        assert_eq!(timers.until_next(Time(40)), None);
    }

    #[test]
    fn timers_that_are_set_repeatedly_take_no_more_memory() {
        let mut timers = Timers::default();
        for at in 1..10_000 {
            timers.set(at % 10, Some(Time(at)));
        }
        assert!(timers.heap.len() <= 64 + 4 * 10, "{}", timers.heap.len());
        for _ in 0..10 {
            assert!(timers.pop(Time(10_000)).is_some());
        }
        assert_eq!(timers.pop(Time(10_000)), None);
        // A small number of replaced timers remains, which costs nothing.
        for at in 1..50 {
            timers.set(1, Some(Time(at)));
        }
        assert_eq!(timers.heap.len(), 49);
    }
}
