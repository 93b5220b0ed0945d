//! The compare-and-swaps that targets request: epochs, which fence, and changes of membership.

use std::sync::Arc;

use quoin_cluster::ownership::epochs::{self, Acquire, MembershipSwap};
use quoin_cluster::ownership::grants;
use quoin_cluster::records::VolumeRecord;
use quoin_identity::Grant;
use quoin_types::{Epoch, Incarnation, Membership, VolumeId};

use crate::Error;
use crate::membership::term::Terms;
use crate::state::State;
use crate::state::events::{Object, Severity};

/// Permission to open a volume.
#[derive(Clone, Debug)]
pub struct Granted {
    pub epoch: Epoch,
    /// Membership in the record after the swap that set the epoch.
    pub membership: Membership,
    /// Grant with the controller's signature, which pools verify.
    pub grant: Vec<u8>,
    /// Record that granted it: the target opens with no older options.
    pub record: Arc<VolumeRecord>,
}

/// Requests of targets to the records.
pub struct Epochs {
    state: Arc<State>,
    terms: Arc<Terms>,
}

impl Epochs {
    pub(crate) fn new(state: Arc<State>, terms: Arc<Terms>) -> Self {
        Self { state, terms }
    }

    /// Has a target acquire an epoch ([`epochs::acquire`]). Returns `Ok(Err(why))` where the node does
    /// not own the volume (any more): that target must stop. A node that is fenced, or has not turned away
    /// the clients that are, may ask again.
    pub async fn acquire(
        &self,
        volume: VolumeId,
        node: &str,
        incarnation: Incarnation,
        at_least: Epoch,
    ) -> Result<Result<Granted, String>, Error> {
        let fences = self.state.fences_digest();
        self.acquire_behind(fences, volume, node, incarnation, at_least).await
    }

    /// Has a target acquire an epoch like [`Self::acquire`]. `fences_digest`: of the fences that the target
    /// has carried out.
    pub async fn acquire_behind(
        &self,
        fences_digest: u64,
        volume: VolumeId,
        node: &str,
        incarnation: Incarnation,
        at_least: Epoch,
    ) -> Result<Result<Granted, String>, Error> {
        let _excluding = self.state.joined.fencing.read().await;
        self.state.check_not_fenced(node)?;
        if fences_digest != self.state.fences_digest() {
            let why = "the target has not turned away all clients yet that are fenced by now";
            return Err(Error::Busy(why.to_owned()));
        }
        let (term, node) = (self.state.term(), node.to_owned());
        let asked = Acquire { node, incarnation, at_least };
        let change = |volume: &mut VolumeRecord| {
            let acquired = epochs::acquire(volume, &asked, term)?;
            if acquired.is_ok() && self.state.is_written(volume) {
                grants::note_writer(volume);
            }
            Ok(acquired)
        };
        let (record, outcome) = match self.state.update_volume(volume, change).await {
            Err(Error::NotFound { .. }) => return Ok(Err("the volume does not exist".to_owned())),
            other => other?,
        };
        if let Err(why) = outcome {
            return Ok(Err(why));
        }
        crate::status::opening_begins(&self.state, volume);
        Ok(Ok(Granted {
            epoch: record.epoch(),
            membership: (&record.membership).into(),
            grant: self.state.identity.sign_grant(&self.grant_of(&record, &asked.node))?,
            record,
        }))
    }

    fn grant_of(&self, record: &VolumeRecord, node: &str) -> Grant {
        Grant {
            volume: record.id.0,
            epoch: record.epoch(),
            incarnation: record.opened.incarnation.0,
            node: node.to_owned(),
            // A grant that reads is not signed anew as one that writes.
            writes: self.state.is_written(record)
                && record.grants.written.is_none_or(|written| written == record.opened.epoch),
            term: self.state.term(),
        }
    }

    /// Signs the record's current grant anew, if this node holds it.
    pub(crate) fn fresh_grant(&self, record: &VolumeRecord, node: &str, epoch: u64) -> Vec<u8> {
        // Records that do not rule grant nothing.
        let rules = self.terms.claims() && self.state.check_term().is_ok();
        if !rules || !epochs::is_granted_to(record, node, epoch) {
            return Vec::new();
        }
        self.state.identity.sign_grant(&self.grant_of(record, node)).unwrap_or_default()
    }

    /// Takes down which node has the last epoch, where recovered records lack it.
    pub(crate) async fn prove_holder(
        &self,
        record: &VolumeRecord,
        node: &str,
        epoch: u64,
    ) -> Result<(), Error> {
        if !epochs::needs_proof(record, node, epoch) {
            return Ok(());
        }
        let change = |volume: &mut VolumeRecord| {
            epochs::prove_holder(volume, node, epoch);
            Ok(())
        };
        match self.state.update_volume(record.id.0, change).await {
            Err(Error::NotFound { .. }) => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// Makes the change of the known list and its factors that a target requests, if the record
    /// allows it. The inner error is the reason of a refusal; the returned membership is the
    /// record's in either case. A repeat of a swap that was made succeeds.
    pub async fn swap_membership(
        &self,
        asked: &MembershipSwap,
    ) -> Result<(Membership, Result<(), String>), Error> {
        let change = |volume: &mut VolumeRecord| Ok(epochs::swap(volume, asked));
        let (record, outcome) = self.state.update_volume(asked.volume, change).await?;
        if let Ok(news) = &outcome {
            for (reason, replica, message) in news {
                let replica = Object::new("replica", replica, &record.spec.name);
                self.state.events.record(Severity::Normal, replica, reason, message.clone());
            }
        }
        Ok(((&record.membership).into(), outcome.map(drop)))
    }
}
