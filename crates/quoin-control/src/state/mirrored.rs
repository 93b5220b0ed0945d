//! The tables of mirrors and of groups of volumes, and the transfers that are ordered now.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use quoin_api::control::{FeedOrder, MirrorSend};
use quoin_cluster::mirror::Role;
use quoin_cluster::mirror::answers::Health;
use quoin_cluster::records::{MirrorRecord, VolumeGroupRecord, VolumeRecord};
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};
use tokio::time::Instant;

use crate::Error;
use crate::state::State;
use crate::state::changes::Changes;
use crate::state::store::{Store, StoreError};
use crate::state::table::Table;

/// A transfer that its brain has not named for so long is sent no more.
const SENT_WITHIN: Duration = Duration::from_secs(5);
/// A look is made every second; figures of one that is older prove nothing good.
const LOOKED_WITHIN: Duration = Duration::from_secs(30);

/// Figures of a mirrored group, as its last look saw them.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub looked: Instant,
    /// Role that the other side had when it was heard last.
    pub peer_role: Option<Role>,
    pub is_silent: bool,
    /// Health of a primary.
    pub health: Health,
    /// Age at the look of what the other side has; `None`: it has no complete copy.
    pub lag_then: Option<Duration>,
    /// Time since which each look at this primary found it not healthy.
    pub ill_since: Option<Instant>,
    /// Nothing was written since the last common point, as far as each member's target knows.
    pub is_idle: bool,
    /// Members whose target has no mirror beside it: since when, and on which node.
    pub alone: BTreeMap<VolumeId, (Instant, String)>,
}

impl Figures {
    /// Age of what the other side has now, as far as the last look knows.
    pub fn lag(&self) -> Option<Duration> {
        self.lag_then.map(|lag| lag.saturating_add(self.looked.elapsed()))
    }

    /// Returns true if the last look is recent and found this primary healthy.
    pub fn is_healthy(&self) -> bool {
        self.health == Health::Healthy && self.looked.elapsed() < LOOKED_WITHIN
    }

    /// Returns true if a side with this role and its peer are both primary.
    pub fn is_split(&self, role: Role) -> bool {
        role == Role::Primary && self.peer_role == Some(Role::Primary)
    }
}

/// Count of what the primary of a group wrote since a point that both sides have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LagBytes {
    /// `None`: there is no such point yet.
    pub since: Option<PointId>,
    pub bytes: u64,
    /// Not all was counted.
    pub is_least: bool,
    pub counted: Instant,
    /// The primary on the other side counted it, when its wall clock was this at that moment.
    pub told: Option<(u64, Instant)>,
}

impl LagBytes {
    /// Wall clock of the side that told of it, as it is now by the time that passed since.
    pub fn their_now_ms(&self) -> Option<u64> {
        let (then_ms, at) = self.told?;
        Some(then_ms.saturating_add(u64::try_from(at.elapsed().as_millis()).unwrap_or(0)))
    }
}

/// Records of mirrors, and what is ordered by them.
pub(crate) struct Mirrored {
    pub records: Table<MirrorRecord>,
    pub groups: Table<VolumeGroupRecord>,
    /// Orders to take slots, by volumes. The next life of the brain gives them anew.
    feeds: Mutex<HashMap<VolumeId, FeedOrder>>,
    sends: Mutex<HashMap<VolumeId, (Instant, MirrorSend)>>,
    figures: Mutex<HashMap<GroupId, Figures>>,
    lags: Mutex<HashMap<GroupId, LagBytes>>,
    /// Makes the look at a volume or a name and the change that rests on it one step.
    pub changing: tokio::sync::Mutex<()>,
}

impl Mirrored {
    pub async fn load(store: &Arc<dyn Store>, changes: &Changes) -> Result<Self, StoreError> {
        Ok(Self {
            records: Table::load(store.clone(), changes.clone()).await?,
            groups: Table::load(store.clone(), changes.clone()).await?,
            feeds: Mutex::default(),
            sends: Mutex::default(),
            figures: Mutex::default(),
            lags: Mutex::default(),
            changing: tokio::sync::Mutex::new(()),
        })
    }

    pub async fn read_unanswered(&self) -> Result<(), Error> {
        self.records.read_unanswered().await?;
        self.groups.read_unanswered().await
    }

    /// The mirror that a volume's record names.
    pub fn of(&self, volume: &VolumeRecord) -> Option<Arc<MirrorRecord>> {
        let mirror = volume.mirror.as_ref()?;
        self.records.get(&mirror.group.0.to_string())
    }

    pub fn group(&self, id: GroupId) -> Option<Arc<MirrorRecord>> {
        self.records.get(&id.to_string())
    }

    /// Returns true for a copy that takes slots, now or soon: its target changes its content.
    pub fn is_fed(&self, volume: &VolumeRecord) -> bool {
        let record = volume.mirror.as_ref().and_then(|_| self.of(volume));
        record.is_some_and(|record| record.role() == Role::Secondary && !record.brain().is_own())
    }

    fn feeds(&self) -> MutexGuard<'_, HashMap<VolumeId, FeedOrder>> {
        self.feeds.lock().expect("no holder of this lock panics")
    }

    fn sends(&self) -> MutexGuard<'_, HashMap<VolumeId, (Instant, MirrorSend)>> {
        self.sends.lock().expect("no holder of this lock panics")
    }

    pub fn feed(&self, volume: VolumeId) -> Option<FeedOrder> {
        self.feeds().get(&volume).cloned()
    }

    /// Sets the order of a volume's target; true: it is another one than before.
    pub fn order_feed(&self, volume: VolumeId, order: FeedOrder) -> bool {
        self.feeds().insert(volume, order.clone()) != Some(order)
    }

    /// The transfer that is sent of a volume.
    pub fn send(&self, volume: VolumeId) -> Option<MirrorSend> {
        let sends = self.sends();
        let (at, send) = sends.get(&volume)?;
        (at.elapsed() < SENT_WITHIN).then(|| send.clone())
    }

    /// Sets what is sent of a volume; true: it was not sent before.
    pub fn order_send(&self, volume: VolumeId, send: MirrorSend) -> bool {
        let token = send.token.clone();
        let before = self.sends().insert(volume, (Instant::now(), send));
        before.is_none_or(|(at, before)| before.token != token || at.elapsed() >= SENT_WITHIN)
    }

    /// Volumes with something to send, and with something to take.
    pub fn transfers(&self) -> (Vec<MirrorSend>, Vec<(VolumeId, FeedOrder)>) {
        let mut sends = self.sends();
        sends.retain(|_, (at, _)| at.elapsed() < SENT_WITHIN);
        let feeds = self.feeds();
        let takes = feeds.iter().filter(|(_, order)| !order.token.is_empty());
        let takes = takes.map(|(volume, order)| (*volume, order.clone())).collect();
        (sends.values().map(|(_, send)| send.clone()).collect(), takes)
    }

    /// Copies that a peer has in this cluster, orphans counted, and their sizes together.
    pub fn copies_of(&self, state: &State, peer: &str) -> (u64, u64) {
        let is_of_peer = |volume: &VolumeRecord| {
            let Some(mirror) = volume.mirror.as_ref().filter(|mirror| !mirror.is_primary) else {
                return false;
            };
            match self.of(volume) {
                Some(record) => record.brain().peer.to_string() == peer,
                // The group is not recorded before its volumes are.
                None => mirror.cluster.0.to_string() == peer,
            }
        };
        let volumes = state.volumes.list();
        let copies = volumes.iter().filter(|volume| is_of_peer(volume));
        copies.fold((0, 0), |(count, bytes), volume| {
            (count + 1, volume.size_bytes.saturating_add(bytes))
        })
    }

    fn all_figures(&self) -> MutexGuard<'_, HashMap<GroupId, Figures>> {
        self.figures.lock().expect("no holder of this lock panics")
    }

    /// Figures of the last look at a group; `None`: it was not looked at, or it has no record any more.
    pub fn figures(&self, group: GroupId) -> Option<Figures> {
        self.all_figures().get(&group).cloned()
    }

    /// Keeps the figures of a look.
    pub fn note(&self, group: GroupId, figures: Figures) {
        self.all_figures().insert(group, figures);
    }

    /// The group has no record any more.
    pub fn forget_group(&self, group: GroupId) {
        self.all_figures().remove(&group);
        self.lags().remove(&group);
    }

    fn lags(&self) -> MutexGuard<'_, HashMap<GroupId, LagBytes>> {
        self.lags.lock().expect("no holder of this lock panics")
    }

    /// The last count of what the other side, or a promoted copy, would not have.
    pub fn lag_bytes(&self, group: GroupId) -> Option<LagBytes> {
        self.lags().get(&group).copied()
    }

    /// Keeps a count; true: it says something new.
    pub fn note_lag(&self, group: GroupId, lag: LagBytes) -> bool {
        let known = self.lags().insert(group, lag);
        let told = |lag: LagBytes| (lag.since, lag.bytes, lag.is_least);
        known.map(told) != Some(told(lag))
    }

    /// The volume is mirrored no more.
    pub fn forget(&self, volume: VolumeId) {
        self.feeds().remove(&volume);
        self.sends().remove(&volume);
    }
}
