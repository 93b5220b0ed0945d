//! `quoin admin list|remove`: the members that govern the cluster from other hosts.

use anyhow::Result;
use clap::Subcommand;
use quoin_api::control::{Admin, ListAdminsRequest, RemoveAdminRequest};
use serde::Serialize;

use crate::client::{ClientOptions, refusal};
use crate::events::show_time;
use crate::listing::RemovedView;
use crate::output::{self, Format, Row};

#[derive(Subcommand)]
pub enum AdminCommand {
    /// The admins that have joined.
    #[command(visible_alias = "ls")]
    List,
    /// Take an admin out of the cluster: its certificate is no longer accepted.
    #[command(after_help = "Example:\n  quoin admin remove ops")]
    Remove {
        /// Its name, as `quoin admin list` shows it.
        admin: String,
    },
}

pub async fn run(command: AdminCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    match command {
        AdminCommand::List => {
            let request = ListAdminsRequest {};
            let admins = cluster.list_admins(request).await.map_err(refusal)?.into_inner().admins;
            let rows: Vec<_> = admins.into_iter().map(AdminView::from).collect();
            let nothing = "no admins: `quoin token create --role admin` makes a token for one";
            output::print_list(format, &rows, nothing)
        }
        AdminCommand::Remove { admin } => {
            let request = RemoveAdminRequest { admin: admin.clone() };
            cluster.remove_admin(request).await.map_err(refusal)?;
            let view = RemovedView { kind: "admin", name: &admin, state: "removed" };
            output::print_one(format, &view, || {
                format!("admin {admin} is removed: its certificate is no longer accepted")
            })
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AdminView {
    name: String,
    joined_at: String,
    /// SHA-256 of its public key.
    key_hash: String,
}

impl From<Admin> for AdminView {
    fn from(admin: Admin) -> Self {
        Self {
            name: admin.name,
            joined_at: admin.joined_at.as_ref().map(show_time).unwrap_or_default(),
            key_hash: admin.key_hash,
        }
    }
}

impl Row for AdminView {
    const HEADER: &'static [&'static str] = &["NAME", "JOINED", "KEY"];
    const NARROW: usize = 3;

    fn cells(&self) -> Vec<String> {
        // Length of a token's id: enough to distinguish two keys.
        let key = self.key_hash.get(..12).unwrap_or("unknown yet");
        vec![self.name.clone(), self.joined_at.clone(), key.to_owned()]
    }
}
