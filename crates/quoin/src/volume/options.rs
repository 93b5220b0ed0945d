//! The flags of a volume's options: one for each row of [`OPTIONS`], so that an option which is added
//! there is a flag here.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command};
use quoin_api::control::VolumeSpec;
use quoin_api::volume::{OPTIONS, Values, VolumeOption};

use crate::size::parse_rate;

/// Values of the flags; an option without its flag is as the cluster has it.
#[derive(Clone, Debug, Default)]
pub struct OptionFlags {
    pub spec: VolumeSpec,
}

/// `onQuorumLoss` as `on-quorum-loss`.
fn flag(key: &str) -> String {
    let letters = key.chars().flat_map(|letter| {
        let dash = letter.is_ascii_uppercase().then_some('-');
        dash.into_iter().chain([letter.to_ascii_lowercase()])
    });
    letters.collect()
}

fn argument(option: &'static VolumeOption) -> Arg {
    let help = match option.key {
        "blockSize" => {
            "Logical block size; fixed for life. 512 for disk images and VMs with a GPT that was made \
             for sectors of 512 bytes: with 4096 its partitions are not found"
        }
        _ => option.help,
    };
    let argument = Arg::new(option.key).long(flag(option.key)).help(help);
    match option.values {
        Values::Words(words) => {
            argument.value_parser(PossibleValuesParser::new(words.split(" | ")))
        }
        Values::Time => argument.value_name("TIME").value_parser(|text: &str| value(option, text)),
        Values::Rate { what, .. } => argument
            .value_name(what.to_ascii_uppercase())
            .allow_hyphen_values(true)
            .value_parser(|text: &str| value(option, text)),
    }
}

/// Checks a value here already, so that a mistake is reported with its flag.
fn value(option: &VolumeOption, text: &str) -> Result<String, String> {
    let text = match option.values {
        // People write 100MiB.
        Values::Rate { what: "bytes", .. } if text.trim() != "off" => parse_rate(text)?.to_string(),
        _ => text.trim().to_owned(),
    };
    let way_out = match option.values {
        Values::Rate { .. } => "; off is no limit",
        _ => "",
    };
    option.set(&mut VolumeSpec::default(), &text).map_err(|rule| format!("{rule}{way_out}"))?;
    Ok(text)
}

/// Flags of those options that change while a volume exists.
#[derive(Clone, Debug, Default)]
pub struct ChangeFlags {
    pub spec: VolumeSpec,
}

/// The flag of an option of a volume that exists: there is no default.
fn change_argument(option: &'static VolumeOption) -> Arg {
    let help = option.help.split(" [default").next().unwrap_or_default();
    let help = match option.values {
        Values::Rate { .. } => format!("{help}, or off"),
        _ => help.to_owned(),
    };
    argument(option).help(help)
}

impl clap::Args for ChangeFlags {
    fn augment_args(command: Command) -> Command {
        let changing = OPTIONS.iter().filter(|option| option.changes);
        command.args(changing.map(change_argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for ChangeFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        read(OPTIONS.iter().filter(|option| option.changes), &mut self.spec, matches)
    }
}

/// Takes the values of flags over.
fn read(
    options: impl Iterator<Item = &'static VolumeOption>,
    spec: &mut VolumeSpec,
    matches: &ArgMatches,
) -> Result<(), clap::Error> {
    for option in options {
        if let Some(value) = matches.get_one::<String>(option.key) {
            let taken = option.set(spec, value);
            taken
                .map_err(|rule| clap::Error::raw(clap::error::ErrorKind::ValueValidation, rule))?;
        }
    }
    Ok(())
}

impl clap::Args for OptionFlags {
    fn augment_args(command: Command) -> Command {
        command.args(OPTIONS.iter().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for OptionFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        read(OPTIONS.iter(), &mut self.spec, matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: OptionFlags,
    }

    #[test]
    fn each_option_is_a_flag_of_its_name_with_its_values() {
        let line = Line::try_parse_from([
            "create",
            "--on-quorum-loss",
            "fail",
            "--block-size",
            "512",
            "--iops-limit",
            "500",
            "--bandwidth-limit",
            "10MiB",
            "--replace-after",
            "off",
            "--reads",
            "confirmed",
        ]);
        let spec = line.unwrap_or_else(|error| panic!("{error}")).options.spec;
        assert_eq!((spec.on_quorum_loss.as_str(), spec.reads.as_str()), ("fail", "confirmed"));
        assert_eq!((spec.block_size, spec.iops_limit, spec.bandwidth_limit), (512, 500, 10 << 20));
        assert_eq!(spec.replace_after, "off");
        assert!(spec.on_full.is_empty() && spec.fs_type.is_empty());
    }

    #[derive(Parser)]
    struct Change {
        #[command(flatten)]
        options: ChangeFlags,
    }

    #[test]
    fn a_change_has_the_flags_of_options_that_change_and_takes_limits_away() {
        let change = Change::try_parse_from([
            "modify",
            "--durability",
            "media",
            "--iops-limit",
            "off",
            "--bandwidth-limit",
            "off",
        ]);
        let spec = change.unwrap_or_else(|error| panic!("{error}")).options.spec;
        let none = quoin_api::volume::NO_LIMIT;
        assert_eq!((spec.iops_limit, spec.bandwidth_limit), (none, none));
        assert!(Change::try_parse_from(["modify", "--block-size", "512"]).is_err());
        let help = Change::try_parse_from(["modify", "--help"]).err().unwrap().to_string();
        assert!(help.contains("--on-full") && !help.contains("[default"), "{help}");
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_flag_and_the_right_ones() {
        for (flag, value, words) in [
            ("--durability", "disk", "media"),
            ("--iops-limit", "0", "no limit"),
            ("--iops-limit", "-1", "at least 1"),
            ("--bandwidth-limit", "1KiB", "at least 4096"),
            ("--replace-after", "soon", "90s"),
        ] {
            let refused = Line::try_parse_from(["create", flag, value]).err().unwrap().to_string();
            assert!(refused.contains(flag) && refused.contains(words), "{refused}");
        }
    }
}
