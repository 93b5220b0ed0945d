//! Manual pages of man(7), made of the help: one of the whole, and one of each group of commands.

use std::fmt::Write;

use anyhow::{Result, bail};
use clap::{Arg, Command};

/// The page of a group of commands, or of the whole where none is named.
pub fn page(mut whole: Command, group: Option<&str>) -> Result<String> {
    whole.build();
    match group {
        None => Ok(of_command("quoin", &whole)),
        Some(name) => match whole.find_subcommand(name) {
            Some(group) => Ok(of_command(&format!("quoin-{}", group.get_name()), group)),
            None => bail!("there is no command `quoin {name}`: `quoin help` lists them"),
        },
    }
}

/// Names of the pages beside the one of the whole.
pub fn groups(whole: &Command) -> Vec<String> {
    visible(whole).map(|command| command.get_name().to_owned()).collect()
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
}

fn of_command(title: &str, command: &Command) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut page = format!(".TH {} 1 \"\" \"Quoin {version}\" \"Quoin\"\n", title.to_uppercase());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    page += &format!(".SH NAME\n{} \\- {}\n", escaped(title), escaped(&about));
    page += &format!(".SH SYNOPSIS\n.nf\n{}.fi\n", lines(&usage(command)));
    page += &format!(".SH DESCRIPTION\n{}", lines(&described(command)));
    section_of_options(&mut page, ".SH OPTIONS\n", command);
    for inner in visible(command) {
        page += &format!(".SH {}\n{}", escaped(&shown(inner)), lines(&described(inner)));
        page += &format!(".PP\n.nf\n{}.fi\n", lines(&usage(inner)));
        // The commands of a group have a page of their own.
        if visible(inner).next().is_none() {
            section_of_options(&mut page, "", inner);
        } else if title == "quoin" {
            let name = inner.get_name();
            page += &format!(".PP\nSee\n.BR quoin\\-{} (1).\n", escaped(name));
        }
        let after = inner.get_after_long_help().or(inner.get_after_help());
        if let Some(after) = after {
            page += &format!(".PP\n.nf\n{}.fi\n", lines(&after.to_string()));
        }
    }
    page
}

fn shown(command: &Command) -> String {
    command.get_bin_name().unwrap_or(command.get_name()).to_owned()
}

fn usage(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    usage.trim_start_matches("Usage:").trim().to_owned()
}

fn described(command: &Command) -> String {
    let text = command.get_long_about().or(command.get_about());
    text.map(ToString::to_string).unwrap_or_default()
}

fn section_of_options(page: &mut String, title: &str, command: &Command) {
    // Options of every command are on the page of the whole.
    let is_shown = |argument: &&Arg| {
        let is_everywhere = argument.is_global_set() && command.get_name() != "quoin";
        !argument.is_hide_set() && !is_everywhere && argument.get_id() != "help"
    };
    let all: Vec<_> = command.get_arguments().filter(is_shown).collect();
    if all.is_empty() {
        return;
    }
    *page += title;
    for argument in all {
        let help = argument.get_long_help().or(argument.get_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        let defaults: Vec<_> =
            argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = match defaults.is_empty() || !argument.get_action().takes_values() {
            true => String::new(),
            false => format!(" [default: {}]", defaults.join(" ")),
        };
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            ".TP\n.B {}\n{}",
            escaped(&argument.to_string()),
            lines(&format!("{help}{default}"))
        );
    }
}

/// Text as lines that begin no request of the formatter.
fn lines(text: &str) -> String {
    let mut all = String::new();
    for line in text.trim().lines() {
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        all += &format!("{guard}{}\n", escaped(line));
    }
    all
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-")
}

#[cfg(test)]
mod tests {
    use clap::Subcommand;

    use super::*;

    #[derive(clap::Parser)]
    #[command(name = "quoin", about = "Storage.")]
    struct Line {
        #[command(subcommand)]
        command: Commands,
    }

    #[derive(Subcommand)]
    enum Commands {
        /// Volumes.
        #[command(subcommand)]
        Volume(VolumeCommand),
        #[command(hide = true)]
        Hidden,
    }

    #[derive(Subcommand)]
    enum VolumeCommand {
        /// Make one.
        ///
        /// .so it begins
        Create {
            name: String,
            /// Bytes of it.
            #[arg(long, default_value = "1GiB")]
            size: String,
        },
    }

    #[test]
    fn a_page_has_each_command_with_its_options_and_no_line_is_a_request_by_mistake() {
        use clap::CommandFactory;
        let page = |group| super::page(Line::command(), group).unwrap();
        let whole = page(None);
        assert!(whole.contains("quoin\\-volume (1)") && !whole.contains("idden"), "{whole}");
        let volume = page(Some("volume"));
        assert!(volume.contains(".SH quoin volume create"), "{volume}");
        assert!(volume.contains("Bytes of it [default: 1GiB]"), "{volume}");
        assert!(volume.contains("\\-\\-size") && volume.contains("\\&.so it"), "{volume}");
        assert!(super::page(Line::command(), Some("no")).is_err());
        assert_eq!(groups(&Line::command()), ["volume"]);
    }
}
