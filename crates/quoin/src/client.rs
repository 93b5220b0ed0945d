//! The connection to a cluster's controller, and its refusals in a user's words.

use anyhow::{Context, Result, anyhow, bail};
use quoin_proto::control::cluster_client::ClusterClient;
use quoin_proto::control::{GetVolumeRequest, Volume, VolumeRef};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::transport::Channel;

use crate::output::plain;

/// A client of the admin socket.
pub type Cluster = ClusterClient<Channel>;

/// Messages from the controller are bounded by it; listings of many volumes are long.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Which controller a command talks to.
#[derive(clap::Args, Clone, Debug)]
pub struct ClientOptions {
    /// The controller's admin socket [default: that of `quoin dev`, or of a controller on this
    /// host].
    #[arg(
        long,
        global = true,
        env = "QUOIN_SOCKET",
        value_name = "PATH",
        hide_short_help = true,
        help_heading = "Everywhere"
    )]
    pub socket: Option<PathBuf>,
    /// How long to wait for what a command starts, in seconds; where it says how far that is, only
    /// time in which nothing moves counts.
    #[arg(
        long,
        global = true,
        default_value_t = 60,
        value_name = "SECONDS",
        hide_short_help = true,
        help_heading = "Everywhere"
    )]
    pub timeout: u64,
    /// Where this host's processes keep their sockets, where that is not beside the admin socket.
    #[arg(skip)]
    pub run: Option<PathBuf>,
}

impl ClientOptions {
    /// The socket named, or the first that exists of the usual ones.
    pub fn socket(&self) -> PathBuf {
        if let Some(socket) = &self.socket {
            return socket.clone();
        }
        let usual = usual_admin_sockets();
        let present = usual.iter().find(|path| path.exists());
        present.or(usual.first()).cloned().unwrap_or_default()
    }

    /// Where the processes of this host keep their sockets: as named, or beside the admin socket.
    pub fn run_directory(&self) -> PathBuf {
        if let Some(run) = &self.run {
            return run.clone();
        }
        self.socket().parent().map(Path::to_path_buf).unwrap_or_default()
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Connects, or says which of the usual reasons it fails for.
    pub async fn connect(&self) -> Result<Cluster> {
        connect(&self.socket()).await
    }
}

/// The directory of `quoin dev` where none is named.
pub fn default_root() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/var/lib/quoin-dev".into();
    }
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from);
    data.or(home.map(|home| home.join(".local/share")))
        .unwrap_or_else(|| "/tmp".into())
        .join("quoin-dev")
}

/// Where commands look for a controller, the likeliest first.
fn usual_admin_sockets() -> Vec<PathBuf> {
    vec![default_root().join("run/admin.sock"), "/run/quoin/admin.sock".into()]
}

/// Connects to the admin socket at `path`.
pub async fn connect(path: &Path) -> Result<Cluster> {
    let way_out = "start one with `quoin dev`, or name its socket with --socket or QUOIN_SOCKET";
    if let Err(error) = tokio::net::UnixStream::connect(path).await {
        let shown = path.display();
        let is_socket = || std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused if !is_socket() => {
                bail!("{shown} is no socket, so no controller listens on it: {way_out}")
            }
            std::io::ErrorKind::NotFound => bail!("no controller at {shown}: {way_out}"),
            std::io::ErrorKind::ConnectionRefused => {
                bail!("no controller listens on {shown} any more (its process is gone): {way_out}")
            }
            std::io::ErrorKind::PermissionDenied => {
                bail!("not allowed to use {shown}: run the command as the controller's user (sudo)")
            }
            _ => return Err(error).with_context(|| format!("connect to {shown}: {way_out}")),
        }
    }
    let channel = quoin_identity::unix_channel(path);
    Ok(ClusterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// A refusal of the controller as an error that a person reads: its message, which names the
/// thing, the rule and the way out; the code only where it says more.
pub fn refusal(status: tonic::Status) -> anyhow::Error {
    let message = status.message().trim();
    match status.code() {
        // A status with a source was made here, of a connection that failed; without one it is the
        // controller's own word.
        tonic::Code::Unavailable if std::error::Error::source(&status).is_some() => anyhow!(
            "the controller does not answer ({message}); IO of attached volumes goes on: try again, \
             and look at its log if this stays"
        ),
        _ if message.is_empty() => anyhow!("{}", status.code().description()),
        _ => anyhow!("{message}"),
    }
}

/// A volume as users name it: 32 hex digits are an id, anything else is a name.
pub fn volume_ref(text: &str) -> VolumeRef {
    let is_id = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id {
        // Nobody's id may be a name all the same.
        VolumeRef { id: text.to_ascii_lowercase(), name: text.into() }
    } else {
        VolumeRef { id: String::new(), name: text.into() }
    }
}

/// A volume that was found: by its id alone, which may be nobody's by now, and is no name then.
pub fn id_ref(id: &str) -> VolumeRef {
    VolumeRef { id: id.into(), name: String::new() }
}

/// The volume of that name or id.
pub async fn get_volume(cluster: &mut Cluster, name: &str) -> Result<Volume> {
    let request = GetVolumeRequest { volume: Some(volume_ref(name)) };
    match cluster.get_volume(request).await {
        Ok(volume) => Ok(volume.into_inner()),
        Err(status) if status.code() == tonic::Code::NotFound => {
            bail!(
                "there is no volume `{}`: `quoin volume list` shows those that exist",
                plain(name)
            )
        }
        Err(status) => Err(refusal(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_two_hex_digits_are_an_id_and_all_else_is_a_name() {
        assert_eq!(volume_ref("DB").name, "DB");
        let id = "0123456789ABCDEF0123456789abcdef";
        assert_eq!(volume_ref(id).id, id.to_ascii_lowercase());
        assert_eq!(volume_ref("0123").name, "0123");
    }

    #[tokio::test]
    async fn a_missing_socket_and_one_left_by_a_dead_process_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("admin.sock");
        let message = connect(&path).await.unwrap_err().to_string();
        assert!(message.contains("no controller at") && message.contains("quoin dev"), "{message}");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let message = connect(&path).await.unwrap_err().to_string();
        assert!(message.contains("process is gone") && message.contains("--socket"), "{message}");
        let letter = directory.path().join("letter");
        std::fs::write(&letter, "dear").unwrap();
        let message = connect(&letter).await.unwrap_err().to_string();
        assert!(message.contains("no socket"), "{message}");
    }
}
