use super::*;
use crate::disk::fetch::Fetch;
use crate::{FormatOptions, Pool, PoolError, PoolOptions};
use quoin_types::PoolId;

#[test]
fn a_pool_file_is_locked_and_its_troubles_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pool");
    assert!(matches!(FileDisk::open(&path), Err(FileDiskError::Missing { .. })));
    assert!(matches!(FileDisk::open(folder.path()), Err(FileDiskError::System { .. })));
    let too_much = FileDisk::create(&path, 1 << 60, false);
    assert!(matches!(too_much, Err(FileDiskError::NoRoom { .. })), "{too_much:?}");
    assert!(!path.exists(), "nothing half-made stays");

    let disk = FileDisk::create(&path, 128 << 20, true).expect("a sparse file");
    assert!(matches!(FileDisk::open(&path), Err(FileDiskError::Locked { .. })));
    assert!(matches!(FileDisk::open_read_only(&path), Err(FileDiskError::Locked { .. })));
    let again = FileDisk::create(&path, 1 << 20, true);
    assert!(matches!(again, Err(FileDiskError::Exists { .. })));
    let options = FormatOptions::new(PoolId(3));
    Pool::format(&disk, &options).expect("a pool");
    assert!(matches!(Pool::format(&disk, &options), Err(PoolError::NotEmpty)));
    let cookie = disk.cookie();
    let pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    assert_eq!((pool.id(), pool.starts()), (PoolId(3), 2));
    drop(pool);
    let disk = FileDisk::open(&path).expect("unlocked again");
    assert_eq!(disk.cookie(), cookie, "the same boot, the same file");
}

#[test]
fn a_pool_file_is_its_owners_alone_and_one_of_before_is_closed_to_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pool");
    let mode = || std::fs::metadata(&path).expect("the file").permissions().mode() & 0o777;
    let disk = FileDisk::create(&path, 64 << 20, true).expect("a file");
    assert!(mode() == 0o600 && disk.exposed().is_none());
    drop(disk);
    let wide = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(&path, wide).expect("it is ours");
    drop(FileDisk::open_read_only(&path).expect("a tool changes nothing"));
    assert_eq!(mode(), 0o644);
    let disk = FileDisk::open(&path).expect("the file");
    assert_eq!(disk.exposed(), Some(Exposed { mode: 0o644, is_closed: true }));
    assert_eq!(mode(), 0o600);
}

#[test]
fn what_was_written_in_parts_is_read_back_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = FileDisk::create(&folder.path().join("pool"), 64 << 20, true).expect("a file");
    let blocks: Vec<Vec<u8>> = (0..1500u32).map(|i| vec![i as u8; BLOCK_SIZE]).collect();
    let parts: Vec<IoSlice<'_>> = blocks.iter().map(|b| IoSlice::new(b)).collect();
    disk.write_at(8192, &parts).expect("a write of more parts than a call takes");
    let mut buffer = vec![0; 1500 * BLOCK_SIZE];
    disk.read_at(8192, &mut buffer).expect("a read");
    assert_eq!(buffer, blocks.concat());
    assert_eq!(disk.read_at(64 << 20, &mut buffer[..4096]).unwrap_err().errno, 5);
    disk.sync().expect("a sync");
}

#[test]
fn what_waits_for_a_sync_is_read_at_once_and_in_the_file_after_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pool");
    let disk = FileDisk::create(&path, 64 << 20, true).expect("a file");
    let mut expected = vec![0u8; 2 << 20];
    // Buffered neighbours, then pieces of all lengths, over each other too.
    disk.write_at(0, &[IoSlice::new(&[9; BLOCK_SIZE])]).expect("a write");
    expected[..BLOCK_SIZE].fill(9);
    for i in 1..60usize {
        let (block, blocks) = (1 + i * 37 % 300, 1 + i * 29 % 90);
        let bytes = vec![i as u8; blocks * BLOCK_SIZE];
        let at = block * BLOCK_SIZE;
        disk.write_with_sync(at as u64, &[IoSlice::new(&bytes)], 0).expect("a held write");
        expected[at..at + bytes.len()].copy_from_slice(&bytes);
        let mut found = vec![0; expected.len()];
        disk.read_at(0, &mut found).expect("a read");
        assert!(found == expected, "after write {i}");
        let found = disk.read_once(0, expected.len()).expect("a read past the cache");
        assert!(found == expected, "past the cache, after write {i}");
        if i % 7 == 0 {
            disk.syncer()().expect("a sync");
            let on_file = std::fs::read(&path).expect("the file");
            assert!(on_file[..expected.len()] == expected, "after sync {i}");
        }
    }
}

#[test]
fn what_is_made_ready_takes_nothing_from_what_is_written_there_meanwhile() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pool");
    let disk = FileDisk::create(&path, 64 << 20, true).expect("a file");
    let block = |byte: u8| vec![byte; BLOCK_SIZE];
    let at = |block: u64| block * BLOCK_SIZE as u64;
    disk.write_with_sync(0, &[IoSlice::new(&block(1))], 63 * BLOCK_SIZE).expect("a write");
    // By the page cache, before the zeros are on their way.
    disk.write_at(at(5), &[IoSlice::new(&block(2))]).expect("a write");
    disk.sync().expect("a sync");
    disk.write_at(at(6), &[IoSlice::new(&block(3))]).expect("a write");
    disk.write_with_sync(at(1), &[IoSlice::new(&block(4))], 0).expect("a write");
    disk.sync().expect("a sync");
    let on_file = std::fs::read(&path).expect("the file");
    let found: Vec<u8> = (0..8).map(|i| on_file[i * BLOCK_SIZE]).collect();
    assert_eq!(found, [1, 4, 0, 0, 0, 2, 3, 0]);
    disk.write_with_sync(at(100), &[IoSlice::new(&block(1))], 27 * BLOCK_SIZE).expect("one");
    disk.sync().expect("a sync");
    use std::os::unix::fs::MetadataExt;
    let allocated = || std::fs::metadata(&path).expect("the file").blocks() * 512;
    let before = allocated();
    disk.write_with_sync(at(101), &[IoSlice::new(&block(2))], 0).expect("a write");
    disk.sync().expect("a sync");
    assert_eq!(allocated(), before, "the space was there");
}

#[test]
fn a_range_is_made_ready_beside_other_writes_and_is_waited_for_where_the_disk_goes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pool");
    let disk = FileDisk::create(&path, 64 << 20, true).expect("a file");
    assert!(disk.notes_space());
    assert!(disk.make_ready(8 << 20, 4 << 20) && !disk.make_ready(16 << 20, 4 << 20));
    disk.write_with_sync(0, &[IoSlice::new(&[1; BLOCK_SIZE])], 0).expect("a write");
    disk.sync().expect("a sync");
    let done = loop {
        match disk.made_ready() {
            Some(done) => break done,
            None => std::thread::yield_now(),
        }
    };
    assert!(done);
    use std::os::unix::fs::MetadataExt;
    let allocated = || std::fs::metadata(&path).expect("the file").blocks() * 512;
    let before = allocated();
    disk.write_with_sync(10 << 20, &[IoSlice::new(&[2; BLOCK_SIZE])], 0).expect("a write");
    disk.sync().expect("a sync");
    assert_eq!(allocated(), before, "the space was there");
    assert!(disk.make_ready(32 << 20, 4 << 20));
    drop(disk);
    FileDisk::open(&path).expect("nobody has it any more");
}

#[test]
fn space_that_was_not_given_back_is_found_and_gone_once_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = FileDisk::create(&folder.path().join("pool"), 64 << 20, true).expect("a file");
    assert_eq!(disk.next_space(0), None);
    disk.write_at(16 << 20, &[IoSlice::new(&[1; BLOCK_SIZE])]).expect("a write");
    disk.sync().expect("a sync");
    let found = disk.next_space(8 << 20).expect("what was written takes space");
    assert!(disk.gives_back() && (8 << 20..=16 << 20).contains(&found), "{found}");
    disk.discard(8 << 20, 16 << 20);
    assert_eq!(disk.next_space(0), None);
}

#[test]
fn more_than_may_wait_goes_to_the_page_cache() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = FileDisk::create(&folder.path().join("pool"), 64 << 20, true).expect("a file");
    let bytes = vec![3; 1 << 20];
    for i in 0..48u64 {
        disk.write_with_sync(i << 20, &[IoSlice::new(&bytes)], 0).expect("a held write");
    }
    assert!(disk.files.held().waiting_bytes <= HELD_BYTES_MAX + bytes.len());
    let mut found = vec![0; 48 << 20];
    disk.read_at(0, &mut found).expect("a read");
    assert!(found.iter().all(|b| *b == 3));
    disk.sync().expect("a sync");
    assert_eq!(disk.files.held().waiting_bytes, 0);
}

/// Where the file system cannot say what it has cached, a reader reads all of it.
#[test]
fn what_is_not_at_hand_is_read_by_a_reader_and_what_waits_for_a_sync_is_at_hand() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = FileDisk::create(&folder.path().join("pool"), 1 << 20, true).expect("a file");
    let (reader, block) = (disk.reader().expect("it is a file"), BLOCK_SIZE as u64);
    disk.write_at(block, &[IoSlice::new(&[3; BLOCK_SIZE])]).expect("a write");
    disk.sync().expect("a sync");
    disk.write_with_sync(2 * block, &[IoSlice::new(&[4; BLOCK_SIZE])], 0).expect("a write");
    let read = |offset, length: usize| {
        let mut bytes = vec![9; length];
        let is_at_hand = disk.read_now(offset, &mut bytes).expect("a read");
        let late = [false, true]
            .map(|is_once| reader(&Fetch { id: 1, offset, length, is_once }).expect("a read"));
        assert!(late[0] == late[1], "past the cache are the bytes that are in it");
        assert!(!is_at_hand || bytes == late[0], "at hand are the bytes that a reader finds");
        (is_at_hand, late[0].to_vec())
    };
    for is_cached in [true, false] {
        let both = [vec![3; BLOCK_SIZE], vec![4; BLOCK_SIZE]].concat();
        assert_eq!(read(block, 2 * BLOCK_SIZE).1, both, "cached: {is_cached}");
        assert_eq!(read(2 * block, BLOCK_SIZE), (true, vec![4; BLOCK_SIZE]));
        disk.forget_cached(0, 1 << 20);
    }
    let end = disk.size();
    assert_ne!(disk.read_now(end, &mut [0; BLOCK_SIZE]), Ok(true));
    for is_once in [false, true] {
        let behind = Fetch { id: 1, offset: end, length: BLOCK_SIZE, is_once };
        assert!(reader(&behind).is_err(), "there is nothing behind the end");
    }
}

/// udev locks a device for a moment, each time one is closed.
#[test]
fn a_lock_of_the_hosts_tools_is_waited_for_and_one_that_stays_is_told_with_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let tool = File::create(&path).unwrap();
    rustix::fs::flock(&tool, FlockOperation::LockShared).unwrap();
    let ours = File::open(&path).unwrap();
    let lock = FlockOperation::NonBlockingLockExclusive;
    let refused = take_lock(&ours, &path, lock, Duration::from_millis(50)).unwrap_err().to_string();
    assert!(refused.contains(&format!("(process {})", std::process::id())), "{refused}");
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(tool);
    });
    take_lock(&ours, &path, lock, LOCK_WAIT).unwrap();
    ends.join().unwrap();
}
