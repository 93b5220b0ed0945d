//! Events at the objects of Kubernetes that they concern.

use std::collections::HashMap;
use std::time::Duration;

use quoin_api::control::VolumeSpec;
use quoin_control::ApiOptions;
use quoin_control::events::{Object, Severity};
use quoin_testkit::kubernetes_api::KubernetesApi;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cluster::{Cluster, spec};

/// Events of this reason that the API has, by kind of the object that they are about.
fn told(api: &KubernetesApi, reason: &str) -> HashMap<String, Value> {
    let all = api.names("events").into_iter().filter_map(|name| api.object("events", &name));
    let of_reason = all.filter(|event| event["reason"] == reason);
    of_reason
        .map(|event| (event["involvedObject"]["kind"].as_str().unwrap().to_owned(), event.clone()))
        .collect()
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 20 s");
}

#[tokio::test]
async fn events_of_a_volume_are_told_at_its_claim_and_its_persistent_volume_and_nowhere_else() {
    let api = KubernetesApi::start();
    let object = |name: &str, uid: &str| json!({ "metadata": { "name": name, "uid": uid } });
    api.add("api/v1/namespaces/shop/persistentvolumeclaims", object("orders", "uid-of-claim"));
    api.add("api/v1/persistentvolumes", object("pvc-1", "uid-of-volume"));
    api.add("api/v1/nodes", object("n1", "uid-of-node"));
    let directory = tempfile::tempdir().unwrap();
    let (token, ca) = (directory.path().join("token"), directory.path().join("ca.crt"));
    std::fs::write(&token, "of.the.controller").unwrap();
    let options =
        ApiOptions { server: api.address(), ca, token, namespace: "quoin-system".to_owned() };

    let mut cluster = Cluster::new().await;
    let (down, shutdown) = watch::channel(false);
    let telling = tokio::spawn(cluster.controller.tell_events_to_kubernetes(options, shutdown));
    // Events of before are nobody's news.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let claimed = |name: &str, claim: [&str; 3]| {
        let keys = ["pvc/namespace", "pvc/name", "pv/name"];
        let claim = keys.into_iter().zip(claim);
        let claim = claim.map(|(key, name)| (key.to_owned(), name.to_owned())).collect();
        VolumeSpec { claim, ..spec(name) }
    };
    api.set_away(true);
    let orders = claimed("pvc-1", ["shop", "orders", "pvc-1"]);
    cluster.controller.volumes.catalog.create(&orders, 0).await.unwrap();
    let elsewhere = claimed("pvc-2", ["shop", "no-such-claim", "../../secrets/x"]);
    cluster.controller.volumes.catalog.create(&elsewhere, 0).await.unwrap();
    cluster.create("of-nobody").await;
    api.set_away(false);

    let found = until("both are told once the API is back", || {
        let found = told(&api, "VolumeCreated");
        (found.len() == 2).then_some(found)
    })
    .await;
    let of_claim = &found["PersistentVolumeClaim"];
    assert_eq!(of_claim["metadata"]["namespace"], "shop");
    assert_eq!(of_claim["involvedObject"]["name"], "orders");
    assert_eq!(of_claim["involvedObject"]["uid"], "uid-of-claim");
    assert_eq!(of_claim["type"], "Normal");
    let of_volume = &found["PersistentVolume"];
    assert_eq!(of_volume["metadata"]["namespace"], "default");
    assert_eq!(of_volume["involvedObject"]["uid"], "uid-of-volume");

    api.lose_answers(1);
    let about = Object::new("node", "n1", "n1");
    cluster.controller.state.events().record(Severity::Normal, about, "NodeSet", "as it was told");
    let found = until("an event of a node is told, though an answer was lost", || {
        told(&api, "NodeSet").remove("Node")
    })
    .await;
    assert_eq!(found["involvedObject"]["uid"], "uid-of-node");
    let names = api.names("events");
    assert_eq!(names.iter().filter(|name| name.starts_with("quoin-node-")).count(), 1, "{names:?}");
    assert_eq!(told(&api, "VolumeCreated").len(), 2, "none of a volume that nobody claims");
    down.send_replace(true);
    telling.await.unwrap();
}
