//! File descriptors: the process's limit, and the pause of a listener when there are none left.

use std::io::Error;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Pause of a listener for which the system had no descriptor. It stays readable, so without a
/// pause the loop would only fail again and again.
pub const LISTENER_REST: Duration = Duration::from_millis(250);
/// Interval of reports while a shortage lasts.
const AGAIN: Duration = Duration::from_secs(60);

/// Raises this process's limit of open files to its hard limit; returns that limit (`None`:
/// unlimited). Systems start processes with a low soft limit for programs that use `select`.
pub fn raise_limit() -> std::io::Result<Option<u64>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    }
    Ok(maximum)
}

/// Returns true if an accept failed for lack of descriptors or memory. The connection still waits
/// then, and the next accept fails as well.
fn is_shortage(error: &Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    error.raw_os_error().is_some_and(|errno| wants.contains(&Errno::from_raw_os_error(errno)))
}

/// Examines failed accepts, and reports a shortage once instead of at each of them.
#[derive(Debug, Default)]
pub struct Shortage {
    reported: Option<Instant>,
}

impl Shortage {
    /// Returns true if the listener is to pause for [`LISTENER_REST`].
    pub fn is_behind(&mut self, error: &Error) -> bool {
        let short = is_shortage(error);
        if short && self.reported.is_none_or(|reported| reported.elapsed() >= AGAIN) {
            self.reported = Some(Instant::now());
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
    fn only_a_lack_of_descriptors_or_memory_pauses_a_listener_and_it_is_reported_once() {
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
        let reported = shortage.reported.unwrap();
        assert!(shortage.is_behind(&Error::from_raw_os_error(Errno::MFILE.raw_os_error())));
        assert_eq!(shortage.reported, Some(reported));
    }
}
