//! Are the reads and writes of one 4 KiB block linearizable?
//!
//! A search in the manner of Wing, Gong and Lowe over (what is already in order, content), with
//! the content being eight sectors, so that sub-block writes, trims and zeroes (whose content is
//! not unique) are covered by one rule. It stays near-linear because a read that fits the content
//! is taken at once (it changes nothing), an unanswered write that nobody read is left out, and
//! one that was read is due by the first such read's answer.

use std::collections::HashSet;

use crate::content::{Tag, Tags};

/// An answer that never came.
pub const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Sets the sectors of `mask` (bit i: sector i) to `tag`.
    Write { mask: u8, tag: Tag },
    /// Saw this.
    Read { mask: u8, tags: Tags },
}

/// One operation on one block, with the instants (of one total order) of its call and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOp {
    /// The client operation it is part of, for people.
    pub op: u32,
    pub invoked: u64,
    /// [`NEVER`]: a write that may take effect at any time or not at all.
    pub answered: u64,
    pub act: Act,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Linearizable,
    /// No order explains the history; `stuck` is the operation (an index of the input) that could
    /// not be placed in the longest explanation found.
    Violated {
        stuck: usize,
    },
    /// The search gave up: neither proven nor refuted.
    Undecided,
}

/// Nodes looked at before giving up on one block.
const NODES_MAX: usize = 400_000;
/// Operations that may overlap the oldest one not yet in order.
const WINDOW: usize = 128;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Node {
    /// All operations before this one are in order.
    first: u32,
    /// Bit i: operation `first + i` is in order.
    window: u128,
    /// Unanswered zero writes that have been used.
    optional: u64,
    content: Tags,
}

fn apply(content: &mut Tags, mask: u8, tag: Tag) {
    for (i, sector) in content.iter_mut().enumerate() {
        if mask & (1 << i) != 0 {
            *sector = tag;
        }
    }
}

fn fits(content: &Tags, mask: u8, tags: &Tags) -> bool {
    (0..content.len()).all(|i| mask & (1 << i) == 0 || content[i] == tags[i])
}

/// Splits the operations into those that must be placed, sorted by invocation, and unanswered
/// zero writes, which may be.
fn prepare(ops: &[BlockOp]) -> (Vec<(usize, BlockOp)>, Vec<BlockOp>) {
    let seen = |tag: Tag| {
        ops.iter()
            .filter_map(|o| match o.act {
                Act::Read { mask, tags }
                    if (0..tags.len()).any(|i| mask & (1 << i) != 0 && tags[i] == tag) =>
                {
                    Some(o.answered)
                }
                _ => None,
            })
            .min()
    };
    let mut must = Vec::with_capacity(ops.len());
    let mut may = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        match op.act {
            Act::Read { .. } if op.answered == NEVER => {}
            Act::Write { tag: 0, .. } if op.answered == NEVER => may.push(*op),
            Act::Write { tag, .. } if op.answered == NEVER => {
                if let Some(answered) = seen(tag) {
                    must.push((index, BlockOp { answered, ..*op }));
                }
            }
            _ => must.push((index, *op)),
        }
    }
    must.sort_by_key(|(_, o)| (o.invoked, o.answered));
    (must, may)
}

/// Checks one block's history that began with `initial`.
pub fn check(initial: Tags, ops: &[BlockOp]) -> Verdict {
    let (must, may) = prepare(ops);
    if may.len() > 64 {
        return Verdict::Undecided;
    }
    let mut seen: HashSet<Node> = HashSet::new();
    let mut stack = vec![Node { first: 0, window: 0, optional: 0, content: initial }];
    let (mut furthest, mut stuck) = (0, 0);
    let mut nodes = 0;
    while let Some(mut node) = stack.pop() {
        // Reads that fit go first; each may end the reason another could not be next.
        let deadline = loop {
            while node.window & 1 == 1 {
                let run = node.window.trailing_ones();
                node.first += run;
                node.window = node.window.checked_shr(run).unwrap_or(0);
            }
            let mut deadline = NEVER;
            let mut progress = false;
            for (i, (_, op)) in must[node.first as usize..].iter().enumerate() {
                if op.invoked > deadline {
                    break;
                }
                if i >= WINDOW {
                    return Verdict::Undecided;
                }
                if node.window & (1 << i) != 0 {
                    continue;
                }
                deadline = deadline.min(op.answered);
                if let Act::Read { mask, tags } = op.act
                    && fits(&node.content, mask, &tags)
                {
                    // Sound even when a later one in the scan lowers the deadline below this
                    // invocation: then that one was invoked before and had to be scanned first.
                    node.window |= 1 << i;
                    progress = true;
                }
            }
            if !progress {
                break deadline;
            }
        };
        if node.first as usize == must.len() {
            return Verdict::Linearizable;
        }
        let placed = node.first as usize + node.window.count_ones() as usize;
        if placed >= furthest {
            furthest = placed;
            let due = must[node.first as usize..].iter().enumerate().take(WINDOW);
            stuck = due
                .filter(|(i, _)| node.window & (1 << i) == 0)
                .min_by_key(|(_, (_, o))| o.answered)
                .map_or(0, |(_, (index, _))| *index);
        }
        nodes += 1;
        if nodes > NODES_MAX {
            return Verdict::Undecided;
        }
        if !seen.insert(node) {
            continue;
        }
        // Pushed last is tried first: the write that is due first, optional ones last.
        for (i, op) in may.iter().enumerate() {
            if node.optional & (1 << i) == 0
                && op.invoked <= deadline
                && let Act::Write { mask, tag } = op.act
            {
                let mut next = node;
                next.optional |= 1 << i;
                apply(&mut next.content, mask, tag);
                if next.content != node.content {
                    stack.push(next);
                }
            }
        }
        let mut writes: Vec<(u64, usize, u8, Tag)> = Vec::new();
        for (i, (_, op)) in must[node.first as usize..].iter().enumerate().take(WINDOW) {
            if op.invoked > deadline {
                break;
            }
            if node.window & (1 << i) == 0
                && let Act::Write { mask, tag } = op.act
            {
                writes.push((op.answered, i, mask, tag));
            }
        }
        writes.sort_unstable_by(|a, b| b.cmp(a));
        for (_, i, mask, tag) in writes {
            let mut next = node;
            next.window |= 1 << i;
            apply(&mut next.content, mask, tag);
            stack.push(next);
        }
    }
    Verdict::Violated { stuck }
}

/// The history as a sequence that a person can follow; `stuck` is marked.
pub fn describe(block: u64, initial: Tags, ops: &[BlockOp], stuck: usize) -> String {
    use std::fmt::Write as _;
    let show = |mask: u8, tags: &Tags| {
        if mask == 0xff && tags.iter().all(|t| *t == tags[0]) {
            format!("#{}", tags[0])
        } else {
            let sector =
                |i: usize| if mask & (1 << i) == 0 { "·".into() } else { format!("#{}", tags[i]) };
            (0..tags.len()).map(sector).collect::<Vec<_>>().join(" ")
        }
    };
    let mut order: Vec<usize> = (0..ops.len()).collect();
    order.sort_by_key(|i| ops[*i].invoked);
    let mut out = format!("block {block}, which began as {}:\n", show(0xff, &initial));
    for i in order {
        let op = &ops[i];
        let answer = if op.answered == NEVER {
            "no answer".into()
        } else {
            format!("answered {}", op.answered)
        };
        let act = match op.act {
            Act::Write { mask, tag } => format!("write {}", show(mask, &[tag; 8])),
            Act::Read { mask, tags } => format!("read  {}", show(mask, &tags)),
        };
        let mark = if i == stuck { "  <== fits nowhere" } else { "" };
        let _ =
            writeln!(out, "  op {:<6} called {:<8} {answer:<18} {act}{mark}", op.op, op.invoked);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::ZERO;
    use crate::random::Random;

    fn write(op: u32, invoked: u64, answered: u64, tag: Tag) -> BlockOp {
        BlockOp { op, invoked, answered, act: Act::Write { mask: 0xff, tag } }
    }
    fn read(op: u32, invoked: u64, answered: u64, tag: Tag) -> BlockOp {
        BlockOp { op, invoked, answered, act: Act::Read { mask: 0xff, tags: [tag; 8] } }
    }

    #[test]
    fn a_read_older_than_an_answered_write_is_a_violation() {
        let ops = [write(1, 1, 2, 1), write(2, 3, 4, 2), read(3, 5, 6, 1)];
        assert_eq!(check(ZERO, &ops), Verdict::Violated { stuck: 2 });
        assert!(describe(7, ZERO, &ops, 2).contains("fits nowhere"));
    }

    #[test]
    fn a_value_once_seen_is_seen_always() {
        let ops = [write(1, 1, 2, 1), write(2, 3, NEVER, 2), read(3, 5, 6, 2), read(4, 7, 8, 1)];
        assert!(matches!(check(ZERO, &ops), Verdict::Violated { .. }));
    }

    #[test]
    fn an_unanswered_write_may_take_effect_late_or_never() {
        let late = [write(1, 1, NEVER, 1), read(2, 5, 6, 0), read(3, 7, 8, 1), read(4, 9, 10, 1)];
        assert_eq!(check(ZERO, &late), Verdict::Linearizable);
        let never = [write(1, 1, NEVER, 1), read(2, 5, 6, 0), read(3, 7, 8, 0)];
        assert_eq!(check(ZERO, &never), Verdict::Linearizable);
    }

    #[test]
    fn a_lost_trim_is_a_violation_and_an_unanswered_one_is_not() {
        let lost = [write(1, 1, 2, 5), write(2, 3, 4, 0), read(3, 5, 6, 5)];
        assert!(matches!(check(ZERO, &lost), Verdict::Violated { .. }));
        let open = [write(1, 1, 2, 5), write(2, 3, NEVER, 0), read(3, 5, 6, 5), read(4, 7, 8, 0)];
        assert_eq!(check(ZERO, &open), Verdict::Linearizable);
        let twice = [
            write(1, 1, 2, 5),
            write(2, 3, NEVER, 0),
            read(3, 5, 6, 0),
            write(4, 7, 8, 6),
            read(5, 9, 10, 0),
        ];
        assert!(matches!(check(ZERO, &twice), Verdict::Violated { .. }), "one trim works once");
    }

    #[test]
    fn sub_block_writes_merge_and_a_torn_block_is_a_violation() {
        let half =
            BlockOp { op: 2, invoked: 3, answered: 4, act: Act::Write { mask: 0x0f, tag: 2 } };
        let merged = BlockOp {
            op: 3,
            invoked: 5,
            answered: 6,
            act: Act::Read { mask: 0xff, tags: [2, 2, 2, 2, 1, 1, 1, 1] },
        };
        assert_eq!(check(ZERO, &[write(1, 1, 2, 1), half, merged]), Verdict::Linearizable);
        let torn = BlockOp { invoked: 3, answered: 9, ..write(2, 0, 0, 2) };
        assert!(matches!(
            check(ZERO, &[write(1, 1, 2, 1), torn, merged]),
            Verdict::Violated { .. }
        ));
    }

    /// Tries every order: the plain definition, for histories of a few operations.
    fn by_definition(content: Tags, ops: &[BlockOp], used: u32) -> bool {
        let left = |i: &usize| used & (1 << i) == 0;
        if (0..ops.len()).filter(left).all(|i| ops[i].answered == NEVER) {
            return true;
        }
        (0..ops.len()).filter(left).any(|i| {
            let blocked = (0..ops.len()).filter(left).any(|j| ops[j].answered < ops[i].invoked);
            let mut content = content;
            let fits = match ops[i].act {
                Act::Read { mask, tags } => fits(&content, mask, &tags),
                Act::Write { mask, tag } => {
                    apply(&mut content, mask, tag);
                    true
                }
            };
            !blocked && fits && by_definition(content, ops, used | (1 << i))
        })
    }

    #[test]
    fn the_search_agrees_with_the_definition_on_random_small_histories() {
        let (mut good, mut bad) = (0, 0);
        for seed in 0..20_000 {
            let mut random = Random::new(seed);
            let count = random.between(2, 7) as u32;
            let mut stamps: Vec<u64> = (0..u64::from(count) * 2).collect();
            for i in (1..stamps.len()).rev() {
                stamps.swap(i, random.index(i + 1));
            }
            let ops: Vec<BlockOp> = (0..count)
                .map(|op| {
                    let (a, b) = (stamps[op as usize * 2], stamps[op as usize * 2 + 1]);
                    let mask = *random.pick(&[0xff, 0xff, 0x01, 0xf0]);
                    let act = if random.percent(50) {
                        let tag = if random.percent(30) { 0 } else { op + 1 };
                        Act::Write { mask, tag }
                    } else {
                        let tag = random.below(u64::from(count) + 1) as u32;
                        Act::Read { mask, tags: [tag; 8] }
                    };
                    let open = matches!(act, Act::Write { .. }) && random.percent(20);
                    let answered = if open { NEVER } else { a.max(b) };
                    BlockOp { op, invoked: a.min(b), answered, act }
                })
                .collect();
            let expected = by_definition(ZERO, &ops, 0);
            let found = check(ZERO, &ops);
            assert_eq!(found == Verdict::Linearizable, expected, "seed {seed}: {ops:#?}");
            if expected { good += 1 } else { bad += 1 }
        }
        assert!(good > 2_000 && bad > 2_000, "both kinds are met: {good} good, {bad} bad");
    }
}
