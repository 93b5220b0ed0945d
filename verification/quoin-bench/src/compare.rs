//! Pairs of measurements, floor and Quoin in turn, so that a drifting machine affects both alike.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::load::{Generator, Load, Outcome};
use crate::{Error, usage};

/// One side: its open connection and its server processes.
pub struct Side<'a> {
    pub generator: &'a mut Generator,
    pub pids: Vec<u32>,
}

#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Figures {
    pub per_second: f64,
    pub cpu_us: f64,
    /// The same by what the processes are.
    pub cpu_us_by_role: BTreeMap<String, f64>,
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
}

impl Figures {
    /// Returns the figures of a run for which its servers used so much CPU time.
    pub fn of(outcome: &Outcome, used: &BTreeMap<String, Duration>) -> Result<Self, Error> {
        if outcome.requests == 0 {
            return Err(Error::Failed("not one request was answered".into()));
        }
        let per_request = |used: &Duration| used.as_secs_f64() * 1e6 / outcome.requests as f64;
        Ok(Figures {
            per_second: outcome.per_second(),
            cpu_us: per_request(&used.values().sum()),
            cpu_us_by_role: used
                .iter()
                .map(|(role, used)| (role.clone(), per_request(used)))
                .collect(),
            p50_us: outcome.percentile_us(0.5),
            p99_us: outcome.percentile_us(0.99),
            p999_us: outcome.percentile_us(0.999),
        })
    }
}

fn measure(side: &mut Side<'_>, load: Load) -> Result<Figures, Error> {
    figures(side, |generator| generator.run(load))
}

/// Figures of one run of a side.
pub fn figures(
    side: &mut Side<'_>,
    run: impl FnOnce(&mut Generator) -> Result<Outcome, Error>,
) -> Result<Figures, Error> {
    let before = usage::cpu_by_role(&side.pids);
    let outcome = run(side.generator)?;
    let mut used = usage::cpu_by_role(&side.pids);
    for (role, used) in &mut used {
        *used = used.saturating_sub(before.get(role).copied().unwrap_or_default());
    }
    Figures::of(&outcome, &used)
}

#[derive(Clone, Debug)]
pub struct Comparison {
    pub floor: Figures,
    pub quoin: Option<Figures>,
    /// Median of the pairs' ratios Quoin / floor.
    pub ratio: f64,
}

/// Runs `pairs` pairs after a short warm-up of each side.
pub fn compare(
    floor: &mut Side<'_>,
    mut quoin: Option<&mut Side<'_>>,
    load: Load,
    pairs: usize,
) -> Result<Comparison, Error> {
    let warm = Load { time: load.time / 6, ..load };
    measure(floor, warm)?;
    if let Some(quoin) = quoin.as_deref_mut() {
        measure(quoin, warm)?;
    }
    let mut floors = Vec::new();
    let mut quoins = Vec::new();
    for _ in 0..pairs.max(1) {
        floors.push(measure(floor, load)?);
        if let Some(quoin) = quoin.as_deref_mut() {
            quoins.push(measure(quoin, load)?);
        }
    }
    Ok(Comparison::of(&floors, &quoins))
}

impl Comparison {
    /// Returns the medians of pairs of measurements; with no second ones only those of the floor.
    pub fn of(floors: &[Figures], quoins: &[Figures]) -> Self {
        let pairs = floors.iter().zip(quoins);
        let ratio = median(pairs.map(|(f, q)| q.per_second / f.per_second).collect());
        let quoin = (!quoins.is_empty()).then(|| medians(quoins));
        Comparison { floor: medians(floors), quoin, ratio }
    }
}

fn medians(all: &[Figures]) -> Figures {
    let of = |pick: fn(&Figures) -> f64| median(all.iter().map(pick).collect());
    Figures {
        per_second: of(|f| f.per_second),
        cpu_us: of(|f| f.cpu_us),
        cpu_us_by_role: medians_by_role(all),
        p50_us: of(|f| f.p50_us),
        p99_us: of(|f| f.p99_us),
        p999_us: of(|f| f.p999_us),
    }
}

fn medians_by_role(all: &[Figures]) -> BTreeMap<String, f64> {
    let mut by_role: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
    for (role, cpu_us) in all.iter().flat_map(|figures| &figures.cpu_us_by_role) {
        by_role.entry(role).or_default().push(*cpu_us);
    }
    by_role.into_iter().map(|(role, values)| (role.clone(), median(values))).collect()
}

/// Returns the median; 0 of no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(vec![]), 0.0);
    }
}
