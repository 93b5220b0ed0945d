//! The records go back to an older copy, and are made to agree with what the pools hold. Join tokens of
//! before are good for nothing then.

use std::collections::{BTreeSet, HashSet};

use quoin_api::control::VolumeSpec;
use quoin_cluster::records::{RecoveryRecord, Spec, TokenRecord, VolumeRecord};
use quoin_cluster::records_rebuild::{Evidence, Held, Outcome, decide};
use quoin_cluster::tokens;
use quoin_types::entry::Rule;
use quoin_types::{Epoch, Lsn, Membership, Position, ReplicaGuid, Term, TermId, VolumeId};

use super::liars::{self, Liar};
use super::{Cluster, Observed, pool_name};

/// Milliseconds since 1970 at the begin of a run.
const BEGIN_MS: u64 = 1_700_000_000_000;

fn rule_of(membership: &Membership) -> Rule {
    let Membership { version, rf, cf, known, .. } = membership.clone();
    Rule { membership_version: version, rf, cf, known }
}

impl Cluster {
    fn now_ms(&self) -> u64 {
        BEGIN_MS + self.now() / 1_000_000
    }

    pub(super) fn restore(&mut self) {
        let Some(backup) = self.backup.take() else { return };
        self.say(|| "*** the records go back to an older copy".to_owned());
        self.records = backup;
        let (why, since_ms) = ("they are an old copy".to_owned(), self.now_ms());
        self.doubt = Some(RecoveryRecord { why, since_ms });
        self.observed = Observed { started: self.now(), ..Observed::default() };
        // An old copy cannot know who used a volume since.
        self.truth.used.clear();
    }

    pub(super) fn recover(&mut self) {
        let Some(doubt) = self.doubt.clone() else { return };
        self.term = Term { number: self.term.number + 1, id: TermId(self.random.wide()) };
        self.stats.control.terms += 1;
        let here = |pool: usize| self.pools[pool].runs && self.pools[pool].heard;
        let (told, away): (Vec<usize>, Vec<usize>) =
            (0..self.pools.len()).partition(|pool| here(*pool));
        let away: BTreeSet<String> = away.into_iter().map(pool_name).collect();
        let mut held: Vec<Held> = told.iter().flat_map(|pool| self.held_by(*pool)).collect();
        let liar = liars::lie(&mut self.lies, &mut held);
        if let Some(liar) = &liar {
            self.say(|| format!("*** pool {} lies of volume {}", liar.pool, liar.volume));
        }
        let deleted = told.iter().flat_map(|pool| self.pools[*pool].deleted.iter().copied());
        let deleted: HashSet<ReplicaGuid> = deleted.collect();
        let mut all: BTreeSet<VolumeId> = self.records.volumes.keys().copied().collect();
        all.extend(held.iter().map(|held| held.volume));
        let complete = |spec: &VolumeSpec| Some(Spec::plain(&spec.name, 1, 1));
        for volume in all {
            let judged = |without: Option<&str>| {
                let counts =
                    |held: &&Held| held.volume == volume && Some(held.pool.as_str()) != without;
                let mut away = away.clone();
                away.extend(without.map(str::to_owned));
                decide(&Evidence {
                    volume,
                    record: self.records.volumes.get(&volume),
                    held: held.iter().filter(counts).cloned().collect(),
                    deleted: &deleted,
                    away: &away,
                    term: self.term,
                    complete: &complete,
                    discard_left_over: false,
                    now_ms: self.now_ms(),
                })
            };
            let mut finding = judged(None);
            if let Some(liar) = liar.as_ref().filter(|liar| liar.volume == volume) {
                let written = finding.write.clone();
                if finding.outcome == Outcome::Undecided {
                    finding = judged(Some(&liar.pool));
                }
                self.check_believed(liar, written.as_deref());
            }
            let outcome = finding.outcome;
            self.say(|| format!("volume {volume}: {outcome:?} {}", finding.message));
            if outcome == Outcome::Deleted {
                self.check_given_up(volume);
            }
            if let Some(record) = finding.write {
                // A change that was under way may have come true by this.
                let membership = Membership::from(&record.membership);
                self.truth.memberships.insert(volume, membership);
                self.records.volumes.insert(volume, *record);
            }
        }
        self.records.tokens.retain(|_, token| !tokens::ends_with_recovery(token, Some(&doubt)));
        self.doubt = None;
        self.truth.used.clear();
        // Where too few pools answered, the records lack what was opened since the copy was made.
        self.truth.recovered = self.now();
    }

    fn held_by(&self, pool: usize) -> Vec<Held> {
        let held = self.pools[pool].replicas.values().map(|replica| Held {
            pool: pool_name(pool),
            trusted: true,
            volume: replica.volume,
            member: replica.member,
            quorum: replica.quorum,
            damaged: false,
            promised: replica.promised,
            incarnation: replica.incarnation,
            position: Position { epoch: replica.promised, lsn: Lsn(replica.views) },
            blocks: 256,
            spec: None,
            note: Some(Box::new(replica.note.unopened())),
            membership: replica.membership.clone(),
            view: replica.membership.as_ref().map(rule_of),
            joint: replica.joint.clone(),
        });
        held.collect()
    }

    /// The word of one pool rules over no other one, and is no number that others cannot know.
    fn check_believed(&mut self, liar: &Liar, written: Option<&VolumeRecord>) {
        let Some(record) = written else { return };
        let newest = self.truth.memberships.get(&liar.volume);
        let is_alone = record.membership.known.len() == 1
            && newest.is_some_and(|newest| newest.known.len() > 1)
            && record.pools().all(|pool| *pool == liar.pool);
        let is_beyond = |number: u64| number >= liars::BEYOND_ALL;
        let epoch = Epoch(record.opened.epoch);
        let is_unproven = epoch.term_number() > self.term.number;
        if is_alone || is_unproven || is_beyond(record.generation) {
            let detail = format!("volume {}: {} is believed: {record:?}", liar.volume, liar.pool);
            self.violate("OnePoolRules", detail);
        }
    }

    /// A volume is given up, though its user has not deleted it: no pool has a copy that counts.
    fn check_given_up(&mut self, volume: VolumeId) {
        let newest = self.truth.memberships.get(&volume).cloned().unwrap_or_default();
        let copies = self.pools.iter().flat_map(|pool| pool.replicas.values());
        let copy = copies.filter(|r| r.quorum).find(|r| newest.contains(r.member));
        let copy = copy.map(|replica| replica.member.guid);
        if let Some(guid) = copy.filter(|_| !self.truth.deleted.contains(&volume)) {
            let detail = format!("volume {volume} is given up, and {guid} is a copy that counts");
            self.violate("LastCopies", detail);
        }
    }

    /// Tokens are made, used and revoked; members try those that they have once more, with other keys.
    pub(super) fn use_tokens(&mut self) {
        let now_ms = self.now_ms();
        let hashes: Vec<String> = self.truth.all_tokens.iter().cloned().collect();
        if hashes.is_empty() || self.random.percent(30) {
            let secret_hash = format!("{:032x}", self.random.wide());
            let token = TokenRecord {
                secret_hash: secret_hash.clone(),
                role: String::new(),
                holder: String::new(),
                expires_ms: now_ms + self.random.between(5, 300) * 1000,
                used_by: None,
                manages_volumes: false,
                created_ms: now_ms,
            };
            self.truth.all_tokens.insert(secret_hash.clone());
            self.records.tokens.insert(secret_hash, token);
            return;
        }
        let hash = self.random.pick(&hashes).clone();
        if self.random.percent(20) {
            if self.records.tokens.remove(&hash).is_some() {
                self.truth.tokens.insert(hash, None);
            }
            return;
        }
        let key = format!("key-{}", self.random.below(3));
        let Some(mut token) = self.records.tokens.get(&hash).cloned() else { return };
        let user = ("pool", "p1", key.as_str());
        if tokens::take(&mut token, user, self.doubt.as_ref(), now_ms).is_err() {
            return;
        }
        self.records.tokens.insert(hash.clone(), token);
        let before = self.truth.tokens.insert(hash, Some(key.clone()));
        if before.as_ref().is_some_and(|before| before.as_ref() != Some(&key)) {
            self.violate("TokensOnce", format!("a token of {before:?} is taken for {key}"));
        }
    }
}
