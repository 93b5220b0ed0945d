//! The controller's assignment to a target, in the core's types.

use std::collections::BTreeMap;
use std::path::PathBuf;

use quoin_api::control::{self, NodeAssignment, TargetAssignment, VolumeSpec};
use quoin_api::volume::{self, VolumeOptions};
pub use quoin_cluster::mirror::feeding::FeedOrder;
use quoin_cluster::mirror::record::{Stamp, Transfer};
use quoin_encryption::{DataKey, Encryption};
use quoin_identity::convert::id;
use quoin_replication::primary::{
    LiveOptions, OnFull, OnQuorumLoss, PrimaryConfig, ReadMode, VerifyOrder,
};
use quoin_replication::replica::LEASE_MS;
use quoin_types::block::DeviceInfo;
use quoin_types::ids::PointId;
use quoin_types::membership::{Desired, Durability, Member, Newcomer};
use quoin_types::{BLOCK_SIZE, VOLUME_BLOCKS_MAX, VolumeId};

use crate::shard::{Limits, ReplicaPlace, VolumeSetup};

/// A replica that answers later is brought up to date beside the IO of the others, so that one which cannot
/// be asked holds up nobody for long.
const OPEN_GRACE_MS: u32 = 300;
const DROP_AFTER_MS: u32 = 3000;
/// Entries kept for members that lag, per volume.
const WINDOW_BYTES: usize = 64 << 20;
const SYNC_BYTES: usize = 64 << 20;
const SYNC_AFTER_MS: u32 = 1000;

/// One volume as assigned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Assigned {
    pub config: PrimaryConfig,
    pub info: DeviceInfo,
    /// Names of it by its orchestrator, for metrics: `pvc/name` and the like.
    pub claim: BTreeMap<String, String>,
    /// The first epoch of this node's use of the volume; 0: unknown.
    pub since_epoch: u64,
    pub limits: Limits,
    /// Options that may change while it is served.
    pub options: LiveOptions,
    pub replicas: Vec<ReplicaPlace>,
    pub desired: Desired,
    /// Opened for work on its replicas alone: no client is accepted.
    pub maintenance: bool,
    /// Order to compare all replicas.
    pub verify: Option<VerifyOrder>,
    /// A block device is to be made of it here.
    pub device: bool,
    /// `None`: it is not encrypted.
    pub encryption: Option<Encryption>,
    /// Number of this node's attachment, if it shares the volume and may change it; or 0.
    pub client: u64,
    /// Other nodes that use it.
    pub sharers: Vec<Sharer>,
    /// `None`: it is served here.
    pub served_at: Option<ServedAt>,
    /// The one transfer whose slots are taken; `None`: none are.
    pub feed: Option<FeedOrder>,
}

fn parse_order(order: &control::FeedOrder) -> Result<FeedOrder, String> {
    let stamp = Stamp { term: order.term, version: order.version };
    if order.token.is_empty() {
        return Ok(FeedOrder { takes: None, from_block: 0, stamp });
    }
    let point = id::<PointId>("point", &order.point_id)?;
    let base = Some(order.base_id.as_str()).filter(|base| !base.is_empty());
    let base = base.map(|base| id::<PointId>("base", base)).transpose()?;
    let is_token = order.token.len() == 32;
    let token = u128::from_str_radix(&order.token, 16).ok().filter(|_| is_token);
    let token = token.ok_or_else(|| format!("token {:?} is not 32 hex digits", order.token))?;
    if base == Some(point) {
        return Err(format!("point {point} is its own base"));
    }
    if order.from_block > VOLUME_BLOCKS_MAX {
        return Err(format!("block {} is out of range", order.from_block));
    }
    let takes = Some((Transfer { point, base }, token));
    Ok(FeedOrder { takes, from_block: order.from_block, stamp })
}

/// The order as the controller sent it.
pub fn order_message(order: FeedOrder) -> control::FeedOrder {
    let (term, version) = (order.stamp.term, order.stamp.version);
    let Some((transfer, token)) = order.takes else {
        return control::FeedOrder { term, version, ..control::FeedOrder::default() };
    };
    control::FeedOrder {
        point_id: transfer.point.to_string(),
        base_id: transfer.base.map(|base| base.to_string()).unwrap_or_default(),
        token: format!("{token:032x}"),
        from_block: order.from_block,
        term,
        version,
    }
}

/// Another node that uses a volume which is served here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sharer {
    pub node: String,
    pub read_only: bool,
    /// Hashes of the keys by which the node is known.
    pub key_hashes: Vec<String>,
    /// Number of its attachment, if it may change the volume; or 0.
    pub client: u64,
}

/// Target of another node that serves a volume which is used here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServedAt {
    pub node: String,
    /// `HOST:PORT`; empty: not known yet.
    pub address: String,
    /// As in [`Sharer`].
    pub key_hashes: Vec<String>,
}

impl Assigned {
    /// Returns the setup. `socket`: where it is served; `None`: no client is accepted. `key`: that
    /// of an encrypted volume, once it was handed over.
    pub fn setup(&self, socket: Option<PathBuf>, key: Option<DataKey>) -> VolumeSetup {
        VolumeSetup {
            config: self.config.clone(),
            info: self.info.clone(),
            since_epoch: self.since_epoch,
            limits: self.limits,
            options_version: self.options.version,
            socket,
            is_encrypted: self.encryption.is_some(),
            key,
            replicas: self.replicas.clone(),
            desired: self.desired.clone(),
            verify: self.verify,
            client: self.client,
            sharers: self.sharers.clone(),
            feed: self.feed,
            seed: rand::random(),
        }
    }
}

/// Parses all volumes; for each that cannot be parsed, returns the reason.
pub fn parse(message: &NodeAssignment) -> (BTreeMap<VolumeId, Assigned>, Vec<String>) {
    let (mut volumes, mut refused) = (BTreeMap::new(), Vec::new());
    for target in &message.targets {
        match assigned(target) {
            Ok(assigned) => {
                volumes.insert(assigned.config.volume, assigned);
            }
            Err(reason) => {
                refused.push(format!("volume {} ({}): {reason}", target.name, target.volume_id));
            }
        }
    }
    (volumes, refused)
}

/// Takes an assignment in: the whole, a change, or what records that do not rule list.
pub fn take(
    known: &mut BTreeMap<VolumeId, Assigned>,
    parsed: BTreeMap<VolumeId, Assigned>,
    message: &NodeAssignment,
) {
    if message.complete {
        *known = parsed;
        return;
    }
    if message.partial {
        // An earlier assignment of a volume that cannot be understood now does not hold any more.
        let named = message.targets.iter().map(|target| &target.volume_id).chain(&message.removed);
        for volume in named.filter_map(|named| id::<VolumeId>("volume", named).ok()) {
            known.remove(&volume);
        }
    }
    known.extend(parsed);
}

fn verify(order: &control::VerifyOrder) -> Result<VerifyOrder, String> {
    let from = Some(order.from_replica_id.as_str()).filter(|from| !from.is_empty());
    let from = from.map(|from| id("replica", from)).transpose()?;
    Ok(VerifyOrder { request: order.request, repair: order.repair, from })
}

fn complete(spec: &VolumeSpec) -> Result<VolumeOptions, String> {
    // The spread of its placement does not concern a target.
    let options = VolumeOptions::complete(spec, volume::Spread::Host);
    options.map_err(|wrong| format!("{}: {}", wrong.key, wrong.rule))
}

fn live(options: &VolumeOptions, version: u64) -> LiveOptions {
    LiveOptions {
        version,
        durability: match options.durability {
            volume::Durability::Cache => Durability::Cache,
            volume::Durability::Media => Durability::Media,
        },
        on_quorum_loss: match options.on_quorum_loss {
            volume::OnQuorumLoss::Wait => OnQuorumLoss::Wait,
            volume::OnQuorumLoss::Fail => OnQuorumLoss::Fail,
        },
        on_full: match options.on_full {
            volume::OnFull::Wait => OnFull::Wait,
            volume::OnFull::NoSpace => OnFull::NoSpace,
        },
        reads: match options.reads {
            volume::Reads::Leased => ReadMode::Leased,
            volume::Reads::Confirmed => ReadMode::Confirmed,
        },
    }
}

/// Parses the options that come with a grant.
///
/// # Errors
/// An option that this version does not know.
pub fn granted_options(spec: &VolumeSpec, version: u64) -> Result<LiveOptions, String> {
    Ok(live(&complete(spec)?, version))
}

fn assigned(target: &TargetAssignment) -> Result<Assigned, String> {
    let volume_id = id("volume", &target.volume_id)?;
    let spec = target.spec.clone().unwrap_or_default();
    let options = complete(&spec)?;
    let live = live(&options, target.options_version);
    let encryption = spec.encryption.as_ref().map(Encryption::try_from).transpose();
    let encryption = encryption.map_err(|rule| format!("encryption: {rule}"))?;
    if encryption.is_some() && options.block_size.bytes() != BLOCK_SIZE as u32 {
        return Err("an encrypted volume has blocks of 4096 bytes".to_owned());
    }
    let volume_blocks = target.size_bytes.div_ceil(BLOCK_SIZE as u64);
    if volume_blocks == 0 || volume_blocks > VOLUME_BLOCKS_MAX {
        return Err(format!("a size of {} bytes is out of range", target.size_bytes));
    }
    let factor = |what: &str, n: u32| {
        u8::try_from(n).map_err(|_| format!("a {what} of {n} is out of range"))
    };
    let mut desired = Desired {
        drf: factor("desired replication factor", target.desired_replication_factor)?,
        cf: factor("consistency factor", target.consistency_factor)?,
        version: target.membership_version,
        ..Desired::default()
    };
    let mut replicas = Vec::new();
    let mut local = None;
    for replica in &target.replicas {
        let member =
            Member { id: id("replica", &replica.replica_id)?, guid: id("guid", &replica.guid)? };
        if replica.same_host && local.is_none() && !replica.candidate {
            local = Some(member);
        }
        // A replica without an address must not be used; the state machine continues without it.
        if !replica.address.is_empty() {
            replicas.push(ReplicaPlace {
                member,
                pool: replica.pool.clone(),
                address: replica.address.clone(),
            });
            if replica.candidate {
                desired.newcomers.push(Newcomer { member, beside: replica.beside });
            }
        }
        if replica.leaving && !replica.candidate {
            desired.leaving.push(member);
        }
    }
    Ok(Assigned {
        config: PrimaryConfig {
            volume: volume_id,
            volume_blocks,
            logical_block_size: options.block_size.bytes(),
            durability: live.durability,
            on_quorum_loss: live.on_quorum_loss,
            on_full: live.on_full,
            reads: live.reads,
            // Another node may write where this one may not.
            read_only: target.read_only && target.sharers.iter().all(|sharer| sharer.read_only),
            lease_ms: LEASE_MS,
            open_grace_ms: OPEN_GRACE_MS,
            drop_after_ms: DROP_AFTER_MS,
            window_bytes: WINDOW_BYTES,
            sync_bytes: SYNC_BYTES,
            sync_after_ms: SYNC_AFTER_MS,
            // Spread reads are better where all replicas are on this host.
            local: local.filter(|_| !target.replicas.iter().all(|r| r.same_host)),
        },
        info: DeviceInfo {
            name: target.name.clone(),
            size_bytes: target.size_bytes,
            block_size: options.block_size.bytes(),
            read_only: target.read_only,
        },
        claim: spec.claim.into_iter().collect(),
        since_epoch: target.used_since_epoch,
        limits: Limits { ios_per_s: options.iops_limit, bytes_per_s: options.bandwidth_limit },
        options: live,
        replicas,
        desired,
        maintenance: target.maintenance,
        verify: target.verify.as_ref().map(verify).transpose()?,
        device: target.device && !target.maintenance,
        encryption,
        client: target.client,
        sharers: target.sharers.iter().map(sharer).collect(),
        served_at: target.served_at.as_ref().map(|at| ServedAt {
            node: at.node.clone(),
            address: at.address.clone(),
            key_hashes: at.key_hashes.clone(),
        }),
        feed: feed(target)?,
    })
}

/// Slots are taken where no client is let in.
fn feed(target: &TargetAssignment) -> Result<Option<FeedOrder>, String> {
    let order = target.feed.as_ref().map(parse_order).transpose();
    let order = order.map_err(|reason| format!("order of a transfer: {reason}"))?;
    match order {
        Some(_) if !target.maintenance => {
            Err("a transfer is ordered into a volume that is open to clients".to_owned())
        }
        order => Ok(order),
    }
}

fn sharer(sharer: &control::Sharer) -> Sharer {
    Sharer {
        node: sharer.node.clone(),
        read_only: sharer.read_only,
        key_hashes: sharer.key_hashes.clone(),
        client: sharer.client,
    }
}

#[cfg(test)]
mod tests {
    use quoin_api::control::ReplicaAddress;
    use quoin_types::{ReplicaGuid, ReplicaId};

    use super::*;

    fn target() -> TargetAssignment {
        let address = |n: u128, same_host| ReplicaAddress {
            replica_id: ReplicaId(n).to_string(),
            guid: ReplicaGuid(n).to_string(),
            pool: format!("p{n}"),
            address: format!("10.0.0.{n}:7000"),
            same_host,
            candidate: false,
            beside: false,
            leaving: false,
        };
        TargetAssignment {
            volume_id: VolumeId(1).to_string(),
            name: "db".into(),
            size_bytes: 1 << 30,
            read_only: false,
            device: false,
            maintenance: false,
            spec: Some(VolumeSpec::default()),
            replicas: vec![address(1, false), address(2, true)],
            desired_replication_factor: 2,
            consistency_factor: 0,
            verify: None,
            membership_version: 7,
            used_since_epoch: 5,
            options_version: 9,
            sharers: Vec::new(),
            served_at: None,
            client: 0,
            feed: None,
        }
    }

    #[test]
    fn changes_lead_to_the_same_as_whole_lists_and_records_that_do_not_rule_take_nothing_away() {
        let named = |volume: u128, name: &str| TargetAssignment {
            volume_id: VolumeId(volume).to_string(),
            name: name.into(),
            ..target()
        };
        let whole = |targets: &[TargetAssignment]| NodeAssignment {
            targets: targets.to_vec(),
            complete: true,
            ..Default::default()
        };
        let mut known = BTreeMap::new();
        let mut told = |message: &NodeAssignment| {
            take(&mut known, parse(message).0, message);
            known.values().map(|assigned| assigned.info.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(told(&whole(&[named(1, "a"), named(2, "b"), named(3, "c")])), ["a", "b", "c"]);
        let change = NodeAssignment {
            targets: vec![
                named(2, "B"),
                named(4, "d"),
                TargetAssignment { size_bytes: 0, ..named(1, "a") },
            ],
            removed: vec![VolumeId(3).to_string(), "xyz".into()],
            partial: true,
            ..Default::default()
        };
        assert_eq!(told(&change), ["B", "d"]);
        assert_eq!(told(&NodeAssignment::default()), ["B", "d"]);
        assert_eq!(told(&whole(&[named(4, "d")])), ["d"]);
    }

    fn parse_one(target: TargetAssignment) -> Result<Assigned, String> {
        let message = NodeAssignment { targets: vec![target], ..Default::default() };
        let (mut volumes, mut refused) = parse(&message);
        volumes.pop_first().map(|(_, a)| a).ok_or_else(|| refused.remove(0))
    }

    #[test]
    fn reads_prefer_the_replica_on_this_host_unless_all_are() {
        let assigned = parse_one(target()).unwrap();
        assert_eq!(assigned.config.local, Some(assigned.replicas[1].member));
        let mut all_here = target();
        all_here.replicas.iter_mut().for_each(|r| r.same_host = true);
        assert_eq!(parse_one(all_here).unwrap().config.local, None);
    }

    #[test]
    fn newcomers_and_those_that_leave_are_what_is_desired() {
        let mut changing = target();
        changing.desired_replication_factor = 3;
        changing.replicas[0].leaving = true;
        changing.replicas[1].candidate = true;
        changing.replicas[1].beside = true;
        let assigned = parse_one(changing.clone()).unwrap();
        let [first, second] = [0, 1].map(|at| assigned.replicas[at].member);
        let desired = Desired {
            drf: 3,
            cf: 0,
            newcomers: vec![Newcomer { member: second, beside: true }],
            leaving: vec![first],
            version: 7,
        };
        assert_eq!(assigned.desired, desired);
        // A member that has not come yet cannot leave.
        changing.replicas[1].leaving = true;
        assert_eq!(parse_one(changing.clone()).unwrap().desired, desired);
        changing.desired_replication_factor = 300;
        assert!(parse_one(changing).unwrap_err().contains("out of range"));
    }

    #[test]
    fn options_come_with_their_version_in_an_assignment_and_in_a_grant() {
        let spec = VolumeSpec {
            reads: "confirmed".into(),
            on_full: "enospc".into(),
            iops_limit: quoin_api::volume::NO_LIMIT,
            ..VolumeSpec::default()
        };
        let assigned =
            parse_one(TargetAssignment { spec: Some(spec.clone()), ..target() }).unwrap();
        let options = assigned.options;
        assert_eq!((options.version, options.reads), (9, ReadMode::Confirmed));
        assert_eq!(assigned.limits, Limits::default());
        assert_eq!(granted_options(&spec, 9).unwrap(), options);
        let odd = VolumeSpec { on_quorum_loss: "explode".into(), ..VolumeSpec::default() };
        assert!(granted_options(&odd, 1).unwrap_err().contains("explode"));
    }

    #[test]
    fn an_encrypted_volume_has_whole_blocks_and_slots_that_make_sense() {
        let user = quoin_encryption::UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
        let encryption = Encryption::create(&user, "a").unwrap();
        let with = |block_size, cipher: &str| {
            let mut message = control::Encryption::from(&encryption);
            message.cipher = cipher.into();
            let encryption = Some(message);
            let spec = VolumeSpec { block_size, encryption, ..VolumeSpec::default() };
            parse_one(TargetAssignment { spec: Some(spec), ..target() })
        };
        assert_eq!(with(4096, "aes-256-xts").unwrap().encryption.as_ref(), Some(&encryption));
        assert!(with(512, "aes-256-xts").unwrap_err().contains("4096"));
        // A cipher of a later version must not make the volume one without encryption.
        assert!(with(4096, "rot13").unwrap_err().contains("encryption:"));
    }

    #[test]
    fn an_order_of_a_transfer_comes_whole_and_into_no_volume_that_is_open_to_clients() {
        let order = control::FeedOrder {
            point_id: PointId(2).to_string(),
            base_id: PointId(1).to_string(),
            token: format!("{:032x}", 9),
            from_block: 3,
            term: 4,
            version: 5,
        };
        let with = |order: control::FeedOrder, maintenance| {
            parse_one(TargetAssignment { maintenance, feed: Some(order), ..target() })
        };
        let feed = with(order.clone(), true).unwrap().feed.unwrap();
        assert_eq!(order_message(feed), order);
        let whole = control::FeedOrder { base_id: String::new(), ..order.clone() };
        let feed = with(whole.clone(), true).unwrap().feed.unwrap();
        let (transfer, _) = feed.takes.unwrap();
        assert_eq!((transfer.base, order_message(feed)), (None, whole));
        let none = control::FeedOrder { term: 3, version: 4, ..control::FeedOrder::default() };
        let feed = with(none.clone(), true).unwrap().feed.unwrap();
        assert_eq!((feed.takes, order_message(feed)), (None, none));
        assert!(with(order.clone(), false).unwrap_err().contains("open to clients"));
        let same = order.point_id.clone();
        for (wrong, why) in [
            (control::FeedOrder { point_id: "x".into(), ..order.clone() }, "point"),
            (control::FeedOrder { base_id: "x".into(), ..order.clone() }, "base"),
            (control::FeedOrder { base_id: same, ..order.clone() }, "its own base"),
            (control::FeedOrder { token: "9".into(), ..order.clone() }, "token"),
            (control::FeedOrder { token: "+".repeat(32), ..order.clone() }, "token"),
            (control::FeedOrder { from_block: u64::MAX, ..order.clone() }, "out of range"),
        ] {
            assert!(with(wrong, true).unwrap_err().contains(why), "{why}");
        }
    }

    #[test]
    fn sizes_and_factors_are_taken_at_their_limits() {
        let block = BLOCK_SIZE as u64;
        let most = VOLUME_BLOCKS_MAX * block;
        for (size_bytes, blocks) in [
            (0, None),
            (1, Some(1)),
            (block, Some(1)),
            (block + 1, Some(2)),
            (most - 1, Some(VOLUME_BLOCKS_MAX)),
            (most, Some(VOLUME_BLOCKS_MAX)),
            (most + 1, None),
        ] {
            let found = parse_one(TargetAssignment { size_bytes, ..target() });
            assert_eq!(found.ok().map(|one| one.config.volume_blocks), blocks, "{size_bytes}");
        }
        for (factor, is_taken) in [(0, true), (255, true), (256, false)] {
            let drf = TargetAssignment { desired_replication_factor: factor, ..target() };
            assert_eq!(parse_one(drf).is_ok(), is_taken, "{factor}");
            let cf = TargetAssignment { consistency_factor: factor, ..target() };
            assert_eq!(parse_one(cf).is_ok(), is_taken, "{factor}");
        }
        let order = |from_block| control::FeedOrder {
            point_id: PointId(2).to_string(),
            token: format!("{:032x}", 9),
            from_block,
            ..control::FeedOrder::default()
        };
        for (from_block, is_taken) in
            [(0, true), (VOLUME_BLOCKS_MAX, true), (VOLUME_BLOCKS_MAX + 1, false)]
        {
            let feed = Some(order(from_block));
            let fed = parse_one(TargetAssignment { maintenance: true, feed, ..target() });
            assert_eq!(fed.is_ok(), is_taken, "{from_block}");
        }
    }

    #[test]
    fn a_volume_is_opened_for_reading_alone_where_no_host_may_write_it() {
        let sharer = |read_only| control::Sharer {
            node: "n2".into(),
            read_only,
            key_hashes: Vec::new(),
            client: 0,
        };
        for (own, others, is_read_only) in [
            (false, vec![], false),
            (true, vec![], true),
            (true, vec![true], true),
            (true, vec![true, false], false),
            (true, vec![false, true], false),
            (false, vec![true], false),
        ] {
            let sharers = others.iter().map(|one| sharer(*one)).collect();
            let one = parse_one(TargetAssignment { read_only: own, sharers, ..target() }).unwrap();
            assert_eq!(one.config.read_only, is_read_only, "{own} {others:?}");
            assert_eq!(one.info.read_only, own, "its own clients");
        }
        for (device, maintenance, is_made) in
            [(true, false, true), (true, true, false), (false, false, false)]
        {
            let one = parse_one(TargetAssignment { device, maintenance, ..target() }).unwrap();
            assert_eq!(one.device, is_made);
        }
    }

    #[test]
    fn a_replica_without_an_address_is_not_dialled() {
        let mut rolled_back = target();
        rolled_back.replicas[0].address.clear();
        assert_eq!(parse_one(rolled_back).unwrap().replicas.len(), 1);
    }

    #[test]
    fn what_this_version_does_not_know_is_refused_by_name() {
        let spec = VolumeSpec { on_full: "explode".into(), ..Default::default() };
        let odd = TargetAssignment { spec: Some(spec), ..target() };
        assert!(parse_one(odd).unwrap_err().contains("explode"));
        let huge = TargetAssignment { size_bytes: u64::MAX, ..target() };
        assert!(parse_one(huge).unwrap_err().contains("out of range"));
    }
}
