//! A volume in memory, and a server that offers it on a unix socket through the real session.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use bytes::{Bytes, BytesMut};
use quoin_nbd::{Description, Limits, Numbering, Session, TlsPolicy, VolumeExport};
use quoin_types::block::{
    BlockError, DeviceInfo, Frontend, Operation, Payload, Reply, Request, StatusExtent,
};

const BLOCK: usize = 4096;

/// A volume that knows which of its blocks are holes.
pub struct MemoryVolume {
    bytes: Vec<u8>,
    data: Vec<bool>,
    pub flushes: u64,
    pub trims: u64,
    pub writes: u64,
}

impl MemoryVolume {
    pub fn new(size_bytes: usize) -> Self {
        Self {
            bytes: vec![0; size_bytes],
            data: vec![false; size_bytes.div_ceil(BLOCK)],
            flushes: 0,
            trims: 0,
            writes: 0,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn grow(&mut self, size_bytes: usize) {
        self.bytes.resize(size_bytes, 0);
        self.data.resize(size_bytes.div_ceil(BLOCK), false);
    }

    pub fn allocated_bytes(&self) -> usize {
        self.data.iter().filter(|data| **data).count() * BLOCK
    }

    pub fn apply(&mut self, operation: &Operation) -> Result<Payload, BlockError> {
        match operation {
            Operation::Read { offset, length } => {
                let (start, end) = self.range(*offset, u64::from(*length))?;
                // Two chunks, as a target that reads from two places gives them.
                let middle = start + (end - start) / 2;
                Ok(Payload::Data(vec![
                    Bytes::copy_from_slice(&self.bytes[start..middle]),
                    Bytes::copy_from_slice(&self.bytes[middle..end]),
                ]))
            }
            Operation::Write { offset, data, .. } => {
                let (start, end) = self.range(*offset, data.len() as u64)?;
                self.bytes[start..end].copy_from_slice(data);
                self.data[start / BLOCK..end.div_ceil(BLOCK)].fill(true);
                self.writes += 1;
                Ok(Payload::None)
            }
            Operation::Flush => {
                self.flushes += 1;
                Ok(Payload::None)
            }
            Operation::Trim { offset, length, .. } => {
                self.trims += 1;
                self.zero(*offset, *length, false)
            }
            Operation::WriteZeroes { offset, length, no_hole, .. } => {
                if !no_hole {
                    self.trims += 1;
                }
                self.zero(*offset, *length, *no_hole)
            }
            Operation::Status { offset, length } => {
                let (start, end) = self.range(*offset, *length)?;
                let extents = (start..end).step_by(512).map(|at| StatusExtent {
                    length: 512.min(end - at) as u64,
                    hole: !self.data[at / BLOCK],
                });
                Ok(Payload::Status(extents.collect()))
            }
        }
    }

    fn zero(&mut self, offset: u64, length: u64, keep: bool) -> Result<Payload, BlockError> {
        let (start, end) = self.range(offset, length)?;
        self.bytes[start..end].fill(0);
        if keep {
            self.data[start / BLOCK..end.div_ceil(BLOCK)].fill(true);
        } else if end / BLOCK > start.div_ceil(BLOCK) {
            self.data[start.div_ceil(BLOCK)..end / BLOCK].fill(false);
        }
        Ok(Payload::None)
    }

    fn range(&self, offset: u64, length: u64) -> Result<(usize, usize), BlockError> {
        let end = offset.checked_add(length).ok_or(BlockError::OutOfRange)?;
        if end > self.bytes.len() as u64 {
            return Err(BlockError::OutOfRange);
        }
        Ok((offset as usize, end as usize))
    }
}

pub type Volume = Arc<Mutex<MemoryVolume>>;

pub fn volume(size_bytes: usize) -> Volume {
    Arc::new(Mutex::new(MemoryVolume::new(size_bytes)))
}

/// How the server treats its clients.
#[derive(Clone)]
pub struct ServerOptions {
    pub name: String,
    pub block_size: u32,
    pub read_only: bool,
    pub policy: TlsPolicy,
    /// Which use of the volume this is.
    pub since_epoch: u64,
    /// Numbering that the server asks of its clients.
    pub numbering: Numbering,
    /// Every n-th batch of replies is swallowed and the connection cut; 0: never.
    pub cut_every: u64,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            name: "vol".into(),
            block_size: 4096,
            read_only: false,
            policy: TlsPolicy::Plain,
            since_epoch: 0,
            numbering: Numbering::default(),
            cut_every: 0,
        }
    }
}

/// Serves a volume until stopped; stopping cuts every connection where it stands.
pub struct Server {
    pub path: PathBuf,
    stop: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(path: &Path, volume: Volume, options: ServerOptions) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (stopped, all) = (stop.clone(), connections.clone());
        let thread = std::thread::spawn(move || {
            let batches = Arc::new(AtomicU64::new(0));
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                all.lock().unwrap().push(stream.try_clone().unwrap());
                let (volume, options, batches) = (volume.clone(), options.clone(), batches.clone());
                threads.push(std::thread::spawn(move || {
                    let ours = stream.try_clone().unwrap();
                    serve(stream, &volume, &options, &batches);
                    // The list above holds a copy, so dropping alone would not close it.
                    let _ = ours.shutdown(std::net::Shutdown::Both);
                }));
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
        Self { path: path.to_owned(), stop, connections, thread: Some(thread) }
    }

    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        thread.join().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.halt();
    }
}

/// Drives one session over a blocking stream, as the trait's documentation asks.
pub fn serve<S: Read + Write>(
    mut stream: S,
    volume: &Volume,
    options: &ServerOptions,
    batches: &AtomicU64,
) {
    let size_bytes = volume.lock().unwrap().bytes.len() as u64;
    let info = DeviceInfo {
        name: options.name.clone(),
        size_bytes,
        block_size: options.block_size,
        read_only: options.read_only,
    };
    let description = Description { since_epoch: options.since_epoch };
    let export = VolumeExport { device: info, description, numbering: options.numbering };
    let mut session = Session::over(Box::new(export), options.policy.clone(), Limits::default());
    let (mut input, mut output) = (BytesMut::new(), Vec::new());
    let mut buffer = vec![0; 256 << 10];
    loop {
        let mut requests: Vec<Request> = Vec::new();
        let closed = session.receive(&mut input, &mut requests, &mut output).is_err();
        let again = !session.wants_input();
        // Last first: replies need not come in the order of the requests.
        for request in requests.into_iter().rev() {
            let result = volume.lock().unwrap().apply(&request.operation);
            session.complete(Reply { token: request.token, result }, &mut output);
        }
        if !output.is_empty() && options.cut_every > 0 {
            let batch = batches.fetch_add(1, Ordering::SeqCst) + 1;
            if batch.is_multiple_of(options.cut_every) {
                return;
            }
        }
        if !output.is_empty() && stream.write_all(&output.concat()).is_err() {
            return;
        }
        output.clear();
        if closed {
            return;
        }
        if again {
            continue;
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(read) => input.extend_from_slice(&buffer[..read]),
        }
    }
}
