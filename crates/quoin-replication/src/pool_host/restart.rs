//! Claims of a pool's replicas that they hold everything they ever applied, across starts.
//!
//! A replica compares the cookie of its cache with the one that it recorded. A kernel tells of a
//! failed write-out once, and the next start would take the cache that it was left with for whole.
//! So each pool keeps a number in a file in memory, which is part of the cookie:
//!
//! * When the disk fails the file is removed, which needs neither room nor a disk. A process that
//!   finds no file draws another number, so no replica claims what a cache held before.
//! * A pool that is opened anew within its process keeps its number in its own memory. There every
//!   replica's claim is withdrawn on media before anything is answered, and the file is kept again
//!   after that.

use quoin_types::mutant;

use crate::replica::store::BootCookie;

/// Step of the driver with the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum File {
    Leave,
    /// Written with [`Claims::number`].
    Keep,
    Remove,
}

/// The number of one process, and whether its claims stand.
#[derive(Clone, Copy, Debug)]
pub struct Claims {
    number: u128,
    disk_failed: bool,
}

impl Claims {
    /// Of a process that begins. `found`: the number in the file; `fresh`: another one.
    pub fn at_start(found: Option<u128>, fresh: u128) -> (Self, File) {
        let number = found.unwrap_or(fresh);
        let file = if found.is_some() { File::Leave } else { File::Keep };
        (Self { number, disk_failed: false }, file)
    }

    pub fn number(&self) -> u128 {
        self.number
    }

    /// The cookie of a cache, as far as no disk failed.
    pub fn cookie(&self, cache: BootCookie) -> BootCookie {
        BootCookie(cache.0 ^ self.number)
    }

    /// A read at the start, a write or a sync failed.
    #[must_use]
    pub fn disk_failed(&mut self) -> File {
        self.disk_failed = true;
        if mutant::is("claims-left-to-the-next-process") { File::Leave } else { File::Remove }
    }

    /// Returns true if every claim has to be withdrawn on media before anything is answered.
    pub fn must_withdraw(&self) -> bool {
        self.disk_failed && !mutant::is("claims-not-withdrawn")
    }

    /// Every claim of before the failure is withdrawn on media, or there was none.
    #[must_use]
    pub fn withdrawn(&mut self) -> File {
        match std::mem::take(&mut self.disk_failed) {
            true => File::Keep,
            false => File::Leave,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: BootCookie = BootCookie(9);

    #[test]
    fn the_next_process_has_the_same_cookie_until_the_disk_fails() {
        let (one, file) = Claims::at_start(None, 5);
        assert_eq!((file, one.must_withdraw()), (File::Keep, false));
        let (mut next, file) = Claims::at_start(Some(one.number()), 6);
        assert_eq!((file, next.cookie(CACHE)), (File::Leave, one.cookie(CACHE)));
        assert_ne!(next.cookie(CACHE), next.cookie(BootCookie(8)));

        assert_eq!(next.disk_failed(), File::Remove);
        let (other, _) = Claims::at_start(None, 7);
        assert_ne!(other.cookie(CACHE), one.cookie(CACHE), "the file is gone");
    }

    #[test]
    fn a_pool_that_is_opened_anew_withdraws_its_claims_before_it_leaves_a_file() {
        let (mut claims, _) = Claims::at_start(Some(5), 6);
        assert_eq!(claims.withdrawn(), File::Leave, "there was nothing to withdraw");
        assert_eq!(claims.disk_failed(), File::Remove);
        assert_eq!(claims.disk_failed(), File::Remove, "it fails again as it is opened");
        assert!(claims.must_withdraw());
        assert_eq!(claims.withdrawn(), File::Keep);
        assert!(!claims.must_withdraw());
        assert_eq!(claims.cookie(CACHE), BootCookie(9 ^ 5));
    }
}
