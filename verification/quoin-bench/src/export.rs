//! Export of a snapshot on the host that serves its volume, beside its floor: as many bytes read from a file,
//! sent through a socket, and written to a file with as many syncs.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::compare::median;
use crate::further::Fact;
use crate::product::Product;
use crate::snapshots::{Cases, cut, full};
use crate::{Error, Options, usage};

pub const NAME: &str = "snapshot-export";
const VOLUME: &str = "exported";
const BYTES: u64 = 512 << 20;
/// Bytes of one read, and of one message.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes after which both sides make their file durable.
const SYNC_BYTES: u64 = 64 << 20;
const PAIRS: usize = 5;

/// Time and CPU time of one copy.
struct Cost {
    took: Duration,
    cpu: Duration,
}

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let mut cases = Cases { options, quoin, directory, pool_size: "4GiB", facts: Vec::new() };
    cases.measure(NAME, |product| measure(product, directory))?;
    Ok(cases.facts)
}

fn measure(product: &Product, directory: &Path) -> Result<Vec<Fact>, Error> {
    let _generator = full(product, VOLUME, BYTES)?;
    cut(product, VOLUME, "point")?;
    let source = directory.join("source");
    write_source(&source)?;
    let (mut times, mut floor_cpu, mut cpu) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    let controller = product.pids_of("controller");
    let before = usage::cpu(&controller);
    for pair in 0..PAIRS {
        let target = directory.join(format!("copy-{pair}"));
        let floor = copy(&source, &target)?;
        remove(&target)?;
        let quoin = export(product, &target)?;
        remove(&target)?;
        times.push(quoin.took.as_secs_f64() / floor.took.as_secs_f64());
        (floor_cpu, cpu) = (floor_cpu + floor.cpu, cpu + quoin.cpu);
    }
    let of_controller = usage::cpu(&controller).saturating_sub(before);
    remove(&source)?;
    let ratio = |part: Duration, whole: Duration| part.as_secs_f64() / whole.as_secs_f64();
    Ok(vec![
        Fact::of(NAME, "time", median(times), "× its floor", 1.67),
        Fact::of(NAME, "cpu", ratio(cpu, floor_cpu), "× its floor", 1.5),
        Fact::of(NAME, "controller", ratio(of_controller, cpu) * 100.0, "% of the CPU", 1.0),
    ])
}

fn remove(path: &Path) -> Result<(), Error> {
    std::fs::remove_file(path).map_err(Error::io(format!("remove {}", path.display())))
}

/// A file in which no piece is like another one.
fn write_source(path: &Path) -> Result<(), Error> {
    let failed = || Error::io(format!("write {}", path.display()));
    let mut file = File::create(path).map_err(failed())?;
    for piece in 0..BYTES / PIECE_BYTES as u64 {
        let words = (0..PIECE_BYTES as u64 / 8).map(|word| (piece << 32 | word).to_le_bytes());
        file.write_all(&words.flatten().collect::<Vec<u8>>()).map_err(failed())?;
    }
    file.sync_all().map_err(failed())
}

fn export(product: &Product, target: &Path) -> Result<Cost, Error> {
    let spent = || usage::cpu(&product.pids()) + usage::of_ended_children();
    let (before, began) = (spent(), Instant::now());
    product.command(&["snapshot", "export", "point", "--to", &target.to_string_lossy()])?;
    Ok(Cost { took: began.elapsed(), cpu: spent().saturating_sub(before) })
}

fn copy(source: &Path, target: &Path) -> Result<Cost, Error> {
    let failed = || Error::io("copy a file by a socket");
    let (before, began) = (usage::own(), Instant::now());
    let source = File::open(source).map_err(failed())?;
    let (mut sender, mut receiver) = UnixStream::pair().map_err(failed())?;
    let reader = std::thread::spawn(move || -> std::io::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        for number in 0..BYTES / PIECE_BYTES as u64 {
            source.read_exact_at(&mut piece, number * PIECE_BYTES as u64)?;
            sender.write_all(&piece)?;
        }
        Ok(())
    });
    let mut target = File::create_new(target).map_err(failed())?;
    let (mut piece, mut unsynced) = (vec![0; PIECE_BYTES], 0);
    for _ in 0..BYTES / PIECE_BYTES as u64 {
        receiver.read_exact(&mut piece).map_err(failed())?;
        target.write_all(&piece).map_err(failed())?;
        unsynced += PIECE_BYTES as u64;
        if unsynced >= SYNC_BYTES {
            target.sync_data().map_err(failed())?;
            unsynced = 0;
        }
    }
    let read = reader.join().map_err(|_| Error::Failed("the reader panicked".into()))?;
    read.map_err(failed())?;
    Ok(Cost { took: began.elapsed(), cpu: usage::own().saturating_sub(before) })
}
