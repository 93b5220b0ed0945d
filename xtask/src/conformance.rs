//! `cargo xtask conformance`: the rows of the register that a client can see, asserted on real
//! processes by a client that is not Rust; the result is docs/conformance.md.

use crate::{packages, python, run};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for the end of the cluster.
const END_MAX: Duration = Duration::from_secs(60);

pub fn run() -> Result<()> {
    packages::provide(&packages::OF_TESTS)?;
    let python = python::provide()?;
    println!("building Quoin (release)");
    let quoin = run::release_binary("quoin", "quoin")?;
    let directory = run::target_directory()?.join(format!("conformance-{}", std::process::id()));
    let result = assert_rows(&python, &quoin, &directory);
    let _ = std::fs::remove_dir_all(&directory);
    result
}

fn assert_rows(python: &Path, quoin: &Path, directory: &Path) -> Result<()> {
    let cluster = Cluster::start(quoin, directory)?;
    let root = run::workspace_root();
    let report = root.join("docs/conformance.md");
    let mut client = Command::new(python);
    client.arg(root.join("tests/python/conformance.py")).arg("--dev").arg(directory);
    run::check(client.arg("--report").arg(&report))?;
    cluster.stop()?;
    println!("{} says which rows were asserted", report.display());
    Ok(())
}

/// A `quoin dev`, which is ended in every case.
struct Cluster(Child);

impl Cluster {
    fn start(quoin: &Path, directory: &Path) -> Result<Self> {
        let mut command = Command::new(quoin);
        // Every row that a client can see.
        command
            .args(["dev", "--csi-edition", "1.13", "--dir"])
            .arg(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start `quoin dev`")?;
        let output = child.stdout.take().context("no output to read")?;
        let cluster = Self(child);
        let mut lines = BufReader::new(output).lines();
        let up = lines.any(|line| line.is_ok_and(|line| line.contains("Quoin is up")));
        if !up {
            bail!("`quoin dev` ended before it was up");
        }
        // Later output is read, so that it never waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(cluster)
    }

    fn interrupt(&self) {
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
    }

    fn stop(mut self) -> Result<()> {
        self.interrupt();
        let began = Instant::now();
        while began.elapsed() < END_MAX {
            if let Some(status) = self.0.try_wait()? {
                if !status.success() {
                    bail!("`quoin dev` ended with {status}");
                }
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("`quoin dev` does not end");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for _ in 0..2 {
            if self.0.try_wait().is_ok_and(|status| status.is_none()) {
                self.interrupt();
                std::thread::sleep(Duration::from_secs(2));
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
