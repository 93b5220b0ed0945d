//! A readable line for each thing that happens, and a fingerprint of the whole run.

use crate::schedule::Instant;

pub struct Trace {
    print: bool,
    keep: bool,
    lines: Vec<(Instant, String)>,
    fingerprint: u64,
}

impl Trace {
    pub fn new(print: bool, keep: bool) -> Self {
        Self { print, keep, lines: Vec::new(), fingerprint: 0 }
    }

    pub fn is_on(&self) -> bool {
        self.print || self.keep
    }

    /// What was kept.
    pub fn lines(&self) -> &[(Instant, String)] {
        &self.lines
    }

    pub fn line(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if !self.is_on() {
            return;
        }
        let text = text();
        if self.print {
            println!("{:>13.6} {text}", now as f64 / 1e9);
        }
        if self.keep {
            self.lines.push((now, text));
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
