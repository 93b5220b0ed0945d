//! Which member a pod may be, by what the API server says of its service account's token.

use std::collections::BTreeMap;

use quoin_identity::Role;
use serde::Deserialize;

/// Audience of the tokens: those that pods have for the API server are not taken, nor could ours be used there.
pub const AUDIENCE: &str = "quoin";

const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
/// Beginning of the name of each service account.
const ACCOUNT: &str = "system:serviceaccount:";

/// The status of a TokenReview.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Review {
    pub authenticated: bool,
    /// Audiences of the request that the token is for. Empty: the server knows none.
    pub audiences: Vec<String>,
    pub user: User,
    pub error: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct User {
    pub username: String,
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    fn extra(&self, key: &str) -> Option<&str> {
        match self.extra.get(key).map(Vec::as_slice) {
            Some([one]) if !one.is_empty() => Some(one),
            _ => None,
        }
    }
}

/// Service accounts that are admitted.
#[derive(Clone, Debug)]
pub(super) struct Accounts {
    pub namespace: String,
    /// Before `pool`, `node`, `csi-controller` and `mirror`.
    pub prefix: String,
}

/// Kind of pods that have one account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pool,
    Node,
    /// The controller service of CSI: it may manage volumes, and is no node of the cluster.
    CsiController,
    Mirror,
}

impl Kind {
    const ALL: [(Self, &str); 4] = [
        (Self::Pool, "pool"),
        (Self::Node, "node"),
        (Self::CsiController, "csi-controller"),
        (Self::Mirror, "mirror"),
    ];

    fn role(self) -> Role {
        match self {
            Self::Pool => Role::Pool,
            Self::Node | Self::CsiController => Role::Node,
            Self::Mirror => Role::Mirror,
        }
    }
}

impl Accounts {
    fn kind(&self, username: &str) -> Option<Kind> {
        let (namespace, account) = username.strip_prefix(ACCOUNT)?.split_once(':')?;
        let suffix = account.strip_prefix(&self.prefix)?;
        let kind = Kind::ALL.into_iter().find(|(_, name)| *name == suffix)?.0;
        (namespace == self.namespace).then_some(kind)
    }
}

/// Returns whether a pod that asks to be the member `role/name` may manage volumes. `nodes`: the nodes that
/// the cluster knows.
///
/// # Errors
/// Why it may not be that member.
pub(super) fn admit(
    review: &Review,
    accounts: &Accounts,
    (role, name): (Role, &str),
    nodes: &[String],
) -> Result<bool, String> {
    if !review.authenticated {
        let why: String = review.error.chars().take(200).collect();
        let why = if why.is_empty() { "it is of no pod that exists".to_owned() } else { why };
        return Err(format!("the API server does not know the token: {why}"));
    }
    if !review.audiences.iter().any(|audience| audience == AUDIENCE) {
        return Err(format!("the token is not for the audience {AUDIENCE:?}"));
    }
    let user = &review.user;
    let shown: String = user.username.chars().take(200).collect();
    let kind = accounts.kind(&user.username).ok_or_else(|| {
        let Accounts { namespace, prefix } = accounts;
        format!("{shown:?} is no service account {prefix}… of namespace {namespace:?}")
    })?;
    if kind.role() != role {
        return Err(format!("pods of {shown:?} join as {}, not as {role}", kind.role()));
    }
    let bound = |key: &str, what: &str| {
        user.extra(key).ok_or_else(|| {
            format!(
                "the API server does not say which {what} the token is bound to: mount a projected token; \
                 Kubernetes 1.32 is needed"
            )
        })
    };
    match kind {
        Kind::Node => {
            let node = bound(NODE_NAME, "node")?;
            if name != node {
                return Err(format!("the pod is on node {node:?}, and asks to be node {name:?}"));
            }
        }
        Kind::Pool => {
            let node = bound(NODE_NAME, "node")?;
            if !is_pool_of(name, node) {
                return Err(format!(
                    "the pod is on node {node:?}, so its pools are {node:?} and {node}-…, and it asks to \
                     be {name:?}"
                ));
            }
            // Node `a` may not take the name of a pool of node `a-b`.
            let is_others = |other: &&String| other.len() > node.len() && is_pool_of(name, other);
            if let Some(other) = nodes.iter().find(is_others) {
                return Err(format!(
                    "{name:?} may be a pool of node {other:?}, and the pod is on node {node:?}: give \
                     its pools another name"
                ));
            }
        }
        Kind::CsiController | Kind::Mirror => {
            let pod = bound(POD_NAME, "pod")?;
            if name != pod {
                return Err(format!("pod {pod:?} asks to be {name:?}: it joins by its own name"));
            }
            if nodes.iter().any(|node| node == name) {
                return Err(format!("a node of the cluster has the name {name:?} already"));
            }
        }
    }
    Ok(kind == Kind::CsiController)
}

fn is_pool_of(name: &str, node: &str) -> bool {
    name.strip_prefix(node).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn review(account: &str, node: &str, pod: &str) -> Review {
        let extra = [(NODE_NAME, node), (POD_NAME, pod)];
        let extra = extra.map(|(key, value)| (key.to_owned(), vec![value.to_owned()]));
        let username = format!("{ACCOUNT}storage:{account}");
        Review {
            authenticated: true,
            audiences: vec![AUDIENCE.into()],
            user: User { username, extra: extra.into() },
            error: String::new(),
        }
    }

    fn accounts() -> Accounts {
        Accounts { namespace: "storage".into(), prefix: "quoin-".into() }
    }

    #[test]
    fn a_pod_is_the_member_that_its_account_and_its_node_make_it_and_no_other() {
        let nodes = ["a".to_owned(), "a-b".to_owned()];
        let asks = |account: &str, role: Role, name: &str| {
            admit(&review(account, "a", "pod-0"), &accounts(), (role, name), &nodes)
        };
        assert_eq!(asks("quoin-node", Role::Node, "a"), Ok(false));
        assert_eq!(asks("quoin-pool", Role::Pool, "a"), Ok(false));
        assert_eq!(asks("quoin-pool", Role::Pool, "a-sdb"), Ok(false));
        assert_eq!(asks("quoin-csi-controller", Role::Node, "pod-0"), Ok(true));
        assert_eq!(asks("quoin-mirror", Role::Mirror, "pod-0"), Ok(false));
        for (account, role, name, words) in [
            ("quoin-node", Role::Node, "b", "is on node \"a\""),
            ("quoin-node", Role::Pool, "a", "join as node"),
            ("quoin-node", Role::Admin, "a", "join as node"),
            ("quoin-pool", Role::Node, "a", "join as pool"),
            ("quoin-pool", Role::Pool, "ab", "its pools are"),
            ("quoin-pool", Role::Pool, "a-b-sdb", "may be a pool of node \"a-b\""),
            ("quoin-csi-controller", Role::Node, "a", "its own name"),
            ("quoin-controller", Role::Controller, "a", "no service account"),
            ("default", Role::Node, "a", "no service account"),
            ("pool", Role::Pool, "a", "no service account"),
        ] {
            let refused = asks(account, role, name).unwrap_err();
            assert!(refused.contains(words), "{account} {role} {name}: {refused}");
        }
        let as_node = review("quoin-csi-controller", "a", "a-b");
        assert!(admit(&as_node, &accounts(), (Role::Node, "a-b"), &nodes).is_err());
    }

    #[test]
    fn a_token_of_which_the_server_does_not_say_all_is_refused() {
        let good = review("quoin-node", "a", "pod");
        let asks = |review: &Review| admit(review, &accounts(), (Role::Node, "a"), &[]);
        assert_eq!(asks(&good), Ok(false));
        let without = |change: &dyn Fn(&mut Review)| {
            let mut review = good.clone();
            change(&mut review);
            asks(&review).unwrap_err()
        };
        assert!(without(&|review| review.authenticated = false).contains("does not know"));
        // An API server that knows no audiences says nothing of them.
        assert!(without(&|review| review.audiences.clear()).contains("audience"));
        let of_api = vec!["https://kubernetes.default.svc".to_owned()];
        assert!(without(&|review| review.audiences = of_api.clone()).contains("audience"));
        // One before 1.32 does not tell the node.
        assert!(without(&|review| review.user.extra.clear()).contains("1.32"));
        let two = vec!["a".to_owned(), "b".to_owned()];
        let doubled = |review: &mut Review| {
            review.user.extra.insert(NODE_NAME.to_owned(), two.clone());
        };
        assert!(without(&doubled).contains("1.32"));
        let elsewhere = |review: &mut Review| {
            review.user.username = format!("{ACCOUNT}other:quoin-node");
        };
        assert!(without(&elsewhere).contains("namespace \"storage\""));
        let person = |review: &mut Review| review.user.username = "kubernetes-admin".into();
        assert!(without(&person).contains("no service account"));
    }
}
