//! The cluster core: the decisions of the control plane, as pure functions. No I/O, no clock, no
//! threads, no async, no store, no random number.
//!
//! A decision is a function of the records, of what is observed and of the time, and says how the
//! records change. The control plane (`quoin-control`) keeps the records under compare-and-swap, asks
//! here what a request or a report makes of them, and writes that; the simulator does the same with
//! records of its own, so what is simulated is what runs.
//!
//! A record is changed in place: the caller hands a copy over, and writes it only where the function
//! succeeds and the record is still the one that was copied.

pub mod mirror;
pub mod ownership;
pub mod peers;
pub mod records;
pub mod records_rebuild;
pub mod refusal;
pub mod tokens;
pub mod wall_clock;

pub use refusal::Refusal;

/// Breaks the rule that `cargo xtask mutants` named for this run, on this test's thread.
#[cfg(test)]
fn break_a_rule() {
    #[cfg(feature = "mutants")]
    if let Ok(name) = std::env::var("QUOIN_MUTANT") {
        quoin_types::mutant::set(Some(name.leak()));
    }
}
