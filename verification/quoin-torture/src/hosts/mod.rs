//! `quoin-torture --hosts`: hosts that are lost and return, and a controller that moves.
//!
//! Four hosts (namespaces for network, mounts and host name), each with a pool and a node; one of
//! them has the controller as well. Volumes with an ext4 file system are mounted on some of them,
//! each with a writer that records which fsyncs returned. At each hand-over the file system must be
//! clean, and each block must hold the last acknowledged write or the one that was under way: so no
//! acknowledged write is lost, and no write of a fenced host is in the volume.

mod events;
mod host;
mod site;
mod writer;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

pub use events::Event;
use events::Events;
use site::Site;

const VOLUMES: usize = 2;

/// Choice of the events, and their duration.
#[derive(clap::Args)]
pub struct HostOptions {
    /// Hosts that are lost and return, and a controller that moves, instead of faults of processes
    #[arg(long)]
    pub hosts: bool,
    /// With --hosts, only these events, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', requires = "hosts", value_name = "EVENTS")]
    events: Vec<Event>,
    /// With --hosts, none of these events
    #[arg(long, value_enum, value_delimiter = ',', requires = "hosts", value_name = "EVENTS")]
    without: Vec<Event>,
}

pub fn torture(
    options: &HostOptions,
    minutes: f64,
    seed: u64,
    quoin: &Path,
    directory: &Path,
) -> Result<()> {
    if let Err(why) = crate::files::possible() {
        bail!("--hosts needs namespaces and block devices: {why}");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut site = Site::start(quoin, directory, seed)?;
    let mut without = options.without.clone();
    if !site.has_terms() && !options.events.contains(&Event::TwoControllers) {
        println!("controllers of this version have no terms: without two-controllers");
        without.push(Event::TwoControllers);
    }
    let mut events = Events::new(&options.events, &without)?;
    for number in 0..VOLUMES {
        site.make_volume(&format!("db{number}"), number % site.hosts.len())?;
    }
    site.heal()?;
    site.back_up()?;
    let began = Instant::now();
    let outcome = (|| {
        while began.elapsed() < Duration::from_secs_f64(minutes * 60.0)
            && !crate::INTERRUPTED.load(Ordering::SeqCst)
        {
            let event = events.draw(&mut rng)?;
            println!("[{:>6.1} s] {event:?}", began.elapsed().as_secs_f64());
            events.happen(event, &mut site, &mut rng).with_context(|| format!("{event:?}"))?;
            site.heal().with_context(|| format!("after {event:?}"))?;
        }
        println!("now nothing more happens: everything must be whole and agree");
        site.end()
    })();
    for (event, times) in &events.happened {
        println!("{:<18} {times:>6}", format!("{event:?}"));
    }
    let counts = &site.counts;
    println!(
        "{} fsyncs, {} hand-overs judged, {} file systems clean; mounts of lost hosts: {} failed by \
         themselves, {} hung; longest pause {:.1} s",
        counts.writes,
        counts.hand_overs,
        counts.file_system_checks,
        counts.stale_mounts_that_failed,
        counts.stale_mounts_that_hung,
        counts.longest_pause.as_secs_f64()
    );
    outcome?;
    println!("losses 0");
    Ok(())
}
