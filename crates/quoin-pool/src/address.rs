//! Where a pool listens, and the address that targets are told.
//!
//! A port that was chosen by the system is remembered beside the identity, so that firewalls and
//! targets find the pool where it was. A pool that listens on every address of its host tells the
//! one that its connection to the controller comes from: others of the cluster know the way to that.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;

use quoin_identity::SourceAddress;

use crate::Error;

/// Holds the port that was chosen last.
const PORT_FILE: &str = "listen-port";

/// Listens on `listen`; where that leaves the port open, on the one of the last time if it is free.
pub(crate) fn listen(listen: SocketAddr, state: &Path) -> Result<TcpListener, Error> {
    let failed = |source| Error::Listen { address: listen, source };
    if listen.port() != 0 {
        return TcpListener::bind(listen).map_err(failed);
    }
    let file = state.join(PORT_FILE);
    let remembered = std::fs::read_to_string(&file).unwrap_or_default();
    let again = remembered.trim().parse().ok().filter(|port: &u16| *port != 0);
    let again = again.and_then(|port| TcpListener::bind(SocketAddr::new(listen.ip(), port)).ok());
    let listener = match again {
        Some(listener) => listener,
        None => TcpListener::bind(listen).map_err(failed)?,
    };
    let port = listener.local_addr().map_err(failed)?.port().to_string();
    if port != remembered.trim() {
        quoin_identity::write_private(&file, port.as_bytes())?;
    }
    Ok(listener)
}

/// The address that targets are told.
#[derive(Clone, Debug)]
pub(crate) enum Advertised {
    As(String),
    /// Every address of the host is listened on: the one by which the controller is reached.
    Source {
        source: SourceAddress,
        port: u16,
    },
}

impl Advertised {
    pub fn new(given: Option<String>, bound: SocketAddr, source: SourceAddress) -> Self {
        match given {
            Some(given) => Self::As(given),
            None if bound.ip().is_unspecified() => Self::Source { source, port: bound.port() },
            None => Self::As(bound.to_string()),
        }
    }

    /// `None` before the controller was ever reached.
    pub fn known(&self) -> Option<String> {
        match self {
            Self::As(address) => Some(address.clone()),
            Self::Source { source, port } => {
                source.ip().map(|ip| SocketAddr::new(ip, *port).to_string())
            }
        }
    }

    /// Waits until it is known.
    pub async fn settle(&self) {
        if let Self::Source { source, .. } = self {
            source.settle().await;
        }
    }
}

/// Checks what targets are to be told: `host:port`, and not an address that leads nowhere from
/// another host.
///
/// # Errors
/// The rule, and the way out.
pub fn check_advertised(text: &str) -> Result<String, String> {
    let wrong = || format!("{text:?} is not of the form HOST:PORT, as in h2:7401");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    if host.is_empty() || text.len() > 300 || port.parse::<u16>().ok().is_none_or(|port| port == 0)
    {
        return Err(wrong());
    }
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()) {
        return Err(format!(
            "{host} stands for every address of this host and leads nowhere from another: name \
             the one that others reach"
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chosen_port_is_the_same_after_a_restart_and_another_one_where_it_was_taken() {
        let state = tempfile::tempdir().unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let first = listen(any, state.path()).unwrap();
        let chosen = port(&first);
        drop(first);
        let second = listen(any, state.path()).unwrap();
        assert_eq!(port(&second), chosen);
        let other = listen(any, state.path()).unwrap();
        assert_ne!(port(&other), chosen);
        let taken = port(&other);
        drop((second, other));
        assert_eq!(port(&listen(any, state.path()).unwrap()), taken);
        std::fs::write(state.path().join(PORT_FILE), "nonsense").unwrap();
        listen(any, state.path()).unwrap();
    }

    #[test]
    fn a_pool_on_every_address_reports_the_one_that_reaches_the_controller() {
        let told = tokio::sync::watch::channel(None).0;
        let source = SourceAddress::told_by(&told);
        let bound = "0.0.0.0:7401".parse().unwrap();
        let address = Advertised::new(None, bound, source.clone());
        assert_eq!(address.known(), None);
        told.send_replace(Some("10.0.0.7".parse().unwrap()));
        assert_eq!(address.known().unwrap(), "10.0.0.7:7401");
        told.send_replace(Some("fd00::7".parse().unwrap()));
        assert_eq!(address.known().unwrap(), "[fd00::7]:7401");
        let one = Advertised::new(None, "10.1.1.1:7401".parse().unwrap(), source.clone());
        assert_eq!(one.known().unwrap(), "10.1.1.1:7401");
        let given = Advertised::new(Some("h2:7401".into()), bound, source);
        assert_eq!(given.known().unwrap(), "h2:7401");
    }

    #[test]
    fn an_address_that_leads_nowhere_from_another_host_is_not_told() {
        for good in ["h2:7401", "10.0.0.1:7401", "[fd00::1]:7401"] {
            check_advertised(good).unwrap();
        }
        for wrong in ["h2", "h2:", ":7401", "h2:0", "h2:70000", ""] {
            assert!(check_advertised(wrong).unwrap_err().contains("HOST:PORT"), "{wrong}");
        }
        for wildcard in ["0.0.0.0:7401", "[::]:7401"] {
            assert!(check_advertised(wildcard).unwrap_err().contains("nowhere"), "{wildcard}");
        }
    }
}
