//! `quoin token create|list|revoke`: tokens by which pools and nodes join.

use anyhow::Result;
use clap::{Args, Subcommand};
use quoin_api::control::{
    CreateJoinTokenRequest, JoinTokenInfo, ListJoinTokensRequest, RevokeJoinTokenRequest,
};
use serde::Serialize;

use crate::client::{ClientOptions, refusal};
use crate::events::show_time;
use crate::output::{self, Format, Row};
use crate::size::number_within;

#[derive(Subcommand)]
pub enum TokenCommand {
    /// A token that lets one pool, node, admin or mirror join this cluster, once.
    #[command(after_help = "Example:\n  quoin token create --role pool --name shelf-3")]
    Create(TokenOptions),
    /// The tokens that have not expired, and who used them.
    #[command(visible_alias = "ls")]
    List,
    /// End a token before it expires. Who joined with it stays a member.
    Revoke {
        /// Its id, as `quoin token list` shows it, or the token itself.
        token: String,
    },
}

#[derive(Args)]
pub struct TokenOptions {
    /// Role that may join with it.
    #[arg(long, value_parser = ["pool", "node", "admin", "mirror"])]
    role: String,
    /// Minutes until it expires.
    #[arg(long, default_value_t = 30, allow_hyphen_values = true,
          value_parser = number_within::<u32>(1..=1440,
          "a token is valid for 1 to 1440 minutes (a day): whoever has it can join"))]
    minutes: u32,
    /// The only name that may join with it [default: any].
    #[arg(long)]
    name: Option<String>,
    /// A node that serves CSI's controller service (`quoin node run --mode all|controller`): it may
    /// create, delete and publish any volume. Other nodes see what is attached to them.
    #[arg(long)]
    manages_volumes: bool,
}

pub async fn run(command: TokenCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    match command {
        TokenCommand::Create(options) => {
            let request = CreateJoinTokenRequest {
                role: options.role,
                ttl_s: options.minutes * 60,
                name: options.name.unwrap_or_default(),
                manages_volumes: options.manages_volumes,
            };
            let token = cluster.create_join_token(request).await.map_err(refusal)?.into_inner();
            let expires_at = token.expires_at.as_ref().map(show_time).unwrap_or_default();
            let view = NewTokenView { token: token.token, expires_at };
            // The bare token, so that a script can take it as it is.
            output::print_one(format, &view, || view.token.clone())
        }
        TokenCommand::List => {
            let request = ListJoinTokensRequest {};
            let tokens = cluster.list_join_tokens(request).await.map_err(refusal)?.into_inner();
            let rows: Vec<_> = tokens.tokens.into_iter().map(TokenView::from).collect();
            output::print_list(format, &rows, "no tokens: `quoin token create` makes one")
        }
        TokenCommand::Revoke { token } => {
            let request = RevokeJoinTokenRequest { token };
            let answer = cluster.revoke_join_token(request).await.map_err(refusal)?.into_inner();
            let view = TokenView::from(answer.revoked.unwrap_or_default());
            output::print_one(format, &view, || format!("token {} is revoked", view.id))
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NewTokenView {
    token: String,
    expires_at: String,
}

/// Properties of a token; the token itself is shown once, when it is made.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TokenView {
    id: String,
    role: String,
    name: String,
    manages_volumes: bool,
    expires_at: String,
    used_by: String,
}

impl From<JoinTokenInfo> for TokenView {
    fn from(token: JoinTokenInfo) -> Self {
        Self {
            id: token.id,
            role: if token.role.is_empty() { "pool or node".into() } else { token.role },
            name: token.name,
            manages_volumes: token.manages_volumes,
            expires_at: token.expires_at.as_ref().map(show_time).unwrap_or_default(),
            used_by: token.used_by,
        }
    }
}

impl Row for TokenView {
    const HEADER: &'static [&'static str] = &["ID", "ROLE", "NAME", "EXPIRES", "USED BY"];
    const NARROW: usize = 5;

    fn cells(&self) -> Vec<String> {
        let or =
            |text: &str, nothing: &str| if text.is_empty() { nothing } else { text }.to_owned();
        vec![
            self.id.clone(),
            if self.manages_volumes {
                format!("{}, manages volumes", self.role)
            } else {
                self.role.clone()
            },
            or(&self.name, "any"),
            self.expires_at.clone(),
            or(&self.used_by, "nobody yet"),
        ]
    }
}
