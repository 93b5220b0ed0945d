//! Peers: other clusters, with which this one exchanges volumes.
//!
//! A person invites with a token on one side and pairs with it on the other. The controller that pairs
//! calls the one that invited, which it knows by the fingerprint in the token, and each keeps a record of
//! the other. From then on the mirrors of both sides tell each other what changes: addresses, keys and
//! authorities. The controller itself never trusts a foreign authority: what a peer says comes through a
//! mirror of this cluster, or with a token. [`quoin_cluster::peers`] decides what is taken.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, MirrorReport};
use quoin_cluster::mirror;
use quoin_cluster::peers::{self, NotTaken};
use quoin_cluster::records::{
    Introduction, MemberOfCluster, MirrorAddressRecord, MirrorRecord, PeerLimits, PeerRecord,
};
use quoin_identity::{PairToken, Role, TrustedPeers, check_name};
use tokio::time::Instant;

use crate::Error;
use crate::membership::admission::Admission;
use crate::membership::members::Members;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::{now_ms, timestamp};

/// Time in which a call to the other controller is answered.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// A mirror that says nothing for so long does not run.
const RUNS_WITHIN: Duration = Duration::from_secs(5);
/// Digits of a cluster's id that name it.
const ID_DIGITS_MIN: usize = 8;
/// Between two changes of a record that one mirror, or one peer, causes.
const CHANGES_APART: Duration = Duration::from_secs(2);
/// Most mirrored groups that a refusal names.
const NAMED_MAX: usize = 3;

/// Last report of a mirror of this cluster.
#[derive(Clone, Debug)]
struct MirrorSeen {
    last: Instant,
    /// Node whose target runs on its host.
    node: String,
    peers: BTreeMap<String, PeerSeen>,
}

#[derive(Clone, Default, Debug)]
struct PeerSeen {
    linked_to: String,
    message: String,
}

/// Peers, and what the mirrors of this cluster say of them.
pub struct Peers {
    state: Arc<State>,
    members: Arc<Members>,
    admission: Arc<Admission>,
    mirrors: std::sync::Mutex<BTreeMap<String, MirrorSeen>>,
    /// When each peer was heard last, by any mirror.
    heard: std::sync::Mutex<BTreeMap<String, Instant>>,
    /// Peers that were told to be silent.
    silent: std::sync::Mutex<std::collections::BTreeSet<String>>,
    /// Makes the checks of a pairing and its record one step.
    pairing: tokio::sync::Mutex<()>,
    /// When a mirror, or a peer, changed a record last: each change may cause others in other clusters.
    changed: std::sync::Mutex<BTreeMap<String, Instant>>,
    started: Instant,
}

impl Peers {
    pub(crate) fn new(state: Arc<State>, members: Arc<Members>, admission: Arc<Admission>) -> Self {
        Self {
            state,
            members,
            admission,
            mirrors: Default::default(),
            heard: Default::default(),
            silent: Default::default(),
            pairing: Default::default(),
            changed: Default::default(),
            started: Instant::now(),
        }
    }

    /// A new token with which one other cluster becomes a peer, called `name`.
    pub async fn invite(
        &self,
        name: &str,
        ttl_s: u32,
        addresses: &[String],
    ) -> Result<(PairToken, u64), Error> {
        check_peer_name(name)?;
        let are_good = addresses.iter().all(|address| peers::is_address(address));
        if !(1..=peers::ADDRESSES_MAX).contains(&addresses.len()) || !are_good {
            let rule = format!(
                "1 to {} of the form host:port, under which the other cluster reaches this controller",
                peers::ADDRESSES_MAX
            );
            return Err(Error::invalid("addresses", rule));
        }
        let token = |authority: &quoin_identity::Authority| {
            PairToken::generate(authority.cluster(), authority.fingerprint(), addresses.to_vec())
        };
        let token = token(&self.members.authority())?;
        let expires_ms = self.members.add_peer_token(token.secret_hash(), name, ttl_s).await?;
        self.event(
            cluster(),
            Severity::Normal,
            "PeerInvited",
            "a token for another cluster was made",
        );
        Ok((token, expires_ms))
    }

    /// Answers the controller of a cluster that was invited: it is a peer from now on.
    pub async fn answer(
        &self,
        token: &str,
        introduction: Option<api::PeerIntroduction>,
    ) -> Result<api::PeerIntroduction, Error> {
        self.state.check_ruling()?;
        let token: PairToken = token.parse()?;
        let (peer, told) = told(introduction)?;
        let _one = self.pairing.lock().await;
        // A statement that is refused takes no token.
        let name = self.members.peer_token_name(&token.secret_hash(), &peer)?;
        check_trust(&peer, &told)?;
        self.record(&peer, &name, told.clone())?;
        self.members.take_peer_token(&token.secret_hash(), &peer).await?;
        self.pair_with(&peer, &name, told).await?;
        Ok(self.own())
    }

    /// Pairs this cluster with the one that made the token.
    pub async fn pair(&self, token: &str, name: &str) -> Result<api::Peer, Error> {
        self.state.check_ruling()?;
        let token: PairToken = token.trim().parse()?;
        check_peer_name(name)?;
        let _one = self.pairing.lock().await;
        let cluster = token.cluster.to_string();
        // Before the other side takes this one for a peer.
        let known = self.state.joined.peers.get(&cluster);
        let placeholder = Introduction { authorities_pem: "-".into(), ..Introduction::default() };
        self.record(&cluster, name, known.map_or(placeholder, |peer| peer.introduction.clone()))?;
        let mut why = Vec::new();
        for address in token.addresses() {
            match self.ask(address, &token).await {
                Ok(answer) => {
                    let (answered, told) = told(Some(answer))?;
                    if answered != cluster {
                        return Err(Error::Denied(format!(
                            "{address} answers for another cluster than the token's"
                        )));
                    }
                    let paired = self.pair_with(&cluster, name, told).await?;
                    return Ok(self.shown(&paired));
                }
                // It was reached: another address leads to the same refusal.
                Err(Asked::Refused(status)) => {
                    return Err(Error::Precondition(format!(
                        "the other cluster refuses: {}",
                        crate::text::plain(status.message())
                    )));
                }
                Err(Asked::Unreached(error)) => why.push(format!("{address}: {error}")),
            }
        }
        Err(Error::Busy(format!(
            "the controller of the other cluster is not reached ({}): see that its port is open to this \
             host, then pair again with the same token",
            why.join("; ")
        )))
    }

    async fn ask(&self, address: &str, token: &PairToken) -> Result<api::PeerIntroduction, Asked> {
        let call = async {
            let channel = quoin_identity::pinned_channel(address, token.cluster, token.fingerprint);
            let channel = channel.await.map_err(|e| Asked::Unreached(e.to_string()))?;
            let request =
                api::PairRequest { token: token.to_string(), introduction: Some(self.own()) };
            let mut client = api::join_client::JoinClient::new(channel);
            match client.pair(request).await {
                Ok(answer) => Ok(answer.into_inner()),
                Err(status) if status.code() == tonic::Code::Unavailable => {
                    Err(Asked::Unreached(status.message().to_owned()))
                }
                Err(status) => Err(Asked::Refused(status)),
            }
        };
        let late = || Asked::Unreached(format!("no answer within {} s", CALL_WITHIN.as_secs()));
        tokio::time::timeout(CALL_WITHIN, call).await.unwrap_or_else(|_| Err(late()))
    }

    fn record(&self, cluster: &str, name: &str, told: Introduction) -> Result<PeerRecord, Error> {
        let own = self.state.identity.cluster().to_string();
        let known = self.state.joined.peers.list();
        Ok(peers::paired(&known, &own, (cluster, name), told, now_ms())?)
    }

    async fn pair_with(
        &self,
        cluster: &str,
        name: &str,
        told: Introduction,
    ) -> Result<Arc<PeerRecord>, Error> {
        check_trust(cluster, &told)?;
        let record = self.record(cluster, name, told)?;
        let paired = match self.state.joined.peers.create(record.clone()).await? {
            Ok(made) => made,
            Err(_) => {
                let replace = |found: &mut PeerRecord| {
                    let PeerRecord { paired_ms, limits, .. } = *found;
                    *found = PeerRecord { paired_ms, limits, ..record.clone() };
                    Ok(())
                };
                let updated = self.state.joined.peers.update(cluster, replace).await?;
                updated.ok_or_else(|| Error::Busy("it was unpaired meanwhile".into()))?.0
            }
        };
        let message = "this cluster and the peer trust each other's mirrors";
        self.event(about(&paired), Severity::Normal, "PeerPaired", message);
        Ok(paired)
    }

    /// Changes the limits of a peer, named by its name or its id.
    ///
    /// # Errors
    /// It is no peer, a limit is none, or the store fails.
    pub async fn modify(&self, asked: &api::ModifyPeerRequest) -> Result<api::Peer, Error> {
        let record = self.find(&asked.peer)?;
        let bounded = |field, given: Option<u64>, most: u64| match given {
            Some(given) if given > most => Err(Error::invalid(field, format!("at most {most}"))),
            given => Ok(given),
        };
        let copies = bounded("copies", asked.copies_max, PeerLimits::COPIES_MAX)?;
        let bytes = bounded("bytes", asked.copies_bytes_max, PeerLimits::BYTES_MAX)?;
        let orphans = asked.orphans_s;
        if orphans.is_some_and(|s| s != 0 && !PeerLimits::ORPHANS_S.contains(&s)) {
            return Err(Error::invalid("orphans", "a minute to a year, or keep"));
        }
        let change = |record: &mut PeerRecord| {
            let limits = &mut record.limits;
            limits.copies = copies.or(limits.copies);
            limits.bytes = bytes.or(limits.bytes);
            limits.orphans_s = match orphans {
                Some(0) => None,
                Some(given) => Some(given),
                None => limits.orphans_s,
            };
            Ok(())
        };
        let updated = self.state.joined.peers.update(&record.cluster, change).await?;
        let (record, ()) = updated.ok_or_else(|| Error::missing("peer", &record.name))?;
        let limits = record.limits;
        let orphans = match limits.orphans_s {
            Some(seconds) => format!("orphans are deleted after {seconds} s"),
            None => "orphans are kept".to_owned(),
        };
        let message = format!(
            "at most {} copies and {} bytes; {orphans}",
            limits.copies_max(),
            limits.bytes_max()
        );
        self.event(about(&record), Severity::Normal, "PeerModified", message);
        Ok(self.shown(&record))
    }

    /// Trusts a peer no more, named by its name or its id.
    ///
    /// # Errors
    /// It is no peer, or groups are mirrored with it; the store fails.
    pub async fn unpair(&self, peer: &str) -> Result<api::Peer, Error> {
        let record = self.find(peer)?;
        let _one = self.pairing.lock().await;
        // No mirror begins in between.
        let _unchanged = self.state.mirrored.changing.lock().await;
        self.check_unmirrored(&record)?;
        // The token that it used may be used once more by the same cluster.
        self.members.end_peer_tokens(&record.cluster).await?;
        self.state.joined.peers.remove(&record.cluster, |_| true).await?;
        self.heard().remove(&record.cluster);
        let message = "its mirrors are not let in any more";
        self.event(about(&record), Severity::Normal, "PeerUnpaired", message);
        Ok(self.shown(&record))
    }

    /// A mirror without a peer would be behind for ever, and could not be ended on both sides.
    ///
    /// # Errors
    /// Groups are mirrored with this peer. Orphans and mirrors that were ended do not count.
    fn check_unmirrored(&self, peer: &PeerRecord) -> Result<(), Error> {
        let is_with_it = |record: &Arc<MirrorRecord>| {
            let is_over = matches!(record.role(), mirror::Role::Off | mirror::Role::Orphan);
            !is_over && record.brain().peer.to_string() == peer.cluster
        };
        let mut with_it = self.state.mirrored.records.list();
        with_it.retain(is_with_it);
        with_it.sort_by(|one, other| one.group_name.cmp(&other.group_name));
        let named = with_it.iter().take(NAMED_MAX).map(|record| {
            let role = crate::mirror::view::role(record.role());
            format!("{:?} ({role} here)", record.group_name)
        });
        let named = named.collect::<Vec<_>>().join(", ");
        let more = match with_it.len() {
            0 => return Ok(()),
            count if count > NAMED_MAX => format!(" and {} more", count - NAMED_MAX),
            _ => String::new(),
        };
        Err(Error::Precondition(format!(
            "mirrored with {}: {named}{more}. End that first: `quoin mirror disable` on the side that is \
             primary; where that cluster is gone, make its copies here primary (`quoin mirror promote \
             --force`), then disable them",
            peer.name
        )))
    }

    /// The peer of this name or id; empty: the only one.
    pub(crate) fn the(&self, peer: &str) -> Result<Arc<PeerRecord>, Error> {
        if !peer.is_empty() {
            return self.find(peer);
        }
        let mut all = self.state.joined.peers.list();
        match (all.pop(), all.is_empty()) {
            (Some(only), true) => Ok(only),
            (None, _) => Err(Error::Precondition(
                "this cluster has no peer: `quoin mirror invite` and `quoin mirror pair` make one"
                    .to_owned(),
            )),
            (Some(_), false) => {
                Err(Error::invalid("peer", "there are several: name the one that is meant"))
            }
        }
    }

    /// When any mirror of this cluster heard a peer last.
    pub(crate) fn heard_at(&self, cluster: &str) -> Option<Instant> {
        self.heard().get(cluster).copied()
    }

    /// Node whose target runs beside a mirror.
    pub(crate) fn node_of(&self, mirror: &str) -> Option<String> {
        self.mirrors().get(mirror).map(|seen| seen.node.clone())
    }

    /// Returns true if a mirror runs beside this node's target.
    pub(crate) fn has_mirror(&self, node: &str) -> bool {
        let is_it = |seen: &MirrorSeen| seen.node == node && seen.last.elapsed() < RUNS_WITHIN;
        self.mirrors().values().any(is_it)
    }

    fn find(&self, peer: &str) -> Result<Arc<PeerRecord>, Error> {
        let mut all = self.state.joined.peers.list().into_iter();
        let is_it = |record: &Arc<PeerRecord>| {
            let is_begun = peer.len() >= ID_DIGITS_MIN && record.cluster.starts_with(peer);
            record.name == peer || is_begun
        };
        let found = all.find(is_it);
        found.ok_or_else(|| Error::missing("peer", peer.chars().take(80).collect::<String>()))
    }

    /// All peers, in the order of their names.
    pub fn list(&self) -> Vec<api::Peer> {
        let mut all = self.state.joined.peers.list();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all.iter().map(|record| self.shown(record)).collect()
    }

    /// Statement of this cluster about itself.
    fn own(&self) -> api::PeerIntroduction {
        let members = self.state.joined.members.list();
        let mirrors = members.iter().filter(|member| member.role == Role::Mirror.as_str());
        let is_there =
            |mirror: &str| mirrors.clone().any(|member| member.holder == mirror && !member.removed);
        let mut addresses = self.state.joined.mirror_addresses.list();
        addresses.retain(|record| is_there(&record.mirror));
        // Running mirrors are worth the few places most.
        let running = self.running();
        addresses.sort_by_key(|record| !running.contains(&record.mirror));
        let addresses = addresses.iter().take(peers::ADDRESSES_MAX);
        api::PeerIntroduction {
            cluster_id: self.state.identity.cluster().to_string(),
            authorities_pem: self.members.authority().authorities_pem().into_bytes(),
            key_hashes: mirrors.flat_map(|m| m.key_hashes()).take(peers::KEYS_MAX).collect(),
            addresses: addresses.map(|record| record.address.clone()).collect(),
        }
    }

    /// Assignment of a mirror at this moment.
    pub fn assignment(&self, mirror: &str) -> api::MirrorAssignment {
        let peer = |record: &Arc<PeerRecord>| {
            let Introduction { authorities_pem, keys, addresses } = record.introduction.clone();
            api::PeerIntroduction {
                cluster_id: record.cluster.clone(),
                authorities_pem: authorities_pem.into_bytes(),
                key_hashes: keys,
                addresses,
            }
        };
        api::MirrorAssignment {
            term: Vec::new(),
            does_not_rule: false,
            own: Some(self.own()),
            peers: self.state.joined.peers.list().iter().map(peer).collect(),
            leads: self.leader().as_deref() == Some(mirror),
            ..api::MirrorAssignment::default()
        }
    }

    /// The mirror that links to the peers.
    pub(crate) fn leader(&self) -> Option<String> {
        peers::leader(self.running().iter().map(String::as_str)).map(str::to_owned)
    }

    fn running(&self) -> Vec<String> {
        let mirrors = self.mirrors();
        let running = mirrors.iter().filter(|(_, seen)| seen.last.elapsed() < RUNS_WITHIN);
        running.map(|(name, _)| name.clone()).collect()
    }

    /// Returns true if this one may change a record now, and notes that it does.
    fn may_change(&self, who: &str) -> bool {
        let mut changed = self.changed.lock().expect("no holder of this lock panics");
        let is_due = changed.get(who).is_none_or(|last| last.elapsed() >= CHANGES_APART);
        if is_due {
            changed.retain(|_, last| last.elapsed() < CHANGES_APART);
            changed.insert(who.to_owned(), Instant::now());
        }
        is_due
    }

    /// Takes a mirror out of the cluster: peers hear that its key counts no more.
    pub async fn remove_mirror(&self, mirror: &str) -> Result<(), Error> {
        let name = format!("{}/{mirror}", Role::Mirror);
        let is_there = |member: &Arc<MemberOfCluster>| !member.removed;
        if !self.state.joined.members.get(&name).is_some_and(|member| is_there(&member)) {
            return Err(Error::missing("mirror", mirror.chars().take(80).collect::<String>()));
        }
        self.admission.expel(Role::Mirror, mirror).await?;
        self.state.joined.mirror_addresses.remove(mirror, |_| true).await?;
        self.mirrors().remove(mirror);
        let about = Object::new("mirror", mirror, mirror);
        self.event(about, Severity::Normal, "MirrorRemoved", "it is no member any more");
        Ok(())
    }

    /// Takes a mirror's report in.
    pub async fn report(&self, report: MirrorReport) -> Result<(), Error> {
        check_name("mirror", &report.mirror)?;
        self.learn_address(&report).await?;
        let now = Instant::now();
        let (mut seen, mut introductions) = (BTreeMap::new(), Vec::new());
        for contact in report.peers.into_iter().take(2 * peers::PEERS_MAX) {
            let Some(record) = self.state.joined.peers.get(&contact.cluster_id) else { continue };
            let heard = contact.heard_ms.and_then(|ms| now.checked_sub(Duration::from_millis(ms)));
            if let Some(at) = heard {
                let mut heard = self.heard();
                let last = heard.entry(record.cluster.clone()).or_insert(at);
                *last = at.max(*last);
            }
            let is_bounded = |text: &String| text.len() <= 512;
            let kept = |text: String| if is_bounded(&text) { text } else { String::new() };
            let (linked_to, message) = (kept(contact.linked_to), kept(contact.message));
            seen.insert(record.cluster.clone(), PeerSeen { linked_to, message });
            introductions.extend(contact.introduction.map(|said| (record, said)));
        }
        match report.leaving {
            true => drop(self.mirrors().remove(&report.mirror)),
            false => {
                let seen = MirrorSeen { last: now, node: report.node, peers: seen };
                self.mirrors().insert(report.mirror, seen);
            }
        }
        // Each for itself: one that says what cannot be taken keeps no other from being heard.
        let mut failed = Ok(());
        for (record, said) in introductions {
            match self.introduced(&record, said).await {
                Ok(()) => {}
                Err(Error::Invalid { field, rule }) => {
                    let why = format!("what it says of itself is not taken: {field}: {rule}");
                    self.refused(&record, why);
                }
                Err(Error::Identity(why)) => self.refused(&record, why.to_string()),
                Err(error) => failed = Err(error),
            }
        }
        failed
    }

    fn refused(&self, record: &PeerRecord, why: String) {
        if self.may_change(&format!("refused/{}", record.cluster)) {
            let why = crate::text::plain(&why);
            self.event(about(record), Severity::Warning, "PeerRefused", why);
        }
    }

    async fn learn_address(&self, report: &MirrorReport) -> Result<(), Error> {
        let MirrorReport { mirror, address, .. } = report;
        if !peers::is_address(address) {
            return Err(Error::invalid("address", "host:port, as peers reach this mirror"));
        }
        let table = &self.state.joined.mirror_addresses;
        if table.get(mirror).is_some_and(|known| known.address == *address) {
            return Ok(());
        }
        // It is reported again.
        if !self.may_change(&format!("mirror/{mirror}")) {
            return Ok(());
        }
        let record = MirrorAddressRecord { mirror: mirror.clone(), address: address.clone() };
        match table.get(mirror) {
            Some(_) => {}
            None if table.create(record.clone()).await?.is_ok() => return Ok(()),
            None => {}
        }
        let change = |known: &mut MirrorAddressRecord| {
            known.clone_from(&record);
            Ok(())
        };
        table.update(mirror, change).await?;
        Ok(())
    }

    /// A peer told a mirror of this cluster what it is now.
    async fn introduced(
        &self,
        record: &PeerRecord,
        said: api::PeerIntroduction,
    ) -> Result<(), Error> {
        let (cluster, said) = told(Some(said))?;
        if cluster != record.cluster {
            return Err(Error::invalid("clusterId", "a peer speaks for itself alone"));
        }
        check_trust(&cluster, &said)?;
        let mut after = PeerRecord::clone(record);
        if !peers::introduced(&mut after, &said)? {
            return Ok(());
        }
        if !self.may_change(&format!("peer/{cluster}")) {
            return Err(Error::Busy("the peer changed just now; it is told again".into()));
        }
        let take = |found: &mut PeerRecord| Ok(peers::introduced(found, &said)?);
        let updated = self.state.joined.peers.update(&cluster, take).await?;
        if let Some((after, true)) = updated {
            let message = "it told of other authorities, keys or addresses of its mirrors";
            self.event(about(&after), Severity::Normal, "PeerChanged", message);
        }
        Ok(())
    }

    /// Tells of peers that fell silent or speak again; called every second.
    pub(crate) fn watch(&self) {
        for record in self.state.joined.peers.list() {
            if self.leader().is_none() {
                continue;
            }
            let heard = self.heard().get(&record.cluster).copied().unwrap_or(self.started);
            let mut silent = self.silent.lock().expect("no holder of this lock panics");
            if heard.elapsed() >= mirror::SILENT_AFTER {
                if silent.insert(record.cluster.clone()) {
                    let message = format!(
                        "none of its mirrors was heard for {} s; nothing is sent to it and nothing comes \
                         from it until one is: see that its hosts run and that the network between is whole",
                        mirror::SILENT_AFTER.as_secs()
                    );
                    self.event(about(&record), Severity::Warning, "PeerSilent", message);
                }
            } else if silent.remove(&record.cluster) {
                let message = "its mirrors are heard again";
                self.event(about(&record), Severity::Normal, "PeerHeard", message);
            }
        }
    }

    fn heard(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Instant>> {
        self.heard.lock().expect("no holder of this lock panics")
    }

    fn shown(&self, record: &PeerRecord) -> api::Peer {
        let (heard, leader) = (self.heard().get(&record.cluster).copied(), self.leader());
        let mirrors = self.mirrors();
        let link =
            leader.as_ref().and_then(|leader| mirrors.get(leader)?.peers.get(&record.cluster));
        let link = link.cloned().unwrap_or_default();
        let (state, message) = match (&leader, heard) {
            (None, _) => (
                "no mirror here",
                "no `quoin mirror run` of this cluster runs: start one beside each target".to_owned(),
            ),
            (_, Some(heard)) if heard.elapsed() < mirror::SILENT_AFTER => {
                (if link.linked_to.is_empty() { "heard" } else { "linked" }, link.message)
            }
            (_, Some(_)) => ("silent", link.message),
            (_, None) if record.introduction.addresses.is_empty() => (
                "not heard yet",
                "no address of its mirrors is known: start `quoin mirror run` there, then pair again"
                    .to_owned(),
            ),
            (_, None) => ("not heard yet", link.message),
        };
        let (copies, copies_bytes) = self.state.mirrored.copies_of(&self.state, &record.cluster);
        api::Peer {
            cluster_id: record.cluster.clone(),
            name: record.name.clone(),
            addresses: record.introduction.addresses.clone(),
            keys: u32::try_from(record.introduction.keys.len()).unwrap_or(u32::MAX),
            paired_at: Some(timestamp(record.paired_ms)),
            state: state.to_owned(),
            heard_ms: heard.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)),
            link_mirror: if link.linked_to.is_empty() {
                String::new()
            } else {
                leader.unwrap_or_default()
            },
            link_address: link.linked_to,
            message,
            copies,
            copies_max: record.limits.copies_max(),
            copies_bytes,
            copies_bytes_max: record.limits.bytes_max(),
            orphans_s: record.limits.orphans_s.unwrap_or(0),
        }
    }

    fn mirrors(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, MirrorSeen>> {
        self.mirrors.lock().expect("no holder of this lock panics")
    }

    fn event(
        &self,
        about: Object,
        severity: Severity,
        reason: &'static str,
        message: impl ToString,
    ) {
        self.state.events.record(severity, about, reason, message);
    }
}

enum Asked {
    Unreached(String),
    Refused(tonic::Status),
}

impl From<NotTaken> for Error {
    fn from(why: NotTaken) -> Self {
        match why {
            NotTaken::TooMany => Self::Exhausted(why.to_string()),
            NotTaken::Name | NotTaken::Known | NotTaken::Itself => {
                Self::Precondition(why.to_string())
            }
            NotTaken::Id | NotTaken::Authorities | NotTaken::Keys | NotTaken::Addresses => {
                Self::invalid("introduction", why.to_string())
            }
        }
    }
}

fn check_peer_name(name: &str) -> Result<(), Error> {
    if !name.is_empty() {
        check_name("peer", name)?;
    }
    Ok(())
}

/// Checks that a mirror can trust what a cluster says of itself.
fn check_trust(cluster: &str, told: &Introduction) -> Result<(), Error> {
    let Introduction { authorities_pem, keys, .. } = told;
    Ok(TrustedPeers::new().set(cluster.parse()?, authorities_pem, keys)?)
}

fn told(said: Option<api::PeerIntroduction>) -> Result<(String, Introduction), Error> {
    let said = said.ok_or_else(|| Error::invalid("introduction", "it is missing"))?;
    let api::PeerIntroduction { cluster_id, authorities_pem, key_hashes, addresses } = said;
    let authorities_pem = String::from_utf8(authorities_pem)
        .map_err(|_| Error::invalid("authorities", "they are no PEM"))?;
    Ok((cluster_id, Introduction { authorities_pem, keys: key_hashes, addresses }))
}

fn about(record: &PeerRecord) -> Object {
    Object::new("peer", &record.cluster, &record.name)
}

fn cluster() -> Object {
    Object::new("cluster", "", "")
}
