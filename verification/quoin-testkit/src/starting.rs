//! Processes that are being started, which have copies of what other threads closed.

use std::time::{Duration, Instant};

const ATTEMPTS_TIME_MAX: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(10);

/// Attempts at an operation that finds a file or a device in use for a moment. A process that
/// another test of the program starts holds copies of all descriptors until it executes its own
/// program, so what was just closed may still be open. The attempts end after half a minute; the
/// first is made at once.
pub fn attempts_while_processes_start() -> impl Iterator<Item = ()> {
    let until = Instant::now() + ATTEMPTS_TIME_MAX;
    (0..).map_while(move |attempt: u32| {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        (attempt == 0 || Instant::now() < until).then_some(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_begin_at_once_and_have_pauses_between_them() {
        let begin = Instant::now();
        assert_eq!(attempts_while_processes_start().take(3).count(), 3);
        assert!(begin.elapsed() >= 2 * PAUSE);
    }
}
