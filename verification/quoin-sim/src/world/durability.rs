//! Operators who change the volume's durability while everything else goes on.
//!
//! The records have the change at once, and targets that start or are granted an epoch receive it.
//! The owner's target is sent it until it reports it in force. From then on `media` is promised:
//! every write that is acknowledged is on the media of a quorum, and so is what a read shows. A
//! change to `cache` ends that promise as soon as it is in the records.

use quoin_replication::primary::LiveOptions;
use quoin_types::Durability;

use super::{Event, World};
use crate::random::Random;
use crate::schedule::{MILLISECOND, SECOND};
use crate::swarm::Swarm;

/// Of a hundred runs so many have operators who change the durability.
const RUNS_OF_HUNDRED: u64 = 20;
const TIMES_MAX: u64 = 6;
const SEND_AGAIN: u64 = 200 * MILLISECOND;

pub(crate) struct DurabilityChanges {
    random: Random,
    times_left: u64,
    /// Version of the record's options.
    version: u64,
    /// A change is on its way to the owner's target.
    sending: bool,
    /// Durability that is promised to clients.
    pub promised: Durability,
    /// Writes were, or will be, acknowledged under `media` in some part of the run.
    pub has_media: bool,
}

impl DurabilityChanges {
    /// By a chance of its own: the other runs stay what they were.
    pub fn draw(seed: u64, swarm: Swarm, durability: Durability) -> Self {
        let mut random = Random::new(seed ^ 0x6475_7261_626c);
        let may = matches!(
            swarm,
            Swarm::Broad | Swarm::PowerCuts | Swarm::Blackouts | Swarm::Churn | Swarm::Takeovers
        );
        let on = random.percent(RUNS_OF_HUNDRED) && may;
        let times_left = if on { random.between(1, TIMES_MAX) } else { 0 };
        let has_media = durability == Durability::Media || times_left > 0;
        Self { random, times_left, version: 0, sending: false, promised: durability, has_media }
    }

    pub fn settled(&self) -> Result<(), String> {
        match self.sending {
            true => Err(format!("options of version {} are not in force", self.version)),
            false => Ok(()),
        }
    }
}

impl World {
    pub(crate) fn plan_durability(&mut self) {
        let changes = &mut self.operators.durability;
        if changes.times_left > 0 {
            let delay = changes.random.between(500, 6000) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::ChangeDurability);
        }
    }

    /// The options that a target which starts opens with.
    pub(crate) fn recorded_options(&self) -> LiveOptions {
        let version = self.operators.durability.version.max(self.sharers.version());
        LiveOptions::of(&self.setup.config, version)
    }

    pub(crate) fn change_durability(&mut self) {
        if self.faults.over {
            return;
        }
        let next = match self.setup.config.durability {
            Durability::Cache => Durability::Media,
            Durability::Media => Durability::Cache,
        };
        self.setup.config.durability = next;
        let changes = &mut self.operators.durability;
        changes.times_left -= 1;
        changes.version += 1;
        let version = changes.version;
        let is_sent = std::mem::replace(&mut changes.sending, true);
        if next == Durability::Cache {
            changes.promised = next;
        }
        self.control.set_options(LiveOptions::of(&self.setup.config, version));
        self.trace.line(self.schedule.now(), || format!("durability is to be {next:?}"));
        self.stats.operators.durability_changes += 1;
        if !is_sent {
            self.send_options();
        }
        self.plan_durability();
    }

    /// Sends the options to the owner's target until it has them in force. They become an event there
    /// when they differ from what came last.
    pub(crate) fn send_options(&mut self) {
        let owner = self.control.record.owner;
        let (options, is_paused) = (self.recorded_options(), self.targets[owner].paused);
        if let Some(process) = self.targets[owner].process.as_mut().filter(|_| !is_paused) {
            let event = process.orders.change_options(options);
            self.feed_target(owner, event.into_iter().collect());
        }
        // As the controller does, it believes the owner's target of the newest epoch that was granted.
        let granted = self.control.record.epoch.max(self.checkers.durability.served_epoch());
        let status = self.targets[owner].process.as_ref().map(|p| p.target.status());
        let status = status.filter(|status| status.epoch == granted);
        if status.is_some_and(|status| status.options_version == options.version) {
            let durability = self.setup.config.durability;
            self.trace.line(self.schedule.now(), || format!("{durability:?} is in force"));
            self.operators.durability.promised = durability;
            self.operators.durability.sending = false;
        } else {
            let delay = if self.faults.over { SECOND } else { SEND_AGAIN };
            self.schedule.after(delay, Event::SendOptions);
        }
    }
}
