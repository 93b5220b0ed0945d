//! The benchmark's cases and fields, which other programs read: never its figures.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const IO_CASES: [&str; 10] = [
    "write-4k-qd1",
    "write-4k-qd32",
    "read-4k-qd1",
    "read-4k-qd32",
    "write-4k-qd1-media",
    "write-4k-qd32-media",
    "commit-8k-qd1",
    "commit-8k-qd8",
    "write-128k-qd8",
    "read-128k-qd8",
];
const FIELDS: [&str; 5] = ["floor", "quoin", "ratio", "floor_cpu_us", "quoin_cpu_us"];

/// Runs a benchmark too short to measure anything, and reads its output.
fn cases(flags: &[&str]) -> (serde_json::Map<String, serde_json::Value>, String) {
    // A busy machine may answer nothing in so short a time, which the benchmark says.
    cases_of("0.2", flags).or_else(|_| cases_of("5", flags)).unwrap()
}

fn cases_of(
    seconds: &str,
    flags: &[&str],
) -> Result<(serde_json::Map<String, serde_json::Value>, String), String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("figures.json");
    let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["bench", "--seconds", seconds, "--pairs", "1", "--size-mib", "16"])
        .args(flags)
        .arg("--json")
        .arg(&file)
        .arg("--dir")
        .arg(directory.path())
        // A cluster of the user's own, which is not measured.
        .env("QUOIN_SOCKET", directory.path().join("admin.sock"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if errors.contains("not one request was answered") || errors.contains("no case was run") {
        return Err(errors);
    }
    assert!(output.status.success(), "{errors}");
    let cases = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    Ok((cases, String::from_utf8_lossy(&output.stdout).into_owned()))
}

fn assert_complete(name: &str, figures: &serde_json::Value) {
    for field in FIELDS {
        let figure = figures[field].as_f64();
        assert!(figure.is_some_and(f64::is_finite), "{name}.{field}: {figures}");
    }
    assert!(figures["quoin"].as_f64().unwrap() > 0.0, "{name} measured nothing");
}

#[test]
fn a_quick_run_writes_ten_cases_with_five_figures_each() {
    let (cases, table) = cases(&["--quick"]);
    let mut names: Vec<_> = cases.keys().map(String::as_str).collect();
    let mut expected = IO_CASES;
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    cases.iter().for_each(|(name, figures)| assert_complete(name, figures));
    assert!(IO_CASES.iter().all(|case| table.contains(case)), "{table}");
}

#[test]
fn a_name_of_no_case_is_refused() {
    for (flags, words) in [(&["--quick"][..], "with --quick"), (&[], "no case")] {
        let refused = cases_of("0.2", &[flags, &["--only", "no-such-case"]].concat()).unwrap_err();
        assert!(refused.contains("\"no-such-case\"") && refused.contains(words), "{refused}");
    }
}

#[test]
fn the_cost_of_the_network_is_measured_with_both_kinds_of_protection() {
    let (cases, _) = cases(&["--only", "128k-qd8-"]);
    assert_eq!(cases.len(), 2, "{cases:?}");
    for case in ["write-128k-qd8-authenticated", "write-128k-qd8-encrypted"] {
        assert_complete(case, &cases[case]);
    }
}

#[test]
fn the_cost_of_the_encryption_of_a_volume_is_measured_beside_one_that_is_not_encrypted() {
    let (cases, table) = cases(&["--only", "write-4k-qd32-encrypted"]);
    assert_eq!(cases.len(), 1, "{cases:?}");
    assert_complete("write-4k-qd32-encrypted", &cases["write-4k-qd32-encrypted"]);
    assert!(table.contains("write-4k-qd32-encrypted"), "{table}");
}

#[test]
fn the_effect_of_a_membership_change_on_io_is_measured() {
    let (cases, table) = cases(&["--only", "membership"]);
    assert_eq!(cases.len(), 4, "{cases:?}");
    for change in ["add", "remove", "move", "cf"] {
        let case = format!("membership-change-pause-{change}");
        assert!(cases[case.as_str()]["quoin"].as_f64().unwrap() > 0.0, "{case}: {cases:?}");
        assert!(table.contains(&case), "{table}");
    }
}

#[test]
fn the_effect_of_a_target_failure_on_io_is_measured() {
    let (cases, table) = cases(&["--only", "target-death"]);
    assert_eq!(cases.len(), 1, "{cases:?}");
    assert!(cases["target-death-pause"]["quoin"].as_f64().unwrap() > 0.0, "{cases:?}");
    assert!(table.contains("target-death-pause"), "{table}");
}

/// Asserts that there are figures of these names, and no others, each above zero.
fn assert_figures(figures: &serde_json::Map<String, serde_json::Value>, names: &[&str]) {
    assert_eq!(figures.len(), names.len(), "{figures:?}");
    for name in names {
        let figure = figures.get(*name).unwrap_or_else(|| panic!("no {name}: {figures:?}"));
        let value = figure["quoin"].as_f64();
        assert!(value.is_some_and(|value| value.is_finite() && value > 0.0), "{name}: {figure}");
    }
}

#[test]
fn the_cost_of_idle_volumes_is_measured() {
    let (mut cases, table) = cases(&["--only", "idle", "--volumes", "2", "--idle-seconds", "1"]);
    // Few volumes in a short time may use less than the unit of the count.
    let cpu = cases.remove("idle-2-volumes-cpu").expect("no CPU time");
    assert!(cpu["quoin"].as_f64().is_some_and(|cpu| (0.0..10_000.0).contains(&cpu)), "{cpu}");
    assert_figures(&cases, &["idle-2-volumes-memory-pool", "idle-2-volumes-memory-target"]);
    assert!(table.contains("idle-2-volumes-memory-pool"), "{table}");
}

#[test]
fn the_memory_of_full_caches_is_measured() {
    let (cases, table) = cases(&["--only", "full-cache", "--cache-gib", "1"]);
    assert_figures(&cases, &["full-cache-1-gib-memory-pool"]);
    assert!(table.contains("full-cache-1-gib-memory-pool"), "{table}");
}

#[test]
fn the_duration_of_a_cold_start_is_measured() {
    let (cases, table) = cases(&["--only", "cold-start", "--data-gib", "1"]);
    let first = "cold-start-1-gib-first-read";
    assert_figures(&cases, &["cold-start-1-gib", first, "cold-start-1-gib-memory-pool"]);
    assert!(table.contains(first), "{table}");
}

#[test]
fn full_and_partial_rebuilds_and_their_effect_on_io_are_measured() {
    let sizes = ["--rebuild-mib", "256", "--delta-mib", "8", "--absence", "1"];
    let (mut cases, table) = cases(&[&["--only", "rebuild"], &sizes[..]].concat());
    let beside_floor = cases.remove("rebuild-128k").expect("no rebuild");
    assert_complete("rebuild-128k", &beside_floor);
    for load in ["io", "mixed-io"] {
        for what in ["rate-lost", "rate-lost-worst"] {
            let name = format!("{load}-during-rebuild-{what}");
            let lost = cases.remove(name.as_str()).unwrap_or_else(|| panic!("no {name}"));
            let share = lost["quoin"].as_f64();
            assert!(share.is_some_and(|share| (0.0..=100.0).contains(&share)), "{name}: {lost}");
        }
    }
    let names = [
        "delta-rebuild-moved",
        "delta-rebuild-time",
        "io-during-rebuild-p99",
        "mixed-io-during-rebuild-p99",
    ];
    assert_figures(&cases, &names);
    // The changed data, and little of the rest.
    let moved_mib = cases["delta-rebuild-moved"]["quoin"].as_f64().unwrap();
    assert!((7.9..20.0).contains(&moved_mib), "{moved_mib} MiB for 8 that changed");
    assert!(names.iter().all(|name| table.contains(name)), "{table}");
}

#[test]
fn an_interrupted_benchmark_leaves_no_process_and_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["bench", "--quick", "--only", "write-4k-qd1", "--size-mib", "64", "--dir"])
        .arg(directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("measuring")), "it never measured");
    let pid = rustix::process::Pid::from_child(&bench);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(!bench.wait().unwrap().success());
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let path = directory.path().to_str().unwrap();
    let processes: Vec<String> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(path))
        .collect();
    assert!(processes.is_empty(), "{processes:?}");
}
