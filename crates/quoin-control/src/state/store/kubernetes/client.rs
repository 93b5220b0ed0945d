//! Calls to the API of Kubernetes.

use std::time::Duration;

use futures::{Stream, StreamExt};
use hyper::Method;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::KubernetesStoreOptions;
use super::objects::{CLUSTER_LABEL, KIND_LABEL, List, Object};
use crate::kubernetes_api::{Api, ApiError, JSON};
use crate::state::store::{LeaseTimes, StoreError};

/// Deadline of one call at most.
const CALL_TIME: Duration = Duration::from_secs(3);
/// Objects of one answer.
const PAGE_OBJECTS: usize = 500;
/// Time after which a watch ends; the next watch goes on from there.
const WATCH_SECONDS: u64 = 300;

/// A kind of objects.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Record,
    Secret,
    Lease,
}

impl Kind {
    fn path(self, namespace: &str) -> String {
        match self {
            Kind::Record => format!("/apis/quoin.io/v1/namespaces/{namespace}/records"),
            Kind::Secret => format!("/api/v1/namespaces/{namespace}/secrets"),
            Kind::Lease => format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"),
        }
    }
}

/// Outcome of a change.
#[derive(Debug)]
pub(super) enum Changed<T> {
    Done(T),
    /// It is there already, or of another version.
    Conflict,
    /// There is no such object.
    Missing,
}

/// An event of a watch.
#[derive(Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub(super) enum Event<T> {
    Added(T),
    Modified(T),
    Deleted(T),
    /// Nothing: all up to its version was told.
    Bookmark(Object<Nothing>),
    Error(Status),
}

#[derive(Deserialize)]
pub(super) struct Nothing {}

/// Why a watch ends.
#[derive(Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub code: u16,
    #[serde(default)]
    pub message: String,
}

pub(super) struct Client {
    api: Api,
    /// Deadline of a change, at the server too: nothing of it is done later.
    change_time: Duration,
    cluster: String,
}

impl Client {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// An option breaks its rule.
    pub fn new(options: &KubernetesStoreOptions, times: LeaseTimes) -> Result<Self, StoreError> {
        options.check()?;
        Ok(Self {
            api: Api::new(options.api.clone()),
            change_time: times.change_time().min(CALL_TIME),
            cluster: options.cluster.clone(),
        })
    }

    /// The API that is asked.
    pub fn server(&self) -> &str {
        self.api.server()
    }

    pub async fn get<T: DeserializeOwned>(
        &self,
        kind: Kind,
        name: &str,
    ) -> Result<Option<T>, StoreError> {
        match self.call(Method::GET, &self.path(kind, name), String::new()).await? {
            Changed::Done(text) => Ok(Some(parsed(&text)?)),
            Changed::Missing => Ok(None),
            Changed::Conflict => Err(StoreError::Failed("Kubernetes refused a read".to_owned())),
        }
    }

    pub async fn create<T: Serialize + DeserializeOwned>(
        &self,
        kind: Kind,
        object: &Object<T>,
    ) -> Result<Changed<Object<T>>, StoreError> {
        let path = format!("{}?{}", kind.path(self.api.namespace()), self.deadline());
        self.change(Method::POST, &path, to_text(object)?).await
    }

    /// Replaces an object of the version that `object` names.
    pub async fn replace<T: Serialize + DeserializeOwned>(
        &self,
        kind: Kind,
        object: &Object<T>,
    ) -> Result<Changed<Object<T>>, StoreError> {
        let path = format!("{}?{}", self.path(kind, &object.metadata.name), self.deadline());
        self.change(Method::PUT, &path, to_text(object)?).await
    }

    /// Deletes an object of this version; 0: of any.
    pub async fn delete(
        &self,
        kind: Kind,
        name: &str,
        revision: u64,
    ) -> Result<Changed<()>, StoreError> {
        let mut options = serde_json::json!({ "apiVersion": "v1", "kind": "DeleteOptions" });
        if revision > 0 {
            let preconditions = serde_json::json!({ "resourceVersion": revision.to_string() });
            options["preconditions"] = preconditions;
        }
        let path = format!("{}?{}", self.path(kind, name), self.deadline());
        Ok(match self.call(Method::DELETE, &path, to_text(&options)?).await? {
            Changed::Done(_) => Changed::Done(()),
            Changed::Conflict => Changed::Conflict,
            Changed::Missing => Changed::Missing,
        })
    }

    /// All objects of the cluster, with the version of the whole; `records`: only records of this kind.
    pub async fn list<T: DeserializeOwned>(
        &self,
        kind: Kind,
        records: Option<&str>,
    ) -> Result<(Vec<T>, String), StoreError> {
        let mut labels = format!("{CLUSTER_LABEL}={}", self.cluster);
        if let Some(records) = records {
            labels.push_str(&format!(",{KIND_LABEL}={records}"));
        }
        let first = format!(
            "{}?labelSelector={}&limit={PAGE_OBJECTS}",
            kind.path(self.api.namespace()),
            escaped(&labels)
        );
        let (mut all, mut go_on) = (Vec::new(), String::new());
        loop {
            let path = match go_on.is_empty() {
                true => first.clone(),
                false => format!("{first}&continue={}", escaped(&go_on)),
            };
            match self.call(Method::GET, &path, String::new()).await {
                Ok(Changed::Done(text)) => {
                    let page: List<T> = parsed(&text)?;
                    all.extend(page.items);
                    if page.metadata.go_on.is_empty() {
                        return Ok((all, page.metadata.resource_version));
                    }
                    go_on = page.metadata.go_on;
                }
                // The version of which the pages are has been compacted away.
                Err(StoreError::Expired) if !go_on.is_empty() => {
                    all.clear();
                    go_on.clear();
                }
                Ok(_) => {
                    let why = "Kubernetes has no records.quoin.io: install its CustomResourceDefinition first";
                    return Err(StoreError::Failed(why.to_owned()));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Changes of the cluster's objects from this version on.
    pub async fn watch<T: DeserializeOwned>(
        &self,
        kind: Kind,
        from: &str,
    ) -> Result<impl Stream<Item = Result<Event<T>, StoreError>> + use<T>, StoreError> {
        let path = format!(
            "{}?watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={}\
             &labelSelector={CLUSTER_LABEL}%3D{}",
            kind.path(self.api.namespace()),
            escaped(from),
            self.cluster
        );
        let lines = self.api.watch(&path).await.map_err(failed)?;
        Ok(lines.map(|line| parsed(&line.map_err(failed)?)))
    }

    fn deadline(&self) -> String {
        format!("timeout={}ms", self.change_time.as_millis())
    }

    fn path(&self, kind: Kind, name: &str) -> String {
        format!("{}/{name}", kind.path(self.api.namespace()))
    }

    async fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Changed<T>, StoreError> {
        Ok(match self.call(method, path, body).await? {
            Changed::Done(text) => Changed::Done(parsed(&text)?),
            Changed::Conflict => Changed::Conflict,
            Changed::Missing => Changed::Missing,
        })
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Changed<Vec<u8>>, StoreError> {
        let within = if method == Method::GET { CALL_TIME } else { self.change_time };
        let asked = self.api.call_within(within, method, path, JSON, body);
        match asked.await {
            Ok(answer) => Ok(Changed::Done(answer)),
            Err(ApiError::Refused { status: 404, .. }) => Ok(Changed::Missing),
            Err(ApiError::Refused { status: 409, .. }) => Ok(Changed::Conflict),
            Err(error) => Err(failed(error)),
        }
    }
}

fn failed(error: ApiError) -> StoreError {
    match error {
        ApiError::Refused { status: 410, .. } => StoreError::Expired,
        ApiError::Refused { status, .. } if status != 429 && status < 500 => {
            StoreError::Failed(error.to_string())
        }
        ApiError::NoPod(_) | ApiError::Server(_) | ApiError::Tls(_) => {
            StoreError::Failed(error.to_string())
        }
        error => StoreError::Away { why: error.to_string() },
    }
}

fn to_text(object: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(object).map_err(|error| StoreError::Failed(error.to_string()))
}

fn parsed<T: DeserializeOwned>(answer: &[u8]) -> Result<T, StoreError> {
    let read = serde_json::from_slice(answer);
    read.map_err(|error| StoreError::Failed(format!("Kubernetes answered with nonsense: {error}")))
}

/// A value of a query.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            true => text.push(byte.into()),
            false => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}
