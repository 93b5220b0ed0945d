//! Options that change while the volume is served.
//!
//! An option rules from its event on, except for durability, which stands in the history: the
//! replicas follow the newest View that they hold. So a change of durability appends a View.
//! Nothing is acknowledged at commit while the configuration, or any View that is not over, has
//! `media`: a change to `media` rules at once, and a change to `cache` once its View alone is
//! active. What was acknowledged or read at commit before a change to `media` may not be stable
//! yet; it is owed all the same, until it is.
//!
//! Options carry the version of the record that they are from, in which the controller's term is the
//! upper part ([`quoin_types::Term::version_of`]). A grant comes with the options of the record that
//! granted it, so that no epoch opens with older ones. The newest version stays, whichever way it came
//! and in whichever order: a grant that is under way longer than a change does not bring older options
//! back, and restored records, which begin a term, are never older.
//!
//! Options are in force once no target can answer by others. So a target says it of those by which it
//! serves: while it opens, the one before it may still answer.

use super::{OnFull, OnQuorumLoss, Phase, Primary, PrimaryConfig, ReadMode};
use quoin_types::ids::Lsn;
use quoin_types::membership::Durability;
use quoin_types::mutant;

/// Options that may change while a target serves the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveOptions {
    /// Version of the record that has them.
    pub version: u64,
    pub durability: Durability,
    pub on_quorum_loss: OnQuorumLoss,
    pub on_full: OnFull,
    pub reads: ReadMode,
}

impl LiveOptions {
    /// Options of a configuration.
    pub fn of(config: &PrimaryConfig, version: u64) -> Self {
        let PrimaryConfig { durability, on_quorum_loss, on_full, reads, .. } = *config;
        Self { version, durability, on_quorum_loss, on_full, reads }
    }
}

/// The version of the options, and what an earlier durability left behind.
#[derive(Default)]
pub(super) struct Options {
    pub version: u64,
    /// Version that was in force when the newest one arrived.
    before: u64,
    /// Entries up to here may have been acknowledged or read at commit, under `cache`.
    pub shown: Lsn,
}

impl Primary {
    /// Takes options over, unless newer ones are known.
    pub(super) fn change_options(&mut self, options: &LiveOptions) {
        if options.version < self.options.version && !mutant::is("older-options-come-back") {
            return;
        }
        self.options.before = self.ruling_options();
        self.options.version = options.version;
        self.config.on_quorum_loss = options.on_quorum_loss;
        self.config.on_full = options.on_full;
        self.config.reads = options.reads;
        if self.config.durability == options.durability
            || mutant::is("cache-to-media-acknowledged-at-commit")
        {
            return;
        }
        let was_media = self.is_media();
        self.config.durability = options.durability;
        if !was_media {
            self.options.shown = self.commit.lsn;
            self.requests.commit_to_stable();
        }
        if self.is_running() {
            // The entries sent before carry no request for a sync of its own, or none that the
            // answers that wait could count on.
            self.commit.want_sync(self.history.last.lsn);
        }
    }

    /// Appends a View where the newest one has another durability.
    pub(super) fn step_options(&mut self) {
        let Some(newest) = self.commit.views.newest() else { return };
        if newest.durability != self.config.durability {
            let in_sync = newest.in_sync.clone();
            self.append_view(in_sync, self.change.joint());
        }
    }

    /// Returns true if answers wait for stable.
    pub(super) fn is_media(&self) -> bool {
        let of_views = || self.commit.views.all().any(|v| v.durability == Durability::Media);
        self.config.durability == Durability::Media || of_views()
    }

    /// The highest LSN that may have been shown to a client.
    pub(super) fn shown(&self) -> Lsn {
        if !self.is_media() {
            return self.commit.lsn;
        }
        if mutant::is("shown-under-cache-not-owed") {
            return self.commit.stable;
        }
        self.commit.stable.max(self.options.shown.min(self.commit.lsn))
    }

    /// Version of the options that rule all IO of the volume; 0: of another target, if of any.
    pub(super) fn options_in_force(&self) -> u64 {
        match self.phase {
            Phase::Serving => self.ruling_options(),
            _ if mutant::is("options-in-force-while-opening") => self.ruling_options(),
            _ => 0,
        }
    }

    /// Version of the options that rule all IO of this target.
    fn ruling_options(&self) -> u64 {
        let durability = self.config.durability;
        let is_settled = self.commit.views.all().all(|view| view.durability == durability);
        if is_settled { self.options.version } else { self.options.before }
    }
}
