//! `quoin cluster join`: a certificate for a person or a tool.
//!
//! The directory is an identity like any other, and has the names under which libnbd and QEMU
//! look for certificates as links beside it, so a renewal reaches them too.

use anyhow::{Context, Result, bail};
use clap::Args;
use quoin_identity::{Identity, Role};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::MemberOptions;
use crate::output;

#[derive(Args)]
pub struct JoinOptions {
    /// Where key and certificate go; keep it private.
    #[arg(long, value_name = "DIRECTORY")]
    to: PathBuf,
    #[command(flatten)]
    member: MemberOptions,
}

/// What libnbd (`tls-certificates=`) and QEMU (`tls-creds-x509,dir=`) call what we have.
const LINKS: [(&str, &str); 3] =
    [("ca-cert.pem", "ca.pem"), ("client-cert.pem", "cert.pem"), ("client-key.pem", "key.pem")];

pub async fn join(options: JoinOptions) -> Result<()> {
    let JoinOptions { to, member } = options;
    let is_member = match Identity::load(&to) {
        Ok(identity) if identity.peer().role != Role::Admin => {
            bail!("{} holds the identity of {}: choose another", to.display(), identity.peer())
        }
        // Renewed by nobody in time; its holder joins again.
        Ok(identity) if identity.has_run_out() => false,
        Ok(identity) => {
            identity.renew(&member.controller).await.context("renew the certificate")?;
            true
        }
        Err(quoin_identity::Error::NotJoined { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    if !is_member && member.join.is_none() {
        bail!(
            "joining needs a token: make one with `quoin token create --role admin` and give it \
             in QUOIN_JOIN_TOKEN"
        );
    }
    let identity = member.identity(Role::Admin, &to).await?;
    for (link, file) in LINKS {
        link_to(&to.join(link), file)?;
    }
    let days = identity.validity().1.duration_since(std::time::SystemTime::now());
    output::print_line(&format!(
        "{} holds a certificate of {} for {} days; run this again to renew it",
        to.display(),
        identity.peer(),
        days.unwrap_or_default().as_secs() / 86_400
    ))
}

fn link_to(link: &Path, file: &str) -> Result<()> {
    match std::os::unix::fs::symlink(file, link) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.with_context(|| format!("make the link {}", link.display())),
    }
}
