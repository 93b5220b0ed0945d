//! The control plane: its record, old copies of it, and the way there and back.

use std::collections::BTreeSet;

use quoin_replication::primary::{LiveOptions, PrimaryEvent};
use quoin_types::{Membership, Term};

use super::checkers::Observation;
use super::fences::Fences;
use super::terms::Terms;
use super::{Event, World};
use crate::control::{Answer, Question, Record};
use crate::schedule::{MILLISECOND, SECOND};

pub(crate) struct Control {
    pub record: Record,
    pub host: usize,
    /// Questions and answers are lost, or late.
    pub lossy: bool,
    pub late: bool,
    /// The newest record, while an old one is in its place.
    pub backup: Option<Record>,
    /// An old copy of the record.
    pub old_record: Option<Record>,
    /// An old copy has ruled for a while.
    pub rolled_back: bool,
    /// Questions that were asked so far.
    pub questions: u64,
    /// Questions whose drivers still wait.
    pub unanswered: BTreeSet<u64>,
    pub fences: Fences,
    pub terms: Terms,
}

impl Control {
    pub fn new(record: Record, host: usize, fences: Fences, terms: Terms) -> Self {
        Self {
            record,
            host,
            lossy: false,
            late: false,
            backup: None,
            old_record: None,
            rolled_back: false,
            questions: 0,
            unanswered: BTreeSet::new(),
            fences,
            terms,
        }
    }

    /// Event that tells a target the desired membership.
    pub fn desired(&self) -> PrimaryEvent {
        PrimaryEvent::Desired(self.record.desired.clone())
    }

    /// Changes the options in all copies of the record.
    pub fn set_options(&mut self, options: LiveOptions) {
        let copies = [self.backup.as_mut(), self.old_record.as_mut()].into_iter().flatten();
        for record in copies.chain([&mut self.record]) {
            record.options = Some(options);
        }
    }

    /// Succeeds if what is desired is what is.
    pub fn desired_reached(&self) -> Result<(), String> {
        let (desired, membership) = (&self.record.desired, &self.record.membership);
        if let Some(newcomer) = desired.newcomers.first() {
            return Err(format!("{:?} is not known yet", newcomer.member));
        }
        if let Some(member) = desired.leaving.first() {
            return Err(format!("{member:?} has not left yet"));
        }
        let (rf, cf) = (membership.rf, membership.cf);
        if desired.drf != rf || (desired.cf != 0 && desired.cf_of(rf) != cf) {
            return Err(format!("RF {rf} CF {cf} is not {desired:?}"));
        }
        Ok(())
    }

    /// The term in which the controller, or the former one, grants.
    pub fn term_of(&self, is_former: bool) -> Term {
        if is_former { self.terms.former_term() } else { self.record.term }
    }
}

impl World {
    /// A target asks; it receives the answer, or that there was none in time, or both.
    pub(crate) fn ask(&mut self, target: usize, question: Question) {
        let life = self.targets[target].life;
        let here = self.targets[target].host;
        let timeout = self.random.between(1, 3) * SECOND;
        let question = Box::new(question);
        self.repeat_last_swap(target, &question);
        self.control.questions += 1;
        let number = self.control.questions;
        self.control.unanswered.insert(number);
        let there = self.control.host;
        let blocked = self.network.is_blocked(here, there);
        let lost = self.control.lossy && self.random.percent(40);
        // The former controller is on the target's own host.
        let former = self.control.terms.asks_former(target);
        if former || (!blocked && !lost) {
            let mut delay = self.network.delay();
            if self.control.late && self.random.percent(60) {
                delay += self.random.between(100, 6000) * MILLISECOND;
            }
            self.schedule
                .after(delay, Event::Asked { target, life, number, question: question.clone() });
        }
        self.schedule.after(timeout, Event::AnswerTimeout { target, life, number, question });
    }

    /// The compare-and-swap happens, whether or not anyone still waits for it.
    pub(crate) fn asked(&mut self, target: usize, life: u32, number: u64, question: &Question) {
        if self.control.terms.asks_former(target) {
            let Some(answer) = self.asked_of_former(target, question) else { return };
            let (delay, answer) = (self.network.delay(), Box::new(answer));
            self.schedule.after(delay, Event::Answered { target, life, number, answer });
            return;
        }
        // It may ask again.
        if matches!(question, Question::Acquire { .. }) && self.control.fences.refuses(target) {
            let refused = || format!("target {target} is fenced, and is granted nothing");
            return self.trace.line(self.schedule.now(), refused);
        }
        let before = self.control.record.epoch;
        // An old copy of the record is not changed.
        if self.control.backup.is_some() && matches!(question, Question::Swap { .. }) {
            return;
        }
        let record_before = (self.setup.haste > 1).then(|| self.control.record.clone());
        let before_list = self.control.record.membership.clone();
        let leaving = self.control.record.desired.leaving.clone();
        let result = self.control.record.execute(target, question);
        let (before_list, leaving) = (&before_list, &leaving[..]);
        self.observe(&Observation::RecordExecuted { before: before_list, leaving });
        if self.control.record.epoch != before {
            self.stats.opens.epochs += 1;
        }
        let older = self.control.old_record.as_ref().is_some_and(|old| {
            self.setup.haste > 1 && old.membership.version < self.control.record.membership.version
        });
        if self.control.backup.is_none() && !older && self.random.percent(25) {
            self.control.old_record = Some(self.control.record.clone());
        }
        if let Some(record) = record_before
            && self.control.backup.is_none()
            && record.membership.version < self.control.record.membership.version
        {
            // The backup is older than a change of membership.
            self.control.old_record = Some(record);
        }
        let answer = match result {
            Ok(Some(answer)) => answer,
            Ok(None) => return,
            Err(rule) => return self.violate("Membership", rule),
        };
        if let Answer::Granted { incarnation, epoch, .. } = &answer {
            self.note_grant(false, *incarnation, *epoch);
            self.fence_former(target);
        }
        if self.setup.mutant == Some(super::Mutant::EpochGrantedTwice) && self.random.percent(50) {
            self.control.record.edit(|volume| volume.opened.epoch = before.0);
        }
        self.trace.line(self.schedule.now(), || format!("control plane answers {answer:?}"));
        let blocked = self.network.is_blocked(self.control.host, self.targets[target].host);
        let lost = self.control.lossy && self.random.percent(40);
        if blocked || lost {
            return;
        }
        let mut delay = self.network.delay();
        if self.control.late && self.random.percent(60) {
            delay += self.random.between(100, 6000) * MILLISECOND;
        }
        let answer = Box::new(answer);
        self.schedule.after(delay, Event::Answered { target, life, number, answer });
    }

    pub(crate) fn answered(&mut self, target: usize, life: u32, number: u64, answer: Answer) {
        if self.targets[target].life != life {
            return;
        }
        if self.targets[target].paused {
            let answer = Box::new(answer);
            self.schedule.after(20 * MILLISECOND, Event::Answered { target, life, number, answer });
            return;
        }
        let in_time = self.control.unanswered.remove(&number);
        // A driver that has reported a swap as unknown does not take it back.
        if !in_time && matches!(answer, Answer::Swapped { .. }) {
            return;
        }
        if let Some(process) = &mut self.targets[target].process {
            match &answer {
                // A grant that comes late answers a question that was given up.
                Answer::Granted { incarnation, membership, .. }
                    if *incarnation == process.grant.incarnation =>
                {
                    process.grant.version = membership.version;
                    process.grant.membership = membership.clone();
                    self.observe(&Observation::Granted { target, membership });
                }
                // A refusal settles nothing: older requests may still land.
                Answer::Swapped { version, membership } if membership.version > *version => {
                    process.grant.version = membership.version;
                }
                Answer::Swapped { .. } => {}
                Answer::Granted { .. } | Answer::NotOwner { .. } => {}
            }
        }
        if let Answer::Swapped { version, membership } = &answer {
            let (version, record) = (*version, membership);
            self.observe(&Observation::SwapAnswered { target, version, record });
            if let Some(process) = &mut self.targets[target].process {
                process.grant.swapped = Some((version, membership.clone()));
            }
        }
        // A grant comes with the options of the record that granted it; the driver takes them from
        // the answer to the newest question.
        let asked = self.targets[target].process.as_ref().map(|p| p.grant.incarnation);
        let options = match &answer {
            Answer::Granted { incarnation, options, .. } if asked == Some(*incarnation) => *options,
            _ => None,
        };
        let options = options.map(PrimaryEvent::Options);
        let event = match answer {
            Answer::Granted { incarnation, epoch, membership, .. } => {
                PrimaryEvent::Granted { incarnation, epoch, membership }
            }
            Answer::NotOwner { incarnation } => PrimaryEvent::NotOwner { incarnation },
            Answer::Swapped { version, membership } => {
                PrimaryEvent::Swapped { version, membership: Some(membership) }
            }
        };
        self.feed_target(target, options.into_iter().chain([event]).collect());
    }

    /// A driver asks each swap in a task of its own: the answer to the one before comes once more
    /// while the next is under way, as that of a request which was sent twice does.
    fn repeat_last_swap(&mut self, target: usize, question: &Question) {
        let Question::Swap { version: next, .. } = question else { return };
        let life = self.targets[target].life;
        let Some(process) = &mut self.targets[target].process else { return };
        let Some((version, membership)) = process.grant.swapped.take_if(|(v, _)| *v < *next) else {
            return;
        };
        // Without a chance of its own, so that the run stays what it was.
        let answer = Box::new(Answer::Swapped { version, membership });
        self.schedule.after(1, Event::SwappedAgain { target, life, answer });
    }

    pub(crate) fn swapped_again(&mut self, target: usize, life: u32, answer: Answer) {
        let there = &self.targets[target];
        if there.life != life || there.paused {
            return;
        }
        if let Answer::Swapped { version, membership } = answer {
            let event = PrimaryEvent::Swapped { version, membership: Some(membership) };
            self.feed_target(target, vec![event]);
        }
    }

    /// IO starts under what an old copy of the record said. No replica that answered knew of anything
    /// newer (`Assertions::check_record`), so what was swapped after the copy was made, and is only in the
    /// newest record, never ruled: the target that asked for it died before it could report it. The
    /// two are a fork, and only one of them can go on: the person who puts the newest record back
    /// adds the membership that has ruled, and desires again what was swapped.
    pub(crate) fn merge_fork(&mut self, target: usize) {
        let Some(process) = &self.targets[target].process else { return };
        let ruling = process.grant.membership.clone();
        let newest = self.control.backup.as_mut().unwrap_or(&mut self.control.record);
        if !self.control.rolled_back || ruling.version >= newest.membership.version {
            return;
        }
        // A newcomer was taken back: the same list under a newer version, which no target swapped.
        let Membership { version, drf, .. } = newest.membership;
        if (Membership { version, drf, ..ruling.clone() }) == newest.membership {
            return;
        }
        let swapped = newest.membership.clone();
        newest.set_membership(&ruling);
        let stays = |id| swapped.known.iter().any(|member| member.id == id);
        newest.edit(|volume| {
            let known = volume.membership.known.clone();
            let is_known = |id| known.iter().any(|member| member.id == id);
            let replicas = volume.replicas.iter_mut();
            let leaving = replicas.filter(|replica| is_known(replica.id) && !stays(replica.id.0));
            leaving.for_each(|replica| replica.leaving = true);
        });
        let why = || format!("what was swapped is desired again: {:?}", newest.desired);
        self.trace.line(self.schedule.now(), why);
        self.keep_sending_desired();
    }

    /// The driver gives up waiting; a target that has had its answer knows nothing to do.
    pub(crate) fn answer_timeout(
        &mut self,
        target: usize,
        life: u32,
        number: u64,
        question: &Question,
    ) {
        if self.targets[target].life != life || !self.control.unanswered.contains(&number) {
            return;
        }
        if self.targets[target].paused {
            let question = Box::new(question.clone());
            self.schedule
                .after(20 * MILLISECOND, Event::AnswerTimeout { target, life, number, question });
            return;
        }
        self.control.unanswered.remove(&number);
        let event = match question {
            Question::Acquire { incarnation, .. } => {
                PrimaryEvent::GrantFailed { incarnation: *incarnation }
            }
            Question::Swap { version, .. } => {
                PrimaryEvent::Swapped { version: *version, membership: None }
            }
        };
        self.feed_target(target, vec![event]);
    }
}
