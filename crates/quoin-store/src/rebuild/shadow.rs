//! Increments. Receiving: a shadow is a map of its own in the same family, fed slot by slot and
//! no part of the replica's state until the flip. Sending: slots of a pinned view above an LSN.

use bytes::Bytes;
use quoin_replication::replica::store::{PullChunk, StoreError};
use quoin_types::message::{Content, CutHead, IncrementEnd, ReadView, Slot, SnapshotInfo};
use quoin_types::{BLOCK_SIZE, Lsn, mutant};

use crate::background::relocation::{MovedBlock, Naming};
use crate::clones::lookup::first_of;
use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::checkpoint::{
    Checkpoint, LogStart, LogicalState, SegmentState, ShadowState, SnapshotState, TableState,
};
use crate::format::node::{BAD_PLACE, BlockAt, LEAF_BLOCKS, LEAF_SHIFT, LOST_PLACE, Root};
use crate::log::history::Head;
use crate::log::memtable::Log;
use crate::map::tree::{self, Change, Edit};
use crate::replica::upper::Upper;
use crate::replica::{Image, Pin, Replica, Source, Synced, may_lack};
use crate::space::table::{NextStep, Successor};

/// Edits that wait in memory to be merged into the shadow's map, where they are of few leaves.
const EDITS_PENDING_MAX: usize = 8192;
/// Windows of a leaf, and blocks, that one pull looks at, whatever it finds.
const WINDOWS_A_PULL: usize = 256;
const BLOCKS_A_PULL: u64 = (WINDOWS_A_PULL * LEAF_BLOCKS) as u64;
/// Cost of a slot beside its data. In a frame it takes less than half of that, so the longest
/// answer that may be requested fits into one frame.
const SLOT_BYTES: usize = 64;
/// Slots of one pull, whatever was asked for.
const SLOTS_A_PULL: usize = 1 << 16;
/// Most blocks of a hole that a window covers.
const WINDOW_HOLE_BLOCKS_MAX: u64 = 64 * LEAF_BLOCKS as u64;
/// Leaves that are not in memory which one pull has fetched at the same time.
const LEAVES_AHEAD: u32 = 16;
/// Leaves that one feed may be about: those of one pull, of which each window may begin and end
/// within one.
const LEAVES_A_FEED: u64 =
    2 * WINDOWS_A_PULL as u64 + (BLOCKS_A_PULL + WINDOW_HOLE_BLOCKS_MAX) / LEAF_BLOCKS as u64;

pub struct Shadow {
    state: ShadowState,
    edits: Vec<Edit>,
    crcs: Vec<u32>,
    /// Leaves that the edits are in: each is looked at when they are merged.
    leaves: u64,
    /// The end it was prepared for, and the sync that must be over before the flip.
    pub prepared: Option<(Box<IncrementEnd>, u64)>,
}

impl Shadow {
    pub fn restored(state: ShadowState) -> Self {
        Shadow { state, edits: Vec::new(), crcs: Vec::new(), leaves: 0, prepared: None }
    }

    fn push(&mut self, edit: Edit) {
        let before = self.edits.last().map(|before| (before.lba, before.blocks));
        self.leaves += more_leaves(before, (edit.lba, edit.blocks));
        self.edits.push(edit);
    }

    /// Without the edits that were not merged: a commit merges them first.
    pub fn state(&self) -> ShadowState {
        self.state.clone()
    }

    pub fn progress(&self) -> (u64, Lsn, u64) {
        (self.state.rebuild, self.state.from, self.state.cursor)
    }

    /// LSN of the last snapshot that it is complete for, or its start.
    pub fn cut(&self) -> Lsn {
        let newest = self.state.snapshots.iter().map(|s| s.info.lsn).max();
        newest.map_or(self.state.from, |lsn| lsn.max(self.state.from))
    }

    pub fn roots(&self) -> impl Iterator<Item = Root> + '_ {
        std::iter::once(self.state.root).chain(self.state.snapshots.iter().map(|s| s.root))
    }

    pub fn roots_mut(&mut self) -> impl Iterator<Item = &mut Root> {
        let snapshots = self.state.snapshots.iter_mut().map(|s| &mut s.root);
        std::iter::once(&mut self.state.root).chain(snapshots)
    }
}

/// Leaves that a stretch is in, without the one in which the stretch before it ends. Stretches are
/// an LBA and blocks, one at least.
fn more_leaves(before: Option<(u64, u32)>, stretch: (u64, u32)) -> u64 {
    let last_of = |(lba, blocks): (u64, u32)| {
        lba.saturating_add(u64::from(blocks).saturating_sub(1)) >> LEAF_SHIFT
    };
    let first = stretch.0 >> LEAF_SHIFT;
    let is_other = before.is_none_or(|before| last_of(before) != first);
    last_of(stretch) - first + u64::from(is_other)
}

/// How many of these blocks an answer has room for that is `bytes_max` away from its end, at
/// least one, and what they take of it.
fn affordable(found: &[BlockAt], from: Lsn, bytes_max: usize, want_data: bool) -> (usize, usize) {
    let mut cost = 0;
    for (i, block) in found.iter().enumerate() {
        if cost >= bytes_max && i > 0 {
            return (i, cost);
        }
        let goes_on = i > 0 && block.place == 0 && found[i - 1] == *block;
        if block.version <= from.0 || goes_on {
            continue;
        }
        let counted = block.place != 0 || !mutant::is("holes-of-a-pull-not-counted");
        cost += if counted { SLOT_BYTES } else { 0 };
        cost += if block.place == 0 || !want_data { 0 } else { BLOCK_SIZE };
    }
    (found.len(), cost)
}

impl Replica {
    /// A rebuild from nothing is over, or given up.
    fn end_table_of_flip(&mut self) {
        self.family.segments.next[Successor::AtFlip as usize] = None;
    }

    fn shadow_of(&mut self, rebuild: u64) -> Result<&mut Shadow, StoreError> {
        let shadow = self.shadow.as_mut().filter(|s| s.state.rebuild == rebuild);
        shadow.ok_or(StoreError::Rule("no such increment was begun"))
    }

    pub fn increment_begin<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        rebuild: u64,
        from: Lsn,
    ) -> Result<bool, StoreError> {
        core.check_usable()?;
        self.maintenance.fold_for_increment = None;
        let resumed = self.shadow.as_ref().map(|s| &s.state);
        let resumed = resumed.filter(|state| (state.rebuild, state.from) == (rebuild, from));
        if let Some(state) = resumed {
            if from > Lsn::ZERO || mutant::is("table-of-a-flip-in-one-step") {
                return Ok(true);
            }
            let first_sequence = state.first_sequence;
            self.begin_next_table(Successor::AtFlip, first_sequence, false);
            return Ok(self.step_next_table(core, Successor::AtFlip)? != NextStep::GoesOn);
        }
        if from > self.stable {
            return Err(StoreError::Rule("an increment starts above stable"));
        }
        let Some((root, snapshots)) = self.shadow_start(core, from)? else {
            self.maintenance.fold_for_increment = Some(from.0);
            return Ok(false);
        };
        if self.shadow.take().is_some() {
            // Blocks and nodes that the abandoned shadow wrote are dead now.
            self.maintenance.count.request();
        }
        // The shadow's blocks and nodes begin in segments of their own, which an abandoned or a
        // complete shadow then gives back as a whole.
        self.io(core).flush()?;
        self.family.close(Stream::Moved);
        self.family.close(Stream::Nodes);
        let (cursor, first_sequence) = (0, core.sequence + 1);
        let state = ShadowState { rebuild, from, cursor, root, snapshots, first_sequence };
        self.shadow = Some(Shadow::restored(state));
        self.end_table_of_flip();
        if from == Lsn::ZERO && !mutant::is("table-of-a-flip-in-one-step") {
            self.begin_next_table(Successor::AtFlip, first_sequence, true);
        }
        self.family.changes += 1;
        self.maintenance.dirty = true;
        Ok(true)
    }

    /// Drops the increment of a replica that gets entries again. Its blocks are dead now, and no
    /// other step requests the count. A crash may bring it back, until the next entry. A prepared
    /// increment ends as well: its session was cut before the flip, which would now go back behind
    /// the entry, and while it waits neither fold nor commit gives anything back.
    pub fn abandon_shadow(&mut self) {
        if self.shadow.take().is_some() {
            self.end_table_of_flip();
            self.maintenance.count.request();
            self.maintenance.dirty = true;
            self.family.changes += 1;
        }
    }

    /// The map at `from` and the snapshots up to there. `None`: the log up to there is not folded
    /// yet; a step of that was done.
    fn shadow_start<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        from: Lsn,
    ) -> Result<Option<(Root, Vec<SnapshotState>)>, StoreError> {
        if from == Lsn::ZERO {
            return Ok(Some((Root::default(), Vec::new())));
        }
        if self.folded.head.position.lsn < from && !self.fold_towards(core, from)? {
            return Ok(None);
        }
        let folded = self.folded.head.position.lsn;
        let snapshot = self.folded.snapshots.iter().find(|s| s.info.lsn == from).map(|s| s.root);
        let root = match snapshot {
            Some(root) => root,
            None if from == folded => self.folded.root,
            None => return Err(StoreError::Rule("an increment starts at an unknown point")),
        };
        let older = self.folded.snapshots.iter().filter(|s| s.info.lsn <= from);
        Ok(Some((root, older.cloned().collect())))
    }

    /// Does one step of the fold up to `from`, or of the one under way; true once it is done.
    fn fold_towards<D: Disk>(&mut self, core: &mut Core<D>, from: Lsn) -> Result<bool, StoreError> {
        self.family.changes += 1;
        self.begin_checkpoint_to(from.0);
        let all = mutant::is("increment-begun-in-one-step");
        let stepped = loop {
            match self.step_checkpoint(core) {
                Ok(false) if all => {}
                stepped => break stepped,
            }
        };
        if let Err(error) = stepped {
            // The counters include work towards a result that is dropped.
            self.maintenance.count.begin_anew();
            return Err(error);
        }
        Ok(self.folded.head.position.lsn >= from)
    }

    pub fn increment_feed<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
    ) -> Result<(), StoreError> {
        core.check_usable()?;
        self.shadow_of(rebuild)?;
        // All of their map may have to be looked at in one go.
        let (mut leaves, mut before) = (0, None);
        for slot in slots {
            leaves += more_leaves(before, (slot.lba, slot.blocks));
            before = Some((slot.lba, slot.blocks));
        }
        if leaves > LEAVES_A_FEED && !mutant::is("feeds-of-any-length") {
            return Err(StoreError::Rule(
                "a part of an increment is longer than what a pull finds",
            ));
        }
        let mut data = Vec::new();
        for slot in slots {
            match &slot.content {
                Content::Bad => return Err(StoreError::Rule("an increment carries a bad block")),
                Content::Data { crc, data: bytes } if bytes.len() == BLOCK_SIZE => {
                    let (lba, version, crc) = (slot.lba, slot.version.0, *crc);
                    data.push(MovedBlock { lba, version, crc, name: 0, bytes: bytes.clone() });
                }
                Content::Data { .. } => return Err(StoreError::Rule("a slot without its block")),
                Content::Hole => {}
            }
        }
        let places = self.write_moved(core, &data, Naming::Place, false)?;
        let mut written = data.iter().zip(places);
        for slot in slots {
            if slot.blocks == 0 {
                continue;
            }
            self.make_room_for_edit(core, slot.lba)?;
            let shadow = self.shadow_of(rebuild)?;
            let version = slot.version.0;
            let change = match slot.content {
                Content::Hole | Content::Bad => Change::Hole { version },
                Content::Data { crc, .. } => {
                    let (_, place) = written.next().expect("one place for each block");
                    shadow.crcs.push(crc);
                    Change::Data { version, place, crc_at: shadow.crcs.len() as u32 - 1 }
                }
            };
            shadow.push(Edit { lba: slot.lba, blocks: slot.blocks, change });
        }
        self.shadow_of(rebuild)?.state.cursor = cursor;
        self.maintenance.dirty = true;
        // Where there is no room now, there may be at the end.
        self.step_next_table(core, Successor::AtFlip).map(drop)
    }

    /// Merges what waits if it is much, or if an edit at `lba` would not follow it.
    fn make_room_for_edit<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        lba: u64,
    ) -> Result<(), StoreError> {
        let Some(shadow) = &self.shadow else { return Ok(()) };
        let end = shadow.edits.last().map_or(0, |e| e.lba + u64::from(e.blocks));
        let is_much = shadow.edits.len() >= EDITS_PENDING_MAX
            || shadow.leaves >= core.options.step_nodes as u64;
        if is_much || lba < end {
            self.merge_shadow(core)?;
        }
        Ok(())
    }

    /// Looks at the nodes that merging what waits reads.
    pub fn look_ahead_of_merge<D: Disk>(&mut self, core: &mut Core<D>) -> Result<(), StoreError> {
        let Some(shadow) = self.shadow.take() else { return Ok(()) };
        let (root, stretches) = (shadow.state.root, shadow.edits.iter().map(Edit::stretch));
        let looked = tree::look_ahead(&mut self.io(core), root, stretches, LEAVES_A_FEED as usize);
        self.shadow = Some(shadow);
        looked
    }

    pub fn merge_shadow<D: Disk>(&mut self, core: &mut Core<D>) -> Result<(), StoreError> {
        let Some(mut shadow) = self.shadow.take() else { return Ok(()) };
        let root = shadow.state.root;
        let merged = tree::update(&mut self.io(core), root, &shadow.edits, &shadow.crcs, None);
        if let Ok(root) = merged {
            shadow.state.root = root;
            shadow.edits.clear();
            shadow.crcs.clear();
            shadow.leaves = 0;
        }
        self.shadow = Some(shadow);
        merged.map(|_| ())
    }

    pub fn increment_cut<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        rebuild: u64,
        info: SnapshotInfo,
        head: &CutHead,
    ) -> Result<(), StoreError> {
        core.check_usable()?;
        self.shadow_of(rebuild)?;
        self.merge_shadow(core)?;
        let state = &mut self.shadow_of(rebuild)?.state;
        state.snapshots.retain(|s| s.info.id != info.id);
        if state.snapshots.len() >= quoin_types::message::SNAPSHOTS_MAX {
            return Err(StoreError::Rule("too many snapshots"));
        }
        let position = quoin_types::Position { epoch: head.head.epoch, lsn: info.lsn };
        let (root, chain, last_view) = (state.root, head.head.chain, head.last_view.clone());
        state.snapshots.push(SnapshotState { info, root, position, chain, last_view });
        state.cursor = 0;
        self.maintenance.dirty = true;
        Ok(())
    }

    pub fn increment_prepare<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        rebuild: u64,
        end: &IncrementEnd,
    ) -> Result<(), StoreError> {
        core.check_usable()?;
        let state = &self.shadow_of(rebuild)?.state;
        let complete = end.snapshots.iter().all(|wanted| {
            wanted.lsn == end.position.lsn || state.snapshots.iter().any(|s| s.info == *wanted)
        });
        if !complete {
            return Err(StoreError::Rule("an increment lacks a snapshot that its end lists"));
        }
        // From here to the flip no block and no node of the shadow may move: what the record
        // will refer to is what the next sync makes durable.
        self.maintenance.clean = None;
        self.merge_moved(core)?;
        self.merge_shadow(core)?;
        let state = &self.shadow_of(rebuild)?.state;
        let (empty_start, first_sequence) = (state.from == Lsn::ZERO, state.first_sequence);
        if empty_start {
            self.complete_table_of_flip(core, first_sequence)?;
        }
        self.io(core).flush()?;
        let ticket = core.tickets.request().0;
        self.shadow_of(rebuild)?.prepared = Some((Box::new(end.clone()), ticket));
        self.family.changes += 1;
        Ok(())
    }

    pub fn increment_flip<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        rebuild: u64,
    ) -> Result<(), StoreError> {
        core.check_usable()?;
        let synced = core.tickets.synced;
        let shadow = self.shadow_of(rebuild)?;
        let Some((end, ticket)) = &shadow.prepared else {
            return Err(StoreError::Rule("a flip without a prepared increment"));
        };
        if *ticket > synced && !mutant::is("flip-before-the-shadow-is-on-media") {
            return Err(StoreError::Rule("a flip before the increment is durable"));
        }
        let head = Head::from_end(end);
        let state = &shadow.state;
        let mut snapshots = state.snapshots.clone();
        snapshots.retain(|s| end.snapshots.contains(&s.info));
        for info in &end.snapshots {
            if !snapshots.iter().any(|s| s.info == *info) {
                snapshots.push(SnapshotState {
                    info: *info,
                    root: state.root,
                    position: head.position,
                    chain: head.chain,
                    last_view: head.last_view.clone(),
                });
            }
        }
        snapshots.sort_by_key(|s| s.info.lsn);
        let (root, first_sequence, empty_start) =
            (state.root, state.first_sequence, state.from == Lsn::ZERO);
        // A shadow that began empty shares nothing with what was there before, but for what clones
        // show of it.
        let keeps_bases =
            self.family.relatives.kept_through > 0 && !mutant::is("bases-forgotten-at-a-flip");
        let frees_old = empty_start && self.pins.is_empty() && !keeps_bases;
        let forgets = mutant::is("count-forgotten-at-a-flip");
        let of = &self.family.segments;
        let next = of.next[Successor::AtFlip as usize].as_ref();
        if frees_old && next.is_none() {
            return Err(StoreError::Rule("a flip without the table of its segments"));
        }
        let (segments, table): (Vec<SegmentState>, _) = match frees_old {
            true => (of.unrecorded_at_flip(), next.and_then(|next| next.state(!forgets))),
            false => (of.unrecorded(), self.table_state()),
        };
        let log = LogStart {
            index: self.family.log_end.next_index,
            previous: self.family.log_end.previous,
            ..LogStart::default()
        };
        let checkpoint = Checkpoint {
            root,
            head: head.clone(),
            stable: head.position.lsn,
            snapshots: snapshots.clone(),
            log,
            // Counters of the old map are too high: a start after a crash counts anew as well.
            segments: segments.into_iter().map(|s| s.recorded(!forgets)).collect(),
            sequence: core.sequence,
            shadow: None,
            table: table.map(|table| TableState { too_high: !forgets, ..table }),
            logical: core.logical_of(self.family.guid).state().map(|state| match frees_old {
                // The map is about segments that go.
                true => LogicalState { next: state.next, ..LogicalState::default() },
                false => state,
            }),
        };
        let mut relatives = self.relatives_state(core);
        if empty_start {
            // All of it is its own now.
            relatives.base = None;
        }
        let given_up = self.family.relatives.base.filter(|_| relatives.base.is_none());
        self.record_state(core, checkpoint.encode(), relatives.encode())?;
        let recorded = self.maintenance.take_given_up_bases();
        recorded.into_iter().for_each(|base| core.bases.end_use(base));
        if let Some(base) = given_up {
            self.family.relatives.base = None;
            self.maintenance.flatten = None;
            // What a transfer holds on to shows the base.
            self.pins.clear();
            core.bases.end_use(base);
        }

        let ticket = core.tickets.request().0;
        let ticket = if mutant::is("flip-frees-by-an-older-sync") { 0 } else { ticket };
        if frees_old {
            core.freed.add_all(ticket, self.family.segments.leave_older(first_sequence));
            core.logical_of(self.family.guid).begin_anew(self.family.segments.iter());
            self.family.segments.change_tables(Successor::AtFlip);
            // The one that was lost is given up with all else.
            self.family.segments.next = [None, None];
        }
        self.end_table_of_flip();
        let open = self.family.open;
        self.family.open = open.map(|u| u.filter(|u| self.family.segments.busy(*u).is_some()));
        self.family.close(Stream::Log);
        self.family.changes += 1;
        if let Some(commit) = self.maintenance.commit.take() {
            // Its record would bring the old state back.
            self.maintenance.pending_free.extend(commit.frees);
        }
        self.maintenance.fold_for_increment = None;
        self.maintenance.checkpoint = None;
        self.maintenance.clean = None;
        self.maintenance.quarantined = None;
        self.shadow = None;
        self.maintenance.count.begin_anew();
        self.maintenance.dirty = true;
        self.frozen.clear();
        self.stable = head.position.lsn;
        self.synced = Synced::default();
        core.tickets.written.add(self.identity.guid);
        self.log = Log::after(head.position.lsn);
        self.upper = Upper::default();
        self.folded = Image { head, root, snapshots };
        self.replay_head();
        self.family.forget_log_before(self.log_start().index);
        Ok(())
    }

    // ---- sending -------------------------------------------------------------------------

    #[allow(clippy::too_many_arguments)]
    pub fn pull<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        if view == ReadView::Base && cursor == 0 {
            let pin = Pin { root: self.folded.root, head: self.folded.head.clone() };
            self.pins.insert(session, pin);
        }
        let Some((source, size)) = self.pulled(session, view) else { return Ok(None) };
        let mut chunk = PullChunk::default();
        let (mut at, mut bytes, mut looked) = (cursor, 0, 0);
        // What later windows lack is fetched at the same time.
        let (mut lacking, mut leaves_lacking) = (Ok(()), 0);
        for window in 0.. {
            let Some((start, end)) = self.next_window(core, &source, from, at, size)? else {
                lacking?;
                let Some(head) = self.pulled_head(session, view) else { return Ok(None) };
                if view == ReadView::Base {
                    self.pins.remove(&session);
                }
                chunk.end = Some(Box::new(head.increment_end(self.snapshots.iter().copied())));
                return Ok(Some(chunk));
            };
            let is_full = bytes >= bytes_max as usize || chunk.slots.len() >= SLOTS_A_PULL;
            if is_full || window == WINDOWS_A_PULL || looked >= BLOCKS_A_PULL {
                lacking?;
                chunk.cursor = Some(start);
                return Ok(Some(chunk));
            }
            let found = self.find(core, &source, start, (end - start) as u32);
            if let Err(error) = may_lack(found)? {
                (lacking, leaves_lacking, at) = (Err(error), leaves_lacking + 1, end);
                if leaves_lacking == LEAVES_AHEAD {
                    return Err(error);
                }
                continue;
            }
            // Takes as many blocks as the rest of the budget pays for, at least one.
            let (blocks, cost) =
                affordable(&core.buffers.found, from, bytes_max as usize - bytes, want_data);
            core.buffers.found.truncate(blocks);
            let end = start + blocks as u64;
            (looked, bytes) = (looked + end - start, bytes + cost);
            let read = match from {
                // Version 0 is "never written": not a change.
                Lsn::ZERO => self.slots_written(core, view, start, want_data, &mut chunk.slots),
                _ => self.slots(core, view, start, from, want_data, &mut chunk.slots),
            };
            lacking = lacking.and(may_lack(read)?);
            at = end;
        }
        Ok(None)
    }

    fn slots_written<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: ReadView,
        lba: u64,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let first = out.len();
        let mut made = Vec::new();
        self.slots(core, view, lba, Lsn::ZERO, want_data, &mut made)?;
        made.retain(|s| s.version > Lsn::ZERO);
        for slot in made {
            crate::testing::model::push_slot(out, slot);
        }
        debug_assert!(out.len() >= first.saturating_sub(1));
        Ok(())
    }

    /// Where a view's blocks are found, and how many there are.
    fn pulled(&mut self, session: u64, view: ReadView) -> Option<(Source, u64)> {
        if view == ReadView::Base {
            let pin = self.pins.get(&session)?;
            return Some((Source::Root(pin.root), pin.head.volume_blocks));
        }
        let size = self.view_size(view)?;
        Some((self.source(view)?, size))
    }

    /// The history's head as of a view. Finding it may read all of the log, so it is requested
    /// once.
    fn pulled_head(&self, session: u64, view: ReadView) -> Option<Head> {
        match view {
            ReadView::Live => Some(self.head.clone()),
            ReadView::Base => self.pins.get(&session).map(|pin| pin.head.clone()),
            ReadView::Snapshot(id) => self.snapshot_head(id),
        }
    }

    /// The history's head as of a snapshot.
    fn snapshot_head(&self, id: quoin_types::SnapshotId) -> Option<Head> {
        let info = *self.snapshots.iter().find(|s| s.id == id)?;
        let Some(kept) = self.folded.snapshots.iter().find(|s| s.info.id == id) else {
            // Above the folded map the log decides.
            let mut head = self.folded.head.clone();
            for lsn in self.log.first_lsn()..=info.lsn.0 {
                let record = self.log.get(lsn)?;
                let kind = self.log.kind(lsn, record);
                head.apply(record.position(lsn), quoin_types::Chain(record.chain), &kind);
            }
            return Some(head);
        };
        let mut table = self.folded.head.epoch_table.clone();
        table.retain(|row| row.first <= info.lsn);
        if let Some(row) = table.last_mut()
            && row.last > info.lsn
        {
            (row.last, row.chain) = (info.lsn, kept.chain);
        }
        Some(Head {
            position: kept.position,
            chain: kept.chain,
            last_view: kept.last_view.clone(),
            volume_blocks: info.blocks,
            epoch_table: table,
        })
    }

    /// The next stretch, within one leaf, that may hold something newer than `from`.
    fn next_window<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        source: &Source,
        from: Lsn,
        at: u64,
        size: u64,
    ) -> Result<Option<(u64, u64)>, StoreError> {
        if at >= size {
            return Ok(None);
        }
        let root = match source {
            Source::Root(root) => *root,
            Source::Live | Source::Frozen(_) => self.folded.root,
        };
        let folded_from = match source {
            Source::Root(_) => Some(from.0),
            Source::Live => self.upper.folded_from(from.0),
            Source::Frozen(lsn) => self.frozen.get(*lsn).and_then(|u| u.folded_from(from.0)),
        };
        let parts = match folded_from {
            Some(from) => self.io(core).next_parts(root, from, at)?,
            None => Vec::new(),
        };
        let first = first_of(&parts, at);
        let below = first.map(|(start, _)| start);
        // No further than is used: what is not folded yet may all be older, and is passed over
        // again for each window.
        let upper = match source {
            Source::Root(_) => None,
            Source::Live => Some(&self.upper),
            Source::Frozen(lsn) => self.frozen.get(*lsn),
        };
        let until = below.map_or(size, |below| below + WINDOW_HOLE_BLOCKS_MAX);
        let above = upper.and_then(|u| u.next(at, until, from.0));
        let Some(start) = above.into_iter().chain(below).min().map(|s| s.max(at)) else {
            return Ok(None);
        };
        let leaf_end = (start / LEAF_BLOCKS as u64 + 1) * LEAF_BLOCKS as u64;
        // Holes that span many leaves come in longer stretches.
        let end = match first {
            Some((s, Some(end))) if s <= start && above.is_none() => {
                end.min(start + WINDOW_HOLE_BLOCKS_MAX)
            }
            _ => leaf_end,
        };
        Ok((start < size).then_some((start, end.min(size))))
    }

    pub fn repair<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: ReadView,
        lba: u64,
        version: Lsn,
        crc: u32,
        data: &Bytes,
    ) -> Result<bool, StoreError> {
        core.check_usable()?;
        let Some(size) = self.view_size(view) else { return Ok(false) };
        if lba >= size || data.len() != BLOCK_SIZE {
            return Ok(false);
        }
        let Some(source) = self.source(view) else { return Ok(false) };
        self.find(core, &source, lba, 1)?;
        let Some(block) = core.buffers.found.first().copied() else { return Ok(false) };
        let same = (block.version, block.crc) == (version.0, crc)
            || mutant::is("repair-of-another-version");
        let unplaced = matches!(block.place, 0 | BAD_PLACE | LOST_PLACE);
        if !same || unplaced || quoin_types::crc32c(data) != crc {
            return Ok(false);
        }
        // Version and checksum are the same: nothing good can be overwritten by it.
        core.write(block.place, &[std::io::IoSlice::new(data)])?;
        // Every view that shows this block has it mended.
        let bad = crate::core::BadBlock::block(self.identity.guid, lba, version);
        core.faults.bad.retain(|b| b.of(None) != bad);
        Ok(true)
    }
}
