//! The port by which other nodes use volumes that they share with this one: opened when the first
//! such volume is served here, and not before.

use std::sync::Mutex;

use tokio::sync::{Notify, watch};

/// State of the port.
#[derive(Default)]
pub(crate) struct Shares {
    wanted: watch::Sender<bool>,
    port: Mutex<Option<u16>>,
    opened: Notify,
}

impl Shares {
    /// States whether a volume that other nodes share is served here.
    pub fn want(&self, wanted: bool) {
        self.wanted.send_if_modified(|known| wanted && !std::mem::replace(known, true));
    }

    /// Waits until the port is wanted.
    pub async fn wanted(&self) {
        // The sender lives as long as this.
        let _ = self.wanted.subscribe().wait_for(|wanted| *wanted).await;
    }

    /// Notes that the port is open.
    pub fn open(&self, port: u16) {
        *self.port.lock().expect("never held across a panic") = Some(port);
        self.opened.notify_one();
    }

    /// Waits until the port has just been opened.
    pub async fn opened(&self) {
        self.opened.notified().await;
    }

    /// The port, once it is open.
    pub fn port(&self) -> Option<u16> {
        *self.port.lock().expect("never held across a panic")
    }
}
