//! Mirrors as users see them.

use quoin_api::control as api;
use quoin_cluster::mirror::Role;
use quoin_cluster::mirror::answers::Health;
use quoin_cluster::records::Cut;
use quoin_cluster::records::{MirrorRecord, VolumeRecord};
use quoin_types::BLOCK_SIZE;
use quoin_types::ids::PointId;

use super::driver::{Live, Mirrors};
use super::{LOST, observe};
use crate::Error;
use crate::state::State;
use crate::state::mirrored::LagBytes;
use crate::time::{now_ms, timestamp};

/// Name of a role, as users read it.
pub(crate) fn role(role: Role) -> &'static str {
    match role {
        Role::Off => "off",
        Role::Primary => "primary",
        Role::Demoting => "demoting",
        Role::Secondary => "secondary",
        Role::Promoting => "promoting",
        Role::Diverged => "diverged",
        Role::Resyncing => "resyncing",
        Role::Orphan => "orphan",
    }
}

/// Place of a volume in its mirror; `None`: it is not mirrored.
pub(crate) fn of_volume(state: &State, volume: &VolumeRecord) -> Option<api::MirrorOfVolume> {
    let mirror = volume.mirror.as_ref()?;
    let record = state.mirrored.of(volume);
    let record = record.as_ref();
    Some(api::MirrorOfVolume {
        role: record.map(|record| role(record.role()).to_owned()).unwrap_or_default(),
        group_id: mirror.group.0.to_string(),
        group_name: record.map(|record| record.group_name.clone()).unwrap_or_default(),
        released: record.is_some_and(|record| {
            let is_copy = record.role().is_copy() || record.role() == Role::Orphan;
            is_copy && record.released.contains(&volume.id)
        }),
    })
}

/// Knowledge of the life of a brain beside its record.
struct Known {
    peer_role: Option<Role>,
    health: Health,
    synced_ms: Option<u64>,
    is_silent: bool,
    refused: String,
    failures: Vec<(String, String)>,
    wants: Vec<u64>,
}

impl Mirrors {
    async fn known(&self, record: &MirrorRecord) -> Result<Option<Known>, Error> {
        let names = |live: &Live| {
            let name = |(volume, why): (&quoin_types::VolumeId, &String)| {
                (volume.to_string(), why.clone())
            };
            live.failures.iter().map(name).collect()
        };
        let looked = self
            .look(record.id.0, |live, now, _| {
                let word = live.brain.heard();
                Known {
                    peer_role: word.map(|word| word.role),
                    health: live.brain.health(now),
                    synced_ms: live.brain.synced_ms(now),
                    is_silent: live.brain.is_silent(now.time),
                    refused: live.refused.clone(),
                    failures: names(live),
                    wants: word
                        .and_then(|word| word.want.as_ref())
                        .map(|want| want.cursors.clone())
                        .unwrap_or_default(),
                }
            })
            .await?;
        Ok(looked.map(|(_, known)| known))
    }

    /// The message of a mirror.
    ///
    /// # Errors
    /// The store fails.
    pub async fn view(&self, record: &MirrorRecord) -> Result<api::Mirror, Error> {
        let known = self.known(record).await?;
        let brain = record.brain();
        let peer = self.state.joined.peers.get(&brain.peer.to_string());
        let synced = known.as_ref().and_then(|known| known.synced_ms);
        let is_primary = brain.role == Role::Primary;
        let is_cut_off =
            peer.is_none() || known.as_ref().is_some_and(|known| !known.refused.is_empty());
        let held = brain.members.first().map(|m| observe::points(&self.state, m.volume));
        let held = held.unwrap_or_default();
        let shown = self.shown_ms(record, &held);
        let lag = self.lag_bytes(record);
        let message = match &known {
            Some(known) => self.message(record, known),
            None => String::new(),
        };
        Ok(api::Mirror {
            group_id: record.id.0.to_string(),
            name: record.group_name.clone(),
            kind: if record.is_volume { "volume" } else { "group" }.to_owned(),
            peer: peer.map(|peer| peer.name.clone()).unwrap_or_default(),
            peer_cluster_id: brain.peer.to_string(),
            role: role(brain.role).to_owned(),
            generation: brain.chain.top().generation.number,
            peer_role: known
                .as_ref()
                .and_then(|known| known.peer_role)
                .map(role)
                .unwrap_or_default()
                .to_owned(),
            health: match known.as_ref().filter(|_| is_primary).map(|known| known.health) {
                // Nothing more gets there, and nothing heals it but a person.
                Some(_) if is_cut_off => "error",
                Some(Health::Healthy) => "healthy",
                Some(Health::Degraded) => "degraded",
                Some(Health::Error) => "error",
                None => "",
            }
            .to_owned(),
            synced_at: match is_primary {
                true => synced.map(timestamp),
                false => shown.map(timestamp),
            },
            lag_ms: match is_primary {
                true => synced.map(|at| now_ms().saturating_sub(at)),
                false => shown.map(|at| self.clock_of_points(record).saturating_sub(at)),
            },
            message,
            interval_s: record.settings.interval_s,
            paused: record.settings.is_paused,
            may_take_over: record.settings.may_take_over,
            compression: if record.settings.compresses { "zstd" } else { "none" }.to_owned(),
            bandwidth_limit: record.settings.bandwidth_limit,
            members: self.members(record, known.as_ref()),
            points: points(record, &held, lag.as_ref()),
            transfer: self.transfer(record, known.as_ref()),
            unsure: brain.is_unsure,
            lost: self.lost(record),
            lag_bytes: lag.map(|lag| lag.bytes),
            lag_is_least: lag.is_some_and(|lag| lag.is_least),
            lag_counted_ms: lag.map_or(0, |lag| lag.counted.elapsed().as_millis() as u64),
            comparison: self.comparison(record),
            takes_over: brain.asks_step_down && brain.role == Role::Secondary,
        })
    }

    /// Time of the content that a promotion of a copy shows, by the clock of the side that cut it: what was
    /// acknowledged there later is not in it. A side that was demoted has everything as of its final point.
    fn shown_ms(&self, record: &MirrorRecord, held: &[(PointId, Cut)]) -> Option<u64> {
        let brain = record.brain();
        if brain.is_own() {
            let last = held.iter().find(|(point, _)| Some(*point) == brain.points.last);
            return last.map(|(_, cut)| cut.at_ms);
        }
        brain.points.complete.map(|_| brain.points.complete_cut_ms).filter(|ms| *ms != 0)
    }

    fn members(&self, record: &MirrorRecord, known: Option<&Known>) -> Vec<api::MirrorMember> {
        let member = |member: &quoin_cluster::mirror::Member| {
            let volume = self.state.volumes.get(&member.volume.to_string());
            let id = member.volume.to_string();
            let failures = known.map(|known| known.failures.as_slice()).unwrap_or_default();
            let failed = failures.iter().find(|(volume, _)| *volume == id);
            api::MirrorMember {
                name: volume.as_ref().map(|v| v.spec.name.clone()).unwrap_or_default(),
                has_base: member.has_base,
                confirmed: record.is_confirmed(member),
                waiting_for: match (&volume, failed) {
                    (None, _) => "its volume, which is gone".to_owned(),
                    (_, Some((_, why))) => why.clone(),
                    (Some(volume), None) => match &volume.opened.owner {
                        Some(node) if !self.peers.has_mirror(node) => format!(
                            "a mirror beside the target of node {node}: start `quoin mirror run` there"
                        ),
                        Some(_) => crate::status::waiting_for(&self.state, volume),
                        None => String::new(),
                    },
                },
                volume_id: id,
            }
        };
        record.brain().members.iter().map(member).collect()
    }

    fn lost(&self, record: &MirrorRecord) -> String {
        let all = record
            .brain()
            .members
            .iter()
            .flat_map(|member| self.state.snapshots.of_volume(member.volume));
        let kept = all.filter(|s| s.name.starts_with(LOST) && s.is_listed());
        kept.map(|s| s.name.clone()).collect::<Vec<_>>().join(", ")
    }

    /// The transfer under way, as far as its members have come.
    fn transfer(
        &self,
        record: &MirrorRecord,
        known: Option<&Known>,
    ) -> Option<api::MirrorTransfer> {
        let brain = record.brain();
        let block = BLOCK_SIZE as u64;
        if let Some(receiving) = &brain.receiving {
            let taken = brain.members.iter().zip(&receiving.cursors).map(|(member, cursor)| {
                let observed = self.state.observed();
                let feed =
                    observed.volumes.get(&member.volume).and_then(|s| s.content.feed.clone());
                feed.map_or(*cursor, |feed| feed.taken_to.max(*cursor))
            });
            return Some(api::MirrorTransfer {
                point: receiving.transfer.point.to_string(),
                base: receiving.transfer.base.map(|base| base.to_string()).unwrap_or_default(),
                done_bytes: taken.sum::<u64>().saturating_mul(block),
                total_bytes: receiving.blocks.iter().sum::<u64>().saturating_mul(block),
                ..api::MirrorTransfer::default()
            });
        }
        let point = brain.points.offered.filter(|_| brain.is_own())?;
        let wants = known.map(|known| known.wants.as_slice()).unwrap_or_default();
        let mut done = 0u64;
        let mut total = 0u64;
        for (at, member) in brain.members.iter().enumerate() {
            let volume = self.state.volumes.get(&member.volume.to_string());
            total = total.saturating_add(volume.map_or(0, |volume| volume.size_bytes));
            let sent = self.sent(member.volume).map_or(0, |sent| sent.next_block);
            let wanted = wants.get(at).copied().unwrap_or(0);
            done = done.saturating_add(sent.max(wanted).saturating_mul(block));
        }
        Some(api::MirrorTransfer {
            point: point.to_string(),
            base: brain.points.common.map(|base| base.to_string()).unwrap_or_default(),
            done_bytes: done.min(total),
            total_bytes: total,
            ..api::MirrorTransfer::default()
        })
    }

    fn message(&self, record: &MirrorRecord, known: &Known) -> String {
        let brain = record.brain();
        let is_split = brain.role == Role::Primary && known.peer_role == Some(Role::Primary);
        if is_split {
            return "split brain: both sides are primary, and IO goes on at both; demote one (`quoin \
                    mirror demote`), then resync it"
                .to_owned();
        }
        if !known.refused.is_empty() {
            return format!("the peer makes no copy: {}", known.refused);
        }
        if brain.role == Role::Diverged {
            return "both sides wrote since the last common point: `quoin mirror resync --force` here, or \
                    `quoin mirror promote --accept-diverged`"
                .to_owned();
        }
        if self.peers.leader().is_none() {
            return "no `quoin mirror run` of this cluster runs".to_owned();
        }
        if known.is_silent {
            return match brain.role {
                Role::Secondary if brain.is_unsure => {
                    "the records were recovered, and the peer is silent: `quoin mirror promote --at \
                     POINT` makes this side primary at one of `quoin mirror points`"
                }
                Role::Secondary => {
                    "the peer is silent: `quoin mirror promote --force` makes this side primary, at its \
                     last complete point"
                }
                _ => "the peer is silent: nothing is sent until it is heard",
            }
            .to_owned();
        }
        if let Some((volume, why)) = known.failures.first() {
            return format!("volume {volume}: {why}");
        }
        if brain.is_unsure {
            return "the records were recovered, and the peer has not spoken since".to_owned();
        }
        String::new()
    }

    /// Reason for which a call waits, in words.
    pub(super) async fn waits_for(&self, record: &MirrorRecord) -> String {
        let found = self.state.mirrored.group(record.id.0);
        let Some(record) = found else { return "it is over".to_owned() };
        let known = self.known(&record).await.ok().flatten();
        let message = known.as_ref().map(|known| self.message(&record, known)).unwrap_or_default();
        let waits = self.members(&record, known.as_ref());
        let waits = waits.into_iter().find(|member| !member.waiting_for.is_empty());
        match (message.is_empty(), waits) {
            (false, _) => message,
            (true, Some(member)) => {
                format!("volume {:?} waits for {}", member.name, member.waiting_for)
            }
            (true, None) => format!("it is {} here", role(record.role())),
        }
    }
}

fn points(
    record: &MirrorRecord,
    held: &[(PointId, Cut)],
    lag: Option<&LagBytes>,
) -> Vec<api::MirrorPoint> {
    let points = &record.brain().points;
    let named = [
        ("offered", points.offered),
        ("complete", points.complete),
        ("common", points.common),
        ("last", points.last),
    ];
    let point = |(point, cut): &(PointId, Cut)| {
        let is = named.iter().filter(|(_, named)| *named == Some(*point));
        api::MirrorPoint {
            id: point.to_string(),
            cut_at: (cut.at_ms != 0).then(|| timestamp(cut.at_ms)),
            is: is.map(|(name, _)| *name).collect::<Vec<_>>().join(","),
            lag_bytes: lag.filter(|lag| lag.since == Some(*point)).map(|lag| lag.bytes),
        }
    };
    held.iter().map(point).collect()
}
