//! One target's open session with a replica: order, acknowledgements, increments.

use std::collections::{BTreeMap, VecDeque};

use super::copying::{CopyRequest, Copying, Way};
use super::repair_request::RepairRequest;
use super::store::{BootCookie, FetchTicket, ReplicaMeta, ReplicaStore, StoreError, SyncTicket};
use super::{ConnectionId, Lease, Repaired, ReplicaAction, ReplicaNote, granted_lease};
use crate::step::Step;
use quoin_types::entry::{EntryKind, SharedEntry, View};
use quoin_types::ids::SessionKey;
use quoin_types::membership::Member;
use quoin_types::message::{
    BadCopy, Content, FromReplica, IncrementEnd, Ping, ReadView, RequestId, RoomGrant, Slot,
    ToReplica, VERIFY_BLOCKS_MAX,
};
use quoin_types::mutant;
use quoin_types::time::Time;
use quoin_types::{
    Durability, Lsn, READ_BLOCKS_MAX, STATUS_BLOCKS_MAX, SnapshotId, VOLUME_BLOCKS_MAX,
};

/// Limit of reads that wait for an entry or for the disk; a correct target stays far below it.
const WAITING_READS_MAX: usize = 4096;
/// Times that a read may be told to wait for the disk: each time it looks up where its blocks are
/// by then, and finds what it lacked the last time. One that lacks something still has met others
/// that took the room in the caches; it has the pool wait instead.
pub(super) const FETCHES_MAX: u8 = 16;
/// Limit of repairs that wait for the disk, each with its data. A target sends what the replica asked
/// for, which is a few at a time; further ones have the pool wait.
const WAITING_REPAIRS_MAX: usize = 32;
/// Limit of data that one verification reads: other requests wait for it.
const VERIFY_BYTES_MAX: u32 = 1 << 20;

/// An accepted Open that has not been answered yet.
pub(super) struct PendingOpen {
    pub connection: ConnectionId,
    pub key: SessionKey,
    pub lease_ms: u32,
    pub ticket: SyncTicket,
    /// LSN that the sync of the promise made durable, once it is done.
    pub synced_to: Option<Lsn>,
    pub expected: Lsn,
}

impl PendingOpen {
    pub fn on_synced(&mut self, ticket: SyncTicket) {
        if ticket >= self.ticket {
            self.synced_to = Some(self.expected);
        }
    }
}

pub(super) enum Next {
    Stay,
    Closed,
}

/// Reason for which the replica ends a session.
pub(super) enum Fault {
    Store(StoreError),
    BelowStable,
    /// The message breaks a rule; the name is the invariant's where there is one.
    Protocol(&'static str),
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Fault::Store(error)
    }
}

pub(super) struct WaitingRead {
    id: RequestId,
    what: Looked,
    lba: u64,
    blocks: u32,
    after: Lsn,
    ping: Ping,
    /// Times that it had to wait for the disk.
    fetches: u8,
}

impl WaitingRead {
    /// Reads the content of its first blocks.
    fn look(
        &self,
        blocks: u32,
        store: &mut dyn ReplicaStore,
        slots: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        match self.what {
            Looked::Blocks { view, want_data } if self.fetches < FETCHES_MAX => {
                store.try_read(view, self.lba, blocks, want_data, slots)
            }
            Looked::Blocks { view, want_data } => {
                store.read(view, self.lba, blocks, want_data, slots)
            }
            Looked::Verified { view, bytes_max, repair } if self.fetches < FETCHES_MAX => {
                store.try_verify(view, self.lba, blocks, bytes_max, repair, slots)
            }
            Looked::Verified { view, bytes_max, repair } => {
                store.verify(view, self.lba, blocks, bytes_max, repair, slots)
            }
        }
    }

    /// Reads beyond the end of the volume. A target that has grown the volume may ask for the new
    /// blocks before this replica has applied that (for example because its pool is full). Up to
    /// its position nothing was written there, so they are a hole that was never written.
    fn look_over_the_end(
        &self,
        rule: &'static str,
        store: &mut dyn ReplicaStore,
        slots: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let size = store.state().volume_blocks;
        let blocks = size.saturating_sub(self.lba).min(self.blocks.into()) as u32;
        let (Looked::Blocks { view, .. } | Looked::Verified { view, .. }) = self.what;
        if let ReadView::Snapshot(id) = view
            && store.snapshots().iter().all(|s| s.id != id)
        {
            // It was deleted while the read was on its way: no copy of it is good.
            let (lba, version) = (self.lba, Lsn::ZERO);
            let slot = |lba| Slot { lba, blocks: 1, version, content: Content::Bad };
            slots.extend((lba..lba + u64::from(self.blocks)).map(slot));
            return Ok(());
        }
        if view != ReadView::Live || blocks == self.blocks {
            return Err(StoreError::Rule(rule));
        }
        if blocks > 0 {
            self.look(blocks, store, slots)?;
        }
        let lba = self.lba + u64::from(blocks);
        // A verification may end earlier.
        let whole = slots.last().is_none_or(|s| s.lba + u64::from(s.blocks) == lba);
        if whole {
            let (blocks, version) = (self.blocks - blocks, Lsn::ZERO);
            slots.push(Slot { lba, blocks, version, content: Content::Hole });
        }
        Ok(())
    }
}

/// A request that waits for the disk.
pub(super) enum Parked {
    Read(WaitingRead),
    Copy(CopyRequest),
    Repair(RepairRequest),
}

/// The view that a message means by a snapshot, or by none.
pub(super) fn view_of(snapshot: Option<SnapshotId>) -> ReadView {
    let named = snapshot.filter(|_| !mutant::is("repair-without-its-view"));
    named.map_or(ReadView::Live, ReadView::Snapshot)
}

/// Result that a read returns.
#[derive(Clone, Copy)]
enum Looked {
    Blocks { view: ReadView, want_data: bool },
    Verified { view: ReadView, bytes_max: u32, repair: bool },
}

/// Action after a sync.
enum AfterSync {
    /// Everything up to here is durable.
    Durable(Lsn),
    Truncated,
    /// The shadow is on media: it flips.
    Flip(u64),
    Flipped(u64),
    /// All data is on media: the small state records it.
    Close {
        continuous: bool,
    },
    Closed,
}

pub(super) struct Session {
    pub connection: ConnectionId,
    pub key: SessionKey,
    lease_ms: u32,
    /// Feeding has begun (the first Truncate was handled); its tip, see [`ToReplica::Truncate`].
    tip: Option<Lsn>,
    pub durable: Lsn,
    applied: Lsn,
    /// Stable, as last passed to the store by this session.
    stable: Lsn,
    /// Entries that must be durable before they are acknowledged as applied, oldest first.
    barriers: VecDeque<Lsn>,
    syncs: VecDeque<(SyncTicket, AfterSync)>,
    /// Reads that wait for an entry.
    reads: VecDeque<WaitingRead>,
    /// Requests that wait for the disk.
    parked: BTreeMap<FetchTicket, Parked>,
    ping: Ping,
    acknowledgement_due: bool,
    closing: bool,
    /// Set if the last entries found no room.
    full: bool,
    pub(super) copying: Copying,
}

impl Session {
    pub fn new(open: &PendingOpen, durable: Lsn) -> Self {
        Self {
            connection: open.connection,
            key: open.key,
            lease_ms: open.lease_ms,
            tip: None,
            durable,
            applied: durable,
            stable: Lsn::ZERO,
            barriers: VecDeque::new(),
            syncs: VecDeque::new(),
            reads: VecDeque::new(),
            parked: BTreeMap::new(),
            ping: Ping(0),
            acknowledgement_due: false,
            closing: false,
            full: false,
            copying: Copying::default(),
        }
    }

    /// Renews the lease: any traffic does, from its receipt.
    pub fn renew(&self, now: Time, lease: &mut Option<Lease>) {
        let holder = Some((self.key.epoch, self.key.incarnation));
        let until = now + granted_lease(self.lease_ms);
        let kept = lease.filter(|l| l.holder == holder).map_or(until, |l| l.until.max(until));
        *lease = Some(Lease { holder, until: kept });
    }

    pub fn on_message(
        &mut self,
        message: ToReplica,
        boot: BootCookie,
        continuous: &mut bool,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<Next, Fault> {
        if self.closing {
            return Err(Fault::Protocol("a message after Close"));
        }
        match message {
            ToReplica::Open { .. } => return Err(Fault::Protocol("Open within a session")),
            ToReplica::Truncate { keep, tip } => self.truncate(keep, tip, store)?,
            ToReplica::Append { entries, stable, sync, ping } => {
                self.ping = self.ping.max(ping);
                let waits = self.append(&entries, boot, continuous, store, actions)?;
                // Entries that wait for a sync are acknowledged once, when it is done.
                self.acknowledgement_due |= !waits;
                self.set_stable(stable, store);
                if sync && !waits {
                    self.sync_now(store);
                }
                self.serve_reads(store, actions)?;
            }
            ToReplica::Sync { lsn, ping } => {
                self.saw(ping);
                if lsn > self.durable {
                    self.sync_now(store);
                }
            }
            ToReplica::Ping { stable, ping } => {
                self.saw(ping);
                self.set_stable(stable, store);
            }
            ToReplica::Read { id, view, lba, blocks, after, want_data, ping } => {
                let limit = if want_data { READ_BLOCKS_MAX } else { STATUS_BLOCKS_MAX };
                let what = Looked::Blocks { view, want_data };
                let read = WaitingRead { id, what, lba, blocks, after, ping, fetches: 0 };
                self.look(read, limit, store, actions)?;
            }
            ToReplica::Verify { id, lba, blocks, bytes_max, after, repair, ping, snapshot } => {
                let (view, bytes_max) = (view_of(snapshot), bytes_max.min(VERIFY_BYTES_MAX));
                let what = Looked::Verified { view, bytes_max, repair };
                let read = WaitingRead { id, what, lba, blocks, after, ping, fetches: 0 };
                self.look(read, VERIFY_BLOCKS_MAX, store, actions)?;
            }
            message @ (ToReplica::Fetch { .. }
            | ToReplica::Pull { .. }
            | ToReplica::IncrementBegin { .. }
            | ToReplica::IncrementFeed { .. }
            | ToReplica::IncrementCut { .. }
            | ToReplica::IncrementCommit { .. }) => self.copy(Way::Own, message, store, actions)?,
            ToReplica::OpenBulk { .. } => {
                return Err(Fault::Protocol("a bulk connection that is the session's own"));
            }
            message @ (ToReplica::Repair { .. } | ToReplica::Mend { .. }) => {
                self.repair(RepairRequest::new(message)?, store, actions)?;
            }
            ToReplica::Close => return self.close(*continuous, store),
        }
        Ok(Next::Stay)
    }

    pub fn on_synced(
        &mut self,
        ticket: SyncTicket,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<Next, Fault> {
        while self.syncs.front().is_some_and(|(t, _)| *t <= ticket) {
            let (_, after) = self.syncs.pop_front().expect("checked above");
            match after {
                AfterSync::Durable(_) if mutant::is("durable-by-an-older-sync") => {
                    self.reached(self.applied);
                }
                AfterSync::Durable(lsn) => self.reached(lsn),
                AfterSync::Truncated => {
                    let state = store.state();
                    let (position, chain) = (state.position, state.chain);
                    self.reached(position.lsn);
                    self.send(FromReplica::Truncated { position, chain }, actions);
                }
                AfterSync::Flip(rebuild) => {
                    store.increment_flip(rebuild)?;
                    let ticket = store.request_sync();
                    self.syncs.push_back((ticket, AfterSync::Flipped(rebuild)));
                }
                AfterSync::Flipped(rebuild) => {
                    let position = store.state().position;
                    self.applied = position.lsn;
                    self.durable = position.lsn;
                    self.barriers.clear();
                    self.copying.flipped(rebuild, position);
                    self.send(FromReplica::IncrementDone { rebuild, position }, actions);
                    actions.push(ReplicaAction::Note(ReplicaNote::Rebuilt { position }));
                }
                AfterSync::Close { continuous } => self.put_closed(continuous, store)?,
                AfterSync::Closed => {
                    self.send(FromReplica::Closed, actions);
                    return Ok(Next::Closed);
                }
            }
        }
        Ok(Next::Stay)
    }

    /// Adds the steps of this session that are under way.
    pub fn steps(&self, steps: &mut Vec<Step>) {
        steps.extend(self.syncs.iter().map(|(_, after)| match after {
            AfterSync::Durable(_) => Step::Syncing,
            AfterSync::Truncated => Step::Truncating,
            AfterSync::Flip(_) => Step::FlipPrepared,
            AfterSync::Flipped(_) => Step::Flipped,
            AfterSync::Close { .. } | AfterSync::Closed => Step::CloseUnsynced,
        }));
        if !self.reads.is_empty() || self.parked() > 0 {
            steps.push(Step::ReadsWaiting);
        }
    }

    /// Sends the cumulative acknowledgement of everything since the last one.
    pub fn acknowledge(&mut self, actions: &mut Vec<ReplicaAction>) {
        if !std::mem::take(&mut self.acknowledgement_due) || self.closing {
            return;
        }
        let applied = match self.barriers.front() {
            Some(barrier) if !mutant::is("view-applied-before-durable") => Lsn(barrier.0 - 1),
            _ => self.applied,
        };
        let durable = self.durable;
        self.send(FromReplica::Applied { applied, durable, ping: self.ping }, actions);
    }

    pub(super) fn send(&self, message: FromReplica, actions: &mut Vec<ReplicaAction>) {
        let (connection, session) = (self.connection, self.key);
        actions.push(ReplicaAction::Send { connection, session, message });
    }

    /// Returns true once the first Truncate was handled: all entries from then on are of one
    /// history.
    pub fn is_fed(&self) -> bool {
        self.tip.is_some() && !self.closing
    }

    /// Returns true once Close was received.
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// Asks the target for a good copy. One that was found before this session's first Truncate
    /// may be of an entry that was cut: it is not asked for, as nothing of it is left.
    pub fn ask_for(&self, copy: BadCopy, actions: &mut Vec<ReplicaAction>) {
        if !self.is_fed() {
            return;
        }
        if copy.version > self.applied && !mutant::is("copies-of-cut-entries-asked-for") {
            let BadCopy { lba, blocks, snapshot, .. } = copy;
            let ended = Repaired { snapshot, lba, whole_map: blocks > 1, done: false };
            actions.push(ReplicaAction::Note(ReplicaNote::Repaired(ended)));
            return;
        }
        self.send(FromReplica::BadCopy(copy), actions);
    }

    pub fn tell_room(&self, room: RoomGrant, actions: &mut Vec<ReplicaAction>) {
        self.send(FromReplica::Room(room), actions);
    }

    fn saw(&mut self, ping: Ping) {
        self.ping = self.ping.max(ping);
        self.acknowledgement_due = true;
    }

    fn reached(&mut self, durable: Lsn) {
        // A truncation between request and completion may have removed entries again.
        self.durable = self.durable.max(durable.min(self.applied));
        while self.barriers.front().is_some_and(|b| *b <= self.durable) {
            self.barriers.pop_front();
        }
        self.acknowledgement_due = true;
    }

    fn sync_now(&mut self, store: &mut dyn ReplicaStore) {
        let ticket = store.request_sync();
        self.syncs.push_back((ticket, AfterSync::Durable(self.applied)));
    }

    pub(super) fn set_stable(&mut self, stable: Lsn, store: &mut dyn ReplicaStore) {
        let stable = stable.min(self.applied);
        if stable > self.stable {
            self.stable = stable;
            store.set_stable(stable);
        }
    }

    fn truncate(&mut self, keep: Lsn, tip: Lsn, store: &mut dyn ReplicaStore) -> Result<(), Fault> {
        let state = store.state();
        if keep > state.position.lsn || self.tip.is_some() {
            return Err(Fault::Protocol("truncation above the position or out of turn"));
        }
        if keep < state.stable && !mutant::is("cut-below-stable") {
            return Err(Fault::BelowStable);
        }
        if keep < state.position.lsn {
            store.truncate(keep)?;
            self.applied = keep;
            self.durable = self.durable.min(keep);
        }
        self.tip = Some(tip);
        store.owe_before(self.key.epoch);
        let ticket = store.request_sync();
        self.syncs.push_back((ticket, AfterSync::Truncated));
        Ok(())
    }

    /// R2: strictly by LSN, chain by chain; what the store took is in the kernel, or, under
    /// `durability: media`, in this process until the sync. Returns true if all of it is acknowledged as
    /// applied only once it is durable, and a sync was requested.
    fn append(
        &mut self,
        entries: &[SharedEntry],
        boot: BootCookie,
        continuous: &mut bool,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<bool, Fault> {
        let Some(last) = entries.last() else { return Ok(false) };
        let Some(tip) = self.tip else { return Err(Fault::Protocol("append before truncate")) };
        let state = store.state();
        if self.full && entries[0].lsn > state.position.lsn.next() {
            // These were sent before the primary knew that the entries before them found no room:
            // they come again. An append that goes back within itself may hold just those. Its
            // session ends, since they would not be sent a second time.
            if entries.windows(2).any(|pair| pair[1].lsn != pair[0].lsn.next()) {
                return Err(Fault::Protocol("entries must follow without a gap"));
            }
            return Ok(false);
        }
        let mut position = state.position;
        let mut chain = state.chain;
        let mut blocks = state.volume_blocks;
        let mut views = Vec::<&View>::new();
        // Under `durability: media` the store may hold the batch back until the sync.
        let media = matches!(
            state.last_view, Some((_, ref view)) if view.durability == Durability::Media
        );
        let mut durable_first = media;
        // The target waits for stable as well: these two defects break both guards.
        let unguarded =
            mutant::is("media-acknowledged-at-commit") || mutant::is("read-at-commit-under-media");
        if media && !unguarded {
            self.barriers.push_back(state.position.lsn.next());
        }
        for entry in entries {
            entry.check().map_err(|m| Fault::Protocol(m.0))?;
            if entry.lsn != position.lsn.next() {
                return Err(Fault::Protocol("entries must follow without a gap"));
            }
            if entry.epoch < position.epoch || entry.epoch > self.key.epoch {
                return Err(Fault::Protocol("entry of a foreign epoch"));
            }
            if entry.chain != entry.chain_after(chain) {
                return Err(Fault::Protocol("OneContent"));
            }
            if entry.lba + u64::from(entry.blocks) > blocks {
                return Err(Fault::Protocol("entry beyond the volume's end"));
            }
            if !entry.data_is_good() {
                return Err(Fault::Protocol("SameBytesEverywhere"));
            }
            match &entry.kind {
                EntryKind::Resize { blocks: to } => blocks = *to,
                EntryKind::View(view) if entry.lsn > tip || mutant::is("old-view-teaches") => {
                    views.push(view);
                }
                _ => {}
            }
            if !media && (entry.fua || entry.kind.is_durable_first()) {
                self.barriers.push_back(entry.lsn);
                durable_first = true;
            }
            position = entry.position();
            chain = entry.chain;
        }
        match store.append(entries) {
            Ok(()) => (self.applied, self.full) = (last.lsn, false),
            Err(error) if error.is_lack_of_room() => {
                let applied = store.state().position.lsn;
                self.barriers.retain(|lsn| *lsn <= applied);
                let taken = entries.iter().filter(|e| e.lsn > tip && e.lsn <= applied);
                views = taken
                    .filter_map(|entry| match &entry.kind {
                        EntryKind::View(view) => Some(&**view),
                        _ => None,
                    })
                    .collect();
                self.applied = applied;
                if !std::mem::replace(&mut self.full, true) {
                    let of_ring = error == StoreError::RingFull;
                    let note = if of_ring { ReplicaNote::RingFull } else { ReplicaNote::Full };
                    actions.push(ReplicaAction::Note(note));
                }
                self.send(FromReplica::NoRoom { applied }, actions);
            }
            Err(error) => return Err(error.into()),
        }
        if !views.is_empty() {
            self.learn(&views, boot, continuous, store)?;
        }
        if durable_first {
            self.sync_now(store);
        }
        Ok(media)
    }

    /// Adopts Views of this session, oldest first: they make the replica continuous (everything
    /// before them is durable once they are). One that lists the replica turns its quorum on, also
    /// where a later one leaves it out: the primary counts on that once the first is durable here.
    fn learn(
        &mut self,
        views: &[&View],
        boot: BootCookie,
        continuous: &mut bool,
        store: &mut dyn ReplicaStore,
    ) -> Result<(), Fault> {
        let identity = store.identity();
        let own = Member { id: identity.replica, guid: identity.guid };
        let meta = store.meta();
        let mut next = meta.clone();
        next.cookie = boot;
        let alone = if mutant::is("newest-view-of-an-append-alone") { views.len() - 1 } else { 0 };
        for view in &views[alone..] {
            let mut rules = std::iter::once(&view.rule).chain(&view.joint);
            if view.in_sync.contains(&own) && rules.any(|rule| rule.known.contains(&own)) {
                next.quorum = true;
                next.damaged = false;
            }
            if view.rule.membership_version > next.membership.version {
                next.membership.version = view.rule.membership_version;
                next.membership.rf = view.rule.rf;
                next.membership.cf = view.rule.cf;
                next.membership.known.clone_from(&view.rule.known);
            }
        }
        *continuous = true;
        if mutant::is("old-view-teaches") {
            next.quorum = true;
        }
        if next != *meta {
            store.put_meta(next)?;
        }
        Ok(())
    }

    /// Answers a read now, or once the entry that it waits for is applied.
    fn look(
        &mut self,
        read: WaitingRead,
        blocks_max: u32,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        self.ping = self.ping.max(read.ping);
        if read.blocks == 0 || read.blocks > blocks_max || read.lba > VOLUME_BLOCKS_MAX {
            return Err(Fault::Protocol("read length"));
        }
        self.check_waiting()?;
        if read.after <= self.applied && self.reads.is_empty() {
            return self.read(read, store, actions);
        }
        self.reads.push_back(read);
        self.serve_reads(store, actions)
    }

    fn serve_reads(
        &mut self,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        let mut result = Ok(());
        for read in std::mem::take(&mut self.reads) {
            if result.is_err() || read.after > self.applied {
                self.reads.push_back(read);
            } else {
                result = self.read(read, store, actions);
            }
        }
        result
    }

    /// Refuses a request of a target that has too many waiting.
    pub(super) fn check_waiting(&self) -> Result<(), Fault> {
        if self.reads.len() + self.parked.len() >= WAITING_READS_MAX {
            return Err(Fault::Protocol("too many reads"));
        }
        Ok(())
    }

    /// Number of requests that wait for the disk, or behind one that does.
    pub fn parked(&self) -> usize {
        self.parked.len() + self.copying.waiting()
    }

    pub(super) fn park(&mut self, ticket: FetchTicket, request: Parked) {
        self.parked.insert(ticket, request);
    }

    /// The request of this ticket, which is made again. Each answer names
    /// its request, and a read's the LSN that it was read at. So one that waited for the disk may
    /// come after answers to later requests.
    pub fn take_parked(&mut self, ticket: FetchTicket) -> Option<Parked> {
        self.parked.remove(&ticket)
    }

    /// Repairs a copy, or parks the request until the disk has given what it lacks.
    pub(super) fn repair(
        &mut self,
        mut request: RepairRequest,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        let waiting = self.parked.values().filter(|p| matches!(p, Parked::Repair(_))).count();
        if waiting >= WAITING_REPAIRS_MAX {
            request.fetches = FETCHES_MAX;
        }
        match request.carry_out(self.applied, store) {
            Ok((answer, repaired)) => {
                self.send(answer, actions);
                actions.push(ReplicaAction::Note(ReplicaNote::Repaired(repaired)));
            }
            Err(StoreError::Pending(ticket)) => {
                request.fetches += 1;
                self.park(ticket, Parked::Repair(request));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Answers a read, or parks it until the disk has given what it lacks.
    pub(super) fn read(
        &mut self,
        mut read: WaitingRead,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        let mut slots = Vec::with_capacity(read.blocks.min(64) as usize);
        let (id, at, ping) = (read.id, self.applied, read.ping);
        let looked = match read.look(read.blocks, store, &mut slots) {
            Err(StoreError::Rule(rule)) => {
                slots.clear();
                read.look_over_the_end(rule, store, &mut slots)
            }
            looked => looked,
        };
        match looked {
            Err(StoreError::Pending(ticket)) => {
                read.fetches += 1;
                self.park(ticket, Parked::Read(read));
                return Ok(());
            }
            looked => looked?,
        }
        let message = match read.what {
            Looked::Blocks { .. } => FromReplica::Data { id, at, slots, ping },
            Looked::Verified { .. } => FromReplica::Verified { id, at, slots, ping },
        };
        self.send(message, actions);
        Ok(())
    }

    pub(super) fn prepare(
        &mut self,
        rebuild: u64,
        end: &IncrementEnd,
        store: &mut dyn ReplicaStore,
    ) -> Result<(), Fault> {
        store.increment_prepare(rebuild, end)?;
        let ticket = store.request_sync();
        self.syncs.push_back((ticket, AfterSync::Flip(rebuild)));
        Ok(())
    }

    /// Closes the session; this keeps the continuous flag, and never sets it.
    fn close(&mut self, continuous: bool, store: &mut dyn ReplicaStore) -> Result<Next, Fault> {
        self.closing = true;
        if self.durable < self.applied && !mutant::is("closed-before-the-data") {
            // The data first: it is elsewhere on the disk than the small state, and one sync
            // implies no order. A power cut must not leave the record of a clean close without the
            // data.
            let ticket = store.request_sync();
            self.syncs.push_back((ticket, AfterSync::Close { continuous }));
        } else {
            self.put_closed(continuous, store)?;
        }
        Ok(Next::Stay)
    }

    fn put_closed(
        &mut self,
        closed_continuous: bool,
        store: &mut dyn ReplicaStore,
    ) -> Result<(), StoreError> {
        let closed_continuous = closed_continuous || mutant::is("close-makes-continuous");
        store.put_meta(ReplicaMeta {
            session_open: false,
            closed_continuous,
            ..store.meta().clone()
        })?;
        let ticket = store.request_sync();
        self.syncs.push_back((ticket, AfterSync::Closed));
        Ok(())
    }
}
