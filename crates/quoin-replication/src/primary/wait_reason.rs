//! Reasons to wait: a value for the target's decisions, a text for people.

use std::fmt;

/// The one reason for which an open or the IO waits now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitReason {
    /// The control plane has not granted an epoch.
    Grant,
    UsedEpoch,
    /// A replica has promised a newer epoch than the granted one.
    OlderGrant,
    /// The granted membership breaks this rule.
    UnsoundMembership(&'static str),
    NotFormed,
    RecordBehind,
    /// Too few known replicas answered the open.
    Answers {
        answered: usize,
        known: usize,
        needed: usize,
    },
    Authority,
    /// Too few replicas of the last in-sync set with their caches answered the open.
    Caches {
        answered: usize,
        in_sync: usize,
    },
    AllAnswers,
    /// Replicas that may know of a change of membership have not answered.
    JointMembers {
        silent: usize,
    },
    SharedHistory,
    /// Too few counted replicas under one rule.
    Quorum {
        counted: usize,
        rf: u8,
        cf: u8,
        changing: bool,
    },
    /// A replica that the quorum needs is connected and lags.
    CatchUp,
    /// One replica failed for lack of room.
    RoomInPool,
    /// Too few counted replicas have room.
    Room,
}

impl WaitReason {
    /// Kind of the wait, for other processes.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Grant | Self::UsedEpoch | Self::OlderGrant | Self::NotFormed => "grant",
            Self::UnsoundMembership(_) | Self::RecordBehind => "records",
            Self::Answers { .. } | Self::Authority | Self::SharedHistory => "replicas",
            Self::Caches { .. } | Self::AllAnswers | Self::JointMembers { .. } => "replicas",
            Self::Quorum { .. } | Self::CatchUp => "quorum",
            Self::RoomInPool | Self::Room => "room",
        }
    }

    /// Returns true if IO waits for CF counted replicas.
    pub fn is_quorum(self) -> bool {
        matches!(self, Self::Quorum { .. } | Self::CatchUp)
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let text = match self {
            Self::Grant => "an epoch from the control plane",
            Self::UsedEpoch => "the control plane: it granted an epoch that was used before",
            Self::OlderGrant => "the control plane: a replica has promised more than it grants",
            Self::UnsoundMembership(rule) => {
                return write!(f, "a membership that is sound: {rule}");
            }
            Self::NotFormed => "the pools: not all replicas have been created yet",
            Self::RecordBehind => {
                "the control plane: replicas hold a newer membership than its record \
                 (a restored backup must not rule)"
            }
            Self::Answers { answered, known, needed } => {
                return write!(
                    f,
                    "replicas: {answered} of {known} known answered, {needed} are needed to open"
                );
            }
            Self::Authority => "replicas",
            Self::Caches { answered, in_sync } => {
                return write!(
                    f,
                    "replicas that kept their caches: {answered} of the {in_sync} in sync answered"
                );
            }
            Self::AllAnswers => "the rest of the replicas: those that answered lost their caches",
            Self::JointMembers { silent } => {
                return write!(
                    f,
                    "replicas that may know of a change of membership: {silent} have not answered"
                );
            }
            Self::SharedHistory => "replicas that share one history",
            Self::Quorum { counted, rf, cf, changing } => {
                let meanwhile = if *changing { " while the membership changes" } else { "" };
                return write!(
                    f,
                    "quorum: {counted} of {rf} replicas are connected and in sync, \
                     {cf} are needed{meanwhile}"
                );
            }
            Self::CatchUp => "quorum: a replica that is needed has not caught up",
            Self::RoomInPool => "room in a pool: one of its replicas' pools is full",
            Self::Room => {
                "room: the pools of its replicas are full; free space in them or add pools"
            }
        };
        f.write_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reasons_that_end_with_a_quorum_are_those_whose_text_begins_with_it() {
        let quorum = WaitReason::Quorum { counted: 1, rf: 3, cf: 2, changing: true };
        assert_eq!(
            quorum.to_string(),
            "quorum: 1 of 3 replicas are connected and in sync, 2 are needed \
             while the membership changes"
        );
        let others = [
            WaitReason::Answers { answered: 1, known: 3, needed: 2 },
            WaitReason::Caches { answered: 1, in_sync: 2 },
            WaitReason::JointMembers { silent: 1 },
            WaitReason::UnsoundMembership("a rule"),
            WaitReason::Grant,
            WaitReason::Room,
            WaitReason::RoomInPool,
        ];
        for reason in others.into_iter().chain([quorum, WaitReason::CatchUp]) {
            let text = reason.to_string();
            assert_eq!(reason.is_quorum(), text.starts_with("quorum"), "{text}");
        }
    }
}
