//! Channel of members to the controller: each request shows the member's highest known term, and an
//! answer of a former term is refused here, for every method.

use std::task::{Context, Poll};
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use quoin_types::term::TermOrder;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::Channel;

use crate::{ClockDifference, Error, Identity};

/// Header with the proof of a term, of a request and of its answer.
const TERM: &str = "quoin-term";
/// Header of an answer: the controller's records do not rule, and it claims no term by it.
const DOES_NOT_RULE: &str = "quoin-does-not-rule";
/// Most bytes of a proof. With the chain of a certificate it has a tenth of this.
const PROOF_BYTES_MAX: usize = 6 << 10;

/// Puts a proof into the headers of a request or an answer.
pub fn show_term(headers: &mut HeaderMap, proof: &[u8]) {
    if proof.is_empty() || proof.len() > PROOF_BYTES_MAX {
        return;
    }
    if let Ok(value) = HeaderValue::try_from(BASE64.encode(proof)) {
        headers.insert(TERM, value);
    }
}

/// Marks in an answer's headers that the controller's records do not rule.
pub fn mark_as_not_ruling(headers: &mut HeaderMap) {
    headers.insert(DOES_NOT_RULE, HeaderValue::from_static("yes"));
}

/// Returns the proof in the headers; empty where they have none, or an impossible one.
pub fn shown_term(headers: &HeaderMap) -> Bytes {
    let shown = headers.get(TERM).filter(|value| value.len() <= PROOF_BYTES_MAX * 4 / 3 + 4);
    shown.and_then(|value| BASE64.decode(value.as_bytes()).ok()).unwrap_or_default().into()
}

/// A channel to the controller that checks terms.
#[derive(Clone, Debug)]
pub struct TermChannel {
    inner: Channel,
    /// `None` for a caller that stores nothing, such as one on the admin socket.
    identity: Option<Identity>,
}

impl TermChannel {
    pub(crate) fn over(inner: Channel, identity: Identity) -> Self {
        Self { inner, identity: Some(identity) }
    }
}

impl From<Channel> for TermChannel {
    fn from(inner: Channel) -> Self {
        Self { inner, identity: None }
    }
}

impl Service<Request<Body>> for TermChannel {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(identity) = &self.identity {
            show_term(request.headers_mut(), &identity.terms().highest().proof);
            if let Some(difference) = identity.clock_difference() {
                difference.show(request.headers_mut());
            }
        }
        let began = Instant::now();
        let answer = self.inner.call(request);
        let identity = self.identity.clone();
        Box::pin(async move {
            let answer = answer.await?;
            let Some(identity) = identity else { return Ok(answer) };
            if let Some(measured) = ClockDifference::by_answer(answer.headers(), began.elapsed()) {
                identity.measured(measured);
            }
            let proof = shown_term(answer.headers());
            let rules = !answer.headers().contains_key(DOES_NOT_RULE);
            Ok(match identity.accept_controller_term(&proof, rules) {
                Ok(_) => answer,
                Err(refused) => Status::unavailable(refused.to_string()).into_http(),
            })
        })
    }
}

impl Identity {
    /// Accepts the term of a connected controller. False: its orders are not carried out. A
    /// controller that does not rule gives no orders, so it is answered whatever its term is: it
    /// may ask for the data that its records are made of.
    ///
    /// # Errors
    /// Where it rules and its term is over, or a rival's; and where a term cannot be stored.
    pub fn accept_controller_term(&self, proof: &[u8], rules: bool) -> Result<bool, Error> {
        let order = self.accept_term(proof)?;
        if !order.is_refused() || !rules {
            return Ok(!order.is_refused());
        }
        let (term, known) = (self.verify_term(proof)?, self.terms().highest().term);
        Err(Error::Term { term, known, rival: order == TermOrder::Rival })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_above_the_length_limit_is_neither_sent_nor_read() {
        let mut headers = HeaderMap::new();
        assert!(shown_term(&headers).is_empty());
        show_term(&mut headers, &[]);
        show_term(&mut headers, &[7; PROOF_BYTES_MAX + 1]);
        assert!(headers.is_empty());
        show_term(&mut headers, &[7; PROOF_BYTES_MAX]);
        assert_eq!(shown_term(&headers), [7; PROOF_BYTES_MAX][..]);

        let mut of = |value: String| {
            headers.insert(TERM, HeaderValue::try_from(value).unwrap());
            shown_term(&headers)
        };
        assert!(of("no base64!".into()).is_empty());
        assert!(of(BASE64.encode([7; PROOF_BYTES_MAX + 16])).is_empty());
    }
}
