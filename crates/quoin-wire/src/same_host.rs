//! Connections between a target and a pool on one host: a unix socket beside the pool's TCP port.
//!
//! Its data never leaves the kernel: this saves the work of TCP and of a cipher that would protect
//! nothing. The identity of the peer is still proven by certificates, as on the network (see
//! [`crate::handshake`]).
//!
//! The socket's name is abstract, made of the pool and its port. It needs no directory that both
//! sides must know, it ends with the process, and it is visible within one network namespace only,
//! so it never leads to a pool on another host or in a container with a network of its own. Any
//! process may take a name, or connect to one. So each side asks the kernel for the user of the
//! other, and accepts its own user only, who could read its memory as well. With other users, and
//! where no process listens, the network is used.

use std::fmt;
use std::io::{Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::sockopt;

/// Size of a socket's buffer: some requests of 128 KiB. The system may allow less.
const BUFFER_BYTES: usize = 2 << 20;
/// Time after which a peer that answers nothing, or accepts nothing, counts as gone.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Listens for targets. An error means that the name is taken: the pool is then reached by TCP
/// only.
pub fn listen(pool: &str, port: u16) -> Result<UnixListener> {
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name(pool, port))?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to a pool. An error means that the network is to be used.
pub fn connect(pool: &str, port: u16) -> Result<UnixStream> {
    let kind = rustix::net::SocketType::STREAM;
    // Non-blocking: a process that hangs may accept no connections there.
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None)?;
    let address = rustix::net::SocketAddrUnix::new_abstract_name(name(pool, port).as_bytes())?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    if is_of_this_user(&stream)? {
        return Ok(stream);
    }
    Err(std::io::Error::other("the listener belongs to another user"))
}

/// Returns true if a process of this user is at the other end.
pub fn is_of_this_user(stream: &UnixStream) -> Result<bool> {
    Ok(sockopt::socket_peercred(stream)?.uid == rustix::process::geteuid())
}

fn name(pool: &str, port: u16) -> String {
    format!("quoin-data/{pool}/{port}")
}

/// Address of the peer of a data connection, for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerAddress {
    Network(SocketAddr),
    SameHost,
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Network(address) => address.fmt(f),
            PeerAddress::SameHost => f.write_str("this host"),
        }
    }
}

/// A connected socket of either kind.
pub enum Stream {
    Tcp(TcpStream),
    SameHost(UnixStream),
}

/// Ends connections whose peer is gone without closing, which an idle session would never detect,
/// and connections whose peer accepts nothing any more.
fn end_if_silent(tcp: &TcpStream) -> Result<()> {
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, SILENCE_MAX / 2)?;
    sockopt::set_tcp_keepintvl(tcp, SILENCE_MAX / 6)?;
    sockopt::set_tcp_user_timeout(tcp, SILENCE_MAX.as_millis() as u32)?;
    Ok(())
}

impl Stream {
    /// Makes the socket blocking, and sends data without delay.
    pub(crate) fn prepare(&self) -> Result<()> {
        match self {
            Stream::Tcp(tcp) => {
                tcp.set_nonblocking(false)?;
                tcp.set_nodelay(true)?;
                end_if_silent(tcp)
            }
            Stream::SameHost(unix) => {
                unix.set_nonblocking(false)?;
                // Only a privileged process may exceed the system's limit; others get as much as is
                // allowed.
                if sockopt::set_socket_send_buffer_size_force(unix, BUFFER_BYTES).is_err() {
                    sockopt::set_socket_send_buffer_size(unix, BUFFER_BYTES)?;
                }
                Ok(())
            }
        }
    }

    pub(crate) fn set_nonblocking(&self) -> Result<()> {
        match self {
            Stream::Tcp(tcp) => tcp.set_nonblocking(true),
            Stream::SameHost(unix) => unix.set_nonblocking(true),
        }
    }

    /// Limits each read and write; `None`: no limit.
    pub(crate) fn set_timeout(&self, timeout: Option<Duration>) -> Result<()> {
        match self {
            Stream::Tcp(tcp) => {
                tcp.set_read_timeout(timeout)?;
                tcp.set_write_timeout(timeout)
            }
            Stream::SameHost(unix) => {
                unix.set_read_timeout(timeout)?;
                unix.set_write_timeout(timeout)
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        match self {
            Stream::Tcp(tcp) => tcp.read(buffer),
            Stream::SameHost(unix) => unix.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> Result<usize> {
        match self {
            Stream::Tcp(tcp) => tcp.write(buffer),
            Stream::SameHost(unix) => unix.write(buffer),
        }
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(tcp) => tcp.as_fd(),
            Stream::SameHost(unix) => unix.as_fd(),
        }
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> OwnedFd {
        match stream {
            Stream::Tcp(tcp) => tcp.into(),
            Stream::SameHost(unix) => unix.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_testkit::skipped;

    fn unique(of: &str) -> String {
        format!("{of}-{}", std::process::id())
    }

    #[test]
    fn a_pool_is_reached_by_its_name_and_port_while_it_runs() {
        let pool = unique("met");
        let listener = listen(&pool, 7).unwrap();
        assert!(listen(&pool, 7).is_err(), "one process holds a name at a time");
        assert!(connect(&pool, 8).is_err());
        assert!(connect(&unique("other"), 7).is_err());
        let mut target = connect(&pool, 7).unwrap();
        let (mut at_pool, _) = listener.accept().unwrap();
        assert!(is_of_this_user(&at_pool).unwrap());
        at_pool.write_all(b"here").unwrap();
        let mut received = [0; 4];
        target.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"here");
        drop(listener);
        assert!(connect(&pool, 7).is_err());
    }

    #[test]
    fn an_idle_network_connection_detects_a_peer_that_is_gone_without_closing() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for tcp in [dialled, accepted] {
            let stream = Stream::Tcp(tcp);
            stream.prepare().unwrap();
            let Stream::Tcp(tcp) = stream else { unreachable!() };
            assert!(sockopt::socket_keepalive(&tcp).unwrap());
            assert_eq!(sockopt::tcp_keepidle(&tcp).unwrap(), Duration::from_secs(30));
            assert_eq!(sockopt::tcp_keepintvl(&tcp).unwrap(), Duration::from_secs(10));
            assert_eq!(sockopt::tcp_user_timeout(&tcp).unwrap(), 60_000);
        }
    }

    #[test]
    fn a_pool_that_accepts_no_connections_does_not_block_a_target() {
        let pool = unique("hung");
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        let address =
            rustix::net::SocketAddrUnix::new_abstract_name(name(&pool, 7).as_bytes()).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 2).unwrap();
        let connected: Vec<_> = (0..10).map(|_| connect(&pool, 7).is_ok()).collect();
        assert!(connected[0] && !connected[9], "{connected:?}");
    }

    #[test]
    fn connections_of_other_users_are_refused_on_both_sides() {
        if !rustix::process::geteuid().is_root() {
            return skipped("only root can act as another user");
        }
        let (ours, theirs) = (unique("ours"), unique("theirs"));
        let listener = listen(&ours, 7).unwrap();
        std::thread::scope(|scope| {
            let other_user = scope.spawn(|| {
                // The bare call changes this thread's user only; libc's would change all.
                // SAFETY: plain numbers are passed.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 1, 1, 1) }, 0);
                let address = |pool| UnixAddr::from_abstract_name(name(pool, 7)).unwrap();
                let own = UnixListener::bind_addr(&address(&theirs)).unwrap();
                (own, UnixStream::connect_addr(&address(&ours)).unwrap())
            });
            let (_listening, _connected) = other_user.join().unwrap();
            assert!(connect(&theirs, 7).is_err());
            assert!(!is_of_this_user(&listener.accept().unwrap().0).unwrap());
        });
    }
}
