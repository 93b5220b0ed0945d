//! A second cluster, as the first one sees it: the mirror that carries messages, and real brains on its side.
//!
//! Members of its groups are told to its brains as the test wants them; nothing is stored there.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prost::Message;
use quoin_api::control::*;
use quoin_cluster::mirror::brain::Now;
use quoin_cluster::mirror::record::Parameters;
use quoin_cluster::mirror::{
    Action, Begun, Brain, Chain, ClusterId, Event, Generation, Keepsake, Observed, Record, Role,
    Stamp,
};
use quoin_cluster::ownership::mirrored;
use quoin_cluster::records::{
    Introduction, MirrorRecord, MirrorSettings, PeerRecord, Record as _, Text, VolumeGroupRecord,
    VolumeRecord, decode, encode,
};
use quoin_types::ids::{GroupId, PointId};
use quoin_types::{Time, VolumeId};

use super::ControlPlane;

const PEER: ClusterId = ClusterId(0xe0);
pub const PEER_NAME: &str = "west";
pub const INTERVAL_S: u64 = 10;
const TURN: Duration = Duration::from_millis(50);

/// Answer to a group that is to be copied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answers {
    Copies,
    Refuses,
    Nothing,
}

struct Side {
    brain: Brain,
    version: u64,
    serial: u64,
    points: Vec<PointId>,
}

struct Shared {
    is_heard: bool,
    answers: Answers,
    sides: BTreeMap<GroupId, Side>,
    out: VecDeque<PeerMessage>,
    draws: u128,
    began: Instant,
}

impl Shared {
    fn now(&mut self) -> Now {
        self.draws += 1;
        let time = Time(self.began.elapsed().as_nanos() as u64);
        Now { time, wall_ms: 1_700_000_000_000, draw: self.draws << 64 | self.draws }
    }

    fn say(&mut self, group: GroupId, what: peer_word::What) {
        let body = PeerWord { what: Some(what) }.encode_to_vec();
        let (peer_cluster_id, group_id) = (PEER.to_string(), group.to_string());
        self.out.push_back(PeerMessage { peer_cluster_id, group_id, body });
    }

    /// Gives a brain an event, and what its cluster would answer to its orders.
    fn on(&mut self, group: GroupId, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.now();
            let Some(side) = self.sides.get_mut(&group) else { return };
            let mut actions = Vec::new();
            side.brain.on(now, event, &mut actions);
            let mut said = Vec::new();
            for action in actions {
                match action {
                    Action::Send(bytes) => said.push(bytes),
                    Action::Store { .. } => {
                        side.version += 1;
                        events.push_back(Event::Stored { version: side.version });
                    }
                    _ => {}
                }
            }
            for bytes in said {
                self.say(group, peer_word::What::Brain(bytes));
            }
        }
    }

    /// Tells a brain of its members: its pools keep the role.
    fn observe(&mut self, group: GroupId) {
        let Some(side) = self.sides.get_mut(&group) else { return };
        side.serial += 1;
        let record = side.brain.record().clone();
        let (serial, points) = (side.serial, side.points.clone());
        for member in &record.members {
            let observed = Observed {
                serial,
                seen_ms: 0,
                stamp: Stamp { term: u64::MAX, version: u64::MAX },
                points: points.clone(),
                blocks: 16_384,
                at: points.last().copied(),
                fenced: record.fence,
                order: None,
                taken_to: 0,
                stable_to: 0,
                is_fed: false,
                keepsake: Some(record.keepsake()),
                lost: None,
                is_published: false,
            };
            self.on(group, Event::Observed(member.volume, Box::new(observed)));
        }
    }

    fn take(&mut self, message: &PeerMessage) {
        let Ok(group) = message.group_id.parse::<GroupId>() else { return };
        match PeerWord::decode(&message.body[..]).ok().and_then(|word| word.what) {
            Some(peer_word::What::Brain(_)) if !self.sides.contains_key(&group) => {
                self.say(group, peer_word::What::NoMirror(true));
            }
            Some(peer_word::What::Brain(bytes)) => self.on(group, Event::Message(bytes)),
            Some(peer_word::What::Group(said)) => match self.answers {
                Answers::Nothing => {}
                Answers::Refuses => {
                    self.say(group, peer_word::What::Refused("there is no room".to_owned()));
                }
                Answers::Copies if self.sides.contains_key(&group) => {}
                Answers::Copies => {
                    let theirs = Record::decode(&said.record).unwrap();
                    let members = theirs.members.iter().map(|member| member.volume).collect();
                    let clusters = [PEER, theirs.cluster];
                    let copy = Record::secondary(
                        group,
                        clusters,
                        members,
                        theirs.chain,
                        theirs.parameters,
                    );
                    self.begin(group, copy, Vec::new());
                }
            },
            _ => {}
        }
    }

    fn begin(&mut self, group: GroupId, record: Record, points: Vec<PointId>) {
        let now = self.now();
        let brain = Brain::new(now, record, 1);
        self.sides.insert(group, Side { brain, version: 1, serial: 0, points });
    }
}

/// The peer; it ends with the test.
pub struct Peer {
    shared: Arc<Mutex<Shared>>,
    task: tokio::task::JoinHandle<()>,
}

impl Peer {
    /// Starts a mirror of the first cluster that hears the peer.
    pub fn start(control: &ControlPlane, node: &str) -> Self {
        let shared = Arc::new(Mutex::new(Shared {
            is_heard: true,
            answers: Answers::Copies,
            sides: BTreeMap::new(),
            out: VecDeque::new(),
            draws: 1000,
            began: Instant::now(),
        }));
        let (agent, node) = (control.agent(), node.to_owned());
        let task = tokio::spawn(carry(agent, node, shared.clone()));
        Self { shared, task }
    }

    fn with<T>(&self, look: impl FnOnce(&mut Shared) -> T) -> T {
        look(&mut self.shared.lock().unwrap())
    }

    /// From now on it answers a group that is to be copied this way.
    pub fn answers(&self, answers: Answers) {
        self.with(|shared| shared.answers = answers);
    }

    /// From now on nothing of it is heard, or all.
    pub fn is_heard(&self, is_heard: bool) {
        self.with(|shared| shared.is_heard = is_heard);
    }

    /// The peer's side of a group, with the points that its members hold.
    pub fn has(&self, group: &str, record: Record, points: Vec<PointId>) {
        self.with(|shared| shared.begin(group.parse().unwrap(), record, points));
    }

    /// Role of its side of a group.
    pub fn role(&self, group: &str) -> Option<Role> {
        let group = group.parse().unwrap();
        self.with(|shared| shared.sides.get(&group).map(|side| side.brain.record().role))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(
    mut agent: agent_client::AgentClient<tonic::transport::Channel>,
    node: String,
    shared: Arc<Mutex<Shared>>,
) {
    loop {
        let request = WatchMirrorRequest { mirror: "mirror-a".into() };
        let Ok(watched) = agent.watch_mirror(request).await else {
            tokio::time::sleep(TURN).await;
            continue;
        };
        let mut assignments = watched.into_inner();
        loop {
            match tokio::time::timeout(TURN, assignments.message()).await {
                Err(_) => {}
                Ok(Ok(Some(assignment))) => {
                    let mut shared = shared.lock().unwrap();
                    if shared.is_heard {
                        assignment.messages.iter().for_each(|message| shared.take(message));
                    }
                }
                Ok(_) => break,
            }
            let report = {
                let mut shared = shared.lock().unwrap();
                let groups: Vec<GroupId> = shared.sides.keys().copied().collect();
                for group in groups {
                    shared.observe(group);
                    shared.on(group, Event::Tick);
                }
                let messages: Vec<PeerMessage> = shared.out.drain(..).collect();
                let heard_ms = shared.is_heard.then_some(0);
                let contact =
                    PeerContact { cluster_id: PEER.to_string(), heard_ms, ..Default::default() };
                MirrorReport {
                    mirror: "mirror-a".into(),
                    // The address has no listener.
                    address: "127.0.0.1:1".into(),
                    node: node.clone(),
                    peers: vec![contact],
                    messages: if shared.is_heard { messages } else { Vec::new() },
                    ..Default::default()
                }
            };
            if agent.report_mirror(report).await.is_err() {
                break;
            }
        }
    }
}

/// Records of mirrors that the next controller finds.
pub struct Mirrors {
    own: ClusterId,
    records: Vec<(String, Vec<u8>)>,
}

impl Mirrors {
    /// Of a cluster that has one peer.
    pub fn of(cluster_id: &str) -> Self {
        let peer = PeerRecord {
            cluster: PEER.to_string(),
            name: PEER_NAME.into(),
            introduction: Introduction::default(),
            paired_ms: 1,
            limits: Default::default(),
        };
        let records = vec![(peer.key(), encode(&peer))];
        Self { own: cluster_id.parse().unwrap(), records }
    }

    pub fn parameters() -> Parameters {
        Parameters { interval_s: INTERVAL_S, may_take_over: false }
    }

    fn chain(cluster: ClusterId) -> Chain {
        Chain::new(Begun { generation: Generation { number: 1, cluster, id: 7 }, at: None })
    }

    /// The record that a side with this role has; the other side's is `is_peer`.
    pub fn brain(&self, group: &str, members: &[&str], role: Role, is_peer: bool) -> Record {
        let (own, other) = if is_peer { (PEER, self.own) } else { (self.own, PEER) };
        let group: GroupId = group.parse().unwrap();
        let members: Vec<VolumeId> = members.iter().map(|id| id.parse().unwrap()).collect();
        let clusters = [own, other];
        match role {
            Role::Primary => Record {
                chain: Self::chain(own),
                is_paired: true,
                ..Record::primary(group, clusters, members, Self::parameters())
            },
            role => {
                let chain = Self::chain(other);
                let record = Record::secondary(group, clusters, members, chain, Self::parameters());
                Record { role, ..record }
            }
        }
    }

    /// Mirrors a volume, or these members as a group of this name.
    pub async fn put(&mut self, control: &ControlPlane, brain: Record, group: Option<&str>) {
        let keepsake =
            Keepsake { is_primary: brain.role == Role::Primary, begun: brain.chain.top() };
        for member in &brain.members {
            let key = format!("volume/{}", member.volume);
            let mut volume: VolumeRecord = decode(&control.record(&key).await).unwrap();
            mirrored::keep(&mut volume, brain.group, keepsake);
            volume.generation += 1;
            self.records.push((key, encode(&volume)));
        }
        if let Some(name) = group {
            let members = brain.members.iter().map(|member| Text(member.volume)).collect();
            let record = VolumeGroupRecord::new(brain.group, name, members, 1);
            self.records.push((record.key(), encode(&record)));
        }
        let settings = MirrorSettings {
            interval_s: INTERVAL_S,
            may_take_over: brain.parameters.may_take_over,
            compresses: true,
            bandwidth_limit: 0,
            is_paused: false,
        };
        let name = (group.unwrap_or("single").to_owned(), group.is_none());
        let record = MirrorRecord::new(brain, name, settings, 1);
        self.records.push((record.key(), encode(&record)));
    }

    pub fn into_records(self) -> Vec<(String, Vec<u8>)> {
        self.records
    }
}
