//! Steps of the model, and their text for a reader.

use crate::state::{Set, members};
use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A new attempt gets an epoch; its first Open is answered by this replica.
    Acquire {
        attempt: usize,
        replica: usize,
    },
    /// A replica promises and, leases of others waited out, answers.
    Open {
        attempt: usize,
        replica: usize,
    },
    Decide {
        attempt: usize,
        in_sync: Set,
        marked: bool,
    },
    Cut {
        attempt: usize,
        replica: usize,
        keep: u8,
    },
    Apply {
        attempt: usize,
        replica: usize,
        lsn: u8,
    },
    Sync {
        attempt: usize,
        replica: usize,
        lsn: u8,
    },
    Write {
        attempt: usize,
        lsn: u8,
    },
    Flush {
        attempt: usize,
        lsn: u8,
    },
    View {
        attempt: usize,
        lsn: u8,
        in_sync: Set,
    },
    Shutdown {
        attempt: usize,
    },
    Close {
        attempt: usize,
        replica: usize,
    },
    Joint {
        attempt: usize,
        lsn: u8,
        in_sync: Set,
        known: Set,
        cf: u8,
    },
    GiveUp {
        attempt: usize,
    },
    SendSwap {
        attempt: usize,
    },
    Swap {
        attempt: usize,
    },
    LearnSwap {
        attempt: usize,
    },
    Compete {
        attempt: usize,
    },
    TakeBack,
    LearnTakenBack {
        attempt: usize,
    },
    Force {
        keep: Set,
        gone: bool,
    },
    Consent,
    ForgetOld {
        attempt: usize,
    },
    PowerCut {
        replicas: Set,
        kept: [u8; crate::state::REPLICAS],
    },
    Damage {
        replica: usize,
    },
    DiskRolledBack {
        replica: usize,
        lsn: u8,
    },
    Death {
        replica: usize,
    },
    SyncFails {
        replica: usize,
    },
    RestoreRecord,
    /// Mutants only.
    Fold {
        replica: usize,
    },
    ShowIncrement {
        attempt: usize,
        replica: usize,
        lsn: u8,
    },
    FinishIncrement {
        attempt: usize,
        replica: usize,
    },
}

/// A replica as a letter.
pub fn letter(replica: usize) -> char {
    char::from(b'a' + replica as u8)
}

pub fn letters(set: Set) -> String {
    let names: Vec<String> = members(set).map(|r| letter(r).to_string()).collect();
    format!("{{{}}}", names.join(","))
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = |attempt: &usize| format!("T{}", attempt + 1);
        let l = |replica: &usize| letter(*replica);
        match self {
            Step::Acquire { attempt, replica } => {
                write!(f, "{} is granted an epoch, opens {}", t(attempt), l(replica))
            }
            Step::Open { attempt, replica } => {
                write!(
                    f,
                    "{} opens {} (promised, older leases over, answered)",
                    t(attempt),
                    l(replica)
                )
            }
            Step::Decide { attempt, in_sync, marked } => {
                let mark = if *marked { ", unflushed tail may be lost" } else { "" };
                write!(f, "{} recovers, first View IS={}{mark}", t(attempt), letters(*in_sync))
            }
            Step::Cut { attempt, replica, keep } => {
                write!(f, "{} cuts {} to LSN {keep}", t(attempt), l(replica))
            }
            Step::Apply { attempt, replica, lsn } => {
                write!(f, "{} applies LSN {lsn} of {}", l(replica), t(attempt))
            }
            Step::Sync { attempt, replica, lsn } => {
                write!(f, "{} syncs up to LSN {lsn} for {}", l(replica), t(attempt))
            }
            Step::Write { attempt, lsn } => {
                write!(f, "{} sequences a write as LSN {lsn}", t(attempt))
            }
            Step::Flush { attempt, lsn } => write!(f, "{} flushes up to LSN {lsn}", t(attempt)),
            Step::View { attempt, lsn, in_sync } => {
                write!(f, "{} appends View IS={} as LSN {lsn}", t(attempt), letters(*in_sync))
            }
            Step::Shutdown { attempt } => {
                write!(f, "{} ends; its sessions are closed from here on", t(attempt))
            }
            Step::Close { attempt, replica } => write!(f, "{} closes {}", t(attempt), l(replica)),
            Step::Joint { attempt, lsn, in_sync, known, cf } => write!(
                f,
                "{} goes joint with K'={} CF'={cf}: View IS={} as LSN {lsn}",
                t(attempt),
                letters(*known),
                letters(*in_sync)
            ),
            Step::GiveUp { attempt } => write!(f, "{} gives the change up", t(attempt)),
            Step::SendSwap { attempt } => write!(f, "{} sends the compare-and-swap", t(attempt)),
            Step::Swap { attempt } => {
                write!(f, "the compare-and-swap of {} takes effect", t(attempt))
            }
            Step::LearnSwap { attempt } => {
                write!(f, "{} reads the record and adopts it", t(attempt))
            }
            Step::Compete { attempt } => {
                write!(f, "{} wins a competing compare-and-swap with the old K", t(attempt))
            }
            Step::TakeBack => write!(f, "a newcomer is taken off the record"),
            Step::LearnTakenBack { attempt } => {
                write!(f, "{} finds the record at a later version with its K", t(attempt))
            }
            Step::Force { keep, gone } => {
                let how = if *gone { "gone" } else { "fenced" };
                write!(f, "the control plane forces K={}, the others are {how}", letters(*keep))
            }
            Step::Consent => write!(f, "a person consents to the loss"),
            Step::ForgetOld { attempt } => {
                write!(f, "{} removes the old membership from the record", t(attempt))
            }
            Step::PowerCut { replicas, kept } => {
                write!(f, "power cut of {}:", letters(*replicas))?;
                for r in members(*replicas) {
                    write!(f, " {} keeps LSN {}", letter(r), kept[r])?;
                }
                Ok(())
            }
            Step::Damage { replica } => write!(f, "{} finds its data rotten", l(replica)),
            Step::DiskRolledBack { replica, lsn } => {
                write!(f, "the disk of {} is rolled back to LSN {lsn}", l(replica))
            }
            Step::Death { replica } => write!(f, "{} is gone for good", l(replica)),
            Step::SyncFails { replica } => write!(f, "a sync of {} fails", l(replica)),
            Step::RestoreRecord => write!(f, "the control plane is restored from an old copy"),
            Step::Fold { replica } => write!(f, "{} folds all it has into its base", l(replica)),
            Step::ShowIncrement { attempt, replica, lsn } => {
                write!(
                    f,
                    "{} feeds {} an increment to LSN {lsn}, seen at once",
                    t(attempt),
                    l(replica)
                )
            }
            Step::FinishIncrement { attempt, replica } => {
                write!(f, "{} has fed {} the whole increment", t(attempt), l(replica))
            }
        }
    }
}
