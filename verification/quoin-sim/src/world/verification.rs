//! A verification at rest: all replicas agree, and what it finds bad is what rot may have hit.

use quoin_replication::primary::{PrimaryEvent, VerifyOrder, VerifyReport};
use quoin_types::message::{Content, ReadView};

use super::World;

impl World {
    /// Has the target compare all replicas, once; true when that was done and judged.
    pub(crate) fn verified(&mut self) -> bool {
        let owner = self.control.record.owner;
        let Some(process) = &self.targets[owner].process else { return false };
        match process.target.status().verify {
            None => {
                let order = VerifyOrder { request: 1, repair: false, from: None };
                self.feed_target(owner, vec![PrimaryEvent::Verify(Some(order))]);
                false
            }
            Some(report) if report.ended => {
                self.check_verification(&report);
                true
            }
            Some(_) => false,
        }
    }

    fn check_verification(&mut self, report: &VerifyReport) {
        let whole = report.failed.is_empty()
            && (report.checked_blocks, report.unsettled) == (self.setup.volume_blocks, 0);
        if !whole || report.differing > 0 {
            return self.violate("VerifyAgrees", format!("at rest: {report:?}"));
        }
        if report.lost > 0 && !self.may_be_unreadable() {
            return self.violate("VerifyAgrees", format!("no good copy is left: {report:?}"));
        }
        for pool in self.known_pools() {
            let member = self.pools[pool].member;
            let Some(seen) = report.members.iter().find(|seen| seen.member == member) else {
                return self.violate("VerifyAgrees", format!("pool {pool} was never asked"));
            };
            let (told, left_out) = (seen.bad, seen.left_out);
            if told > 0 && !self.may_be_damaged(pool) {
                let detail = format!("pool {pool} has {told} bad blocks, and no rot hit it");
                return self.violate("VerifyFindsRot", detail);
            }
            let is_bad = self.bad_blocks(pool);
            if is_bad > told && left_out.is_empty() {
                let detail = format!("pool {pool} has {is_bad} bad blocks, {told} were found");
                return self.violate("VerifyFindsRot", detail);
            }
        }
    }

    /// Blocks of the live view that cannot be read well now.
    fn bad_blocks(&mut self, pool: usize) -> u64 {
        let (guid, blocks) = (self.pools[pool].member.guid, self.setup.volume_blocks);
        let mut bad = 0;
        self.pools[pool].storage.with(guid, &mut |store| {
            for lba in (0..blocks).step_by(256) {
                let (mut slots, count) = (Vec::new(), (blocks - lba).min(256) as u32);
                if store.read(ReadView::Live, lba, count, true, &mut slots).is_ok() {
                    let bad_ones = slots.iter().filter(|slot| slot.content == Content::Bad);
                    bad += bad_ones.map(|slot| u64::from(slot.blocks)).sum::<u64>();
                }
            }
        });
        bad
    }
}
