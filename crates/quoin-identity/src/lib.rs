//! Identities of a cluster's members: certificates, how to get one, and authenticated connections.
//!
//! Every process that communicates over TCP has an *identity directory*:
//!
//! | file | contents |
//! |---|---|
//! | `key.pem` | the private key (mode 0600); it never leaves the host |
//! | `cert.pem` | the certificate chain for it, replaced by each renewal |
//! | `ca.pem` | the trusted authorities: one, or two while the authority is rotated |
//! | `cluster.json` | the cluster this directory belongs to |
//! | `term.json` | the highest known term of a controller ([`Terms`]), where there is one |
//!
//! A certificate names its holder as a URI, `quoin://<cluster>/<role>/<name>` ([`Peer`]); host
//! names and addresses play no part. Both sides of every TCP connection show one (mutual TLS 1.3,
//! no session tickets, no resumption, so each connection proves the peer's identity *now*). The one
//! exception is a newcomer that asks the controller for its first certificate: it shows a
//! [`JoinToken`], and authenticates the controller by the authority's fingerprint inside that
//! token.
//!
//! * [`Identity`] loads a directory, makes TLS configurations whose certificates are replaced under
//!   a running process, opens gRPC [`Identity::channel`]s, renews itself.
//! * [`Authority`] is the controller's side: it issues certificates, and can be rotated with IO
//!   running.
//! * [`TrustedPeers`] has the authorities and keys of other clusters' mirrors, and [`foreign`] makes
//!   connections with them. A mirror alone trusts another cluster's authority.
//! * [`PairToken`] is given by hand to another cluster, before the two trust each other.
//! * [`Grant`] is signed by a controller for a target, and verified by a pool.
//! * [`Terms`] stores the highest known term of a controller; [`TermChannel`] refuses the answers
//!   of a former one.
//! * [`serve_incoming`] turns a listener into a stream of authenticated connections that tonic
//!   serves, each request carrying its [`Caller`].

mod authority;
mod channel;
mod clock;
mod clock_difference;
mod contact;
pub mod convert;
mod error;
mod files;
pub mod foreign;
mod grant;
mod identity;
mod incoming;
mod join;
mod pair_token;
mod peer;
mod shares;
mod signed;
mod term_channel;
mod terms;
mod tls;
mod token;
mod token_parts;

pub use authority::{Authority, Issued, Lifetimes, key_hash_of, key_hash_of_request};
pub use channel::{SourceAddress, unix_channel, unix_incoming};
pub use clock_difference::{ClockDifference, show_time};
pub use contact::{Contact, is_member_removed, mark_removed};
pub use error::Error;
pub use files::{make_dir, write_private};
pub use foreign::TrustedPeers;
pub use grant::Grant;
pub use identity::{Identity, valid_until};
pub use incoming::{Caller, Connection, IncomingLimits, Member, PeerStream, serve_incoming};
pub use join::{JoinRequest, introduce, join, load_or_join, newcomer_channel, pinned_channel};
pub use pair_token::PairToken;
pub use peer::{ClusterId, Peer, Role, check_name, peer_of};
pub use shares::{NoSlot, Shares, Slot};
pub use term_channel::{TermChannel, mark_as_not_ruling, show_term, shown_term};
pub use terms::{Proven, Terms};
pub use tls::Expected;
pub use token::{AuthorityPin, JoinToken};
