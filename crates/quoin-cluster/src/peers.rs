//! Peers: which introductions are taken, and which cluster becomes one.
//!
//! An introduction comes from another cluster. So all of it is bounded, and each refusal names what is
//! wrong with it.

use crate::records::{Introduction, PeerLimits, PeerRecord};

/// Peers of one cluster.
pub const PEERS_MAX: usize = 8;
pub const ADDRESSES_MAX: usize = 8;
/// Keys of the mirrors of one cluster, two while one is renewed.
pub const KEYS_MAX: usize = 512;
pub const AUTHORITIES_BYTES_MAX: usize = 16 << 10;
/// Longest `host:port`.
const ADDRESS_BYTES_MAX: usize = 261;
/// Digits of an id that a peer without a name is called by.
const NAME_DIGITS: usize = 8;

/// Reason why an introduction, or a peer, is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotTaken {
    #[error("clusterId: 32 hex digits are needed")]
    Id,
    #[error("clusterId: it is this cluster itself; pair it with another one")]
    Itself,
    #[error("authorities: 1 to {AUTHORITIES_BYTES_MAX} bytes of PEM are needed")]
    Authorities,
    #[error("keys: at most {KEYS_MAX}, of 64 hex digits each")]
    Keys,
    #[error("addresses: at most {ADDRESSES_MAX}, of the form host:port")]
    Addresses,
    #[error(
        "there are {PEERS_MAX} peers already, which is the limit; `quoin mirror unpair` ends one"
    )]
    TooMany,
    #[error("another peer has the name that is given to this one; give it another (--name)")]
    Name,
    #[error(
        "that cluster is a peer already, and says something else of itself; to pair it anew, give it the name \
         that it has here (--name), or unpair it first"
    )]
    Known,
}

/// Checks what a cluster says of itself.
pub fn check(introduction: &Introduction) -> Result<(), NotTaken> {
    let Introduction { authorities_pem, keys, addresses } = introduction;
    if authorities_pem.is_empty() || authorities_pem.len() > AUTHORITIES_BYTES_MAX {
        return Err(NotTaken::Authorities);
    }
    if keys.len() > KEYS_MAX || !keys.iter().all(|key| is_hex(key, 64)) {
        return Err(NotTaken::Keys);
    }
    if addresses.len() > ADDRESSES_MAX || !addresses.iter().all(|address| is_address(address)) {
        return Err(NotTaken::Addresses);
    }
    Ok(())
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns true for a `host:port` that may be dialled.
pub fn is_address(text: &str) -> bool {
    let is_host = |host: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.:[]_".contains(&byte);
        !host.is_empty() && host.bytes().all(is_plain)
    };
    let parts = text.rsplit_once(':');
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port != 0);
    text.len() <= ADDRESS_BYTES_MAX
        && parts.is_some_and(|(host, port)| is_host(host) && is_port(port))
}

/// The record of a cluster that becomes a peer, or is paired anew.
///
/// A token proves an invitation, and not the cluster id that is shown with it. So another authority takes the
/// place of a known peer only where a person names that peer. The same authority adds what was not known
/// yet, and changes nothing else.
///
/// # Errors
/// The reason why it is not taken.
pub fn paired(
    known: &[impl AsRef<PeerRecord>],
    own: &str,
    (cluster, name): (&str, &str),
    introduction: Introduction,
    now_ms: u64,
) -> Result<PeerRecord, NotTaken> {
    if !is_hex(cluster, 32) {
        return Err(NotTaken::Id);
    }
    if cluster == own {
        return Err(NotTaken::Itself);
    }
    check(&introduction)?;
    let (mut former, others): (Vec<&PeerRecord>, Vec<&PeerRecord>) =
        known.iter().map(AsRef::as_ref).partition(|peer| peer.cluster == cluster);
    let former = former.pop();
    if former.is_none() && others.len() >= PEERS_MAX {
        return Err(NotTaken::TooMany);
    }
    if let Some(former) = former.filter(|former| former.name != name) {
        let known = &former.introduction;
        if known.authorities_pem != introduction.authorities_pem {
            return Err(NotTaken::Known);
        }
        let mut same = former.clone();
        if known.keys.is_empty() {
            same.introduction.keys = introduction.keys;
        }
        if known.addresses.is_empty() {
            same.introduction.addresses = introduction.addresses;
        }
        return Ok(same);
    }
    let name = if name.is_empty() { &cluster[..NAME_DIGITS] } else { name }.to_owned();
    if others.iter().any(|peer| peer.name == name || peer.cluster == name) {
        return Err(NotTaken::Name);
    }
    let limits = PeerLimits::default();
    Ok(PeerRecord { cluster: cluster.to_owned(), name, introduction, paired_ms: now_ms, limits })
}

/// Takes in what a peer says of itself. Returns true if it is something else than before.
///
/// # Errors
/// The reason why it is not taken; the record stays as it is.
pub fn introduced(peer: &mut PeerRecord, told: &Introduction) -> Result<bool, NotTaken> {
    check(told)?;
    // Mirrors that it has started, and not told of where they are, are no reason to forget the others.
    let mut told = told.clone();
    if told.addresses.is_empty() {
        told.addresses.clone_from(&peer.introduction.addresses);
    }
    let is_news = peer.introduction != told;
    peer.introduction = told;
    Ok(is_news)
}

/// Name of the mirror that links to the peers: the first of those that run.
pub fn leader<'a>(running: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    running.min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn said() -> Introduction {
        Introduction {
            authorities_pem: "-----BEGIN CERTIFICATE-----".into(),
            keys: vec!["0a".repeat(32)],
            addresses: vec!["mirror-1.example:10810".into(), "[fd00::1]:10810".into()],
        }
    }

    fn id(number: u32) -> String {
        format!("{number:032x}")
    }

    fn pair(
        known: &[std::sync::Arc<PeerRecord>],
        cluster: &str,
        name: &str,
    ) -> Result<PeerRecord, NotTaken> {
        paired(known, &id(1), (cluster, name), said(), 5)
    }

    #[test]
    fn a_cluster_becomes_a_peer_once_and_keeps_its_name_when_it_is_paired_anew() {
        assert_eq!(pair(&[], &id(1), "east"), Err(NotTaken::Itself));
        assert_eq!(pair(&[], "0123", "east"), Err(NotTaken::Id));
        assert_eq!(pair(&[], &id(0xABC), "").unwrap().name, "00000000");
        let east = std::sync::Arc::new(pair(&[], &id(2), "east").unwrap());
        assert_eq!(pair(std::slice::from_ref(&east), &id(2), "").unwrap().name, "east");
        assert_eq!(
            pair(std::slice::from_ref(&east), &id(2), "west").unwrap(),
            *east,
            "a repeat changes nothing"
        );
        let thief = Introduction { authorities_pem: "-----ANOTHER".into(), ..said() };
        let as_named =
            |name| paired(std::slice::from_ref(&east), &id(1), (&id(2), name), thief.clone(), 6);
        assert_eq!((as_named(""), as_named("west")), (Err(NotTaken::Known), Err(NotTaken::Known)));
        assert_eq!(as_named("east").unwrap().introduction, thief, "its authority was replaced");
        assert_eq!(pair(std::slice::from_ref(&east), &id(3), "east"), Err(NotTaken::Name));
        assert_eq!(
            pair(std::slice::from_ref(&east), &id(3), &id(2)),
            Err(NotTaken::Name),
            "an id means one cluster"
        );
    }

    #[test]
    fn no_more_than_eight_clusters_are_peers_and_each_of_them_may_be_paired_anew() {
        let peer = |number| std::sync::Arc::new(pair(&[], &id(number), &id(number)).unwrap());
        let known: Vec<_> = (2..10).map(peer).collect();
        assert_eq!(pair(&known, &id(10), "more"), Err(NotTaken::TooMany));
        pair(&known, &id(9), "").unwrap();
    }

    #[test]
    fn an_introduction_is_bounded_and_its_addresses_can_be_dialled() {
        check(&said()).unwrap();
        let with = |change: fn(&mut Introduction)| {
            let mut said = said();
            change(&mut said);
            check(&said)
        };
        assert_eq!(with(|s| s.authorities_pem.clear()), Err(NotTaken::Authorities));
        let long = |s: &mut Introduction| s.authorities_pem = "a".repeat(AUTHORITIES_BYTES_MAX + 1);
        assert_eq!(with(long), Err(NotTaken::Authorities));
        assert_eq!(with(|s| s.keys[0] = "0A".repeat(32)), Err(NotTaken::Keys));
        assert_eq!(with(|s| s.keys = vec!["0a".repeat(32); KEYS_MAX + 1]), Err(NotTaken::Keys));
        for bad in ["", ":1", "host", "host:", "host:0", "host:65536", "a b:1", "a\n:1", "ä:1"] {
            assert!(!is_address(bad), "{bad}");
        }
        let many = |s: &mut Introduction| s.addresses = vec!["a:1".into(); ADDRESSES_MAX + 1];
        assert_eq!(with(many), Err(NotTaken::Addresses));
    }

    #[test]
    fn what_a_peer_says_replaces_what_it_said_before_but_for_addresses_of_nobody() {
        let mut peer = pair(&[], &id(2), "east").unwrap();
        assert_eq!(introduced(&mut peer, &said()), Ok(false));
        let moved = Introduction { addresses: vec!["b:2".into()], ..said() };
        assert_eq!(introduced(&mut peer, &moved), Ok(true));
        let silent = Introduction { addresses: vec![], ..said() };
        assert_eq!(introduced(&mut peer, &silent), Ok(false));
        assert_eq!(peer.introduction, moved);
        let bad = Introduction { keys: vec!["x".into()], ..said() };
        assert_eq!(introduced(&mut peer, &bad), Err(NotTaken::Keys));
        assert_eq!(peer.introduction, moved);
    }

    #[test]
    fn the_first_of_the_running_mirrors_leads() {
        assert_eq!(leader(["n2", "n1", "n10"].into_iter()), Some("n1"));
        assert_eq!(leader([].into_iter()), None);
    }

    proptest! {
        #[test]
        fn no_text_of_a_peer_makes_it_panic(cluster in ".*", name in ".*", address in ".*") {
            let told = Introduction { addresses: vec![address], ..said() };
            let _ = paired(&[] as &[std::sync::Arc<PeerRecord>], &id(1), (&cluster, &name), told, 0);
        }
    }
}
