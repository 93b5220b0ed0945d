//! `quoin demo`: a replicated volume under an application that never stops, while every part of
//! the system below it is killed in turn. `quoin demo dr`: a database that outlives its cluster.
//!
//! The demo runs a `quoin dev` of its own in a fresh directory and acts as the orchestrator (CSI
//! over its socket) and as the application. As root the volume is an ext4 file system; without
//! root, or without FUSE, the application speaks NBD to the target itself. However the demo ends,
//! also by Ctrl-C at any moment and any number of times, nothing stays behind: no process, mount,
//! loop device or directory.

mod cluster;
mod csi;
mod database;
mod documents;
mod dr;
mod interrupt;
mod load;
mod script;
mod second_node;
mod surface;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::dev::layout::{Layout, ROOT_BYTES_MAX};
use crate::size::{parse_size, show_size};

#[derive(Args)]
pub struct DemoOptions {
    /// Another story than that of the volume: `dr` has two clusters, of which one is lost.
    #[arg(value_enum, conflicts_with_all = ["size", "user_space", "only"])]
    story: Option<Story>,
    /// Of `dr`: have an orchestrator tell it, by calls of CSI and CSI-Addons alone.
    #[arg(long, requires = "story")]
    csi: bool,
    /// Size of the volume, at least 256MiB.
    #[arg(long, value_parser = parse_demo_size, allow_hyphen_values = true, default_value = "1GiB")]
    pub size: u64,
    /// Use the volume over NBD from this process, as is done without root.
    #[arg(long)]
    pub user_space: bool,
    /// Where the demo's directory is made [default: the system's directory for such].
    #[arg(long, value_name = "DIRECTORY")]
    pub under: Option<PathBuf>,
    /// Of the harm, only that whose line has these words: for tests of each alone.
    #[arg(long, value_name = "WORDS", hide = true)]
    pub only: Option<String>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Story {
    /// A database moves to a second cluster when the first one is lost, and comes back; a minute and a half.
    /// With --csi an orchestrator moves it.
    Dr,
}

/// Directory of the demo's `quoin dev`, below the demo's own.
const CLUSTER: &str = "cluster";
/// Files, the application's pages and the file system's own must fit.
const SIZE_BYTES_MIN: u64 = 256 << 20;

fn parse_demo_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size if size < SIZE_BYTES_MIN => Err(format!(
            "too small for what the demo writes: at least {}",
            show_size(SIZE_BYTES_MIN)
        )),
        size => Ok(size),
    }
}

/// Refusal of the cluster; the logs of its processes say no more about it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

pub fn run(options: &DemoOptions) -> Result<()> {
    interrupt::catch();
    let began = Instant::now();
    let is_dr = options.story == Some(Story::Dr);
    let cluster = Layout::at(Path::new(CLUSTER));
    let deepest = if is_dr { cluster.peer() } else { cluster.root().to_owned() };
    let directory = Scratch::new(options.under.as_deref(), &deepest)?;
    let outcome = match is_dr {
        true => dr::run(&directory.0, options.csi),
        false => script::run(options, &directory.0),
    };
    if interrupt::is_interrupted() {
        // All that was started is stopped already: it belonged to the script.
        drop(directory);
        print_line("interrupted; everything is cleaned up");
        std::process::exit(130);
    }
    if outcome.as_ref().is_err_and(|error| !error.is::<Refused>()) {
        directory.show_logs();
    }
    outcome?;
    drop(directory);
    print_line(&format!("nothing is left behind; {:.0} s in all", began.elapsed().as_secs_f64()));
    Ok(())
}

/// A fresh directory, removed with all that is in it.
struct Scratch(PathBuf);

impl Scratch {
    /// `deepest`: the root of a cluster that is furthest below it.
    fn new(under: Option<&Path>, deepest: &Path) -> Result<Self> {
        let parent = under.map_or_else(std::env::temp_dir, Path::to_path_buf);
        let path = parent.join(format!("quoin-demo-{:06x}", rand::random::<u32>() & 0xff_ffff));
        let root_bytes = std::path::absolute(path.join(deepest))?.as_os_str().len();
        if root_bytes > ROOT_BYTES_MAX {
            bail!(
                "{} is {} bytes too long for the sockets below it: name a shorter directory with \
                 --under",
                parent.display(),
                root_bytes - ROOT_BYTES_MAX
            );
        }
        std::fs::create_dir(&path).with_context(|| {
            format!("cannot make {}: name a directory you may write with --under", path.display())
        })?;
        Ok(Self(path))
    }

    /// The last lines of each process, before the directory is removed.
    fn show_logs(&self) {
        let cluster = Layout::at(&self.0.join(CLUSTER));
        let all = [cluster.logs(), Layout::at(&cluster.peer()).logs()];
        let logs = all.iter().filter_map(|logs| std::fs::read_dir(logs).ok()).flatten();
        for path in logs.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            let name = path.strip_prefix(cluster.root()).unwrap_or(&path).display();
            print_error(&format!("--- {name} (its last lines)"));
            lines[lines.len().saturating_sub(12)..].iter().for_each(|line| print_error(line));
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            print_error(&format!(
                "could not remove {}: {error}; remove it by hand",
                self.0.display()
            ));
        }
    }
}

/// Prints a line for the user of the demo. When its output is closed, as after a closed terminal or
/// in `quoin demo | head`, the demo ends as after Ctrl-C.
fn print_line(line: &str) {
    let mut output = std::io::stdout().lock();
    if writeln!(output, "{line}").and_then(|()| output.flush()).is_err() {
        interrupt::interrupt();
    }
}

/// Prints an error. A failed write is ignored: the exit code reports the error as well.
fn print_error(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn show_bytes(bytes: u64) -> String {
    show_size(bytes)
}
