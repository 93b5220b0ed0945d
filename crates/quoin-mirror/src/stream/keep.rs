//! Transfers that this mirror sends: a task for each that is ordered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::MirrorAssignment;
use quoin_cluster::mirror::sending::{self, Keeping};
use quoin_identity::{ClusterId, foreign};
use quoin_types::ids::VolumeId;
use tokio::net::UnixStream;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep};

use super::bandwidth::Bucket;
use super::book::Progress;
use super::history::socket;
use super::orders::{Sending, UNREADABLE};
use super::send::{Ended, Sender, Sent};
use crate::Shared;
use crate::dial::peers;

/// A stream that ran for so long makes room for one that waits.
const TURN: Duration = Duration::from_secs(60);
/// A stream is made anew then, by the certificates and authorities of that time.
const STREAM_MAX: Duration = Duration::from_secs(3600);
/// Interval of the question whether a peer is trusted.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Addresses that are remembered, of volumes of which some may be sent no more.
const REMEMBERED_MAX: usize = 4096;

/// Words for a transfer that has no place yet.
const WAITS: &str = "other transfers to this peer are sent first";

/// Transfer that is kept, and its task.
struct Kept {
    order: Sending,
    task: AbortHandle,
}

/// Keeps the transfers that are assigned, for ever.
pub(crate) async fn keep_sending(shared: Arc<Shared>) {
    let mut assignments = shared.assignment.subscribe();
    let mut tasks = JoinSet::new();
    let mut kept = BTreeMap::<(VolumeId, u128), Kept>::new();
    loop {
        let assigned = assignments.borrow_and_update().clone();
        shared.book.keep(|volume, token| {
            assigned.sends.iter().any(|send| send.volume_id == volume && send.token == token)
        });
        let ordered = read(&shared, &assigned);
        kept.retain(|key, kept| {
            let stays = ordered.get(key).is_some_and(|(order, _)| order.is_of(&kept.order));
            if !stays {
                kept.task.abort();
            }
            stays
        });
        for (key, (order, ids)) in ordered {
            kept.entry(key).or_insert_with(|| {
                let metrics = shared.options.metrics.clone();
                let progress = Progress::new(ids.0, ids.1, order.from_block, metrics);
                let progress = shared.book.open(progress);
                let task = tasks.spawn(keep(shared.clone(), order, progress));
                Kept { order, task }
            });
        }
        // Tasks that have ended.
        while tasks.try_join_next().is_some() {}
        if assignments.changed().await.is_err() {
            return;
        }
    }
}

type Ordered<'a> = BTreeMap<(VolumeId, u128), (Sending, (&'a str, &'a str))>;

/// The transfers of an assignment, with the ids as the controller wrote them.
fn read<'a>(shared: &Shared, assigned: &'a MirrorAssignment) -> Ordered<'a> {
    let mut ordered = Ordered::new();
    let mut limits = BTreeMap::new();
    for send in &assigned.sends {
        let (volume, token) = (send.volume_id.as_str(), send.token.as_str());
        match Sending::read(send) {
            Some(order) => {
                limits.insert(order.group, order.bandwidth_limit);
                ordered.insert((order.volume, order.token), (order, (volume, token)));
            }
            None => {
                let metrics = shared.options.metrics.clone();
                let progress = Progress::new(volume, token, send.from_block, metrics);
                shared.book.open(progress).says(UNREADABLE.to_owned());
            }
        }
    }
    shared.bandwidth.set(&limits);
    ordered
}

/// Sends, and sends again what a copy has no more, for as long as it is ordered.
async fn keep(shared: Arc<Shared>, order: Sending, progress: Arc<Progress>) {
    let bucket = shared.bandwidth.of(order.group);
    let mut keeping = Keeping::default();
    loop {
        let before = progress.cursor();
        if progress.message().is_empty() && !keeping.is_done() {
            progress.says(WAITS.to_owned());
        }
        let place = shared.places.take(order.peer, order.group, order.volume.0).await;
        if progress.message() == WAITS {
            progress.says(String::new());
        }
        let ended = attempt(&shared, &order, &progress, &bucket).await;
        drop(place);
        if ended == Ok(Sent::All) {
            progress.sent(order.size_blocks, 0, 0);
            progress.taken(order.size_blocks);
            progress.says(String::new());
        }
        let how = match &ended {
            Ok(Sent::All) => sending::Ended::All,
            Ok(Sent::Paused) => sending::Ended::Paused,
            Err(_) => sending::Ended::Failed,
        };
        let cursor = progress.cursor();
        let again = keeping.ended(how, cursor > before, cursor >= order.size_blocks);
        if let Some(why) = ended.err().filter(|_| again.is_told) {
            progress.says(why);
        }
        sleep(again.after).await;
    }
}

/// Tries the addresses of the peer, the one that took the volume last before the others.
///
/// # Errors
/// The reason why it does not go on.
async fn attempt(
    shared: &Shared,
    order: &Sending,
    progress: &Progress,
    bucket: &Bucket,
) -> Result<Sent, String> {
    let mut addresses = {
        let assigned = shared.assignment.borrow();
        let peers = peers(&assigned);
        peers.get(&order.peer.0).map(|peer| peer.addresses.clone()).unwrap_or_default()
    };
    if let Some(last) = remembered(shared, order.volume) {
        addresses.sort_by_key(|address| *address != last);
    }
    if addresses.is_empty() {
        return Err("the peer has told no address of a mirror".to_owned());
    }
    let mut why = Vec::new();
    for address in &addresses {
        let before = progress.cursor();
        let ended = send_to(shared, order, progress, bucket, address).await;
        let is_its_place = ended.is_ok() || progress.cursor() > before;
        if is_its_place {
            remember(shared, order.volume, address);
        }
        match ended {
            Ok(sent) => return Ok(sent),
            // The other addresses would not help.
            Err(error @ Ended::Source(_)) => return Err(error.to_string()),
            Err(error) if is_its_place => return Err(format!("{address}: {error}")),
            Err(error) => why.push(format!("{address}: {error}")),
        }
    }
    Err(why.join("; "))
}

fn remembered(shared: &Shared, volume: VolumeId) -> Option<String> {
    let places = shared.worked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    places.get(&volume).cloned()
}

fn remember(shared: &Shared, volume: VolumeId, address: &str) {
    let mut places = shared.worked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if places.len() >= REMEMBERED_MAX && !places.contains_key(&volume) {
        places.pop_first();
    }
    places.insert(volume, address.to_owned());
}

/// One stream to one address.
async fn send_to(
    shared: &Shared,
    order: &Sending,
    progress: &Progress,
    bucket: &Bucket,
    address: &str,
) -> Result<Sent, Ended> {
    let peer: ClusterId = order.peer;
    let config = shared.identity.foreign_client_config(&shared.trusted, peer);
    let config = config.map_err(|error| Ended::Lost(error.to_string()))?;
    let connected = foreign::connect(address, config).await;
    let (stream, holder, key) = connected.map_err(|error| Ended::Lost(error.to_string()))?;
    let begun = Instant::now();
    let sender = Sender {
        order,
        progress,
        bucket,
        heard: &|| shared.contacts.heard(peer),
        is_to_pause: &|| {
            let ran = begun.elapsed();
            ran > STREAM_MAX || ran > TURN && shared.places.are_wanted(peer)
        },
    };
    let untrusted = async {
        while shared.trusted.still_trusts(&holder, &key) {
            sleep(LOOK_EVERY).await;
        }
        Ended::Lost("the peer's mirror is not trusted any more".to_owned())
    };
    let path = socket(&shared.options.run_dir);
    let _shown = shared.options.metrics.stream();
    tokio::select! {
        sent = sender.run(stream, || UnixStream::connect(path)) => sent,
        ended = untrusted => Err(ended),
    }
}
