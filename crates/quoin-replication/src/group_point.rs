//! One attempt at a point over several volumes, as its coordinator sees it.
//!
//! The volumes are served by targets on several nodes. All of them hold their answers back; once all
//! hold, each is cut; once all are cut, each is released. While all hold, no client sees an effect that
//! comes after a cut, so no volume can have an effect whose cause another one's cut lacks. The attempt
//! counts if every release is unbroken and every cut reached media: otherwise its snapshots are deleted,
//! and another attempt has ids of its own.
//!
//! The coordinator keeps nothing durable of an attempt. One that dies in the middle leaves holds that
//! end by themselves and snapshots that the records know; the next coordinator deletes them.
//!
//! [`GroupPoint::commands`] says what each target is to be told now, again and again, and
//! [`GroupPoint::on`] takes in what it answers. Everything may be said twice, and late.

pub mod attempts;

use std::fmt;
use std::time::Duration;

use crate::primary::{HOLD_MS_MAX, PointOutcome, PointWish, SnapshotOutcome};
use quoin_types::ids::{Epoch, Lsn, PointId, SnapshotId, VolumeId};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Most volumes of one point.
pub const POINT_VOLUMES_MAX: usize = 128;
/// Time beyond the holds within which the last targets may answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// Time within which all cuts must be on media.
const STABLE_WITHIN: Duration = Duration::from_secs(30);

/// Command to the target of a volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PointCommand {
    Hold {
        for_ms: u32,
    },
    Cut {
        snapshot: SnapshotId,
    },
    Release,
    /// Say whether the snapshot is on media.
    Confirm {
        snapshot: SnapshotId,
    },
}

impl PointCommand {
    /// The wish for the volume's state machine; `None`: it is one of its snapshot alone.
    pub fn wish(self) -> Option<PointWish> {
        match self {
            Self::Hold { for_ms } => Some(PointWish::Hold { for_ms }),
            Self::Cut { snapshot } => Some(PointWish::Cut { snapshot }),
            Self::Release => Some(PointWish::Release),
            Self::Confirm { .. } => None,
        }
    }
}

/// Answer of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PointAnswer {
    Step(PointOutcome),
    Snapshot { id: SnapshotId, outcome: SnapshotOutcome },
}

/// Reason why an attempt does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// The hold ended before its release: the target was replaced, or the time was over.
    Hold(VolumeId),
    /// No answer in time.
    Silent(VolumeId),
    /// The cut was lost before it reached media, or is another one than was told.
    Lost(VolumeId),
    /// The volume has as many snapshots as it may have, and waiting does not help.
    TooManySnapshots(VolumeId),
    /// Its coordinator gave it up.
    GivenUp,
}

impl Broken {
    /// The volume that it is the fault of.
    pub fn volume(self) -> Option<VolumeId> {
        match self {
            Self::Hold(volume)
            | Self::Silent(volume)
            | Self::Lost(volume)
            | Self::TooManySnapshots(volume) => Some(volume),
            Self::GivenUp => None,
        }
    }

    /// Returns true if another attempt may succeed.
    pub fn may_pass(self) -> bool {
        !matches!(self, Self::TooManySnapshots(_) | Self::GivenUp)
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hold(_) => "its target was replaced, or its IO was held for too long",
            Self::Silent(_) => "its target did not answer in time",
            Self::Lost(_) => "its cut did not reach media",
            Self::TooManySnapshots(_) => "it has too many snapshots",
            Self::GivenUp => "it was given up",
        })
    }
}

/// How an attempt ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PointVerdict {
    /// Every volume is cut at one point. Its cuts, in the order of the volumes that were given.
    Made(Vec<PointCut>),
    /// Nothing of it counts: its snapshots must be deleted.
    Broken(Broken),
}

/// The cut of one volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PointCut {
    pub volume: VolumeId,
    pub snapshot: SnapshotId,
    pub lsn: Lsn,
    pub epoch: Epoch,
    pub chain: u64,
}

/// Progress of one volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Member {
    volume: VolumeId,
    snapshot: SnapshotId,
    held: bool,
    cut: Option<(Lsn, Epoch)>,
    released: bool,
    /// Chain of the cut, once it is on media.
    stable: Option<u64>,
}

/// Steps of the whole, each of which begins when all volumes are through with the one before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Holding,
    Cutting,
    Releasing,
    Settling,
    Made,
    /// Targets that may hold are released; then it is over.
    Ending(Broken),
    Broken(Broken),
}

fn released_early() -> bool {
    mutant::is("released-before-all-are-cut")
}

/// An attempt that is under way, or has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupPoint {
    point: PointId,
    hold_ms: u32,
    members: Vec<Member>,
    stage: Stage,
    /// Time by which the present stage must be over.
    until: Time,
}

impl GroupPoint {
    /// Begins an attempt. `volumes`: each with the id of its snapshot, drawn for this attempt.
    pub fn begin(
        now: Time,
        point: PointId,
        hold_ms: u32,
        volumes: impl IntoIterator<Item = (VolumeId, SnapshotId)>,
    ) -> Self {
        let hold_ms = hold_ms.clamp(1, HOLD_MS_MAX);
        let member = |(volume, snapshot)| Member {
            volume,
            snapshot,
            held: false,
            cut: None,
            released: false,
            stable: None,
        };
        Self {
            point,
            hold_ms,
            members: volumes.into_iter().take(POINT_VOLUMES_MAX).map(member).collect(),
            stage: Stage::Holding,
            until: now + Duration::from_millis(hold_ms.into()) + ANSWERS_WITHIN,
        }
    }

    pub fn point(&self) -> PointId {
        self.point
    }

    /// How it ended; `None`: it is under way.
    pub fn verdict(&self) -> Option<PointVerdict> {
        match self.stage {
            Stage::Broken(broken) => Some(PointVerdict::Broken(broken)),
            Stage::Made => Some(PointVerdict::Made(self.cuts())),
            _ => None,
        }
    }

    /// Returns true once every volume is cut.
    pub fn is_cut(&self) -> bool {
        matches!(self.stage, Stage::Releasing | Stage::Settling | Stage::Made)
    }

    fn cuts(&self) -> Vec<PointCut> {
        let cut = |member: &Member| {
            let (lsn, epoch) = member.cut?;
            let (volume, snapshot) = (member.volume, member.snapshot);
            Some(PointCut { volume, snapshot, lsn, epoch, chain: member.stable? })
        };
        self.members.iter().filter_map(cut).collect()
    }

    /// Commands that the target of each volume is to be told now, and again until [`Self::on`]
    /// moves on.
    pub fn commands(&self) -> Vec<(VolumeId, PointCommand)> {
        let told = |member: &Member| {
            let snapshot = member.snapshot;
            let command = match self.stage {
                Stage::Holding if !member.held => PointCommand::Hold { for_ms: self.hold_ms },
                Stage::Cutting if member.cut.is_none() => PointCommand::Cut { snapshot },
                Stage::Cutting if released_early() && !member.released => PointCommand::Release,
                Stage::Releasing | Stage::Ending(_) if !member.released => PointCommand::Release,
                Stage::Settling if member.stable.is_none() => PointCommand::Confirm { snapshot },
                _ => return None,
            };
            Some((member.volume, command))
        };
        self.members.iter().filter_map(told).collect()
    }

    /// Time at which it must be looked at, if nothing is answered before.
    pub fn due(&self) -> Option<Time> {
        self.verdict().is_none().then_some(self.until)
    }

    /// Gives the attempt up.
    pub fn give_up(&mut self, now: Time) {
        if !matches!(self.stage, Stage::Ending(_) | Stage::Broken(_) | Stage::Made) {
            self.end(now, Broken::GivenUp);
        }
    }

    /// Looks at the time.
    pub fn tick(&mut self, now: Time) {
        if now < self.until {
            return;
        }
        match self.stage {
            Stage::Made | Stage::Broken(_) => {}
            // Holds that are left end by themselves.
            Stage::Ending(broken) => self.stage = Stage::Broken(broken),
            _ => {
                let silent = self.commands().first().map(|(volume, _)| *volume);
                self.end(now, silent.map_or(Broken::GivenUp, Broken::Silent));
            }
        }
    }

    /// Takes in what the target of a volume answered to a command of this attempt.
    pub fn on(&mut self, now: Time, volume: VolumeId, answer: PointAnswer) {
        self.tick(now);
        let stage = self.stage;
        let Some(member) = self.members.iter_mut().find(|member| member.volume == volume) else {
            return;
        };
        match answer {
            PointAnswer::Step(PointOutcome::Held) => member.held = true,
            PointAnswer::Step(PointOutcome::Cut { snapshot, lsn, epoch }) => {
                if snapshot == member.snapshot && stage == Stage::Cutting {
                    member.cut.get_or_insert((lsn, epoch));
                }
            }
            PointAnswer::Step(PointOutcome::TooManySnapshots) => {
                if stage == Stage::Cutting {
                    return self.end(now, Broken::TooManySnapshots(volume));
                }
            }
            PointAnswer::Step(PointOutcome::Released { unbroken }) => {
                let unbroken = unbroken || mutant::is("broken-hold-counts");
                match stage {
                    Stage::Ending(_) => member.released = true,
                    Stage::Releasing if unbroken => member.released = true,
                    Stage::Cutting if unbroken && released_early() => member.released = true,
                    Stage::Holding | Stage::Cutting | Stage::Releasing => {
                        member.released = true;
                        return self.end(now, Broken::Hold(volume));
                    }
                    Stage::Settling | Stage::Made | Stage::Broken(_) => {}
                }
            }
            PointAnswer::Snapshot { id, outcome } => {
                if id != member.snapshot || !matches!(stage, Stage::Releasing | Stage::Settling) {
                    return;
                }
                match outcome {
                    SnapshotOutcome::Made { lsn, head: Some(head) }
                        if member.cut == Some((lsn, head.epoch)) =>
                    {
                        member.stable = Some(head.chain.0);
                    }
                    SnapshotOutcome::Made { .. } | SnapshotOutcome::Gone => {
                        return self.end(now, Broken::Lost(volume));
                    }
                    _ => {}
                }
            }
        }
        self.go_on(now);
    }

    fn go_on(&mut self, now: Time) {
        let all = |is: fn(&Member) -> bool| self.members.iter().all(is);
        match self.stage {
            Stage::Holding if all(|m| m.held) => self.stage = Stage::Cutting,
            Stage::Cutting if all(|m| m.cut.is_some()) => self.stage = Stage::Releasing,
            Stage::Releasing if all(|m| m.released) => {
                self.stage = Stage::Settling;
                self.until = now + STABLE_WITHIN;
            }
            Stage::Ending(broken) if all(|m| m.released) => self.stage = Stage::Broken(broken),
            _ => {}
        }
        if self.stage == Stage::Settling && self.members.iter().all(|m| m.stable.is_some()) {
            self.stage = Stage::Made;
        }
    }

    fn end(&mut self, now: Time, broken: Broken) {
        self.stage = Stage::Ending(broken);
        self.until = now + ANSWERS_WITHIN;
        self.go_on(now);
    }
}

#[cfg(test)]
mod tests;
