//! `quoin volume modify`: options of a volume that exists, changed while it is used.

use anyhow::{Result, bail};
use clap::Args;
use quoin_api::control::{ModifyVolumeRequest, VolumeSpec};
use serde::Serialize;
use std::time::Instant;

use super::options::ChangeFlags;
use super::view::VolumeView;
use crate::client::{ClientOptions, Cluster, get_volume, id_ref};
use crate::output::{self, Format, quoted};
use crate::size::number_within;

pub const HELP: &str = "What is named changes, all of it or nothing; the rest stays as it is. The \
    command ends\nonce the new options rule the IO of an attached volume, which takes less than a \
    second\nwhile its target runs. A volume that is attached nowhere has them with its next use.\n\n\
    Examples:\n  quoin volume modify db --iops-limit 500 --bandwidth-limit 50MiB\n  \
    quoin volume modify db --iops-limit off         no limit any more\n  \
    quoin volume modify db --durability media       from now on a write is on media first\n  \
    quoin volume modify db --replicas 5             made, rebuilt, then counted\n  \
    quoin volume modify db --on-full enospc --dry-run\n\n\
    Fewer replicas: `quoin replica remove`. Size: `quoin volume resize`.";

#[derive(Args)]
pub struct ModifyOptions {
    /// The volume's name or id.
    volume: String,
    #[command(flatten)]
    options: ChangeFlags,
    /// Copies to keep, each in a pool of its own; more than there are.
    #[arg(long, allow_hyphen_values = true, value_parser = number_within::<u32>(1..=8,
          "a volume has 1 to 8 replicas, each in a pool of its own"))]
    replicas: Option<u32>,
    /// Only say what would change.
    #[arg(long)]
    dry_run: bool,
    /// Return as soon as the change is recorded.
    #[arg(long)]
    no_wait: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ModifiedView {
    name: String,
    /// Changes in words; empty: the volume is so already.
    changes: Vec<String>,
    /// The options rule all IO.
    in_force: bool,
    /// Reason why that waits; empty: none.
    waiting_for: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<VolumeView>,
}

pub async fn modify(
    cluster: &mut Cluster,
    options: ModifyOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let asked = VolumeSpec { replicas: options.replicas.unwrap_or(0), ..options.options.spec };
    if asked == VolumeSpec::default() {
        bail!("nothing to change is named: `quoin volume modify --help` lists what can be changed");
    }
    let volume = get_volume(cluster, &options.volume).await?;
    let name = volume.spec.map(|spec| spec.name).unwrap_or_default();
    let (began, mut changes) = (Instant::now(), Vec::new());
    let answer = loop {
        let request = ModifyVolumeRequest {
            volume: Some(id_ref(&volume.id)),
            spec: Some(asked.clone()),
            dry_run: options.dry_run,
        };
        let answer = cluster.modify_volume(request).await.map_err(super::in_flags)?.into_inner();
        // A repeat changes nothing, and waits on.
        changes.extend(answer.changes.iter().cloned());
        let goes_on = !answer.waiting_for.is_empty() && !options.no_wait;
        if !goes_on || began.elapsed() > client.timeout() {
            break answer;
        }
    };
    let waiting_for = answer.waiting_for;
    if !waiting_for.is_empty() && !options.no_wait {
        bail!(
            "volume {name} is changed in the records ({}) and not in force yet: it waits for \
             {waiting_for}. It goes on by itself: watch it with `quoin volume doctor {}`",
            changes.join("; "),
            quoted(&name)
        );
    }
    let view = ModifiedView {
        volume: answer.volume.filter(|_| !options.dry_run).map(VolumeView::from),
        in_force: waiting_for.is_empty() && !options.dry_run,
        waiting_for,
        name,
        changes,
    };
    output::print_one(format, &view, || view.text(options.dry_run))
}

impl ModifiedView {
    fn text(&self, dry_run: bool) -> String {
        if self.changes.is_empty() {
            return format!("volume {}: already so", self.name);
        }
        let outcome = match (dry_run, self.waiting_for.as_str()) {
            (true, _) => "would change".to_owned(),
            (false, "") => "in force".to_owned(),
            (false, waiting_for) => format!("recorded; it waits for {waiting_for}"),
        };
        format!("volume {}: {} ({outcome})", self.name, self.changes.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_says_what_changed_and_whether_it_rules() {
        let view = |changes: &[&str], waiting_for: &str| ModifiedView {
            name: "db".into(),
            changes: changes.iter().map(ToString::to_string).collect(),
            in_force: waiting_for.is_empty(),
            waiting_for: waiting_for.into(),
            volume: None,
        };
        assert_eq!(view(&[], "").text(false), "volume db: already so");
        assert_eq!(
            view(&["a 1 to 2", "b x to y"], "").text(false),
            "volume db: a 1 to 2; b x to y (in force)"
        );
        assert!(view(&["a 1 to 2"], "").text(true).contains("would change"));
        assert!(view(&["a 1 to 2"], "a report").text(false).contains("waits for a report"));
    }
}
