//! Named defects, to show that the tests find them: a check that cannot fail is no check.
//!
//! The rules of `docs/replication.md` and `docs/store.md` are each broken in one place by a
//! switch. The switches exist only with the feature `mutants`, which no product build has; without
//! it [`is`] is a constant `false` and nothing is left of them. At most one is on at a time.

#[cfg(feature = "mutants")]
mod switch {
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<&'static str>> = const { Cell::new(None) };
        static REACHED: Cell<bool> = const { Cell::new(false) };
    }

    /// Whether this defect is on.
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

    /// Whether the place of the defect that is on was ever come to.
    pub fn was_reached() -> bool {
        REACHED.get()
    }
}

#[cfg(feature = "mutants")]
pub use switch::{is, set, was_reached};

/// Whether this defect is on: never in a product.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn is(_name: &str) -> bool {
    false
}
