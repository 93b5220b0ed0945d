//! Devices whose volume the records have detached from this host, and devices that wait for IO while
//! the process that serves them works on them. These tests need root, FUSE and loop devices, and
//! report it if they are missing.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::daemon::{Bound, Daemon, Killable, SIZE, asked, blocking, have_requirements};
use quoin_attach::protocol::{DetachedHere, Kind};
use quoin_attach::{AttachClient, Error, Options, run};
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};
use tokio::sync::watch;

fn detached(asked: u64) -> DetachedHere {
    DetachedHere { volume: "17".into(), asked, why: "detached from this host".into() }
}

async fn number(client: &AttachClient) -> u64 {
    client.usage().await.unwrap()[0].asked
}

/// States it every 100 ms until the device is as it should be.
async fn state_until(client: &AttachClient, asked: u64, is_so: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", client.usage().await);
        client.detached(detached(asked)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Leaves a write to the kernel, which is not answered before the device is closed.
fn write_behind(device: &Path) -> std::thread::JoinHandle<()> {
    let file = OpenOptions::new().write(true).open(device).unwrap();
    file.write_all_at(&[7; 1 << 20], 0).unwrap();
    std::thread::spawn(move || drop(file))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_of_a_detached_volume_goes_where_nobody_has_it_and_fails_its_io_where_one_has() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let client = &daemon.client;

    // A device without users.
    let device = client.attach(asked("17", &socket)).await.unwrap().device;
    let bound = Bound::of(&device);
    let first = number(client).await;
    state_until(client, first, async || client.list().await.unwrap().is_empty()).await;
    assert!(!bound.is_left());

    // Asked for again, it is another use: what was said of the former one has no effect.
    let device = client.attach(asked("17", &socket)).await.unwrap().device;
    let bound = Bound::of(&device);
    client.detached(detached(first)).await.unwrap();
    client.attach(asked("17", &socket)).await.unwrap();
    let now = number(client).await;
    client.detached(detached(now - 1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(bound.is_left());

    // A program waits for IO that no target will answer.
    let waits = {
        let file = OpenOptions::new().write(true).open(&device).unwrap();
        blocking(move || server.stop()).await;
        std::thread::spawn(move || {
            let began = Instant::now();
            file.write_all_at(&[1; 4096], 0).unwrap();
            let error = file.sync_all().unwrap_err();
            (error.raw_os_error(), began.elapsed())
        })
    };
    while client.list().await.unwrap()[0].in_flight == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    state_until(client, now, async || client.list().await.unwrap().is_empty()).await;
    let (error, after) = blocking(move || waits.join().unwrap()).await;
    assert_eq!(error, Some(libc::EIO));
    assert!(after > Duration::from_secs(3), "it had no time to be attached again: {after:?}");
    assert!(!bound.is_left());
    daemon.stop().await.unwrap();
}

/// The kernel keeps a thread that waits for its own process, and with it the lock of the directory.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_while_its_device_waits_for_io_is_replaced() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let run_directory = directory.path().canonicalize().unwrap().join("attach");
    let Killable { process: mut killed, client } = Killable::start(&run_directory).await;
    let device = client.attach(asked("17", &socket)).await.unwrap().device;
    blocking(move || server.stop()).await;
    let closes = write_behind(&device);
    while client.list().await.unwrap()[0].in_flight == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The calls that open the device, each of which the other program's close holds up.
    let began = Instant::now();
    let refused = client.detach("17").await;
    assert!(matches!(refused, Err(Error::Refused { kind: Kind::Busy, .. })), "{refused:?}");
    assert!(refused.unwrap_err().to_string().contains("waits for the IO"));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let again = client.detach("17");
    let _ = tokio::time::timeout(Duration::from_millis(300), again).await;

    killed.kill().unwrap();
    let began = Instant::now();
    let daemon = loop {
        let (_shutdown, watched) = watch::channel(false);
        let trial = tokio::spawn(run(Options::new(&run_directory), watched));
        let listens = async {
            while client.list().await.is_err() && !trial.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        listens.await;
        if !trial.is_finished() {
            break (trial, _shutdown);
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", trial.await);
    };
    blocking(move || closes.join().unwrap()).await;
    blocking(move || killed.wait().unwrap()).await;
    daemon.1.send(true).unwrap();
    daemon.0.await.unwrap().unwrap();
}
