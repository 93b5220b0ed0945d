//! A disk that fails on demand: a file served through FUSE, whose syncs are refused or stall while
//! its reads and writes reach the file below. Needs root.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use quoin_attach::fuse::Mount;
use quoin_attach::fuse::filesystem::{Answer, Filesystem, IO_BYTES_MAX, Outcome};
use quoin_nbd::client::RequestError;
use quoin_types::block::{Operation, Payload};
use rustix::fs::OFlags;

const EIO: u32 = 5;
/// The kernel's request for free space.
const STATFS: u32 = 17;
const MESSAGE_BYTES_MAX: usize = IO_BYTES_MAX + 8192;

/// Faults from now on.
#[derive(Default)]
struct Faults {
    syncs: AtomicU64,
    /// One sync in so many is refused; 0: none.
    refuses_one_in: AtomicU64,
    /// Stall of the next sync; 0: none.
    stalls_for_ms: AtomicU64,
}

/// A mounted file with faults on demand; unmounted when dropped.
pub struct FaultyDisk {
    faults: Arc<Faults>,
    mount: Option<Mount>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FaultyDisk {
    /// Serves `below` as the file `path`.
    pub fn serve(path: &Path, below: &Path) -> Self {
        let below = File::options().read(true).write(true).open(below).unwrap();
        let size = below.metadata().unwrap().len();
        let (mount, device) = Mount::new(path, "faulty").unwrap();
        // Blocking reads: the thread waits for nothing else.
        rustix::fs::fcntl_setfl(&device, OFlags::empty()).unwrap();
        let faults = Arc::new(Faults::default());
        let served = Arc::new(Served {
            filesystem: Mutex::new(Filesystem::new(size, 4096, false)),
            device,
            below,
            faults: faults.clone(),
        });
        let thread = std::thread::spawn(move || served.run());
        Self { faults, mount: Some(mount), thread: Some(thread) }
    }

    pub fn refuse_syncs(&self, one_in: u64) {
        self.faults.refuses_one_in.store(one_in, Ordering::SeqCst);
    }

    pub fn stall_a_sync(&self, time: Duration) {
        self.faults.stalls_for_ms.store(time.as_millis() as u64, Ordering::SeqCst);
    }
}

impl Drop for FaultyDisk {
    fn drop(&mut self) {
        if let Some(mount) = self.mount.take() {
            let _ = mount.unmount();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Served {
    filesystem: Mutex<Filesystem>,
    device: OwnedFd,
    below: File,
    faults: Arc<Faults>,
}

impl Served {
    /// Serves until the kernel reports that it is unmounted.
    fn run(self: Arc<Self>) {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match rustix::io::read(&self.device, &mut message[..]) {
                Ok(length) if is_about_room(&message[..length]) => self.answer(&room(&message)),
                Ok(length) => {
                    let outcome = self.filesystem.lock().unwrap().message(&message[..length]);
                    self.follow(outcome);
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT) => {}
                Err(_) => return,
            }
        }
    }

    fn follow(self: &Arc<Self>, mut outcome: Outcome) {
        loop {
            match outcome {
                Outcome::Nothing => return,
                Outcome::Answer(answer) => return self.answer(&answer),
                Outcome::Submit { token, operation: Operation::Flush } => {
                    // All other requests are answered meanwhile.
                    let served = self.clone();
                    std::thread::spawn(move || {
                        let result = served.sync();
                        let done = served.filesystem.lock().unwrap().complete(token, result);
                        served.follow(done);
                    });
                    return;
                }
                Outcome::Submit { token, operation } => {
                    let result = self.carry_out(&operation).map_err(refusal);
                    outcome = self.filesystem.lock().unwrap().complete(token, result);
                }
            }
        }
    }

    fn sync(&self) -> Result<Payload, RequestError> {
        let stall = self.faults.stalls_for_ms.swap(0, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(stall));
        let count = self.faults.syncs.fetch_add(1, Ordering::SeqCst) + 1;
        let one_in = self.faults.refuses_one_in.load(Ordering::SeqCst);
        if one_in > 0 && count.is_multiple_of(one_in) {
            return Err(RequestError::Refused(EIO));
        }
        self.below.sync_data().map(|()| Payload::None).map_err(refusal)
    }

    fn carry_out(&self, operation: &Operation) -> std::io::Result<Payload> {
        match operation {
            Operation::Read { offset, length } => {
                let mut bytes = vec![0; *length as usize];
                self.below.read_exact_at(&mut bytes, *offset)?;
                Ok(Payload::Data(vec![Bytes::from(bytes)]))
            }
            Operation::Write { offset, data, .. } => {
                self.below.write_all_at(data, *offset)?;
                Ok(Payload::None)
            }
            Operation::WriteZeroes { offset, length, .. }
            | Operation::Trim { offset, length, .. } => {
                self.below.write_all_at(&vec![0; *length as usize], *offset)?;
                Ok(Payload::None)
            }
            Operation::Flush | Operation::Status { .. } => {
                Err(std::io::Error::from_raw_os_error(EIO as i32))
            }
        }
    }

    fn answer(&self, answer: &Answer) {
        let mut slices = vec![IoSlice::new(&answer.head)];
        slices.extend(answer.data.iter().map(|data| IoSlice::new(data)));
        // The caller may be gone.
        let _ = rustix::io::writev(&self.device, &slices);
    }
}

fn is_about_room(message: &[u8]) -> bool {
    message.len() >= 16 && message[4..8] == STATFS.to_ne_bytes()
}

/// Answers with free space, which a file system has and a volume's one file has not.
fn room(message: &[u8]) -> Answer {
    const BYTES: usize = 80;
    let mut head = Vec::new();
    head.extend((16 + BYTES as u32).to_ne_bytes());
    head.extend(0i32.to_ne_bytes());
    head.extend(&message[8..16]);
    let blocks: u64 = 1 << 24;
    [blocks, blocks, blocks, 1, 1].iter().for_each(|n| head.extend(n.to_ne_bytes()));
    [4096u32, 255, 4096].iter().for_each(|n| head.extend(n.to_ne_bytes()));
    head.resize(16 + BYTES, 0);
    Answer { head: Bytes::from(head), data: Vec::new() }
}

fn refusal(_: std::io::Error) -> RequestError {
    RequestError::Refused(EIO)
}
