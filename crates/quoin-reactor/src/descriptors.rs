//! File descriptors: as many as the system allows, and a listener's rest where there are none left.

use std::io::Error;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How long a listener rests for which the system had no descriptor. It stays readable, so a loop
/// that is told of it at once would do nothing but fail.
pub const LISTENER_REST: Duration = Duration::from_millis(250);
/// A shortage that goes on is told this often.
const AGAIN: Duration = Duration::from_secs(60);

/// Lets this process open as many files as its hard limit says; gives that limit (`None`: there is
/// none). Systems start processes with a low soft limit for the sake of programs that use `select`.
pub fn raise_limit() -> std::io::Result<Option<u64>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    }
    Ok(maximum)
}

/// Whether an accept failed for want of descriptors or memory. The connection still waits then,
/// and the next accept fails as well.
fn is_shortage(error: &Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    error.raw_os_error().is_some_and(|errno| wants.contains(&Errno::from_raw_os_error(errno)))
}

/// Looks at failed accepts, and tells of a shortage once and not at each of them.
#[derive(Debug, Default)]
pub struct Shortage {
    told: Option<Instant>,
}

impl Shortage {
    /// Whether the listener is to rest for [`LISTENER_REST`].
    pub fn is_behind(&mut self, error: &Error) -> bool {
        let short = is_shortage(error);
        if short && self.told.is_none_or(|told| told.elapsed() >= AGAIN) {
            self.told = Some(Instant::now());
            tracing::warn!(
                %error,
                "new connections wait for others to end: raise the limit of open files \
                 (LimitNOFILE=, ulimit -Hn)"
            );
        }
        short
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_want_of_descriptors_or_memory_lets_a_listener_rest_and_it_is_told_once() {
        let mut shortage = Shortage::default();
        for (errno, rests) in [
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::NOBUFS, true),
            (Errno::NOMEM, true),
            (Errno::CONNABORTED, false),
            (Errno::AGAIN, false),
        ] {
            let error = Error::from_raw_os_error(errno.raw_os_error());
            assert_eq!(shortage.is_behind(&error), rests, "{error}");
        }
        let told = shortage.told.unwrap();
        assert!(shortage.is_behind(&Error::from_raw_os_error(Errno::MFILE.raw_os_error())));
        assert_eq!(shortage.told, Some(told));
    }
}
