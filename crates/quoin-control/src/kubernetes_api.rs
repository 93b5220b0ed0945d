//! Calls of the Kubernetes API: JSON over HTTP/1.1. Connections are kept for later calls.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Longest wait for the answer to a call.
const CALL_MAX: Duration = Duration::from_secs(10);
/// Deadline of TCP connect and TLS handshake together.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// Limit of an answer: a page of records.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Limit of one event of a watch.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// Connections that are kept while no call uses them.
const IDLE_MAX: usize = 8;
/// Directory of a pod with all that a call of the API needs.
const POD_FILES: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Address of the API, and its caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiOptions {
    /// `https://HOST:PORT`; `http://` for a proxy on loopback alone.
    pub server: String,
    /// Certificates of the authorities that may have signed the server's own (PEM).
    pub ca: PathBuf,
    /// The caller's token, read at each call: kubelet replaces it.
    pub token: PathBuf,
    /// Namespace of the caller.
    pub namespace: String,
}

impl ApiOptions {
    /// Returns what kubelet gives a pod.
    ///
    /// # Errors
    /// This process is in no pod, or in one without a service account's token.
    pub fn of_pod() -> Result<Self, ApiError> {
        let variable = |name: &'static str| std::env::var(name).map_err(|_| ApiError::NoPod(name));
        let (host, port) = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT");
        let (host, port) = (variable(host)?, variable(port)?);
        let files = PathBuf::from(POD_FILES);
        let path = files.join("namespace");
        let namespace = std::fs::read_to_string(&path).map_err(|source| file(&path, source))?;
        Ok(Self {
            server: match host.contains(':') {
                true => format!("https://[{host}]:{port}"),
                false => format!("https://{host}:{port}"),
            },
            ca: files.join("ca.crt"),
            token: files.join("token"),
            namespace: namespace.trim().to_owned(),
        })
    }
}

/// Why a call of the API has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("{0} is not set: this process runs in no pod of Kubernetes")]
    NoPod(&'static str),
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{0:?} is no address of the Kubernetes API: write https://HOST:PORT")]
    Server(String),
    #[error("certificates of the Kubernetes API: {0}")]
    Tls(String),
    #[error("the Kubernetes API was not reached: {0}")]
    Unreached(String),
    #[error("the Kubernetes API did not answer in time")]
    Late,
    #[error("the Kubernetes API refused {method} {path}: {status} {message}")]
    Refused { method: Method, path: String, status: u16, message: String },
}

fn file(path: &std::path::Path, source: std::io::Error) -> ApiError {
    ApiError::File { path: path.to_owned(), source }
}

fn unreached(error: impl std::fmt::Display) -> ApiError {
    ApiError::Unreached(error.to_string())
}

/// A change by server-side apply.
pub(crate) const APPLY: &str = "application/apply-patch+yaml";
pub(crate) const JSON: &str = "application/json";

/// One caller of the API.
#[derive(Debug)]
pub(crate) struct Api {
    options: ApiOptions,
    /// Connections that no call uses.
    idle: Mutex<Vec<SendRequest<String>>>,
}

impl Api {
    pub(crate) fn new(options: ApiOptions) -> Self {
        Self { options, idle: Mutex::default() }
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.options.namespace
    }

    pub(crate) fn server(&self) -> &str {
        &self.options.server
    }

    /// Makes a call; returns the object of the answer.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> Result<Value, ApiError> {
        let text = body.to_string();
        let answer = self.call_within(CALL_MAX, method, path, content_type, text).await?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    }

    /// Makes a call; returns the bytes of the answer. It is sent once.
    pub(crate) async fn call_within(
        &self,
        time: Duration,
        method: Method,
        path: &str,
        content_type: &str,
        body: String,
    ) -> Result<Vec<u8>, ApiError> {
        let called = async {
            let (sender, answer) = self.send(&method, path, content_type, body).await?;
            let status = answer.status().as_u16();
            let bytes = all_of(answer.into_body()).await?;
            self.keep(sender);
            match (200..300).contains(&status) {
                true => Ok(bytes),
                false => Err(refused(method, path, status, &bytes)),
            }
        };
        tokio::time::timeout(time, called).await.map_err(|_| ApiError::Late)?
    }

    /// Begins a watch; returns the lines of its answer, as they come.
    pub(crate) async fn watch(
        &self,
        path: &str,
    ) -> Result<impl Stream<Item = Result<Vec<u8>, ApiError>> + Send + use<>, ApiError> {
        let sent = self.send(&Method::GET, path, JSON, String::new());
        let (sender, answer) =
            tokio::time::timeout(CALL_MAX, sent).await.map_err(|_| ApiError::Late)??;
        let status = answer.status().as_u16();
        if status != 200 {
            let bytes = all_of(answer.into_body()).await?;
            return Err(refused(Method::GET, path, status, &bytes));
        }
        let mut body = answer.into_body();
        Ok(async_stream::try_stream! {
            // The connection lives as long as its watch.
            let _sender = sender;
            let mut line = Vec::new();
            while let Some(bytes) = next_of(&mut body).await? {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    if line.len() + part.len() > EVENT_BYTES_MAX {
                        Err(unreached("an event of it is too long"))?;
                    }
                    line.extend_from_slice(part);
                    if line.ends_with(b"\n") {
                        yield std::mem::take(&mut line);
                    }
                }
            }
        })
    }

    /// Sends a request, over a connection of before where one is there.
    async fn send(
        &self,
        method: &Method,
        path: &str,
        content_type: &str,
        body: String,
    ) -> Result<(SendRequest<String>, Response<Incoming>), ApiError> {
        let (_, authority) = self.address()?;
        let read = tokio::fs::read_to_string(&self.options.token).await;
        let token = read.map_err(|source| file(&self.options.token, source))?;
        let mut request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header(header::HOST, authority)
            .header(header::AUTHORIZATION, format!("Bearer {}", token.trim()))
            .header(header::CONTENT_TYPE, content_type)
            .header(header::ACCEPT, JSON)
            .header(header::USER_AGENT, concat!("quoin/", env!("CARGO_PKG_VERSION")))
            .body(body)
            .map_err(unreached)?;
        while let Some(mut sender) = self.kept() {
            match sender.try_send_request(request).await {
                Ok(answer) => return Ok((sender, answer)),
                // The server had closed it: nothing was sent.
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(unreached(error.into_error())),
                },
            }
        }
        let connected = tokio::time::timeout(CONNECT_MAX, self.connect());
        let mut sender = connected.await.map_err(|_| ApiError::Late)??;
        let answer = sender.send_request(request).await.map_err(unreached)?;
        Ok((sender, answer))
    }

    fn kept(&self) -> Option<SendRequest<String>> {
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        // One whose answer was not read to its end is not ready.
        std::iter::from_fn(|| idle.pop()).find(SendRequest::is_ready)
    }

    fn keep(&self, sender: SendRequest<String>) {
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        if idle.len() < IDLE_MAX {
            idle.push(sender);
        }
    }

    /// Scheme, host and port of the server.
    fn address(&self) -> Result<(&str, &str), ApiError> {
        let server = &self.options.server;
        server.split_once("://").ok_or_else(|| ApiError::Server(server.clone()))
    }

    async fn connect(&self) -> Result<SendRequest<String>, ApiError> {
        let no_server = || ApiError::Server(self.options.server.clone());
        let (scheme, authority) = self.address()?;
        let (host, port) = authority.rsplit_once(':').ok_or_else(no_server)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port: u16 = port.parse().map_err(|_| no_server())?;
        let socket = TcpStream::connect((host, port)).await.map_err(unreached)?;
        socket.set_nodelay(true).map_err(unreached)?;
        match scheme {
            "https" => {
                let name = ServerName::try_from(host).map_err(|_| no_server())?.to_owned();
                let connector = TlsConnector::from(self.tls().await?);
                begin(connector.connect(name, socket).await.map_err(unreached)?).await
            }
            // The token must not go over a network in clear text.
            "http" if socket.peer_addr().is_ok_and(|peer| peer.ip().is_loopback()) => {
                begin(socket).await
            }
            _ => Err(no_server()),
        }
    }

    /// The authorities are read at each connection: they are rotated as tokens are.
    async fn tls(&self) -> Result<Arc<ClientConfig>, ApiError> {
        let ca = &self.options.ca;
        let bytes = tokio::fs::read(ca).await.map_err(|source| file(ca, source))?;
        let failed = |error: &dyn std::fmt::Display| ApiError::Tls(error.to_string());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&bytes) {
            let certificate = certificate.map_err(|error| failed(&error))?;
            roots.add(certificate).map_err(|error| failed(&error))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(&error))?;
        Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
    }
}

/// Begins a connection. It ends once its sender is dropped.
async fn begin<S>(stream: S) -> Result<SendRequest<String>, ApiError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(unreached)?;
    // Its failure is that of the request on it.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

fn refused(method: Method, path: &str, status: u16, answer: &[u8]) -> ApiError {
    let parsed: Value = serde_json::from_slice(answer).unwrap_or_default();
    let message = parsed["message"].as_str().unwrap_or_default().chars().take(200).collect();
    ApiError::Refused { method, path: path.to_owned(), status, message }
}

/// The next bytes of an answer; `None`: it is over.
async fn next_of(body: &mut Incoming) -> Result<Option<bytes::Bytes>, ApiError> {
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        match frame {
            None => return Ok(None),
            Some(frame) => {
                if let Ok(data) = frame.map_err(unreached)?.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

async fn all_of(mut body: Incoming) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(part) = next_of(&mut body).await? {
        if bytes.len() + part.len() > ANSWER_BYTES_MAX {
            return Err(unreached("its answer is too long"));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}
