//! Mirrors of two clusters on real connections, each beside a target that is none.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use quoin_api::control::{
    MirrorAssignment, MirrorSend, MirrorSent, MirrorTake, PeerIntroduction, PeerMessage,
};
use quoin_identity::{Authority, Identity, Lifetimes, Role, key_hash_of_request};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;

use super::history::socket;
use super::tests::{Copy, TOKEN, source};
use crate::control::obey;
use crate::metrics::Metrics;
use crate::{Options, Shared};

const SIZE: u64 = 3000;

struct Cluster {
    authority: Authority,
    directory: tempfile::TempDir,
}

struct Mirror {
    shared: Arc<Shared>,
    address: String,
    tasks: JoinSet<()>,
}

impl Cluster {
    fn create() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(directory.path(), Lifetimes::default()).unwrap();
        Self { authority, directory }
    }

    fn id(&self) -> String {
        self.authority.cluster().to_string()
    }

    async fn mirror(&self, name: &str) -> Mirror {
        let home = self.directory.path().join(name);
        let identity = self.authority.issue_identity(&home, Role::Mirror, name).unwrap();
        let run_dir = self.directory.path().join(format!("{name}.run"));
        std::fs::create_dir_all(run_dir.join("nbd")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bound = listener.local_addr().unwrap();
        let options = Options {
            name: name.to_owned(),
            identity: home,
            join: None,
            controller: "127.0.0.1:1".to_owned(),
            listen: bound,
            advertise: None,
            node: name.to_owned(),
            run_dir,
            metrics: Metrics::default(),
        };
        let shared = Arc::new(Shared::new(options, identity));
        let mut tasks = JoinSet::new();
        tasks.spawn(crate::listen::serve(shared.clone(), listener).unwrap());
        tasks.spawn(crate::dial::keep_links(shared.clone()));
        tasks.spawn(super::keep::keep_sending(shared.clone()));
        Mirror { shared, address: bound.to_string(), tasks }
    }

    fn introduction(&self, mirrors: &[&Mirror]) -> PeerIntroduction {
        let key = |identity: &Identity| {
            key_hash_of_request(&identity.renewal_request().unwrap()).unwrap()
        };
        PeerIntroduction {
            cluster_id: self.id(),
            authorities_pem: self.authority.authorities_pem().into(),
            key_hashes: mirrors.iter().map(|mirror| key(&mirror.shared.identity)).collect(),
            addresses: mirrors.iter().map(|mirror| mirror.address.clone()).collect(),
        }
    }
}

impl Mirror {
    fn socket(&self) -> UnixListener {
        UnixListener::bind(socket(&self.shared.options.run_dir)).unwrap()
    }

    fn sent(&self) -> MirrorSent {
        self.shared.book.report().pop().unwrap_or_default()
    }

    /// Gives each stream to a target that reads the point.
    fn reads(&mut self) {
        let listener = self.socket();
        self.tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(source(stream, SIZE));
            }
        });
    }

    /// Gives each stream to a target that takes into the copy.
    fn takes(&mut self, copy: &Arc<Copy>) {
        let (listener, copy) = (self.socket(), copy.clone());
        self.tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let copy = copy.clone();
                tokio::spawn(async move { copy.take(stream).await });
            }
        });
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it never came that {what}");
}

fn hex(id: u128) -> String {
    format!("{id:032x}")
}

fn send(to: &Cluster) -> MirrorSend {
    MirrorSend {
        peer_cluster_id: to.id(),
        group_id: hex(2),
        volume_id: hex(3),
        point_id: hex(4),
        base_id: hex(5),
        snapshot_id: hex(6),
        since_snapshot_id: hex(7),
        token: hex(TOKEN),
        compress: true,
        size_blocks: SIZE,
        ..MirrorSend::default()
    }
}

fn take(from: &Cluster) -> MirrorTake {
    MirrorTake {
        peer_cluster_id: from.id(),
        group_id: hex(2),
        volume_id: hex(3),
        point_id: hex(4),
        base_id: hex(5),
        token: hex(TOKEN),
    }
}

fn of(peer: PeerIntroduction) -> MirrorAssignment {
    MirrorAssignment { peers: vec![peer], ..MirrorAssignment::default() }
}

#[tokio::test]
async fn a_point_comes_to_the_mirror_beside_the_target_of_its_copy() {
    let (east, west) = (Cluster::create(), Cluster::create());
    let mut sender = east.mirror("e1").await;
    let (idle, mut taker) = (west.mirror("w1").await, west.mirror("w2").await);
    let copy = Arc::new(Copy::default());
    sender.reads();
    taker.takes(&copy);
    let of_east = of(east.introduction(&[&sender]));
    let of_west = of(west.introduction(&[&idle, &taker]));
    obey(&idle.shared, of_east.clone());
    obey(&taker.shared, of_east.clone());
    let sends = MirrorAssignment { sends: vec![send(&west)], ..of_west };
    obey(&sender.shared, sends.clone());
    until("both mirrors refuse what was not ordered", || {
        sender.sent().message.matches("not here").count() == 2
    })
    .await;
    obey(&taker.shared, MirrorAssignment { takes: vec![take(&east)], ..of_east });
    until("the copy is fed", || copy.is_fed.load(Ordering::Relaxed)).await;
    copy.assert_has(SIZE);
    until("all is told as sent", || {
        let sent = sender.sent();
        sent.next_block == SIZE && sent.message.is_empty()
    })
    .await;
    let sent = sender.sent();
    assert_eq!((sent.volume_id.as_str(), sent.token.as_str()), (&*hex(3), &*hex(TOKEN)));
    assert!(sent.wire_bytes < sent.content_bytes);
    let worked = sender.shared.worked.lock().unwrap().values().cloned().collect::<Vec<_>>();
    assert_eq!(worked, [taker.address.clone()]);
    let shown = sender.shared.options.metrics.render();
    let line = format!("quoin_mirror_sent_bytes_total {}", sent.content_bytes);
    assert!(shown.contains(&line), "{shown}");
    let shown = taker.shared.options.metrics.render();
    assert!(shown.contains(&format!("quoin_mirror_taken_bytes_total {}", sent.content_bytes)));
    obey(&sender.shared, MirrorAssignment { sends: Vec::new(), ..sends });
    until("nothing is told of what is not ordered", || sender.shared.book.report().is_empty())
        .await;
}

#[tokio::test]
async fn a_copy_whose_target_ends_before_the_point_is_cut_is_sent_again() {
    let (east, west) = (Cluster::create(), Cluster::create());
    let (mut sender, mut taker) = (east.mirror("e1").await, west.mirror("w1").await);
    let copy = Arc::new(Copy::default());
    sender.reads();
    taker.takes(&copy);
    let of_east = of(east.introduction(&[&sender]));
    obey(&taker.shared, MirrorAssignment { takes: vec![take(&east)], ..of_east });
    let of_west = of(west.introduction(&[&taker]));
    obey(&sender.shared, MirrorAssignment { sends: vec![send(&west)], ..of_west });
    let is_sent = || sender.sent().next_block == SIZE && sender.sent().message.is_empty();
    until("the copy is fed", || copy.is_fed.load(Ordering::Relaxed) && is_sent()).await;
    let once = sender.sent().content_bytes;
    copy.forget();
    until("the copy is fed again", || copy.is_fed.load(Ordering::Relaxed) && is_sent()).await;
    copy.assert_has(SIZE);
    assert_eq!(sender.sent().content_bytes, 2 * once);
}

#[tokio::test]
async fn a_transfer_ends_at_once_where_either_side_orders_it_no_more() {
    let (east, west) = (Cluster::create(), Cluster::create());
    let (mut sender, mut taker) = (east.mirror("e1").await, west.mirror("w1").await);
    let copy = Copy::slow();
    sender.reads();
    taker.takes(&copy);
    let takes = MirrorAssignment { takes: vec![take(&east)], ..of(east.introduction(&[&sender])) };
    let sends = MirrorAssignment { sends: vec![send(&west)], ..of(west.introduction(&[&taker])) };
    obey(&taker.shared, takes.clone());
    obey(&sender.shared, sends.clone());
    let is_open =
        |mirror: &Mirror| mirror.shared.options.metrics.render().contains("quoin_mirror_streams 1");
    until("slots are taken", || copy.to.load(Ordering::Relaxed) > 0).await;
    assert!(is_open(&sender) && is_open(&taker));
    obey(&taker.shared, MirrorAssignment { takes: Vec::new(), ..takes.clone() });
    until("the sender is told", || sender.sent().message.contains("not here")).await;
    let had = copy.to.load(Ordering::Relaxed);
    obey(&taker.shared, takes);
    until("it goes on", || copy.to.load(Ordering::Relaxed) > had).await;
    obey(&sender.shared, MirrorAssignment { sends: Vec::new(), ..sends });
    until("the stream is over", || !is_open(&sender) && !is_open(&taker)).await;
    assert!(!copy.is_fed.load(Ordering::Relaxed));
}

#[tokio::test]
async fn trust_that_ends_takes_a_stream_and_its_connection_with_it() {
    let (east, west) = (Cluster::create(), Cluster::create());
    let (mut sender, mut taker) = (east.mirror("e1").await, west.mirror("w1").await);
    let copy = Copy::slow();
    sender.reads();
    taker.takes(&copy);
    let introduced = east.introduction(&[&sender]);
    let takes = MirrorAssignment { takes: vec![take(&east)], ..of(introduced.clone()) };
    obey(&taker.shared, takes.clone());
    let sends = MirrorAssignment { sends: vec![send(&west)], ..of(west.introduction(&[&taker])) };
    obey(&sender.shared, sends);
    until("slots are taken", || copy.to.load(Ordering::Relaxed) > 0).await;
    let stranger = PeerIntroduction { key_hashes: Vec::new(), ..introduced };
    obey(&taker.shared, MirrorAssignment { peers: vec![stranger], ..takes });
    until("the stream is over", || {
        taker.shared.options.metrics.render().contains("quoin_mirror_streams 0")
    })
    .await;
    until("the sender is told", || !sender.sent().message.is_empty()).await;
    assert!(!copy.is_fed.load(Ordering::Relaxed));
}

#[tokio::test]
async fn messages_pass_by_a_link_that_either_side_dialled() {
    let (east, west) = (Cluster::create(), Cluster::create());
    let (leader, other) = (east.mirror("e1").await, west.mirror("w1").await);
    let message = |peer: &Cluster, body: &str| PeerMessage {
        peer_cluster_id: peer.id(),
        group_id: hex(8),
        body: body.as_bytes().to_vec(),
    };
    let answers = MirrorAssignment {
        messages: vec![message(&east, "back"), message(&west, "to nobody")],
        ..of(east.introduction(&[&leader]))
    };
    obey(&other.shared, answers);
    let asks = MirrorAssignment {
        leads: true,
        messages: vec![message(&west, "there")],
        ..of(west.introduction(&[&other]))
    };
    obey(&leader.shared, asks);
    for (mirror, from, body) in [(&other, &east, "there"), (&leader, &west, "back")] {
        until("the message came", || !mirror.shared.inbox.first().0.is_empty()).await;
        assert_eq!(mirror.shared.inbox.first().0, [message(from, body)]);
    }
    assert!(other.shared.assignment.borrow().messages.is_empty(), "none is said twice");
}
