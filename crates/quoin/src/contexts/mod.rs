//! `quoin context …`: the controllers that commands talk to over the network, by name.

mod store;

pub use store::{Contexts, Entry, default_name};

use anyhow::{Result, bail};
use clap::Subcommand;
use clap_complete::{ArgValueCandidates, CompletionCandidate};
use quoin_api::control::cluster_client::ClusterClient;
use serde::Serialize;
use std::time::SystemTime;

use crate::client::Cluster;
use crate::events::show_time;
use crate::output::{self, Format, Row, fields};

#[derive(Subcommand)]
pub enum ContextCommand {
    /// The contexts of this user.
    #[command(visible_alias = "ls")]
    List,
    /// Have commands talk to this controller, where none runs on their own host.
    #[command(after_help = "Example:\n  quoin context use production")]
    Use {
        /// Its name, as `quoin context list` shows it.
        #[arg(value_name = "CONTEXT", add = ArgValueCandidates::new(candidates))]
        name: String,
    },
    /// Where a context leads, by which certificate, and how long that is good.
    Show {
        /// Its name [default: the current one].
        #[arg(value_name = "CONTEXT", add = ArgValueCandidates::new(candidates))]
        name: Option<String>,
    },
    /// Forget a controller, with the key for it. The admin stays a member until `quoin admin remove`.
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name, as `quoin context list` shows it.
        #[arg(value_name = "CONTEXT", add = ArgValueCandidates::new(candidates))]
        name: String,
    },
    /// Give a context another name.
    Rename {
        /// Its name, as `quoin context list` shows it.
        #[arg(value_name = "CONTEXT", add = ArgValueCandidates::new(candidates))]
        name: String,
        /// Its name from now on.
        to: String,
    },
}

pub fn run(command: ContextCommand, format: Format) -> Result<()> {
    let contexts = Contexts::of_user()?;
    match command {
        ContextCommand::List => {
            let names = contexts.names()?;
            let rows: Vec<_> = names.iter().map(|name| ContextView::of(&contexts, name)).collect();
            let nothing = "no contexts: `quoin cluster join --role admin` makes one";
            output::print_list(format, &rows, nothing)
        }
        ContextCommand::Use { name } => {
            contexts.make_current(&name)?;
            let view = ContextView::of(&contexts, &name);
            output::print_one(format, &view, || {
                format!("commands use {} where no controller runs on their host", view.controller)
            })
        }
        ContextCommand::Show { name } => {
            let Some(name) = name.or_else(|| contexts.current()) else {
                bail!(
                    "there is no current context: `quoin context list` shows those that are there, \
                     `quoin context use` chooses one"
                );
            };
            contexts.load(&name)?;
            let view = ContextView::of(&contexts, &name);
            output::print_one(format, &view, || view.text())
        }
        ContextCommand::Remove { name } => {
            let view = ContextView::of(&contexts, &name);
            let was_current = contexts.remove(&name)?;
            let next = match was_current {
                true => "; there is no current context now",
                false => "",
            };
            output::print_one(format, &view, || {
                format!(
                    "context {name} is removed with its key{next}; its admin is a member until \
                     `quoin admin remove`"
                )
            })
        }
        ContextCommand::Rename { name, to } => {
            contexts.rename(&name, &to)?;
            let view = ContextView::of(&contexts, &to);
            output::print_one(format, &view, || format!("context {name} is {to} now"))
        }
    }
}

/// The names of contexts, each with where it leads, for a shell that completes one.
pub fn candidates() -> Vec<CompletionCandidate> {
    let Ok(contexts) = Contexts::of_user() else { return Vec::new() };
    let candidate = |name: String| {
        let leads_to = contexts.load(&name).ok().map(|entry| entry.controller.into());
        CompletionCandidate::new(name).help(leads_to)
    };
    contexts.names().unwrap_or_default().into_iter().map(candidate).collect()
}

/// Connects to the controller of a context. A certificate that is due is renewed first.
pub async fn connect(name: &str) -> Result<Cluster> {
    let contexts = Contexts::of_user()?;
    let entry = contexts.load(name)?;
    let identity = contexts.identity(name)?;
    let word = output::quoted(name);
    if identity.has_run_out() {
        bail!(
            "the certificate of context {name} has run out: make a token with `quoin token create \
             --role admin --name {}` where the controller runs, and join again with `quoin cluster \
             join --context {word} --controller {} --token TOKEN`",
            identity.peer().name,
            entry.controller
        );
    }
    if identity.is_due()
        && let Err(error) = identity.renew(&entry.controller).await
    {
        if let Some(why) = identity.not_valid_yet() {
            bail!("the certificate of context {name} cannot be used: {why} ({error})");
        }
        // The certificate is still valid.
        let left = identity.validity().1.duration_since(SystemTime::now()).unwrap_or_default();
        let days = left.as_secs() / 86_400;
        eprintln!("warning: the certificate of context {name} ends in {days} days: {error}");
    }
    match identity.connect(&entry.controller).await {
        Ok(channel) => Ok(ClusterClient::new(channel)),
        Err(quoin_identity::Error::Unreachable { address, reason }) => bail!(
            "no controller is reached at {address}, the address of context {name} ({reason}): \
             start it there, or choose another context with --context (`quoin context list`)"
        ),
        Err(error) => Err(error.into()),
    }
}

/// A context as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ContextView {
    name: String,
    current: bool,
    controller: String,
    admin: String,
    cluster_id: String,
    expires_at: String,
    directory: String,
    /// The fault that it has; empty: none.
    message: String,
}

impl ContextView {
    fn of(contexts: &Contexts, name: &str) -> Self {
        let entry = contexts.load(name);
        let identity = contexts.identity(name);
        let problem = |error: &anyhow::Error| output::sentence(error);
        let message = entry.as_ref().err().or(identity.as_ref().err()).map(problem);
        let peer = identity.as_ref().ok().map(|identity| identity.peer().clone());
        let expires = identity.as_ref().ok().map(|identity| identity.validity().1);
        let run_out = identity.as_ref().is_ok_and(quoin_identity::Identity::has_run_out);
        let not_yet = identity.as_ref().ok().and_then(quoin_identity::Identity::not_valid_yet);
        Self {
            name: name.to_owned(),
            current: contexts.current().as_deref() == Some(name),
            controller: entry.map(|entry| entry.controller).unwrap_or_default(),
            admin: peer.as_ref().map(|peer| peer.name.clone()).unwrap_or_default(),
            cluster_id: peer.map(|peer| peer.cluster.to_string()).unwrap_or_default(),
            expires_at: expires.map(shown).unwrap_or_default(),
            directory: contexts.directory(name).display().to_string(),
            message: message.unwrap_or_else(|| match (run_out, not_yet) {
                (true, _) => "the certificate has run out: join again".to_owned(),
                (false, Some(why)) => format!("the certificate cannot be used: {why}"),
                (false, None) => String::new(),
            }),
        }
    }

    fn text(&self) -> String {
        fields(&[
            ("context", self.name.clone()),
            ("controller", self.controller.clone()),
            ("admin", self.admin.clone()),
            ("cluster", self.cluster_id.clone()),
            ("good until", self.expires_at.clone()),
            ("directory", self.directory.clone()),
            ("current", if self.current { "yes" } else { "no" }.to_owned()),
            ("message", self.message.clone()),
        ])
    }
}

fn shown(time: SystemTime) -> String {
    show_time(&prost_types::Timestamp::from(time))
}

impl Row for ContextView {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "CURRENT",
        "CONTROLLER",
        "ADMIN",
        "GOOD UNTIL",
        "MESSAGE",
        "CLUSTER",
        "DIRECTORY",
    ];
    const NARROW: usize = 6;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            if self.current { "*" } else { "" }.to_owned(),
            self.controller.clone(),
            self.admin.clone(),
            self.expires_at.clone(),
            self.message.clone(),
            self.cluster_id.clone(),
            self.directory.clone(),
        ]
    }
}
