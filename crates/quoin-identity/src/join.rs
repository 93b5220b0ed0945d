//! Becoming a member: an own key, a token, a certificate.

use std::path::Path;
use std::time::Duration;

use quoin_api::control::join_client::JoinClient;
use quoin_api::control::{Certificate, IntroduceRequest, JoinRequest as JoinMessage};
use tonic::transport::Channel;

use crate::channel::tls_channel;
use crate::{AuthorityPin, ClusterId, Error, Identity, Issued, JoinToken, Role, check_name, tls};

/// The operator's input for a newcomer.
#[derive(Clone, Debug)]
pub struct JoinRequest {
    /// `host:port` of the controller.
    pub controller: String,
    pub token: JoinToken,
    pub role: Role,
    pub name: String,
}

/// Joins a cluster and writes the identity into `dir`. The controller must prove that it is the one
/// that made the token before anything is sent to it. A join may be repeated with the same token
/// and `dir` when an answer got lost: the token is bound to the first key that used it. A member
/// whose certificate has expired joins again, with the key that it has.
pub async fn join(
    controller_addr: &str,
    token: &JoinToken,
    role: Role,
    name: &str,
    dir: &Path,
) -> Result<Identity, Error> {
    check_name(role.as_str(), name)?;
    match Identity::load(dir) {
        Err(Error::NotJoined { .. }) => {}
        Ok(old)
            if (old.has_run_out() || old.is_replaced(token))
                && old.peer().role == role
                && old.peer().name == name => {}
        Ok(identity) => {
            let holder = identity.peer().to_string();
            return Err(Error::AlreadyJoined { dir: dir.to_owned(), holder });
        }
        Err(error) => return Err(error),
    }
    let channel = newcomer_channel(controller_addr, token).await?;
    let unused = Unused::before(dir);
    let mut request = tonic::Request::new(JoinMessage {
        token: token.to_string(),
        csr_der: Identity::request(dir)?,
        role: role.to_string(),
        name: name.to_owned(),
    });
    request.set_timeout(Duration::from_secs(30));
    let answer = JoinClient::new(channel).join(request).await;
    let certificate = answer
        .map_err(|status| {
            unused.remove_if(&status);
            refused(status)
        })?
        .into_inner();
    let issued = issued(certificate)?;
    if issued.cluster != token.cluster {
        return Err(Error::certificate("it is of another cluster than the token"));
    }
    Identity::establish(dir, &issued)?;
    Identity::load(dir)
}

/// Asks the controller for a join token for the member that this pod of Kubernetes is, by the token of its
/// service account. The controller must prove that it is of the pinned authority before it is shown that.
pub async fn introduce(
    controller_addr: &str,
    pin: &AuthorityPin,
    service_account_token: &str,
    role: Role,
    name: &str,
) -> Result<JoinToken, Error> {
    check_name(role.as_str(), name)?;
    let channel = pinned_channel(controller_addr, pin.cluster, pin.fingerprint).await?;
    let mut request = tonic::Request::new(IntroduceRequest {
        service_account_token: service_account_token.to_owned(),
        role: role.to_string(),
        name: name.to_owned(),
    });
    request.set_timeout(Duration::from_secs(30));
    let answer = JoinClient::new(channel).introduce(request).await.map_err(refused)?;
    answer.into_inner().token.parse()
}

/// Returns a channel of a newcomer without a certificate, to the controller that made the token and
/// to no other. The channel leads to the Join service only.
pub async fn newcomer_channel(controller_addr: &str, token: &JoinToken) -> Result<Channel, Error> {
    pinned_channel(controller_addr, token.cluster, token.fingerprint).await
}

/// Returns a channel as [`newcomer_channel`] does, to the controller of a cluster whose authority has
/// this fingerprint.
pub async fn pinned_channel(
    controller_addr: &str,
    cluster: ClusterId,
    fingerprint: [u8; 32],
) -> Result<Channel, Error> {
    let config = tls::pinned(cluster, fingerprint)?;
    let endpoint = crate::channel::endpoint(controller_addr)?;
    let unreachable = |error| Error::unreachable(controller_addr, &error);
    tls_channel(endpoint, config, controller_addr).await.map_err(unreachable)
}

/// Loads the identity in `dir` or, where there is none yet, joins. A process that is always started
/// with the same arguments needs its token only the first time, and a new one after an absence in
/// which its certificate expired.
pub async fn load_or_join(dir: &Path, request: Option<&JoinRequest>) -> Result<Identity, Error> {
    match (Identity::load(dir), request) {
        (Err(Error::NotJoined { .. }), Some(r)) => {
            join(&r.controller, &r.token, r.role, &r.name, dir).await
        }
        (Ok(old), Some(r)) if old.has_run_out() => {
            join(&r.controller, &r.token, r.role, &r.name, dir).await
        }
        (loaded, _) => loaded,
    }
}

/// Files of a join before it is answered; a clear refusal makes them worthless.
struct Unused<'a> {
    dir: &'a Path,
    dir_is_new: bool,
    key_is_new: bool,
}

impl<'a> Unused<'a> {
    fn before(dir: &'a Path) -> Self {
        Self { dir, dir_is_new: !dir.exists(), key_is_new: !Identity::has_key(dir) }
    }

    /// A key that may have been used must stay: possibly only the answer was lost.
    fn remove_if(&self, status: &tonic::Status) {
        use tonic::Code::{AlreadyExists, InvalidArgument, PermissionDenied, Unauthenticated};
        let clear = [AlreadyExists, InvalidArgument, PermissionDenied, Unauthenticated];
        if !clear.contains(&status.code()) || !self.key_is_new {
            return;
        }
        Identity::forget_key(self.dir);
        if self.dir_is_new {
            let _ = std::fs::remove_dir(self.dir);
        }
    }
}

pub(crate) fn refused(status: tonic::Status) -> Error {
    if let Some(reason) = crate::error::wrong_time(&status) {
        return Error::Refused(reason);
    }
    Error::Refused(format!("{} ({:?})", status.message(), status.code()))
}

pub(crate) fn issued(message: Certificate) -> Result<Issued, Error> {
    let text = |bytes| String::from_utf8(bytes).map_err(Error::certificate);
    Ok(Issued {
        chain_pem: text(message.chain_pem)?,
        authorities_pem: text(message.authorities_pem)?,
        cluster: message.cluster_id.parse()?,
    })
}
