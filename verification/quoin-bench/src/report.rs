//! The table and the JSON file.

use std::collections::BTreeMap;
use std::path::Path;

use crate::Error;
use crate::cases::CaseResult;
use crate::compare::Figures;
use crate::further::Fact;

pub fn print(results: &[CaseResult]) {
    if results.is_empty() {
        return;
    }
    println!(
        "{:<22} {:>10} {:>10} {:>6} {:>9} {:>9} {:>23} {:>23}",
        "case",
        "floor/s",
        "quoin/s",
        "ratio",
        "floor cpu",
        "quoin cpu",
        "floor p50/p99/p99.9 µs",
        "quoin p50/p99/p99.9 µs"
    );
    for result in results {
        let c = &result.comparison;
        let quoin = c.quoin.clone().unwrap_or_default();
        println!(
            "{:<22} {:>10.0} {:>10.0} {:>6.2} {:>6.1} µs {:>6.1} µs {:>23} {:>23}",
            result.name,
            c.floor.per_second,
            quoin.per_second,
            c.ratio,
            c.floor.cpu_us,
            quoin.cpu_us,
            latencies(&c.floor),
            latencies(&quoin),
        );
        println!("{:<22} {} | {}", "", by_role(&c.floor), by_role(&quoin));
    }
    println!(
        "cpu: microseconds of all server processes per request, and below by process (floor | Quoin); ratios: \
         medians of pairs"
    );
}

/// The figures that have a goal instead of a floor.
pub fn print_facts(facts: &[Fact]) {
    for fact in facts {
        let Fact { name, value, unit, goal } = fact;
        println!("{name:<32} {value:>10.2} {unit} (goal: below {goal})");
    }
}

/// CPU time by process, without those that use next to none.
fn by_role(figures: &Figures) -> String {
    const SHOWN_US: f64 = 0.05;
    let shown = figures.cpu_us_by_role.iter().filter(|(_, cpu_us)| **cpu_us >= SHOWN_US);
    let shown: Vec<_> = shown.map(|(role, cpu_us)| format!("{role} {cpu_us:.1}")).collect();
    shown.join(", ")
}

fn latencies(figures: &Figures) -> String {
    format!("{:.0}/{:.0}/{:.0}", figures.p50_us, figures.p99_us, figures.p999_us)
}

#[derive(serde::Serialize)]
struct Row {
    /// `None` where there is no floor.
    floor: Option<f64>,
    quoin: f64,
    ratio: Option<f64>,
    floor_cpu_us: Option<f64>,
    quoin_cpu_us: Option<f64>,
}

pub fn write_json(results: &[CaseResult], facts: &[Fact], path: &Path) -> Result<(), Error> {
    let mut rows: BTreeMap<&str, Row> = results
        .iter()
        .map(|r| {
            let quoin = r.comparison.quoin.clone().unwrap_or_default();
            let row = Row {
                floor: Some(r.comparison.floor.per_second),
                quoin: quoin.per_second,
                ratio: Some(r.comparison.ratio),
                floor_cpu_us: Some(r.comparison.floor.cpu_us),
                quoin_cpu_us: Some(quoin.cpu_us),
            };
            (r.name, row)
        })
        .collect();
    for fact in facts {
        let quoin = fact.value;
        let (floor, ratio, floor_cpu_us, quoin_cpu_us) = (None, None, None, None);
        rows.insert(&fact.name, Row { floor, quoin, ratio, floor_cpu_us, quoin_cpu_us });
    }
    let text = serde_json::to_string_pretty(&rows)
        .map_err(|e| Error::Failed(format!("the figures cannot be written as JSON: {e}")))?;
    std::fs::write(path, text).map_err(Error::io(format!("write {}", path.display())))
}
