//! The target's side of the control plane: assigned volumes, epochs, reports.
//!
//! IO never waits for it. Volumes stay served while the controller is away; only an open needs an
//! epoch, and requests it until it gets one.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_api::control;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    AcquireEpochRequest, AgentEvent, GoesBy, NodeAssignment, ReplicaProgress,
    SwapMembershipRequest, TargetReport, VolumeReport, WAITS_FOR_KEY, WatchNodeRequest,
    acquire_epoch_response, swap_membership_response,
};
use quoin_attach::protocol::AttachVolume;
use quoin_encryption::DataKey;
use quoin_encryption::handing::Refusal;
use quoin_identity::{Contact, Identity, SourceAddress, TermChannel, convert};
use quoin_replication::primary::{PrimaryStatus, ReplicaStanding};
use quoin_telemetry::notices::{Notice, Notices, Severity};
use quoin_types::VolumeId;
use quoin_types::block::DeviceInfo;
use quoin_types::membership::Member;
use quoin_wire::Mode;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tonic::Status;

use crate::Options;
use crate::assignment::{self, Assigned, ServedAt, Sharer, granted_options};
use crate::client::User;
use crate::dial::{Dials, Reach};
use crate::epoch_requests::EpochRequests;
use crate::fences::{CarriedOut, Fences};
use crate::nbd_listener::{NbdListener, NbdOptions, NewClient};
use crate::openings::Openings;
use crate::relay::{Destination, Relays};
use crate::requested_devices::RequestedDevices;
use crate::shard::{Ask, FeedProgress, Grant, Input, ShardHandle, Told, VolumeUpdate};
use crate::shares::Shares;
use crate::standing::{Holder, Openers, Port};
use crate::verification::verification;
use crate::volume_metrics::Standing;

/// Interval of reports of all volumes; each change is reported sooner.
const REPORT_EVERY: Duration = Duration::from_secs(5);
/// Interval of the target's own reports.
const LIVES_EVERY: Duration = Duration::from_secs(2);
/// Longest wait for the answer to one. It is short: the pools are to hear this target in its stead
/// before the node counts as silent.
const LIVES_MAX: Duration = Duration::from_secs(2);
/// Pause between attempts to open the port for other nodes.
const SHARE_RETRY: Duration = Duration::from_secs(5);
/// Time within which changes are combined into one report.
const GATHER: Duration = Duration::from_millis(100);
/// Pause between attempts to reach a controller that is away.
const RETRY: Duration = Duration::from_millis(250);
const CALL_MAX: Duration = Duration::from_secs(5);
/// Longest wait for a shard's status at the end of its process.
const STATUS_MAX: Duration = Duration::from_millis(500);
/// Time after which a volume that stopped but is still assigned is opened again.
const REOPEN: Duration = Duration::from_secs(1);

/// A volume that is offered to another node.
pub(crate) struct Offered {
    pub info: DeviceInfo,
    /// The first epoch of the node's use.
    pub since_epoch: u64,
    /// Number of the node's attachment, if it may change the volume; or 0.
    pub client: u64,
}

pub(crate) struct Control {
    pub options: Options,
    pub identity: Identity,
    pub channel: TermChannel,
    /// The address of this host by which the controller is reached.
    pub source: SourceAddress,
    pub devices: RequestedDevices,
    pub contact: Contact,
    pub shards: Vec<ShardHandle>,
    pub dials: Dials,
    pub notices: Notices,
    pub served: Mutex<Served>,
    /// Notified of a change that is worth a report soon.
    pub changed: Arc<Notify>,
    /// Listener that serves volumes over TCP.
    pub nbd_listener: Option<NbdListener>,
    /// Volumes that other nodes serve.
    pub relays: Arc<Relays>,
    /// Port for other nodes that share volumes with this one.
    pub shares: Shares,
    /// Digest of the fences that were carried out last.
    pub fences_digest: Arc<CarriedOut>,
    /// Commands whose ranges are hashed now.
    pub hashing: Mutex<std::collections::BTreeSet<u64>>,
}

/// Assigned volumes, and the actions taken for them.
#[derive(Default)]
pub(crate) struct Served {
    wanted: BTreeMap<VolumeId, Assigned>,
    open: Openings,
    /// Keys that were handed over for volumes in use here: [`Control::unlock`].
    keys: BTreeMap<VolumeId, DataKey>,
    reach: Option<Mode>,
    /// Whose certificates open all that is served here.
    openers: Openers,
    /// Clients that are let in no more.
    fences: Fences,
}

impl Control {
    /// Follows the assignments until `shutdown`; reconnects without limit.
    ///
    /// # Errors
    /// The controller's statement that the node was removed.
    pub async fn follow(&self, shutdown: watch::Receiver<bool>) -> Result<(), String> {
        // This target does not know which volumes it is to serve until the controller answers.
        self.contact.set_io_waits(true);
        let tell = |why| self.options.metrics.health.set("controller", Some(why));
        self.contact.follow(shutdown, RETRY, || self.follow_once(), tell).await
    }

    async fn follow_once(&self) -> Result<(), Status> {
        let mut client = AgentClient::new(self.channel.clone());
        let request = WatchNodeRequest { node: self.options.node.clone() };
        let mut assignments = client.watch_node(request).await?.into_inner();
        self.options.metrics.health.set("controller", None);
        // A controller that has just started does not know the served volumes.
        self.changed.notify_one();
        let mut terms = self.identity.terms().changes();
        let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
        let (mut proof, mut rules) = (Vec::new(), false);
        loop {
            let message = tokio::select! {
                message = assignments.message() => message?,
                // A pool may have reported another controller's term: this controller's may be
                // over, and it learns that by the next call.
                _ = terms.changed() => {
                    self.identity.accept_controller_term(&proof, rules).map_err(refused)?;
                    continue;
                }
            };
            let Some(message) = message else { return Ok(()) };
            self.contact.reached();
            (proof, rules) = (message.term.clone(), !message.does_not_rule);
            if self.identity.accept_controller_term(&proof, rules).map_err(refused)? {
                self.contact.set_io_waits(false);
                self.assign(&message);
            }
        }
    }

    fn assign(&self, message: &NodeAssignment) {
        let mut served = self.served.lock().expect("never held across a panic");
        if let Some(mode) = Mode::from_name(&message.data_security)
            && served.reach != Some(mode)
        {
            served.reach = Some(mode);
            mode.remember(self.identity.dir());
            self.dials.set_reach(Reach::Tls { identity: self.identity.clone(), mode });
        }
        self.options.metrics.lost(&message.served_elsewhere);
        // Records that do not rule say nothing of who is a member.
        if message.complete || message.partial {
            self.admit(&mut served, Openers::of(&message.members));
            self.shut_out(&mut served, message.fences.as_ref());
        }
        let (wanted, refused) = assignment::parse(message);
        for reason in refused {
            self.notices.push(Severity::Error, "", "", "AssignmentRefused", reason);
        }
        assignment::take(&mut served.wanted, wanted, message);
        self.reconcile(&mut served);
    }

    /// Lets these in from now on, and ends the connections of those whose key counts no more.
    fn admit(&self, served: &mut Served, openers: Openers) {
        if served.openers == openers {
            return;
        }
        served.openers = openers;
        for shard in &self.shards {
            shard.send(Input::Openers(served.openers.clone()));
        }
    }

    /// Lets these clients in no more, and ends their connections. It is told once that is done.
    fn shut_out(&self, served: &mut Served, told: Option<&control::Fences>) {
        let fences = told.map(Fences::of).unwrap_or_default();
        if served.fences == fences {
            return;
        }
        served.fences = fences;
        let ends: Vec<_> = self
            .shards
            .iter()
            .map(|shard| {
                let (done, end) = oneshot::channel();
                shard.send(Input::Fences(served.fences.clone(), done));
                end
            })
            .collect();
        let (carried_out, digest) = (self.fences_digest.clone(), served.fences.digest());
        let number = carried_out.begin();
        tokio::spawn(async move {
            for end in ends {
                // A shard that ends serves no client.
                let _ = end.await;
            }
            carried_out.end(number, digest);
        });
    }

    /// Returns true if a client by this address, and holder of this certificate, is let in no more.
    pub fn is_fenced(&self, from: IpAddr, holder: Option<&Holder>) -> bool {
        let served = self.served.lock().expect("never held across a panic");
        served.fences.cover(Some(from), holder)
    }

    /// Members whose certificates open all that is served here.
    pub fn openers(&self) -> Openers {
        self.served.lock().expect("never held across a panic").openers.clone()
    }

    /// Opens missing volumes, updates changed ones, closes those that are not assigned any more.
    fn reconcile(&self, served: &mut Served) {
        let Served { wanted, open, keys, .. } = served;
        let is_here = |id: &VolumeId| wanted.get(id).is_some_and(|a| a.served_at.is_none());
        for id in self.relays.ids() {
            match wanted.get(&id) {
                // It was attached again before its device went away, where the end comes late.
                None => {
                    if let Some(use_of) = self.relays.begin_end(id) {
                        let relays = self.relays.clone();
                        self.devices.release(id, move || relays.end_use(id, use_of));
                    }
                }
                Some(_) if is_here(&id) => self.relays.release(id),
                Some(_) => {}
            }
        }
        let has_sharers = |(id, a): (&VolumeId, &Assigned)| is_here(id) && !a.sharers.is_empty();
        self.shares.want(wanted.iter().any(has_sharers));
        // A key serves one use: after a detachment it must be handed over again.
        keys.retain(|id, _| wanted.get(id).is_some_and(|assigned| !assigned.maintenance));
        for (id, shard) in open.all() {
            let shard = &self.shards[shard];
            let Some(assigned) = wanted.get(&id) else {
                if open.close(id) {
                    let shard = shard.clone();
                    self.devices.release(id, move || shard.send(Input::Close(id)));
                }
                continue;
            };
            // Another node's target serves it from now on, and this one leads there once it has closed the volume.
            let is_elsewhere = assigned.served_at.is_some();
            // An open volume is not made writable, nor are its grant and what its clients know taken back in
            // part: it is closed and opened anew.
            let is_another = open.is_read_only(id) != assigned.config.read_only;
            if is_elsewhere || is_another {
                if open.close(id) {
                    shard.send(Input::Close(id));
                }
                continue;
            }
            shard.send(Input::Update(Box::new(VolumeUpdate {
                volume: id,
                socket: self.socket(id, assigned, keys),
                key: keys.get(&id).cloned(),
                read_only: assigned.info.read_only,
                since_epoch: assigned.since_epoch,
                size_bytes: assigned.info.size_bytes,
                limits: assigned.limits,
                options: assigned.options,
                replicas: assigned.replicas.clone(),
                desired: assigned.desired.clone(),
                verify: assigned.verify,
                client: assigned.client,
                sharers: assigned.sharers.clone(),
                feed: assigned.feed,
            })));
        }
        for (id, assigned) in wanted.iter() {
            if let Some(device) = self.device(*id, assigned, keys) {
                self.devices.want(*id, &assigned.info.name, device);
            }
            if open.contains(*id) {
                continue;
            }
            if let Some(at) = &assigned.served_at {
                self.relay(*id, assigned, at, keys);
                continue;
            }
            let shard = open.begin(*id, self.shards.len(), assigned.config.read_only);
            let socket = self.socket(*id, assigned, keys);
            let setup = assigned.setup(socket, keys.get(id).cloned());
            self.shards[shard].send(Input::Open(Box::new(setup)));
        }
    }

    /// Leads from the volume's socket here to the target of another node.
    fn relay(&self, id: VolumeId, assigned: &Assigned, at: &ServedAt, keys: &Keys) {
        if is_locked(id, assigned, keys) {
            // The host that uses it shows its key, as where the volume is served.
            return self.relays.release(id);
        }
        if at.address.is_empty() {
            // A controller that has just started does not know it yet.
            return self.relays.leave(id, &at.node);
        }
        let to = Destination {
            node: at.node.clone(),
            address: at.address.clone(),
            export: assigned.info.name.clone(),
            key_hashes: at.key_hashes.clone(),
            key: keys.get(&id).cloned(),
        };
        if let Err(error) = self.relays.want(id, &self.path(id), to) {
            let why = format!("it is served by node {}, and not reached here: {error}", at.node);
            self.notices.push(Severity::Error, id, "", "CannotServe", why);
        }
    }

    fn path(&self, id: VolumeId) -> PathBuf {
        self.options.run_dir.join("nbd").join(format!("{id}.sock"))
    }

    /// Returns the socket of a volume on this host; `None`: it accepts no clients.
    fn socket(&self, id: VolumeId, assigned: &Assigned, keys: &Keys) -> Option<PathBuf> {
        (!assigned.maintenance && !is_locked(id, assigned, keys)).then(|| self.path(id))
    }

    /// Returns the block device that is to be made of a volume.
    fn device(&self, id: VolumeId, assigned: &Assigned, keys: &Keys) -> Option<AttachVolume> {
        let nbd_socket = self.socket(id, assigned, keys).filter(|_| assigned.device)?;
        Some(AttachVolume {
            volume: id.to_string(),
            nbd_socket: std::path::absolute(&nbd_socket).unwrap_or(nbd_socket),
            size: assigned.info.size_bytes,
            block_size: assigned.config.logical_block_size,
            read_only: assigned.info.read_only,
            file_only: false,
            key: None,
        })
    }

    /// Takes the key of a volume that is attached here, and serves it from now on.
    ///
    /// # Errors
    /// The reason why it is not taken.
    pub fn unlock(&self, volume: &str, key: DataKey) -> Result<(), Refusal> {
        let id = convert::id::<VolumeId>("volume", volume).map_err(|_| Refusal::Malformed)?;
        let mut served = self.served.lock().expect("never held across a panic");
        let assigned = served.wanted.get(&id).filter(|assigned| !assigned.maintenance);
        let assigned = assigned.ok_or(Refusal::NotServed)?;
        let encryption = assigned.encryption.as_ref().ok_or(Refusal::NotEncrypted)?;
        encryption.open(&key).map_err(|error| match error {
            quoin_encryption::Error::WrongKey => Refusal::WrongKey,
            _ => Refusal::Failed,
        })?;
        if served.keys.insert(id, key).is_none() {
            tracing::info!(volume = %id, "its key was handed over");
            self.reconcile(&mut served);
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Returns the data key of a volume in use here, which was handed over.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn data_key(&self, volume: &str) -> Result<DataKey, Refusal> {
        let id = convert::id::<VolumeId>("volume", volume).map_err(|_| Refusal::Malformed)?;
        let served = self.served.lock().expect("never held across a panic");
        let assigned = served.wanted.get(&id).filter(|assigned| !assigned.maintenance);
        let assigned = assigned.ok_or(Refusal::NotServed)?;
        assigned.encryption.as_ref().ok_or(Refusal::NotEncrypted)?;
        served.keys.get(&id).cloned().ok_or(Refusal::NotServed)
    }

    /// Reports that this target runs, until `shutdown`.
    pub async fn live(&self, mut shutdown: watch::Receiver<bool>) {
        let devices = quoin_node::DeviceReports::of(self.devices.socket());
        let mut unheard = false;
        loop {
            let here = devices.report().await;
            let mut request = tonic::Request::new(TargetReport {
                node: self.options.node.clone(),
                address: self.source.ip().map(|ip| ip.to_string()).unwrap_or_default(),
                version: env!("CARGO_PKG_VERSION").into(),
                knows_devices: here.is_some(),
                devices: here.as_ref().map(quoin_node::Reported::reports).unwrap_or_default(),
                share_address: self.share_address(),
                addresses: quoin_node::host_addresses(),
                fences_digest: self.fences_digest.get(),
            });
            request.set_timeout(LIVES_MAX);
            let answer = AgentClient::new(self.channel.clone()).report_target(request).await;
            // While the controller does not hear this target, the pools do.
            let is_unheard = answer.is_err();
            if is_unheard != unheard {
                unheard = is_unheard;
                for shard in &self.shards {
                    shard.send(Input::KeepLeases(unheard));
                }
            }
            match answer {
                Ok(answer) => {
                    let (here, answer) = (here.as_ref(), answer.get_ref());
                    let followed = devices.follow(here, answer, BTreeMap::new()).await;
                    self.options.metrics.left_over(followed.left);
                }
                Err(status) => {
                    tracing::debug!(%status, "a sign of life did not reach the controller");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(LIVES_EVERY) => {}
                () = self.shares.opened() => {}
                () = self.fences_digest.changed() => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
        }
    }

    /// Where other nodes reach the volumes that they share with this one; empty: nowhere.
    fn share_address(&self) -> String {
        let listener = self.nbd_listener.as_ref().filter(|listener| listener.is_tls());
        let ip = self.source.ip();
        match (listener, self.shares.port()) {
            (Some(listener), _) => listener.address(ip),
            (None, Some(port)) => ip.map(|ip| SocketAddr::new(ip, port).to_string()),
            (None, None) => None,
        }
        .unwrap_or_default()
    }

    /// Opens the port for other nodes once a volume is shared with them, and serves them until
    /// `shutdown`.
    pub async fn share(self: Arc<Self>, shutdown: watch::Receiver<bool>) {
        if self.nbd_listener.as_ref().is_some_and(NbdListener::is_tls) {
            return;
        }
        let listener = loop {
            let mut ends = shutdown.clone();
            tokio::select! {
                () = self.shares.wanted() => {}
                _ = ends.wait_for(|down| *down) => return,
            }
            let listen = self.options.share_listen;
            let options = NbdOptions { listen, advertise: None, plain: false };
            match NbdListener::open(&options, &self.identity) {
                Ok(listener) => break listener,
                Err(error) => {
                    let why =
                        format!("other nodes do not reach the volumes that they share: {error}");
                    self.notices.push(Severity::Error, "", "", "CannotShare", why);
                    tokio::time::sleep(SHARE_RETRY).await;
                }
            }
        };
        self.shares.open(listener.port());
        if let Err(error) = listener.serve(Port::Sharers, self.clone(), shutdown).await {
            tracing::error!(%error, "volumes are not shared with other nodes any more");
        }
    }

    /// Carries out the shards' requests, until the shards are gone.
    pub async fn answer(self: Arc<Self>, mut asks: mpsc::UnboundedReceiver<Ask>) {
        let mut epochs = EpochRequests::default();
        while let Some(ask) = asks.recv().await {
            match ask {
                Ask::Changed => self.changed.notify_one(),
                Ask::Answered { volume, answer } => {
                    let control = self.clone();
                    tokio::spawn(async move { control.report_outcome(volume, answer).await });
                }
                Ask::Stepped { volume, point, outcome } => {
                    let control = self.clone();
                    tokio::spawn(async move { control.report_step(volume, point, outcome).await });
                }
                Ask::Reverted { volume, attempt, outcome } => {
                    let control = self.clone();
                    tokio::spawn(async move {
                        control.report_revert(volume, attempt, outcome).await;
                    });
                }
                Ask::Pulled { volume, token, answer } => {
                    let control = self.clone();
                    tokio::spawn(async move { control.report_part(volume, token, answer).await });
                }
                Ask::Stopped { volume, fenced } => {
                    tracing::info!(%volume, fenced, "not served here any more");
                    let control = self.clone();
                    tokio::spawn(async move { control.stopped(volume).await });
                    self.changed.notify_one();
                }
                Ask::Epoch { volume, incarnation, at_least } => {
                    let (control, mut turn) = (self.clone(), epochs.turn(volume));
                    tokio::spawn(async move {
                        turn.comes().await;
                        let grant = control.acquire(volume, incarnation, at_least).await;
                        drop(turn);
                        control.tell(volume, Input::Granted(volume, incarnation, grant));
                    });
                }
                Ask::Swap { volume, incarnation, epoch, version, next } => {
                    let control = self.clone();
                    tokio::spawn(async move {
                        let membership =
                            control.swap(volume, incarnation, epoch, version, &next).await;
                        control.tell(volume, Input::Swapped { volume, version, membership });
                    });
                }
            }
        }
    }

    /// Returns true if the volume is open here for reading alone.
    pub(crate) fn only_reads(&self, volume: VolumeId) -> bool {
        self.served.lock().expect("never held across a panic").open.is_read_only(volume)
    }

    pub(crate) fn tell(&self, volume: VolumeId, input: Input) {
        let served = self.served.lock().expect("never held across a panic");
        if let Some(shard) = served.open.shard(volume) {
            self.shards[shard].send(input);
        }
    }

    /// Returns the volumes that another node shares with this one, as it sees them. `proof`: the secret
    /// of its connection, and what it shows by that of having a volume's key; an encrypted volume is
    /// there for those alone who have its key.
    pub fn exports_to(&self, holder: &Holder, proof: Option<([u8; 32], [u8; 32])>) -> Vec<Offered> {
        let served = self.served.lock().expect("never held across a panic");
        let has_key = |id: &VolumeId| {
            let key = served.keys.get(id);
            key.zip(proof).is_some_and(|(key, (secret, proof))| key.is_proven_by(&secret, &proof))
        };
        let open = served.wanted.iter().filter(|(id, assigned)| {
            served.open.contains(**id) && (assigned.encryption.is_none() || has_key(id))
        });
        let shared = open.filter_map(|(_, assigned)| {
            let is_it = |sharer: &&Sharer| {
                sharer.node == holder.name && sharer.key_hashes.contains(&holder.key_hash)
            };
            let sharer = assigned.sharers.iter().find(is_it)?;
            let info = DeviceInfo { read_only: sharer.read_only, ..assigned.info.clone() };
            Some(Offered { info, since_epoch: assigned.since_epoch, client: sharer.client })
        });
        shared.collect()
    }

    /// Returns the volumes that are served here, as clients see them.
    pub fn exports(&self) -> Vec<DeviceInfo> {
        let served = self.served.lock().expect("never held across a panic");
        let open = served
            .wanted
            .iter()
            .filter(|(id, assigned)| served.open.contains(**id) && !assigned.maintenance)
            .filter(|(_, assigned)| assigned.served_at.is_none())
            .filter(|(id, assigned)| !is_locked(**id, assigned, &served.keys));
        open.map(|(_, assigned)| assigned.info.clone()).collect()
    }

    /// Hands a client that opened the volume of that name to the shard that serves it; false: it is
    /// not served here any more.
    pub fn adopt(&self, name: &str, client: NewClient) -> bool {
        let served = self.served.lock().expect("never held across a panic");
        let named = |(_, a): &(&VolumeId, &Assigned)| a.info.name == name && !a.maintenance;
        let Some((id, _)) = served.wanted.iter().find(named) else { return false };
        let Some(shard) = served.open.shard(*id) else { return false };
        let holder = client.user.as_ref().map(|user| &user.holder);
        if served.fences.cover(client.from, holder) {
            return false;
        }
        // Its key may count no more since it was let in; the shard looks at that of a sharer.
        if let Some(User { holder, shares: None }) = &client.user
            && !served.openers.admit(holder)
        {
            return false;
        }
        self.shards[shard].send(Input::Client(*id, Box::new(client)));
        true
    }

    async fn stopped(&self, volume: VolumeId) {
        let closing = {
            let served = self.served.lock().expect("never held across a panic");
            served.open.is_closing(volume)
        };
        if !closing {
            // Fenced or refused: if it is still assigned here, it is opened again.
            tokio::time::sleep(REOPEN).await;
        }
        let mut served = self.served.lock().expect("never held across a panic");
        served.open.end(volume);
        self.reconcile(&mut served);
    }

    async fn acquire(
        &self,
        volume: VolumeId,
        incarnation: quoin_types::Incarnation,
        at_least: quoin_types::Epoch,
    ) -> Grant {
        let mut request = tonic::Request::new(AcquireEpochRequest {
            volume_id: volume.to_string(),
            node: self.options.node.clone(),
            incarnation: incarnation.to_string(),
            at_least: at_least.0,
            fences_digest: self.fences_digest.get(),
        });
        request.set_timeout(CALL_MAX);
        let answer = match AgentClient::new(self.channel.clone()).acquire_epoch(request).await {
            Ok(answer) => answer.into_inner(),
            // The record is gone: no node owns the volume.
            Err(status) if status.code() == tonic::Code::NotFound => return Grant::NotOwner,
            Err(status) => {
                tracing::debug!(%volume, %status, "no epoch yet");
                return Grant::Failed;
            }
        };
        match answer.outcome() {
            acquire_epoch_response::Outcome::NotOwner => Grant::NotOwner,
            acquire_epoch_response::Outcome::Granted => {
                let membership = answer.membership.as_ref().map(convert::membership);
                let version = answer.options_version;
                let options = answer.spec.as_ref().map(|spec| granted_options(spec, version));
                match (membership, options.transpose()) {
                    (Some(Ok(membership)), Ok(options)) => Grant::Given {
                        epoch: quoin_types::Epoch(answer.epoch),
                        membership,
                        bytes: answer.grant.into(),
                        options,
                    },
                    other => {
                        tracing::error!(%volume, ?other, "a grant that makes no sense");
                        Grant::Failed
                    }
                }
            }
            acquire_epoch_response::Outcome::Unspecified => {
                tracing::debug!(%volume, message = answer.message, "no epoch yet");
                Grant::Failed
            }
        }
    }

    /// Requests a change of membership; `None`: the outcome is unknown.
    async fn swap(
        &self,
        volume: VolumeId,
        incarnation: quoin_types::Incarnation,
        epoch: quoin_types::Epoch,
        version: u64,
        next: &quoin_types::Membership,
    ) -> Option<quoin_types::Membership> {
        let mut request = tonic::Request::new(SwapMembershipRequest {
            volume_id: volume.to_string(),
            node: self.options.node.clone(),
            epoch: epoch.0,
            incarnation: incarnation.to_string(),
            version,
            rf: next.rf.into(),
            cf: next.cf.into(),
            known: convert::member_messages(&next.known),
        });
        request.set_timeout(CALL_MAX);
        let answer = AgentClient::new(self.channel.clone()).swap_membership(request).await;
        match answer {
            Ok(answer) => {
                let answer = answer.into_inner();
                if answer.outcome() == swap_membership_response::Outcome::Refused {
                    let message =
                        format!("the change of membership was refused: {}", answer.message);
                    self.notices.push(Severity::Warning, volume, "", "ChangeRefused", message);
                }
                answer.membership.as_ref().and_then(|m| convert::membership(m).ok())
            }
            Err(status) => {
                tracing::debug!(%volume, %status, "the membership change has no outcome yet");
                None
            }
        }
    }

    /// Reports each change soon and everything at intervals, until `shutdown`.
    pub async fn report(&self, mut shutdown: watch::Receiver<bool>) {
        loop {
            let stopping = tokio::select! {
                () = tokio::time::sleep(REPORT_EVERY) => false,
                () = self.changed.notified() => false,
                _ = shutdown.wait_for(|down| *down) => true,
            };
            if stopping {
                return;
            }
            tokio::time::sleep(GATHER).await;
            self.report_all().await;
        }
    }

    pub async fn report_all(&self) {
        let (mut ids, mut standings) = (Vec::new(), Vec::new());
        for shard in &self.shards {
            let (answer, status) = oneshot::channel();
            shard.send(Input::Status(answer));
            let Ok(Ok(volumes)) = tokio::time::timeout(CALL_MAX, status).await else { continue };
            for Told { volume, status, feed, counts } in volumes {
                ids.push((volume, feed));
                let (name, claim) = self.names_of(volume);
                standings.push(Standing { name, claim, status, counts });
            }
        }
        // The metrics are updated before the report, because the controller may not answer.
        self.options.metrics.stand(&standings);
        let mut notices = self.notices.take();
        for ((id, progress), Standing { status, .. }) in ids.into_iter().zip(&standings) {
            let (ours, others): (Vec<_>, Vec<_>) =
                notices.into_iter().partition(|n| n.volume == id.to_string());
            notices = others;
            self.report_one(id, status, progress, ours).await;
        }
        // Notices of volumes that are not served any more; reported with another one's report.
        self.notices.restore(notices);
    }

    /// Returns a text of what is still open: the volumes of each shard that answers.
    pub async fn unclosed(&self) -> Vec<String> {
        let mut unclosed = Vec::new();
        for (n, shard) in self.shards.iter().enumerate() {
            let (answer, status) = oneshot::channel();
            shard.send(Input::Status(answer));
            match tokio::time::timeout(STATUS_MAX, status).await {
                Ok(Ok(volumes)) => {
                    unclosed.extend(volumes.iter().map(|told| self.names_of(told.volume).0))
                }
                Ok(Err(_)) => {}
                Err(_) => unclosed.push(format!("all of shard {n}, which hangs")),
            }
        }
        unclosed
    }

    /// Returns the user's name of the volume, and its orchestrator's names.
    fn names_of(&self, id: VolumeId) -> (String, BTreeMap<String, String>) {
        let served = self.served.lock().expect("never held across a panic");
        let names = |assigned: &Assigned| (assigned.info.name.clone(), assigned.claim.clone());
        served.wanted.get(&id).map_or_else(|| (id.to_string(), BTreeMap::new()), names)
    }

    fn waits_for_key(&self, id: VolumeId) -> bool {
        let served = self.served.lock().expect("never held across a panic");
        let assigned = served.wanted.get(&id).filter(|assigned| !assigned.maintenance);
        assigned.is_some_and(|assigned| is_locked(id, assigned, &served.keys))
    }

    fn nbd_uri(&self, id: VolumeId) -> String {
        let served = self.served.lock().expect("never held across a panic");
        let assigned = served.wanted.get(&id).filter(|a| !is_locked(id, a, &served.keys));
        let name = assigned.map(|assigned| assigned.info.name.as_str());
        match (&self.nbd_listener, name) {
            (Some(nbd_listener), Some(name)) => nbd_listener.uri(name),
            _ => String::new(),
        }
    }

    async fn report_one(
        &self,
        id: VolumeId,
        status: &PrimaryStatus,
        feed: Option<FeedProgress>,
        notices: Vec<Notice>,
    ) {
        let epoch = status.epoch;
        let device = self.devices.state(id);
        let locked = match self.waits_for_key(id) {
            true => format!("{WAITS_FOR_KEY} {KEY_WAY_OUT}"),
            false => String::new(),
        };
        let mut request = tonic::Request::new(VolumeReport {
            volume_id: id.to_string(),
            node: self.options.node.clone(),
            epoch: epoch.0,
            state: state(status).into(),
            waiting_for: match status.waiting.as_str() {
                "" => locked,
                reason => reason.to_owned(),
            },
            replicas: status
                .replicas
                .iter()
                .map(|r| ReplicaProgress {
                    replica_id: r.member.id.to_string(),
                    guid: r.member.guid.to_string(),
                    state: standing(r.standing).into(),
                    applied_lsn: r.applied.0,
                    durable_lsn: r.durable.0,
                    rebuilt_bytes: r.rebuilt_bytes,
                    rebuild_total_bytes: r.rebuild_total_bytes,
                    write_us: r.write_took.map_or(0, |took| took.as_micros() as u64),
                    slow: r.slow,
                })
                .collect(),
            size_bytes: status.volume_blocks * quoin_types::BLOCK_SIZE as u64,
            events: notices.iter().map(event).collect(),
            nbd_uri: self.nbd_uri(id),
            verification: status.verify.as_ref().map(verification),
            membership_version: status.membership.version,
            silent: guids(status.silent.iter().copied()),
            device: device.path,
            device_message: device.message,
            device_refused: device.refused,
            options_version: status.options_version,
            waiting_kind: status.waiting_kind.to_owned(),
            goes_by: (status.membership.rf > 0).then(|| GoesBy {
                granted: Some(convert::membership_message(&status.granted)),
                held: Some(convert::membership_message(&status.membership)),
                desired_replication_factor: status.desired.drf.into(),
                desired_consistency_factor: status.desired.cf.into(),
                newcomers: guids(status.desired.newcomers.iter().map(|n| n.member)),
                leaving: guids(status.desired.leaving.iter().copied()),
            }),
            content_lsn: status.content_lsn.0,
            feed: feed.map(|feed| control::FeedProgress {
                order: Some(assignment::order_message(feed.order)),
                taken_to: feed.taken_to,
                stable_to: feed.stable_to,
                fed: feed.is_fed,
            }),
        });
        request.set_timeout(CALL_MAX);
        match AgentClient::new(self.channel.clone()).report_volume(request).await {
            Ok(answer) => {
                let grant = answer.into_inner().grant;
                if !grant.is_empty() {
                    self.tell(id, Input::Regranted(id, epoch, grant.into()));
                }
            }
            Err(status) => {
                tracing::debug!(volume = %id, %status, "a report did not reach the controller");
                self.notices.restore(notices);
            }
        }
    }
}

type Keys = BTreeMap<VolumeId, DataKey>;

/// Way to the key, after [`WAITS_FOR_KEY`]: without it an encrypted volume accepts no clients.
const KEY_WAY_OUT: &str = "(`quoin volume attach --key-file` on its node, or its CSI stage secret)";

fn is_locked(id: VolumeId, assigned: &Assigned, keys: &Keys) -> bool {
    assigned.encryption.is_some() && !keys.contains_key(&id)
}

fn state(status: &PrimaryStatus) -> &'static str {
    match status {
        PrimaryStatus { stopped: true, .. } => "stopped",
        PrimaryStatus { serving: false, waiting, .. } if waiting.is_empty() => "opening",
        PrimaryStatus { serving: true, waiting, .. } if waiting.is_empty() => "serving",
        _ => "waiting",
    }
}

fn standing(standing: ReplicaStanding) -> &'static str {
    match standing {
        ReplicaStanding::Disconnected => "disconnected",
        ReplicaStanding::Opening | ReplicaStanding::CatchingUp => "catching-up",
        ReplicaStanding::Rebuilding => "rebuilding",
        ReplicaStanding::InSync => "in-sync",
    }
}

fn guids(members: impl Iterator<Item = Member>) -> Vec<String> {
    members.map(|member| member.guid.to_string()).collect()
}

fn event(notice: &Notice) -> AgentEvent {
    AgentEvent {
        severity: notice.severity.as_str().into(),
        volume_id: notice.volume.clone(),
        replica_id: notice.replica.clone(),
        reason: notice.reason.clone(),
        message: notice.message.clone(),
    }
}

#[cfg(test)]
mod tests;
