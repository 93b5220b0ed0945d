//! Admission of pods: a pod that proves its service account gets a join token for the member that it is.
//!
//! Kubernetes gives a pod a token that is bound to it, and says of a token whose it is (TokenReview):
//! service account, pod and node. So members join without a person, and without a secret that could
//! be any node's. The pod knows the cluster's authority by a ConfigMap that the controller keeps, and
//! its token is shown to that cluster alone.

mod rules;

use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use quoin_identity::{AuthorityPin, JoinToken, Role, check_name};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use crate::Error;
use crate::kubernetes_api::{APPLY, Api, ApiError, ApiOptions, JSON};
use crate::membership::members::Members;
use crate::state::State;
pub use rules::AUDIENCE;
use rules::{Accounts, Review};

/// Reviews at a time: newcomers may ask for as many as they like.
const REVIEWS_MAX: usize = 8;
/// Limit of a service account's token.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// Lifetime of the join token that a pod gets, and uses at once.
const JOIN_TTL_S: u32 = 300;
/// Unused join tokens for one member at a time.
const UNUSED_MAX: usize = 8;
/// Interval of looks at the ConfigMap while it is as it should be, and while it is not.
const PUBLISH_EVERY: Duration = Duration::from_secs(60);
const PUBLISH_AGAIN: Duration = Duration::from_secs(5);

/// Options of the admission of pods.
#[derive(Clone, Debug)]
pub struct KubernetesOptions {
    pub api: ApiOptions,
    /// Before `pool`, `node`, `csi-controller` and `mirror` in the names of service accounts, and before
    /// `authority` in that of the ConfigMap.
    pub prefix: String,
}

/// Admits pods by their service accounts.
pub struct Kubernetes {
    api: Api,
    accounts: Accounts,
    reviews: Semaphore,
}

impl Kubernetes {
    pub(crate) fn new(options: KubernetesOptions) -> Self {
        let namespace = options.api.namespace.clone();
        Self {
            api: Api::new(options.api),
            accounts: Accounts { namespace, prefix: options.prefix },
            reviews: Semaphore::new(REVIEWS_MAX),
        }
    }

    /// Makes a join token for the member that a pod is.
    pub(crate) async fn introduce(
        &self,
        (state, members): (&State, &Members),
        service_account_token: &str,
        role: &str,
        name: &str,
    ) -> Result<(JoinToken, u64), Error> {
        let role: Role = role.parse()?;
        check_name(role.as_str(), name)?;
        if service_account_token.len() > TOKEN_BYTES_MAX
            || service_account_token.split('.').count() != 3
        {
            let rule = "this is no token of a service account";
            return Err(Error::invalid("serviceAccountToken", rule));
        }
        let Ok(_permit) = self.reviews.try_acquire() else {
            return Err(Error::Busy("too many pods join at this moment: ask again".to_owned()));
        };
        let review = self.review(service_account_token).await?;
        let nodes: Vec<String> = state.nodes.list().iter().map(|node| node.name.clone()).collect();
        let manages_volumes =
            rules::admit(&review, &self.accounts, (role, name), &nodes).map_err(Error::Denied)?;
        let unused = members.join_tokens();
        let unused = unused.iter().filter(|token| {
            token.used_by.is_none() && token.role == role.as_str() && token.holder == name
        });
        if unused.count() >= UNUSED_MAX {
            return Err(Error::Exhausted(format!(
                "{role} {name:?} has {UNUSED_MAX} join tokens that it has not used; one ends every few \
                 minutes"
            )));
        }
        members.create_join_token(role.as_str(), JOIN_TTL_S, name, manages_volumes).await
    }

    async fn review(&self, token: &str) -> Result<Review, Error> {
        let asked = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": { "token": token, "audiences": [AUDIENCE] },
        });
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        let answer = self.api.call(Method::POST, path, JSON, &asked).await;
        let mut answer = answer.map_err(|error| Error::Busy(error.to_string()))?;
        let review = answer.get_mut("status").map(Value::take).unwrap_or_default();
        serde_json::from_value(review)
            .map_err(|error| Error::Busy(format!("the Kubernetes API's TokenReview: {error}")))
    }

    /// Keeps the ConfigMap by which pods know the authority, until `shutdown` is true.
    pub(crate) async fn keep_published(
        self: Arc<Self>,
        members: Arc<Members>,
        mut shutdown: watch::Receiver<bool>,
    ) {
        // Empty: all is well.
        let mut told = String::new();
        loop {
            let published = self.publish(&members.pin()).await;
            let problem = published.err().map(|error| error.to_string()).unwrap_or_default();
            match problem.as_str() {
                "" if !told.is_empty() => {
                    tracing::info!("the authority's ConfigMap is kept again");
                }
                error if error != told => {
                    tracing::warn!(
                        error,
                        "pods cannot join: the ConfigMap with the cluster's \
                                           authority is not kept"
                    );
                }
                _ => {}
            }
            let pause = if problem.is_empty() { PUBLISH_EVERY } else { PUBLISH_AGAIN };
            told = problem;
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = shutdown.wait_for(|stop| *stop) => return,
            }
        }
    }

    async fn publish(&self, pin: &AuthorityPin) -> Result<(), ApiError> {
        let name = format!("{}authority", self.accounts.prefix);
        let wanted = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": name },
            "data": { "authority": pin.to_string() },
        });
        let namespace = self.api.namespace();
        let path = format!(
            "/api/v1/namespaces/{namespace}/configmaps/{name}?fieldManager=quoin&force=true"
        );
        self.api.call(Method::PATCH, &path, APPLY, &wanted).await.map(drop)
    }
}
