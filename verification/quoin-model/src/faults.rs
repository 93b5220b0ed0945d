//! Faults: power cuts, deaths, damage, failed syncs, a restored record.

use crate::bounds::Model;
use crate::explore::Steps;
use crate::history::EMPTY;
use crate::mutants::Mutant;
use crate::state::*;
use crate::step::Step;

impl Model {
    pub(crate) fn fault_steps(&self, s: &State, steps: &mut Steps) {
        if s.budget.power_cuts > 0 {
            self.power_cuts(s, steps);
        }
        for r in (0..self.bounds.replicas()).filter(|r| s.replicas[*r].gone == 0) {
            if s.budget.deaths > 0 {
                self.death(s, r, steps);
            }
            if s.budget.damages > 0 && self.bounds.lying_disks {
                self.disk_rollbacks(s, r, steps);
            } else if s.budget.damages > 0 && s.replicas[r].log != EMPTY {
                self.damage(s, r, steps);
            }
            if s.budget.sync_failures > 0 && s.replicas[r].durable < s.lsn(s.replicas[r].log) {
                self.sync_failure(s, r, steps);
            }
        }
        let first = self.first_record(s);
        if s.budget.rollbacks > 0 && s.record != first {
            let mut next = *s;
            next.budget.rollbacks -= 1;
            next.record = first;
            steps.push(self, Step::RestoreRecord, next);
        }
    }

    /// The record as it was when the volume was made.
    pub(crate) fn first_record(&self, s: &State) -> Record {
        let old = (0..self.bounds.replicas()).filter(|r| s.replicas[*r].newcomer == 0);
        let known = old.fold(0, |set, r| set | 1 << r);
        let rule = Rule { known, cf: self.bounds.cf, rf: self.bounds.rf };
        Record { rule, ..Record::default() }
    }

    /// Any set of hosts at once. Each keeps what is on media and any further part of its log
    /// that happened to be written back; a torn tail is cut at its first hole.
    fn power_cuts(&self, s: &State, steps: &mut Steps) {
        let replicas = self.bounds.replicas();
        for set in 1..1u8 << replicas {
            if members(set).any(|r| s.replicas[r].gone == 1) {
                continue;
            }
            let low = |r: usize| {
                let replica = &s.replicas[r];
                let hollow = self.is(Mutant::SyncRetried) && replica.hollow > 0;
                if hollow { replica.hollow - 1 } else { replica.durable }
            };
            let mut kept = [0u8; REPLICAS];
            members(set).for_each(|r| kept[r] = low(r));
            loop {
                self.power_cut(s, set, kept, steps);
                // The next combination of what survives.
                let rises = members(set).find(|r| kept[*r] < s.lsn(s.replicas[*r].log));
                let Some(rises) = rises else { break };
                kept[rises] += 1;
                members(set).filter(|r| *r < rises).for_each(|r| kept[r] = low(r));
            }
        }
    }

    fn power_cut(&self, s: &State, set: Set, kept: [u8; REPLICAS], steps: &mut Steps) {
        let mut next = *s;
        next.budget.power_cuts -= 1;
        for r in members(set) {
            let log = s.prefix(s.replicas[r].log, kept[r]);
            let replica = &mut next.replicas[r];
            replica.log = log;
            replica.durable = kept[r];
            replica.session = 0;
            replica.hollow = 0;
            if replica.closed == 0 && !self.bounds.durability_media {
                replica.continuous = 0;
            }
        }
        steps.push(self, Step::PowerCut { replicas: set, kept }, next);
    }

    fn death(&self, s: &State, r: usize, steps: &mut Steps) {
        let mut next = *s;
        next.budget.deaths -= 1;
        let replica = &mut next.replicas[r];
        if self.is(Mutant::GuidBornTwice) {
            let newcomer = replica.newcomer;
            *replica = Replica { continuous: 1, quorum: 1, newcomer, ..Replica::default() };
        } else {
            // Its knowledge is of no use any more; its promise and lease still count elsewhere.
            let Replica { promised, version, newcomer, .. } = *replica;
            *replica = Replica { gone: 1, promised, version, newcomer, ..Replica::default() };
        }
        steps.push(self, Step::Death { replica: r }, next);
    }

    fn damage(&self, s: &State, r: usize, steps: &mut Steps) {
        let mut next = *s;
        next.budget.damages -= 1;
        let replica = &mut next.replicas[r];
        (replica.log, replica.durable) = (EMPTY, 0);
        (replica.damaged, replica.quorum, replica.session) = (1, 0, 0);
        steps.push(self, Step::Damage { replica: r }, next);
    }

    fn disk_rollbacks(&self, s: &State, r: usize, steps: &mut Steps) {
        for lsn in 0..s.lsn(s.replicas[r].log) {
            let mut next = *s;
            next.budget.damages -= 1;
            let log = s.prefix(s.replicas[r].log, lsn);
            let replica = &mut next.replicas[r];
            (replica.log, replica.durable, replica.session) = (log, lsn, 0);
            steps.push(self, Step::DiskRolledBack { replica: r, lsn }, next);
        }
    }

    /// The kernel drops from its cache what it could not write: the replica closes the session and
    /// reopens from media.
    fn sync_failure(&self, s: &State, r: usize, steps: &mut Steps) {
        let mut next = *s;
        next.budget.sync_failures -= 1;
        let at = s.replicas[r];
        if self.is(Mutant::SyncRetried) {
            let replica = &mut next.replicas[r];
            replica.hollow = at.durable + 1;
            replica.durable = s.lsn(at.log);
            if let Some(a) = usize::from(at.promised).checked_sub(1)
                && s.is_live(a, r)
                && s.attempts[a].links[r].state == LINK_FED
            {
                next.attempts[a].links[r].durable = next.replicas[r].durable;
            }
        } else {
            let replica = &mut next.replicas[r];
            replica.log = s.prefix(at.log, at.durable);
            (replica.continuous, replica.session) = (0, 0);
        }
        steps.push(self, Step::SyncFails { replica: r }, next);
    }
}
