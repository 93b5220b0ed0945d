//! The attach daemon on this kernel: FUSE, loop, a real file system, and a server that dies during
//! IO. These tests need root and both devices, and report it if they are missing.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::daemon::{Bound, Daemon, Killable, SIZE, asked, blocking, have_requirements, sh};
use quoin_attach::fuse::mount::mounts_under;
use quoin_attach::loopdev::LoopDevice;
use quoin_attach::protocol::{AttachVolume, Kind};
use quoin_attach::{Error, Options, run};
use quoin_testkit::have;
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};
use tokio::sync::watch;

#[tokio::test(flavor = "multi_thread")]
async fn attach_is_idempotent_and_detach_leaves_nothing() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let _server = Server::start(&socket, memory.clone(), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;

    let first = daemon.client.attach(asked("db", &socket)).await.unwrap();
    let again = daemon.client.attach(asked("db", &socket)).await.unwrap();
    assert_eq!(first.device, again.device);
    assert_eq!(daemon.client.list().await.unwrap().len(), 1);
    let other = AttachVolume { read_only: true, ..asked("db", &socket) };
    let refused = daemon.client.attach(other).await;
    assert!(matches!(refused, Err(Error::Refused { kind: Kind::Conflict, .. })), "{refused:?}");

    let device = first.device.clone();
    blocking(move || {
        let file = OpenOptions::new().read(true).write(true).open(&device).unwrap();
        file.write_all_at(&[0xa5; 8192], 4096).unwrap();
        file.sync_all().unwrap();
        let sysfs = Path::new("/sys/block").join(device.file_name().unwrap());
        let read = |name: &str| std::fs::read_to_string(sysfs.join(name)).unwrap();
        assert_eq!(read("queue/logical_block_size").trim(), "4096");
        assert_eq!(read("loop/dio").trim(), "1");
        assert_eq!(read("size").trim(), (SIZE / 512).to_string());
        assert_ne!(read("queue/discard_max_bytes").trim(), "0");
    })
    .await;
    assert_eq!(memory.lock().unwrap().bytes()[4096..12288], [0xa5; 8192]);
    assert!(memory.lock().unwrap().flushes > 0);

    let bound = Bound::of(&first.device);
    daemon.client.detach("db").await.unwrap();
    daemon.client.detach("db").await.unwrap();
    assert!(daemon.client.list().await.unwrap().is_empty());
    assert!(!bound.is_left());
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_survives_crashes_of_its_server_and_its_trims_free_space() {
    if !have_requirements() || !have("fstrim") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let mut server = Server::start(&socket, memory.clone(), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let device = daemon.client.attach(asked("db", &socket)).await.unwrap().device;
    let mounted = directory.path().join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let (dev, mnt) = (device.display().to_string(), mounted.display().to_string());
    let command = format!("mkfs.ext4 -q -E nodiscard {dev} && mount {dev} {mnt}");
    blocking(move || sh(&command)).await;

    let busy = daemon.client.detach("db").await;
    assert!(matches!(busy, Err(Error::Refused { kind: Kind::Busy, .. })), "{busy:?}");

    let (stop, synced) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (stop, synced, mounted) = (stop.clone(), synced.clone(), mounted.clone());
        std::thread::spawn(move || {
            let path = mounted.join("load");
            let mut file =
                OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
            let mut number = 0u64;
            while !stop.load(Ordering::SeqCst) {
                let block = vec![(number % 251) as u8; 64 << 10];
                file.seek(SeekFrom::Start(number % 128 * (64 << 10))).unwrap();
                file.write_all(&block).unwrap();
                file.sync_all().unwrap();
                number += 1;
                synced.store(number, Ordering::SeqCst);
            }
            number
        })
    };
    for _ in 0..5 {
        let status_shared = synced.load(Ordering::SeqCst);
        while synced.load(Ordering::SeqCst) < status_shared + 30 {
            assert!(!writer.is_finished(), "the application got an error");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (path, memory) = (socket.clone(), memory.clone());
        server = blocking(move || {
            server.stop();
            Server::start(&path, memory, ServerOptions::default())
        })
        .await;
    }
    stop.store(true, Ordering::SeqCst);
    let written = blocking(|| writer.join().unwrap()).await;

    let mnt = mounted.display().to_string();
    let commands = mnt.clone();
    let path = mounted.join("load");
    blocking(move || {
        sh(&format!("echo 3 > /proc/sys/vm/drop_caches; sync -f {commands}"));
        let mut back = Vec::new();
        std::fs::File::open(&path).unwrap().read_to_end(&mut back).unwrap();
        for number in written.saturating_sub(128)..written {
            let at = (number % 128) as usize * (64 << 10);
            assert!(back[at..at + (64 << 10)].iter().all(|byte| *byte == (number % 251) as u8));
        }
    })
    .await;
    let before = memory.lock().unwrap().allocated_bytes();
    let commands = format!("rm {mnt}/load; sync -f {mnt}; fstrim {mnt}");
    blocking(move || sh(&commands)).await;
    let after = memory.lock().unwrap().allocated_bytes();
    assert!(after + (6 << 20) < before, "trim freed no blocks: {before} before, {after} after");

    let commands = format!("umount {mnt} && fsck.ext4 -fn {}", device.display());
    blocking(move || sh(&commands)).await;
    daemon.client.detach("db").await.unwrap();
    daemon.stop().await.unwrap();
    drop(server);
}

/// Checks a device without users until its last IO is long enough ago.
async fn until_idle(daemon: &Daemon) {
    let start = Instant::now();
    while daemon.client.usage().await.unwrap()[0].in_use {
        assert!(start.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unopened_device_is_in_use_for_a_while_after_io_and_not_after_a_stat() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let _server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let file = AttachVolume { file_only: true, ..asked("db", &socket) };
    let path = daemon.client.attach(file).await.unwrap().device;
    until_idle(&daemon).await;

    let at = path.clone();
    blocking(move || assert_eq!(std::fs::metadata(at).unwrap().len(), SIZE)).await;
    assert!(!daemon.client.usage().await.unwrap()[0].in_use, "reading the size is no IO");

    let at = path.clone();
    blocking(move || {
        let file = OpenOptions::new().write(true).open(at).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
    })
    .await;
    assert!(daemon.client.usage().await.unwrap()[0].in_use);
    let first_seen = Instant::now();
    until_idle(&daemon).await;
    assert!(first_seen.elapsed() > Duration::from_secs(1), "{:?}", first_seen.elapsed());
    daemon.client.detach("db").await.unwrap();
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grown_volume_grows_its_device_and_never_shrinks() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let server = Server::start(&socket, memory.clone(), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let device = daemon.client.attach(asked("db", &socket)).await.unwrap().device;
    let early = daemon.client.resize("db", 2 * SIZE).await;
    assert!(matches!(early, Err(Error::Refused { kind: Kind::Unavailable, .. })), "{early:?}");
    memory.lock().unwrap().grow(2 * SIZE as usize);
    blocking(move || server.stop()).await;
    let _server = Server::start(&socket, memory.clone(), ServerOptions::default());
    assert_eq!(daemon.client.resize("db", 2 * SIZE).await.unwrap().size, 2 * SIZE);
    blocking(move || {
        let mut file = OpenOptions::new().write(true).read(true).open(&device).unwrap();
        assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 2 * SIZE);
        file.write_all_at(&[1; 4096], 2 * SIZE - 4096).unwrap();
        file.sync_all().unwrap();
    })
    .await;
    assert_eq!(memory.lock().unwrap().bytes()[2 * SIZE as usize - 1], 1);
    let shrink = daemon.client.resize("db", SIZE).await;
    assert!(matches!(shrink, Err(Error::Refused { kind: Kind::Invalid, .. })), "{shrink:?}");
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_names_a_device_in_use_and_leaves_nothing_after_its_last_user() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let _server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let device = daemon.client.attach(asked("db", &socket)).await.unwrap().device;
    daemon.client.attach(asked("idle", &socket)).await.unwrap();
    let mounted = directory.path().join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let (dev, mnt) = (device.display().to_string(), mounted.display().to_string());
    let commands = format!("mkfs.ext4 -q {dev} && mount {dev} {mnt} && sync -f {mnt}");
    blocking(move || sh(&commands)).await;
    let error = daemon.stop().await.unwrap_err();
    assert!(error.to_string().contains(&device.display().to_string()), "{error}");
    blocking(move || sh(&format!("umount {}", mounted.display()))).await;
    let device = LoopDevice::at(device);
    while device.backing_file().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_target_does_not_return_can_be_detached() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let request = AttachVolume { file_only: true, ..asked("db", &socket) };
    let file = daemon.client.attach(request).await.unwrap().device;
    blocking(move || server.stop()).await;
    let reader = std::thread::spawn(move || {
        let mut block = [0; 4096];
        std::fs::File::open(file).unwrap().read_exact(&mut block)
    });
    while daemon.client.list().await.unwrap()[0].in_flight == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!daemon.client.list().await.unwrap()[0].connected);
    assert!(!reader.is_finished(), "the request is held and has not failed");
    daemon.client.detach("db").await.unwrap();
    let error = blocking(|| reader.join().unwrap()).await.unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOTCONN | libc::ECONNABORTED)));
    daemon.stop().await.unwrap();
}

/// Descriptors of this process that are connections to the kernel's file systems in programs.
fn connections() -> Vec<std::os::fd::OwnedFd> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    let is_fuse = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target == Path::new("/dev/fuse"))
    };
    let numbers = all.filter(is_fuse).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let copies = numbers.filter_map(|number: i32| {
        // SAFETY: the number is of a descriptor that was open; where it is not any more, this fails.
        let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
        // SAFETY: the copy is new, so this is its only owner.
        (copy >= 0).then(|| unsafe { std::os::fd::FromRawFd::from_raw_fd(copy) })
    });
    copies.collect()
}

/// A child has copies of all descriptors until its program begins, and closes those of files one by one.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_detached_volume_fails_though_a_copy_of_its_connection_is_open() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let _server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let request = AttachVolume { file_only: true, ..asked("db", &socket) };
    let path = daemon.client.attach(request).await.unwrap().device;
    let copies = connections();
    assert!(!copies.is_empty());
    let mut file = blocking(move || std::fs::File::open(path).unwrap()).await;
    daemon.client.detach("db").await.unwrap();
    let reading = blocking(move || {
        let read = file.read_exact(&mut [0; 4096]);
        drop(file);
        read
    });
    let read = tokio::time::timeout(Duration::from_secs(30), reading).await;
    drop(copies);
    let error = read.expect("nobody answers the read").unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOTCONN | libc::ECONNABORTED)));
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_request_is_refused_with_its_reason_and_leaves_nothing() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let _server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let kind = |result: Result<_, Error>| match result {
        Err(Error::Refused { kind, .. }) => kind,
        other => panic!("{other:?}"),
    };
    let big = AttachVolume { size: 2 * SIZE, ..asked("db", &socket) };
    assert_eq!(kind(daemon.client.attach(big).await), Kind::Unavailable);
    let fine = AttachVolume { block_size: 512, ..asked("db", &socket) };
    assert_eq!(kind(daemon.client.attach(fine).await), Kind::Invalid);
    let gone = asked("db", &directory.path().join("none.sock"));
    assert_eq!(kind(daemon.client.attach(gone).await), Kind::Unavailable);
    assert_eq!(kind(daemon.client.attach(asked("../db", &socket)).await), Kind::Invalid);
    assert_eq!(kind(daemon.client.resize("db", SIZE).await), Kind::Invalid);
    assert!(mounts_under(&daemon.directory).unwrap().is_empty());

    let mut stream =
        std::os::unix::net::UnixStream::connect(daemon.directory.join("attach.sock")).unwrap();
    stream.write_all(b"nonsense\n").unwrap();
    stream.write_all(&vec![b'x'; 80 << 10]).unwrap();
    let answers = blocking(move || {
        let mut text = String::new();
        // The daemon closes while sent bytes are unread, which resets the connection.
        let _ = stream.read_to_string(&mut text);
        text
    })
    .await;
    assert!(answers.lines().next().unwrap().contains("not a request"), "{answers}");

    let second = run(Options::new(&daemon.directory), watch::channel(false).1).await;
    assert!(matches!(second, Err(Error::Locked { .. })), "{second:?}");
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_start_removes_what_a_killed_daemon_left() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let _server = Server::start(&socket, memory.clone(), ServerOptions::default());
    let run_directory = directory.path().canonicalize().unwrap().join("attach");
    let Killable { process: mut killed, client } = Killable::start(&run_directory).await;
    let device = client.attach(asked("db", &socket)).await.unwrap().device;
    let open = device.clone();
    blocking(move || {
        let file = OpenOptions::new().write(true).open(open).unwrap();
        file.write_all_at(&[3; 4096], 0).unwrap();
        file.sync_all().unwrap();
    })
    .await;
    blocking(move || {
        killed.kill().unwrap();
        killed.wait().unwrap()
    })
    .await;
    assert_eq!(
        mounts_under(&run_directory).unwrap().len(),
        1,
        "the killed daemon left nothing to clean up"
    );
    assert!(LoopDevice::at(device.clone()).backing_file().is_some());

    let daemon = Daemon::start(&run_directory).await;
    assert!(mounts_under(&run_directory).unwrap().is_empty());
    assert!(LoopDevice::list_under(&run_directory).unwrap().is_empty());
    let device = daemon.client.attach(asked("db", &socket)).await.unwrap().device;
    let mut block = vec![0; 4096];
    blocking(move || {
        std::fs::File::open(device).unwrap().read_exact(&mut block).unwrap();
        assert_eq!(block, [3; 4096]);
    })
    .await;
    daemon.stop().await.unwrap();
}
