//! Reads that the thread of a pool does not wait for.
//!
//! A call that need not be answered at once is made between [`Fetches::begin`] and [`Fetches::end`].
//! What it needs and the disk does not have at hand is listed here, and the call ends with a ticket.
//! Other threads read what is listed ([`Fetches::next_fetch`], [`Fetches::arrived`]). Once all that a call
//! lacked is there its ticket is ready, and the call is made again: it looks up anew where its data
//! are, and finds here what was read of them.
//!
//! **Nothing is answered with another generation's bytes.** A place of the disk is written anew
//! once its unit was freed and is used again, or where a good copy replaces a bad one. Three things stand
//! against bytes from before:
//!
//! * What is read is known by its place and the number of use of its unit ([`Key`]). What was listed,
//!   begun or read for a former use has no name any more.
//! * Each range that is written, for the first time or again, is announced ([`Fetches::forget`]): what
//!   was listed or read of it is dropped, and what is being read of it is dropped when it comes.
//! * A reader that expects other bytes has them read once more ([`Fetches::doubt`]) before it believes
//!   that the disk has none better.
//!
//! **Nothing stays that no call awaits.** A call has a name by which it is known when it is made again. Once it
//! has all that it needs, what it had read and did not need after all is dropped.
//!
//! **Turns.** Clients' reads of each replica, what is copied from it, the background work on it and the
//! scrub are an owner each. Owners take turns, one read each, so one that wants thousands does not keep
//! another waiting.
//!
//! **Limits.** At most [`UNDER_WAY_MAX`] reads are under way. Those listed or under way are of 32 MiB
//! in all, and what was read and not taken yet is 16 MiB; what came first is dropped then, and is
//! read again if it is still needed. A call that finds no room waits for it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

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
/// Calls that are to be made again and were not yet.
const TOLD_MAX: usize = 16_384;
/// `errno` of a medium that cannot be read.
const EIO: i32 = 5;

/// Party whose calls wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Owner {
    Sessions(ReplicaGuid),
    /// Rebuilds and catching up, which its sessions ask for too.
    Copying(ReplicaGuid),
    Background(ReplicaGuid),
    /// The scrub, which reads a replica at a time, and what belongs to none.
    Scrub(ReplicaGuid),
}

impl Owner {
    /// The party that makes one call at a time, whichever replica it is for.
    fn party(self) -> Owner {
        match self {
            Owner::Background(_) => Owner::Background(ReplicaGuid(0)),
            Owner::Scrub(_) => Owner::Scrub(ReplicaGuid(0)),
            owner => owner,
        }
    }
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

/// Name of what is read: the blocks, and how often their unit was taken into use before. So what was
/// wanted of a former use cannot be named any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    pub stretch: Stretch,
    pub use_number: u32,
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
    /// It is read once more, as what came first was not what its reader expected.
    is_again: bool,
    /// Calls that lacked it and have not taken it yet: they wait, or are made again soon.
    readers: Vec<FetchTicket>,
}

/// A call that waits.
struct Waiting {
    owner: Owner,
    name: u64,
    /// Reads that it lacks still.
    left: usize,
    /// What it is a reader of.
    held: Vec<Key>,
}

/// A call that can be made again, and was not yet.
struct Told {
    party: Owner,
    name: u64,
    held: Vec<Key>,
}

/// A call that is being made.
struct Call {
    owner: Owner,
    name: u64,
    /// The ticket with which it ended last, and what it is a reader of.
    former: Option<(FetchTicket, Vec<Key>)>,
    lacks: BTreeSet<Key>,
    /// What it found and its caller keeps, whatever the call comes to.
    kept: BTreeSet<Key>,
    /// What it found and needs again if it lacks something.
    needed: BTreeSet<Key>,
    found_no_room: bool,
}

impl Call {
    /// Returns true if it ended before for want of this stretch, among others.
    fn waited_for(&self, key: Key) -> bool {
        self.former.as_ref().is_some_and(|(_, held)| held.contains(&key))
    }
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
    entries: BTreeMap<Key, Entry>,
    /// Listed reads by owner, the owner first whose turn it is.
    turns: VecDeque<(Owner, VecDeque<Key>)>,
    /// Reads under way by their numbers.
    under_way: KeyMap<Key>,
    /// What was read, oldest first.
    arrived: VecDeque<(Key, u64)>,
    waiting: KeyMap<Waiting>,
    for_room: VecDeque<FetchTicket>,
    ready: VecDeque<(Owner, FetchTicket)>,
    /// Calls to be made again, oldest first, and their tickets by what they are known by.
    told: BTreeMap<FetchTicket, Told>,
    told_by_name: BTreeMap<(Owner, u64), VecDeque<FetchTicket>>,
    /// Bytes that are listed or under way, and bytes that have arrived.
    open_bytes: usize,
    arrived_bytes: usize,
    /// The longest stretch so far, in blocks.
    longest: u32,
    last_id: u64,
    call: Option<Call>,
}

impl Fetches {
    /// A call begins that may wait. Its name is the same when it is made again; one that is made
    /// in its place may have it too.
    pub fn begin(&mut self, owner: Owner, name: u64) {
        let former = self.take_told(owner.party(), name);
        let (lacks, kept, needed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        self.call = Some(Call { owner, name, former, lacks, kept, needed, found_no_room: false });
    }

    /// Whether such a call is being made.
    pub fn is_open(&self) -> bool {
        self.call.is_some()
    }

    /// The call ended. With a ticket it lacked something, whatever it answered.
    pub fn end(&mut self) -> Option<FetchTicket> {
        let call = self.call.take()?;
        let (former, held) = call.former.unzip();
        let former_keys = held.unwrap_or_default();
        if call.lacks.is_empty() && !call.found_no_room {
            self.leave(former, &former_keys);
            return None;
        }
        let (ticket, mut left) = (FetchTicket(self.next_id()), 0);
        let mut held = BTreeSet::new();
        for key in &call.lacks {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.readers.push(ticket);
                held.insert(*key);
                left += 1;
            }
        }
        // It may need again what it found, and what it did not come to this time.
        let again = former_keys.iter().filter(|key| !call.kept.contains(key)).chain(&call.needed);
        for key in again {
            if let Some(entry) = self.entries.get_mut(key).filter(|_| held.insert(*key)) {
                entry.readers.push(ticket);
            }
        }
        self.leave(former, &former_keys);
        let held = held.into_iter().collect();
        let (owner, name) = (call.owner, call.name);
        self.waiting.insert(ticket.0, Waiting { owner, name, left, held });
        match left {
            0 if self.open_bytes > 0 => self.for_room.push_back(ticket),
            0 => self.make_ready(ticket),
            _ => {}
        }
        Some(ticket)
    }

    /// What is known of a stretch that the present call needs. `is_kept`: the caller keeps it, also
    /// if the call lacks something.
    pub fn look(&mut self, key: Key, is_kept: bool) -> Looked {
        let (Some(call), Some(entry)) = (&mut self.call, self.entries.get(&key)) else {
            return Looked::Unknown;
        };
        match &entry.state {
            // The disk may have refused it to another call, which was never made again, long ago.
            State::Arrived(Err(_)) if !entry.is_again && !call.waited_for(key) => {
                self.doubt(key);
                Looked::Awaited
            }
            State::Arrived(result) => {
                // Several nodes may lie in it.
                match is_kept {
                    true => call.kept.insert(key),
                    false => call.needed.insert(key),
                };
                Looked::Arrived(result.clone())
            }
            State::Listed | State::UnderWay => {
                call.lacks.insert(key);
                Looked::Awaited
            }
        }
    }

    /// The present call lacks a stretch of which nothing is known. `is_once`: it is not read again soon.
    pub fn want(&mut self, key: Key, is_once: bool) {
        let bytes = key.stretch.bytes();
        let Some(call) = &mut self.call else { return };
        if self.open_bytes > 0 && self.open_bytes + bytes > OPEN_BYTES_MAX {
            call.found_no_room = true;
            return;
        }
        call.lacks.insert(key);
        let (owner, state, readers) = (call.owner, State::Listed, Vec::new());
        let id = self.next_id();
        self.entries.insert(key, Entry { id, owner, is_once, state, is_again: false, readers });
        self.open_bytes += bytes;
        self.longest = self.longest.max(key.stretch.blocks);
        self.list(owner, key);
    }

    /// What was found here for the present call is not what it expects: it is read once more, and
    /// the call lacks it until then. False where that was done already.
    pub fn doubt(&mut self, key: Key) -> bool {
        let id = self.next_id();
        let (Some(call), Some(entry)) = (&mut self.call, self.entries.get_mut(&key)) else {
            return false;
        };
        if entry.is_again || !matches!(entry.state, State::Arrived(_)) {
            return false;
        }
        let (owner, former) = (call.owner, std::mem::replace(&mut entry.id, id));
        (entry.state, entry.is_again, entry.owner) = (State::Listed, true, owner);
        call.kept.remove(&key);
        call.needed.remove(&key);
        call.lacks.insert(key);
        self.arrived.retain(|(_, id)| *id != former);
        self.arrived_bytes -= key.stretch.bytes();
        self.open_bytes += key.stretch.bytes();
        self.list(owner, key);
        true
    }

    /// The read to begin now, if there is one.
    pub fn next_fetch(&mut self) -> Option<Fetch> {
        if self.under_way.len() >= UNDER_WAY_MAX {
            return None;
        }
        let (owner, mut listed) = self.turns.pop_front()?;
        let key = listed.pop_front()?;
        if !listed.is_empty() {
            self.turns.push_back((owner, listed));
        }
        let entry = self.entries.get_mut(&key)?;
        entry.state = State::UnderWay;
        let (id, is_once) = (entry.id, entry.is_once);
        self.under_way.insert(id, key);
        let (offset, length) = (key.stretch.first * BLOCK_SIZE as u64, key.stretch.bytes());
        Some(Fetch { id, offset, length, is_once })
    }

    /// Takes the result of a read.
    pub fn arrived(&mut self, id: u64, result: Result<Bytes, IoFault>) {
        let Some(key) = self.under_way.remove(&id) else { return };
        let stretch = key.stretch;
        self.open_bytes -= stretch.bytes();
        let offset = stretch.first * BLOCK_SIZE as u64;
        let short = IoFault { operation: "read", offset, errno: EIO };
        let result = result
            .and_then(|bytes| if bytes.len() == stretch.bytes() { Ok(bytes) } else { Err(short) });
        // Forgotten meanwhile, it may be listed anew.
        if let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.id == id) {
            entry.state = State::Arrived(result);
            let readers = entry.readers.clone();
            self.arrived.push_back((key, id));
            self.arrived_bytes += stretch.bytes();
            self.lack_less(&readers);
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
        let key = |first| Key { stretch: Stretch { first, blocks: 0 }, use_number: 0 };
        let from = key(first.saturating_sub(self.longest.into()));
        let over = self.entries.range(from..key(end));
        let over = over.filter(|(key, entry)| {
            key.stretch.first + u64::from(key.stretch.blocks) > first
                && !(matches!(entry.state, State::Listed) && believes_a_former_use())
        });
        let over: Vec<Key> = over.map(|(key, _)| *key).collect();
        let mut readers = Vec::new();
        for entry in self.remove(&over) {
            readers.extend(entry.readers);
        }
        // They look where their data are now.
        self.lack_less(&readers);
    }

    /// The call of this name is made without waiting: what was read for it before is dropped.
    pub fn give_up(&mut self, owner: Owner, name: u64) {
        while let Some((ticket, held)) = self.take_told(owner.party(), name) {
            self.leave(Some(ticket), &held);
        }
    }

    /// The owner makes none of its calls again.
    pub fn drop_calls(&mut self, owner: Owner) {
        let mut left = Vec::new();
        self.waiting.retain(|ticket, waiting| {
            let stays = waiting.owner != owner;
            if !stays {
                left.push((FetchTicket(*ticket), std::mem::take(&mut waiting.held)));
            }
            stays
        });
        self.ready.retain(|(of, _)| *of != owner);
        let party = owner.party();
        let is_own = |_: &FetchTicket, told: &mut Told| told.party == party;
        left.extend(self.told.extract_if(.., is_own).map(|(ticket, told)| (ticket, told.held)));
        self.told_by_name.retain(|(of, _), _| *of != party);
        for (ticket, held) in left {
            self.leave(Some(ticket), &held);
        }
        let waiting = &self.waiting;
        self.for_room.retain(|ticket| waiting.contains_key(&ticket.0));
        // What others lack too is listed for one of them.
        let at = self.turns.iter().position(|(of, _)| *of == owner);
        let listed = at.and_then(|at| self.turns.remove(at)).map(|(_, listed)| listed);
        for key in listed.into_iter().flatten() {
            let readers = self.entries.get(&key).map_or(&[][..], |entry| &entry.readers);
            let other = readers.iter().find_map(|ticket| self.waiting.get(&ticket.0));
            let other = other.map_or(owner, |waiting| waiting.owner);
            self.list(other, key);
        }
        self.wake_for_room();
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn list(&mut self, owner: Owner, key: Key) {
        match self.turns.iter_mut().find(|(of, _)| *of == owner) {
            Some((_, listed)) => listed.push_back(key),
            None => self.turns.push_back((owner, VecDeque::from([key]))),
        }
    }

    /// The oldest call of this name that is to be made again, and what it is a reader of.
    fn take_told(&mut self, party: Owner, name: u64) -> Option<(FetchTicket, Vec<Key>)> {
        let tickets = self.told_by_name.get_mut(&(party, name))?;
        let ticket = tickets.pop_front();
        if tickets.is_empty() {
            self.told_by_name.remove(&(party, name));
        }
        let ticket = ticket?;
        Some((ticket, self.told.remove(&ticket)?.held))
    }

    /// A call needs these no more. What no other one needs either goes.
    fn leave(&mut self, ticket: Option<FetchTicket>, held: &[Key]) {
        let Some(ticket) = ticket else { return };
        let mut unawaited = Vec::new();
        for key in held {
            let Some(entry) = self.entries.get_mut(key) else { continue };
            let before = entry.readers.len();
            entry.readers.retain(|reader| *reader != ticket);
            if entry.readers.is_empty() && before > 0 {
                unawaited.push(*key);
            }
        }
        self.remove(&unawaited);
    }

    /// Removes entries, whatever their state. Reads under way end later, and are dropped then.
    fn remove(&mut self, keys: &[Key]) -> Vec<Entry> {
        let (mut removed, mut unlisted) = (Vec::new(), BTreeSet::new());
        for key in keys {
            let Some(entry) = self.entries.remove(key) else { continue };
            match entry.state {
                State::Listed => {
                    self.open_bytes -= key.stretch.bytes();
                    unlisted.insert(*key);
                }
                State::UnderWay => {}
                State::Arrived(_) => {
                    self.arrived_bytes -= key.stretch.bytes();
                    self.arrived.retain(|(_, id)| *id != entry.id);
                }
            }
            removed.push(entry);
        }
        if !unlisted.is_empty() {
            for (_, listed) in &mut self.turns {
                listed.retain(|key| !unlisted.contains(key));
            }
            self.turns.retain(|(_, listed)| !listed.is_empty());
            self.wake_for_room();
        }
        removed
    }

    fn drop_oldest(&mut self) {
        while self.arrived_bytes > ARRIVED_BYTES_MAX
            && self.arrived.len() > 1
            && let Some((oldest, _)) = self.arrived.pop_front()
        {
            self.entries.remove(&oldest);
            self.arrived_bytes -= oldest.stretch.bytes();
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
        let Some(Waiting { owner, name, held, .. }) = self.waiting.remove(&ticket.0) else {
            return;
        };
        self.ready.push_back((owner, ticket));
        let party = owner.party();
        self.told_by_name.entry((party, name)).or_default().push_back(ticket);
        self.told.insert(ticket, Told { party, name, held });
        if self.told.len() > TOLD_MAX
            && let Some((oldest, Told { party, name, held })) = self.told.pop_first()
        {
            if let Some(tickets) = self.told_by_name.get_mut(&(party, name)) {
                tickets.retain(|ticket| *ticket != oldest);
            }
            self.leave(Some(oldest), &held);
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

/// A name of a call, by what it is about.
pub fn name_of(call: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    call.hash(&mut hasher);
    hasher.finish()
}

/// With a rule broken, what was listed or read of a former use is taken for the present one's.
pub fn believes_a_former_use() -> bool {
    mutant::is("listed-read-outlives-its-use") || mutant::is("prefetch-of-another-generation")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Owner = Owner::Sessions(ReplicaGuid(1));
    const OTHER: Owner = Owner::Sessions(ReplicaGuid(2));

    fn stretch(first: u64, blocks: u32) -> Key {
        Key { stretch: Stretch { first, blocks }, use_number: 0 }
    }

    /// A call that needs these; the bytes of the first block of each, or its ticket.
    fn call(fetches: &mut Fetches, owner: Owner, needs: &[Key]) -> Result<Vec<u8>, FetchTicket> {
        fetches.begin(owner, name_of(needs.iter().map(|key| key.stretch.first).min()));
        let mut found = Vec::new();
        for key in needs {
            match fetches.look(*key, false) {
                Looked::Arrived(bytes) => found.push(bytes.map_or(0, |bytes| bytes[0])),
                Looked::Awaited => {}
                Looked::Unknown => fetches.want(*key, false),
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

    /// Its caller looked where its data are, and they lie elsewhere by now.
    #[test]
    fn what_a_call_had_read_and_does_not_take_is_dropped_with_its_end() {
        let mut fetches = Fetches::default();
        let both = [stretch(7, 1), stretch(20, 3)];
        call(&mut fetches, ONE, &both).expect_err("nothing is there");
        let other = call(&mut fetches, OTHER, &both[1..]).expect_err("nothing is there");
        while let Some(fetch) = fetches.next_fetch() {
            read(&mut fetches, fetch, 3);
        }
        assert_eq!(call(&mut fetches, ONE, &both[..1]), Ok(vec![3]));
        assert!(ready(&mut fetches).contains(&other));
        assert_eq!(fetches.entries.len(), 1, "another call awaits it");
        assert_eq!(call(&mut fetches, OTHER, &both[1..]), Ok(vec![3]));
        assert_eq!((fetches.entries.len(), fetches.arrived_bytes), (0, 0));
    }

    #[test]
    fn what_a_call_did_not_come_to_is_there_when_it_is_made_again() {
        let mut fetches = Fetches::default();
        let (node, data, next) = (stretch(7, 1), stretch(20, 3), stretch(900, 1));
        call(&mut fetches, ONE, &[node, data]).expect_err("nothing is there");
        while let Some(fetch) = fetches.next_fetch() {
            read(&mut fetches, fetch, 3);
        }
        // Known by its first need, it lacks another node before it comes to its data.
        fetches.begin(ONE, name_of(Some(7_u64)));
        assert!(matches!(fetches.look(next, false), Looked::Unknown));
        fetches.want(next, false);
        assert!(fetches.end().is_some());
        let fetch = fetches.next_fetch().expect("it is listed");
        read(&mut fetches, fetch, 4);
        assert_eq!(call(&mut fetches, ONE, &[node, data]), Ok(vec![3, 3]));
        assert_eq!((fetches.entries.len(), fetches.arrived_bytes), (0, 0));
    }

    /// A verification that was done had others read theirs again.
    #[test]
    fn the_end_of_one_call_drops_nothing_that_others_of_its_owner_have_not_taken_yet() {
        let mut fetches = Fetches::default();
        let needs = [stretch(7, 1), stretch(20, 1)];
        for key in &needs {
            call(&mut fetches, ONE, &[*key]).expect_err("nothing is there");
        }
        while let Some(fetch) = fetches.next_fetch() {
            read(&mut fetches, fetch, 5);
        }
        assert_eq!(call(&mut fetches, ONE, &needs[..1]), Ok(vec![5]));
        fetches.give_up(ONE, name_of(Some(7_u64)));
        assert_eq!(call(&mut fetches, ONE, &needs[1..]), Ok(vec![5]));
        assert!(fetches.entries.is_empty() && fetches.told.is_empty());
    }

    #[test]
    fn what_was_listed_of_a_former_use_is_never_read_for_the_present_one() {
        let mut fetches = Fetches::default();
        let old: Vec<FetchTicket> = (0..100)
            .map(|n| call(&mut fetches, ONE, &[stretch(n, 1)]).expect_err("nothing is there"))
            .collect();
        let begun: Vec<Fetch> = std::iter::from_fn(|| fetches.next_fetch()).collect();
        fetches.forget(0, 100);
        assert_eq!(ready(&mut fetches).len(), old.len(), "each looks again");
        assert_eq!((fetches.entries.len(), fetches.turns.len()), (0, 0));
        begun.into_iter().for_each(|fetch| read(&mut fetches, fetch, 1));
        assert!(fetches.next_fetch().is_none());
        assert_eq!((fetches.open_bytes, fetches.arrived_bytes), (0, 0));
        // Were it not forgotten, it could not be named.
        call(&mut fetches, ONE, &[stretch(7, 1)]).expect_err("nothing is there");
        let fetch = fetches.next_fetch().expect("it is listed");
        read(&mut fetches, fetch, 1);
        let present = Key { use_number: 1, ..stretch(7, 1) };
        call(&mut fetches, OTHER, &[present]).expect_err("it is asked of the disk");
    }

    #[test]
    fn what_is_not_as_expected_is_read_once_more_and_then_believed() {
        let mut fetches = Fetches::default();
        let key = stretch(7, 2);
        call(&mut fetches, ONE, &[key]).expect_err("nothing is there");
        for (byte, is_doubted) in [(1, true), (2, false)] {
            let fetch = fetches.next_fetch().expect("it is listed");
            read(&mut fetches, fetch, byte);
            assert_eq!(ready(&mut fetches).len(), 1);
            fetches.begin(ONE, name_of(Some(7_u64)));
            let Looked::Arrived(Ok(bytes)) = fetches.look(key, false) else { panic!("it came") };
            assert_eq!((bytes[0], fetches.doubt(key)), (byte, is_doubted));
            assert_eq!(fetches.end().is_some(), is_doubted);
        }
        assert_eq!((fetches.entries.len(), fetches.open_bytes, fetches.arrived_bytes), (0, 0, 0));
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

    #[test]
    fn a_read_that_the_disk_refused_to_another_call_is_made_again() {
        let mut fetches = Fetches::default();
        let (others, needs) = ([stretch(3, 1), stretch(7, 2)], [stretch(7, 2)]);
        call(&mut fetches, ONE, &others).expect_err("it waits");
        while let Some(fetch) = fetches.next_fetch() {
            let fault = IoFault { operation: "read", offset: fetch.offset, errno: 5 };
            fetches.arrived(fetch.id, Err(fault));
        }
        let refused = ready(&mut fetches);
        let ticket = call(&mut fetches, OTHER, &needs).expect_err("it is read for this call");
        assert_ne!(refused, [ticket]);
        let fetch = fetches.next_fetch().expect("it is listed");
        read(&mut fetches, fetch, 9);
        assert_eq!(call(&mut fetches, OTHER, &needs), Ok(vec![9]));
    }
}
