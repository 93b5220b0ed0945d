//! The connection to a cluster's controller, and its refusals in a user's words.

use anyhow::{Context, Result, anyhow, bail};
use clap_complete::ArgValueCandidates;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::{GetVolumeRequest, Volume, VolumeRef};
use quoin_identity::TermChannel;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::contexts::{self, Contexts};
use crate::output::plain;

/// A client of the controller; a former controller is refused.
pub type Cluster = ClusterClient<TermChannel>;

/// Messages from the controller are bounded by it; listings of many volumes are long.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Which controller a command talks to.
#[derive(clap::Args, Clone, Debug)]
pub struct ClientOptions {
    /// The controller's admin socket [default: that of `quoin dev`, or of a controller on this
    /// host; where there is none, the current context].
    #[arg(
        long,
        global = true,
        env = "QUOIN_SOCKET",
        value_name = "PATH",
        hide_short_help = true,
        help_heading = "Everywhere"
    )]
    pub socket: Option<PathBuf>,
    /// The context that leads to the controller, as `quoin context list` shows it; QUOIN_CONTEXT
    /// names one too, where no socket is named. `quoin cluster join` makes one.
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        add = ArgValueCandidates::new(contexts::candidates),
        hide_short_help = true,
        help_heading = "Everywhere"
    )]
    pub context: Option<String>,
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

/// How a command comes to its controller.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Route {
    Socket(PathBuf),
    Context(String),
    /// Neither was named, and there is none.
    Unknown,
}

impl ClientOptions {
    /// The way to the controller of a command without flags.
    pub fn of_environment() -> Self {
        let socket = std::env::var_os("QUOIN_SOCKET").filter(|socket| !socket.is_empty());
        Self { socket: socket.map(PathBuf::from), context: None, timeout: 1, run: None }
    }

    /// Named ways come first, then a socket of this host, then the current context.
    fn route(&self) -> Route {
        if let Some(context) = &self.context {
            return Route::Context(context.clone());
        }
        if let Some(socket) = &self.socket {
            return match context_of_address(socket) {
                Some(context) => Route::Context(context),
                None => Route::Socket(socket.clone()),
            };
        }
        if let Some(context) = std::env::var("QUOIN_CONTEXT").ok().filter(|name| !name.is_empty()) {
            return Route::Context(context);
        }
        if let Some(present) = usual_admin_sockets().into_iter().find(|path| path.exists()) {
            return Route::Socket(present);
        }
        let current = Contexts::of_user().ok().and_then(|contexts| contexts.current());
        current.map_or(Route::Unknown, Route::Context)
    }

    /// Where the processes of this host keep their sockets: as named, or beside the admin socket.
    pub fn run_directory(&self) -> PathBuf {
        if let Some(run) = &self.run {
            return run.clone();
        }
        match self.route() {
            Route::Socket(socket) => socket.parent().map(Path::to_path_buf).unwrap_or_default(),
            Route::Context(_) => PACKAGED_RUN.into(),
            Route::Unknown => default_root().join("run"),
        }
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Connects, or names the reason of the failure, one of the usual ones.
    pub async fn connect(&self) -> Result<Cluster> {
        match self.route() {
            Route::Socket(socket) => connect(&socket).await,
            Route::Context(name) => {
                let cluster = contexts::connect(&name).await?;
                Ok(cluster.max_decoding_message_size(MESSAGE_BYTES_MAX))
            }
            Route::Unknown => {
                let usual = usual_admin_sockets();
                let usual: Vec<_> = usual.iter().map(|path| path.display().to_string()).collect();
                bail!(
                    "no controller at {}, and no context: start one with `quoin dev`, name its \
                     socket with --socket or QUOIN_SOCKET, or, for a controller on another host, \
                     make a token there (`quoin token create --role admin`) and a context here: \
                     QUOIN_JOIN_TOKEN=TOKEN quoin cluster join --role admin --controller \
                     HOST:7400",
                    usual.join(" or ")
                )
            }
        }
    }
}

/// Default directory of the sockets of a host's processes.
const PACKAGED_RUN: &str = "/run/quoin";

/// The context of a controller whose address was given for a socket.
fn context_of_address(socket: &Path) -> Option<String> {
    let address = address_in(socket)?;
    let contexts = Contexts::of_user().ok()?;
    let leads_there =
        |name: &String| contexts.load(name).is_ok_and(|context| context.controller == address);
    contexts.names().ok()?.into_iter().find(leads_there)
}

/// `host:port` where that is what was given, and not a path.
fn address_in(socket: &Path) -> Option<&str> {
    let text = socket.to_str().filter(|text| !text.contains('/'))?;
    let (host, port) = text.rsplit_once(':')?;
    (!host.is_empty() && port.parse::<u16>().is_ok() && !socket.exists()).then_some(text)
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

/// Admin sockets that commands try, the likeliest first.
fn usual_admin_sockets() -> Vec<PathBuf> {
    vec![default_root().join("run/admin.sock"), Path::new(PACKAGED_RUN).join("admin.sock")]
}

/// Connects to the admin socket at `path`.
pub async fn connect(path: &Path) -> Result<Cluster> {
    let start = match path.starts_with(PACKAGED_RUN) {
        true => "start it (`systemctl start quoin-controller`, or `quoin controller run`)",
        false => "start one with `quoin dev`",
    };
    let way_out = format!(
        "{start}, name its socket with --socket or QUOIN_SOCKET, or the context of one on another \
         host with --context (`quoin context list`)"
    );
    if let Some(address) = address_in(path) {
        bail!(
            "{address} is an address, and a controller speaks there with those who have a \
             certificate: make a token where it runs (`quoin token create --role admin`), and a \
             context here: QUOIN_JOIN_TOKEN=TOKEN quoin cluster join --role admin --controller \
             {address}"
        );
    }
    if let Err(error) = tokio::net::UnixStream::connect(path).await {
        let shown = path.display();
        let is_socket = || std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused if !is_socket() => {
                bail!("{shown} is not a socket, so no controller listens on it: {way_out}")
            }
            std::io::ErrorKind::NotFound => bail!("no controller at {shown}: {way_out}"),
            std::io::ErrorKind::ConnectionRefused => {
                bail!("no controller listens on {shown} (its process has ended): {way_out}")
            }
            std::io::ErrorKind::PermissionDenied => {
                bail!("not allowed to use {shown}: run the command as the controller's user (sudo)")
            }
            _ => return Err(error).with_context(|| format!("connect to {shown}: {way_out}")),
        }
    }
    let channel = TermChannel::from(quoin_identity::unix_channel(path));
    Ok(ClusterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// A refusal of the controller as an error for the user: its message, which names the thing, the
/// rule and the way out; the code only where it adds information.
pub fn refusal(status: tonic::Status) -> anyhow::Error {
    let message = status.message().trim();
    match status.code() {
        // A status with a source comes from this process: the connection failed. Without one, it is
        // the controller's answer.
        tonic::Code::Unavailable if std::error::Error::source(&status).is_some() => anyhow!(
            "the controller does not answer ({message}); IO of attached volumes continues: try \
             again, and read its log if this lasts"
        ),
        _ if message.is_empty() => anyhow!("{}", status.code().description()),
        _ => anyhow!("{message}"),
    }
}

/// A failed call as an error for the user; where it may have been carried out all the same, with how
/// to go on.
pub fn unanswered(status: tonic::Status, go_on: &str) -> anyhow::Error {
    use tonic::Code;
    let is_lost = std::error::Error::source(&status).is_some()
        || matches!(
            status.code(),
            Code::Unknown | Code::Internal | Code::DeadlineExceeded | Code::Cancelled
        );
    match is_lost {
        true => anyhow!("{}. {go_on}", refusal(status)),
        false => refusal(status),
    }
}

/// A volume as users name it: 32 hex digits are an id, anything else is a name.
pub fn volume_ref(text: &str) -> VolumeRef {
    let is_id = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id {
        // An id that no volume has may still be a volume's name.
        VolumeRef { id: text.to_ascii_lowercase(), name: text.into() }
    } else {
        VolumeRef { id: String::new(), name: text.into() }
    }
}

/// Reference to a volume that was found, by its id alone. By now the id may be of no volume, and
/// must not be taken for a name.
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
    fn thirty_two_hex_digits_are_an_id_and_other_text_is_a_name() {
        assert_eq!(volume_ref("DB").name, "DB");
        let id = "0123456789ABCDEF0123456789abcdef";
        assert_eq!(volume_ref(id).id, id.to_ascii_lowercase());
        assert_eq!(volume_ref("0123").name, "0123");
    }

    #[test]
    fn a_lost_answer_says_how_to_go_on_and_a_refusal_does_not() {
        let go_on = "`quoin snapshot revert db --id 7` waits for it";
        let lost = unanswered(tonic::Status::unknown("h2 protocol error"), go_on).to_string();
        assert!(lost.ends_with(go_on), "{lost}");
        let refused = unanswered(tonic::Status::failed_precondition("detach it first"), go_on);
        assert_eq!(refused.to_string(), "detach it first");
    }

    #[tokio::test]
    async fn an_address_in_place_of_a_socket_is_refused_with_the_way_to_join() {
        assert_eq!(address_in(Path::new("h1:7400")), Some("h1:7400"));
        assert_eq!(address_in(Path::new("[fd00::1]:7400")), Some("[fd00::1]:7400"));
        for path in ["/run/h1:7400", "./h1:7400", "h1", "h1:x", ":7400", "admin.sock"] {
            assert_eq!(address_in(Path::new(path)), None, "{path}");
        }
        let message = connect(Path::new("no-such-host:7400")).await.unwrap_err().to_string();
        assert!(
            message.contains("quoin cluster join") && message.contains("no-such-host:7400"),
            "{message}"
        );
    }

    #[tokio::test]
    async fn a_missing_socket_is_distinguished_from_one_of_a_dead_process() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("admin.sock");
        let message = connect(&path).await.unwrap_err().to_string();
        assert!(message.contains("no controller at") && message.contains("quoin dev"), "{message}");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let message = connect(&path).await.unwrap_err().to_string();
        assert!(message.contains("process has ended") && message.contains("--socket"), "{message}");
        let letter = directory.path().join("letter");
        std::fs::write(&letter, "dear").unwrap();
        let message = connect(&letter).await.unwrap_err().to_string();
        assert!(message.contains("not a socket"), "{message}");
    }
}
