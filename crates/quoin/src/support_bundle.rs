//! `quoin support-bundle`: one file that tells those who help how the cluster and this host stand.
//!
//! Nothing in it is secret: no data, keys, tokens, environments or command lines of processes. Each part has a time of
//! its own. A part that cannot be had is named in `missing.json`, and all others are there.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::client::ClientOptions;
use crate::output::{self, Format};
use crate::private_file::Beside;
use crate::size::show_size;

/// Time that one part may take.
const PART_WITHIN: Duration = Duration::from_secs(30);
/// Most bytes of one part; of a log, the last ones.
const PART_BYTES_MAX: u64 = 64 << 20;
const ZSTD_LEVEL: i32 = 6;
/// Beginnings of secrets that people hand around. None belongs into a log; should one be there, it goes no further.
const SECRETS: [&str; 2] = ["quoin-join-", "quoin-pair-"];

/// Commands of this binary whose answers are the cluster's parts.
const CLUSTER: [(&str, &[&str]); 17] = [
    ("status", &["status"]),
    ("info", &["cluster", "info"]),
    ("pools", &["pool", "list"]),
    ("nodes", &["node", "list"]),
    ("volumes", &["volume", "list", "--all"]),
    ("replicas", &["replica", "list"]),
    ("snapshots", &["snapshot", "list"]),
    ("group-snapshots", &["snapshot", "group", "list"]),
    ("schedules", &["schedule", "list"]),
    ("groups", &["group", "list"]),
    ("mirrors", &["mirror", "status"]),
    ("peers", &["mirror", "peers"]),
    ("fences", &["fence", "list"]),
    ("admins", &["admin", "list"]),
    ("tokens", &["token", "list"]),
    ("events", &["events"]),
    ("contexts", &["context", "list"]),
];
/// Programs of the host.
const HOST: [(&str, &[&str]); 6] = [
    ("kernel.txt", &["uname", "-a"]),
    ("loop-devices.json", &["losetup", "--list", "--json"]),
    ("disks.json", &["lsblk", "--json", "--bytes", "-o", "NAME,TYPE,SIZE,FSTYPE,MOUNTPOINT"]),
    ("units.txt", &["systemctl", "list-units", "--all", "--no-pager", "quoin*"]),
    ("space.txt", &["df", "-k"]),
    ("clock.txt", &["date", "--utc", "+%FT%TZ"]),
];
/// Files of the host; of mounts, those of Quoin's devices.
const FILES: [(&str, &str); 3] = [
    ("memory.txt", "/proc/meminfo"),
    ("load.txt", "/proc/loadavg"),
    ("pressure-io.txt", "/proc/pressure/io"),
];

#[derive(Args)]
pub struct SupportBundleOptions {
    /// The file to write, a tar archive compressed by zstd; one that is there is not overwritten
    /// [default: quoin-support-SECONDS.tar.zst in this directory].
    #[arg(long, value_name = "FILE")]
    into: Option<PathBuf>,
    /// Newest lines of the journal of Quoin's units on this host.
    #[arg(long, value_name = "LINES", default_value_t = 20_000)]
    log_lines: u32,
    /// A log file that is to be in it as well, as of `quoin dev` or of a container; may be repeated.
    #[arg(long, value_name = "FILE")]
    log: Vec<PathBuf>,
}

/// The bundle, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BundleView {
    path: String,
    size_bytes: u64,
    parts: usize,
    /// Parts that could not be had, and why.
    missing: BTreeMap<String, String>,
}

/// Parts that were gathered, by their names in the archive.
#[derive(Default)]
struct Gathered {
    parts: BTreeMap<String, Vec<u8>>,
    missing: BTreeMap<String, String>,
}

impl Gathered {
    fn take(&mut self, name: String, part: Result<Vec<u8>>) {
        match part {
            Ok(bytes) => drop(self.parts.insert(name, without_secrets(bytes))),
            Err(why) => drop(self.missing.insert(name, output::plain(&format!("{why:#}")))),
        }
    }
}

/// Writes the bundle.
///
/// # Errors
/// The file exists, or cannot be written.
pub async fn run(
    options: SupportBundleOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let path = options.into.unwrap_or_else(|| {
        PathBuf::from(format!("quoin-support-{}.tar.zst", since_epoch.as_secs()))
    });
    if path.symlink_metadata().is_ok() {
        anyhow::bail!("{} exists, and is not overwritten: give another --into", path.display());
    }
    let beside = Beside::of(&path).with_context(|| format!("make {}", path.display()))?;
    let mut gathered = Gathered::default();
    let about = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "secondsSinceEpoch": since_epoch.as_secs(),
        "host": rustix::system::uname().nodename().to_string_lossy(),
    });
    gathered.take("about.json".to_owned(), Ok(serde_json::to_vec_pretty(&about)?));
    gather_cluster(&mut gathered, client).await?;
    gather_host(&mut gathered, options.log_lines).await?;
    for (number, log) in options.log.iter().enumerate() {
        let name = log.file_name().unwrap_or_default().to_string_lossy();
        let read = read_end(log).with_context(|| format!("read {}", log.display()));
        gathered.take(format!("logs/{number}-{name}"), read);
    }
    let missing = serde_json::to_vec_pretty(&gathered.missing)?;
    gathered.parts.insert("missing.json".to_owned(), missing);
    let archived = archive(&beside.file, &gathered.parts, since_epoch.as_secs())
        .and_then(|()| beside.file.sync_all())
        .and_then(|()| beside.file.metadata());
    let written = archived.and_then(|found| beside.keep_as(&path).map(|()| found.len()));
    let size_bytes = written.with_context(|| format!("write {}", path.display()))?;
    let view = BundleView {
        path: path.display().to_string(),
        size_bytes,
        parts: gathered.parts.len(),
        missing: gathered.missing,
    };
    output::print_one(format, &view, || in_words(&view))
}

fn in_words(view: &BundleView) -> String {
    let BundleView { path, size_bytes, parts, missing } = view;
    let mut text = format!("{path}: {parts} parts, {}", show_size(*size_bytes));
    for (name, why) in missing {
        let why = why.lines().next().unwrap_or_default();
        text.push_str(&format!("\nnot in it: {name} ({why})"));
    }
    text
}

async fn gather_cluster(gathered: &mut Gathered, client: &ClientOptions) -> Result<()> {
    let binary = std::env::current_exe().context("find this program")?;
    for (name, words) in CLUSTER {
        let mut command = Command::new(&binary);
        if let Some(socket) = &client.socket {
            command.arg("--socket").arg(socket);
        }
        if let Some(context) = &client.context {
            command.arg("--context").arg(context);
        }
        command.args(["--timeout", "20", "-o", "json"]).args(words);
        gathered.take(format!("cluster/{name}.json"), answer_of(command).await);
    }
    Ok(())
}

async fn gather_host(gathered: &mut Gathered, log_lines: u32) -> Result<()> {
    let mut preflight = Command::new(std::env::current_exe().context("find this program")?);
    preflight.args([
        "-o",
        "json",
        "preflight",
        "--for",
        "attach",
        "--for",
        "node",
        "--for",
        "pool",
    ]);
    gathered.take("host/preflight.json".to_owned(), answer_of(preflight).await);
    for (name, words) in HOST {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        gathered.take(format!("host/{name}"), answer_of(command).await);
    }
    for (name, path) in FILES {
        let read = std::fs::read(path).with_context(|| format!("read {path}"));
        gathered.take(format!("host/{name}"), read);
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").context("read the mounts");
    let is_ours = |line: &&str| line.contains("quoin") || line.contains("/dev/loop");
    let ours = mounts.map(|text| text.lines().filter(is_ours).collect::<Vec<_>>().join("\n"));
    gathered.take("host/mounts.txt".to_owned(), ours.map(String::into_bytes));
    let mut journal = Command::new("journalctl");
    journal.args(["--no-pager", "--output", "short-iso", "--unit", "quoin*"]);
    journal.args(["--lines", &log_lines.to_string()]);
    gathered.take("logs/journal.txt".to_owned(), answer_of(journal).await);
    Ok(())
}

/// Output of a program. One that says by its status that something is not well has said it.
async fn answer_of(mut command: Command) -> Result<Vec<u8>> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let mut child = command.spawn().with_context(|| format!("start {program}"))?;
    let (mut answer, mut complaint) = (Vec::new(), Vec::new());
    let reading = async {
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let out = async {
            let Some(out) = out else { return Ok(0) };
            out.take(PART_BYTES_MAX).read_to_end(&mut answer).await
        };
        let err = async {
            let Some(err) = err else { return Ok(0) };
            err.take(PART_BYTES_MAX).read_to_end(&mut complaint).await
        };
        tokio::try_join!(out, err)?;
        child.wait().await
    };
    let ended = tokio::time::timeout(PART_WITHIN, reading).await;
    let status = ended.with_context(|| format!("no end within {} s", PART_WITHIN.as_secs()))??;
    if answer.is_empty() && !status.success() {
        anyhow::bail!("{}", String::from_utf8_lossy(&complaint).trim());
    }
    Ok(answer)
}

/// The end of a file, as much of it as a part may have.
fn read_end(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    use std::io::{Read, Seek, SeekFrom};

    let mut file = std::fs::File::open(path)?;
    let bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(bytes.saturating_sub(PART_BYTES_MAX)))?;
    let mut read = Vec::new();
    file.take(PART_BYTES_MAX).read_to_end(&mut read)?;
    Ok(read)
}

/// Replaces every word that begins as a secret does.
fn without_secrets(bytes: Vec<u8>) -> Vec<u8> {
    let text = String::from_utf8_lossy(&bytes);
    if !SECRETS.iter().any(|secret| text.contains(secret)) {
        return bytes;
    }
    let (mut kept, mut rest) = (String::with_capacity(text.len()), &*text);
    while let Some(at) = SECRETS.iter().filter_map(|secret| rest.find(secret)).min() {
        kept.push_str(&rest[..at]);
        kept.push_str("(a token, left out)");
        let is_of_token =
            |letter: char| letter.is_ascii_alphanumeric() || "-_.=+/".contains(letter);
        rest = rest[at..].trim_start_matches(is_of_token);
    }
    kept.push_str(rest);
    kept.into_bytes()
}

fn archive(
    file: &std::fs::File,
    parts: &BTreeMap<String, Vec<u8>>,
    seconds: u64,
) -> std::io::Result<()> {
    let mut archive = tar::Builder::new(zstd::Encoder::new(file, ZSTD_LEVEL)?);
    for (name, bytes) in parts {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(seconds);
        archive.append_data(&mut header, format!("quoin-support/{name}"), bytes.as_slice())?;
    }
    archive.into_inner()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_left_out_wherever_they_stand() {
        let text = "join with quoin-join-1.abc_DEF-12= now\n\"quoin-pair-1.xyz\",quoin-join-1.q";
        let kept = String::from_utf8(without_secrets(text.as_bytes().to_vec())).unwrap();
        let left_out = "(a token, left out)";
        assert_eq!(kept, format!("join with {left_out} now\n\"{left_out}\",{left_out}"));
        let plain = b"nothing of that kind: quoin-join".to_vec();
        assert_eq!(without_secrets(plain.clone()), plain);
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_or_fails_is_named_with_its_reason() {
        let missing = answer_of(Command::new("no-such-program")).await.unwrap_err();
        assert!(format!("{missing:#}").contains("no-such-program"), "{missing:#}");
        let mut failing = Command::new("sh");
        failing.args(["-c", "echo no socket there >&2; exit 1"]);
        assert_eq!(answer_of(failing).await.unwrap_err().to_string(), "no socket there");
        let mut ill = Command::new("sh");
        ill.args(["-c", "echo one is ill; exit 3"]);
        assert_eq!(answer_of(ill).await.unwrap(), b"one is ill\n");
    }
}
