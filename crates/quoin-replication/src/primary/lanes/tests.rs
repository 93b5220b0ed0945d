//! Lanes checked against a plain model: the view as a map, sources that answer in any order and
//! fail.

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use quoin_types::ids::{Lsn, ReplicaGuid, ReplicaId};

fn member(number: u128) -> Member {
    Member { id: ReplicaId(number), guid: ReplicaGuid(number) }
}

/// Size of the largest volume here.
const BLOCKS: u64 = 200_000;

/// Content of the view by block: the version, and whether it is data.
type View = BTreeMap<u64, (u64, bool)>;

fn slot(lba: u64, blocks: u32, version: u64, is_data: bool) -> Slot {
    let content = match is_data {
        true => Content::Data { crc: 0, data: Bytes::from_static(&[0; BLOCK_SIZE]) },
        false => Content::Hole,
    };
    Slot { lba, blocks, version: Lsn(version), content }
}

/// Answer of a store: slots of at most so many blocks, holes of one version together.
fn pulled(view: &View, from: u64, blocks_max: usize) -> Chunk {
    let mut slots: Vec<Slot> = Vec::new();
    for (taken, (lba, (version, is_data))) in view.range(from..).enumerate() {
        if taken == blocks_max {
            return Chunk { slots, cursor: Some(*lba) };
        }
        match slots.last_mut() {
            Some(last)
                if !is_data
                    && last.content == Content::Hole
                    && last.version.0 == *version
                    && last.lba + u64::from(last.blocks) == *lba =>
            {
                last.blocks += 1;
            }
            _ => slots.push(slot(*lba, 1, *version, *is_data)),
        }
    }
    Chunk { slots, cursor: None }
}

#[derive(Clone, Debug)]
enum Step {
    /// Asks with this many sources, beginning with that one.
    Ask(usize, usize),
    /// Answers the open request of this index with so many blocks.
    Answer(usize, usize),
    Refuse(usize),
    Lose(usize),
    Take,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1..5usize, 0..5usize).prop_map(|(count, first)| Step::Ask(count, first)),
        6 => (0..5usize, 1..400usize).prop_map(|(which, blocks)| Step::Answer(which, blocks)),
        1 => (0..5usize).prop_map(Step::Refuse),
        1 => (0..5usize).prop_map(Step::Lose),
        4 => Just(Step::Take),
    ];
    proptest::collection::vec(step, 0..200)
}

fn views() -> impl Strategy<Value = View> {
    let run = (0..3000u64, 1..600u64, 1..9u64, any::<bool>());
    proptest::collection::vec(run, 0..6).prop_map(|runs| {
        let mut view = View::new();
        for (first, blocks, version, is_data) in runs {
            view.extend((first..first + blocks).map(|lba| (lba, (version, is_data))));
        }
        view
    })
}

/// Lanes, the open requests, and what was taken.
struct Copy {
    view: View,
    lanes: Lanes,
    open: Vec<(RequestId, Member, u64)>,
    next_id: RequestId,
    taken: View,
    ended: bool,
}

impl Copy {
    fn of(view: View, from: u64) -> Self {
        let (open, taken) = (Vec::new(), View::new());
        Self { view, lanes: Lanes::from(from, BLOCKS), open, next_id: 0, taken, ended: false }
    }

    fn ask(&mut self, sources: &[Member]) -> bool {
        self.next_id += 1;
        let Some((source, cursor)) = self.lanes.ask(self.next_id, sources) else { return false };
        assert!(sources.contains(&source));
        // A request that was dropped with its lane has no owner any more.
        self.open.retain(|(id, ..)| self.lanes.has_asked(*id));
        assert!(self.open.iter().all(|(_, busy, _)| *busy != source), "one question a source");
        self.open.push((self.next_id, source, cursor));
        true
    }

    fn answer(&mut self, which: usize, blocks: usize) {
        let (id, _, cursor) = self.open.remove(which);
        if self.lanes.has_asked(id) {
            assert!(self.lanes.answered(id, pulled(&self.view, cursor, blocks)));
        }
    }

    fn take(&mut self) -> bool {
        let before = self.lanes.cursor();
        let Some(chunk) = self.lanes.take() else { return false };
        assert!(!self.ended, "nothing follows the end");
        let upto = chunk.cursor.unwrap_or(u64::MAX);
        assert!(upto > before && self.lanes.cursor() == upto);
        for slot in chunk.slots {
            for lba in slot.lba..slot.lba + u64::from(slot.blocks) {
                assert!((before..upto).contains(&lba), "{lba} is not in {before}..{upto}");
                let is_data = slot.content != Content::Hole;
                assert_eq!(self.taken.insert(lba, (slot.version.0, is_data)), None, "twice");
            }
        }
        self.ended = chunk.cursor.is_none();
        true
    }

    fn check(&self) {
        for lane in self.lanes.lanes.iter().skip(1) {
            assert!(
                lane.waiting_bytes < WAITING_BYTES_MAX + 400 * (BLOCK_SIZE + size_of::<Slot>())
            );
        }
        assert!(self.lanes.lanes.len() <= LANES_MAX);
    }
}

proptest! {
    #[test]
    fn a_copy_is_the_view_in_order_with_each_block_once(
        view in views(),
        from in 0..1000u64,
        steps in steps(),
        blocks in 1..300usize,
    ) {
        let expected: View = view.range(from..).map(|(lba, slot)| (*lba, *slot)).collect();
        let mut copy = Copy::of(view, from);
        for step in steps {
            match step {
                Step::Ask(count, first) => {
                    let sources: Vec<Member> =
                        (0..count).map(|n| member(((first + n) % 5) as u128)).collect();
                    copy.ask(&sources);
                }
                Step::Answer(which, blocks) if which < copy.open.len() => copy.answer(which, blocks),
                Step::Refuse(which) if which < copy.open.len() => {
                    let (id, ..) = copy.open.remove(which);
                    copy.lanes.refused(id);
                }
                Step::Lose(which) if which < copy.open.len() => {
                    let (_, source, _) = copy.open.remove(which);
                    copy.lanes.lost(source);
                }
                Step::Take => {
                    copy.take();
                }
                _ => {}
            }
            copy.check();
        }
        // After any sequence, the copy reaches its end with the sources that remain.
        copy.lanes.forgive();
        while !copy.ended {
            while copy.ask(&[member(1), member(2)]) {}
            if !copy.open.is_empty() {
                copy.answer(0, blocks);
            }
            while copy.take() {}
        }
        prop_assert_eq!(copy.taken, expected);
    }
}

#[test]
fn two_sources_each_copy_about_half() {
    let view: View = (0..4096).map(|lba| (lba, (1, true))).collect();
    let mut copy = Copy::of(view, 0);
    let mut answered = BTreeMap::<Member, usize>::new();
    while !copy.ended {
        while copy.ask(&[member(1), member(2)]) {}
        let (_, source, _) = copy.open[0];
        *answered.entry(source).or_default() += 1;
        copy.answer(0, 64);
        while copy.take() {}
    }
    let counts: Vec<usize> = answered.values().copied().collect();
    assert!(counts.len() == 2 && counts[0].abs_diff(counts[1]) <= 4, "{counts:?}");
    // Almost nothing was copied twice.
    assert!(counts.iter().sum::<usize>() <= 4096 / 64 + 4, "{counts:?}");
}

#[test]
fn a_source_that_does_not_answer_holds_up_no_more_than_the_room_of_the_others() {
    let view: View = (0..100_000).map(|lba| (lba, (1, true))).collect();
    let mut copy = Copy::of(view, 0);
    assert!(copy.ask(&[member(1)]), "never answered");
    while copy.ask(&[member(1), member(2)]) {
        copy.answer(1, 64);
    }
    assert!(!copy.take());
    let waiting: usize = copy.lanes.lanes.iter().map(|lane| lane.waiting_bytes).sum();
    let most = (LANES_MAX - 1) * (WAITING_BYTES_MAX + 64 * (BLOCK_SIZE + size_of::<Slot>()));
    assert!((1..=most).contains(&waiting), "{waiting}");
    copy.lanes.lost(member(1));
    copy.open.clear();
    assert!(copy.ask(&[member(2)]) && copy.open[0].2 == 0, "another goes on where it stood");
}

#[test]
fn a_chunk_that_does_not_match_its_request_is_refused_and_another_source_is_asked() {
    let data = |lba| slot(lba, 1, 1, true);
    let wrong = [
        Chunk { slots: vec![data(9)], cursor: Some(20) },
        Chunk { slots: vec![data(12), data(11)], cursor: Some(20) },
        Chunk { slots: vec![slot(10, 20, 1, false), data(15)], cursor: None },
        Chunk { slots: vec![data(25)], cursor: Some(20) },
        Chunk { slots: Vec::new(), cursor: Some(10) },
    ];
    for chunk in wrong {
        let mut lanes = Lanes::from(10, BLOCKS);
        assert_eq!(lanes.ask(1, &[member(1), member(2)]), Some((member(1), 10)));
        assert!(!lanes.answered(1, chunk));
        assert_eq!(lanes.ask(2, &[member(1), member(2)]), Some((member(2), 10)));
        assert!(lanes.take().is_none());
    }
}

#[test]
fn a_lone_lane_takes_all_that_a_sparse_view_answers_beyond_its_stretch() {
    let (mut lanes, source) = (Lanes::from(0, BLOCKS), member(1));
    assert_eq!(lanes.ask(1, &[source]), Some((source, 0)));
    let far = 40 * STRETCH_BLOCKS_MIN;
    let slots = vec![slot(5, 1, 3, true), slot(far, 1, 3, true)];
    assert!(lanes.answered(1, Chunk { slots: slots.clone(), cursor: Some(far + 1) }));
    let chunk = lanes.take().expect("it is the first one");
    assert!(chunk.slots == slots && lanes.cursor() == far + 1);
    assert_eq!(lanes.ask(2, &[source]), Some((source, far + 1)));
}
