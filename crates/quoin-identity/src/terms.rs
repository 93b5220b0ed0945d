//! Terms that a member knows: proven, stored on media, and passed on.
//!
//! A term is accepted on a controller's signature alone: a statement of its own, or a grant of that
//! term. The signature is verified whichever peer shows it, so a pool or a node cannot end a
//! controller by a statement of its own.
//!
//! `term.json` of the identity directory has the highest term and its proof, which is shown to
//! peers that do not know it. Processes that share the directory write to one file.
//!
//! Bytes of a statement, little-endian: magic `QTM1`, cluster u128, number u64, id u128, and chain
//! and signature ([`crate::signed`]).

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Buf, BufMut, Bytes};
use quoin_types::term::TermOrder;
use quoin_types::{Term, TermId};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::signed::{self, SIGNED_BYTES_MAX, take};
use crate::tls::Current;
use crate::{ClusterId, Error, Grant, files, grant};

const MAGIC: &[u8; 4] = b"QTM1";
const CONTEXT: &[u8] = b"quoin controller term, format 1\0";
const FILE: &str = "term.json";
const LOCK: &str = ".term.lock";

/// Returns the bytes by which a controller proves its term. Term 0 needs no proof and has none.
pub(crate) fn sign(term: Term, cluster: ClusterId, key: &CertifiedKey) -> Result<Bytes, Error> {
    if term == Term::default() {
        return Ok(Bytes::new());
    }
    let mut statement = Vec::with_capacity(64);
    statement.put_slice(MAGIC);
    statement.put_u128_le(cluster.0);
    statement.put_u64_le(term.number);
    statement.put_u128_le(term.id.0);
    signed::sign(CONTEXT, statement, key).map(Bytes::from)
}

/// Returns the term that a statement or a grant proves.
pub(crate) fn verify(proof: &[u8], current: &Current) -> Result<Term, Error> {
    if proof.is_empty() {
        return Ok(Term::default());
    }
    if proof.starts_with(grant::MAGIC_OF_TERM) {
        return Ok(Grant::verify(proof, current)?.term);
    }
    let refused = |reason: &str| Error::Grant(reason.to_owned());
    if proof.len() > SIGNED_BYTES_MAX {
        return Err(refused("it is too long"));
    }
    let cut = || refused("it is truncated or proves no term");
    let (cluster, term, statement) = parse(proof).ok_or_else(cut)?;
    if cluster != current.cluster {
        return Err(refused("it is of another cluster"));
    }
    let seal = signed::parse_seal(&proof[statement..]).ok_or_else(cut)?;
    seal.verify(CONTEXT, &proof[..statement], current)?;
    Ok(term)
}

/// Parses a proof; returns also the length of the statement.
fn parse(proof: &[u8]) -> Option<(ClusterId, Term, usize)> {
    let mut rest = proof;
    if take(&mut rest, 4)? != MAGIC {
        return None;
    }
    let cluster = ClusterId(rest.try_get_u128_le().ok()?);
    let number = rest.try_get_u64_le().ok()?;
    let term = Term { number, id: TermId(rest.try_get_u128_le().ok()?) };
    Some((cluster, term, proof.len() - rest.len()))
}

/// Contents of the file.
#[derive(Serialize, Deserialize)]
struct TermFile {
    number: u64,
    /// 32 hex digits.
    id: String,
    /// Hex.
    proof: String,
}

/// A term, and its proof.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Proven {
    pub term: Term,
    pub proof: Bytes,
}

/// The highest term that a member knows.
pub struct Terms {
    dir: PathBuf,
    highest: Mutex<Proven>,
    /// The proof that was verified last, whatever it proves: every answer of a controller has the
    /// same one.
    verified: Mutex<Proven>,
    changed: watch::Sender<Term>,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Terms {
    pub(crate) fn load(dir: &Path) -> Result<Self, Error> {
        let highest = read(dir)?;
        let changed = watch::channel(highest.term).0;
        let (highest, verified) = (Mutex::new(highest), Mutex::default());
        Ok(Self { dir: dir.to_owned(), highest, verified, changed })
    }

    /// Returns the highest term, and its proof.
    pub fn highest(&self) -> Proven {
        locked(&self.highest).clone()
    }

    /// Returns a receiver of the highest term, which changes with each higher one.
    pub fn changes(&self) -> watch::Receiver<Term> {
        self.changed.subscribe()
    }

    /// Compares a term with the highest one; stores nothing.
    pub fn compare_with(&self, term: Term) -> TermOrder {
        term.compare_with(locked(&self.highest).term)
    }

    /// Verifies as [`verify`] does; the bytes are often those that were verified last.
    pub(crate) fn verify(&self, proof: &[u8], current: &Current) -> Result<Term, Error> {
        for known in [&self.verified, &self.highest] {
            let known = locked(known);
            if known.proof == proof && !proof.is_empty() {
                return Ok(known.term);
            }
        }
        let term = verify(proof, current)?;
        if !proof.is_empty() {
            *locked(&self.verified) = Proven { term, proof: Bytes::copy_from_slice(proof) };
        }
        Ok(term)
    }

    /// Accepts a proven term: a higher one is on media when this returns.
    ///
    /// # Errors
    /// Where it cannot be written: it is not accepted then, because it would be forgotten.
    pub(crate) fn accept(&self, term: Term, proof: &[u8]) -> Result<TermOrder, Error> {
        let mut highest = locked(&self.highest);
        let order = term.compare_with(highest.term);
        if order == TermOrder::Higher {
            // Another process of this directory may have stored a still higher one.
            let _lock = lock(&self.dir)?;
            let stored = read(&self.dir)?;
            let accepted = Proven { term, proof: Bytes::copy_from_slice(proof) };
            *highest = if stored.term.number >= term.number {
                stored
            } else {
                write(&self.dir, &accepted)?;
                accepted
            };
            let (order, now) = (term.compare_with(highest.term), highest.term);
            drop(highest);
            self.changed.send_replace(now);
            return Ok(if order == TermOrder::Same { TermOrder::Higher } else { order });
        }
        // The controller recognises its own statement at once, and a valid certificate signed it.
        if order == TermOrder::Same && proof.starts_with(MAGIC) && highest.proof != proof {
            highest.proof = Bytes::copy_from_slice(proof);
        }
        Ok(order)
    }
}

fn lock(dir: &Path) -> Result<std::fs::File, Error> {
    let path = dir.join(LOCK);
    let failed = |source| Error::File { path: path.clone(), source };
    let file = std::fs::File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(failed)?;
    file.lock().map_err(failed)?;
    Ok(file)
}

fn read(dir: &Path) -> Result<Proven, Error> {
    let path = dir.join(FILE);
    let Some(bytes) = files::read(&path)? else { return Ok(Proven::default()) };
    let damaged = |reason: String| Error::Damaged { path: path.clone(), reason };
    let file: TermFile = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    let id: TermId = file.id.parse().map_err(|e| damaged(format!("its id: {e}")))?;
    let proof = hex::decode(&file.proof).map_err(|e| damaged(e.to_string()))?;
    Ok(Proven { term: Term { number: file.number, id }, proof: proof.into() })
}

fn write(dir: &Path, proven: &Proven) -> Result<(), Error> {
    let Proven { term, proof } = proven;
    let file = TermFile { number: term.number, id: term.id.to_string(), proof: hex::encode(proof) };
    let bytes = serde_json::to_vec_pretty(&file).expect("plain data");
    files::write(&dir.join(FILE), &bytes, files::PUBLIC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Identity, Lifetimes, Role};
    use proptest::prelude::*;

    const FIRST: Term = Term { number: 1, id: TermId(0x11) };
    const RIVAL: Term = Term { number: 1, id: TermId(0x22) };
    const SECOND: Term = Term { number: 2, id: TermId(0x33) };

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
    fn a_term_survives_a_restart_and_lower_and_rival_terms_are_refused() {
        let (_dir, controller, pool) = cluster();
        let accept = |pool: &Identity, term| pool.accept_term(&controller.sign_term(term).unwrap());
        assert_eq!(accept(&pool, Term::default()).unwrap(), TermOrder::Same);
        assert_eq!(accept(&pool, FIRST).unwrap(), TermOrder::Higher);
        let mut changes = pool.terms().changes();
        for pool in [pool.clone(), Identity::load(pool.dir()).unwrap()] {
            assert_eq!(accept(&pool, FIRST).unwrap(), TermOrder::Same);
            assert_eq!(accept(&pool, RIVAL).unwrap(), TermOrder::Rival);
            assert_eq!(accept(&pool, Term::default()).unwrap(), TermOrder::Former);
            assert_eq!(pool.terms().highest().term, FIRST);
        }
        assert!(!changes.has_changed().unwrap());
        assert_eq!(accept(&pool, SECOND).unwrap(), TermOrder::Higher);
        assert_eq!(*changes.borrow_and_update(), SECOND);
        assert_eq!(accept(&pool, FIRST).unwrap(), TermOrder::Former);
        // The stored proof convinces other members.
        let proof = Identity::load(pool.dir()).unwrap().terms().highest().proof;
        assert_eq!(controller.verify_term(&proof).unwrap(), SECOND);
    }

    #[test]
    fn two_processes_of_one_directory_keep_the_higher_term_of_each_other() {
        let (_dir, controller, pool) = cluster();
        let other = Identity::load(pool.dir()).unwrap();
        let accept = |pool: &Identity, term| pool.accept_term(&controller.sign_term(term).unwrap());
        assert_eq!(accept(&other, SECOND).unwrap(), TermOrder::Higher);
        assert_eq!(
            accept(&pool, FIRST).unwrap(),
            TermOrder::Former,
            "the other process stored a higher term"
        );
        assert_eq!(pool.terms().highest().term, SECOND);
        assert_eq!(Identity::load(pool.dir()).unwrap().terms().highest().term, SECOND);
    }

    #[test]
    fn a_grant_proves_its_term() {
        let (_dir, controller, pool) = cluster();
        let grant = Grant {
            volume: quoin_types::VolumeId(1),
            epoch: quoin_types::Epoch(2),
            incarnation: quoin_types::Incarnation(3),
            node: "n1".into(),
            writes: true,
            term: FIRST,
        };
        let bytes = controller.sign_grant(&grant).unwrap();
        assert_eq!(pool.accept_term(&bytes).unwrap(), TermOrder::Higher);
        assert_eq!(pool.terms().highest(), Proven { term: FIRST, proof: bytes.into() });
        // The controller's own statement replaces it: it recognises that one without a check.
        let proof = controller.sign_term(FIRST).unwrap();
        assert_eq!(pool.accept_term(&proof).unwrap(), TermOrder::Same);
        assert_eq!(pool.terms().highest(), Proven { term: FIRST, proof });
        let former = controller.sign_grant(&Grant { term: Term::default(), ..grant }).unwrap();
        assert!(pool.accept_term(&former).is_err(), "a grant of term 0 proves no term");
    }

    #[test]
    fn a_term_that_no_controller_of_the_cluster_signed_is_refused() {
        let (_dir, controller, pool) = cluster();
        let (_other, other_cluster, _) = cluster();
        for forged in [&pool, &other_cluster] {
            assert!(controller.accept_term(&forged.sign_term(SECOND).unwrap()).is_err());
        }
        let bytes = controller.sign_term(SECOND).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1;
            // A change in an unneeded certificate of the chain has no effect.
            if let Ok(term) = pool.verify_term(&changed) {
                assert_eq!(term, SECOND, "byte {at} changed the content of the proof");
            }
            let cut = pool.verify_term(&bytes[..at]);
            assert!(
                cut.is_err() || (at == 0 && cut.unwrap() == Term::default()),
                "truncated at {at}"
            );
        }
        assert_eq!(pool.terms().highest(), Proven::default());
    }

    #[test]
    fn a_term_that_cannot_be_stored_is_not_accepted() {
        let (_dir, controller, pool) = cluster();
        // A directory in place of the file: root cannot write there either.
        std::fs::create_dir(pool.dir().join(FILE)).unwrap();
        let error =
            pool.accept_term(&controller.sign_term(FIRST).unwrap()).unwrap_err().to_string();
        assert!(error.contains(FILE), "{error}");
        assert_eq!(pool.terms().highest(), Proven::default());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes);
            let _ = parse(&[MAGIC.as_slice(), &bytes].concat());
        }
    }
}
