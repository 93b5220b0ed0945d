//! The brain of a mirror: what one cluster decides of a group of volumes that another cluster has a copy
//! of. The rules are those of `docs/mirror.md`.
//!
//! [`Brain`] takes events and says what is to be done; it has no clock, no channel, no store and no chance of
//! its own. All that must outlive it is the [`Record`]: a change of it is an action whose end is an event, and
//! nothing that follows from a change is ordered, told or answered before that end. So it may die between any
//! two steps.
//!
//! | module | idea |
//! |---|---|
//! | [`chain`] | generations, and what two chains of them say of each other |
//! | [`record`] | what outlives a brain, and what a recovery makes of an older one |
//! | [`observed`] | what the members report |
//! | [`word`] | the one message: all that the other brain may know, with a number |
//! | [`session`] | which messages are late ones of a former life |
//! | [`brain`] | events in, actions out |
//! | `decide` | the next change of the record |
//! | `ending` | the end of a mirror, and another one of the same group after it |
//! | `orders` | what members are to do as the record is |
//! | [`feed`] | which slots a lent target takes |
//! | [`feeding`] | what a lent target writes of them, and what it says of that |
//! | [`sending`] | which slots are on their way, and when a mirror sends again |
//! | [`answers`] | the table of calls |
//! | `codec` | bytes of records and messages, bounded |

pub mod answers;
pub mod brain;
pub mod chain;
mod codec;
mod decide;
mod ending;
pub mod feed;
pub mod feeding;
pub mod observed;
mod orders;
pub mod record;
pub mod sending;
pub mod session;
#[cfg(test)]
mod tests;
pub mod word;

pub use brain::{Action, Brain, Event, Order};
pub use chain::{Begun, Chain, ClusterId, Generation};
pub use observed::Observed;
pub use record::{Claim, Keepsake, Member, Record, Role, Stamp, Transfer};
pub use word::Word;

use std::time::Duration;

/// Most members of a group.
pub const MEMBERS_MAX: usize = 128;
/// Most generations that a chain remembers.
pub const GENERATIONS_MAX: usize = 32;
/// Most points that a side tells of.
pub const POINTS_TOLD_MAX: usize = 8;
/// Longest message, and longest record.
pub const BYTES_MAX: usize = 64 << 10;
/// Time without a frame of any mirror of the other cluster after which it counts as silent.
pub const SILENT_AFTER: Duration = Duration::from_secs(30);
/// Time without progress after which force does not wait for a final point any more.
pub const NO_PROGRESS_AFTER: Duration = Duration::from_secs(600);
/// Interval at which a brain repeats its word.
pub const SAY_AGAIN: Duration = Duration::from_secs(1);
