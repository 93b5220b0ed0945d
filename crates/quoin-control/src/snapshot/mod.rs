//! Snapshots of volumes: asked for by users and schedules, made and deleted by the volumes' targets.
//!
//! The record of a snapshot says what is wanted. [`commands`] tells it to the target of the volume by
//! a stream of small commands and takes the outcomes in; a command is repeated until its outcome is
//! recorded. A volume that is attached nowhere is lent a target for it ([`crate::reconcile::tending`]).
//!
//! Snapshots of several volumes at one point are a group ([`groups`]).
//!
//! A volume goes back to one of its snapshots by the same commands ([`reverts`]), and the content of
//! snapshots is read by them, part by part ([`history`]).
//!
//! A volume that is deleted while it has snapshots is Retained: its name is free, nobody can attach
//! it, and its replicas are kept and healed until its last snapshot is gone ([`keeper`]).

pub(crate) mod catalog;
pub(crate) mod commands;
#[cfg(test)]
mod examples;
mod group_attempts;
pub(crate) mod groups;
pub mod history;
pub(crate) mod keeper;
mod measure;
pub(crate) mod points;
pub(crate) mod recovery;
pub(crate) mod reverts;
pub(crate) mod schedules;
pub(crate) mod view;

use std::sync::Arc;

use crate::state::State;

/// Parts that answer users and targets about snapshots, and look after them.
pub struct Parts {
    pub catalog: Arc<catalog::Snapshots>,
    pub schedules: Arc<schedules::Schedules>,
    pub groups: Arc<groups::Groups>,
    pub reverts: reverts::Reverts,
    pub history: history::History,
    pub commands: commands::Commands,
    pub keeper: Arc<keeper::SnapshotKeeper>,
    pub(crate) points: Arc<points::Points>,
}

impl Parts {
    pub(crate) fn new(state: &Arc<State>) -> Self {
        let catalog = Arc::new(catalog::Snapshots::new(state.clone()));
        let points = Arc::new(points::Points::new());
        let groups = Arc::new(groups::Groups::new(state.clone(), catalog.clone(), points.clone()));
        Self {
            schedules: Arc::new(schedules::Schedules::new(state.clone(), catalog.clone())),
            reverts: reverts::Reverts::new(state.clone(), catalog.clone()),
            history: history::History::new(state.clone(), catalog.clone()),
            commands: commands::Commands::new(state.clone(), groups.clone(), points.clone()),
            keeper: Arc::new(keeper::SnapshotKeeper::new(state.clone(), groups.clone())),
            groups,
            catalog,
            points,
        }
    }
}
