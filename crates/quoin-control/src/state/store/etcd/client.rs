//! Calls to the members of an etcd cluster: one at a time is asked, and the next one where it does not answer.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use quoin_api::etcd::kv_client::KvClient;
use quoin_api::etcd::lease_client::LeaseClient;
use quoin_api::etcd::{
    LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, RangeRequest, RangeResponse,
    TxnRequest, TxnResponse,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower::service_fn;

use super::EtcdOptions;
use crate::state::store::StoreError;

/// Deadline of one call to one member.
const CALL_TIME: Duration = Duration::from_secs(2);
/// Deadline of TCP connect and TLS handshake together.
const CONNECT_TIME: Duration = Duration::from_secs(1);
/// A connection whose peer is gone is noticed within twice this time.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Most members of an etcd cluster that are named.
const ENDPOINTS_MAX: usize = 16;
/// Longest answer: a page of records.
const ANSWER_BYTES_MAX: usize = 128 << 20;

/// Connections to all members; each connects when it is first used.
pub(super) struct Client {
    members: Vec<(String, Channel)>,
    /// The member that is asked.
    current: AtomicUsize,
    /// The last call failed: a change is not sent before a member has answered a question.
    is_doubted: AtomicBool,
}

impl Client {
    /// # Errors
    /// An address or a file of the options breaks its rule.
    pub fn new(options: &EtcdOptions) -> Result<Self, StoreError> {
        if !(1..=ENDPOINTS_MAX).contains(&options.endpoints.len()) {
            return Err(StoreError::Setting {
                name: "--etcd-endpoints",
                rule: format!("1 to {ENDPOINTS_MAX} addresses of etcd's members"),
            });
        }
        let tls = tls_config(options)?;
        let members = options
            .endpoints
            .iter()
            .map(|address| Ok((address.clone(), channel(address, tls.clone())?)));
        Ok(Self {
            members: members.collect::<Result<_, StoreError>>()?,
            current: AtomicUsize::new(0),
            is_doubted: AtomicBool::new(false),
        })
    }

    /// Address of the member that is asked.
    pub fn member(&self) -> &str {
        &self.members[self.current.load(Ordering::Relaxed) % self.members.len()].0
    }

    /// Reads. A member that does not answer is replaced by the next one.
    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, StoreError> {
        self.ask(|channel| {
            let request = request.clone();
            async move {
                let mut kv = KvClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
                Ok(kv.range(request).await?.into_inner())
            }
        })
        .await
    }

    /// Changes. It is sent once: after an error its outcome is unknown.
    pub async fn transact(&self, request: TxnRequest) -> Result<TxnResponse, StoreError> {
        if self.is_doubted.load(Ordering::Relaxed) {
            // Any question will do, and a linearizable one finds a member of the majority.
            self.range(RangeRequest { key: b"/".to_vec(), limit: 1, ..RangeRequest::default() })
                .await?;
        }
        self.once(|channel| async move {
            let mut kv = KvClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
            Ok(kv.txn(request).await?.into_inner())
        })
        .await
    }

    /// Begins a lease of so many seconds; returns its id. A repeat after a lost answer begins another one,
    /// and the first one ends by itself.
    pub async fn grant_lease(&self, seconds: i64) -> Result<i64, StoreError> {
        let request = LeaseGrantRequest { ttl: seconds, id: 0 };
        self.ask(|channel| async move {
            Ok(LeaseClient::new(channel).lease_grant(request).await?.into_inner().id)
        })
        .await
    }

    /// Renews a lease. Returns false if there is no such lease any more.
    pub async fn renew_lease(&self, id: i64) -> Result<bool, StoreError> {
        self.ask(|channel| async move {
            let request = open_stream_of(LeaseKeepAliveRequest { id });
            let mut answers =
                LeaseClient::new(channel).lease_keep_alive(request).await?.into_inner();
            let answer = answers.message().await?;
            Ok(answer.ok_or_else(|| Status::unavailable("etcd ended the call"))?.ttl > 0)
        })
        .await
    }

    /// Ends a lease, and what is kept by it.
    pub async fn revoke_lease(&self, id: i64) -> Result<(), StoreError> {
        self.ask(|channel| async move {
            match LeaseClient::new(channel).lease_revoke(LeaseRevokeRequest { id }).await {
                Err(status) if status.code() != Code::NotFound => Err(status),
                _ => Ok(()),
            }
        })
        .await
    }

    /// Asks each member until one answers.
    async fn ask<T, F: Future<Output = Result<T, Status>> + Send>(
        &self,
        call: impl Fn(Channel) -> F + Send + Sync,
    ) -> Result<T, StoreError> {
        let mut last = None;
        for _ in 0..self.members.len() {
            match self.once(&call).await {
                Ok(answer) => return Ok(answer),
                Err(error @ StoreError::Away { .. }) => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.expect("there is a member"))
    }

    /// Asks the present member, and turns to the next one where it does not answer.
    async fn once<T, F: Future<Output = Result<T, Status>> + Send>(
        &self,
        call: impl FnOnce(Channel) -> F + Send,
    ) -> Result<T, StoreError> {
        let asked = self.current.load(Ordering::Relaxed);
        let (address, channel) = &self.members[asked % self.members.len()];
        let answer = tokio::time::timeout(CALL_TIME, call(channel.clone())).await;
        let status = match answer {
            Ok(Ok(answer)) => {
                self.is_doubted.store(false, Ordering::Relaxed);
                return Ok(answer);
            }
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded(format!("no answer in {} s", CALL_TIME.as_secs())),
        };
        let why = format!("etcd at {address}: {}", reasons(&status, address));
        if !matches!(
            status.code(),
            Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled
        ) {
            return Err(StoreError::Failed(why));
        }
        self.is_doubted.store(true, Ordering::Relaxed);
        let next = asked.wrapping_add(1);
        // Calls beside this one turn once.
        let _ = self.current.compare_exchange(asked, next, Ordering::Relaxed, Ordering::Relaxed);
        Err(StoreError::Away { why })
    }
}

/// The reason with what lies behind it, and the way out where TLS refuses.
fn reasons(status: &Status, address: &str) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    // An answer of etcd has nothing behind it.
    let is_of_connection = source.is_some();
    while let Some(error) = source {
        let one = error.to_string();
        if !text.contains(&one) {
            text = format!("{text}: {one}");
        }
        source = error.source();
    }
    if text.contains("peer certificate") {
        text.push_str("; --etcd-ca is to name the authority that signed etcd's certificate");
    } else if address.starts_with("https:") && is_of_connection && !text.contains("refused") {
        // A server that refuses a client's certificate ends the connection after the client's handshake, and how
        // that is noticed is a race.
        text.push_str(
            "; where etcd asks for certificates, --etcd-certificate is to be of the authority that it trusts",
        );
    }
    text
}

fn open_stream_of<T: Send + 'static>(message: T) -> impl futures::Stream<Item = T> + Send {
    // The call stays open until its answer is there.
    use futures::StreamExt;
    futures::stream::iter([message]).chain(futures::stream::pending())
}

/// Returns the settings of TLS; `None`: the addresses begin with `http://`.
fn tls_config(options: &EtcdOptions) -> Result<Option<Arc<ClientConfig>>, StoreError> {
    let is_secure = options.endpoints.iter().any(|address| address.starts_with("https://"));
    let unreadable = |name: &'static str, path: &PathBuf, error: &dyn std::fmt::Display| {
        StoreError::Setting { name, rule: format!("{}: {error}", path.display()) }
    };
    if !is_secure {
        return Ok(None);
    }
    let Some(ca) = &options.ca else {
        return Err(StoreError::Setting {
            name: "--etcd-ca",
            rule:
                "an https:// address needs the certificate of the authority that signed etcd's own"
                    .to_owned(),
        });
    };
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(ca);
    for certificate in certificates.map_err(|error| unreadable("--etcd-ca", ca, &error))? {
        let certificate = certificate.map_err(|error| unreadable("--etcd-ca", ca, &error))?;
        roots.add(certificate).map_err(|error| unreadable("--etcd-ca", ca, &error))?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| StoreError::Failed(error.to_string()))?
        .with_root_certificates(roots);
    let mut config = match (&options.certificate, &options.key) {
        (Some(certificate), Some(key)) => {
            let chain = CertificateDer::pem_file_iter(certificate)
                .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                .map_err(|error| unreadable("--etcd-certificate", certificate, &error))?;
            let private = PrivateKeyDer::from_pem_file(key)
                .map_err(|error| unreadable("--etcd-key", key, &error))?;
            builder
                .with_client_auth_cert(chain, private)
                .map_err(|error| unreadable("--etcd-certificate", certificate, &error))?
        }
        (None, None) => builder.with_no_client_auth(),
        _ => {
            return Err(StoreError::Setting {
                name: "--etcd-certificate",
                rule: "it is given together with --etcd-key".to_owned(),
            });
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn channel(address: &str, tls: Option<Arc<ClientConfig>>) -> Result<Channel, StoreError> {
    let bad = || StoreError::Setting {
        name: "--etcd-endpoints",
        rule: format!("{address:?}: write http://HOST:PORT or https://HOST:PORT"),
    };
    let (scheme, place) = address.split_once("://").ok_or_else(bad)?;
    let (host, port) = place.rsplit_once(':').ok_or_else(bad)?;
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(bad());
    }
    let tls = match scheme {
        "http" => None,
        "https" => tls,
        _ => return Err(bad()),
    };
    // The scheme does not decide on TLS here: the connector below makes it.
    let endpoint = Endpoint::from_shared(format!("http://{place}"))
        .map_err(|_| bad())?
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    let place = place.to_owned();
    let Some(config) = tls else {
        return Ok(endpoint.connect_with_connector_lazy(service_fn(move |_| {
            let place = place.clone();
            async move { tcp(&place).await.map(TokioIo::new) }
        })));
    };
    let name = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let name = ServerName::try_from(name).map_err(|_| bad())?;
    Ok(endpoint.connect_with_connector_lazy(service_fn(move |_| {
        let (place, name) = (place.clone(), name.clone());
        let connector = TlsConnector::from(config.clone());
        async move {
            let tcp = tcp(&place).await?;
            let connected = tokio::time::timeout(CONNECT_TIME, connector.connect(name, tcp)).await;
            connected.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map(TokioIo::new)
        }
    })))
}

async fn tcp(place: &str) -> std::io::Result<TcpStream> {
    let connected = tokio::time::timeout(CONNECT_TIME, TcpStream::connect(place)).await;
    let stream = connected.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
