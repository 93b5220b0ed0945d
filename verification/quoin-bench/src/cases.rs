//! The measured cases.

use std::path::Path;
use std::time::Duration;

use crate::compare::{Comparison, Side, compare};
use crate::floor::Floor;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options, profile};

struct Case {
    name: &'static str,
    class: Class,
    write: bool,
    pattern: Pattern,
    block_bytes: u32,
    depth: usize,
    /// After overwriting for so long, measured once and for so long.
    steady: Option<Duration>,
}

const fn random(name: &'static str, class: Class, write: bool, depth: usize) -> Case {
    Case { name, class, write, pattern: Pattern::Random, block_bytes: 4096, depth, steady: None }
}

/// A write, then a flush, as a database commits.
const fn commit(name: &'static str, depth: usize) -> Case {
    let (class, pattern, block_bytes) = (Class::Cache, Pattern::Commit, 8192);
    Case { name, class, write: true, pattern, block_bytes, depth, steady: None }
}

/// A short run after a pause hides the cleaning of what it writes.
const fn steady(case: Case) -> Case {
    Case { steady: Some(Duration::from_secs(20)), ..case }
}

const fn sequential(name: &'static str, write: bool) -> Case {
    let (pattern, block_bytes) = (Pattern::Sequential, 128 << 10);
    Case { name, class: Class::Cache, write, pattern, block_bytes, depth: 8, steady: None }
}

impl Case {
    fn is_wanted(&self, options: &Options) -> bool {
        // A quick run has it where it is asked for: it takes long.
        options.wants(self.name)
            && (self.steady.is_none() || options.only.is_some() || !options.quick)
    }

    fn load(&self, time: Duration) -> Load {
        let writes_percent = if self.write { 100 } else { 0 };
        let (pattern, block_bytes, depth) = (self.pattern, self.block_bytes, self.depth);
        Load { writes_percent, pattern, block_bytes, depth, time }
    }
}

const CASES: [Case; 11] = [
    random("write-4k-qd1", Class::Cache, true, 1),
    random("write-4k-qd32", Class::Cache, true, 32),
    steady(random("write-4k-qd32-steady", Class::Cache, true, 32)),
    random("read-4k-qd1", Class::Cache, false, 1),
    random("read-4k-qd32", Class::Cache, false, 32),
    commit("commit-8k-qd1", 1),
    commit("commit-8k-qd8", 8),
    sequential("write-128k-qd8", true),
    sequential("read-128k-qd8", false),
    random("write-4k-qd1-media", Class::Media, true, 1),
    random("write-4k-qd32-media", Class::Media, true, 32),
];

pub struct CaseResult {
    pub name: &'static str,
    pub comparison: Comparison,
}

pub fn run(options: &Options, quoin: &Path, scratch: &Path) -> Result<Vec<CaseResult>, Error> {
    if !CASES.iter().any(|case| case.is_wanted(options)) {
        return Ok(Vec::new());
    }
    let size_bytes = options.measure.size_mib << 20;
    let product = match options.subject.nbd_socket {
        None if !options.subject.floor_only => {
            Some(Product::start(quoin, &scratch.join("quoin")).inspect_err(|_| {
                keep_log(scratch);
            })?)
        }
        _ => None,
    };
    let mut results = Vec::new();
    for class in [Class::Cache, Class::Media] {
        let cases: Vec<&Case> = CASES
            .iter()
            .filter(|c| c.class == class)
            .filter(|case| case.is_wanted(options))
            .collect();
        if cases.is_empty() {
            continue;
        }
        let (name, folder) = match class {
            Class::Cache => ("bench-cache", "floor-cache"),
            Class::Media => ("bench-media", "floor-media"),
        };
        eprintln!("preparing {name}: filling both sides");
        let floor = Floor::start(quoin, &scratch.join(folder), class, size_bytes)?;
        let mut floor_load = Generator::connect(&floor.socket)?;
        let (socket, pids) = match (&product, &options.subject.nbd_socket) {
            (Some(product), _) => (Some(product.volume(name, class, size_bytes)?), product.pids()),
            (None, Some(socket)) => (Some(socket.clone()), options.subject.pids.clone()),
            (None, None) => (None, Vec::new()),
        };
        let mut quoin_load = socket.as_deref().map(Generator::connect).transpose()?;
        if let Some(load) = &mut quoin_load {
            load.fill(128 << 10)?;
            load.wear_in()?;
        }
        floor_load.wear_in()?;
        let mut floor_side = Side { generator: &mut floor_load, pids: floor.pids() };
        let mut quoin_side = quoin_load.as_mut().map(|generator| Side { generator, pids });
        for case in cases {
            eprintln!("measuring {}", case.name);
            let (load, pairs) = match case.steady {
                Some(time) => (case.load(time), 1),
                None => (case.load(options.time()), options.measure.pairs),
            };
            if case.steady.is_some() {
                floor_side.generator.run(load)?;
                if let Some(side) = &mut quoin_side {
                    side.generator.run(load)?;
                }
            }
            let comparison = compare(&mut floor_side, quoin_side.as_mut(), load, pairs)?;
            if let (Some(file), Some(side)) = (&options.measure.perf_data, &mut quoin_side)
                && options.only.as_deref() == Some(case.name)
            {
                profile::record(side, load, file)?;
            }
            results.push(CaseResult { name: case.name, comparison });
        }
    }
    Ok(results)
}

fn keep_log(dir: &Path) {
    if let Ok(log) = std::fs::read_to_string(dir.join("quoin/dev.log")) {
        eprintln!("{log}");
    }
}
