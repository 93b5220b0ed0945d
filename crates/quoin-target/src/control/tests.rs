//! Assignments that change below what is open, and what the shard and the clients are told of it.

use quoin_api::control::{MemberKeys, TargetAssignment, VolumeSpec};
use quoin_encryption::{Encryption, UserKey};
use quoin_identity::{Authority, Lifetimes, Role};

use super::*;
use crate::metrics::Metrics;
use crate::shard::Shard;

const VOLUME: VolumeId = VolumeId(7);

/// A target without a controller, whose one shard runs no rounds.
struct World {
    control: Arc<Control>,
    shard: Shard,
    directory: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority =
            Authority::create(&directory.path().join("ca"), Lifetimes::default()).unwrap();
        let identity = authority.issue_identity(&directory.path().join("n1"), Role::Node, "n1");
        let identity = identity.unwrap();
        let (metrics, notices) = (Metrics::new(false), Notices::default());
        let dials = Dials::new(Reach::PlainLoopback, metrics.dials.clone());
        let (asks, _) = mpsc::unbounded_channel();
        let (shard, handle) =
            Shard::new(&dials, 1 << 20, asks, notices.clone(), metrics.clone()).unwrap();
        let run_dir = directory.path().join("run");
        std::fs::create_dir_all(run_dir.join("nbd")).unwrap();
        let options = Options {
            node: "n1".into(),
            identity: directory.path().join("n1"),
            join: None,
            controller: "127.0.0.1:1".into(),
            run_dir,
            shards: 1,
            catch_up_bytes: 1 << 20,
            nbd: None,
            share_listen: "127.0.0.1:0".parse().unwrap(),
            metrics,
        };
        let (channel, source) = identity.controller_with_source(&options.controller).unwrap();
        let changed = Arc::default();
        let control = Control {
            channel,
            source,
            devices: RequestedDevices::new(&options.run_dir, Arc::clone(&changed)),
            contact: Contact::new(&options.controller),
            options,
            identity: identity.clone(),
            shards: vec![handle],
            dials,
            notices,
            served: Default::default(),
            changed,
            nbd_listener: None,
            fences_digest: Arc::default(),
            hashing: Mutex::default(),
            relays: Arc::new(Relays::new(identity)),
            shares: Default::default(),
        };
        Self { control: Arc::new(control), shard, directory }
    }

    /// Assigns exactly these; returns what the shard was told.
    fn assign(&self, targets: impl IntoIterator<Item = TargetAssignment>) -> Vec<String> {
        let targets = targets.into_iter().collect();
        let message = NodeAssignment { targets, complete: true, ..Default::default() };
        self.control.assign(&message);
        self.told()
    }

    /// Inputs of the shard in short: what was to be opened, changed or closed, with the socket and the key that
    /// it got.
    fn told(&self) -> Vec<String> {
        let short = |socket: &Option<PathBuf>, key: &Option<DataKey>| {
            let socket = if socket.is_some() { " serves" } else { "" };
            let key = if key.is_some() { " with its key" } else { "" };
            format!("{socket}{key}")
        };
        let told = self.shard.told().into_iter().filter_map(|input| match input {
            Input::Open(setup) => Some(format!("open{}", short(&setup.socket, &setup.key))),
            Input::Update(update) => Some(format!("update{}", short(&update.socket, &update.key))),
            Input::Close(_) => Some("close".to_owned()),
            Input::Client(..) => Some("client".to_owned()),
            _ => None,
        });
        told.collect()
    }

    /// The shard has closed the volume.
    async fn stopped(&self) -> Vec<String> {
        self.control.stopped(VOLUME).await;
        self.told()
    }

    fn exports(&self) -> Vec<String> {
        self.control.exports().into_iter().map(|info| info.name).collect()
    }

    fn exported_to(&self, holder: &Holder) -> Vec<(bool, u64, u64)> {
        let offered = self.control.exports_to(holder, None).into_iter();
        offered.map(|one| (one.info.read_only, one.since_epoch, one.client)).collect()
    }
}

fn plain() -> TargetAssignment {
    TargetAssignment {
        volume_id: VOLUME.to_string(),
        name: "db".into(),
        size_bytes: 1 << 30,
        spec: Some(VolumeSpec::default()),
        desired_replication_factor: 1,
        used_since_epoch: 5,
        ..Default::default()
    }
}

fn user(text: &str) -> UserKey {
    UserKey::parse(text.as_bytes()).unwrap()
}

/// An encrypted volume, its key, and another one's.
fn encrypted() -> (TargetAssignment, DataKey, DataKey) {
    let made = |of: &UserKey| Encryption::create(of, "a").unwrap();
    let (own, other) = (user(&"ab".repeat(32)), user(&"cd".repeat(32)));
    let encryption = made(&own);
    let key = encryption.unlock(&own).unwrap().key;
    let other = made(&other).unlock(&other).unwrap().key;
    let encryption = Some(control::Encryption::from(&encryption));
    let spec = VolumeSpec { encryption, block_size: 4096, ..VolumeSpec::default() };
    (TargetAssignment { spec: Some(spec), ..plain() }, key, other)
}

#[tokio::test]
async fn a_volume_that_is_attached_lent_read_only_moved_and_detached_is_told_so_and_only_then() {
    let world = World::new();
    assert_eq!(world.assign([plain()]), ["open serves"]);
    assert_eq!(world.assign([plain()]), ["update serves"]);
    assert_eq!(world.exports(), ["db"]);
    // Lent for work on its replicas: no client is let in.
    let lent = TargetAssignment { maintenance: true, ..plain() };
    assert_eq!(world.assign([lent.clone()]), ["update"]);
    assert_eq!(world.exports(), [""; 0]);
    assert_eq!(world.assign([plain()]), ["update serves"], "a new use of what was lent");
    assert_eq!(world.exports(), ["db"]);
    // Read-only and back: each is another opening.
    let reads = TargetAssignment { read_only: true, ..plain() };
    assert_eq!(world.assign([reads.clone()]), ["close"]);
    assert_eq!(world.assign([reads.clone()]), [""; 0], "it is closing");
    assert_eq!(world.stopped().await, ["open serves"]);
    assert!(world.control.only_reads(VOLUME));
    assert_eq!(world.assign([reads]), ["update serves"]);
    assert_eq!(world.assign([plain()]), ["close"]);
    assert_eq!(world.stopped().await, ["open serves"]);
    assert!(!world.control.only_reads(VOLUME));
    // Another node serves it, and then this one again.
    let at = |address: &str| TargetAssignment {
        served_at: Some(control::ServedAt {
            node: "n2".into(),
            address: address.into(),
            key_hashes: vec!["k".into()],
        }),
        ..plain()
    };
    assert_eq!(world.assign([at("192.0.2.2:10809")]), ["close"]);
    assert_eq!(world.control.relays.ids(), [], "not before it has closed here");
    assert_eq!(world.exports(), [""; 0]);
    assert_eq!(world.stopped().await, [""; 0]);
    assert_eq!(world.control.relays.ids(), [VOLUME]);
    // Its address is not known for a moment, at the same node and at another one.
    assert_eq!(world.assign([at("")]), [""; 0]);
    assert_eq!(world.control.relays.ids(), [VOLUME]);
    let mut elsewhere = at("");
    elsewhere.served_at.as_mut().unwrap().node = "n3".into();
    assert_eq!(world.assign([elsewhere]), [""; 0]);
    assert_eq!(world.control.relays.ids(), []);
    assert_eq!(world.assign([plain()]), ["open serves"]);
    assert_eq!(world.assign([]), ["close"]);
    // Until it has closed it stays as it is, and then it is opened anew.
    assert_eq!(world.assign([plain()]), ["update serves"]);
    assert_eq!(world.stopped().await, ["open serves"]);
}

#[tokio::test]
async fn a_key_serves_one_use_of_its_volume_and_no_later_one() {
    let world = World::new();
    let (volume, key, other) = encrypted();
    let id = VOLUME.to_string();
    let unlock = |key: &DataKey| world.control.unlock(&id, key.clone());
    assert_eq!(unlock(&key), Err(Refusal::NotServed));
    assert_eq!(world.assign([volume.clone()]), ["open"], "without its key it has no socket");
    assert_eq!(world.exports(), [""; 0]);
    assert!(world.control.waits_for_key(VOLUME));
    assert_eq!(world.control.unlock("x", key.clone()), Err(Refusal::Malformed));
    assert_eq!(world.control.data_key(&id).err(), Some(Refusal::NotServed));
    assert_eq!(unlock(&other), Err(Refusal::WrongKey));
    assert_eq!(world.told(), [""; 0]);
    assert_eq!(unlock(&key), Ok(()));
    assert_eq!(world.told(), ["update serves with its key"]);
    assert_eq!(unlock(&key), Ok(()));
    assert_eq!(world.told(), [""; 0], "it is here already");
    assert!(world.control.data_key(&id) == Ok(key.clone()) && !world.control.waits_for_key(VOLUME));
    assert_eq!(world.exports(), ["db"]);
    // Lent, and attached again.
    let lent = TargetAssignment { maintenance: true, ..volume.clone() };
    assert_eq!(world.assign([lent]), ["update"]);
    assert_eq!(unlock(&key), Err(Refusal::NotServed));
    assert_eq!(world.assign([volume.clone()]), ["update"]);
    assert_eq!(world.exports(), [""; 0]);
    assert_eq!(unlock(&key), Ok(()));
    assert_eq!(world.told(), ["update serves with its key"]);
    // Detached, and attached again.
    assert_eq!(world.assign([]), ["close"]);
    assert_eq!(world.control.data_key(&id).err(), Some(Refusal::NotServed));
    assert_eq!(world.assign([volume.clone()]), ["update"]);
    assert_eq!(world.stopped().await, ["open"]);
    assert_eq!(unlock(&key), Ok(()));
    assert_eq!(world.told(), ["update serves with its key"]);
    // It opens again with the key of the same use.
    assert_eq!(world.assign([TargetAssignment { read_only: true, ..volume.clone() }]), ["close"]);
    assert_eq!(world.stopped().await, ["open serves with its key"]);
    assert_eq!(world.assign([plain()]), ["close"]);
    assert_eq!(unlock(&key), Err(Refusal::NotEncrypted));
    assert_eq!(world.control.data_key(&id).err(), Some(Refusal::NotEncrypted));
}

fn holder(name: &str, key: &str) -> Holder {
    Holder { role: Role::Node, name: name.into(), key_hash: key.into() }
}

#[tokio::test]
async fn a_sharer_sees_what_it_shares_as_it_shares_it_now_and_by_the_keys_that_count_now() {
    let world = World::new();
    let sharer = |node: &str, key: &str, read_only, client| control::Sharer {
        node: node.into(),
        read_only,
        key_hashes: vec![key.into()],
        client,
    };
    let shared = |sharers: Vec<control::Sharer>| TargetAssignment { sharers, ..plain() };
    let (n2, n3) = (holder("n2", "k2"), holder("n3", "k3"));
    world.assign([plain()]);
    assert_eq!(world.exported_to(&n2), []);
    for (read_only, client) in [(false, 4), (true, 0), (false, 6)] {
        let list = vec![sharer("n2", "k2", read_only, client), sharer("n3", "k3", true, 0)];
        world.assign([shared(list)]);
        assert_eq!(world.exported_to(&n2), [(read_only, 5, client)]);
        assert_eq!(world.exported_to(&n3), [(true, 5, 0)], "the last one of the list");
        assert_eq!(world.exported_to(&holder("n2", "k3")), []);
        assert_eq!(world.exported_to(&holder("n3", "k2")), []);
    }
    world.assign([shared(vec![sharer("n2", "next", false, 6)])]);
    assert_eq!((world.exported_to(&n2), world.exported_to(&n3)), (vec![], vec![]));
    assert_eq!(world.exported_to(&holder("n2", "next")), [(false, 5, 6)]);
    // Of an encrypted volume it proves the key, over its own connection.
    let (volume, key, other) = encrypted();
    let list = vec![sharer("n2", "k2", false, 4)];
    let volume = TargetAssignment { sharers: list, volume_id: VolumeId(8).to_string(), ..volume };
    world.assign([volume]);
    let proven = |key: &DataKey, of: [u8; 32], over: [u8; 32]| {
        world.control.exports_to(&n2, Some((over, key.proof(&of).unwrap()))).len()
    };
    let (secret, another) = ([7; 32], [8; 32]);
    assert_eq!(proven(&key, secret, secret), 0, "this target has no key itself");
    world.control.unlock(&VolumeId(8).to_string(), key.clone()).unwrap();
    assert_eq!(proven(&key, secret, secret), 1);
    assert_eq!((proven(&other, secret, secret), proven(&key, another, secret)), (0, 0));
    assert_eq!(world.exported_to(&n2), [], "without a proof");
}

/// A client that has opened the volume by its name.
fn client(user: Option<User>, from: Option<&str>) -> NewClient {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let _there = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let info =
        DeviceInfo { name: "db".into(), size_bytes: 4096, block_size: 512, read_only: false };
    NewClient {
        socket: listener.accept().unwrap().0,
        session: quoin_nbd::Session::new(info, quoin_nbd::TlsPolicy::Plain),
        input: Default::default(),
        requests: Vec::new(),
        life: None,
        user,
        from: from.map(|from| from.parse().unwrap()),
    }
}

#[tokio::test]
async fn a_client_that_was_let_in_is_turned_away_where_what_let_it_in_has_changed_since() {
    let world = World::new();
    let adopt = |user: Option<User>, from| world.control.adopt("db", client(user, from));
    let opener = |key: &str| {
        let holder = Holder { role: Role::Admin, name: "ops".into(), key_hash: key.into() };
        Some(User { holder, shares: None })
    };
    let sharer = || {
        let shares = Some(crate::client::SharedUse { read_only: false, client: 0 });
        Some(User { holder: holder("n2", "k2"), shares })
    };
    assert!(!adopt(None, None), "nothing is served");
    let members =
        vec![MemberKeys { role: "admin".into(), name: "ops".into(), key_hashes: vec!["a".into()] }];
    let assigned = |targets: Vec<TargetAssignment>, fences| NodeAssignment {
        targets,
        complete: true,
        members: members.clone(),
        fences,
        ..Default::default()
    };
    world.control.assign(&assigned(vec![plain()], None));
    world.told();
    assert!(adopt(None, None) && adopt(opener("a"), Some("192.0.2.1")));
    // The shard looks at the keys of sharers.
    assert!(adopt(sharer(), Some("192.0.2.1")) && !adopt(opener("b"), Some("192.0.2.1")));
    assert!(!world.control.adopt("other", client(None, None)));
    assert_eq!(world.told(), ["client"; 3]);
    let fences = |blocks: &[&str], nodes: &[&str], digest| {
        let all = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Some(control::Fences { digest, blocks: all(blocks), nodes: all(nodes) })
    };
    world.control.assign(&assigned(vec![plain()], fences(&["192.0.2.0/24"], &[], 1)));
    assert!(!adopt(opener("a"), Some("192.0.2.1")) && adopt(opener("a"), Some("192.0.3.1")));
    assert!(adopt(None, None) && world.control.is_fenced("192.0.2.9".parse().unwrap(), None));
    world.control.assign(&assigned(vec![plain()], fences(&[], &["n2"], 2)));
    assert!(adopt(opener("a"), Some("192.0.2.1")) && !adopt(sharer(), Some("192.0.2.1")));
    // Records that do not rule say nothing of members and fences.
    let partial = NodeAssignment { targets: vec![plain()], ..Default::default() };
    world.control.assign(&partial);
    assert!(adopt(opener("a"), Some("192.0.2.1")) && !adopt(sharer(), Some("192.0.2.1")));
    world.control.assign(&assigned(vec![plain()], None));
    assert!(adopt(sharer(), Some("192.0.2.1")), "the fence is taken away");
    let lent = TargetAssignment { maintenance: true, ..plain() };
    world.control.assign(&assigned(vec![lent], None));
    assert!(!adopt(None, None));
}

/// Fences are told once they are carried out by every shard, and a later order takes the place of an earlier one.
#[tokio::test]
async fn fences_are_told_after_the_shard_has_ended_their_clients_and_not_before() {
    let world = World::new();
    let ordered = |digest| NodeAssignment {
        complete: true,
        fences: Some(control::Fences {
            digest,
            blocks: vec![format!("192.0.2.{digest}/32")],
            nodes: Vec::new(),
        }),
        ..Default::default()
    };
    let ends = || {
        let told = world.shard.told().into_iter().filter_map(|input| match input {
            Input::Fences(fences, done) => Some((fences.digest(), done)),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    world.control.assign(&ordered(3));
    let first = ends();
    assert_eq!(first[0].0, 3);
    tokio::task::yield_now().await;
    assert_eq!(world.control.fences_digest.get(), 0, "the shard has not ended them yet");
    world.control.assign(&ordered(3));
    assert!(ends().is_empty(), "the same ones");
    world.control.assign(&ordered(4));
    let second = ends();
    for (_, done) in first {
        let _ = done.send(());
    }
    tokio::task::yield_now().await;
    assert_eq!(world.control.fences_digest.get(), 0, "they are not the ones in force");
    for (_, done) in second {
        let _ = done.send(());
    }
    while world.control.fences_digest.get() != 4 {
        tokio::task::yield_now().await;
    }
    assert!(world.directory.path().exists());
}
