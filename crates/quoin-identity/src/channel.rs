//! gRPC channels: to the controller over mutual TLS, and over unix sockets without.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::incoming::Caller;
use crate::{Error, Expected, Identity, Role, TermChannel, tls};

/// Deadline of TCP connect and TLS handshake together.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// The same, where there is another address to turn to.
const TURN_TIME: Duration = Duration::from_secs(1);
/// Most addresses of controllers.
const ADDRESSES_MAX: usize = 16;

impl Identity {
    /// Returns a channel to the controller at `host:port`, or to whichever of several rules, where these are
    /// separated by commas: one that does not rule takes no connection. The channel connects when first used,
    /// and again whenever the connection is lost, with the certificate of that moment; calls fail
    /// with UNAVAILABLE meanwhile. Callers set a deadline on each call that is not a stream.
    pub fn channel(&self, controller_addr: &str) -> Result<Channel, Error> {
        self.channel_to(controller_addr, Expected::Role(Role::Controller))
    }

    /// Returns a channel as [`Identity::channel`] does, for members: answers of a controller of a
    /// former term are refused.
    pub fn controller(&self, controller_addr: &str) -> Result<TermChannel, Error> {
        Ok(TermChannel::over(self.channel(controller_addr)?, self.clone()))
    }

    /// Returns a channel as [`Identity::controller`] does, and the address of this host that its
    /// connection comes from: `None` until the first connection.
    pub fn controller_with_source(
        &self,
        controller_addr: &str,
    ) -> Result<(TermChannel, SourceAddress), Error> {
        let (source, known) = watch::channel(None);
        let expected = Expected::Role(Role::Controller);
        let channel = self.channel_telling(controller_addr, expected, source)?;
        Ok((TermChannel::over(channel, self.clone()), SourceAddress(known)))
    }

    /// Returns a channel as [`Identity::channel`] does, to any member.
    pub fn channel_to(&self, address: &str, expected: Expected) -> Result<Channel, Error> {
        self.channel_telling(address, expected, watch::channel(None).0)
    }

    fn channel_telling(
        &self,
        address: &str,
        expected: Expected,
        source: watch::Sender<Option<IpAddr>>,
    ) -> Result<Channel, Error> {
        let connect = connector(self.grpc_config(expected)?, address, source);
        Ok(endpoint(address)?.connect_with_connector_lazy(service_fn(move |_| connect())))
    }

    /// Returns a channel as [`Identity::controller`] does, connected at once: an absent or a wrong
    /// controller is reported immediately.
    pub async fn connect(&self, controller_addr: &str) -> Result<TermChannel, Error> {
        let config = self.grpc_config(Expected::Role(Role::Controller))?;
        let channel = tls_channel(endpoint(controller_addr)?, config, controller_addr)
            .await
            .map_err(|error| Error::unreachable(controller_addr, &error))?;
        Ok(TermChannel::over(channel, self.clone()))
    }

    fn grpc_config(&self, expected: Expected) -> Result<ClientConfig, Error> {
        let mut config = ClientConfig::clone(&*self.client_config(expected)?);
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    /// Connects to a member's data port at `host:port`, lets both sides authenticate, and closes
    /// the connection again, within `within`. The error names the cause in words.
    pub async fn reaches(
        &self,
        address: &str,
        expected: Expected,
        within: Duration,
    ) -> Result<(), String> {
        // No application protocol: this is no data connection.
        let config = self.client_config(expected).map_err(|error| error.to_string())?;
        let prove = async {
            let tcp = TcpStream::connect(address).await?;
            TlsConnector::from(config).connect(tls::server_name(), tcp).await.map(drop)
        };
        match tokio::time::timeout(within, prove).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => {
                Err("a process other than this member answers there".to_owned())
            }
            Ok(Err(error)) => Err(crate::error::root(&error)),
            Err(_) => Err(format!("no answer within {} s", within.as_secs())),
        }
    }
}

/// Returns the settings of every channel: dead peers are noticed within 20 s also when idle.
pub(crate) fn endpoint(addresses: &str) -> Result<Endpoint, Error> {
    let bad = || Error::Address { address: addresses.chars().take(160).collect() };
    for address in addresses.split(',') {
        let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(bad());
        }
    }
    if addresses.split(',').count() > ADDRESSES_MAX {
        return Err(bad());
    }
    let address = addresses.split(',').next().unwrap_or_default();
    // The scheme does not decide on TLS here: the connector below makes it.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|_| bad())?;
    Ok(endpoint
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true))
}

/// Address of this host as the controller sees it.
#[derive(Clone, Debug)]
pub struct SourceAddress(watch::Receiver<Option<IpAddr>>);

impl SourceAddress {
    /// Returns an address that the sender tells.
    #[must_use]
    pub fn told_by(sender: &watch::Sender<Option<IpAddr>>) -> Self {
        Self(sender.subscribe())
    }

    /// Returns the address; `None` before the controller was ever reached. No lock outlives the call:
    /// a second one under the first waits for ever while a new connection waits to tell its address.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        *self.0.borrow()
    }

    /// Waits until it is known.
    pub async fn settle(&self) {
        // Fails where the channel to the controller is gone, at the end.
        let _ = self.0.clone().wait_for(Option::is_some).await;
    }
}

type Connecting = Pin<Box<dyn Future<Output = io::Result<TokioIo<TlsStream<TcpStream>>>> + Send>>;

fn connector(
    config: ClientConfig,
    address: &str,
    source: watch::Sender<Option<IpAddr>>,
) -> impl Fn() -> Connecting + Clone + Send + use<> {
    let connector = TlsConnector::from(Arc::new(config));
    let addresses: Arc<[String]> = address.split(',').map(str::to_owned).collect();
    // The address that answered last is asked first.
    let last = Arc::new(AtomicUsize::new(0));
    move || {
        let (connector, addresses) = (connector.clone(), addresses.clone());
        let (last, source) = (last.clone(), source.clone());
        Box::pin(async move {
            let within = if addresses.len() == 1 { CONNECT_TIME } else { TURN_TIME };
            let first = last.load(Ordering::Relaxed);
            let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
            for place in (0..addresses.len()).map(|n| (first + n) % addresses.len()) {
                let connect = async {
                    let tcp = TcpStream::connect(&addresses[place]).await?;
                    tcp.set_nodelay(true)?;
                    let own = tcp.local_addr()?.ip().to_canonical();
                    let stream = connector.connect(tls::server_name(), tcp).await?;
                    Ok((own, stream))
                };
                match tokio::time::timeout(within, connect).await {
                    Ok(Ok((own, stream))) => {
                        last.store(place, Ordering::Relaxed);
                        source.send_if_modified(|known| known.replace(own) != Some(own));
                        return Ok(TokioIo::new(stream));
                    }
                    Ok(Err(error)) => failed = error,
                    Err(_) => failed = io::Error::from(io::ErrorKind::TimedOut),
                }
            }
            Err(failed)
        })
    }
}

/// Connects at once, so that a wrong address or a wrong controller is reported immediately.
pub(crate) async fn tls_channel(
    endpoint: Endpoint,
    mut config: ClientConfig,
    address: &str,
) -> Result<Channel, tonic::transport::Error> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connect = connector(config, address, watch::channel(None).0);
    endpoint.connect_with_connector(service_fn(move |_| connect())).await
}

/// Returns a channel over a unix socket, such as the controller's admin socket: permission to open
/// the file is permission to call. Connects when first used, and again when the connection is lost.
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

/// Returns the connections of a unix listener, for tonic.
pub fn unix_incoming(
    listener: UnixListener,
) -> impl futures::Stream<Item = io::Result<LocalStream>> + Send {
    futures::stream::unfold(listener, |listener| async move {
        let accepted = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                Err(error) => {
                    // No descriptor was left, or the client left already: neither ends the service.
                    tracing::warn!(%error, "cannot accept a local connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        Some((Ok(LocalStream(accepted)), listener))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One message needs it twice, while connections come and go.
    #[test]
    fn the_own_address_is_read_twice_while_a_connection_tells_it() {
        const TIMES: u32 = 200_000;
        let told = watch::channel(None).0;
        let source = SourceAddress::told_by(&told);
        let (ended, both) = std::sync::mpsc::channel();
        let reads = ended.clone();
        std::thread::spawn(move || {
            for _ in 0..TIMES {
                let (first, second) = (source.ip(), source.ip());
                assert!(first.is_none() || second.is_some());
            }
            reads.send(()).expect("the test waits");
        });
        std::thread::spawn(move || {
            for last in 0..TIMES {
                told.send_replace(Some(std::net::Ipv4Addr::from(last).into()));
            }
            ended.send(()).expect("the test waits");
        });
        for _ in 0..2 {
            both.recv_timeout(Duration::from_secs(60)).expect("neither waits for ever");
        }
    }
}
