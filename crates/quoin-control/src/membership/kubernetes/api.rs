//! Calls of the Kubernetes API: JSON over HTTP/1.1, one connection a call. A controller makes a few an hour.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body::Body;
use hyper::client::conn::http1;
use hyper::{Method, Request, header};
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
/// Limit of an answer.
const ANSWER_BYTES_MAX: usize = 1 << 20;
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
    #[error("the Kubernetes API did not answer within {} s", CALL_MAX.as_secs())]
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
pub(super) const APPLY: &str = "application/apply-patch+yaml";
pub(super) const JSON: &str = "application/json";

/// One caller of the API.
#[derive(Debug)]
pub(super) struct Api(ApiOptions);

impl Api {
    pub(super) fn new(options: ApiOptions) -> Self {
        Self(options)
    }

    pub(super) fn namespace(&self) -> &str {
        &self.0.namespace
    }

    /// Makes a call; returns the object of the answer.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> Result<Value, ApiError> {
        let call = self.call_now(method, path, content_type, body);
        tokio::time::timeout(CALL_MAX, call).await.map_err(|_| ApiError::Late)?
    }

    async fn call_now(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> Result<Value, ApiError> {
        let no_server = || ApiError::Server(self.0.server.clone());
        let (scheme, authority) = self.0.server.split_once("://").ok_or_else(no_server)?;
        let (host, port) = authority.rsplit_once(':').ok_or_else(no_server)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port: u16 = port.parse().map_err(|_| no_server())?;
        let read = tokio::fs::read_to_string(&self.0.token).await;
        let token = read.map_err(|source| file(&self.0.token, source))?;
        let request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header(header::HOST, authority)
            .header(header::AUTHORIZATION, format!("Bearer {}", token.trim()))
            .header(header::CONTENT_TYPE, content_type)
            .header(header::ACCEPT, JSON)
            .header(header::USER_AGENT, concat!("quoin/", env!("CARGO_PKG_VERSION")))
            .body(body.to_string())
            .map_err(unreached)?;
        let socket = TcpStream::connect((host, port)).await.map_err(unreached)?;
        let (status, answer) = match scheme {
            "https" => {
                let name = ServerName::try_from(host).map_err(|_| no_server())?.to_owned();
                let connector = TlsConnector::from(self.tls().await?);
                exchange(connector.connect(name, socket).await.map_err(unreached)?, request).await?
            }
            // The token must not go over a network in clear text.
            "http" if socket.peer_addr().is_ok_and(|peer| peer.ip().is_loopback()) => {
                exchange(socket, request).await?
            }
            _ => return Err(no_server()),
        };
        let parsed: Value = serde_json::from_slice(&answer).unwrap_or_default();
        if (200..300).contains(&status) {
            return Ok(parsed);
        }
        let message: String =
            parsed["message"].as_str().unwrap_or_default().chars().take(200).collect();
        Err(ApiError::Refused { method, path: path.to_owned(), status, message })
    }

    /// The authorities are read at each call: they are rotated as tokens are.
    async fn tls(&self) -> Result<Arc<ClientConfig>, ApiError> {
        let bytes = tokio::fs::read(&self.0.ca).await.map_err(|source| file(&self.0.ca, source))?;
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

/// Sends one request over a connection; returns the status and the body.
async fn exchange<S>(stream: S, request: Request<String>) -> Result<(u16, Vec<u8>), ApiError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(unreached)?;
    let driving = async {
        // Ends with the connection, whose failure is the request's as well.
        let _ = connection.await;
        std::future::pending().await
    };
    let asking = async {
        let answer = sender.send_request(request).await.map_err(unreached)?;
        let status = answer.status().as_u16();
        let (mut body, mut bytes) = (answer.into_body(), Vec::new());
        while let Some(frame) =
            std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
        {
            if let Ok(data) = frame.map_err(unreached)?.into_data() {
                if bytes.len() + data.len() > ANSWER_BYTES_MAX {
                    return Err(unreached("its answer is too long"));
                }
                bytes.extend_from_slice(&data);
            }
        }
        Ok((status, bytes))
    };
    tokio::select! {
        answer = asking => answer,
        never = driving => never,
    }
}
