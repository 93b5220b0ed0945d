//! Reads that the thread of a pool does not wait for.
//!
//! A call that need not be answered at once is made between [`Fetches::begin`] and [`Fetches::end`].
//! What it needs and the disk does not have at hand is listed here, and the call ends with a ticket.
//! Other threads read what is listed ([`Fetches::next_fetch`], [`Fetches::arrived`]). Once all that a call
//! lacked is there its ticket is ready, and the call is made again: it looks up anew where its data
//! are, and finds here what was read of them.
//!
//! **Nothing is answered with another generation's bytes.** A place of the disk is written anew
//! once its unit was freed and is used again, or where a good copy replaces a bad one. Each such
//! range is announced ([`Fetches::forget`]): what was read of it is dropped, and what is being read
//! of it is dropped when it comes. So what is found here is what the place holds now.
//!
//! **Turns.** Clients' reads of each replica, what is copied from it, the background work on it and the
//! scrub are an owner each. Owners take turns, one read each, so one that wants thousands does not keep
//! another waiting.
//!
//! **Limits.** At most [`UNDER_WAY_MAX`] reads are under way. Those listed or under way are of 32 MiB
//! in all, and what was read and not taken yet is 16 MiB; what came first is dropped then, and is
//! read again if it is still needed. A call that finds no room waits for it.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use quoin_replication::replica::store::{FetchTicket, IoFault};
use quoin_types::key_map::KeyMap;
use quoin_types::{BLOCK_SIZE, ReplicaGuid, mutant};

/// Reads that are made at the same time.
pub const UNDER_WAY_MAX: usize = 32;
/// Bytes of reads that are listed or under way; a longer one is alone.
const OPEN_BYTES_MAX: usize = 32 << 20;
/// Bytes that were read and not taken yet.
const ARRIVED_BYTES_MAX: usize = 16 << 20;
/// Calls that are made again when one read leaves room.
const WOKEN_FOR_ROOM: usize = 8;
/// `errno` of a medium that cannot be read.
const EIO: i32 = 5;

/// Party whose calls wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    Sessions(ReplicaGuid),
    /// Rebuilds and catching up, which its sessions ask for too.
    Copying(ReplicaGuid),
    Background(ReplicaGuid),
    /// The scrub, which reads a replica at a time, and what belongs to none.
    Scrub(ReplicaGuid),
}

/// One read of the disk, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    pub id: u64,
    pub offset: u64,
    pub length: usize,
    /// It is not read again soon: as [`Disk::read_once`](crate::Disk::read_once).
    pub is_once: bool,
}

/// Blocks that are read together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Stretch {
    pub first: u64,
    pub blocks: u32,
}

impl Stretch {
    pub fn bytes(&self) -> usize {
        self.blocks as usize * BLOCK_SIZE
    }
}

enum State {
    Listed,
    UnderWay,
    Arrived(Result<Bytes, IoFault>),
}

struct Entry {
    id: u64,
    /// Party that wanted it first.
    owner: Owner,
    is_once: bool,
    state: State,
    /// Calls that lack it.
    calls: Vec<FetchTicket>,
    /// Calls that lacked it and did not take it yet.
    readers: usize,
}

/// A call that waits.
struct Waiting {
    owner: Owner,
    /// Reads that it lacks still.
    left: usize,
}

/// A call that is being made.
struct Call {
    owner: Owner,
    lacks: Vec<Stretch>,
    /// What it found and its caller keeps, whatever the call comes to.
    kept: Vec<Stretch>,
    /// What it found and needs again if it lacks something.
    needed: Vec<Stretch>,
    found_no_room: bool,
}

/// State of a stretch, for the call that is being made.
pub enum Looked {
    Arrived(Result<Bytes, IoFault>),
    /// It is listed or under way; the call waits for it.
    Awaited,
    Unknown,
}

#[derive(Default)]
pub struct Fetches {
    entries: BTreeMap<Stretch, Entry>,
    /// Listed reads by owner, the owner first whose turn it is.
    turns: VecDeque<(Owner, VecDeque<Stretch>)>,
    /// Reads under way by their numbers.
    under_way: KeyMap<Stretch>,
    /// What was read, oldest first.
    arrived: VecDeque<(Stretch, u64)>,
    waiting: KeyMap<Waiting>,
    for_room: VecDeque<FetchTicket>,
    ready: VecDeque<(Owner, FetchTicket)>,
    /// Bytes that are listed or under way, and bytes that have arrived.
    open_bytes: usize,
    arrived_bytes: usize,
    /// The longest stretch so far, in blocks.
    longest: u32,
    last_id: u64,
    call: Option<Call>,
}

impl Fetches {
    /// A call begins that may wait.
    pub fn begin(&mut self, owner: Owner) {
        let (lacks, kept, needed) = (Vec::new(), Vec::new(), Vec::new());
        self.call = Some(Call { owner, lacks, kept, needed, found_no_room: false });
    }

    /// Whether such a call is being made.
    pub fn is_open(&self) -> bool {
        self.call.is_some()
    }

    /// The call ended. With a ticket it lacked something, whatever it answered.
    pub fn end(&mut self) -> Option<FetchTicket> {
        let call = self.call.take()?;
        let is_whole = call.lacks.is_empty() && !call.found_no_room;
        let needed = call.needed.iter().filter(|_| is_whole);
        for stretch in call.kept.iter().chain(needed) {
            self.taken(*stretch);
        }
        if is_whole {
            return None;
        }
        let (ticket, mut left) = (FetchTicket(self.next_id()), 0);
        for stretch in &call.lacks {
            if let Some(entry) = self.entries.get_mut(stretch) {
                entry.calls.push(ticket);
                entry.readers += 1;
                left += 1;
            }
        }
        self.waiting.insert(ticket.0, Waiting { owner: call.owner, left });
        match left {
            0 if self.open_bytes > 0 => self.for_room.push_back(ticket),
            0 => self.make_ready(ticket),
            _ => {}
        }
        Some(ticket)
    }

    /// What is known of a stretch that the present call needs. `is_kept`: the caller keeps it, also
    /// if the call lacks something.
    pub fn look(&mut self, stretch: Stretch, is_kept: bool) -> Looked {
        let (Some(call), Some(entry)) = (&mut self.call, self.entries.get(&stretch)) else {
            return Looked::Unknown;
        };
        match &entry.state {
            State::Arrived(result) => {
                if !is_kept {
                    call.needed.push(stretch);
                } else if !call.kept.contains(&stretch) {
                    // Several nodes may lie in it.
                    call.kept.push(stretch);
                }
                Looked::Arrived(result.clone())
            }
            State::Listed | State::UnderWay => {
                if !call.lacks.contains(&stretch) {
                    call.lacks.push(stretch);
                }
                Looked::Awaited
            }
        }
    }

    /// The present call lacks a stretch of which nothing is known. `is_once`: it is not read again soon.
    pub fn want(&mut self, stretch: Stretch, is_once: bool) {
        let Some(call) = &mut self.call else { return };
        if self.open_bytes > 0 && self.open_bytes + stretch.bytes() > OPEN_BYTES_MAX {
            call.found_no_room = true;
            return;
        }
        call.lacks.push(stretch);
        let owner = call.owner;
        let id = self.next_id();
        let entry =
            Entry { id, owner, is_once, state: State::Listed, calls: Vec::new(), readers: 0 };
        self.entries.insert(stretch, entry);
        self.open_bytes += stretch.bytes();
        self.longest = self.longest.max(stretch.blocks);
        self.list(owner, stretch);
    }

    /// The read to begin now, if there is one.
    pub fn next_fetch(&mut self) -> Option<Fetch> {
        if self.under_way.len() >= UNDER_WAY_MAX {
            return None;
        }
        let (owner, mut listed) = self.turns.pop_front()?;
        let stretch = listed.pop_front()?;
        if !listed.is_empty() {
            self.turns.push_back((owner, listed));
        }
        let entry = self.entries.get_mut(&stretch)?;
        entry.state = State::UnderWay;
        let (id, is_once) = (entry.id, entry.is_once);
        self.under_way.insert(id, stretch);
        let (offset, length) = (stretch.first * BLOCK_SIZE as u64, stretch.bytes());
        Some(Fetch { id, offset, length, is_once })
    }

    /// Takes the result of a read.
    pub fn arrived(&mut self, id: u64, result: Result<Bytes, IoFault>) {
        let Some(stretch) = self.under_way.remove(&id) else { return };
        self.open_bytes -= stretch.bytes();
        let offset = stretch.first * BLOCK_SIZE as u64;
        let short = IoFault { operation: "read", offset, errno: EIO };
        let result = result
            .and_then(|bytes| if bytes.len() == stretch.bytes() { Ok(bytes) } else { Err(short) });
        // Forgotten meanwhile, it may be listed anew.
        if let Some(entry) = self.entries.get_mut(&stretch).filter(|entry| entry.id == id) {
            entry.state = State::Arrived(result);
            let calls = std::mem::take(&mut entry.calls);
            self.arrived.push_back((stretch, id));
            self.arrived_bytes += stretch.bytes();
            self.lack_less(&calls);
            self.drop_oldest();
        }
        self.wake_for_room();
    }

    /// The owner and ticket of a call that can be made again now.
    pub fn take_ready(&mut self) -> Option<(Owner, FetchTicket)> {
        self.ready.pop_front()
    }

    /// Whether this call lacks something still.
    pub fn waits(&self, ticket: FetchTicket) -> bool {
        self.waiting.contains_key(&ticket.0)
    }

    /// These blocks are written anew: what was read of them before is not what they hold.
    pub fn forget(&mut self, first: u64, blocks: u64) {
        if self.entries.is_empty() || mutant::is("prefetch-of-another-generation") {
            return;
        }
        let end = first.saturating_add(blocks);
        let from = Stretch { first: first.saturating_sub(self.longest.into()), blocks: 0 };
        let over = self.entries.range(from..Stretch { first: end, blocks: 0 });
        let over = over.filter(|(stretch, entry)| {
            // One that is only listed is read later.
            stretch.first + u64::from(stretch.blocks) > first
                && !matches!(entry.state, State::Listed)
        });
        for stretch in over.map(|(stretch, _)| *stretch).collect::<Vec<_>>() {
            if let Some(entry) = self.remove(stretch) {
                // They look where their data are now.
                self.lack_less(&entry.calls);
            }
        }
    }

    /// Drops what was read for this owner and no call waits for: a call that is not made again
    /// leaves it, and a later comparison with the media would find what they held before.
    pub fn forget_untaken(&mut self, owner: Owner) {
        let untaken = self.entries.iter().filter(|(_, entry)| {
            let is_read = !matches!(entry.state, State::Listed);
            is_read && entry.owner == owner && entry.calls.is_empty()
        });
        for stretch in untaken.map(|(stretch, _)| *stretch).collect::<Vec<_>>() {
            self.remove(stretch);
        }
    }

    /// The owner makes none of its calls again.
    pub fn drop_calls(&mut self, owner: Owner) {
        self.waiting.retain(|_, waiting| waiting.owner != owner);
        self.ready.retain(|(of, _)| *of != owner);
        for entry in self.entries.values_mut() {
            entry.calls.retain(|ticket| self.waiting.contains_key(&ticket.0));
        }
        self.forget_untaken(owner);
        let waiting = &self.waiting;
        self.for_room.retain(|ticket| waiting.contains_key(&ticket.0));
        let Some(at) = self.turns.iter().position(|(of, _)| *of == owner) else { return };
        let Some((_, listed)) = self.turns.remove(at) else { return };
        for stretch in listed {
            let Some(entry) = self.entries.get_mut(&stretch) else { continue };
            entry.calls.retain(|ticket| self.waiting.contains_key(&ticket.0));
            entry.readers = entry.calls.len();
            let other = entry.calls.first().and_then(|ticket| self.waiting.get(&ticket.0));
            match other.map(|waiting| waiting.owner) {
                Some(other) => self.list(other, stretch),
                None => {
                    self.open_bytes -= stretch.bytes();
                    self.entries.remove(&stretch);
                }
            }
        }
        self.wake_for_room();
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn list(&mut self, owner: Owner, stretch: Stretch) {
        match self.turns.iter_mut().find(|(of, _)| *of == owner) {
            Some((_, listed)) => listed.push_back(stretch),
            None => self.turns.push_back((owner, VecDeque::from([stretch]))),
        }
    }

    /// A call has taken what it needed of a stretch.
    fn taken(&mut self, stretch: Stretch) {
        let Some(entry) = self.entries.get_mut(&stretch) else { return };
        entry.readers = entry.readers.saturating_sub(1);
        if entry.readers == 0 {
            self.remove(stretch);
        }
    }

    /// Removes an entry that is not listed any more.
    fn remove(&mut self, stretch: Stretch) -> Option<Entry> {
        let entry = self.entries.remove(&stretch)?;
        if let State::Arrived(_) = entry.state {
            self.arrived_bytes -= stretch.bytes();
            self.arrived.retain(|(_, id)| *id != entry.id);
        }
        Some(entry)
    }

    fn drop_oldest(&mut self) {
        while self.arrived_bytes > ARRIVED_BYTES_MAX
            && self.arrived.len() > 1
            && let Some((oldest, _)) = self.arrived.pop_front()
        {
            self.entries.remove(&oldest);
            self.arrived_bytes -= oldest.bytes();
        }
    }

    /// These calls lack one thing less.
    fn lack_less(&mut self, calls: &[FetchTicket]) {
        for ticket in calls {
            let Some(waiting) = self.waiting.get_mut(&ticket.0) else { continue };
            waiting.left = waiting.left.saturating_sub(1);
            if waiting.left == 0 {
                self.make_ready(*ticket);
            }
        }
    }

    fn make_ready(&mut self, ticket: FetchTicket) {
        if let Some(waiting) = self.waiting.remove(&ticket.0) {
            self.ready.push_back((waiting.owner, ticket));
        }
    }

    /// Has some of those that wait for room look again; all of them where nothing is left that
    /// could wake them later.
    fn wake_for_room(&mut self) {
        let count = if self.open_bytes == 0 { usize::MAX } else { WOKEN_FOR_ROOM };
        for _ in 0..count {
            let Some(ticket) = self.for_room.pop_front() else { return };
            self.make_ready(ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Owner = Owner::Sessions(ReplicaGuid(1));
    const OTHER: Owner = Owner::Sessions(ReplicaGuid(2));

    fn stretch(first: u64, blocks: u32) -> Stretch {
        Stretch { first, blocks }
    }

    /// A call that needs these; the bytes of the first block of each, or its ticket.
    fn call(
        fetches: &mut Fetches,
        owner: Owner,
        needs: &[Stretch],
    ) -> Result<Vec<u8>, FetchTicket> {
        fetches.begin(owner);
        let mut found = Vec::new();
        for stretch in needs {
            match fetches.look(*stretch, false) {
                Looked::Arrived(bytes) => found.push(bytes.map_or(0, |bytes| bytes[0])),
                Looked::Awaited => {}
                Looked::Unknown => fetches.want(*stretch, false),
            }
        }
        fetches.end().map_or(Ok(found), Err)
    }

    fn read(fetches: &mut Fetches, fetch: Fetch, byte: u8) {
        fetches.arrived(fetch.id, Ok(Bytes::from(vec![byte; fetch.length])));
    }

    fn ready(fetches: &mut Fetches) -> Vec<FetchTicket> {
        std::iter::from_fn(|| fetches.take_ready()).map(|(_, ticket)| ticket).collect()
    }

    #[test]
    fn a_call_is_ready_once_all_that_it_lacked_is_there_and_finds_it() {
        let mut fetches = Fetches::default();
        let needs = [stretch(7, 1), stretch(20, 3)];
        let ticket = call(&mut fetches, ONE, &needs).expect_err("nothing is there");
        let (first, second) =
            (fetches.next_fetch().expect("one"), fetches.next_fetch().expect("two"));
        assert_eq!((second.offset, second.length), (20 * 4096, 3 * 4096));
        assert!(fetches.next_fetch().is_none() && fetches.waits(ticket));
        read(&mut fetches, second, 2);
        assert_eq!(ready(&mut fetches), []);
        read(&mut fetches, first, 1);
        assert_eq!(ready(&mut fetches), [ticket]);
        assert_eq!(call(&mut fetches, ONE, &needs), Ok(vec![1, 2]));
        assert_eq!((fetches.entries.len(), fetches.open_bytes, fetches.arrived_bytes), (0, 0, 0));
    }

    #[test]
    fn two_calls_that_lack_the_same_share_one_read_and_each_finds_it() {
        let mut fetches = Fetches::default();
        let needs = [stretch(7, 1)];
        let tickets =
            [ONE, OTHER].map(|owner| call(&mut fetches, owner, &needs).expect_err("it lacks it"));
        let fetch = fetches.next_fetch().expect("one");
        assert!(fetches.next_fetch().is_none());
        read(&mut fetches, fetch, 5);
        assert_eq!(ready(&mut fetches), tickets);
        for owner in [ONE, OTHER] {
            assert_eq!(call(&mut fetches, owner, &needs), Ok(vec![5]));
        }
        assert!(fetches.entries.is_empty());
    }

    #[test]
    fn what_was_read_before_a_place_is_written_anew_is_never_found() {
        for arrives_before in [true, false] {
            let mut fetches = Fetches::default();
            let needs = [stretch(100, 4)];
            let ticket = call(&mut fetches, ONE, &needs).expect_err("nothing is there");
            let old = fetches.next_fetch().expect("it is listed");
            if arrives_before {
                read(&mut fetches, old, 1);
            }
            fetches.forget(104, 50);
            fetches.forget(50, 50);
            assert_eq!(fetches.entries.len(), 1, "its neighbours are no part of it");
            fetches.forget(103, 1);
            assert_eq!(ready(&mut fetches), [ticket], "it looks again");
            let again = call(&mut fetches, ONE, &needs).expect_err("nothing is there any more");
            if !arrives_before {
                read(&mut fetches, old, 1);
                assert_eq!(ready(&mut fetches), []);
            }
            let new = fetches.next_fetch().expect("it is listed anew");
            read(&mut fetches, new, 2);
            assert_eq!(ready(&mut fetches), [again]);
            assert_eq!(call(&mut fetches, ONE, &needs), Ok(vec![2]));
            assert_eq!((fetches.open_bytes, fetches.arrived_bytes), (0, 0));
        }
    }

    #[test]
    fn owners_take_turns_and_no_more_is_under_way_than_the_limit() {
        let mut fetches = Fetches::default();
        for first in 0..100 {
            call(&mut fetches, ONE, &[stretch(first, 1)]).expect_err("it waits");
        }
        call(&mut fetches, OTHER, &[stretch(1000, 1)]).expect_err("it waits");
        let begun: Vec<Fetch> = std::iter::from_fn(|| fetches.next_fetch()).collect();
        assert_eq!(begun.len(), UNDER_WAY_MAX);
        assert_eq!(begun[1].offset, 1000 * 4096, "after one of the other's");
        read(&mut fetches, begun[5], 0);
        assert!(fetches.next_fetch().is_some() && fetches.next_fetch().is_none());
    }

    #[test]
    fn a_call_that_finds_no_room_is_made_again_when_there_is_some_and_memory_is_bounded() {
        let mut fetches = Fetches::default();
        let blocks = (4 << 20) / BLOCK_SIZE as u32;
        let needs = |n: u64| [stretch(n * 10_000, blocks)];
        let mut open: BTreeMap<FetchTicket, u64> = BTreeMap::new();
        for n in 0..40 {
            open.insert(call(&mut fetches, ONE, &needs(n)).expect_err("it waits"), n);
        }
        let mut calls = 0;
        while let Some(fetch) = fetches.next_fetch() {
            assert!(fetches.open_bytes <= OPEN_BYTES_MAX, "{}", fetches.open_bytes);
            read(&mut fetches, fetch, 1);
            assert!(fetches.arrived_bytes <= ARRIVED_BYTES_MAX, "{}", fetches.arrived_bytes);
            for ticket in ready(&mut fetches) {
                let n = open.remove(&ticket).expect("it is made again once");
                calls += 1;
                if let Err(ticket) = call(&mut fetches, ONE, &needs(n)) {
                    open.insert(ticket, n);
                }
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(calls < 400, "{calls} calls for 40 reads");
        assert_eq!((fetches.waiting.len(), fetches.open_bytes), (0, 0));
    }

    #[test]
    fn what_a_session_waited_for_is_not_read_after_its_end_unless_another_waits_for_it() {
        let mut fetches = Fetches::default();
        for first in 0..50 {
            call(&mut fetches, ONE, &[stretch(first, 1)]).expect_err("it waits");
        }
        let others = call(&mut fetches, OTHER, &[stretch(49, 1)]).expect_err("it waits");
        let begun = fetches.next_fetch().expect("it is listed");
        fetches.drop_calls(ONE);
        let shared = fetches.next_fetch().expect("one is left");
        assert_eq!(shared.offset, 49 * 4096);
        assert!(fetches.next_fetch().is_none());
        read(&mut fetches, begun, 0);
        assert_eq!(ready(&mut fetches), []);
        read(&mut fetches, shared, 3);
        assert_eq!(ready(&mut fetches), [others]);
        assert_eq!(call(&mut fetches, OTHER, &[stretch(49, 1)]), Ok(vec![3]));
        assert_eq!(fetches.open_bytes, 0);
    }

    #[test]
    fn a_read_that_the_disk_refused_or_cut_short_is_found_as_refused() {
        let mut fetches = Fetches::default();
        let needs = [stretch(7, 2)];
        for bytes in [Some(Bytes::from(vec![1; 4096])), None] {
            let ticket = call(&mut fetches, ONE, &needs).expect_err("it waits");
            let fetch = fetches.next_fetch().expect("it is listed");
            let fault = IoFault { operation: "read", offset: fetch.offset, errno: 61 };
            fetches.arrived(fetch.id, bytes.ok_or(fault));
            assert_eq!(ready(&mut fetches), [ticket]);
            assert_eq!(call(&mut fetches, ONE, &needs), Ok(vec![0]));
        }
    }
}
