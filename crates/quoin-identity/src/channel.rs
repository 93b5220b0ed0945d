//! gRPC channels: to the controller over mutual TLS, and over unix sockets without.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::incoming::Caller;
use crate::{Error, Expected, Identity, Role, tls};

/// TCP connect and TLS handshake together.
const CONNECT_TIME: Duration = Duration::from_secs(10);

impl Identity {
    /// A channel to the controller at `host:port`. It connects when first used, and again
    /// whenever the connection is lost, with the certificate of that moment; calls fail with
    /// UNAVAILABLE meanwhile. Callers set a deadline on each call that is not a stream.
    pub fn channel(&self, controller_addr: &str) -> Result<Channel, Error> {
        self.channel_to(controller_addr, Expected::Role(Role::Controller))
    }

    /// As [`Identity::channel`], to any member.
    pub fn channel_to(&self, address: &str, expected: Expected) -> Result<Channel, Error> {
        let mut config = ClientConfig::clone(&*self.client_config(expected)?);
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connect = connector(config, address);
        Ok(endpoint(address)?.connect_with_connector_lazy(service_fn(move |_| connect())))
    }
}

/// The settings every channel has: dead peers are noticed within 20 s also when idle.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, Error> {
    let bad = || Error::Address { address: address.to_owned() };
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(bad());
    }
    // The scheme says nothing of TLS here: the connector below makes it.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|_| bad())?;
    Ok(endpoint
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true))
}

type Connecting = Pin<Box<dyn Future<Output = io::Result<TokioIo<TlsStream<TcpStream>>>> + Send>>;

fn connector(
    config: ClientConfig,
    address: &str,
) -> impl Fn() -> Connecting + Clone + Send + use<> {
    let (connector, address) = (TlsConnector::from(Arc::new(config)), address.to_owned());
    move || {
        let (connector, address) = (connector.clone(), address.clone());
        Box::pin(async move {
            let connect = async {
                let tcp = TcpStream::connect(&address).await?;
                tcp.set_nodelay(true)?;
                connector.connect(tls::server_name(), tcp).await
            };
            let stream = tokio::time::timeout(CONNECT_TIME, connect).await;
            Ok(TokioIo::new(stream.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??))
        })
    }
}

/// Connects at once, so that a wrong address or a wrong controller is told now.
pub(crate) async fn tls_channel(
    endpoint: Endpoint,
    mut config: ClientConfig,
    address: &str,
) -> Result<Channel, tonic::transport::Error> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connect = connector(config, address);
    endpoint.connect_with_connector(service_fn(move |_| connect())).await
}

/// A channel over a unix socket, such as the controller's admin socket: who may open the file
/// may speak. Connects when first used, and again when the connection is lost.
pub fn unix_channel(path: &Path) -> Channel {
    let path = PathBuf::from(path);
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(service_fn(move |_| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    }))
}

/// A connection to a unix socket; its requests carry [`Caller::Local`].
#[derive(Debug)]
pub struct LocalStream(UnixStream);

impl Connected for LocalStream {
    type ConnectInfo = Caller;
    fn connect_info(&self) -> Caller {
        Caller::Local
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// The connections of a unix listener, for tonic.
pub fn unix_incoming(
    listener: UnixListener,
) -> impl futures::Stream<Item = io::Result<LocalStream>> + Send {
    futures::stream::unfold(listener, |listener| async move {
        let accepted = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                Err(error) => {
                    // Descriptors ran out, or the client left already: neither ends the service.
                    tracing::warn!(%error, "a local connection was not accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        Some((Ok(LocalStream(accepted)), listener))
    })
}
