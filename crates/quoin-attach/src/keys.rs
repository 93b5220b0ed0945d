//! Keys of encrypted volumes, handed to their target whenever it lost them.
//!
//! A target keeps keys in memory only and serves no encrypted volume without one. One that was
//! restarted therefore leaves the connection of its devices down until it is handed their keys: by
//! this daemon, which got them with the request to attach and whose holder keeps them beyond its
//! own death.

use std::path::PathBuf;
use std::time::Duration;

use quoin_encryption::DataKey;
use quoin_encryption::handing::{SOCKET, hand_over};

use super::daemon::Daemon;

const LOOK: Duration = Duration::from_millis(250);

/// A key that a target may lack.
pub(super) struct ToHand {
    pub volume: String,
    pub nbd_socket: PathBuf,
    pub key: DataKey,
}

/// Hands keys over while the daemon runs.
pub(super) async fn keep_handing(daemon: Daemon) {
    loop {
        for ToHand { volume, nbd_socket, key } in daemon.keys_to_hand() {
            // A target that is away, or that does not know the volume yet, is asked again.
            if let Err(error) = hand_over(&nbd_socket.with_file_name(SOCKET), &volume, &key).await {
                tracing::debug!(volume, %error, "the target did not take the volume's key");
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}
