//! Work that a cluster does without a request, as flags: of the controller, and of `quoin dev`,
//! which passes them on.

use std::time::Duration;

use clap::Args;
use quoin_control::dying::{DyingLimits, DyingPolicy};
use quoin_control::policy::{RebalanceAt, ReplaceAfter, Within};

use crate::size::number_within;

const LIMITS: DyingLimits = DyingLimits::DEFAULT;

#[derive(Args, Clone)]
pub struct HealingOptions {
    /// Replace a replica that is gone for so long (as in 90s, 10m, 2h), or `off`: only what people
    /// ask for changes anything. A volume may say otherwise.
    #[arg(long, value_name = "TIME", default_value_t = ReplaceAfter::DEFAULT)]
    replace_after: ReplaceAfter,
    /// Take the volumes of a node away where neither the controller nor a pool has heard of it for so
    /// long (as in 10s, 1m): their targets move to other nodes that have them, and a volume that one
    /// node alone has is given to the node that asks for it.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = node_timeout)]
    node_timeout: Duration,
    /// Replicas rebuilt into one pool at a time, of those that self-healing and drains begin.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = quoin_control::HEALS_PER_POOL,
        allow_hyphen_values = true,
        value_parser = number_within::<u32>(
            1..=64,
            "1 to 64 at a time; to rebuild nothing by itself: --replace-after off"
        )
    )]
    heals_per_pool: u32,
    /// Move replicas from the fullest pool to the emptiest, one at a time, where the shares of them
    /// that are used are further apart than this (5% to 90%), or `off`. Nothing moves while
    /// overdue replicas or those of drained pools are being made elsewhere, nor of volumes whose
    /// replace-after is `off`.
    #[arg(long, value_name = "SHARE", default_value_t = RebalanceAt::DEFAULT)]
    rebalance_at: RebalanceAt,
    /// Fate of a pool whose disk refuses, forgets or stalls too often: its replicas are made
    /// elsewhere (drain), it takes nothing new (cordon), or nothing (off).
    #[arg(long, value_name = "POLICY", default_value_t = DyingPolicy::Drain)]
    dying_pools: DyingPolicy,
    /// Too often within so long (as in 10m, 2h; a minute to seven days).
    #[arg(long, value_name = "TIME", default_value_t = LIMITS.within)]
    dying_within: Within,
    /// So many operations that the disk refused are too many, where they are one in
    /// --dying-one-in or more.
    #[arg(long, value_name = "NUMBER", default_value_t = LIMITS.errors, value_parser = number())]
    dying_errors: u64,
    /// See --dying-errors.
    #[arg(long, value_name = "NUMBER", default_value_t = LIMITS.one_in, value_parser = number())]
    dying_one_in: u64,
    /// So many bad copies that were found are too many.
    #[arg(long, value_name = "NUMBER", default_value_t = LIMITS.bad, value_parser = number())]
    dying_bad_copies: u64,
    /// So many reads and syncs that took 20 s or longer are too many.
    #[arg(long, value_name = "NUMBER", default_value_t = LIMITS.stalls, value_parser = number())]
    dying_stalls: u64,
}

/// Reads a time within which a node that restarts its processes is not taken for lost.
fn node_timeout(text: &str) -> Result<Duration, String> {
    let sound = Duration::from_secs(5)..=Duration::from_secs(3600);
    let time = quoin_api::volume::parse_time(text).filter(|time| sound.contains(time));
    time.ok_or_else(|| "write a time of 5s to 60m, as in 10s or 1m".to_owned())
}

fn number() -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    let rule = "1 to 1000000000; to do nothing about such pools: --dying-pools off";
    number_within(1..=1_000_000_000, rule)
}

impl HealingOptions {
    /// Writes the flags to a controller's options.
    pub fn apply_to(&self, control: &mut quoin_control::Options) {
        control.replace_after = self.replace_after;
        control.node_timeout_ms = self.node_timeout.as_millis() as u64;
        control.heals_per_pool = self.heals_per_pool;
        control.rebalance_at = self.rebalance_at;
        control.dying_pools = self.dying_pools;
        control.dying_limits = DyingLimits {
            within: self.dying_within,
            errors: self.dying_errors,
            one_in: self.dying_one_in,
            bad: self.dying_bad_copies,
            stalls: self.dying_stalls,
        };
    }

    /// Flags of `quoin controller run` for the same.
    pub fn flags(&self) -> Vec<(&'static str, String)> {
        vec![
            ("--replace-after", self.replace_after.to_string()),
            ("--node-timeout", format!("{}ms", self.node_timeout.as_millis())),
            ("--heals-per-pool", self.heals_per_pool.to_string()),
            ("--rebalance-at", self.rebalance_at.to_string()),
            ("--dying-pools", self.dying_pools.to_string()),
            ("--dying-within", self.dying_within.to_string()),
            ("--dying-errors", self.dying_errors.to_string()),
            ("--dying-one-in", self.dying_one_in.to_string()),
            ("--dying-bad-copies", self.dying_bad_copies.to_string()),
            ("--dying-stalls", self.dying_stalls.to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(arguments: &[&str]) -> Result<quoin_control::Options, clap::Error> {
        let command = HealingOptions::augment_args(clap::Command::new("t").no_binary_name(true));
        let matches = command.try_get_matches_from(arguments)?;
        let options = HealingOptions::from_arg_matches(&matches)?;
        let mut control = quoin_control::Options::new("/nowhere");
        options.apply_to(&mut control);
        // Flags that a supervisor passes on mean the same.
        let flags = options.flags();
        let words: Vec<_> = flags.iter().flat_map(|(f, value)| [*f, value.as_str()]).collect();
        if words != arguments {
            let again = parse(&words)?;
            assert_eq!(format!("{again:?}"), format!("{control:?}"));
        }
        Ok(control)
    }

    #[test]
    fn flags_are_passed_to_the_controller_and_defaults_are_its_own() {
        let none = parse(&[]).unwrap();
        assert_eq!(format!("{none:?}"), format!("{:?}", quoin_control::Options::new("/nowhere")));
        let told = parse(&[
            "--replace-after",
            "off",
            "--node-timeout",
            "30s",
            "--heals-per-pool",
            "7",
            "--rebalance-at",
            "33",
            "--dying-pools",
            "cordon",
            "--dying-within",
            "2h",
            "--dying-errors",
            "1",
            "--dying-one-in",
            "2",
            "--dying-bad-copies",
            "3",
            "--dying-stalls",
            "4",
        ])
        .unwrap();
        assert_eq!(told.replace_after, ReplaceAfter::Never);
        assert_eq!(told.node_timeout_ms, 30_000);
        assert_eq!((told.heals_per_pool, told.rebalance_at), (7, RebalanceAt::Apart(33)));
        assert_eq!(told.dying_pools, DyingPolicy::Cordon);
        let limits = told.dying_limits;
        assert_eq!(limits.within.to_string(), "2h");
        assert_eq!([limits.errors, limits.one_in, limits.bad, limits.stalls], [1, 2, 3, 4]);
    }

    #[test]
    fn nonsensical_values_are_refused_by_flag() {
        for (flag, value) in [
            ("--replace-after", "soon"),
            ("--heals-per-pool", "0"),
            ("--rebalance-at", "4%"),
            ("--dying-pools", "maybe"),
            ("--dying-within", "1s"),
            ("--dying-errors", "0"),
            ("--dying-one-in", "0"),
            ("--dying-bad-copies", "0"),
            ("--dying-stalls", "0"),
        ] {
            let message = parse(&[flag, value]).unwrap_err().to_string();
            assert!(message.contains(flag), "{message}");
        }
    }
}
