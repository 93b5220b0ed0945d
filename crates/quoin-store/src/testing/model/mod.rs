//! The store as a plain value in memory: the reference that the real store is compared with.
//!
//! The model promises what [`ReplicaStore`] promises and nothing more, by the shortest code that
//! can be read at a glance: maps are copied, the log is a vector. The model can lose its power: all
//! changes since the last completed sync are remembered as operations, and
//! [`ModelPool::power_cut`] keeps a prefix of them (of the log's and of the small state's
//! operations separately, as they are in different places of a disk).

mod pool;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{
    CloneSource, FetchTicket, PullChunk, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
    StoreState, SyncTicket, Upcoming,
};
use quoin_types::message::{
    Content, CutHead, EpochEnd, IncrementEnd, ReadView, Slot, SnapshotHead, SnapshotInfo,
};
use quoin_types::{
    BLOCK_SIZE, Chain, ClientTable, Entry, EntryKind, Epoch, Lsn, Position, entry::SharedEntry,
};

use crate::log::history::Head;
use crate::metadata::tickets::Tickets;
use crate::replica::slots::{push_slot, without_bytes};

pub use pool::ModelPool;

/// Entries ≤ stable that the model keeps in its log.
const LOG_KEPT: usize = 64;

/// Version and, unless it is a hole, checksum and bytes of a block.
type ModelBlock = (Lsn, Option<(u32, Bytes)>);
type Map = Arc<BTreeMap<u64, ModelBlock>>;

/// A volume's content and history at one LSN.
#[derive(Clone, Default)]
struct Image {
    head: Head,
    live: Map,
    snapshots: Vec<Snapshot>,
}

#[derive(Clone)]
struct Snapshot {
    info: SnapshotInfo,
    map: Map,
    head: Head,
}

impl Image {
    fn apply(&mut self, entry: &Entry) {
        let range = entry.lba..entry.lba + u64::from(entry.blocks);
        match &entry.kind {
            EntryKind::Write => {
                let live = Arc::make_mut(&mut self.live);
                for (i, lba) in range.enumerate() {
                    let data = entry.data.slice(i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE);
                    live.insert(lba, (entry.lsn, Some((entry.crcs[i], data))));
                }
            }
            EntryKind::Trim | EntryKind::Zero { .. } => {
                let live = Arc::make_mut(&mut self.live);
                live.extend(range.map(|lba| (lba, (entry.lsn, None))));
            }
            EntryKind::DeleteSnapshot { id } => self.snapshots.retain(|s| s.info.id != *id),
            EntryKind::Revert { id } => {
                if let Some(s) = self.snapshots.iter().find(|s| s.info.id == *id) {
                    let (kept, since) = (s.map.clone(), s.info.lsn);
                    let live = Arc::make_mut(&mut self.live);
                    for (lba, block) in live.iter_mut().filter(|(_, b)| b.0 > since) {
                        *block = (entry.lsn, kept.get(lba).and_then(|(_, data)| data.clone()));
                    }
                }
            }
            EntryKind::Snapshot { .. }
            | EntryKind::Resize { .. }
            | EntryKind::View(_)
            | EntryKind::BeginClient { .. }
            | EntryKind::EndClient { .. } => {}
        }
        self.head.apply(entry.position(), entry.chain, &entry.kind, entry.part.as_ref());
        if let EntryKind::Snapshot { id, hidden } = entry.kind {
            let (lsn, blocks) = (entry.lsn, self.head.volume_blocks);
            let info = SnapshotInfo { id, lsn, hidden, blocks };
            let (map, head) = (self.live.clone(), self.head.clone());
            self.snapshots.push(Snapshot { info, map, head });
        }
    }

    fn infos(&self) -> impl Iterator<Item = SnapshotInfo> {
        self.snapshots.iter().map(|s| s.info)
    }
}

#[derive(Clone)]
struct Shadow {
    rebuild: u64,
    from: Lsn,
    cursor: u64,
    map: Map,
    snapshots: Vec<Snapshot>,
    prepared: Option<Box<IncrementEnd>>,
}

/// State that a power cut can take back, without the small state.
#[derive(Clone, Default)]
struct Storage {
    base: Image,
    now: Image,
    log: Vec<SharedEntry>,
    stable: Lsn,
    shadow: Option<Shadow>,
}

#[derive(Clone)]
enum Operation {
    Append(Vec<SharedEntry>),
    Truncate(Lsn),
    Stable(Lsn),
    ShadowBegin { rebuild: u64, from: Lsn },
    ShadowFeed { slots: Vec<Slot>, cursor: u64 },
    ShadowCut(SnapshotInfo, CutHead),
    ShadowPrepare(Box<IncrementEnd>),
    Flip,
}

impl Storage {
    fn image_at(&self, lsn: Lsn) -> Option<Image> {
        if lsn < self.base.head.position.lsn {
            return None;
        }
        let mut image = self.base.clone();
        for entry in self.log.iter().take_while(|e| e.lsn <= lsn) {
            image.apply(entry);
        }
        Some(image)
    }

    fn check(&self, operation: &Operation) -> Result<(), StoreError> {
        let rule =
            |ok: bool, text: &'static str| if ok { Ok(()) } else { Err(StoreError::Rule(text)) };
        match operation {
            Operation::Append(entries) => {
                self.now.head.check_append(self.now.snapshots.len(), entries)
            }
            Operation::Truncate(keep) => {
                rule(*keep >= self.stable, "truncation below stable (StableNeverCut)")?;
                rule(*keep <= self.now.head.position.lsn, "truncation behind the end of the log")
            }
            Operation::Stable(_) => Ok(()),
            Operation::ShadowBegin { from, .. } => {
                rule(*from <= self.stable, "an increment starts above stable")?;
                rule(self.shadow_start(*from).is_some(), "an increment starts at an unknown point")
            }
            Operation::ShadowFeed { slots, .. } => {
                let bad = slots.iter().any(|s| s.content == Content::Bad);
                rule(!bad, "an increment carries a bad block")
            }
            Operation::ShadowCut(..) => Ok(()),
            Operation::ShadowPrepare(end) => {
                let Some(shadow) = &self.shadow else { return Ok(()) };
                let complete = end.snapshots.iter().all(|wanted| {
                    wanted.lsn == end.position.lsn
                        || shadow.snapshots.iter().any(|s| s.info == *wanted)
                });
                rule(complete, "an increment lacks a snapshot that its end lists")
            }
            Operation::Flip => rule(
                self.shadow.as_ref().is_some_and(|s| s.prepared.is_some()),
                "a flip without a prepared increment",
            ),
        }
    }

    /// Where a shadow may start: nothing, a snapshot, or what the base and the log still tell.
    fn shadow_start(&self, from: Lsn) -> Option<(Map, Vec<Snapshot>)> {
        if from == Lsn::ZERO {
            return Some(Default::default());
        }
        let older = |image: &Image| -> Vec<Snapshot> {
            image.snapshots.iter().filter(|s| s.info.lsn <= from).cloned().collect()
        };
        if let Some(s) = self.now.snapshots.iter().find(|s| s.info.lsn == from) {
            return Some((s.map.clone(), older(&self.now)));
        }
        self.image_at(from).map(|image| (image.live.clone(), older(&image)))
    }

    /// Operations were checked when they were made.
    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Append(entries) => {
                self.shadow = None;
                for entry in entries {
                    self.now.apply(entry);
                    self.log.push(entry.clone());
                }
            }
            Operation::Truncate(keep) => {
                if let Some(image) = self.image_at(*keep) {
                    self.now = image;
                    self.log.retain(|e| e.lsn <= *keep);
                }
            }
            Operation::Stable(stable) => {
                self.stable = self.stable.max(*stable).min(self.now.head.position.lsn);
                let fold = self.log.iter().take_while(|e| e.lsn <= self.stable).count();
                for entry in self.log.drain(..fold.saturating_sub(LOG_KEPT)) {
                    self.base.apply(&entry);
                }
            }
            Operation::ShadowBegin { rebuild, from } => {
                if let Some((map, snapshots)) = self.shadow_start(*from) {
                    let (rebuild, from, cursor) = (*rebuild, *from, 0);
                    let prepared = None;
                    self.shadow = Some(Shadow { rebuild, from, cursor, map, snapshots, prepared });
                }
            }
            Operation::ShadowFeed { slots, cursor } => {
                let Some(shadow) = &mut self.shadow else { return };
                shadow.cursor = *cursor;
                let map = Arc::make_mut(&mut shadow.map);
                for slot in slots {
                    let data = match &slot.content {
                        Content::Data { crc, data } => Some((*crc, data.clone())),
                        Content::Hole | Content::Bad => None,
                    };
                    for lba in slot.lba..slot.lba + u64::from(slot.blocks) {
                        map.insert(lba, (slot.version, data.clone()));
                    }
                }
            }
            Operation::ShadowCut(info, cut) => {
                let Some(shadow) = &mut self.shadow else { return };
                shadow.snapshots.retain(|s| s.info.id != info.id);
                let map = shadow.map.clone();
                let position = Position { epoch: cut.head.epoch, lsn: info.lsn };
                let (chain, last_view) = (cut.head.chain, cut.last_view.clone());
                let volume_blocks = info.blocks;
                let head = Head { position, chain, last_view, volume_blocks, ..Head::default() };
                shadow.snapshots.push(Snapshot { info: *info, map, head });
                shadow.cursor = 0;
            }
            Operation::ShadowPrepare(end) => {
                if let Some(shadow) = &mut self.shadow {
                    shadow.prepared = Some(end.clone());
                }
            }
            Operation::Flip => {
                let Some(shadow) = self.shadow.take() else { return };
                let Some(end) = shadow.prepared else { return };
                let head = Head::from_end(&end);
                let mut snapshots = shadow.snapshots;
                snapshots.retain(|s| end.snapshots.contains(&s.info));
                for info in &end.snapshots {
                    if !snapshots.iter().any(|s| s.info == *info) {
                        let (map, head) = (shadow.map.clone(), head.clone());
                        snapshots.push(Snapshot { info: *info, map, head });
                    }
                }
                snapshots.sort_by_key(|s| s.info.lsn);
                self.stable = head.position.lsn;
                self.log.clear();
                self.now = Image { head, live: shadow.map, snapshots };
                self.base = self.now.clone();
            }
        }
    }
}

/// Replica of the model.
pub struct ModelReplica {
    identity: ReplicaIdentity,
    meta: ReplicaMeta,
    now: Storage,
    pins: BTreeMap<u64, Image>,
    /// State and small state as of the last completed sync, and what came after it.
    durable: Storage,
    durable_meta: ReplicaMeta,
    operations: Vec<Operation>,
    metas: Vec<ReplicaMeta>,
    /// How many operations and metas the sync under way covers.
    syncing: (usize, usize),
    /// Blocks whose copy fails its checksum, set by tests and simulators.
    bad: BTreeSet<(u64, Lsn)>,
    /// Steps of folding until an increment begins, set by tests.
    fold_steps: u32,
}

impl ModelReplica {
    fn new(identity: ReplicaIdentity, meta: ReplicaMeta, blocks: u64) -> Self {
        let head = Head { volume_blocks: blocks, ..Head::default() };
        Self::begun_with(identity, meta, Image { head, ..Image::default() })
    }

    /// A replica whose history begins with this state.
    fn begun_with(identity: ReplicaIdentity, meta: ReplicaMeta, image: Image) -> Self {
        let stable = image.head.position.lsn;
        let now = Storage { base: image.clone(), now: image, stable, ..Storage::default() };
        Self {
            identity,
            durable_meta: meta.clone(),
            meta,
            durable: now.clone(),
            now,
            pins: BTreeMap::new(),
            operations: Vec::new(),
            metas: Vec::new(),
            syncing: (0, 0),
            bad: BTreeSet::new(),
            fold_steps: 0,
        }
    }

    /// The state with which a clone of a snapshot begins, if the snapshot is here.
    fn clone_of(&self, source: &CloneSource, blocks: u64) -> Option<Image> {
        let kept = self.now.now.snapshots.iter().find(|s| s.info.id == source.snapshot)?;
        let lsn = kept.info.lsn;
        let mut head = Head { volume_blocks: blocks, ..Head::default() };
        let chain = Chain::of_clone(source.volume, source.snapshot, lsn, kept.head.chain);
        head.advance(Position { epoch: Epoch::ZERO, lsn }, chain);
        Some(Image { head, live: kept.map.clone(), snapshots: Vec::new() })
    }

    fn run(&mut self, operation: Operation) -> Result<(), StoreError> {
        self.now.check(&operation)?;
        self.now.apply(&operation);
        self.operations.push(operation);
        Ok(())
    }

    fn make_durable(&mut self, operations: usize, metas: usize) {
        for operation in self.operations.drain(..operations) {
            self.durable.apply(&operation);
        }
        if let Some(meta) = self.metas.drain(..metas).next_back() {
            self.durable_meta = meta;
        }
    }

    fn shadow_of(&self, rebuild: u64) -> Result<&Shadow, StoreError> {
        let shadow = self.now.shadow.as_ref().filter(|s| s.rebuild == rebuild);
        shadow.ok_or(StoreError::Rule("no such increment was begun"))
    }

    fn view(&self, view: ReadView) -> Option<(&Map, u64)> {
        match view {
            ReadView::Live => Some((&self.now.now.live, self.now.now.head.volume_blocks)),
            ReadView::Base => Some((&self.now.base.live, self.now.base.head.volume_blocks)),
            ReadView::Snapshot(id) => self
                .now
                .now
                .snapshots
                .iter()
                .find(|s| s.info.id == id)
                .map(|s| (&s.map, s.info.blocks)),
        }
    }

    fn slot(&self, map: &Map, lba: u64, want_data: bool) -> Slot {
        let (version, content) = match map.get(&lba) {
            None => (Lsn::ZERO, Content::Hole),
            Some((version, None)) => (*version, Content::Hole),
            Some((version, Some(_))) if self.bad.contains(&(lba, *version)) => {
                (*version, Content::Bad)
            }
            Some((version, Some((crc, data)))) => {
                let data = if want_data { data.clone() } else { Bytes::new() };
                (*version, Content::Data { crc: *crc, data })
            }
        };
        Slot { lba, blocks: 1, version, content }
    }

    /// Lets the next increment begin after so many steps of folding.
    pub fn set_fold_steps(&mut self, steps: u32) {
        self.fold_steps = steps;
    }

    /// Makes the copy of a block bad, as rot would; false if the live block is a hole.
    pub fn spoil(&mut self, lba: u64) -> bool {
        self.spoil_in(ReadView::Live, lba)
    }

    /// The same of the block that a view shows.
    pub fn spoil_in(&mut self, view: ReadView, lba: u64) -> bool {
        match self.view(view).and_then(|(map, _)| map.get(&lba)) {
            Some((version, Some(_))) => self.bad.insert((lba, *version)),
            _ => false,
        }
    }

    /// Makes the copy of a block another one of the same version, with a checksum that fits: what
    /// no rot does, and no correct replica. False if the live block is a hole.
    pub fn forge(&mut self, lba: u64, fill: u8) -> bool {
        match Arc::make_mut(&mut self.now.now.live).get_mut(&lba) {
            Some((_, Some(copy))) => {
                let data = Bytes::from(vec![fill; BLOCK_SIZE]);
                *copy = (quoin_types::crc32c(&data), data);
                true
            }
            _ => false,
        }
    }
}

/// A replica of the model in its pool.
pub struct ModelHandle<'a> {
    replica: &'a mut ModelReplica,
    tickets: &'a mut Tickets,
    slow_reads: &'a mut SlowReads,
}

/// A disk under the model that has nothing at hand, while this is on.
#[derive(Default)]
pub struct SlowReads {
    pub on: bool,
    /// Number of the last call that was told to wait.
    pub last: FetchTicket,
}

impl SlowReads {
    fn check(&mut self) -> Result<(), StoreError> {
        if !self.on {
            return Ok(());
        }
        self.last.0 += 1;
        Err(StoreError::Pending(self.last))
    }
}

impl std::ops::Deref for ModelHandle<'_> {
    type Target = ModelReplica;
    fn deref(&self) -> &ModelReplica {
        self.replica
    }
}

impl std::ops::DerefMut for ModelHandle<'_> {
    fn deref_mut(&mut self) -> &mut ModelReplica {
        self.replica
    }
}

impl ReplicaStore for ModelHandle<'_> {
    fn identity(&self) -> &ReplicaIdentity {
        &self.replica.identity
    }

    fn meta(&self) -> &ReplicaMeta {
        &self.replica.meta
    }

    fn put_meta(&mut self, meta: ReplicaMeta) -> Result<(), StoreError> {
        self.metas.push(meta.clone());
        self.replica.meta = meta;
        Ok(())
    }

    fn state(&self) -> StoreState {
        let head = &self.now.now.head;
        StoreState {
            position: head.position,
            chain: head.chain,
            stable: self.now.stable,
            base: self.now.base.head.position.lsn,
            last_view: head.last_view.clone(),
            volume_blocks: head.volume_blocks,
        }
    }

    fn epoch_table(&self) -> Vec<EpochEnd> {
        self.now.now.head.epoch_table.clone()
    }
    fn clients(&self) -> ClientTable {
        self.now.now.head.clients.clone()
    }

    fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.now.now.infos().collect()
    }

    fn snapshot_heads(&self) -> Vec<SnapshotHead> {
        let head =
            |s: &Snapshot| SnapshotHead { epoch: s.head.position.epoch, chain: s.head.chain };
        self.now.now.snapshots.iter().map(head).collect()
    }

    fn append(&mut self, entries: &[SharedEntry]) -> Result<(), StoreError> {
        self.run(Operation::Append(entries.to_vec()))
    }

    /// Does nothing: the model is never full.
    fn owe_before(&mut self, _epoch: Epoch) {}

    fn truncate(&mut self, keep: Lsn) -> Result<(), StoreError> {
        self.run(Operation::Truncate(keep))
    }

    fn set_stable(&mut self, stable: Lsn) {
        if stable > self.now.stable {
            let done = self.run(Operation::Stable(stable));
            debug_assert!(done.is_ok());
        }
    }

    fn request_sync(&mut self) -> SyncTicket {
        self.tickets.request_for(self.replica.identity.guid)
    }

    fn read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let (map, size) = self.view(view).ok_or(StoreError::Rule("no such view"))?;
        let end = lba.checked_add(u64::from(blocks)).filter(|end| *end <= size);
        let end = end.ok_or(StoreError::Rule("a read outside the view"))?;
        for lba in lba..end {
            push_slot(out, self.slot(map, lba, want_data));
        }
        Ok(())
    }

    fn try_read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.slow_reads.check()?;
        self.read(view, lba, blocks, want_data, out)
    }

    fn try_fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        self.slow_reads.check()?;
        self.fetch(after, bytes_max)
    }

    fn look_ahead(&mut self, _upcoming: Upcoming<'_>) -> Result<(), StoreError> {
        self.slow_reads.check()
    }

    fn try_pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        self.slow_reads.check()?;
        self.pull(session, view, from, cursor, bytes_max, want_data)
    }

    fn verify(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        _note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let mut left = bytes_max;
        for at in lba..lba.saturating_add(blocks.into()) {
            let mut slots = Vec::new();
            self.read(view, at, 1, true, &mut slots)?;
            for mut slot in slots {
                if !matches!(slot.content, Content::Hole) {
                    left = left.saturating_sub(BLOCK_SIZE as u32);
                }
                without_bytes(&mut slot);
                push_slot(out, slot);
            }
            if left == 0 {
                break;
            }
        }
        Ok(())
    }

    fn fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        if after < self.now.base.head.position.lsn {
            return Ok(None);
        }
        let mut bytes = 0;
        let entries = self.now.log.iter().filter(|e| e.lsn > after).take_while(|e| {
            let fits = bytes == 0 || bytes + e.weight() <= bytes_max as usize;
            bytes += e.weight();
            fits
        });
        Ok(Some(entries.cloned().collect()))
    }

    fn pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        if view == ReadView::Base && cursor == 0 {
            let base = self.now.base.clone();
            self.pins.insert(session, base);
        }
        let pulled = match view {
            ReadView::Base => self.pins.get(&session).map(|i| (i.live.clone(), i.head.clone())),
            ReadView::Live => Some((self.now.now.live.clone(), self.now.now.head.clone())),
            ReadView::Snapshot(id) => {
                let found = self.now.now.snapshots.iter().find(|s| s.info.id == id);
                found.map(|s| (s.map.clone(), s.head.clone()))
            }
        };
        let Some((map, head)) = pulled else { return Ok(None) };
        let mut chunk = PullChunk::default();
        let mut bytes = 0;
        for (lba, (version, _)) in map.range(cursor..) {
            if *version <= from || *lba >= head.volume_blocks {
                continue;
            }
            if bytes >= bytes_max as usize {
                chunk.cursor = Some(*lba);
                return Ok(Some(chunk));
            }
            let slot = self.slot(&map, *lba, want_data);
            bytes += if slot.content == Content::Hole { 24 } else { BLOCK_SIZE };
            push_slot(&mut chunk.slots, slot);
        }
        if view == ReadView::Base {
            self.pins.remove(&session);
        }
        chunk.end = Some(Box::new(head.increment_end(self.now.now.infos())));
        Ok(Some(chunk))
    }

    fn unpin(&mut self, session: u64) {
        self.pins.remove(&session);
    }

    fn shadow(&self) -> Option<(u64, Lsn, u64)> {
        self.now.shadow.as_ref().map(|s| (s.rebuild, s.from, s.cursor))
    }

    fn shadow_cut(&self) -> Option<Lsn> {
        let shadow = self.now.shadow.as_ref()?;
        let newest = shadow.snapshots.iter().map(|s| s.info.lsn).max();
        Some(newest.map_or(shadow.from, |lsn| lsn.max(shadow.from)))
    }

    fn increment_begin(&mut self, rebuild: u64, from: Lsn) -> Result<bool, StoreError> {
        match &self.now.shadow {
            Some(s) if s.rebuild == rebuild && s.from == from => {}
            _ if self.fold_steps > 0 => {
                self.fold_steps -= 1;
                return Ok(false);
            }
            _ => self.run(Operation::ShadowBegin { rebuild, from })?,
        }
        Ok(true)
    }

    fn increment_feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
    ) -> Result<(), StoreError> {
        self.shadow_of(rebuild)?;
        self.run(Operation::ShadowFeed { slots: slots.to_vec(), cursor })
    }

    fn increment_cut(
        &mut self,
        rebuild: u64,
        snapshot: SnapshotInfo,
        head: &CutHead,
    ) -> Result<(), StoreError> {
        self.shadow_of(rebuild)?;
        self.run(Operation::ShadowCut(snapshot, head.clone()))
    }

    fn increment_prepare(&mut self, rebuild: u64, end: &IncrementEnd) -> Result<(), StoreError> {
        self.shadow_of(rebuild)?;
        self.run(Operation::ShadowPrepare(Box::new(end.clone())))
    }

    fn increment_flip(&mut self, rebuild: u64) -> Result<(), StoreError> {
        self.shadow_of(rebuild)?;
        self.run(Operation::Flip)
    }

    fn repair(
        &mut self,
        view: ReadView,
        lba: u64,
        version: Lsn,
        crc: u32,
        _data: &Bytes,
    ) -> Result<bool, StoreError> {
        let Some((map, _)) = self.view(view) else { return Ok(false) };
        match map.get(&lba) {
            Some((v, Some((c, _)))) if *v == version && *c == crc => {
                self.bad.remove(&(lba, version));
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// The model has no map that could be damaged: it is whole.
    fn mend(&mut self, _: ReadView, _lba: u64, _slots: &[Slot]) -> Result<bool, StoreError> {
        Ok(true)
    }
}
