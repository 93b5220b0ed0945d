//! The driver of the brains: each mirrored group has one, which gets its events here and whose actions are
//! carried out one after the other.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use prost::Message as _;
use quoin_api::control::{
    MirrorAssignment, MirrorSent, MirrorTake, PeerMessage, PeerWord, peer_word,
};
use quoin_cluster::mirror::answers::{Answer, Call, Health};
use quoin_cluster::mirror::brain::Now;
use quoin_cluster::mirror::{Action, Brain, Event, Member, Order, Role, Stamp};
use quoin_cluster::records::MirrorRecord;
use quoin_encryption::Encryption;
use quoin_types::ids::{GroupId, PointId};
use quoin_types::{Time, VolumeId};
use tokio::sync::watch;
use tokio::time::Instant;

use super::memory::{Comparisons, Orphans};
use super::observe;
use crate::Error;
use crate::membership::peers::Peers;
use crate::reconcile::{Next, Queue, Reconciler};
use crate::snapshot;
use crate::snapshot::history::History;
use crate::snapshot::points::Points;
use crate::state::mirrored::Figures;
use crate::state::{State, random_id};
use crate::time::now_ms;
use crate::volume::volumes::Catalog;

/// Most groups in the queue.
const QUEUE_MAX: usize = 4096;
/// Between two looks at a group that is on its way, and at one that is at rest.
const SOON: Duration = Duration::from_millis(100);
const AT_REST: Duration = Duration::from_secs(1);
/// A peer is heard anew where that is so much later than before: its frames come every second.
const HEARD_APART: Duration = Duration::from_millis(500);
/// Changes of the record in one look.
const CHANGES_MAX: usize = 32;
/// Messages of peers that wait for one group, and those that wait for a link.
const INBOX_MAX: usize = 64;
const OUTBOX_MAX: usize = 4096;

/// A brain that lives here, with what belongs to its life.
pub(super) struct Live {
    pub brain: Brain,
    /// Version of the record that it goes by, and when that was made.
    version: u64,
    created_ms: u64,
    serial: u64,
    /// The last orders that were carried out for each member.
    pub stamps: HashMap<VolumeId, Stamp>,
    heard: Option<Instant>,
    /// A point that is being cut over several members.
    pub cutting: Option<PointId>,
    /// The copies were told to the peer at this time, with these key slots.
    pub introduced: Option<(Instant, Vec<Option<Encryption>>)>,
    /// Why the peer makes no copy.
    pub refused: String,
    /// Why an order was not carried out.
    pub failures: BTreeMap<VolumeId, String>,
}

/// All mirrored groups of this side.
pub struct Mirrors {
    pub(super) state: Arc<State>,
    pub(super) peers: Arc<Peers>,
    pub(super) catalog: Arc<Catalog>,
    pub(super) points: Arc<Points>,
    pub(super) history: History,
    pub(super) comparisons: Comparisons,
    pub(super) orphans: Orphans,
    queue: Arc<Queue<GroupId>>,
    lives: Mutex<HashMap<GroupId, Arc<tokio::sync::Mutex<Option<Live>>>>>,
    inbox: Mutex<HashMap<GroupId, VecDeque<Vec<u8>>>>,
    outbox: Mutex<VecDeque<PeerMessage>>,
    sent: Mutex<HashMap<VolumeId, (Instant, MirrorSent)>>,
    /// Raised where a mirror has something new to do.
    news: watch::Sender<u64>,
    begun: Instant,
}

impl Mirrors {
    pub(crate) fn new(
        state: Arc<State>,
        peers: Arc<Peers>,
        catalog: Arc<Catalog>,
        snapshots: &snapshot::Parts,
    ) -> Self {
        let queue = Arc::new(Queue::new(QUEUE_MAX));
        for record in state.mirrored.records.list() {
            queue.add(record.id.0, Duration::ZERO);
        }
        let (filled, of) = (queue.clone(), Arc::downgrade(&state));
        state.queue_volumes(move |volume| {
            let state = of.upgrade();
            let record = state.and_then(|state| state.volumes.get(&volume.to_string()));
            if let Some(mirror) = record.as_ref().and_then(|record| record.mirror.as_ref()) {
                filled.add(mirror.group.0, Duration::ZERO);
            }
        });
        Self {
            peers,
            catalog,
            points: snapshots.points.clone(),
            history: History::new(state.clone(), snapshots.catalog.clone()),
            comparisons: Comparisons::default(),
            orphans: Orphans::default(),
            state,
            queue,
            lives: Mutex::default(),
            inbox: Mutex::default(),
            outbox: Mutex::default(),
            sent: Mutex::default(),
            news: watch::Sender::default(),
            begun: Instant::now(),
        }
    }

    pub(super) fn now(&self) -> Now {
        let since = self.begun.elapsed().as_nanos();
        let time = Time(u64::try_from(since).unwrap_or(u64::MAX));
        Now { time, wall_ms: now_ms(), draw: random_id().max(1) }
    }

    /// Receiver for what mirrors have to do.
    pub(crate) fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    pub(super) fn tell_mirrors(&self) {
        self.news.send_modify(|count| *count += 1);
    }

    /// Has a group looked at.
    pub(crate) fn look_at(&self, group: GroupId) {
        self.queue.add(group, Duration::ZERO);
    }

    fn life(&self, group: GroupId) -> Arc<tokio::sync::Mutex<Option<Live>>> {
        let mut lives = self.lives.lock().expect("no holder of this lock panics");
        lives.entry(group).or_default().clone()
    }

    /// Forgets the life of a group that has no record any more.
    fn end(&self, group: GroupId) {
        self.lives.lock().expect("no holder of this lock panics").remove(&group);
        self.inbox().remove(&group);
        self.state.mirrored.forget_group(group);
    }

    fn inbox(&self) -> MutexGuard<'_, HashMap<GroupId, VecDeque<Vec<u8>>>> {
        self.inbox.lock().expect("no holder of this lock panics")
    }

    /// Says something to the controller of a peer, as far as a mirror is there to carry it.
    pub(super) fn say(&self, peer: String, group: GroupId, what: peer_word::What) {
        let body = PeerWord { what: Some(what) }.encode_to_vec();
        let message = PeerMessage { peer_cluster_id: peer, group_id: group.to_string(), body };
        {
            let mut outbox = self.outbox.lock().expect("no holder of this lock panics");
            if outbox.len() >= OUTBOX_MAX {
                outbox.pop_front();
            }
            outbox.push_back(message);
        }
        self.tell_mirrors();
    }

    /// Work of a mirror, beside its peers. Messages are given to the one that leads, once.
    pub(crate) fn assign(&self, mirror: &str, assignment: &mut MirrorAssignment) {
        if self.state.check_ruling().is_err() || self.state.check_term().is_err() {
            return;
        }
        if assignment.leads {
            let mut outbox = self.outbox.lock().expect("no holder of this lock panics");
            assignment.messages = outbox.drain(..).collect();
        }
        let Some(node) = self.peers.node_of(mirror) else { return };
        let is_here = |volume: &VolumeId| {
            let volume = self.state.volumes.get(&volume.to_string());
            volume.is_some_and(|volume| volume.opened.owner.as_deref() == Some(node.as_str()))
        };
        let (sends, takes) = self.state.mirrored.transfers();
        assignment.sends = sends;
        assignment.sends.retain(|send| send.volume_id.parse().is_ok_and(|volume| is_here(&volume)));
        assignment.sends.sort_by(|one, other| one.volume_id.cmp(&other.volume_id));
        for (volume, order) in takes.into_iter().filter(|(volume, _)| is_here(volume)) {
            let record = self.state.volumes.get(&volume.to_string());
            let Some(mirror) = record.and_then(|record| self.state.mirrored.of(&record)) else {
                continue;
            };
            assignment.takes.push(MirrorTake {
                peer_cluster_id: mirror.brain().peer.to_string(),
                group_id: mirror.id.0.to_string(),
                volume_id: volume.to_string(),
                point_id: order.point_id,
                base_id: order.base_id,
                token: order.token,
            });
        }
        assignment.takes.sort_by(|one, other| one.volume_id.cmp(&other.volume_id));
    }

    /// Takes in what a mirror of this cluster heard of peers, and how far its transfers are.
    pub async fn reported(&self, messages: Vec<PeerMessage>, sent: Vec<MirrorSent>) {
        for sent in sent.into_iter().take(1024) {
            if let Ok(volume) = sent.volume_id.parse() {
                let mut all = self.sent.lock().expect("no holder of this lock panics");
                all.retain(|_, (at, _)| at.elapsed() < Duration::from_secs(60));
                all.insert(volume, (Instant::now(), sent));
            }
        }
        for PeerMessage { peer_cluster_id, group_id, body } in messages.into_iter().take(1024) {
            let Some(peer) = self.state.joined.peers.get(&peer_cluster_id) else { continue };
            let (Ok(group), Ok(word)) = (group_id.parse(), PeerWord::decode(&body[..])) else {
                continue;
            };
            match word.what {
                Some(peer_word::What::Brain(bytes)) => self.heard(&peer.cluster, group, bytes),
                Some(peer_word::What::Group(said)) => self.copy_group(&peer, group, said).await,
                Some(peer_word::What::Volume(said)) => self.copy_volume(&peer, group, said).await,
                Some(peer_word::What::Refused(why)) => {
                    self.refused(&peer.cluster, group, why).await
                }
                Some(peer_word::What::Lag(told)) => self.told_lag(&peer.cluster, group, &told),
                Some(peer_word::What::HashesAsked(asked)) => {
                    self.hashes_asked(&peer.cluster, group, asked);
                }
                Some(peer_word::What::NoMirror(_)) => {
                    if let Err(error) = self.peer_has_none(&peer.cluster, group).await {
                        tracing::debug!(%group, %error, "a mirror that was ended stays for now");
                    }
                }
                Some(peer_word::What::HashesTold(told)) => {
                    self.hashes_told(&peer.cluster, group, told);
                }
                None => {}
            }
        }
    }

    fn heard(&self, peer: &str, group: GroupId, bytes: Vec<u8>) {
        let Some(record) = self.state.mirrored.group(group) else {
            // The other side may wait for the end of it.
            if self.state.check_ruling().is_ok() && self.state.check_term().is_ok() {
                self.say(peer.to_owned(), group, peer_word::What::NoMirror(true));
            }
            return;
        };
        if record.brain().peer.to_string() != peer {
            return;
        }
        let mut inbox = self.inbox();
        let messages = inbox.entry(group).or_default();
        if messages.len() >= INBOX_MAX {
            messages.pop_front();
        }
        messages.push_back(bytes);
        drop(inbox);
        self.look_at(group);
    }

    async fn refused(&self, peer: &str, group: GroupId, why: String) {
        let record = self.state.mirrored.group(group);
        if record.is_none_or(|record| record.brain().peer.to_string() != peer) {
            return;
        }
        if let Some(live) = self.life(group).lock().await.as_mut() {
            live.refused = crate::text::plain(&why).chars().take(400).collect();
        }
    }

    /// State of the transfer of a volume that is sent from here now; those of former ones do not count.
    pub(super) fn sent(&self, volume: VolumeId) -> Option<MirrorSent> {
        let ordered = self.state.mirrored.send(volume)?;
        let sent = self.sent.lock().expect("no holder of this lock panics");
        let (_, sent) = sent.get(&volume).filter(|(_, sent)| sent.token == ordered.token)?;
        Some(sent.clone())
    }

    /// Looks at a group with its life locked; `None`: it has no record.
    ///
    /// # Errors
    /// The store fails, or the records do not rule.
    pub(super) async fn look<T>(
        &self,
        group: GroupId,
        call: impl FnOnce(&mut Live, Now, &mut Vec<Action>) -> T,
    ) -> Result<Option<(Arc<MirrorRecord>, T)>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let life = self.life(group);
        let mut life = life.lock().await;
        let Some(record) = self.state.mirrored.group(group) else {
            if let Some(mut former) = life.take() {
                self.leave_cut(&mut former);
            }
            self.end(group);
            return Ok(None);
        };
        // A mirror that was ended and begun again is another one: no word and no role of the former counts in it.
        if let Some(mut former) = life.take_if(|live| live.created_ms != record.created_ms) {
            self.leave_cut(&mut former);
        }
        let now = self.now();
        let live = life.get_or_insert_with(|| Live {
            brain: Brain::new(now, record.brain().clone(), record.version),
            version: record.version,
            created_ms: record.created_ms,
            serial: 0,
            stamps: HashMap::new(),
            heard: None,
            cutting: None,
            introduced: None,
            refused: String::new(),
            failures: BTreeMap::new(),
        });
        let mut actions = Vec::new();
        if live.version != record.version {
            let (changed, version) = (Box::new(record.brain().clone()), record.version);
            live.version = version;
            live.brain.on(now, Event::Changed { record: changed, version }, &mut actions);
        }
        self.tell(live, &record, &mut actions).await?;
        live.brain.on(self.now(), Event::Tick, &mut actions);
        self.carry_out(live, group, actions).await?;
        // A call is answered by what its look has seen.
        let mut actions = Vec::new();
        let answer = call(live, self.now(), &mut actions);
        self.carry_out(live, group, actions).await?;
        let Some(record) = self.state.mirrored.group(group) else { return Ok(None) };
        self.note(live, &record);
        self.tend(live, &record).await?;
        Ok(Some((record, answer)))
    }

    /// Keeps what metrics and the judgement of volumes read between two looks.
    fn note(&self, live: &Live, record: &MirrorRecord) {
        let (group, role, now) = (record.id.0, record.role(), self.now());
        let before = self.state.mirrored.figures(group);
        let health = live.brain.health(now);
        let looked = Instant::now();
        let ill_before = before.as_ref().and_then(|figures| figures.ill_since);
        let is_ill = role == Role::Primary && health != Health::Healthy;
        let alone_since = |volume: &VolumeId, node: &str| {
            let known = before.as_ref().and_then(|figures| figures.alone.get(volume));
            known.filter(|(_, on)| on == node).map_or(looked, |(since, _)| *since)
        };
        let alone = |member: &Member| {
            let volume = self.state.volumes.get(&member.volume.to_string())?;
            let node = volume.opened.owner.clone().filter(|node| !self.peers.has_mirror(node))?;
            Some((member.volume, (alone_since(&member.volume, &node), node)))
        };
        let synced_ms = live.brain.synced_ms(now);
        let lag = |at_ms| Duration::from_millis(now.wall_ms.saturating_sub(at_ms));
        let is_at_work = !matches!(role, Role::Off | Role::Orphan);
        let members = record.brain().members.iter().filter(|_| is_at_work);
        let figures = Figures {
            looked,
            peer_role: live.brain.heard().map(|word| word.role),
            is_silent: live.brain.is_silent(now.time),
            health,
            lag_then: synced_ms.map(lag),
            ill_since: is_ill.then(|| ill_before.unwrap_or(looked)),
            is_idle: live.brain.is_idle(),
            alone: members.filter_map(alone).collect(),
        };
        self.state.mirrored.note(group, figures);
    }

    /// Tells the brain what is known now.
    async fn tell(
        &self,
        live: &mut Live,
        record: &MirrorRecord,
        actions: &mut Vec<Action>,
    ) -> Result<(), Error> {
        let group = record.id.0;
        let mut events = Vec::new();
        events.push(Event::OwnMirror { is_running: self.peers.leader().is_some() });
        let heard = self.peers.heard_at(&record.brain().peer.to_string());
        if heard.is_some_and(|at| is_news(live.heard, at)) {
            live.heard = heard;
            events.push(Event::Heard);
        }
        let messages = self.inbox().remove(&group).unwrap_or_default();
        if let Some(word) = live.brain.heard().filter(|_| record.brain().is_unsure) {
            self.adopt_points(record, &word.held).await?;
        }
        let mut members: Vec<VolumeId> =
            record.brain().members.iter().map(|member| member.volume).collect();
        // Members that are to join are seen before the brain names them.
        let joining = self.state.mirrored.groups.get(&group.to_string());
        for member in joining.iter().flat_map(|group| &group.members) {
            if !members.contains(&member.0) {
                members.push(member.0);
            }
        }
        for member in members {
            let Some(volume) = self.state.volumes.get(&member.to_string()) else { continue };
            let is_of_it = volume.mirror.as_ref().is_none_or(|mirror| mirror.group.0 == group);
            if !volume.phase.is_kept() || !is_of_it {
                continue;
            }
            let volume = self.fenced(volume).await?;
            live.serial += 1;
            let stamp = live.stamps.get(&member).copied().unwrap_or_default();
            let observed = observe::observe(&self.state, group, &volume, (live.serial, stamp));
            events.push(Event::Observed(member, Box::new(observed)));
        }
        // Messages last: a word is judged by what is seen now.
        events.extend(messages.into_iter().map(Event::Message));
        for event in events.into_iter().chain(self.verdict(live, record).await?) {
            live.brain.on(self.now(), event, actions);
        }
        Ok(())
    }

    /// Carries out what a brain says, and gives it the outcomes. Orders of before a change of the record are
    /// late, and dropped.
    async fn carry_out(
        &self,
        live: &mut Live,
        group: GroupId,
        mut actions: Vec<Action>,
    ) -> Result<(), Error> {
        for _ in 0..CHANGES_MAX {
            let is_store = |action: &Action| matches!(action, Action::Store { .. });
            let Some(at) = actions.iter().position(is_store) else { break };
            let Action::Store { expected, record } = actions.remove(at) else { break };
            actions.retain(|action| matches!(action, Action::Send(_)));
            let before = live.brain.record().role;
            let change = |found: &mut MirrorRecord| Ok(found.change(expected, (*record).clone()));
            let written = self.state.mirrored.records.update(&group.to_string(), change).await?;
            let Some((found, is_written)) = written else { return Ok(()) };
            live.version = found.version;
            let version = found.version;
            let event = match is_written {
                true => Event::Stored { version },
                false => Event::Changed { record: Box::new(found.brain().clone()), version },
            };
            live.brain.on(self.now(), event, &mut actions);
            if is_written {
                self.announce(&found, before);
            }
        }
        let stamp = Stamp { term: live.brain.record().term, version: live.version };
        let peer = live.brain.record().peer.to_string();
        let mut messages = Vec::new();
        let mut ordered: BTreeMap<VolumeId, Vec<Order>> = BTreeMap::new();
        for action in actions {
            match action {
                Action::Store { .. } => {}
                Action::Send(bytes) => messages.push(bytes),
                Action::Member { volume, stamp: of, order } if of == stamp => {
                    let orders = ordered.entry(volume).or_default();
                    if !orders.contains(&order) {
                        orders.push(order);
                    }
                }
                Action::MakePoint { stamp: of, point, members } if of == stamp => {
                    self.make_point(live, group, point, &members).await?;
                }
                Action::Member { .. } | Action::MakePoint { .. } => {}
                Action::Ship { volume, transfer, token, from } => {
                    let want = live.brain.heard().and_then(|word| word.want.as_ref());
                    let ordered = want.and_then(|want| want.transfer.base);
                    self.ship((group, volume), (transfer, ordered), token, from)?;
                }
            }
        }
        for (volume, orders) in ordered {
            live.failures.remove(&volume);
            for order in orders {
                if let Err(error) = self.obey(group, volume, stamp, order).await {
                    tracing::debug!(%volume, ?order, %error, "an order of a mirror waits");
                    live.failures.insert(volume, error.to_string());
                }
            }
        }
        for member in &live.brain.record().members {
            live.stamps.insert(member.volume, stamp);
        }
        // The last word says all.
        if let Some(bytes) = messages.pop() {
            self.say(peer, group, peer_word::What::Brain(bytes));
        }
        Ok(())
    }

    /// Makes a call, again and again until it has its answer or the time is over.
    ///
    /// # Errors
    /// The group is not mirrored, or the store fails.
    pub(super) async fn call(
        &self,
        group: GroupId,
        call: Call,
        within: Duration,
    ) -> Result<(Arc<MirrorRecord>, Answer), Error> {
        let until = Instant::now() + within;
        loop {
            let made =
                |live: &mut Live, now: Now, out: &mut Vec<Action>| live.brain.call(now, call, out);
            let Some(answered) = self.look(group, made).await? else {
                return Err(Error::missing("mirror", group.to_string()));
            };
            if answered.1 != Answer::NotYet || Instant::now() >= until {
                return Ok(answered);
            }
            tokio::time::sleep(SOON / 2).await;
        }
    }
}

#[async_trait]
impl Reconciler for Mirrors {
    type Key = GroupId;
    const NAME: &'static str = "mirror groups";

    fn queue(&self) -> &Queue<GroupId> {
        &self.queue
    }

    async fn reconcile(&self, group: &GroupId, _: Instant) -> Result<Next, Error> {
        if self.state.check_ruling().is_err() || self.state.check_term().is_err() {
            return Ok(Next::After(AT_REST));
        }
        let is_busy = |live: &mut Live, _: Now, _: &mut Vec<Action>| live.cutting.is_some();
        let Some((record, is_cutting)) = self.look(*group, is_busy).await? else {
            return Ok(Next::Rest);
        };
        let brain = record.brain();
        if brain.asks_step_down && brain.role == Role::Secondary {
            // The rest of a take-over, also where nobody waits for it. Without force it loses nothing.
            self.call(*group, Call::Promote { force: false }, Duration::ZERO).await?;
            return Ok(Next::After(SOON));
        }
        let is_on_its_way = !matches!(
            brain.role,
            Role::Primary | Role::Secondary | Role::Off | Role::Orphan | Role::Diverged
        ) || brain.receiving.is_some()
            || brain.points.cutting.is_some()
            || is_cutting;
        Ok(Next::After(if is_on_its_way { SOON } else { AT_REST }))
    }
}

/// A mirror reports how long ago it heard the peer: one moment looks a little later in each report of it.
fn is_news(last: Option<Instant>, at: Instant) -> bool {
    last.is_none_or(|last| at > last + HEARD_APART)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_one_moment_are_no_news_however_late_they_come_and_the_next_frame_is() {
        let first = Instant::now();
        assert!(is_news(None, first));
        for late_ms in [0, 1, 40, 500] {
            assert!(!is_news(Some(first), first + Duration::from_millis(late_ms)));
        }
        // Frames come every second, and the report of one may be that much earlier than that of another.
        assert!(is_news(Some(first), first + Duration::from_millis(600)));
    }
}
