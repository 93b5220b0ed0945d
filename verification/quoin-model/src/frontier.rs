//! The states of one level that wait to be explored: packed, in memory as far as they may, and
//! beyond that in a file without a name, which goes with its last chunk.

use crate::state::State;
use std::borrow::Cow;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use zerocopy::{FromBytes, IntoBytes};

/// States, packed one behind the other.
#[derive(Default)]
pub(crate) struct Packed {
    bytes: Vec<u8>,
    pub states: usize,
}

impl Packed {
    /// A state is mostly zeroes: each eight bytes become a mask and those that are none.
    pub fn push(&mut self, state: &State) {
        for word in state.as_bytes().chunks(8) {
            let at = self.bytes.len();
            self.bytes.push(0);
            for (bit, byte) in word.iter().enumerate().filter(|(_, byte)| **byte != 0) {
                self.bytes[at] |= 1 << bit;
                self.bytes.push(*byte);
            }
        }
        self.states += 1;
    }
}

/// Where the chunks of one search are put.
pub(crate) struct Room {
    memory_bytes_max: usize,
    memory_bytes: AtomicUsize,
}

/// Part of a level that does not fit into memory.
#[derive(Clone)]
pub(crate) struct Spill {
    file: Arc<File>,
    end: Arc<AtomicUsize>,
}

/// Packed states, wherever they are.
pub(crate) struct Chunk<'a> {
    pub states: usize,
    place: Place,
    room: &'a Room,
}

enum Place {
    Memory(Vec<u8>),
    File { spill: Spill, at: usize, bytes: usize },
}

impl Spill {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { file: Arc::new(tempfile::tempfile()?), end: Arc::default() })
    }
}

impl Room {
    pub fn new(memory_bytes_max: usize) -> Self {
        Self { memory_bytes_max, memory_bytes: AtomicUsize::new(0) }
    }

    /// Stores a chunk. A chunk that cannot be written to the file stays in memory.
    pub fn put(&self, packed: Packed, spill: &Spill) -> Chunk<'_> {
        let Packed { mut bytes, states } = packed;
        let length = bytes.len();
        if self.memory_bytes.load(Ordering::Relaxed) + length > self.memory_bytes_max {
            let at = spill.end.fetch_add(length, Ordering::Relaxed);
            if spill.file.write_all_at(&bytes, at as u64).is_ok() {
                let place = Place::File { spill: spill.clone(), at, bytes: length };
                return Chunk { states, place, room: self };
            }
        }
        self.memory_bytes.fetch_add(length, Ordering::Relaxed);
        bytes.shrink_to_fit();
        Chunk { states, place: Place::Memory(bytes), room: self }
    }
}

impl Chunk<'_> {
    /// Its states, one after the other.
    pub fn states(&self) -> impl Iterator<Item = State> {
        let bytes = self.bytes();
        let mut at = 0;
        (0..self.states).map(move |_| unpack(&bytes, &mut at))
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.place {
            Place::Memory(bytes) => Cow::Borrowed(bytes),
            Place::File { spill, at, bytes } => {
                let mut buffer = vec![0; *bytes];
                spill.file.read_exact_at(&mut buffer, *at as u64).expect("it was written there");
                Cow::Owned(buffer)
            }
        }
    }
}

impl Drop for Chunk<'_> {
    fn drop(&mut self) {
        if let Place::Memory(bytes) = &self.place {
            self.room.memory_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
        }
    }
}

fn unpack(bytes: &[u8], at: &mut usize) -> State {
    let mut raw = [0u8; size_of::<State>()];
    for word in raw.chunks_mut(8) {
        let mask = bytes[*at];
        *at += 1;
        for (bit, byte) in word.iter_mut().enumerate() {
            if mask & (1 << bit) != 0 {
                *byte = bytes[*at];
                *at += 1;
            }
        }
    }
    State::read_from_bytes(&raw).expect("as long as a state")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_come_back_as_they_were_from_memory_and_from_the_file() {
        let states = [1, 0, 7, 255, 3].map(|voters| {
            let mut state = State::default();
            state.as_mut_bytes()[..9].copy_from_slice(&[voters, 0, 0, 4, 0, 0, 0, 0, voters]);
            state
        });
        let bytes = |state: &State| state.as_bytes().to_vec();
        for memory_bytes_max in [0, 1 << 20] {
            let room = Room::new(memory_bytes_max);
            let spill = Spill::new().unwrap();
            let chunks = [&states[..3], &states[3..]].map(|some| {
                let mut packed = Packed::default();
                some.iter().for_each(|state| packed.push(state));
                room.put(packed, &spill)
            });
            assert_eq!(room.memory_bytes.load(Ordering::Relaxed) > 0, memory_bytes_max > 0);
            let back = chunks.iter().flat_map(Chunk::states);
            assert!(back.map(|s| bytes(&s)).eq(states.iter().map(bytes)));
            drop(chunks);
            assert_eq!(room.memory_bytes.load(Ordering::Relaxed), 0);
        }
    }
}
