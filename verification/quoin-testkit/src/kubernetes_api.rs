//! A server that speaks the rules of Kubernetes' API for the objects that Quoin keeps there.
//!
//! It holds objects of any kind: creation, replacement by `resourceVersion`, deletion with preconditions, lists in
//! pages of one moment, watches with bookmarks, and `410 Gone` for what was compacted away. A test can have it lose
//! answers, be away, cut its watches, and go back to an older state, as a restored etcd behind it does.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::watch;

/// Bookmarks come so often.
const BOOKMARK_EVERY: Duration = Duration::from_millis(500);
/// Longest object, as etcd takes it.
const OBJECT_BYTES_MAX: usize = 1536 << 10;

/// Objects of a moment, which a test can bring back later.
#[derive(Clone, Default)]
pub struct Stored {
    /// By path of the collection, and name.
    objects: BTreeMap<(String, String), Value>,
    version: u64,
    /// Changes since the last compaction: version, collection, kind of event, object.
    log: Vec<(u64, String, &'static str, Value)>,
    compacted: u64,
}

#[derive(Default)]
struct Behaviour {
    is_away: bool,
    /// Answers to changes that are to be lost; the changes are made.
    lost_answers: u32,
    /// Changes of records and secrets that are made before all others are refused; `None`: none is.
    changes_left: Option<u32>,
    /// Changes of records and secrets are made so much later, unless their deadline is over by then.
    delay: Duration,
    /// Rest of lists that were begun, by their tokens.
    pages: BTreeMap<String, (Vec<Value>, u64)>,
    calls: u64,
}

struct Shared {
    stored: Mutex<Stored>,
    behaviour: Mutex<Behaviour>,
    /// Number of changes, of cuts of the watches.
    changed: watch::Sender<u64>,
    cut: watch::Sender<u64>,
}

/// A running server; it ends with this value.
pub struct KubernetesApi {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl KubernetesApi {
    /// # Panics
    /// No port is free.
    #[must_use]
    pub fn start() -> Self {
        let shared = Arc::new(Shared {
            stored: Mutex::default(),
            behaviour: Mutex::default(),
            changed: watch::channel(0).0,
            cut: watch::channel(0).0,
        });
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("it is bound");
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let router = Router::new().fallback(answer).with_state(shared.clone());
        // The caller may be in a runtime of its own.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
                tokio::select! {
                    served = axum::serve(listener, router) => served.expect("it serves"),
                    _ = stopped => {}
                }
            });
        });
        Self { shared, address, stop: Some(stop), thread: Some(thread) }
    }

    /// `http://HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Answers 503 to everything, and ends all watches, until it is back.
    pub fn set_away(&self, is_away: bool) {
        self.behaviour().is_away = is_away;
        self.cut_watches();
    }

    /// Makes the next changes, and loses the answers to them.
    pub fn lose_answers(&self, count: u32) {
        self.behaviour().lost_answers = count;
    }

    /// Makes so many more changes of records and secrets, and refuses all others: as where their writer was killed.
    /// `None`: makes all again.
    pub fn refuse_changes_after(&self, count: Option<u32>) {
        self.behaviour().changes_left = count;
    }

    /// Makes changes of records and secrets so much later, and those not whose deadline is over by then.
    pub fn delay_changes(&self, delay: Duration) {
        self.behaviour().delay = delay;
    }

    /// Forgets all changes of before: a watch or a page from there on is gone.
    pub fn compact(&self) {
        let mut stored = self.stored();
        stored.compacted = stored.version;
        stored.log.clear();
        self.behaviour().pages.clear();
    }

    pub fn cut_watches(&self) {
        self.shared.cut.send_modify(|cuts| *cuts += 1);
    }

    #[must_use]
    pub fn snapshot(&self) -> Stored {
        self.stored().clone()
    }

    /// Goes back to an older state, versions included, and ends all watches.
    pub fn restore(&self, stored: Stored) {
        *self.stored() = stored;
        self.behaviour().pages.clear();
        self.cut_watches();
    }

    /// Names of the objects of a collection (`records`, `secrets`, `leases`).
    #[must_use]
    pub fn names(&self, collection: &str) -> Vec<String> {
        let ends = format!("/{collection}");
        let stored = self.stored();
        let of = stored.objects.keys().filter(|(path, _)| path.ends_with(&ends));
        of.map(|(_, name)| name.clone()).collect()
    }

    /// An object of a collection, by its name.
    #[must_use]
    pub fn object(&self, collection: &str, name: &str) -> Option<Value> {
        let ends = format!("/{collection}");
        let stored = self.stored();
        let mut found =
            stored.objects.iter().filter(|((path, of), _)| path.ends_with(&ends) && of == name);
        found.next().map(|(_, object)| object.clone())
    }

    /// Changes an object as somebody else would; `None` deletes it.
    ///
    /// # Panics
    /// There is no such object.
    pub fn change(&self, collection: &str, name: &str, object: Option<Value>) {
        let ends = format!("/{collection}");
        let mut stored = self.stored();
        let mut keys = stored.objects.keys();
        let key = keys.find(|(path, of)| path.ends_with(&ends) && of == name).cloned();
        let key = key.expect("the object is there");
        match object {
            Some(object) => drop(stored.write("MODIFIED", key, object)),
            None => stored.delete(&key),
        }
        drop(stored);
        self.shared.changed.send_modify(|changes| *changes += 1);
    }

    /// Makes an object as somebody else would. `path`: its collection's, as in `api/v1/nodes`.
    pub fn add(&self, path: &str, object: Value) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        self.stored().write("ADDED", (path.to_owned(), name), object);
        self.shared.changed.send_modify(|changes| *changes += 1);
    }

    /// Calls since the start.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.behaviour().calls
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.shared.stored.lock().expect("no holder of this lock panics")
    }

    fn behaviour(&self) -> MutexGuard<'_, Behaviour> {
        self.shared.behaviour.lock().expect("no holder of this lock panics")
    }
}

impl Drop for KubernetesApi {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Stored {
    fn write(&mut self, event: &'static str, key: (String, String), mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log.push((self.version, key.0.clone(), event, object.clone()));
        self.objects.insert(key, object.clone());
        object
    }

    fn delete(&mut self, key: &(String, String)) {
        let Some(mut object) = self.objects.remove(key) else { return };
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log.push((self.version, key.0.clone(), "DELETED", object));
    }
}

fn status(code: StatusCode, reason: &str, message: &str) -> Response {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": code.as_u16(),
    });
    (code, axum::Json(body)).into_response()
}

/// A time as in `750ms` or `3s`.
fn milliseconds(text: &str) -> Option<Duration> {
    match text.strip_suffix("ms") {
        Some(number) => number.parse().ok().map(Duration::from_millis),
        None => text.strip_suffix('s')?.parse().ok().map(Duration::from_secs),
    }
}

fn version_of(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default()
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    Query(query): Query<BTreeMap<String, String>>,
    body: Bytes,
) -> Response {
    {
        let mut behaviour = shared.behaviour.lock().expect("no holder of this lock panics");
        behaviour.calls += 1;
        if behaviour.is_away {
            return status(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", "it is away");
        }
    }
    let parts: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
    // `…/namespaces/NAMESPACE/COLLECTION` or `…/namespaces/NAMESPACE/COLLECTION/NAME`; of the core's objects that are
    // in no namespace `api/v1/COLLECTION` or `api/v1/COLLECTION/NAME`.
    let at = match parts.iter().position(|part| *part == "namespaces") {
        Some(at) => at,
        None if parts.starts_with(&["api", "v1"]) => 0,
        None => return status(StatusCode::NOT_FOUND, "NotFound", "no such path"),
    };
    let (collection, name) = match parts.len() - at {
        3 => (parts.join("/"), None),
        4 => (parts[..parts.len() - 1].join("/"), Some(parts[parts.len() - 1].to_owned())),
        _ => return status(StatusCode::NOT_FOUND, "NotFound", "no such path"),
    };
    if method == Method::GET && query.contains_key("watch") {
        return follow(&shared, &collection, &query);
    }
    let is_change = method != Method::GET;
    if is_change && !collection.ends_with("/leases") {
        let mut behaviour = shared.behaviour.lock().expect("no holder of this lock panics");
        match &mut behaviour.changes_left {
            Some(0) => {
                return status(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "ServiceUnavailable",
                    "no more changes",
                );
            }
            Some(left) => *left -= 1,
            None => {}
        }
    }
    let delay = shared.behaviour.lock().expect("no holder of this lock panics").delay;
    if is_change && !collection.ends_with("/leases") && !delay.is_zero() {
        let deadline = query.get("timeout").and_then(|text| milliseconds(text));
        tokio::time::sleep(deadline.map_or(delay, |deadline| deadline.min(delay))).await;
        if deadline.is_some_and(|deadline| deadline <= delay) {
            return status(StatusCode::GATEWAY_TIMEOUT, "Timeout", "the deadline is over");
        }
    }
    let answered = match serve(&shared, &method, &collection, name, &query, &body) {
        Ok(value) => axum::Json(value).into_response(),
        Err(response) => return *response,
    };
    if is_change {
        shared.changed.send_modify(|changes| *changes += 1);
        let mut behaviour = shared.behaviour.lock().expect("no holder of this lock panics");
        if behaviour.lost_answers > 0 {
            behaviour.lost_answers -= 1;
            // As a proxy answers whose server went away.
            return status(StatusCode::GATEWAY_TIMEOUT, "Timeout", "the answer was lost");
        }
    }
    answered
}

fn serve(
    shared: &Shared,
    method: &Method,
    collection: &str,
    name: Option<String>,
    query: &BTreeMap<String, String>,
    body: &Bytes,
) -> Result<Value, Box<Response>> {
    let refuse = |code, reason: &str, message: &str| Box::new(status(code, reason, message));
    if body.len() > OBJECT_BYTES_MAX {
        let too_large = StatusCode::PAYLOAD_TOO_LARGE;
        return Err(refuse(too_large, "RequestEntityTooLarge", "the object is too large"));
    }
    let parsed: Value = match body.is_empty() {
        true => Value::Null,
        false => serde_json::from_slice(body)
            .map_err(|error| refuse(StatusCode::BAD_REQUEST, "BadRequest", &error.to_string()))?,
    };
    let mut stored = shared.stored.lock().expect("no holder of this lock panics");
    let missing = || refuse(StatusCode::NOT_FOUND, "NotFound", "there is no such object");
    let conflict = || {
        let message = "the object has been modified; apply your changes to the latest version";
        refuse(StatusCode::CONFLICT, "Conflict", message)
    };
    match (method, name) {
        (&Method::GET, Some(name)) => {
            let found = stored.objects.get(&(collection.to_owned(), name));
            found.cloned().ok_or_else(missing)
        }
        (&Method::GET, None) => list(shared, &stored, collection, query),
        (&Method::POST, None) => {
            let name = parsed["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if name.is_empty() || !version_of(&parsed).is_empty() {
                let message = "metadata: a name, and no resourceVersion";
                return Err(refuse(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message));
            }
            let key = (collection.to_owned(), name);
            if stored.objects.contains_key(&key) {
                return Err(refuse(StatusCode::CONFLICT, "AlreadyExists", "it exists already"));
            }
            Ok(stored.write("ADDED", key, parsed))
        }
        (&Method::PUT, Some(name)) => {
            let key = (collection.to_owned(), name);
            let Some(found) = stored.objects.get(&key) else { return Err(missing()) };
            if version_of(&parsed).is_empty() {
                let message = "metadata.resourceVersion: must be specified for an update";
                return Err(refuse(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message));
            }
            if version_of(found) != version_of(&parsed) {
                return Err(conflict());
            }
            Ok(stored.write("MODIFIED", key, parsed))
        }
        (&Method::DELETE, Some(name)) => {
            let key = (collection.to_owned(), name);
            let Some(found) = stored.objects.get(&key) else { return Err(missing()) };
            let expected = parsed["preconditions"]["resourceVersion"].as_str();
            if expected.is_some_and(|expected| expected != version_of(found)) {
                return Err(conflict());
            }
            stored.delete(&key);
            Ok(json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
        }
        _ => Err(refuse(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", "not for this path")),
    }
}

fn is_selected(object: &Value, query: &BTreeMap<String, String>) -> bool {
    let labels = &object["metadata"]["labels"];
    let mut selectors = query.get("labelSelector").into_iter().flat_map(|all| all.split(','));
    selectors.all(|one| one.split_once('=').is_some_and(|(label, value)| labels[label] == value))
}

fn list(
    shared: &Shared,
    stored: &Stored,
    collection: &str,
    query: &BTreeMap<String, String>,
) -> Result<Value, Box<Response>> {
    let mut behaviour = shared.behaviour.lock().expect("no holder of this lock panics");
    let (mut rest, version) = match query.get("continue") {
        Some(token) => behaviour.pages.remove(token).ok_or_else(|| {
            Box::new(status(
                StatusCode::GONE,
                "Expired",
                "the provided continue parameter is too old",
            ))
        })?,
        None => {
            let of = stored.objects.iter().filter(|((path, _), _)| path == collection);
            let selected = of.map(|(_, object)| object).filter(|object| is_selected(object, query));
            (selected.cloned().collect(), stored.version)
        }
    };
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let left = rest.split_off(limit.min(rest.len()));
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    if !left.is_empty() {
        let token = format!("{version}/{}+", behaviour.calls);
        metadata["continue"] = json!(token.clone());
        behaviour.pages.insert(token, (left, version));
    }
    Ok(json!({ "kind": "List", "apiVersion": "v1", "metadata": metadata, "items": rest }))
}

/// Answers a watch: all changes since a version, then each as it comes.
fn follow(shared: &Arc<Shared>, collection: &str, query: &BTreeMap<String, String>) -> Response {
    let from: u64 = query.get("resourceVersion").and_then(|at| at.parse().ok()).unwrap_or(0);
    let (shared, collection, query) = (shared.clone(), collection.to_owned(), query.clone());
    if from < shared.stored.lock().expect("no holder of this lock panics").compacted {
        return status(StatusCode::GONE, "Expired", "too old resource version");
    }
    let (mut changed, mut cut) = (shared.changed.subscribe(), shared.cut.subscribe());
    cut.mark_unchanged();
    let lines = async_stream::stream! {
        let mut at = from;
        loop {
            changed.mark_unchanged();
            let mut lines = String::new();
            {
                let stored = shared.stored.lock().expect("no holder of this lock panics");
                if at < stored.compacted {
                    let gone = json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old" });
                    lines = format!("{}\n", json!({ "type": "ERROR", "object": gone }));
                    at = u64::MAX;
                } else {
                    let new = stored.log.iter().filter(|(version, of, _, _)| *version > at && *of == collection);
                    for (_, _, event, object) in new.filter(|(_, _, _, object)| is_selected(object, &query)) {
                        lines.push_str(&format!("{}\n", json!({ "type": event, "object": object })));
                    }
                    at = stored.version;
                }
            }
            let is_over = at == u64::MAX;
            if !lines.is_empty() {
                yield Ok::<_, Infallible>(lines);
            }
            if is_over {
                return;
            }
            tokio::select! {
                _ = changed.changed() => {}
                _ = cut.changed() => return,
                () = tokio::time::sleep(BOOKMARK_EVERY) => {
                    let metadata = json!({ "resourceVersion": at.to_string(), "annotations": {} });
                    let object = json!({ "apiVersion": "v1", "kind": "Bookmark", "metadata": metadata });
                    yield Ok(format!("{}\n", json!({ "type": "BOOKMARK", "object": object })));
                }
            }
        }
    };
    Body::from_stream(lines).into_response()
}
