//! Which messages count: those of the present life of the other brain, each newer than the last one.
//!
//! A life of a brain has a number that was drawn at random. A message of an unknown life may be a late one of
//! a former life, so it is answered with a challenge, and a life is believed once it answered that: then its
//! message was written after the challenge.

use quoin_types::mutant;

/// Beginning of each message.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Header {
    pub life: u64,
    pub number: u64,
    /// 0: none.
    pub challenge: u64,
    /// Answer to the last challenge that was received.
    pub answer: u64,
}

/// Knowledge of the life of the other brain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Session {
    life: u64,
    sent: u64,
    theirs: Option<u64>,
    received: u64,
    challenge: u64,
    to_answer: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// The message counts.
    Counts,
    /// It may be late: say so, with a challenge.
    Challenged,
    Late,
}

impl Session {
    /// `life` is drawn at random, and not 0.
    pub fn new(life: u64) -> Self {
        Self { life, sent: 0, theirs: None, received: 0, challenge: 0, to_answer: 0 }
    }

    /// Returns true once the other brain answered in this life of ours.
    pub fn is_open(&self) -> bool {
        self.theirs.is_some()
    }

    pub fn send(&mut self) -> Header {
        self.sent += 1;
        let Self { life, sent, challenge, to_answer, .. } = *self;
        Header { life, number: sent, challenge, answer: to_answer }
    }

    /// `draw` is a random number, of which a challenge is made if there is none.
    pub fn receive(&mut self, header: Header, draw: u64) -> Received {
        if header.challenge != 0 {
            self.to_answer = header.challenge;
        }
        if self.theirs == Some(header.life) {
            if header.number <= self.received {
                return Received::Late;
            }
            self.received = header.number;
            return Received::Counts;
        }
        let answered = self.challenge != 0 && header.answer == self.challenge;
        if answered || mutant::is("late-word-of-a-former-life-believed") {
            self.theirs = Some(header.life);
            self.received = header.number;
            self.challenge = 0;
            return Received::Counts;
        }
        if self.challenge == 0 {
            self.challenge = draw.max(1);
        }
        Received::Challenged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::break_a_rule;

    /// Exchanges messages until both have opened.
    fn meet(a: &mut Session, b: &mut Session) {
        for draw in 10..16 {
            let header = a.send();
            b.receive(header, draw);
            let header = b.send();
            a.receive(header, draw + 100);
        }
        assert!(a.is_open() && b.is_open());
    }

    #[test]
    fn two_new_lives_find_each_other_and_count_each_message_once() {
        let (mut a, mut b) = (Session::new(1), Session::new(2));
        meet(&mut a, &mut b);
        let (first, second) = (a.send(), a.send());
        assert_eq!(b.receive(second, 7), Received::Counts);
        assert_eq!(b.receive(second, 7), Received::Late);
        assert_eq!(b.receive(first, 7), Received::Late);
    }

    #[test]
    fn a_late_message_of_a_former_life_never_counts() {
        break_a_rule();
        let (mut a, mut b) = (Session::new(1), Session::new(2));
        meet(&mut a, &mut b);
        let late = a.send();
        let mut a = Session::new(3);
        meet(&mut a, &mut b);
        assert_eq!(b.receive(late, 8), Received::Challenged);
        // Nor after a new life of the one that receives it.
        let mut b = Session::new(4);
        assert_eq!(b.receive(late, 8), Received::Challenged);
        meet(&mut a, &mut b);
        assert_eq!(b.receive(late, 9), Received::Challenged);
    }
}
