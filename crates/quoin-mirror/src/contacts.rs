//! Knowledge of each peer: when it was heard, by which link, what it said of itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use quoin_api::control::{PeerContact, PeerIntroduction};
use quoin_identity::ClusterId;

#[derive(Clone, Default, Debug)]
struct Contact {
    heard: Option<Instant>,
    linked_to: String,
    message: String,
    said: Option<PeerIntroduction>,
}

/// Contacts of all peers. Cheap to clone; all clones are one.
#[derive(Clone, Default, Debug)]
pub struct Contacts(Arc<Mutex<BTreeMap<u128, Contact>>>);

impl Contacts {
    /// An authenticated frame came, by a clock that no correction moves.
    pub fn heard(&self, peer: ClusterId) {
        self.lock().entry(peer.0).or_default().heard = Some(Instant::now());
    }

    pub fn said(&self, peer: ClusterId, said: PeerIntroduction) {
        self.lock().entry(peer.0).or_default().said = Some(said);
    }

    /// This mirror has a link to that address.
    pub fn linked(&self, peer: ClusterId, address: &str) {
        let mut contacts = self.lock();
        let contact = contacts.entry(peer.0).or_default();
        (contact.linked_to, contact.message) = (address.to_owned(), String::new());
    }

    /// It has none, for this reason; empty: it is to have none.
    pub fn unlinked(&self, peer: ClusterId, why: String) {
        let mut contacts = self.lock();
        let contact = contacts.entry(peer.0).or_default();
        (contact.linked_to, contact.message) = (String::new(), why);
    }

    /// Forgets all but these.
    pub fn keep(&self, peers: &[ClusterId]) {
        self.lock().retain(|peer, _| peers.contains(&ClusterId(*peer)));
    }

    /// The controller has these, whether it took or refused them: the same is not told again. A peer says
    /// more when something changes.
    pub fn told(&self, reported: &[PeerContact]) {
        let mut contacts = self.lock();
        for told in reported.iter().filter(|contact| contact.introduction.is_some()) {
            let of = told.cluster_id.parse::<ClusterId>().ok();
            if let Some(contact) = of.and_then(|peer| contacts.get_mut(&peer.0))
                && contact.said == told.introduction
            {
                contact.said = None;
            }
        }
    }

    /// Report to the controller. `assigned`: what that knows of a peer; the same is not said again.
    pub fn report(&self, assigned: &[PeerIntroduction]) -> Vec<PeerContact> {
        let contact = |(peer, contact): (&u128, &Contact)| {
            let cluster_id = ClusterId(*peer).to_string();
            let known = assigned.iter().find(|known| known.cluster_id == cluster_id)?;
            let told = contact.said.as_ref().filter(|said| *said != known);
            let heard = contact.heard.map(|at| at.elapsed().as_millis());
            Some(PeerContact {
                heard_ms: heard.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
                linked_to: contact.linked_to.clone(),
                message: contact.message.chars().take(400).collect(),
                introduction: told.cloned(),
                cluster_id,
            })
        };
        self.lock().iter().filter_map(contact).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u128, Contact>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_says_is_told_until_the_controller_knows_it() {
        let contacts = Contacts::default();
        let peer = ClusterId(7);
        let known = PeerIntroduction { cluster_id: peer.to_string(), ..Default::default() };
        let moved = PeerIntroduction { addresses: vec!["b:1".into()], ..known.clone() };
        contacts.said(peer, moved.clone());
        contacts.heard(peer);
        let report = contacts.report(std::slice::from_ref(&known));
        assert_eq!(report[0].introduction.as_ref(), Some(&moved));
        assert!(report[0].heard_ms.is_some_and(|ms| ms < 10_000));
        assert_eq!(contacts.report(std::slice::from_ref(&moved))[0].introduction, None);
        let report = contacts.report(std::slice::from_ref(&known));
        contacts.said(peer, PeerIntroduction { addresses: vec!["c:1".into()], ..known.clone() });
        contacts.told(&report);
        let later = contacts.report(std::slice::from_ref(&known));
        assert!(later[0].introduction.is_some(), "what it said since is to be told");
        contacts.told(&later);
        let again = contacts.report(std::slice::from_ref(&moved));
        assert_eq!(
            again[0].introduction, None,
            "a pairing anew is not undone by what was said before"
        );
        assert_eq!(contacts.report(&[]), [], "of a cluster that is no peer nothing is told");
        contacts.keep(&[]);
        assert_eq!(contacts.report(&[known]), []);
    }
}
