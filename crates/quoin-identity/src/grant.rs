//! Epoch grants, which a controller signs, a target presents, and a pool verifies.
//!
//! A pool receives `Open` from a target with a node's certificate. It proves which node connects,
//! but not that the records name this node as the volume's owner. The grant does: it states "this
//! node may open this volume at this epoch as this incarnation", signed with the key of a
//! controller's certificate, which comes with it. So a pool need not contact the controller, and IO
//! continues while that one is down. It also says whether the node may change the volume's content: a
//! node that has it read-only, or to which it is lent for work that reads, may not. The grant also states the term in which it was issued, so a
//! pool learns of a newer term of which no controller has informed it ([`quoin_types::term`]).
//!
//! Bytes, little-endian: magic, cluster u128, volume u128, epoch u64, incarnation u128, node (u8
//! length, bytes), writes u8 (0 or 1), and chain and signature ([`crate::signed`]). The magic is `QGR1` in term 0, so
//! that pools of versions that know no terms read it; else `QGR2`, and the term (number u64, id
//! u128) follows.

use bytes::{Buf, BufMut};
use quoin_types::{Epoch, Incarnation, Term, TermId, VolumeId};
use rustls::sign::CertifiedKey;

use crate::signed::{self, SIGNED_BYTES_MAX, Seal, take};
use crate::tls::Current;
use crate::{ClusterId, Error, check_name};

/// Format from before there were terms: of term 0.
const MAGIC: &[u8; 4] = b"QGR1";
pub(crate) const MAGIC_OF_TERM: &[u8; 4] = b"QGR2";
const CONTEXT: &[u8] = b"quoin epoch grant, format 1\0";
const CONTEXT_OF_TERM: &[u8] = b"quoin epoch grant, format 2\0";

/// Permission for one target to open one volume at one epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    pub volume: VolumeId,
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    /// The name in the certificate of the node on which the target runs.
    pub node: String,
    /// It may change the volume's content.
    pub writes: bool,
    /// Term of the controller that signed it. The epoch may be of a former term.
    pub term: Term,
}

impl Grant {
    fn context(&self) -> &'static [u8] {
        if self.term == Term::default() { CONTEXT } else { CONTEXT_OF_TERM }
    }

    fn statement(&self, cluster: ClusterId) -> Vec<u8> {
        let of_a_term = self.term != Term::default();
        let mut out = Vec::with_capacity(128);
        out.put_slice(if of_a_term { MAGIC_OF_TERM } else { MAGIC });
        out.put_u128_le(cluster.0);
        out.put_u128_le(self.volume.0);
        out.put_u64_le(self.epoch.0);
        out.put_u128_le(self.incarnation.0);
        out.put_u8(self.node.len() as u8);
        out.put_slice(self.node.as_bytes());
        out.put_u8(u8::from(self.writes));
        if of_a_term {
            out.put_u64_le(self.term.number);
            out.put_u128_le(self.term.id.0);
        }
        out
    }

    pub(crate) fn sign(&self, cluster: ClusterId, key: &CertifiedKey) -> Result<Vec<u8>, Error> {
        check_name("node", &self.node)?;
        signed::sign(self.context(), self.statement(cluster), key)
    }

    pub(crate) fn verify(bytes: &[u8], current: &Current) -> Result<Self, Error> {
        let refused = |reason: &str| Error::Grant(reason.to_owned());
        if bytes.len() > SIGNED_BYTES_MAX {
            return Err(refused("it is too long"));
        }
        let parsed = parse(bytes).ok_or_else(|| refused("it is truncated or not a grant"))?;
        if parsed.cluster != current.cluster {
            return Err(refused("it is of another cluster"));
        }
        parsed.seal.verify(parsed.grant.context(), parsed.statement, current)?;
        // Incarnation 0 names no target: it marks the promise of an epoch that was taken back.
        if parsed.grant.incarnation == Incarnation(0) {
            return Err(refused("it names no target"));
        }
        Ok(parsed.grant)
    }
}

struct Parsed<'a> {
    cluster: ClusterId,
    grant: Grant,
    statement: &'a [u8],
    seal: Seal<'a>,
}

fn parse(bytes: &[u8]) -> Option<Parsed<'_>> {
    let mut rest = bytes;
    let of_a_term = match take(&mut rest, 4)? {
        magic if magic == MAGIC => false,
        magic if magic == MAGIC_OF_TERM => true,
        _ => return None,
    };
    let cluster = ClusterId(rest.try_get_u128_le().ok()?);
    let volume = VolumeId(rest.try_get_u128_le().ok()?);
    let epoch = Epoch(rest.try_get_u64_le().ok()?);
    let incarnation = Incarnation(rest.try_get_u128_le().ok()?);
    let length = rest.try_get_u8().ok()?;
    let node = std::str::from_utf8(take(&mut rest, length.into())?).ok()?.to_owned();
    check_name("node", &node).ok()?;
    let writes = match rest.try_get_u8().ok()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    let mut term = Term::default();
    if of_a_term {
        let number = rest.try_get_u64_le().ok()?;
        term = Term { number, id: TermId(rest.try_get_u128_le().ok()?) };
        // Term 0 has one encoding only.
        if term == Term::default() {
            return None;
        }
    }
    let statement = &bytes[..bytes.len() - rest.len()];
    let seal = signed::parse_seal(rest)?;
    Some(Parsed {
        cluster,
        grant: Grant { volume, epoch, incarnation, node, writes, term },
        statement,
        seal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Identity, Lifetimes, Role};
    use proptest::prelude::*;

    fn grant() -> Grant {
        let (volume, epoch) = (VolumeId(5), Epoch(7));
        let term = Term::default();
        let (incarnation, node) = (Incarnation(9), "node-1".into());
        Grant { volume, epoch, incarnation, node, writes: true, term }
    }

    fn grants() -> [Grant; 2] {
        let term = Term { number: 3, id: TermId(0xabcd) };
        [grant(), Grant { term, writes: false, ..grant() }]
    }

    fn cluster() -> (tempfile::TempDir, Identity, Identity) {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        let identity = |role: Role| {
            authority.issue_identity(&dir.path().join(role.as_str()), role, "a").unwrap()
        };
        let (controller, pool) = (identity(Role::Controller), identity(Role::Pool));
        (dir, controller, pool)
    }

    #[test]
    fn a_pool_accepts_a_grant_signed_by_the_controller() {
        let (_dir, controller, pool) = cluster();
        for (grant, magic) in grants().into_iter().zip([MAGIC, MAGIC_OF_TERM]) {
            let bytes = controller.sign_grant(&grant).unwrap();
            assert_eq!(pool.verify_grant(&bytes).unwrap(), grant);
            assert!(bytes.starts_with(magic));
        }
    }

    #[test]
    fn a_grant_with_any_byte_changed_is_refused() {
        let (_dir, controller, pool) = cluster();
        for grant in grants() {
            let bytes = controller.sign_grant(&grant).unwrap();
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 1;
                // A change in an unneeded certificate of the chain has no effect.
                if let Ok(read) = pool.verify_grant(&changed) {
                    assert_eq!(read, grant, "byte {at} changed the content of the grant");
                }
            }
            for at in 0..bytes.len() {
                assert!(pool.verify_grant(&bytes[..at]).is_err(), "truncated at {at}");
            }
        }
    }

    #[test]
    fn a_grant_signed_by_a_pool_is_refused_by_name() {
        let (_dir, controller, pool) = cluster();
        let forged = pool.sign_grant(&grant()).unwrap();
        let error = controller.verify_grant(&forged).unwrap_err().to_string();
        assert!(error.contains("pool a signed it"), "{error}");
    }

    #[test]
    fn a_grant_without_a_target_is_refused() {
        let (_dir, controller, pool) = cluster();
        for grant in grants() {
            let nobodys = Grant { incarnation: Incarnation(0), ..grant };
            let bytes = controller.sign_grant(&nobodys).unwrap();
            let error = pool.verify_grant(&bytes).unwrap_err().to_string();
            assert!(error.contains("names no target"), "{error}");
        }
    }

    #[test]
    fn a_grant_of_another_cluster_is_refused() {
        let (_dir, _, pool) = cluster();
        let (_other_dir, other, _) = cluster();
        assert!(pool.verify_grant(&other.sign_grant(&grant()).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes);
            let _ = parse(&[MAGIC.as_slice(), &bytes].concat());
            let _ = parse(&[MAGIC_OF_TERM.as_slice(), &bytes].concat());
        }
    }
}
