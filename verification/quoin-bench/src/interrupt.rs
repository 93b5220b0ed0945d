//! Ctrl-C and SIGTERM: an interrupted benchmark leaves no process and no file behind.

use std::path::PathBuf;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{Error, usage};

/// Exit code that a shell reports of an interrupted command.
const EXIT_CODE: i32 = 130;

/// Makes either signal end all processes that this one started, remove `scratch`, and end this one.
pub fn clean_up_when_interrupted(scratch: PathBuf) -> Result<(), Error> {
    let fail = || Error::io("listen for signals");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(fail())?;
    let listen = |kind| runtime.block_on(async move { signal(kind) }).map_err(fail());
    let (interrupt, terminate) =
        (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let wait = move || {
        runtime.block_on(either(interrupt, terminate));
        let own = std::process::id();
        // A process that is being started at this moment is found by the next poll.
        loop {
            let family: Vec<u32> =
                usage::family(own).into_iter().filter(|pid| usage::is_alive(*pid)).collect();
            let others: Vec<u32> = family.into_iter().filter(|pid| *pid != own).collect();
            if others.is_empty() {
                break;
            }
            usage::end(&others);
        }
        // The directory is temporary, so a file that cannot be removed does no harm.
        let _ = std::fs::remove_dir_all(&scratch);
        eprintln!("interrupted; nothing stays of it");
        std::process::exit(EXIT_CODE);
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait).map_err(fail())?;
    Ok(())
}

async fn either(mut one: Signal, mut other: Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}
