//! `quoin cluster join`: a certificate for a person or a tool, and a context that leads to the
//! controller by it.
//!
//! The directory is an identity like any other, and has the names under which libnbd and QEMU
//! look for certificates as links beside it, so a renewal reaches them too.

use anyhow::{Context, Result, bail};
use clap::Args;
use quoin_identity::{Identity, JoinRequest, Role};
use serde::Serialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::MemberOptions;
use crate::client::ClientOptions;
use crate::contexts::{self, Contexts, Entry};
use crate::output::{self, Format};

#[derive(Args)]
pub struct JoinOptions {
    /// The role; pools and nodes join by themselves as they are started.
    #[arg(long, default_value = "admin", value_parser = admin_alone)]
    role: Role,
    /// Where key and certificate go, with no context; keep it private.
    #[arg(long, value_name = "DIRECTORY")]
    to: Option<PathBuf>,
    #[command(flatten)]
    member: MemberOptions,
}

fn admin_alone(text: &str) -> Result<Role, String> {
    let by_itself = |command| {
        format!(
            "a {text} joins as it is started: give its token to `{command}` in QUOIN_JOIN_TOKEN"
        )
    };
    match text {
        "admin" => Ok(Role::Admin),
        "pool" => Err(by_itself("quoin pool run")),
        "node" => Err(by_itself("quoin target")),
        _ => Err("people and tools join as admin".into()),
    }
}

/// Names of our files for libnbd (`tls-certificates=`) and QEMU (`tls-creds-x509,dir=`).
const LINKS: [(&str, &str); 3] =
    [("ca-cert.pem", "ca.pem"), ("client-cert.pem", "cert.pem"), ("client-key.pem", "key.pem")];

/// An admin that joined, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JoinedView {
    admin: String,
    cluster_id: String,
    controller: String,
    directory: String,
    /// Empty where a directory was named instead.
    context: String,
    good_for_days: u64,
}

pub async fn join(options: JoinOptions, client: &ClientOptions, format: Format) -> Result<()> {
    let JoinOptions { role, to, member } = options;
    let mut context = None;
    let directory = match to {
        Some(_) if client.context.is_some() => {
            bail!("--to makes a certificate and no context: leave it or --context away")
        }
        Some(directory) => directory,
        None => {
            let contexts = Contexts::of_user()?;
            let named = client.context.clone();
            let name = named.unwrap_or_else(|| contexts::default_name(&member.controller));
            let directory = directory_of(&contexts, &name, &member.controller)?;
            context = Some((contexts, name));
            directory
        }
    };
    let identity = certified(role, &directory, &member).await?;
    for (link, file) in LINKS {
        link_to(&directory.join(link), file)?;
    }
    if let Some((contexts, name)) = &context {
        contexts.add(name, &Entry { controller: member.controller.clone() })?;
    }
    let left = identity.validity().1.duration_since(std::time::SystemTime::now());
    let view = JoinedView {
        admin: identity.peer().name.clone(),
        cluster_id: identity.cluster().to_string(),
        controller: member.controller,
        directory: directory.display().to_string(),
        context: context.map(|(_, name)| name).unwrap_or_default(),
        good_for_days: left.unwrap_or_default().as_secs() / 86_400,
    };
    output::print_one(format, &view, || match view.context.as_str() {
        "" => format!(
            "{} holds a certificate of {} for {} days; run this again to renew it",
            view.directory,
            identity.peer(),
            view.good_for_days
        ),
        context => format!(
            "context {context} connects to {} as {}, and is the current one: commands use it where \
             no controller runs on their host",
            view.controller,
            identity.peer()
        ),
    })
}

/// Where the certificate of a context goes; a context that is there leads to the same controller.
fn directory_of(contexts: &Contexts, name: &str, controller: &str) -> Result<PathBuf> {
    if contexts.exists(name) {
        let there = contexts.load(name)?;
        if there.controller != controller {
            bail!(
                "context {name} connects to {}: give this one another name with --context, or \
                 remove that one first (`quoin context remove {name}`)",
                there.controller
            );
        }
    }
    contexts.check(name)
}

/// The identity in `directory`: renewed where it is there, joined for otherwise.
async fn certified(role: Role, directory: &Path, member: &MemberOptions) -> Result<Identity> {
    let is_member = match Identity::load(directory) {
        Ok(identity) if identity.peer().role != role => {
            bail!(
                "{} holds the identity of {}: choose another",
                directory.display(),
                identity.peer()
            )
        }
        // Its holder joins again.
        Ok(identity) if identity.has_run_out() => false,
        Ok(identity) => {
            let renewed = identity.renew(&member.controller).await;
            let request = member.join_request(role, directory)?;
            let is_replaced = |request: &JoinRequest| identity.is_replaced(&request.token);
            match (renewed, request.filter(is_replaced)) {
                (Ok(()), _) => true,
                // The authority was replaced at once, and nothing that the former one signed counts.
                (Err(_), Some(JoinRequest { controller, token, role, name })) => {
                    let again = quoin_identity::join(&controller, &token, role, &name, directory);
                    return again.await.context("join again");
                }
                (Err(error), None) => return Err(error).context("renew the certificate"),
            }
        }
        Err(quoin_identity::Error::NotJoined { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    if !is_member && member.join.is_none() {
        bail!(
            "joining needs a token: make one with `quoin token create --role admin` where the \
             controller runs, and give it in QUOIN_JOIN_TOKEN or with --token"
        );
    }
    member.identity(role, directory).await
}

fn link_to(link: &Path, file: &str) -> Result<()> {
    match std::os::unix::fs::symlink(file, link) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.with_context(|| format!("make the link {}", link.display())),
    }
}
