//! Pods that join by their service accounts, against a server that keeps the rules of the Kubernetes API.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_control::{ApiOptions, KubernetesOptions, Options};
use quoin_identity::{AuthorityPin, Identity, JoinToken, Lifetimes, Role, introduce, join};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const NAMESPACE: &str = "quoin-system";
const CONTROLLER: &str = "token.of.controller";

/// Account, audience, node and pod of a token.
type Issued = (&'static str, &'static str, &'static str, &'static str);

/// The parts of the API that the controller uses, with the rules of the API server.
#[derive(Default)]
struct ApiServer {
    tokens: BTreeMap<&'static str, Issued>,
    config_maps: Mutex<BTreeMap<String, String>>,
}

impl ApiServer {
    async fn start(self) -> (Arc<Self>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let this = Arc::new(self);
        let served = this.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let this = served.clone();
                tokio::spawn(async move { this.serve(stream).await });
            }
        });
        (this, address)
    }

    async fn serve(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        let (mut first, mut headers) = (String::new(), BTreeMap::new());
        stream.read_line(&mut first).await.unwrap();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let mut body = vec![0; headers["content-length"].parse().unwrap()];
        stream.read_exact(&mut body).await.unwrap();
        let (status, answer) =
            self.answer(&first, &headers, &serde_json::from_slice(&body).unwrap());
        // Chunks, as the API server sends them.
        let answer = answer.to_string();
        let (begin, end) = answer.split_at(answer.len() / 2);
        let answer = format!(
            "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
             {:x}\r\n{begin}\r\n{:x}\r\n{end}\r\n0\r\n\r\n",
            begin.len(),
            end.len()
        );
        stream.write_all(answer.as_bytes()).await.unwrap();
    }

    fn answer(
        &self,
        first: &str,
        headers: &BTreeMap<String, String>,
        body: &Value,
    ) -> (u16, Value) {
        let status = |code: u16, message: &str| {
            (code, json!({ "kind": "Status", "code": code, "message": message }))
        };
        if headers["authorization"] != format!("Bearer {CONTROLLER}") {
            return status(401, "Unauthorized");
        }
        let mut parts = first.split(' ');
        match (parts.next().unwrap(), parts.next().unwrap()) {
            ("POST", "/apis/authentication.k8s.io/v1/tokenreviews") => {
                assert_eq!(headers["content-type"], "application/json");
                assert_eq!(body["kind"], "TokenReview");
                let audiences = body["spec"]["audiences"].as_array().unwrap();
                let found = self.tokens.get(body["spec"]["token"].as_str().unwrap());
                let of_audience =
                    found.filter(|issued| audiences.iter().any(|one| *one == issued.1));
                let review = match of_audience {
                    // Invalid, expired, of a deleted pod or for another audience: not authenticated.
                    None => json!({ "error": "[invalid bearer token, token audiences]" }),
                    Some((account, audience, node, pod)) => json!({
                        "authenticated": true,
                        "audiences": [audience],
                        "user": {
                            "username": format!("system:serviceaccount:{account}"),
                            "groups": ["system:serviceaccounts"],
                            "extra": {
                                "authentication.kubernetes.io/node-name": [node],
                                "authentication.kubernetes.io/pod-name": [pod],
                            },
                        },
                    }),
                };
                (201, json!({ "kind": "TokenReview", "spec": body["spec"], "status": review }))
            }
            ("PATCH", path) => {
                assert_eq!(headers["content-type"], "application/apply-patch+yaml");
                let (path, query) = path.split_once('?').unwrap();
                let own = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/");
                let Some(name) = path.strip_prefix(&own) else {
                    return status(403, "forbidden: namespace");
                };
                assert!(query.contains("fieldManager=quoin"), "apply needs a manager: {query}");
                assert_eq!(body["metadata"]["name"], name);
                let pin = body["data"]["authority"].as_str().unwrap().to_owned();
                self.config_maps.lock().unwrap().insert(name.to_owned(), pin);
                (200, body.clone())
            }
            other => status(404, &format!("{other:?}")),
        }
    }

    async fn pin(&self) -> AuthorityPin {
        loop {
            if let Some(pin) = self.config_maps.lock().unwrap().get("quoin-authority") {
                return pin.parse().unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A controller that admits pods.
async fn controller(home: &Path, api: String) -> (String, watch::Sender<bool>) {
    quoin_control::init(home, Lifetimes::default()).await.unwrap();
    let (token, ca) = (home.join("../token"), home.join("../ca.crt"));
    std::fs::write(&token, format!("{CONTROLLER}\n")).unwrap();
    let api = ApiOptions { server: api, ca, token, namespace: NAMESPACE.into() };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let options = Options {
        kubernetes: Some(KubernetesOptions { api, prefix: "quoin-".into() }),
        listen: Some(port),
        ..Options::new(home)
    };
    let (down, shutdown) = watch::channel(false);
    tokio::spawn(quoin_control::run(options, shutdown));
    (port.to_string(), down)
}

#[tokio::test]
async fn a_pod_becomes_the_member_of_its_node_by_its_service_account_alone() {
    let directory = tempfile::tempdir().unwrap();
    let of = |account, node, pod| (account, "quoin", node, pod);
    let tokens = BTreeMap::from([
        ("node.of.n1", of("quoin-system:quoin-node", "n1", "quoin-target-x")),
        ("pool.of.n1", of("quoin-system:quoin-pool", "n1", "quoin-pool-x")),
        ("csi.controller.x", of("quoin-system:quoin-csi-controller", "n1", "csi-0")),
        ("for.the.api", ("quoin-system:quoin-node", "https://kubernetes", "n1", "x")),
        ("of.someone.else", of("default:quoin-node", "n1", "x")),
    ]);
    let (api, server) = ApiServer { tokens, ..ApiServer::default() }.start().await;
    let (address, down) = controller(&directory.path().join("controller"), server).await;
    let pin = api.pin().await;
    let ask = async |token: &str, role: Role, name: &str| {
        introduce(&address, &pin, token, role, name).await.map_err(|error| error.to_string())
    };
    // The ConfigMap may be there a moment before the port is served.
    let token = loop {
        match ask("node.of.n1", Role::Node, "n1").await {
            Err(why) if why.contains("refused (os error") || why.contains("reach") => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            asked => break asked.unwrap(),
        }
    };
    let home = |name: &str| directory.path().join(name);
    join(&address, &token, Role::Node, "n1", &home("n1")).await.unwrap();
    let token = ask("pool.of.n1", Role::Pool, "n1-sdb").await.unwrap();
    join(&address, &token, Role::Pool, "n1-sdb", &home("pool")).await.unwrap();
    // The token is for this member alone.
    let token = ask("pool.of.n1", Role::Pool, "n1-sdc").await.unwrap();
    let other = join(&address, &token, Role::Pool, "n9", &home("other")).await;
    assert!(other.unwrap_err().to_string().contains("only"));
    // A host that lost its directory joins by the same name, and its former key is nobody's.
    let token = ask("node.of.n1", Role::Node, "n1").await.unwrap();
    join(&address, &token, Role::Node, "n1", &home("n1-anew")).await.unwrap();
    let former = Identity::load(&home("n1")).unwrap().channel(&address).unwrap();
    let mut former = quoin_api::control::cluster_client::ClusterClient::new(former);
    let refused = former.get_cluster_info(quoin_api::control::GetClusterInfoRequest {}).await;
    assert!(refused.unwrap_err().message().contains("another key"));

    let token = ask("csi.controller.x", Role::Node, "csi-0").await.unwrap();
    let csi = join(&address, &token, Role::Node, "csi-0", &home("csi")).await.unwrap();
    let channel = csi.channel(&address).unwrap();
    let mut cluster = quoin_api::control::cluster_client::ClusterClient::new(channel);
    let missing = quoin_api::control::VolumeRef { id: "0".repeat(32), name: String::new() };
    let delete = quoin_api::control::DeleteVolumeRequest { volume: Some(missing) };
    cluster.delete_volume(delete).await.expect("it may manage volumes");
    let nodes = cluster.list_nodes(quoin_api::control::ListNodesRequest::default()).await.unwrap();
    assert!(nodes.into_inner().nodes.iter().all(|node| node.name != "csi-0"), "it is no node");

    for (token, role, name, words) in [
        ("node.of.n1", Role::Node, "n2", "is on node \"n1\""),
        ("node.of.n1", Role::Pool, "n1", "join as node"),
        ("pool.of.n1", Role::Pool, "n2-sdb", "is on node \"n1\""),
        ("csi.controller.x", Role::Node, "n1", "its own name"),
        ("for.the.api", Role::Node, "n1", "does not know"),
        ("of.someone.else", Role::Node, "n1", "namespace"),
        ("of.no.pod", Role::Node, "n1", "invalid bearer token"),
        ("no-token", Role::Node, "n1", "no token of a service account"),
    ] {
        let refused = ask(token, role, name).await.unwrap_err();
        assert!(refused.contains(words), "{token} {role} {name}: {refused}");
    }
    // The pin is proved before a token is shown.
    let wrong = AuthorityPin { fingerprint: [7; 32], ..pin };
    let refused = introduce(&address, &wrong, "node.of.n1", Role::Node, "n1").await;
    assert!(refused.is_err());
    // No crash loop fills the list of tokens.
    for _ in 0..8 {
        let _ = ask("node.of.n1", Role::Node, "n1").await;
    }
    assert!(ask("node.of.n1", Role::Node, "n1").await.unwrap_err().contains("not used"));
    down.send_replace(true);
}

#[tokio::test]
async fn a_controller_that_admits_no_pods_says_so() {
    let server = crate::server::Server::start().await;
    let JoinToken { cluster, fingerprint, .. } = server.first_token;
    let pin = AuthorityPin { cluster, fingerprint };
    let refused = introduce(&server.address, &pin, "a.b.c", Role::Node, "n1").await.unwrap_err();
    assert!(refused.to_string().contains("--admit-service-accounts"), "{refused}");
}
