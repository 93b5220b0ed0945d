//! Order of an increment's messages, of which one may wait for the disk.
//!
//! Messages of an increment that follow one that waits are kept behind it and handled after it.

use std::collections::VecDeque;

use super::copying::Way;
use super::session::Fault;
use super::store::FetchTicket;
use quoin_types::message::ToReplica;

/// Limit of messages that wait: a target has at most four feeds under way, and cuts and a commit
/// behind them.
const MESSAGES_MAX: usize = 12;

#[derive(Default)]
pub(super) struct IncrementQueue {
    messages: VecDeque<(Way, ToReplica)>,
    /// Ticket that the first of them waits for, if it waits for the disk, and how often it had to.
    waits_for: Option<FetchTicket>,
    fetches: u8,
}

impl IncrementQueue {
    /// Returns true if a message has to wait behind another one, whichever connection it came by: so
    /// no more than the limit ever wait.
    pub fn holds(&self) -> bool {
        self.waits_for.is_some()
    }

    /// Number of messages that wait.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Keeps a message behind those that wait.
    pub fn push(&mut self, way: Way, message: ToReplica) -> Result<(), Fault> {
        if self.messages.len() >= MESSAGES_MAX {
            return Err(Fault::Protocol("too many messages of an increment that wait"));
        }
        self.messages.push_back((way, message));
        Ok(())
    }

    /// Keeps the message whose turn it is until the disk has given what it lacks.
    pub fn wait(&mut self, ticket: FetchTicket, fetches: u8, way: Way, message: ToReplica) {
        self.messages.push_front((way, message));
        (self.waits_for, self.fetches) = (Some(ticket), fetches);
    }

    /// Takes the message that waits for this, and how often it has waited.
    pub fn fetched(&mut self, ticket: FetchTicket) -> Option<(Way, ToReplica, u8)> {
        self.waits_for.take_if(|waits_for| *waits_for == ticket)?;
        let (way, message) = self.messages.pop_front()?;
        Some((way, message, self.fetches))
    }

    /// Takes the next message, unless it waits for the disk.
    pub fn next(&mut self) -> Option<(Way, ToReplica)> {
        if self.waits_for.is_some() {
            return None;
        }
        self.messages.pop_front()
    }

    /// Forgets all that waits.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
