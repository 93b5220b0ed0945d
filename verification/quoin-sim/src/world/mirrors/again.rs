//! The end of a mirror, and another one of the same group after it, from either side: what controllers do with records,
//! points and volumes beside the brain, and an orchestrator that deploys the application again.
//!
//! A record goes once nobody has to hear of the end, and with it every point. The volumes stay where the application
//! was, or where its orphan was promoted or emptied; those of the other side are deleted, before or after the mirror is
//! enabled again, as copies with their ids are refused until then.

use quoin_cluster::mirror::answers::{Answer, Call};
use quoin_cluster::mirror::{Record, Role};
use quoin_types::ids::VolumeId;

use super::volume::Volume;
use super::{GROUP, MirrorEvent, Mirrors, cluster};
use crate::schedule::{MILLISECOND, SECOND};

/// Most mirrors of one run.
const MIRRORS_MAX: u64 = 8;

impl Mirrors {
    /// The side where the application is to be deployed again, drawn once the former mirror was ended.
    pub(super) fn deploy_again(&mut self) {
        let is_off = |side: usize| self.sides[side].stored().role == Role::Off;
        let was_ended = (0..2).any(is_off);
        let Some(managers) = self.managers.as_mut().filter(|managers| managers.is_deleted) else {
            return;
        };
        if !was_ended || managers.again.is_some() || self.is_calm || self.mirrors >= MIRRORS_MAX {
            return;
        }
        if self.again.percent(30) {
            let to = self.again.index(2);
            managers.again = Some((to, false));
            self.say(|| format!("the application is to be deployed again, at {to}"));
        }
    }

    /// A turn of the orchestrator that deploys the application again at a side.
    pub(super) fn deploy(&mut self, to: usize, is_enabled: bool) {
        let other = 1 - to;
        self.clear(other);
        let role = self.sides[to].stored().role;
        match role {
            Role::Off if self.sides[to].is_recorded => {}
            Role::Off => self.enable(to),
            Role::Primary if !is_enabled => drop(self.call(to, Call::Disable)),
            // A person thinks better of it.
            Role::Primary if !self.is_calm && self.again.percent(4) => {
                self.call(to, Call::Disable);
            }
            Role::Primary => {
                if self.call(to, Call::Enable) == Some(Answer::Ok)
                    && let Some(managers) = &mut self.managers
                {
                    managers.again_from[usize::from(managers.primary == to)] += 1;
                    (managers.again, managers.primary) = (None, to);
                    (managers.is_deleted, managers.dead_until) = (false, 0);
                    self.say(|| format!("the application is mirrored again, from {to}"));
                }
            }
            Role::Orphan => drop(self.call(to, Call::Promote { force: false })),
            _ => self.clean_up(to),
        }
    }

    /// Removes what is left of the former mirror on the side that is to have the copies.
    fn clear(&mut self, side: usize) {
        let role = self.sides[side].stored().role;
        match role {
            Role::Primary => drop(self.call(side, Call::Disable)),
            Role::Orphan if self.is_current(side) && self.again.percent(50) => {
                let members: Vec<VolumeId> = self.sides[side].volumes.keys().copied().collect();
                for member in members {
                    if self.call(side, Call::Delete(member)) != Some(Answer::Ok) {
                        return;
                    }
                }
                self.forget(side);
                self.delete_volumes(side);
            }
            Role::Orphan => drop(self.call(side, Call::Promote { force: false })),
            Role::Off if !self.sides[side].is_recorded && self.again.percent(40) => {
                self.delete_volumes(side);
            }
            Role::Off => {}
            _ => self.clean_up(side),
        }
    }

    /// Every process of the side has the record as it is stored: an answer is of the role that it has.
    pub(super) fn is_current(&self, side: usize) -> bool {
        let to = &self.sides[side];
        let stored = to.stored();
        to.brains.iter().all(|(_, brain)| brain.record() == &stored)
    }

    fn delete_volumes(&mut self, side: usize) {
        let to = &mut self.sides[side];
        if !std::mem::replace(&mut to.has_volumes, false) {
            return;
        }
        to.volumes.values_mut().for_each(|volume| *volume = Volume::new(volume.live.len()));
        self.say(|| format!("{side}: the volumes are deleted"));
    }

    /// Forgets a record that is over, as a controller does: see `Record::is_over`.
    pub(super) fn forget_what_is_over(&mut self, side: usize) {
        let to = &self.sides[side];
        let Some(brain) = to.brain().filter(|_| to.is_recorded) else { return };
        let heard = brain.heard().map(|word| word.role);
        if brain.record() == &to.stored() && to.stored().is_over(heard) {
            self.forget(side);
        }
    }

    /// The other side has no record of the group, which it says to whoever talks of it.
    pub(super) fn peer_has_none(&mut self, side: usize) {
        if self.sides[side].is_recorded && self.sides[side].stored().role == Role::Off {
            self.forget(side);
        }
    }

    /// The record goes, and the volumes are ordinary ones.
    pub(super) fn forget(&mut self, side: usize) {
        let to = &mut self.sides[side];
        to.is_recorded = false;
        to.brains.clear();
        let off = Record { role: Role::Off, ..to.stored() };
        to.put(&off);
        to.volumes.values_mut().for_each(Volume::release);
        self.say(|| format!("{side}: the record is over"));
    }

    fn enable(&mut self, side: usize) {
        if !self.sides[side].has_volumes {
            // Deployed from nothing: its volumes are new ones.
            self.sides[side].has_volumes = true;
        }
        let members: Vec<VolumeId> = self.sides[side].volumes.keys().copied().collect();
        let parameters = self.sides[side].stored().parameters;
        let drawn = (self.again.wide(), self.sides[side].stored().term);
        let clusters = [cluster(side), cluster(1 - side)];
        let record = Record::begun(GROUP, clusters, members, parameters, drawn);
        self.mirrors += 1;
        self.check_begun(side, &record);
        self.record(side, &record);
        if let Some(managers) = &mut self.managers {
            managers.again = Some((side, true));
        }
        self.say(|| format!("{side}: another mirror is enabled"));
        self.introduce(side);
    }

    fn record(&mut self, side: usize, record: &Record) {
        // As the product has it: the time, which is beyond what a former mirror counted to.
        let version = self.sides[side].wall_ms(self.now());
        let to = &mut self.sides[side];
        (to.is_recorded, to.version) = (true, version);
        to.put(record);
        to.making.clear();
        self.start_brain(side);
    }

    /// A primary tells of its group until the other side has recorded it.
    pub(super) fn introduce(&mut self, side: usize) {
        let record = self.sides[side].stored();
        if !self.sides[side].is_recorded || record.role != Role::Primary || record.is_paired {
            return;
        }
        let delay = self.again.below(300 * MILLISECOND);
        if self.link[side] && self.sides[side].has_mirror && !self.again.percent(20) {
            self.schedule.after(delay, MirrorEvent::Introduce(1 - side, Box::new(record)));
        }
        self.schedule.after(SECOND, MirrorEvent::IntroduceAgain(side));
    }

    /// Makes the copies that the other side tells of, or refuses.
    pub(super) fn introduced(&mut self, side: usize, theirs: &Record) {
        let known = self.sides[side].stored();
        if self.sides[side].is_recorded {
            if known.role == Role::Secondary && known.is_another(theirs) {
                let orphan = Record { role: Role::Orphan, receiving: None, ..known };
                self.replace(side, &orphan);
            } else if matches!(known.role, Role::Off | Role::Orphan) {
                self.refuse(side);
            }
            return;
        }
        if self.sides[side].has_volumes {
            return self.refuse(side);
        }
        let members: Vec<VolumeId> = theirs.members.iter().map(|member| member.volume).collect();
        let clusters = [cluster(side), cluster(1 - side)];
        let (chain, parameters) = (theirs.chain.clone(), theirs.parameters);
        let record = Record::secondary(GROUP, clusters, members, chain, parameters);
        let record = Record { term: known.term, ..record };
        let keepsake = record.keepsake();
        let to = &mut self.sides[side];
        to.has_volumes = true;
        to.volumes.values_mut().for_each(|volume| volume.keepsake = Some(keepsake));
        self.checks.forget_said(side);
        self.say(|| format!("{side}: copies are made again"));
        self.record(side, &record);
    }

    fn refuse(&mut self, side: usize) {
        if self.link[side] && self.again.percent(30) {
            let delay = self.again.below(300 * MILLISECOND);
            self.schedule.after(delay, MirrorEvent::Refused(1 - side));
        }
    }

    /// A refused enabling leaves nothing behind.
    pub(super) fn refused(&mut self, side: usize) {
        let record = self.sides[side].stored();
        if self.sides[side].is_recorded && record.role == Role::Primary && !record.is_paired {
            self.call(side, Call::Disable);
        }
    }

    /// Changes a record beside its brains, which hear of it.
    fn replace(&mut self, side: usize, record: &Record) {
        let to = &mut self.sides[side];
        to.version += 1;
        to.put(record);
        let (version, brains) = (to.version, to.brains.iter().map(|(number, _)| *number));
        for brain in brains.collect::<Vec<_>>() {
            let outcome = super::StoreOutcome::Changed(Box::new(record.clone()), version);
            self.schedule.after(MILLISECOND, MirrorEvent::Stored { side, brain, outcome });
        }
        self.say(|| format!("{side}: {:?} of a mirror that is no more", record.role));
    }
}
