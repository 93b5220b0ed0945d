//! Named defects, which show that the tests detect them: a check that cannot fail is no check.
//!
//! Each switch breaks one rule of `docs/replication.md` or `docs/store.md` in one place. The
//! switches exist only with the feature `mutants`, which no product build has; without it [`is`] is
//! a constant `false` and no code of them remains. At most one is on at a time.

#[cfg(feature = "mutants")]
mod switch {
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<&'static str>> = const { Cell::new(None) };
        static REACHED: Cell<bool> = const { Cell::new(false) };
    }

    /// Returns true if this defect is on.
    pub fn is(name: &str) -> bool {
        let on = ACTIVE.get() == Some(name);
        if on {
            REACHED.set(true);
        }
        on
    }

    /// Turns one defect on for this thread, or all off.
    pub fn set(name: Option<&'static str>) {
        ACTIVE.set(name);
        REACHED.set(false);
    }

    /// Returns true if execution ever reached the place of the defect that is on.
    pub fn was_reached() -> bool {
        REACHED.get()
    }
}

#[cfg(feature = "mutants")]
pub use switch::{is, set, was_reached};

/// Constant `false`: product builds have no defects to switch on.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn is(_name: &str) -> bool {
    false
}
