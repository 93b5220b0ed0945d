//! The command line as a whole.

use anyhow::{Context, Result};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;
use serde::Serialize;
use std::future::Future;

use crate::client::ClientOptions;
use crate::cordon::{self, Scope};
use crate::output::{self, Format};
use crate::{
    admins, completion, contexts, declare, demo, dev, events, fence, group, listing, manual,
    mirror, offline, preflight, roles, schedule, scrub, snapshot, status, support_bundle, target,
    tokens, volume,
};

/// Replicated block storage for containers.
///
/// A volume is a virtual disk kept as several replicas; a write is acknowledged once a majority
/// holds it, so it outlives the loss of any one of three.
#[derive(Parser)]
#[command(
    name = "quoin",
    version,
    arg_required_else_help = true,
    after_help = "Try it on this machine:\n  \
        quoin dev                                          an all-in-one cluster, until Ctrl-C\n  \
        quoin volume create db --size 1GiB --replicas 3    in another terminal\n  \
        quoin volume attach db                             prints a block device\n  \
        quoin volume get db                                what it survives, what it waits for"
)]
pub struct Cli {
    #[command(flatten)]
    client: ClientOptions,
    /// How listings and objects are printed.
    #[arg(
        long,
        short,
        global = true,
        value_enum,
        default_value = "table",
        hide_short_help = true,
        help_heading = "Everywhere"
    )]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create, look at, attach, resize, scale and delete volumes.
    #[command(subcommand, visible_alias = "vol")]
    Volume(volume::VolumeCommand),
    /// Make volumes what documents declare: made, grown, scaled, their replicas moved.
    #[command(after_help = declare::APPLY_EXAMPLE)]
    Apply(declare::ApplyOptions),
    /// Say what `apply` would change; ends with 3 where that is something, 0 where it is nothing.
    #[command(after_help = "Example:\n  quoin diff -f db.yaml")]
    Diff(declare::Files),
    /// Change a volume's document in an editor (VISUAL, EDITOR), and apply it.
    #[command(after_help = "Example:\n  quoin edit db")]
    Edit(declare::EditOptions),
    /// The content of volumes at moments: make, list and delete snapshots.
    #[command(subcommand, visible_alias = "snap")]
    Snapshot(snapshot::SnapshotCommand),
    /// Snapshots at intervals, of which the old ones are deleted.
    #[command(subcommand)]
    Schedule(schedule::ScheduleCommand),
    /// The copies of volumes: list, move, replace and remove them.
    #[command(subcommand)]
    Replica(volume::ReplicaCommand),
    /// The storage that replicas live in: list it, run it, look into it offline.
    #[command(subcommand)]
    Pool(listing::PoolCommand),
    /// The hosts that use volumes: list them, run one.
    #[command(subcommand)]
    Node(listing::NodeCommand),
    /// Blocks of network addresses that are shut out: their nodes and clients write nothing.
    #[command(subcommand)]
    Fence(fence::FenceCommand),
    /// The people and tools that govern the cluster from afar: list and remove them.
    #[command(subcommand)]
    Admin(admins::AdminCommand),
    /// The controllers on other hosts that commands talk to, by name.
    #[command(subcommand)]
    Context(contexts::ContextCommand),
    /// Named sets of volumes, each of which is mirrored as one.
    #[command(subcommand)]
    Group(group::GroupCommand),
    /// Other clusters, and the volumes that are mirrored to and from them: pair, enable, promote, demote.
    #[command(subcommand)]
    Mirror(mirror::MirrorCommand),
    /// The cluster on one page: its parts, the volumes that are not well, the work under way.
    #[command(after_help = status::HELP)]
    Status,
    /// Events so far, and with -w those that come.
    Events(events::EventOptions),
    /// The cluster as a whole.
    #[command(subcommand)]
    Cluster(listing::ClusterCommand),
    /// Tokens that let pools, nodes and admins join: make, list and revoke them.
    #[command(subcommand)]
    Token(tokens::TokenCommand),
    /// A whole cluster on this machine, one process a part, until Ctrl-C.
    Dev(dev::DevOptions),
    /// Make a cluster, or serve one: records, placement, certificates; back it up, recover it.
    #[command(subcommand)]
    Controller(roles::ControllerCommand),
    /// Serve the volumes that this host uses, each on an NBD socket; `config` asks what the target of
    /// a volume goes by.
    Target(target::TargetCommand),
    /// Make block devices of the volumes that this host's target serves.
    Attach(roles::AttachOptions),
    /// Keep the kernel's side of attached volumes while `quoin attach` is away, so that its death
    /// or its update only pauses their IO.
    AttachHolder(roles::HolderOptions),
    /// Look whether this host can do its part: kernel, devices, tools, capabilities, mounts, ports, disks, clock.
    /// Ends with 3 where something is missing.
    #[command(
        after_help = "Example:\n  quoin preflight --for attach --for node --for pool --run /run/quoin \
        --port 7401 --device /dev/sdb"
    )]
    Preflight(preflight::PreflightOptions),
    /// Write one file that tells those who help how the cluster and this host stand. No secret is in it.
    #[command(after_help = "Example:\n  quoin support-bundle --into case-17.tar.zst\n  \
        tar --zstd -tf case-17.tar.zst")]
    SupportBundle(support_bundle::SupportBundleOptions),
    /// A volume that outlives its parts, shown under load; takes half a minute, leaves nothing.
    #[command(after_help = "Examples:\n  \
        quoin demo       a volume in use, while each part below it is killed in turn\n  \
        quoin demo dr    a database whose cluster is lost: failover, failback")]
    Demo(demo::DemoOptions),
    /// Measure Quoin beside the floor: the same work with no product in it.
    Bench(quoin_bench::Options),
    /// One process of the floor.
    #[command(subcommand, hide = true)]
    BenchPart(quoin_bench::Part),
    /// A shell's completion script: `source <(quoin completion bash)`.
    Completion { shell: clap_complete::Shell },
    /// A manual page: of the whole, or of a group of commands; with --list the names of those.
    #[command(after_help = "Example:\n  quoin manual volume | man -l -")]
    Manual {
        group: Option<String>,
        #[arg(long, conflicts_with = "group")]
        list: bool,
    },
    /// The version of this binary.
    Version,
}

/// This binary, as `quoin version -o json` has it.
#[derive(Serialize)]
struct VersionView {
    version: &'static str,
}

/// Set by a shell's completion script, which asks what may come next.
const COMPLETE: &str = "QUOIN_COMPLETE";

/// Answers a shell that asks what may come next, and ends this process then.
pub fn complete() {
    CompleteEnv::with_factory(|| completion::with_names(Cli::command())).var(COMPLETE).complete();
}

/// The arguments of this process. Without a command, or with a group alone, the user gets its help
/// instead of a list of names.
pub fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| {
        let words: Vec<String> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        if error.kind() != ErrorKind::MissingSubcommand {
            with_own_usage(error, &words).exit();
        }
        eprint!("{}", group_of(&words).render_help());
        std::process::exit(error.exit_code())
    })
}

/// The command, or the group of commands, that these arguments name.
fn group_of(words: &[String]) -> clap::Command {
    let mut group = Cli::command();
    group.build();
    for word in words {
        if let Some(inner) = group.find_subcommand(word) {
            group = inner.clone();
        }
    }
    group
}

/// A refusal as the user sees it: with the command's own usage line (clap's would show values of
/// the environment as if they were required), and without control characters for the terminal.
fn with_own_usage(mut error: clap::Error, words: &[String]) -> clap::Error {
    if error.get(ContextKind::Usage).is_some() {
        let usage = group_of(words).render_usage();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    }
    if !words.iter().any(|word| output::plain(word) != *word) {
        return error;
    }
    let escaped: Vec<_> = error
        .context()
        .filter_map(|(kind, value)| match value {
            ContextValue::String(text) => Some((kind, ContextValue::String(output::plain(text)))),
            ContextValue::Strings(texts) => {
                let texts = texts.iter().map(|text| output::plain(text)).collect();
                Some((kind, ContextValue::Strings(texts)))
            }
            // clap's suggestion repeats the argument in clap's own colours.
            _ if kind == ContextKind::Suggested => Some((kind, ContextValue::None)),
            _ => None,
        })
        .collect();
    for (kind, value) in escaped {
        error.insert(kind, value);
    }
    error
}

impl Cli {
    pub fn run(self) -> Result<()> {
        let Self { client, output: format, command } = self;
        match command {
            Command::Volume(command) => wait_for(volume::run(command, &client, format)),
            Command::Snapshot(command) => wait_for(snapshot::run(command, &client, format)),
            Command::Schedule(command) => wait_for(schedule::run(command, &client, format)),
            Command::Replica(command) => wait_for(volume::run_replica(command, &client, format)),
            Command::Apply(options) => wait_for(declare::apply(options, &client, format)),
            Command::Diff(files) => wait_for(declare::diff(files, &client, format)),
            Command::Edit(options) => wait_for(declare::edit(options, &client, format)),
            Command::Pool(listing::PoolCommand::Run(options)) => roles::pool(*options),
            Command::Node(listing::NodeCommand::Run(options)) => roles::node(*options),
            Command::Mirror(mirror::MirrorCommand::Run(options)) => roles::mirror(*options),
            Command::Target(target::TargetCommand::Run(options)) => roles::target(*options),
            Command::Target(target::TargetCommand::Ask(target::Ask::Config { volume })) => {
                wait_for(target::config(&volume, &client, format))
            }
            Command::Attach(options) => roles::attach(options),
            Command::AttachHolder(options) => roles::hold(&options),
            Command::Preflight(options) => preflight::run(&options, format),
            Command::SupportBundle(options) => {
                wait_for(support_bundle::run(options, &client, format))
            }
            Command::Pool(listing::PoolCommand::Inspect(options)) => {
                offline::inspect(&options, format)
            }
            Command::Pool(listing::PoolCommand::Check(options)) => offline::check(&options, format),
            Command::Pool(listing::PoolCommand::Export(options)) => {
                offline::export(&options, format)
            }
            Command::Pool(listing::PoolCommand::Scrub(options)) => {
                wait_for(scrub::run(options, &client, format))
            }
            Command::Pool(listing::PoolCommand::List) => wait_for(listing::pools(&client, format)),
            Command::Node(listing::NodeCommand::List) => wait_for(listing::nodes(&client, format)),
            Command::Pool(listing::PoolCommand::Cordon { pool }) => {
                wait_for(cordon::cordon(Scope::Pool(pool), &client, format))
            }
            Command::Pool(listing::PoolCommand::Uncordon { pool }) => {
                wait_for(cordon::uncordon(Scope::Pool(pool), &client, format))
            }
            Command::Pool(listing::PoolCommand::Drain(options)) => {
                wait_for(cordon::drain(Scope::Pool, options, &client, format))
            }
            Command::Node(listing::NodeCommand::Cordon { node }) => {
                wait_for(cordon::cordon(Scope::Node(node), &client, format))
            }
            Command::Node(listing::NodeCommand::Uncordon { node }) => {
                wait_for(cordon::uncordon(Scope::Node(node), &client, format))
            }
            Command::Node(listing::NodeCommand::Drain(options)) => {
                wait_for(cordon::drain(Scope::Node, options, &client, format))
            }
            Command::Pool(listing::PoolCommand::Remove { pool, leaving }) => {
                wait_for(listing::remove_pool(&pool, &leaving, &client, format))
            }
            Command::Node(listing::NodeCommand::Remove { node, leaving }) => {
                wait_for(listing::remove_node(&node, &leaving, &client, format))
            }
            Command::Node(listing::NodeCommand::Set { node, manages_volumes }) => {
                wait_for(listing::set_node(&node, manages_volumes, &client, format))
            }
            Command::Fence(command) => wait_for(fence::run(command, &client, format)),
            Command::Admin(command) => wait_for(admins::run(command, &client, format)),
            Command::Context(command) => contexts::run(command, format),
            Command::Status => wait_for(status::run(&client, format)),
            Command::Events(options) => wait_for(events::run(options, &client, format)),
            Command::Cluster(command) => wait_for(listing::cluster(command, &client, format)),
            Command::Token(command) => wait_for(tokens::run(command, &client, format)),
            Command::Group(command) => wait_for(group::run(command, &client, format)),
            Command::Mirror(command) => wait_for(mirror::run(command, &client, format)),
            Command::Dev(options) => dev::run(options),
            Command::Controller(command) => roles::controller(command, &client, format),
            Command::Demo(options) => demo::run(&options),
            Command::Bench(options) => Ok(quoin_bench::run(&options, &std::env::current_exe()?)?),
            Command::BenchPart(part) => Ok(quoin_bench::run_part(&part)?),
            Command::Completion { shell } => {
                let (shells, name) = (Shells::builtins(), shell.to_string());
                let completer = shells.completer(&name).context("a shell that is known")?;
                let mut script = Vec::new();
                completer.write_registration(COMPLETE, "quoin", "quoin", "quoin", &mut script)?;
                output::print_line(String::from_utf8_lossy(&script).trim_end())
            }
            Command::Manual { list: true, .. } => {
                output::print_line(&manual::groups(&Cli::command()).join("\n"))
            }
            Command::Manual { group, .. } => {
                let page = manual::page(Cli::command(), group.as_deref())?;
                output::print_line(page.trim_end())
            }
            Command::Version => {
                let view = VersionView { version: env!("CARGO_PKG_VERSION") };
                output::print_one(format, &view, || format!("quoin {}", view.version))
            }
        }
    }
}

/// A command is one conversation with the controller: one thread is enough.
fn wait_for<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("start an event loop")?.block_on(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(words: &[&str]) -> String {
        let all = [&["quoin"], words].concat();
        let Err(error) = Cli::try_parse_from(&all) else { panic!("{words:?} is taken") };
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        with_own_usage(error, &words).render().ansi().to_string()
    }

    #[test]
    fn a_usage_line_shows_all_arguments_of_a_command() {
        // Arguments stand for values of the environment here: clap does not distinguish them.
        let message = refusal(&["volume", "attach", "--run", "/x", "--socket", "/y"]);
        let line = message.lines().find(|line| line.contains("quoin volume attach")).unwrap();
        assert!(!line.contains("--run") && !line.contains("--socket"), "{message}");
        assert!(line.contains("OPTIONS") && line.contains("VOLUME"), "{message}");
    }

    #[test]
    fn no_control_character_of_an_argument_reaches_the_terminal() {
        for words in [
            &["volume", "get", "--we\u{1b}[31mird"][..],
            &["vol\u{1b}[31mume"],
            &["volume", "list", "-o", "x\u{7}\u{1b}]0;t"],
            &["volume", "create", "db", "--size", "1\u{1b}[31m"],
            &["volume", "create", "db", "--replicas", "\u{9b}31m"],
        ] {
            let message = refusal(words);
            // clap's own colours are of these few.
            let own = message.replace("\u{1b}[0m", "").replace("\u{1b}[1m", "");
            let own = ["31", "32", "33", "4"]
                .iter()
                .fold(own, |text, code| text.replace(&format!("\u{1b}[{code}m"), ""));
            assert!(!own.contains(|c: char| c.is_control() && c != '\n'), "{own:?}");
            assert!(
                !message.contains("\u{1b}[31mird") && !message.contains("\u{1b}[31mume"),
                "{message:?}"
            );
            let escaped = ["\\u{1b}", "\\u{7}", "\\u{9b}", "whole number"];
            assert!(escaped.iter().any(|part| message.contains(part)), "{message:?}");
        }
    }

    /// Two arguments with one name: clap may give a command the value of either.
    #[test]
    fn no_argument_of_a_command_has_the_name_of_a_global_one() {
        fn check(command: &clap::Command, everywhere: &[clap::Id]) {
            for inner in command.get_subcommands() {
                for argument in inner.get_arguments() {
                    let (inner, id) = (inner.get_name(), argument.get_id());
                    assert!(!everywhere.contains(id), "{inner}: {id}");
                }
                check(inner, everywhere);
            }
        }
        let command = Cli::command();
        let everywhere = command.get_arguments().filter(|argument| argument.is_global_set());
        let everywhere: Vec<_> = everywhere.map(|argument| argument.get_id().clone()).collect();
        assert!(everywhere.len() >= 4, "{everywhere:?}");
        check(&command, &everywhere);
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
        completion::with_names(Cli::command()).debug_assert();
    }
}
