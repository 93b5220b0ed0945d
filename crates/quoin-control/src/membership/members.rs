//! Members of the cluster: join tokens, first certificates, renewals, rotation.
//!
//! A token is good for one certificate of its role, for a short time, and only a hash of its
//! secret is kept. The key that used it first may use it again until it expires, because the
//! answer can get lost; any other key is refused. A second use changes no record: a member that was
//! removed or replaced since needs a token of its own. A name under which a member joined is
//! not given to a second key unless the token names it.
//! [`tokens`] decides.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use quoin_cluster::records::{MemberOfCluster, RecoveryRecord, TokenRecord};
use quoin_cluster::tokens::{self, NotTaken};
use quoin_cluster::wall_clock::is_ahead;
use quoin_identity::{
    Authority, AuthorityPin, Issued, JoinToken, Member, Peer, Role, check_name, key_hash_of_request,
};

use crate::Error;
use crate::membership::admission::Admission;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::now_ms;
use crate::volume::fencing::Fences;

/// Lifetime of a token where none is asked, and the longest.
const TOKEN_TTL: Duration = Duration::from_secs(3600);
const TOKEN_TTL_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Hex digits of a token's hash that name it to people.
const TOKEN_ID_DIGITS: usize = 12;
/// Role of a token for another cluster; no member joins with it.
const PEER: &str = "peer";
/// Unused tokens at a time.
const TOKENS_MAX: usize = 4096;

/// Tokens, certificates and the authority.
pub struct Members {
    state: Arc<State>,
    authority: Mutex<Authority>,
    /// Held while a new authority is made: one at a time.
    rotating: tokio::sync::Mutex<()>,
    admission: Arc<Admission>,
    fences: Fences,
}

impl Members {
    pub(crate) fn new(state: Arc<State>, authority: Authority, admission: Arc<Admission>) -> Self {
        let fences = Fences::new(state.clone());
        Self {
            state,
            authority: Mutex::new(authority),
            rotating: tokio::sync::Mutex::default(),
            admission,
            fences,
        }
    }

    /// A new token for `role` ("pool", "node", "admin", "mirror"; empty: pool or node) and, where it
    /// is not empty, for this name only. `ttl_s` 0: an hour. `manages_volumes` is a node's alone.
    pub async fn create_join_token(
        &self,
        role: &str,
        ttl_s: u32,
        holder: &str,
        manages_volumes: bool,
    ) -> Result<(JoinToken, u64), Error> {
        if manages_volumes && role != Role::Node.as_str() {
            return Err(Error::invalid(
                "managesVolumes",
                "leave to manage volumes is for tokens of the role node: admins have it, pools \
                 and mirrors never do",
            ));
        }
        if !role.is_empty() && role.parse::<Role>()? == Role::Controller {
            let rule = "pool, node, admin or mirror; nobody joins as controller";
            return Err(Error::invalid("role", rule));
        }
        if !holder.is_empty() {
            check_name("holder", holder)?;
        }
        let token = {
            let authority = self.authority();
            JoinToken::generate(authority.cluster(), authority.fingerprint())
        };
        let (ttl, expires_ms) =
            self.keep_token(token.secret_hash(), role, (holder, manages_volumes), ttl_s).await?;
        let what = if role.is_empty() { "a pool or node".into() } else { with_article(role) };
        let message = format!("for {what}, good for {} s", ttl.as_secs());
        self.state.events.record(Severity::Normal, cluster(), "JoinTokenCreated", message);
        Ok((token, expires_ms))
    }

    /// By which a newcomer that has no join token knows the authority.
    pub(crate) fn pin(&self) -> AuthorityPin {
        let authority = self.authority();
        AuthorityPin { cluster: authority.cluster(), fingerprint: authority.fingerprint() }
    }

    /// Keeps the hash of a new token's secret. Returns its lifetime, and when it ends.
    async fn keep_token(
        &self,
        secret_hash: String,
        role: &str,
        (holder, manages_volumes): (&str, bool),
        ttl_s: u32,
    ) -> Result<(Duration, u64), Error> {
        let ttl = match ttl_s {
            0 => TOKEN_TTL,
            s => Duration::from_secs(s.into()),
        };
        if ttl > TOKEN_TTL_MAX {
            let rule = format!("at most {} s", TOKEN_TTL_MAX.as_secs());
            return Err(Error::invalid("ttl", rule));
        }
        self.drop_expired_tokens().await?;
        if self.state.joined.tokens.count() >= TOKENS_MAX {
            return Err(Error::Exhausted(format!("{TOKENS_MAX} tokens are alive already")));
        }
        let expires_ms = now_ms() + ttl.as_millis() as u64;
        let record = TokenRecord {
            secret_hash,
            role: role.to_owned(),
            holder: holder.to_owned(),
            expires_ms,
            used_by: None,
            manages_volumes,
            created_ms: now_ms(),
        };
        if self.state.joined.tokens.create(record).await?.is_err() {
            return Err(Error::Busy("a token was drawn twice; try again".to_owned()));
        }
        Ok((ttl, expires_ms))
    }

    /// Keeps a new token for another cluster, which is called `name` here. Returns when it ends.
    pub(crate) async fn add_peer_token(
        &self,
        secret_hash: String,
        name: &str,
        ttl_s: u32,
    ) -> Result<u64, Error> {
        let (_, expires_ms) = self.keep_token(secret_hash, PEER, (name, false), ttl_s).await?;
        Ok(expires_ms)
    }

    /// Name that this cluster is given where it pairs with this token, which it may use.
    pub(crate) fn peer_token_name(
        &self,
        secret_hash: &str,
        cluster: &str,
    ) -> Result<String, Error> {
        let found = self.state.joined.tokens.get(secret_hash).ok_or_else(bad_peer_token)?;
        self.use_peer_token(&mut TokenRecord::clone(&found), cluster)?;
        Ok(found.holder.clone())
    }

    fn use_peer_token(&self, record: &mut TokenRecord, cluster: &str) -> Result<(), Error> {
        // The token has the name that the peer is given here, and no member's.
        let mut taken = TokenRecord { holder: String::new(), ..record.clone() };
        tokens::take(&mut taken, (PEER, cluster, cluster), self.doubt().as_deref(), now_ms())
            .map_err(|_| bad_peer_token())?;
        record.used_by = taken.used_by;
        Ok(())
    }

    /// Ends the tokens that this cluster has used.
    pub(crate) async fn end_peer_tokens(&self, cluster: &str) -> Result<(), Error> {
        let user = format!("{PEER}/{cluster}");
        let used = |token: &TokenRecord| token.used_by.as_ref().is_some_and(|by| by.0 == user);
        for token in self.state.joined.tokens.list().iter().filter(|token| used(token)) {
            self.state.joined.tokens.remove(&token.secret_hash, |found| used(found)).await?;
        }
        Ok(())
    }

    /// Uses a token for another cluster.
    pub(crate) async fn take_peer_token(
        &self,
        secret_hash: &str,
        cluster: &str,
    ) -> Result<(), Error> {
        let take = |record: &mut TokenRecord| self.use_peer_token(record, cluster);
        let taken = self.state.joined.tokens.update(secret_hash, take).await?;
        taken.map(drop).ok_or_else(bad_peer_token)
    }

    /// The tokens that are still good, or were used and would be.
    pub fn join_tokens(&self) -> Vec<Arc<TokenRecord>> {
        let (now, doubt) = (now_ms(), self.doubt());
        let mut tokens = self.state.joined.tokens.list();
        tokens.retain(|token| tokens::is_good(token, doubt.as_deref(), now));
        tokens
    }

    /// The records do not rule, and since when.
    fn doubt(&self) -> Option<Arc<RecoveryRecord>> {
        self.state.term.recovery.get(RecoveryRecord::NAME)
    }

    /// Ends the tokens that a recovery found: those made before the records were doubted, and all where
    /// they were not known as old, since they may be an old copy all the same.
    pub(crate) async fn end_recovered_tokens(&self) -> Result<(), Error> {
        let (doubt, all) = (self.doubt(), self.state.joined.tokens.list());
        let mut ended = 0;
        for token in all.iter().filter(|t| tokens::ends_with_recovery(t, doubt.as_deref())) {
            self.state.joined.tokens.remove(&token.secret_hash, |_| true).await?;
            ended += u32::from(token.used_by.is_none() && token.is_good(now_ms()));
        }
        if ended > 0 {
            let message = format!(
                "{ended} unused tokens of before the recovery are good for nothing any more: the \
                 records cannot know which of them were used or revoked"
            );
            self.state.events.record(Severity::Normal, cluster(), "JoinTokensEnded", message);
        }
        Ok(())
    }

    /// Ends a token: named whole, or by enough of its id to mean one. Who joined with it stays.
    pub async fn revoke_join_token(&self, named: &str) -> Result<Arc<TokenRecord>, Error> {
        const PREFIX_MIN: usize = 4;
        let wanted = match named.parse::<JoinToken>() {
            Ok(token) => token.secret_hash(),
            Err(_) => named.to_ascii_lowercase(),
        };
        let shown: String = named.chars().take(TOKEN_ID_DIGITS).collect();
        let found = self.state.joined.tokens.list();
        let mut found = found.iter().filter(|token| token.secret_hash.starts_with(&wanted));
        let (Some(token), true) = (found.next(), wanted.len() >= PREFIX_MIN) else {
            return Err(Error::missing("join token", shown));
        };
        if found.next().is_some() {
            return Err(Error::invalid("token", format!("{shown} begins several ids: give more")));
        }
        self.state.joined.tokens.remove(&token.secret_hash, |_| true).await?;
        let message = format!("{} is good for nothing any more", token_id(token));
        self.state.events.record(Severity::Normal, cluster(), "JoinTokenRevoked", message);
        Ok(token.clone())
    }

    /// A newcomer's first certificate.
    pub async fn join(
        &self,
        token: &str,
        csr_der: &[u8],
        role: &str,
        holder: &str,
    ) -> Result<Issued, Error> {
        let token: JoinToken = token.parse()?;
        let role: Role = role.parse()?;
        check_name(role.as_str(), holder)?;
        // One answer for every bad token, so that callers do not learn which exist.
        let refused = || {
            Error::Unauthenticated(
                "the join token is unknown, used or expired; make a new one with \
                 `quoin token create`"
                    .to_owned(),
            )
        };
        let peer = Peer::new(self.state.identity.cluster(), role, holder)?;
        let key_hash = key_hash_of_request(csr_der)?;
        let user = (format!("{role}/{holder}"), key_hash.clone());
        let take = |record: &mut TokenRecord| {
            let user = (role.as_str(), holder, user.1.as_str());
            tokens::take(record, user, self.doubt().as_deref(), now_ms()).map_err(|why| match why {
                NotTaken::Bad => refused(),
                NotTaken::OtherRole => {
                    let meant = match record.role.as_str() {
                        "" => "a pool or a node".to_owned(),
                        role => with_article(role),
                    };
                    let not = with_article(role.as_str());
                    Error::Denied(format!("the join token is for {meant}, not {not}"))
                }
                NotTaken::OtherHolder => {
                    Error::Denied(format!("the join token is for {:?} only", record.holder))
                }
            })
        };
        let name = token.secret_hash();
        let record = self.state.joined.tokens.get(&name).ok_or_else(refused)?;
        take(&mut TokenRecord::clone(&record))?;
        let member = MemberOfCluster {
            role: role.to_string(),
            holder: holder.to_owned(),
            key_hash,
            next_key_hash: String::new(),
            joined_ms: now_ms(),
            removed: false,
            manages_volumes: record.manages_volumes,
        };
        // The token first: of two that join with one token, one leaves nothing behind.
        let (_, first_use) =
            self.state.joined.tokens.update(&name, take).await?.ok_or_else(refused)?;
        if !first_use {
            self.take_name_again(&member).await?.ok_or_else(refused)?;
        } else if let Err(error) = self.take_name(&member, !record.holder.is_empty()).await {
            let unused = |record: &mut TokenRecord| {
                if record.used_by.as_ref() == Some(&user) {
                    record.used_by = None;
                }
                Ok(())
            };
            self.state.joined.tokens.update(&name, unused).await?;
            return Err(error);
        }
        let issued = self.authority().issue(csr_der, &peer)?;
        let about = Object::new(role.as_str(), holder, holder);
        self.state.events.record(Severity::Normal, about, "Joined", format!("{role} {holder}"));
        Ok(issued)
    }

    /// A member's next certificate: same role, same name, whatever the request says.
    pub async fn renew(&self, member: &Member, csr_der: &[u8]) -> Result<Issued, Error> {
        let issued = self.authority().issue(csr_der, &member.peer)?;
        self.admission.expect_key(member, &key_hash_of_request(csr_der)?).await?;
        Ok(issued)
    }

    /// Makes a new authority; everybody comes over to it by renewing, with IO running.
    pub async fn rotate_authority(&self) -> Result<String, Error> {
        let _rotating = self.rotating.lock().await;
        let next = self.authority().rotated()?;
        self.adopt(next).await?;
        self.renew_own()?;
        let message = "every certificate moves to the new authority when it is renewed; the \
                       former one is trusted until the last of its certificates has run out";
        self.state.events.record(Severity::Normal, cluster(), "AuthorityRotated", message);
        Ok(message.to_owned())
    }

    /// The fingerprint of the newest authority.
    pub fn fingerprint(&self) -> String {
        hex(&self.authority().fingerprint())
    }

    /// Makes a new authority where the key of this one is in foreign hands: no certificate that it
    /// signed is taken any more, and no token that names it. One that is trusted no more is replaced
    /// already, and those who joined again since stay.
    pub async fn replace_authority(&self, named: &str) -> Result<String, Error> {
        let fingerprint = from_hex(named).ok_or_else(|| {
            let rule = "the fingerprint of the authority to be replaced, 64 hex digits: `quoin cluster \
                        info` shows the present one's";
            Error::invalid("atOnce", rule)
        })?;
        // A crash between the two must leave no token of it.
        if self.authority().trusts(&fingerprint) {
            self.end_tokens().await?;
        }
        let is_news = {
            let _rotating = self.rotating.lock().await;
            let next = {
                let authority = self.authority();
                authority.trusts(&fingerprint).then(|| authority.rotated_at_once()).transpose()?
            };
            let is_news = next.is_some();
            if let Some(next) = next {
                self.adopt(next).await?;
                self.admission.authority_was_replaced();
            }
            is_news
        };
        self.renew_own()?;
        if !is_news {
            return Ok(format!(
                "nothing was changed: no certificate of authority {} is taken, and the present one is \
                 {}",
                hex(&fingerprint),
                self.fingerprint()
            ));
        }
        self.end_tokens().await?;
        let message = "no certificate and no join token of the former authority is taken any more; \
                       until they have joined again, pools and nodes go on with each other and hear \
                       nothing from the controller. For each pool, node, admin and mirror: make a \
                       token (`quoin token create --role ROLE --name NAME`), stop it, remove cert.pem from \
                       its identity directory (the key stays), and start it with --join and the \
                       token; pools first, one after the other, then nodes. A volume is out of reach \
                       of a node while one of them has joined again and a majority of its pools has \
                       not, or the other way round";
        self.state.events.record(Severity::Warning, cluster(), "AuthorityReplaced", message);
        Ok(message.to_owned())
    }

    /// Takes an authority once every controller of the cluster can have it: nothing is signed before.
    async fn adopt(&self, next: Authority) -> Result<(), Error> {
        self.state.storage.store.keep_authority(next.export()?.into_bytes()).await?;
        Ok(self.authority().adopt(next)?)
    }

    async fn end_tokens(&self) -> Result<(), Error> {
        for token in self.state.joined.tokens.list() {
            self.state.joined.tokens.remove(&token.secret_hash, |_| true).await?;
        }
        Ok(())
    }

    /// The controller's own certificate, from its own authority.
    pub(crate) fn renew_own(&self) -> Result<(), Error> {
        let request = self.state.identity.renewal_request()?;
        let issued = self.authority().issue(&request, self.state.identity.peer())?;
        Ok(self.state.identity.install(&issued)?)
    }

    /// Renews what is due and forgets what is over; called every second.
    pub(crate) async fn tend_certificates(&self) -> Result<(), Error> {
        if self.authority().forget_former()? {
            self.renew_own()?;
            let message = "the former authority is trusted no more";
            self.state.events.record(Severity::Normal, cluster(), "AuthorityRetired", message);
        }
        // Every token of this time would be of before a doubt that lies ahead.
        let since = |record: &RecoveryRecord| is_ahead(record.since_ms, now_ms());
        if self.state.term.recovery.get(RecoveryRecord::NAME).is_some_and(|record| since(&record)) {
            let correct = |record: &mut RecoveryRecord| {
                if since(record) {
                    record.since_ms = now_ms();
                }
                Ok(())
            };
            self.state.term.recovery.update(RecoveryRecord::NAME, correct).await?;
        }
        if self.state.identity.is_due() {
            let why = self.state.identity.not_valid_yet();
            self.renew_own()?;
            if let Some(why) = why {
                let message = format!(
                    "the controller's own certificate was made by a clock that was ahead, and is made                      again: {why}. Members whose certificate is of that time get another by themselves"
                );
                self.state.events.record(Severity::Warning, cluster(), "ClockWasAhead", message);
            }
        }
        Ok(())
    }

    async fn take_name(&self, member: &MemberOfCluster, named: bool) -> Result<(), Error> {
        let Err(found) = self.state.joined.members.create(member.clone()).await? else {
            return Ok(());
        };
        if found.key_hash == member.key_hash && !found.removed {
            return Ok(());
        }
        if !named && !found.removed {
            return Err(Error::Exists {
                what: "member",
                name: format!("{} {}", member.role, member.holder),
                difference: "key; to replace it, make a token for this very name".to_owned(),
            });
        }
        let replace = |record: &mut MemberOfCluster| {
            *record = member.clone();
            Ok(())
        };
        let name = format!("{}/{}", member.role, member.holder);
        self.state.joined.members.update(&name, replace).await?;
        if member.role == Role::Node.as_str() {
            self.fences.node(&member.holder, false).await?;
        }
        Ok(())
    }

    /// Joins once more with a used token, as after a lost answer. None: the name was removed or given to
    /// another key since, and stays so.
    async fn take_name_again(&self, member: &MemberOfCluster) -> Result<Option<()>, Error> {
        let found = self.state.joined.members.create(member.clone()).await?;
        let is_theirs =
            |found: &MemberOfCluster| found.key_hash == member.key_hash && !found.removed;
        Ok(found.map_or_else(|found| is_theirs(&found).then_some(()), |_| Some(())))
    }

    async fn drop_expired_tokens(&self) -> Result<(), Error> {
        let now = now_ms();
        for token in self.state.joined.tokens.list().iter().filter(|token| token.expires_ms <= now)
        {
            self.state
                .joined
                .tokens
                .remove(&token.secret_hash, |found| found.expires_ms <= now)
                .await?;
        }
        Ok(())
    }

    pub(crate) fn authority(&self) -> MutexGuard<'_, Authority> {
        self.authority.lock().expect("no holder of this lock panics")
    }
}

fn bad_peer_token() -> Error {
    Error::Unauthenticated(
        "the token is unknown, used or expired; make a new one with `quoin mirror invite`"
            .to_owned(),
    )
}

/// A token's name among people: the beginning of its secret's hash.
pub(crate) fn token_id(token: &TokenRecord) -> &str {
    token.secret_hash.get(..TOKEN_ID_DIGITS).unwrap_or(&token.secret_hash)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let is_hex = text.len() == 64 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |n: usize| u8::from_str_radix(text.get(2 * n..2 * n + 2)?, 16).ok();
    let bytes: Vec<u8> = (0..32).map_while(byte).collect();
    is_hex.then(|| bytes.try_into().ok()).flatten()
}

fn with_article(role: &str) -> String {
    format!("{} {role}", if role.starts_with('a') { "an" } else { "a" })
}

fn cluster() -> Object {
    Object::new("cluster", "", "")
}
