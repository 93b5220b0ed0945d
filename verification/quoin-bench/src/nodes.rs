//! Targets of further nodes, beside the one of `quoin dev`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Error;
use crate::product::Product;

const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

/// The target of a node of its own, ended when it is dropped.
pub struct Target {
    name: String,
    run_directory: PathBuf,
    child: Child,
}

impl Target {
    /// Has a node of this name join the cluster, and starts its target.
    pub fn start(
        quoin: &Path,
        product: &Product,
        directory: &Path,
        name: &str,
    ) -> Result<Self, Error> {
        let token = product.command(&["token", "create", "--role", "node"])?;
        let settings = std::fs::read_to_string(product.path("dev.json"))
            .map_err(Error::io("read the settings of quoin dev"))?;
        let settings: serde_json::Value =
            serde_json::from_str(&settings).map_err(|error| Error::Failed(error.to_string()))?;
        let controller = settings["controller"]["listen"].as_str().unwrap_or_default();
        let run_directory = directory.join(format!("{name}-run"));
        let before = product.online("node");
        let child = Command::new(quoin)
            .args(["target", "--name", name, "--controller", controller, "--run"])
            .arg(&run_directory)
            .arg("--state")
            .arg(directory.join(format!("{name}-state")))
            .env("QUOIN_JOIN_TOKEN", token.trim())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(Error::io("start a target"))?;
        let target = Self { name: name.to_owned(), run_directory, child };
        repeat(Instant::now(), || match product.online("node") > before {
            true => Ok(()),
            false => Err(Error::Failed(format!("the node {name} is not online"))),
        })?;
        Ok(target)
    }

    /// Attaches a volume on this node, and returns its NBD socket.
    pub fn attach(&self, product: &Product, volume: &str) -> Result<PathBuf, Error> {
        let run_directory = self.run_directory.to_string_lossy();
        let there = ["--node", &self.name, "--nbd", "--run", &run_directory];
        product.attach_by(&[&["volume", "attach", volume], &there[..]].concat())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tries again until it works, or for too long.
pub fn repeat<T>(
    began: Instant,
    mut attempt: impl FnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    loop {
        match attempt() {
            Err(_) if began.elapsed() < PATIENCE => std::thread::sleep(POLL),
            outcome => return outcome,
        }
    }
}
