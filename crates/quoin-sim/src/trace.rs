//! A readable line for each thing that happens, and a fingerprint of the whole run.

use crate::schedule::Instant;

pub struct Trace {
    print: bool,
    fingerprint: u64,
}

impl Trace {
    pub fn new(print: bool) -> Self {
        Self { print, fingerprint: 0 }
    }

    pub fn is_on(&self) -> bool {
        self.print
    }

    pub fn line(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if self.print {
            println!("{:>13.6} {}", now as f64 / 1e9, text());
        }
    }

    /// Adds to the fingerprint: equal for equal runs.
    pub fn mix(&mut self, a: u64, b: u64) {
        let mixed = self.fingerprint.rotate_left(5) ^ a ^ b.rotate_left(32);
        self.fingerprint = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}
