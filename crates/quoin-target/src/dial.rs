//! Connections to replicas, made on helper threads and handed to the shard when they are proven.

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use quoin_core::VolumeId;
use quoin_core::ids::SessionKey;
use quoin_identity::{Expected, Identity, Role};
use quoin_wire::establish::dial;
use quoin_wire::handshake::ClientSecurity;
use quoin_wire::reactor::Waker;
use quoin_wire::{Connection, Hello, Mode};
use rustls::pki_types::ServerName;

use crate::shard::Input;

/// Handshakes under way at once; further ones wait their turn.
const DIALS_MAX: usize = 64;
const STACK_BYTES: usize = 256 << 10;

/// How replicas are reached.
#[derive(Clone)]
pub enum Reach {
    /// Mutual TLS; the pool must hold the certificate of its name.
    Tls { identity: Identity, mode: Mode },
    /// Unprotected, on the loopback only: tests and benchmarks.
    PlainLoopback,
}

impl Reach {
    fn security(&self, pool: &str) -> Result<ClientSecurity, String> {
        match self {
            Reach::PlainLoopback => Ok(ClientSecurity::PlainLoopback),
            Reach::Tls { identity, mode } => Ok(ClientSecurity::Tls {
                config: identity
                    .client_config(Expected::Named(Role::Pool, pool.to_owned()))
                    .map_err(|e| e.to_string())?,
                // The certificate's holder is checked by role and name, not by host.
                server_name: ServerName::try_from("quoin").expect("a valid name"),
                mode: *mode,
            }),
        }
    }
}

/// One connection to make.
pub struct Dial {
    pub volume: VolumeId,
    pub session: SessionKey,
    pub hello: Hello,
    pub pool: String,
    /// host:port
    pub address: String,
}

#[derive(Clone)]
pub struct Dialler(Arc<Inner>);

struct Inner {
    reach: Mutex<Reach>,
    queue: Mutex<Queue>,
    inputs: Sender<Input>,
    waker: Waker,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Dial>,
    threads: usize,
}

impl Dialler {
    pub fn new(reach: Reach, inputs: Sender<Input>, waker: Waker) -> Self {
        Dialler(Arc::new(Inner {
            reach: Mutex::new(reach),
            queue: Mutex::default(),
            inputs,
            waker,
        }))
    }

    /// Connections from now on are protected like this.
    pub fn set_reach(&self, reach: Reach) {
        *self.0.reach.lock().expect("never held across a panic") = reach;
    }

    /// Says at once that a connection cannot be made.
    pub fn fail(&self, volume: VolumeId, session: SessionKey, why: String) {
        let failed = Input::Dialled { volume, session, pool: String::new(), outcome: Err(why) };
        // Fails only when the shard is gone.
        let _ = self.0.inputs.send(failed);
        self.0.waker.wake();
    }

    /// The outcome comes as [`Input::Dialled`].
    pub fn start(&self, dial: Dial) {
        let mut queue = self.0.queue.lock().expect("never held across a panic");
        queue.waiting.push_back(dial);
        if queue.threads == DIALS_MAX {
            return;
        }
        let inner = self.0.clone();
        let spawned = std::thread::Builder::new()
            .name("dial".into())
            .stack_size(STACK_BYTES)
            .spawn(move || inner.work());
        match spawned {
            Ok(_) => queue.threads += 1,
            Err(error) if queue.threads == 0 => {
                let dial = queue.waiting.pop_back().expect("pushed above");
                drop(queue);
                self.0.done(dial, Err(format!("no thread to connect with: {error}")));
            }
            // A running thread takes it later.
            Err(_) => {}
        }
    }
}

impl Inner {
    fn work(&self) {
        loop {
            let mut queue = self.queue.lock().expect("never held across a panic");
            let Some(dial) = queue.waiting.pop_front() else {
                queue.threads -= 1;
                return;
            };
            drop(queue);
            let outcome = self.connect(&dial);
            self.done(dial, outcome);
        }
    }

    fn connect(&self, to: &Dial) -> Result<Connection, String> {
        let security =
            self.reach.lock().expect("never held across a panic").clone().security(&to.pool)?;
        let addresses: Vec<SocketAddr> = to
            .address
            .to_socket_addrs()
            .map_err(|e| format!("cannot resolve {}: {e}", to.address))?
            .collect();
        let mut last = format!("{} has no address", to.address);
        for address in addresses {
            match dial(&to.pool, address, &security, to.session, &to.hello) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    }

    fn done(&self, dial: Dial, outcome: Result<Connection, String>) {
        let Dial { volume, session, pool, .. } = dial;
        // Fails only when the shard is gone.
        let outcome = outcome.map(Box::new);
        let _ = self.inputs.send(Input::Dialled { volume, session, pool, outcome });
        self.waker.wake();
    }
}
