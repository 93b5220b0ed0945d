//! The project's own commands: `cargo xtask demo | test | bench | profile | sim | model | mutants | fuzz |
//! torture | trace | lint | upgrade | record-formats`.
//!
//! Developers, users who try Quoin and the CI run the same commands; none of them has a way of its
//! own. Each command has one module: [`demo`], [`test`], [`trace`], [`lint`]; [`house`] and
//! [`invariants`] hold the rules on the tree itself, [`run`] starts programs, [`packages`] installs
//! the packages that a Debian machine lacks, [`python`] makes the tests' Python.

mod code_mutants;
mod conformance;
mod demo;
mod device_calls;
mod formats;
mod house;
mod invariants;
mod lint;
mod methods;
mod module_circles;
mod mutants;
mod package;
mod packages;
mod profile;
mod python;
mod record_edits;
mod run;
mod test;
mod test_files;
mod trace;
mod upgrade;
mod wall_clock;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Quoin's own build, test and demo commands",
    after_help = "\
Begin with `cargo xtask demo`: less than a minute, after the build, that shows what Quoin is for.

Before you hand something in:
  cargo xtask lint                 seconds, once built
  cargo xtask test --only unit     while you work; without --only: everything (some 15 minutes on two cores)

When you look for something:
  cargo xtask sim --seeds 100                  the protocol under faults, 100 clusters
  cargo xtask sim --fresh 1000                 the same with seeds that were never run before
  cargo xtask sim --seed 17 --trace            one of them again, step by step
  cargo xtask bench --quick                    speed beside the same work without a product
  cargo xtask trace --open --source healer     what no test proves yet

As root, `demo` and `test` install the Debian packages they need; else they name them.
`test` makes a Python environment of its own in the target directory, from PyPI."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build Quoin, install what it needs and show a replicated volume outliving its parts.
    Demo(demo::Options),
    /// Unit, property, simulator and real-process tests, each part with a time budget.
    Test(test::Options),
    /// Measure Quoin beside the floor (arguments go to `quoin bench`).
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Show which parts of Quoin's processes use CPU time in a case of `bench`, by perf.
    Profile(profile::Options),
    /// The deterministic simulator (arguments go to `quoin-sim`), as in `sim --seeds 1000`.
    #[command(disable_help_flag = true)]
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Visit every state of the replication protocol within bounds (arguments go to
    /// `quoin-model`), as in `model --full` or `model --mutant read-not-held`.
    #[command(disable_help_flag = true)]
    Model {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Break the rules of the documents one at a time, and show which check finds each: a seed of
    /// the simulator, the model, a test (arguments go to `quoin-mutants`), as in
    /// `mutants --only lease`.
    /// `mutants --code [--shard K/N] [--anew]` breaks the code itself, by cargo-mutants.
    #[command(disable_help_flag = true)]
    Mutants {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Hostile input for all that reads networks, disks and records (arguments go to `quoin-fuzz`),
    /// as in `fuzz pool --seconds 600`.
    #[command(disable_help_flag = true)]
    Fuzz {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Real processes on hosts of their own under continuous faults (arguments go to
    /// `quoin-torture`), as in `torture --minutes 10`. `torture --hosts`: hosts that are lost and
    /// return, and a controller that moves.
    #[command(disable_help_flag = true)]
    Torture {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build an earlier version and bring a cluster of it to this one process by process, under IO
    /// that is checked, and back, as in `upgrade --from v0.1.0`.
    Upgrade(upgrade::Options),
    /// Record the bytes that this build writes to disks, peers and records, for later builds to
    /// read.
    RecordFormats(formats::Options),
    /// Build a Debian package: the binary, systemd units, configuration and documents.
    Package(package::Options),
    /// Show which requirements of docs/requirements.csv a test names, and which are open.
    Trace(trace::Options),
    /// Assert the rows of the register that a CSI client can see, on real processes, and write
    /// docs/conformance.md.
    Conformance,
    /// Format, clippy, dependency direction and the other rules of the tree.
    Lint(lint::Options),
}

fn torture(arguments: Vec<String>) -> anyhow::Result<()> {
    packages::provide(&[&packages::EXT4, &packages::XFS, &packages::FUSE, &packages::FIO])?;
    packages::provide(&[&packages::IPROUTE])?;
    let quoin = run::release_binary("quoin", "quoin")?;
    let torture = run::release_binary("quoin-torture", "quoin-torture")?;
    let quoin = ["--quoin".to_owned(), quoin.display().to_string()];
    run::replace_with(&torture, quoin.into_iter().chain(arguments))
}

/// Runs the simulator; fresh seeds that find something are kept in the tree.
fn sim(mut arguments: Vec<String>) -> anyhow::Result<()> {
    let simulator = run::release_binary("quoin-sim", "quoin-sim")?;
    let has =
        |flag: &str| arguments.iter().any(|argument| argument.split('=').next() == Some(flag));
    if has("--fresh") && !has("--keep") {
        let list = run::workspace_root().join("verification/quoin-sim/kept-seeds.txt");
        arguments.extend(["--keep".into(), list.display().to_string()]);
    }
    run::replace_with(&simulator, arguments)
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Demo(options) => demo::run(options),
        Command::Test(options) => test::run(&options),
        Command::Bench { arguments } => run::release_binary("quoin", "quoin").and_then(|quoin| {
            run::replace_with(&quoin, ["bench".into()].into_iter().chain(arguments))
        }),
        Command::Profile(options) => profile::run(&options),
        Command::Sim { arguments } => sim(arguments),
        Command::Model { arguments } => run::release_binary("quoin-model", "quoin-model")
            .and_then(|model| run::replace_with(&model, arguments)),
        Command::Mutants { arguments } => mutants::run(arguments),
        Command::Fuzz { arguments } => run::release_binary("quoin-fuzz", "quoin-fuzz")
            .and_then(|fuzzer| run::replace_with(&fuzzer, arguments)),
        Command::Torture { arguments } => torture(arguments),
        Command::Upgrade(options) => upgrade::run(options),
        Command::RecordFormats(options) => formats::run(&options),
        Command::Package(options) => package::run(&options),
        Command::Conformance => conformance::run(),
        Command::Trace(options) => trace::run(&options),
        Command::Lint(options) => lint::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
