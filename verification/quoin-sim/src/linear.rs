//! Are the reads and writes of one 4 KiB block linearizable?
//!
//! A search in the manner of Wing, Gong and Lowe over (what is already in order, content), with
//! the content being eight sectors, so that sub-block writes, trims and zeroes (whose content is
//! not unique) are covered by one rule. No state is looked at twice, and what keeps the states
//! few is that an order is never tried where another one does as well:
//!
//! * A read that fits is taken at once: it changes nothing.
//! * Content that no read still to come shows is *dead*, and all dead content is alike. A write
//!   that would be dead is taken at once where it covers nothing but dead content.
//! * Content that a read still to come shows, and that nothing will write again, is not
//!   overwritten.
//! * Of writes that do the same (zeroes, or dead, at the same sectors), the one that is due first
//!   goes first: whatever order has another one there is still an order with the two exchanged.
//! * An unanswered write that no read returned is left out, one that was read is due by the first such
//!   read's answer, and an unanswered zero may be used once or never: of two states that differ
//!   in that alone, the one that has used fewer can do all that the other can.

use crate::content::{SECTORS, Tag, Tags};
use crate::map::FixedMap;

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

/// States looked at before giving up on one block.
const STATES_MAX: usize = 400_000;

/// Stands for any content that no read still to come shows.
const DEAD: Tag = Tag::MAX;

/// The operations that are in order so far, and the contents of the block after them.
#[derive(Clone)]
struct State {
    /// All operations of the words before this one are in order.
    word: usize,
    /// Bit b of word w: operation `64 * (word + w) + b` is in order. The last word is not zero.
    placed: Vec<u64>,
    content: Tags,
    /// How many of the unanswered zeroes of each mask have been used.
    used: Vec<u16>,
}

impl State {
    fn has(&self, op: usize) -> bool {
        let (word, bit) = (op / 64, op % 64);
        word < self.word
            || self.placed.get(word - self.word).is_some_and(|bits| bits >> bit & 1 == 1)
    }

    fn place(&mut self, op: usize) {
        let at = op / 64 - self.word;
        if self.placed.len() <= at {
            self.placed.resize(at + 1, 0);
        }
        self.placed[at] |= 1 << (op % 64);
        let whole = self.placed.iter().take_while(|bits| **bits == u64::MAX).count();
        self.placed.drain(..whole);
        self.word += whole;
    }

    fn count(&self) -> usize {
        self.word * 64 + self.placed.iter().map(|bits| bits.count_ones() as usize).sum::<usize>()
    }
}

fn sectors_of(mask: u8) -> impl Iterator<Item = usize> {
    (0..SECTORS).filter(move |i| mask & (1 << i) != 0)
}

fn apply(content: &mut Tags, mask: u8, tag: Tag) {
    sectors_of(mask).for_each(|i| content[i] = tag);
}

fn fits(content: &Tags, mask: u8, tags: &Tags) -> bool {
    sectors_of(mask).all(|i| content[i] == tags[i])
}

/// The history of one block, made ready for the search.
struct Search {
    /// Operations that must be placed, in the order of invocation, with their index in the input.
    must: Vec<(usize, BlockOp)>,
    /// Unanswered zeroes, by mask: the instants at which they were invoked, in order.
    may: Vec<(u8, Vec<u64>)>,
    /// The reads that show a tag at a sector.
    readers: FixedMap<(Tag, usize), Vec<usize>>,
    /// The writes among `must` that put a tag at a sector.
    writers: FixedMap<(Tag, usize), Vec<usize>>,
}

impl Search {
    fn new(ops: &[BlockOp]) -> Self {
        let mut first_seen: FixedMap<Tag, u64> = FixedMap::default();
        for op in ops {
            if let Act::Read { mask, tags } = op.act {
                for i in sectors_of(mask) {
                    let seen = first_seen.entry(tags[i]).or_insert(NEVER);
                    *seen = op.answered.min(*seen);
                }
            }
        }
        let mut must = Vec::with_capacity(ops.len());
        let mut may: Vec<(u8, Vec<u64>)> = Vec::new();
        for (index, op) in ops.iter().enumerate() {
            match op.act {
                Act::Read { .. } if op.answered == NEVER => {}
                Act::Write { mask, tag: 0 } if op.answered == NEVER => {
                    match may.iter_mut().find(|(m, _)| *m == mask) {
                        Some((_, invoked)) => invoked.push(op.invoked),
                        None => may.push((mask, vec![op.invoked])),
                    }
                }
                Act::Write { tag, .. } if op.answered == NEVER => {
                    if let Some(answered) = first_seen.get(&tag).copied() {
                        must.push((index, BlockOp { answered, ..*op }));
                    }
                }
                _ => must.push((index, *op)),
            }
        }
        must.sort_by_key(|(_, o)| (o.invoked, o.answered));
        may.iter_mut().for_each(|(_, invoked)| invoked.sort_unstable());
        let (mut readers, mut writers) = (FixedMap::default(), FixedMap::default());
        for (at, (_, op)) in must.iter().enumerate() {
            let (mask, tags, by_place) = match op.act {
                Act::Read { mask, tags } => (mask, tags, &mut readers),
                Act::Write { mask, tag } => (mask, [tag; SECTORS], &mut writers),
            };
            for i in sectors_of(mask) {
                by_place.entry((tags[i], i)).or_insert_with(Vec::new).push(at);
            }
        }
        Self { must, may, readers, writers }
    }

    /// Returns true if a read that is not in order yet shows this tag at this sector.
    fn is_wanted(&self, state: &State, tag: Tag, sector: usize) -> bool {
        self.readers.get(&(tag, sector)).is_some_and(|reads| any_left(state, reads))
    }

    fn is_dead(&self, state: &State, mask: u8, tag: Tag) -> bool {
        sectors_of(mask).all(|i| !self.is_wanted(state, tag, i))
    }

    /// Returns true if a write that is not in order yet can put this tag at this sector.
    fn can_be_written(&self, state: &State, tag: Tag, sector: usize) -> bool {
        let may = |((mask, invoked), used): (&(u8, Vec<u64>), &u16)| {
            tag == 0 && mask & (1 << sector) != 0 && usize::from(*used) < invoked.len()
        };
        self.writers.get(&(tag, sector)).is_some_and(|writes| any_left(state, writes))
            || self.may.iter().zip(&state.used).any(may)
    }

    /// Returns true if overwriting these sectors leaves every read still to come with a way to be
    /// right.
    fn may_overwrite(&self, state: &State, mask: u8, tag: Tag) -> bool {
        sectors_of(mask).all(|i| {
            let held = state.content[i];
            held == DEAD || held == tag || self.can_be_written(state, held, i)
        })
    }

    /// A read of what nothing can have put there.
    fn impossible(&self, state: &State) -> Option<usize> {
        let is_there = |(tag, i): &(Tag, usize)| {
            state.content[*i] == *tag || self.can_be_written(state, *tag, *i)
        };
        let impossible = self.readers.iter().filter(|(place, _)| !is_there(place));
        impossible.map(|(_, reads)| reads[0]).min().map(|read| self.must[read].0)
    }

    /// Returns the first read that is due. Only reads can be inexplicable: a write fits any state.
    fn first_read_due(&self, state: &State) -> Option<usize> {
        let ops = self.must.iter().enumerate().skip(state.word * 64);
        let reads =
            ops.filter(|(at, (_, op))| matches!(op.act, Act::Read { .. }) && !state.has(*at));
        reads.min_by_key(|(_, (_, op))| op.answered).map(|(_, (index, _))| *index)
    }

    /// Takes all that is best taken now, and says by when the next operation is due.
    fn settle(&self, state: &mut State) -> u64 {
        let deadline = loop {
            let mut deadline = NEVER;
            let mut progress = false;
            for at in state.word * 64..self.must.len() {
                let (_, op) = &self.must[at];
                if op.invoked > deadline {
                    break;
                }
                if state.has(at) {
                    continue;
                }
                deadline = deadline.min(op.answered);
                let take = match op.act {
                    Act::Read { mask, tags } => fits(&state.content, mask, &tags),
                    Act::Write { mask, tag } => {
                        let over_dead = |i| !self.is_wanted(state, state.content[i], i);
                        self.is_dead(state, mask, tag) && sectors_of(mask).all(over_dead)
                    }
                };
                if take {
                    // Sound even when a later one in the scan lowers the deadline below this
                    // invocation: then that one was invoked before and had to be scanned first.
                    state.place(at);
                    progress = true;
                }
            }
            if !progress {
                break deadline;
            }
        };
        for i in 0..SECTORS {
            if !self.is_wanted(state, state.content[i], i) {
                state.content[i] = DEAD;
            }
        }
        deadline
    }

    /// The writes that may be next, each with what it leaves and by when it is due, the most
    /// urgent last; of those that do the same, the most urgent alone.
    fn next(&self, state: &State, deadline: u64) -> Vec<State> {
        let mut best: Vec<(u64, u8, Tag, Option<usize>)> = Vec::new();
        for at in state.word * 64..self.must.len() {
            let (_, op) = &self.must[at];
            if op.invoked > deadline {
                break;
            }
            let Act::Write { mask, tag } = op.act else { continue };
            if state.has(at) {
                continue;
            }
            let tag = if self.is_dead(state, mask, tag) { DEAD } else { tag };
            match best.iter_mut().find(|(_, m, t, _)| (*m, *t) == (mask, tag)) {
                Some(known) if known.0 <= op.answered => {}
                Some(known) => *known = (op.answered, mask, tag, Some(at)),
                None => best.push((op.answered, mask, tag, Some(at))),
            }
        }
        for ((mask, invoked), used) in self.may.iter().zip(&state.used) {
            let free = invoked.get(usize::from(*used)).is_some_and(|invoked| *invoked <= deadline);
            let known = best.iter().any(|(_, m, t, _)| (*m, *t) == (*mask, 0));
            let changes = sectors_of(*mask).any(|i| state.content[i] != 0);
            if free && !known && changes && !self.is_dead(state, *mask, 0) {
                best.push((NEVER, *mask, 0, None));
            }
        }
        best.retain(|(_, mask, tag, _)| self.may_overwrite(state, *mask, *tag));
        best.sort_unstable_by(|a, b| b.cmp(a));
        let apply_to = |(_, mask, tag, at): &(u64, u8, Tag, Option<usize>)| {
            let mut next = state.clone();
            match at {
                Some(at) => next.place(*at),
                None => {
                    let is_it = |(m, _): &(u8, Vec<u64>)| m == mask;
                    let which = self.may.iter().position(is_it).expect("found there");
                    next.used[which] += 1;
                }
            }
            apply(&mut next.content, *mask, *tag);
            next
        };
        best.iter().map(apply_to).collect()
    }
}

/// Returns true if one of these operations (in order of invocation) is not in order yet.
fn any_left(state: &State, ops: &[usize]) -> bool {
    ops.iter().rev().take_while(|op| **op / 64 >= state.word).any(|op| !state.has(*op))
}

/// Checks one block's history that began with `initial`.
///
/// A history that is wrong has to be searched whole, which can be too much where many writes of
/// parts of the block overlap. Then each sector is looked at alone: what no order explains for one
/// of them, none explains for the block.
pub fn check(initial: Tags, ops: &[BlockOp]) -> Verdict {
    let whole = search(initial, ops);
    if whole != Verdict::Undecided {
        return whole;
    }
    for sector in 0..SECTORS {
        let bit = 1u8 << sector;
        let (mut indices, mut of_it) = (Vec::new(), Vec::new());
        for (index, op) in ops.iter().enumerate() {
            let act = match op.act {
                Act::Write { mask, tag } if mask & bit != 0 => Act::Write { mask: bit, tag },
                Act::Read { mask, tags } if mask & bit != 0 => Act::Read { mask: bit, tags },
                _ => continue,
            };
            indices.push(index);
            of_it.push(BlockOp { act, ..*op });
        }
        if let Verdict::Violated { stuck } = search(initial, &of_it) {
            return Verdict::Violated { stuck: indices[stuck] };
        }
    }
    Verdict::Undecided
}

fn search(initial: Tags, ops: &[BlockOp]) -> Verdict {
    let search = Search::new(ops);
    let used = vec![0; search.may.len()];
    let begin = State { word: 0, placed: Vec::new(), used, content: initial };
    if let Some(stuck) = search.impossible(&begin) {
        return Verdict::Violated { stuck };
    }
    let mut stack = vec![begin];
    let mut seen: FixedMap<(usize, Vec<u64>, Tags), Vec<Vec<u16>>> = FixedMap::default();
    let (mut states, mut furthest, mut stuck) = (0, 0, 0);
    while let Some(mut state) = stack.pop() {
        let deadline = search.settle(&mut state);
        let count = state.count();
        if count == search.must.len() {
            return Verdict::Linearizable;
        }
        if count >= furthest {
            furthest = count;
            stuck = search.first_read_due(&state).unwrap_or(stuck);
        }
        let like_it = seen.entry((state.word, state.placed.clone(), state.content)).or_default();
        if like_it.iter().any(|used| used.iter().zip(&state.used).all(|(a, b)| a <= b)) {
            continue;
        }
        if states == STATES_MAX {
            return Verdict::Undecided;
        }
        states += 1;
        like_it.push(state.used.clone());
        // Pushed last is tried first.
        stack.extend(search.next(&state, deadline));
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

    /// A history that one volume could have given: each operation takes effect at one instant
    /// between its call and its answer. Calls overlap as many others as there are `clients`.
    struct Made {
        initial: Tags,
        ops: Vec<BlockOp>,
    }

    fn make(random: &mut Random, count: u32, clients: u64, zeroes: u64, masks: &[u8]) -> Made {
        let initial = [0; SECTORS].map(|_| if random.percent(50) { 0 } else { 1_000_000 });
        let mut content = initial;
        let mut ops = Vec::new();
        for op in 1..=count {
            let effect = u64::from(op) * 1000;
            let mask = *random.pick(masks);
            let act = if random.percent(40) {
                Act::Read { mask, tags: content }
            } else {
                let tag = if random.percent(zeroes) { 0 } else { op };
                // Some of those without an answer never take effect.
                let is_void = random.percent(5);
                if !is_void {
                    apply(&mut content, mask, tag);
                }
                let act = Act::Write { mask, tag };
                if is_void || random.percent(10) {
                    let invoked = effect - random.below(clients * 1000).min(effect - 1);
                    ops.push(BlockOp { op, invoked, answered: NEVER, act });
                    continue;
                }
                act
            };
            let invoked = effect - random.below(clients * 1000).min(effect - 1);
            ops.push(BlockOp { op, invoked, answered: effect + random.below(clients * 1000), act });
        }
        // Instants are of one total order.
        let mut instants: Vec<(u64, usize, bool)> = Vec::new();
        for (i, op) in ops.iter().enumerate() {
            instants.push((op.invoked, i, false));
            instants.push((op.answered, i, true));
        }
        instants.sort_unstable();
        for (order, (at, i, is_answer)) in instants.into_iter().enumerate() {
            match is_answer {
                true if at == NEVER => {}
                true => ops[i].answered = order as u64,
                false => ops[i].invoked = order as u64,
            }
        }
        Made { initial, ops }
    }

    /// Makes one read see something else at one sector; false if there is none.
    fn spoil(random: &mut Random, ops: &mut [BlockOp]) -> bool {
        let last = ops.len() as u64;
        let reads: Vec<usize> =
            (0..ops.len()).filter(|i| matches!(ops[*i].act, Act::Read { .. })).collect();
        let Some(which) = (!reads.is_empty()).then(|| *random.pick(&reads)) else { return false };
        if let Act::Read { mask, tags } = &mut ops[which].act {
            let sectors: Vec<usize> = sectors_of(*mask).collect();
            tags[*random.pick(&sectors)] = random.below(last + 1) as Tag;
        }
        true
    }

    #[test]
    fn the_search_agrees_with_the_definition_on_histories_of_parts_of_blocks() {
        let (mut good, mut bad) = (0, 0);
        for seed in 0..20_000 {
            let mut random = Random::new(seed);
            let count = random.between(2, 8) as u32;
            let clients = random.between(1, 5);
            let mut made = make(&mut random, count, clients, 40, &[0xff, 0x01, 0x03, 0x06, 0xf0]);
            let spoilt = random.percent(60) && spoil(&mut random, &mut made.ops);
            let expected = by_definition(made.initial, &made.ops, 0);
            assert!(expected || spoilt, "seed {seed} was made wrong");
            let found = check(made.initial, &made.ops);
            let ops = &made.ops;
            assert_eq!(found == Verdict::Linearizable, expected, "seed {seed}: {ops:#?}");
            if expected { good += 1 } else { bad += 1 }
        }
        assert!(good > 2_000 && bad > 2_000, "both kinds are met: {good} good, {bad} bad");
    }

    #[test]
    fn a_block_that_everybody_writes_trims_and_reads_at_once_is_decided() {
        let mut bad = 0;
        for seed in 0..60 {
            let mut random = Random::new(seed);
            let masks: &[u8] =
                if seed % 2 == 0 { &[0xff] } else { &[0xff, 0xff, 0x0f, 0x01, 0x80] };
            let mut made = make(&mut random, 600, 24, 50, masks);
            let found = check(made.initial, &made.ops);
            assert_eq!(found, Verdict::Linearizable, "seed {seed}");
            assert!(spoil(&mut random, &mut made.ops));
            let found = check(made.initial, &made.ops);
            assert_ne!(found, Verdict::Undecided, "seed {seed}, with a read spoilt");
            bad += u32::from(found != Verdict::Linearizable);
        }
        assert!(bad > 20, "a read that is spoilt is mostly found: {bad} of 60");
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
