//! Cost of snapshots of groups: the longest time for which clients of their volumes get no answer.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::further::Fact;
use crate::load::{Generator, Load, Pattern};
use crate::nodes::Target;
use crate::product::Product;
use crate::snapshots::{ECHO, EVERY, nearest_rank};
use crate::{Class, Error};

pub const NAME: &str = "snapshot-group";
const VOLUMES: usize = 10;
/// Of each volume.
const VOLUME_BYTES: u64 = 64 << 20;
const DEPTH: usize = 4;
const SNAPSHOTS: usize = 20;

/// Makes snapshots of ten volumes under load, whose targets are those of three nodes.
pub fn run(quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {NAME}");
    let product = Product::start(quoin, directory)?;
    let others = ["second", "third"].map(|name| Target::start(quoin, &product, directory, name));
    let [second, third] = others;
    let others = [second?, third?];
    let names: Vec<String> = (0..VOLUMES).map(|number| format!("member-{number}")).collect();
    let mut generators = Vec::new();
    for (number, name) in names.iter().enumerate() {
        product.create(name, Class::Cache, VOLUME_BYTES)?;
        let socket = match number % (1 + others.len()) {
            0 => product.attach(name)?,
            other => others[other - 1].attach(&product, name)?,
        };
        let mut generator = Generator::connect(&socket)?;
        generator.fill(1 << 20)?;
        generators.push(generator);
    }
    let time = EVERY * (SNAPSHOTS as u32 + 5);
    let load = Load {
        writes_percent: 100,
        pattern: Pattern::Random,
        block_bytes: 4096,
        depth: DEPTH,
        time,
    };
    let began = Instant::now();
    let (spans, outcomes) = std::thread::scope(|scope| {
        let start = |generator: Generator| {
            let mut generator = generator;
            scope.spawn(move || generator.run(load))
        };
        let running: Vec<_> = generators.into_iter().map(start).collect();
        let mut spans = Vec::new();
        for number in 0..SNAPSHOTS {
            std::thread::sleep(EVERY);
            let from = began.elapsed();
            let group = format!("group-{number}");
            let mut command = vec!["snapshot", "create", "--group", &*group];
            command.extend(names.iter().map(String::as_str));
            product.command(&command)?;
            spans.push(from..began.elapsed() + ECHO);
        }
        let ended = running.into_iter().map(|thread| thread.join().expect("no generator panics"));
        Ok::<_, Error>((spans, ended.collect::<Result<Vec<_>, Error>>()?))
    })?;
    let of_all = spans.iter().flat_map(|span| outcomes.iter().map(|one| one.longest_gap(span)));
    let mut gaps_ms: Vec<f64> = of_all.map(|gap: Duration| gap.as_secs_f64() * 1e3).collect();
    gaps_ms.sort_unstable_by(f64::total_cmp);
    let fact =
        |what: &str, share, goal| Fact::of(NAME, what, nearest_rank(&gaps_ms, share), "ms", goal);
    Ok(vec![fact("gap-p99", 0.99, 100.0), fact("gap-median", 0.5, 50.0)])
}
