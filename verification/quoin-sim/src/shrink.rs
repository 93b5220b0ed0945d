//! From a failing run to a small one: faults and clients are left out while the same rule is
//! still broken, and what remains is drawn as one column for each of those who take part.

use std::fmt::Write as _;

use crate::schedule::Instant;
use crate::world::{FAULTS_MAX, RunOptions};
use crate::{Report, Violation, run};

/// Runs that one shrinking takes at most.
const RUNS_MAX: u32 = 120;
/// Lines of a drawing; older ones are left out.
const LINES_MAX: usize = 160;
const COLUMN: usize = 30;

/// The smallest run found that still breaks the rule.
pub struct Shrunk {
    pub options: RunOptions,
    pub violation: Violation,
    pub runs: u32,
}

/// `None`: the run breaks nothing.
pub fn shrink(options: RunOptions) -> Option<Shrunk> {
    let violation = run(options).violation?;
    let mut best = Shrunk { options, violation, runs: 1 };
    let mut width = FAULTS_MAX / 2;
    while width > 0 {
        let mut progress = false;
        for first in (0..FAULTS_MAX).step_by(width) {
            let mask = ((1u64 << width) - 1) << first;
            let dropped = best.options.dropped | mask as u32;
            if dropped != best.options.dropped {
                progress |= best.attempt(RunOptions { dropped, ..best.options });
            }
        }
        if !progress || width > 1 {
            width /= 2;
        }
    }
    for clients_max in 1..=8 {
        let known = best.options.clients_max;
        if (known == 0 || clients_max < known)
            && best.attempt(RunOptions { clients_max, ..best.options })
        {
            break;
        }
    }
    Some(best)
}

impl Shrunk {
    /// Takes the smaller run if it breaks the same rule.
    fn attempt(&mut self, options: RunOptions) -> bool {
        if self.runs >= RUNS_MAX {
            return false;
        }
        self.runs += 1;
        match run(options).violation {
            Some(violation) if violation.rule == self.violation.rule => {
                (self.options, self.violation) = (options, violation);
                true
            }
            _ => false,
        }
    }

    /// The run again, as a drawing.
    pub fn draw(&self) -> String {
        draw(&run(RunOptions { keep: true, ..self.options }))
    }
}

/// Actor of a line of the trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Actor {
    Clients,
    Control,
    Target(usize),
    Pool(usize),
    Everybody,
}

fn actor_of(line: &str) -> (Actor, &str) {
    let text = line.trim_start();
    let numbered = |word: &str| -> Option<(usize, &str)> {
        let rest = text.strip_prefix(word)?.strip_prefix(' ')?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        Some((rest[..digits].parse().ok()?, rest[digits..].trim_start()))
    };
    if let Some((n, rest)) = numbered("target") {
        return (Actor::Target(n), rest);
    }
    if let Some((n, rest)) = numbered("pool") {
        return (Actor::Pool(n), rest);
    }
    if let Some((_, rest)) = numbered("client") {
        return (Actor::Clients, rest);
    }
    match text.strip_prefix("control plane") {
        Some(rest) => (Actor::Control, rest.trim_start()),
        None => (Actor::Everybody, text),
    }
}

/// Messages that change a replica's state; the others would hide them.
const TELLING: [&str; 11] = [
    "Open,",
    "OpenAck",
    "Truncate",
    "View[",
    "Increment",
    "Refuse",
    "Closed",
    "Fetch",
    "Failed",
    "Repair",
    "Sync ",
];

/// Operations that the violation names.
fn named_operations(detail: &str) -> Vec<u64> {
    let mut found = Vec::new();
    for word in ["op ", "#"] {
        for (at, _) in detail.match_indices(word) {
            let rest = detail[at + word.len()..].trim_start();
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            found.extend(rest[..digits].parse::<u64>());
        }
    }
    found
}

/// One column for each of those who take part, time downwards.
pub fn draw(report: &Report) -> String {
    let detail = report.violation.as_ref().map_or("", |v| v.detail.as_str());
    let operations = named_operations(detail);
    let mentions = |text: &str| operations.iter().any(|n| names(text, *n));
    let lines: Vec<&(Instant, String)> = report
        .lines
        .iter()
        .filter(|(_, line)| match actor_of(line).0 {
            Actor::Clients => mentions(line),
            _ if line.starts_with("  ") => TELLING.iter().any(|word| line.contains(word)),
            _ => true,
        })
        .collect();
    let lines = &lines[lines.len().saturating_sub(LINES_MAX)..];
    let mut actors: Vec<Actor> = lines.iter().map(|(_, line)| actor_of(line).0).collect();
    actors.retain(|a| *a != Actor::Everybody);
    actors.sort_unstable();
    actors.dedup();
    let mut out = String::new();
    let _ = write!(out, "{:>10} ", "seconds");
    for actor in &actors {
        let name = match actor {
            Actor::Target(n) => format!("target {n}"),
            Actor::Pool(n) => format!("pool {n}"),
            other => format!("{other:?}").to_lowercase(),
        };
        let _ = write!(out, "| {name:<COLUMN$}");
    }
    out.push('\n');
    for (at, line) in lines {
        let (actor, text) = actor_of(line);
        let _ = write!(out, "{:>10.4} ", *at as f64 / 1e9);
        if actor == Actor::Everybody {
            let _ = writeln!(out, "{text}");
            continue;
        }
        let mut rest = text.strip_prefix("notes: ").unwrap_or(text);
        let column = actors.iter().position(|a| *a == actor).unwrap_or_default();
        // A long text goes on below itself, within its column.
        let mut first = true;
        while first || !rest.is_empty() {
            if !first {
                let _ = write!(out, "{:>10} ", "");
            }
            for _ in 0..column {
                let _ = write!(out, "| {:<COLUMN$}", "");
            }
            let end = rest.char_indices().nth(COLUMN).map_or(rest.len(), |(at, _)| at);
            let _ = writeln!(out, "| {}", &rest[..end]);
            rest = &rest[end..];
            first = false;
        }
    }
    if let Some(violation) = &report.violation {
        let _ = writeln!(out, "{}: {}", violation.rule, violation.detail);
    }
    out
}

/// Returns true if a line names this operation, and not one whose number only begins like it.
fn names(text: &str, operation: u64) -> bool {
    text.split(|c: char| !c.is_ascii_digit()).any(|word| word.parse() == Ok(operation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_drawn_in_the_column_of_those_who_they_are_of() {
        let line = |text: &str| (1_000_000, text.to_owned());
        let report = Report {
            lines: vec![
                line("target 0 starts (life 1)"),
                line("  target 0 -> pool 1: Truncate { keep: Lsn(3) }"),
                line("  target 0 -> pool 1: Ping"),
                line("client 2 asks target 0 for op 17: Flush"),
                line("client 2 asks target 0 for op 170: Flush"),
                line("*** partition"),
            ],
            violation: Some(Violation {
                seed: 1,
                rule: "Linearizable".into(),
                detail: "op 17 fits nowhere".into(),
            }),
            ..Report::default()
        };
        let drawing = draw(&report);
        assert!(drawing.contains("starts (life 1)") && drawing.contains("*** partition"));
        assert!(drawing.contains("-> pool 1: Truncate") && !drawing.contains("Ping"));
        assert!(drawing.contains("op 17: Flush") && !drawing.contains("op 170"));
        assert!(drawing.ends_with("Linearizable: op 17 fits nowhere\n"));
    }
}
