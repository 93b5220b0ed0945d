//! All requests of the clients and their answers, and whether it could have been one volume.
//!
//! Instants are numbers of one total order. Writes that were never answered stay open, until a
//! newer target serves: from then on they are part of its history or void (contract item 4).
//! Where a power cut was allowed to take unflushed data back, the history is cut in two: the
//! second part begins with what the new history holds.

use std::collections::BTreeMap;

use crate::content::{SECTORS, Tag, Tags, ZERO};
use crate::linear::{self, Act, BlockOp, NEVER, Verdict};
use crate::workload::Draft;

#[derive(Clone, Debug)]
pub struct Op {
    /// The tag of its contents, and its name.
    pub tag: Tag,
    pub draft: Draft,
    pub invoked: u64,
    /// [`NEVER`] while open or failed.
    pub answered: u64,
    /// Tags that a read returned, by sector.
    pub seen: Vec<Tag>,
    /// The lives of targets that it was given to, the present one last: one that its client has left may
    /// not know of it, and carry it out still.
    pub targets: Vec<(usize, u32)>,
    /// Blocks that are not in the history any more or never were: no later read may see them.
    void: Vec<u64>,
    /// Blocks known to have taken effect by an instant, though they were never answered.
    effect_by: Option<u64>,
    /// A trim or zero that was open at a cut: it took effect before it or after it.
    either_part: bool,
    /// Its client sends it again if it is not answered, to whichever target serves.
    is_sent_again: bool,
}

#[derive(Debug)]
pub struct Unlinear {
    pub block: u64,
    pub decided: bool,
    pub story: String,
}

#[derive(Default)]
pub struct History {
    ops: Vec<Op>,
    /// The instant at which the present part of the history began.
    part_begins: u64,
    initial: BTreeMap<u64, Tags>,
    /// Content that the volume began with.
    begun: BTreeMap<u64, Tags>,
    clock: u64,
    /// Tags up to it are those of another volume, whose content this one has.
    first: Tag,
    pub checked: u64,
    pub undecided: u64,
}

impl History {
    /// The volume begins with the content of another one.
    pub fn begin_with(&mut self, image: BTreeMap<u64, Tags>) {
        self.initial.clone_from(&image);
        self.begun = image;
    }

    /// Tags of this volume begin behind another volume's, whose content it gets.
    pub fn begin_behind(&mut self, first: Tag) {
        self.first = first;
    }

    fn index(&self, tag: Tag) -> usize {
        (tag - self.first) as usize - 1
    }

    pub fn stamp(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Enters a new operation; its tag names it.
    pub fn invoke(&mut self, draft: Draft, target: (usize, u32)) -> Tag {
        let invoked = self.stamp();
        let tag = self.first + self.ops.len() as Tag + 1;
        self.ops.push(Op {
            tag,
            draft,
            invoked,
            answered: NEVER,
            seen: Vec::new(),
            targets: vec![target],
            void: Vec::new(),
            effect_by: None,
            either_part: false,
            is_sent_again: false,
        });
        tag
    }

    pub fn op(&self, tag: Tag) -> &Op {
        &self.ops[self.index(tag)]
    }

    /// Sets whether an operation that has no answer may be sent again.
    pub fn may_be_sent_again(&mut self, tag: Tag, is_sent_again: bool) {
        let index = self.index(tag);
        self.ops[index].is_sent_again = is_sent_again;
    }

    /// The operation is sent to this life of a target.
    pub fn sent_to(&mut self, tag: Tag, target: (usize, u32)) -> &Op {
        let index = self.index(tag);
        let op = &mut self.ops[index];
        op.targets.retain(|former| *former != target);
        op.targets.push(target);
        op
    }

    pub fn len(&self) -> usize {
        self.ops.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Returns true if a write with this tag was ever made to this sector.
    pub fn wrote(&self, tag: Tag, sector: u64) -> bool {
        let (block, at) = (sector / SECTORS as u64, (sector % SECTORS as u64) as usize);
        tag == 0
            || self.begun.get(&block).is_some_and(|tags| tags[at] == tag)
            || self.initial.get(&block).is_some_and(|tags| tags[at] == tag)
            || tag > self.first
                && self.ops.get(self.index(tag)).is_some_and(|op| match op.draft {
                    Draft::Write { sector: first, sectors, .. } => {
                        (first..first + sectors).contains(&sector)
                    }
                    _ => false,
                })
    }

    pub fn answer(&mut self, tag: Tag, seen: Vec<Tag>) {
        let stamp = self.stamp();
        let index = self.index(tag);
        let op = &mut self.ops[index];
        op.answered = stamp;
        op.seen = seen;
    }

    /// A newer target serves: each open write of other targets is in its history (`holds` says
    /// so for each block) or void from now on. Those for which `over` is false may still be
    /// taken up: their target has never served and they were never sent.
    pub fn settle(
        &mut self,
        serving: (usize, u32),
        over: impl Fn(&Op) -> bool,
        mut holds: impl FnMut(Tag, u64) -> bool,
    ) {
        let stamp = self.stamp();
        let begins = self.part_begins;
        for op in self.ops.iter_mut().filter(|op| op.invoked >= begins) {
            let goes_on = op.targets.contains(&serving) || op.is_sent_again || !over(op);
            if op.answered != NEVER || op.effect_by.is_some() || goes_on {
                continue;
            }
            if let Draft::Write { sector, sectors, .. } = op.draft {
                let (first, last) = blocks_of(sector, sectors);
                // Content that the part began with stays out of it, however the write ended.
                op.void.extend((first..=last).filter(|b| !holds(op.tag, *b)));
                op.effect_by = Some(stamp);
            }
        }
    }

    /// Checks the part that ends here, and begins another one from `image`. Operations of
    /// `serving` that are still open go on, and those that are not `over`: their target has never
    /// served. `holds` says what the image has of them.
    pub fn cut(
        &mut self,
        image: BTreeMap<u64, Tags>,
        serving: (usize, u32),
        over: impl Fn(&Op) -> bool,
        mut holds: impl FnMut(Tag, u64) -> bool,
    ) -> Result<(), Box<Unlinear>> {
        self.check()?;
        let stamp = self.stamp();
        let begins = self.part_begins;
        for op in self.ops.iter_mut().filter(|op| op.invoked >= begins) {
            let goes_on = op.targets.contains(&serving) || op.is_sent_again || !over(op);
            let open = op.answered == NEVER && goes_on;
            if !open {
                // A write that was answered and is lost comes back where the target that answered
                // it lives: it writes again what it still has.
                if let Draft::Write { sector, sectors, .. } = op.draft
                    && op.targets.last() == Some(&serving)
                {
                    let (first, last) = blocks_of(sector, sectors);
                    let held: Vec<u64> = (first..=last).filter(|b| holds(op.tag, *b)).collect();
                    if held.len() as u64 <= last - first {
                        (op.invoked, op.either_part) = (stamp, true);
                        op.void = held.into_iter().collect();
                    }
                }
                continue;
            }
            // It was called before the cut and may be answered after it.
            op.invoked = stamp;
            if let Draft::Write { sector, sectors, .. } = op.draft {
                let (first, last) = blocks_of(sector, sectors);
                op.void = (first..=last).filter(|b| holds(op.tag, *b)).collect();
            } else {
                op.either_part = true;
            }
        }
        self.part_begins = stamp;
        self.initial = image;
        Ok(())
    }

    /// Checks every block of the present part.
    pub fn check(&mut self) -> Result<(), Box<Unlinear>> {
        let mut blocks: BTreeMap<u64, Vec<BlockOp>> = BTreeMap::new();
        for op in self.ops.iter().filter(|op| op.invoked >= self.part_begins) {
            let Some((sector, sectors)) = op.draft.range() else {
                self.checked += u64::from(op.answered != NEVER);
                continue;
            };
            self.checked += u64::from(op.answered != NEVER);
            let is_read = matches!(op.draft, Draft::Read { .. });
            if is_read && op.answered == NEVER {
                continue;
            }
            let (first, last) = blocks_of(sector, sectors);
            for block in first..=last {
                let mut mask = 0u8;
                let mut tags = ZERO;
                for (i, slot) in tags.iter_mut().enumerate() {
                    let at = block * SECTORS as u64 + i as u64;
                    if (sector..sector + sectors).contains(&at) {
                        mask |= 1 << i;
                        if is_read {
                            *slot = op.seen[(at - sector) as usize];
                        }
                    }
                }
                let act = match op.draft {
                    // A trim is a hint: parts of blocks at its edges are left alone.
                    Draft::Trim { .. } if mask != u8::MAX => continue,
                    Draft::Read { .. } => Act::Read { mask, tags },
                    Draft::Write { .. } => Act::Write { mask, tag: op.tag },
                    _ => Act::Write { mask, tag: 0 },
                };
                if op.void.contains(&block) {
                    continue;
                }
                let open = op.either_part && !is_read;
                let answered =
                    if open { NEVER } else { op.answered.min(op.effect_by.unwrap_or(NEVER)) };
                blocks.entry(block).or_default().push(BlockOp {
                    op: op.tag,
                    invoked: op.invoked,
                    answered,
                    act,
                });
            }
        }
        for (block, ops) in blocks {
            let initial = self.initial.get(&block).copied().unwrap_or(ZERO);
            match linear::check(initial, &ops) {
                Verdict::Linearizable => {}
                Verdict::Undecided => self.undecided += 1,
                Verdict::Violated { stuck } => {
                    let story = linear::describe(block, initial, &ops, stuck);
                    return Err(Box::new(Unlinear { block, decided: true, story }));
                }
            }
        }
        Ok(())
    }
}

/// The first and last block that a range of sectors touches.
pub fn blocks_of(sector: u64, sectors: u64) -> (u64, u64) {
    (sector / SECTORS as u64, (sector + sectors - 1) / SECTORS as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Draft = Draft::Write { sector: 0, sectors: 8, fua: false };
    const READ: Draft = Draft::Read { sector: 0, sectors: 8 };

    #[test]
    fn a_write_that_a_newer_target_does_not_hold_may_never_be_seen() {
        let mut history = History::default();
        let lost = history.invoke(WRITE, (0, 0));
        history.settle((1, 0), |_| true, |_, _| false);
        let read = history.invoke(READ, (1, 0));
        history.answer(read, vec![lost; 8]);
        assert!(history.check().is_err());
    }

    #[test]
    fn a_write_that_a_newer_target_holds_is_seen_by_every_later_read() {
        let mut history = History::default();
        let held = history.invoke(WRITE, (0, 0));
        history.settle((1, 0), |_| true, |_, _| true);
        let read = history.invoke(READ, (1, 0));
        history.answer(read, vec![0; 8]);
        assert!(history.check().is_err(), "write {held} came back from the dead");
    }

    #[test]
    fn a_trim_that_is_open_at_a_cut_may_belong_to_either_part() {
        for seen in [0, 7] {
            let mut history = History::default();
            let trim = history.invoke(Draft::Trim { sector: 0, sectors: 8, fua: false }, (0, 0));
            let image = BTreeMap::from([(0, [7; 8])]);
            history.cut(image, (0, 0), |_| true, |_, _| false).unwrap();
            history.answer(trim, Vec::new());
            let read = history.invoke(READ, (0, 0));
            history.answer(read, vec![seen; 8]);
            assert!(history.check().is_ok());
        }
    }

    #[test]
    fn after_an_allowed_loss_the_new_history_counts_from_its_image() {
        let mut history = History::default();
        let lost = history.invoke(WRITE, (0, 0));
        history.answer(lost, Vec::new());
        history.cut(BTreeMap::new(), (0, 1), |_| true, |_, _| false).unwrap();
        let read = history.invoke(READ, (0, 1));
        history.answer(read, vec![0; 8]);
        assert!(history.check().is_ok());
        let read = history.invoke(READ, (0, 1));
        history.answer(read, vec![lost; 8]);
        assert!(history.check().is_err(), "what was lost does not come back");
    }
}
