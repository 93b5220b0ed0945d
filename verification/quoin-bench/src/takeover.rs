//! Time until a volume of a node that is lost is served by another one.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::further::Fact;
use crate::load::Generator;
use crate::product::Product;
use crate::{Class, Error};

pub const NAME: &str = "takeover";
const VOLUME: &str = "taken";
const VOLUME_BYTES: u64 = 64 << 20;
const SECOND: &str = "second";
/// The default of `--node-timeout`, a lease with its share for skewed clocks, and a second.
const BOUND_S: f64 = 10.0 + 2.1 + 1.0;
const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

/// The target of a second node, ended when it is dropped.
struct Target(Child);

impl Drop for Target {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills all of a node that uses a volume, and has another node attach it.
pub fn run(quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {NAME}");
    let product = Product::start(quoin, directory)?;
    let mut generator = Generator::connect(&product.volume(VOLUME, Class::Cache, VOLUME_BYTES)?)?;
    generator.fill(1 << 20)?;
    let run_directory = directory.join("second-run");
    let run_directory = run_directory.to_string_lossy();
    let _second = start_second(quoin, &product, directory, &run_directory)?;
    let _away = [product.take_away_role("target")?, product.take_away_role("node")?];
    let began = Instant::now();
    let attach =
        ["volume", "attach", VOLUME, "--node", SECOND, "--nbd", "--run", run_directory.as_ref()];
    let socket = repeat(began, || product.attach_by(&attach))?;
    repeat(began, || Generator::connect(&socket)?.read_one())?;
    let taken = began.elapsed();
    Ok(vec![Fact { name: NAME.to_owned(), value: taken.as_secs_f64(), unit: "s", goal: BOUND_S }])
}

fn start_second(
    quoin: &Path,
    product: &Product,
    directory: &Path,
    run_directory: &str,
) -> Result<Target, Error> {
    let token = product.command(&["token", "create", "--role", "node"])?;
    let settings = std::fs::read_to_string(product.path("dev.json"))
        .map_err(Error::io("read the settings of quoin dev"))?;
    let settings: serde_json::Value =
        serde_json::from_str(&settings).map_err(|error| Error::Failed(error.to_string()))?;
    let controller = settings["controller"]["listen"].as_str().unwrap_or_default();
    let child = Command::new(quoin)
        .args(["target", "--name", SECOND, "--controller", controller, "--run", run_directory])
        .arg("--state")
        .arg(directory.join("second-state"))
        .env("QUOIN_JOIN_TOKEN", token.trim())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::io("start a second target"))?;
    let target = Target(child);
    let began = Instant::now();
    repeat(began, || match product.online("node") {
        2.. => Ok(()),
        _ => Err(Error::Failed("the second node is not online".into())),
    })?;
    Ok(target)
}

/// Tries again until it works, or for too long.
fn repeat<T>(began: Instant, mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match attempt() {
            Err(_) if began.elapsed() < PATIENCE => std::thread::sleep(POLL),
            outcome => return outcome,
        }
    }
}
