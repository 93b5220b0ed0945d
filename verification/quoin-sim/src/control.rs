//! The control plane's record of the volume, reached only by compare-and-swap over a network
//! that delays and loses questions and answers. What a question makes of it is decided by
//! `quoin-cluster`, as in the product.

use std::ops::Deref;

use quoin_cluster::Refusal;
use quoin_cluster::mirror::Keepsake;
use quoin_cluster::ownership::epochs::{self, Acquire, MembershipSwap};
use quoin_cluster::ownership::{
    attachment, change, lending, lifecycle, mirrored, network_fences, recovery, replicas,
};
use quoin_cluster::records::{
    Cause, MembershipRecord, Replay, ReplicaPhase, ReplicaRecord, Spec, VolumeMirror, VolumePhase,
    VolumeRecord,
};
use quoin_replication::primary::LiveOptions;
use quoin_types::ids::GroupId;
use quoin_types::{Desired, Epoch, Incarnation, Member, Membership, ReplicaGuid, Term, VolumeId};

/// The linearizable record. It is read by its [`View`].
#[derive(Clone, Debug)]
pub struct Record {
    /// Of the controller that rules.
    pub term: Term,
    /// `None`: they never changed.
    pub options: Option<LiveOptions>,
    volume: VolumeRecord,
    view: View,
}

/// The record, in the words of the core.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub epoch: Epoch,
    /// The target host that owns the volume, or that gets it back.
    pub owner: usize,
    pub membership: Membership,
    /// As the target of the volume is told it.
    pub desired: Desired,
}

impl Deref for Record {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

#[derive(Clone, Debug)]
pub enum Question {
    Acquire { incarnation: Incarnation, at_least: Epoch },
    Swap { epoch: Epoch, incarnation: Incarnation, version: u64, next: Membership },
}

#[derive(Clone, Debug)]
pub enum Answer {
    Granted {
        incarnation: Incarnation,
        epoch: Epoch,
        membership: Membership,
        /// Options of the record at that moment. `None`: they never changed.
        options: Option<LiveOptions>,
    },
    NotOwner {
        incarnation: Incarnation,
    },
    Swapped {
        version: u64,
        membership: Membership,
    },
}

pub fn node_name(host: usize) -> String {
    format!("h{host}")
}

pub fn pool_name(pool: usize) -> String {
    format!("p{pool}")
}

/// A replica that its pool has made. `None`: nobody knows its pool.
fn made(member: Member, pool: Option<usize>) -> ReplicaRecord {
    let pool = pool.map_or_else(|| "unknown".to_owned(), pool_name);
    let newcomer = replicas::newcomer(member, pool, Cause::Asked, false);
    ReplicaRecord { phase: ReplicaPhase::Keep, ..newcomer }
}

impl Record {
    /// The record of a volume whose replicas are in the first pools, attached to the first host.
    pub fn new(id: VolumeId, membership: &Membership, size_bytes: u64) -> Self {
        let Membership { rf, cf, .. } = *membership;
        let mut volume = VolumeRecord::new(id, Spec::plain("v", rf, cf), size_bytes, 0);
        volume.phase = VolumePhase::Ready;
        volume.membership = MembershipRecord::from(membership);
        let places = (0..).zip(&membership.known);
        volume.replicas = places.map(|(pool, member)| made(*member, Some(pool))).collect();
        let mut record =
            Self { term: Term::default(), options: None, volume, view: View::default() };
        record.publish(0).expect("a volume that nobody has can be attached");
        record
    }

    pub fn volume(&self) -> &VolumeRecord {
        &self.volume
    }

    /// Makes one change by compare-and-swap, with what follows from it. The controller has seen the
    /// volume served by this record.
    fn change<T>(
        &mut self,
        change: impl FnOnce(&mut VolumeRecord, Term) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut after = self.volume.clone();
        let value = change(&mut after, self.term)?;
        change::complete(&self.volume, &mut after, true, self.term)?;
        self.volume = after;
        self.look();
        Ok(value)
    }

    /// Writes what no decision of the product has made: an old copy that came back, or an operator
    /// of the simulation.
    pub fn edit(&mut self, edit: impl FnOnce(&mut VolumeRecord)) {
        edit(&mut self.volume);
        self.look();
    }

    fn look(&mut self) {
        let volume = &self.volume;
        let has = volume.opened.owner.as_ref();
        let has = has.or(volume.attachments.first().map(|attachment| &attachment.node));
        let owner = has.and_then(|node| node.strip_prefix('h')?.parse().ok());
        self.view = View {
            epoch: volume.epoch(),
            owner: owner.unwrap_or(self.view.owner),
            membership: Membership::from(&volume.membership),
            desired: replicas::desired(volume),
        };
    }

    fn publish(&mut self, host: usize) -> Result<(), Refusal> {
        let publish = attachment::Publish { node: node_name(host), ..Default::default() };
        self.change(|volume, term| attachment::attach(volume, &publish, term).map(drop))
    }

    /// The volume leaves its host and goes to another one. `at_once`: by force. Returns true if grants
    /// were taken back by it.
    pub fn give_to(&mut self, host: usize, at_once: bool) -> bool {
        let fenced = self.volume.grants.fenced;
        let changed = self
            .change(|volume, term| attachment::detach(volume, "", at_once, term))
            .and_then(|_| self.publish(host));
        // Where no epoch is left in the term, all stays as it is.
        changed.is_ok() && self.volume.grants.fenced > fenced
    }

    /// The node of a host is fenced: what it was granted is taken back, and sessions that may still be closed
    /// in their time are cut. Returns true if another fence came of it.
    pub fn fence_node(&mut self, host: usize) -> bool {
        let (fenced, node) = (self.volume.grants.fenced, node_name(host));
        let changed = self.change(|volume, term| {
            network_fences::take_back(volume, &node, term)?;
            match network_fences::last_epoch(volume, |name| name == node) {
                Some(_) => network_fences::cut(volume, term),
                None => Ok(()),
            }
        });
        changed.is_ok() && self.volume.grants.fenced > fenced
    }

    /// The role of a mirrored group is kept.
    pub fn keep(&mut self, group: GroupId, keepsake: Keepsake) {
        let _ = self.change(|volume, _| {
            mirrored::keep(volume, group, keepsake);
            Ok(())
        });
    }

    pub fn keepsake(&self) -> Option<Keepsake> {
        self.volume.mirror.as_ref().map(VolumeMirror::keepsake)
    }

    /// A mirror takes all grants back, once for each number, and a target of that host is lent. Returns false
    /// where it was done before.
    pub fn fence_for(&mut self, number: u128, host: usize) -> bool {
        let of = |volume: &VolumeRecord| volume.mirror.as_ref().map(|mirror| mirror.fence.0.0);
        let before = of(&self.volume);
        let changed = self.change(|volume, term| {
            mirrored::fence_for(volume, number, term)?;
            lending::lend(volume, None, Some(&node_name(host)));
            Ok(())
        });
        changed.is_ok() && before != of(&self.volume)
    }

    /// A target serves the volume at this epoch.
    pub fn is_opened(&mut self, epoch: Epoch) {
        let _ = self.change(|volume, _| {
            mirrored::is_opened(volume, epoch.0);
            Ok(())
        });
    }

    /// The last fence that counts.
    pub fn fenced(&self) -> u128 {
        let mirror = self.volume.mirror.as_ref();
        mirror.filter(|mirror| mirror.is_fenced).map_or(0, |mirror| mirror.fence.0.0)
    }

    /// All up to this epoch is taken back, and open sessions at once.
    pub fn fence(&self) -> (Epoch, bool) {
        (Epoch(self.volume.grants.fenced), self.volume.grants.fenced_at_once)
    }

    /// The owner as an old copy of the record names it, whoever it is.
    pub fn owned_by(mut self, host: usize) -> Self {
        self.edit(|volume| {
            volume.opened.owner = Some(node_name(host));
            volume.attachments.iter_mut().for_each(|attachment| {
                attachment.node = node_name(host);
                attachment.replay = Replay::None;
            });
        });
        self
    }

    /// Executes one compare-and-swap. A swap that does not fit leaves the record and says how
    /// it is; one that breaks the rules is told with the rule's words. `None`: the record refuses to
    /// answer.
    pub fn execute(
        &mut self,
        asker: usize,
        question: &Question,
    ) -> Result<Option<Answer>, &'static str> {
        match question {
            Question::Acquire { incarnation, at_least } => {
                let (incarnation, at_least) = (*incarnation, *at_least);
                let asked = Acquire { node: node_name(asker), incarnation, at_least };
                let acquired = self.change(|v, term| epochs::acquire(v, &asked, term));
                Ok(match acquired {
                    Ok(Ok(())) => Some(Answer::Granted {
                        incarnation,
                        epoch: self.epoch,
                        membership: self.membership.clone(),
                        options: self.options,
                    }),
                    Ok(Err(_)) => Some(Answer::NotOwner { incarnation }),
                    Err(_) => None,
                })
            }
            Question::Swap { epoch, incarnation, version, next } => {
                let before = self.membership.clone();
                if *epoch == self.epoch && *version == before.version {
                    next.check()?;
                }
                let asked = MembershipSwap {
                    volume: self.volume.id.0,
                    node: node_name(asker),
                    epoch: *epoch,
                    incarnation: *incarnation,
                    version: *version,
                    rf: next.rf,
                    cf: next.cf,
                    known: next.known.clone(),
                };
                let _ = self.change(|volume, _| {
                    epochs::swap(volume, &asked).map_err(Refusal::Precondition)
                });
                let membership = self.membership.clone();
                check_change(&before, &membership)?;
                Ok(Some(Answer::Swapped { version: *version, membership }))
            }
        }
    }

    /// Names a replica that a pool has made for the volume.
    pub fn name(&mut self, member: Member, pool: Option<usize>) {
        self.edit(|volume| volume.replicas.push(made(member, pool)));
    }

    /// A replica that is on its way in is not wanted any more.
    pub fn take_back(&mut self, member: Member) {
        let is_moving = |volume: &VolumeRecord| volume.known_guid(member.id).is_some();
        let _ = self.change(|volume, _| {
            if is_moving(volume) {
                replicas::discard(volume, member);
                return Ok(());
            }
            replicas::leave(volume, &[member.id], &[]).map(drop)
        });
    }

    /// A known replica is named to leave. The report of the volume's target may be of a moment at
    /// which all were in sync.
    pub fn leave(&mut self, member: Member) {
        let in_sync: Vec<_> = self.membership.known.iter().map(|m| m.id).collect();
        let _ = self.change(|volume, _| replicas::leave(volume, &[member.id], &in_sync));
    }

    /// Operators ask for as many replicas.
    pub fn desire(&mut self, drf: u8) {
        self.edit(|volume| volume.membership.drf = drf);
    }

    pub fn set_factor(&mut self, cf: u8) {
        self.edit(|volume| volume.consistency_factor = cf);
    }

    /// The pool says that it has lost its replica. Returns the one that is to be made there instead.
    pub fn lost(&mut self, pool: usize, member: Member, new: ReplicaGuid) -> Option<Member> {
        let state = lifecycle::ReplicaState::Gone;
        let answers = [((pool_name(pool), member.guid), state)].into();
        let mut news = Vec::new();
        let stepped = self.change(|volume, _| {
            lifecycle::step(volume, &answers, false, &mut || new, &mut news);
            // The simulator's pools make it at once.
            volume.replicas.iter_mut().for_each(|replica| replica.phase = ReplicaPhase::Keep);
            Ok(())
        });
        let is_new = stepped.is_ok() && !news.is_empty();
        is_new.then_some(Member { id: member.id, guid: new })
    }

    /// A person goes on with the replicas that are left.
    ///
    /// # Errors
    /// The controller refuses it.
    pub fn recover(
        &mut self,
        asked: &recovery::Recovery,
        seen: &recovery::Seen<'_>,
    ) -> Result<(), Refusal> {
        self.change(|volume, term| {
            recovery::check(volume, asked, seen)?;
            recovery::reduce(volume, &asked.keep, seen.silent, 0, term)
        })
    }

    /// A volume that was taken from its target goes back to the host that has it attached.
    pub fn give_back(&mut self) {
        let _ = self.change(|volume, _| {
            lending::give_back(volume);
            Ok(())
        });
    }

    /// Another membership rules. Each known replica has a record of its own.
    pub fn set_membership(&mut self, membership: &Membership) {
        self.edit(|volume| {
            volume.membership = MembershipRecord {
                drf: volume.membership.drf,
                ..MembershipRecord::from(membership)
            };
            let retired = &membership.retired;
            volume.replicas.retain(|replica| !retired.contains(&replica.guid.0));
            for member in &membership.known {
                if !volume.replicas.iter().any(|replica| replica.member() == *member) {
                    volume.replicas.push(made(*member, None));
                }
            }
        });
    }
}

/// Checks what a swap made of the membership.
fn check_change(before: &Membership, after: &Membership) -> Result<(), &'static str> {
    if after == before {
        return Ok(());
    }
    if after.version != before.version + 1 {
        return Err("a membership version must grow by one (MembershipMonotone)");
    }
    if !before.retired.iter().all(|guid| after.retired.contains(guid)) {
        return Err("a retired GUID was forgotten (RetiredNeverBack)");
    }
    let mut left = before.known.iter().filter(|m| !after.known.contains(m));
    match left.any(|m| !after.retired.contains(&m.guid)) {
        true => Err("who left the list is not retired (RetiredNeverBack)"),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let member = Member { id: quoin_types::ReplicaId(1), guid: ReplicaGuid(2) };
        let known = vec![member];
        let membership = Membership {
            version: 1,
            rf: 1,
            cf: 1,
            drf: 1,
            known,
            formed: true,
            ..Default::default()
        };
        let mut record = Record::new(VolumeId(5), &membership, 1 << 20);
        record.edit(|volume| volume.opened.epoch = 4);
        record
    }

    #[test]
    fn only_the_owner_gets_an_epoch_and_each_is_new() {
        let mut record = record();
        let ask = |at_least| Question::Acquire { incarnation: Incarnation(7), at_least };
        assert!(matches!(record.execute(1, &ask(Epoch(9))), Ok(Some(Answer::NotOwner { .. }))));
        assert_eq!(record.epoch, Epoch(4));
        let epoch = |record: &mut Record, at_least| match record.execute(0, &ask(at_least)) {
            Ok(Some(Answer::Granted { epoch, .. })) => epoch,
            other => panic!("{other:?}"),
        };
        assert_eq!(epoch(&mut record, Epoch(9)), Epoch(10));
        assert_eq!(epoch(&mut record, Epoch(3)), Epoch(11));
        assert!(record.give_to(1, false), "what the first host was granted is taken back");
        assert_eq!((record.epoch, record.owner), (Epoch(12), 1));
    }
}
