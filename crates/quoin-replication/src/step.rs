//! Steps that a target or a replica is in the middle of, by name: for status, and for tests that
//! report at which steps of the protocol a fault has struck.

use std::fmt;

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// One step of the protocol that takes time.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Step { $($(#[$doc])* $name),* }

        impl Step {
            pub const ALL: &[Step] = &[$(Step::$name),*];

            pub fn name(self) -> &'static str {
                match self { $(Step::$name => $text),* }
            }
        }
    };
}

steps! {
    Acquiring = "target: asks for an epoch",
    Opening = "target: waits for answers",
    Fetching = "target: reads the authority's log",
    Recovering = "target: first View",
    RecoveringByBase = "target: first View waits for a base",
    Writing = "target: writes wait for commit",
    Stabilising = "target: flushes wait for stable",
    Reading = "target: reads",
    Merging = "target: part of a block is merged",
    ViewPending = "target: a View waits",
    CatchingUp = "target: feeds a returned member",
    RebuildBoundary = "target: a rebuild waits for its boundary",
    RebuildMoving = "target: a rebuild moves slots",
    RebuildCommitting = "target: a rebuild waits for its flip",
    Joint = "target: a joint View waits",
    Swapping = "target: the swap is under way",
    BelowQuorum = "target: below CF",
    Draining = "target: drains",
    Closing = "target: closes",
    PromiseUnsynced = "replica: promise on its way to media",
    LeaseWaited = "replica: waits out a lease",
    Truncating = "replica: cut on its way to media",
    Syncing = "replica: entries on their way to media",
    ShadowOpen = "replica: holds a shadow",
    FlipPrepared = "replica: shadow on its way to media",
    Flipped = "replica: flip on its way to media",
    ReadsWaiting = "replica: requests wait for entries or the disk",
    CloseUnsynced = "replica: close on its way to media",
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
