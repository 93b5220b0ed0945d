//! A rule broken on purpose, to prove that these tests detect it (`cargo xtask mutants`).

/// Breaks the rule that the run names, on this test's thread.
pub fn break_a_rule() {
    #[cfg(feature = "mutants")]
    if let Ok(name) = std::env::var("QUOIN_MUTANT") {
        quoin_types::mutant::set(Some(name.leak()));
    }
}
