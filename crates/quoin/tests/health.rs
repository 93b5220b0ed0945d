//! `/metrics` and `/healthz` of every role of a running cluster: correct, and with a reason.

use crate::common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use common::{Cluster, Place, Scratch, eventually, free_port, signal};

/// Returns the code and the body.
fn get(address: &str, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let code = answer.split(' ').nth(1)?.parse().ok()?;
    Some((code, answer.split_once("\r\n\r\n")?.1.to_owned()))
}

fn health(address: &str) -> Option<(u16, serde_json::Value)> {
    let (code, body) = get(address, "/healthz")?;
    // The body may arrive in chunks, each below its length.
    let json = &body[body.find('{')?..=body.rfind('}')?];
    Some((code, serde_json::from_str(json).ok()?))
}

fn wait_for_health(address: &str, what: &str, wanted: u16) -> String {
    eventually(what, || {
        let (code, body) = health(address)?;
        let status = if code == 200 { "ok" } else { "unhealthy" };
        assert_eq!(body["status"], status, "{body}");
        (code == wanted).then(|| body["reason"].as_str().unwrap_or_default().to_owned())
    })
}

/// Creates a volume as the provisioner of Kubernetes does, which tells whose claim it is.
fn create_claim(csi: &Path) {
    use quoin_api::csi::controller_client::ControllerClient;
    use quoin_api::csi::{CapacityRange, CreateVolumeRequest};

    let claim = [("pvc/namespace", "shop"), ("pvc/name", "orders"), ("pv/name", "pvc-1")];
    let parameters =
        claim.map(|(key, name)| (format!("csi.storage.k8s.io/{key}"), name.to_owned()));
    let request = CreateVolumeRequest {
        name: "pvc-1".to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: 64 << 20, limit_bytes: 0 }),
        volume_capabilities: vec![crate::support::orchestrator::capability()],
        parameters: parameters.into_iter().collect(),
        ..CreateVolumeRequest::default()
    };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut client = ControllerClient::new(quoin_identity::unix_channel(csi));
        client.create_volume(request).await.unwrap();
    });
}

#[test]
fn every_role_exposes_its_metrics_and_health() {
    let ports: Vec<String> = (0..6).map(|_| format!("127.0.0.1:{}", free_port())).collect();
    let [controller, target, node] = [&ports[0], &ports[1], &ports[2]];
    let pools = &ports[3..];
    let backups = Scratch::new("health-backups");
    let into = backups.0.to_str().unwrap();
    let flags = ["--default-spread", "pool", "--http", controller, "--backup-into", into];
    let mut cluster = Cluster::start("health", &Place::here(), &flags);
    for (name, http) in ["p1", "p2", "p3"].into_iter().zip(pools) {
        cluster.pool(&Place::here(), name, &["--http", http]);
    }
    cluster.node(&Place::here(), "n1", &["--http", target], &["--http", node]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let address = cluster.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1;
    for (name, address) in ["controller", "target", "node", "p1", "p2", "p3"].iter().zip(&ports) {
        wait_for_health(address, &format!("{name} is well"), 200);
    }

    let mut client = quoin_nbd::client::Pipe::connect(&quoin_nbd::client::ClientOptions::new(
        quoin_nbd::client::Address::Unix(socket.into()),
    ))
    .unwrap();
    let write = quoin_types::block::Operation::Write {
        offset: 0,
        data: bytes::Bytes::from(vec![7; 8192]),
        fua: true,
    };
    client.submit(1, write);
    let mut done = Vec::new();
    eventually("the write is answered", || {
        client.send().unwrap();
        client.receive(&mut done).unwrap();
        (!done.is_empty()).then_some(())
    });

    let csi = cluster.scratch.0.join("csi.sock");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        use quoin_api::csi::identity_client::IdentityClient;
        let mut client = IdentityClient::new(quoin_identity::unix_channel(&csi));
        client.probe(quoin_api::csi::ProbeRequest {}).await.unwrap();
    });

    let expected: [(&String, &[&str]); 4] = [
        (
            target,
            &[
                "quoin_target_requests_total{operation=\"write\"} 1\n",
                "quoin_target_written_bytes_total 8192\n",
                "quoin_target_request_duration_seconds_count{operation=\"write\"} 1\n",
                "quoin_target_replicas{state=\"in_sync\"} 3\n",
                "quoin_target_rebuild_bytes 0\n",
                "quoin_target_volume_written_bytes_total{volume=\"db\",namespace=\"\",persistentvolumeclaim=\"\",persistentvolume=\"\"} 8192\n",
                "quoin_target_volume_request_duration_seconds_count{volume=\"db\",",
            ],
        ),
        (
            &pools[0],
            &[
                "quoin_pool_written_bytes_total{pool=\"p1\"} 8192\n",
                "quoin_pool_free_bytes{pool=\"p1\"}",
                "quoin_pool_used_bytes{pool=\"p1\"}",
                "quoin_pool_append_duration_seconds_bucket{",
                "quoin_pool_sync_duration_seconds_bucket{",
            ],
        ),
        (
            controller,
            &[
                "quoin_replicas{phase=\"InSync\"} 3\n",
                "quoin_volumes{health=\"Online\"} 1\n",
                "quoin_pool_capacity_bytes{name=\"p1\"} 10",
                "quoin_rebuilt_bytes 0\n",
                "quoin_volume_size_bytes{volume=\"db\",namespace=\"\",persistentvolumeclaim=\"\",persistentvolume=\"\"} 67108864\n",
                "quoin_volume_used_bytes{volume=\"db\",",
                "quoin_volume_unwell{volume=\"db\",namespace=\"\",persistentvolumeclaim=\"\",persistentvolume=\"\"} 0\n",
            ],
        ),
        (
            node,
            &[
                "quoin_node_controller_up 1\n",
                "quoin_node_calls_total{method=\"Probe\",code=\"0\"} 1\n",
                "quoin_node_call_duration_seconds_count{method=\"Probe\"} 1\n",
            ],
        ),
    ];
    for (address, lines) in expected {
        for line in lines {
            eventually(line, || get(address, "/metrics")?.1.contains(line).then_some(()));
        }
    }

    cluster.ok(&["node", "set", "n1", "--manages-volumes", "true"]);
    create_claim(&csi);
    let labels = "volume=\"pvc-1\",namespace=\"shop\",persistentvolumeclaim=\"orders\",\
        persistentvolume=\"pvc-1\"";
    let line = format!("quoin_volume_size_bytes{{{labels}}} 67108864\n");
    eventually("a claim's volume has its labels", || {
        get(controller, "/metrics")?.1.contains(&line).then_some(())
    });
    let found = cluster.ok(&["volume", "list", "--namespace", "shop", "--claim", "orders"]);
    assert!(found.contains("pvc-1") && !found.contains("db"), "{found}");
    let found = cluster.ok(&["volume", "list", "--namespace", "warehouse"]);
    assert!(!found.contains("pvc-1"), "{found}");

    cluster.ok(&["schedule", "create", "db", "--every", "1h", "--keep", "2"]);
    eventually("the schedule's first snapshot is counted", || {
        let shown = get(controller, "/metrics")?.1;
        let counted = shown.contains("quoin_snapshots{phase=\"Ready\"} 1\n");
        let interval = "quoin_schedule_interval_seconds{schedule=\"db\",volume=\"db\"} 3600.0";
        (counted && shown.contains(interval)).then_some(())
    });
    eventually("the controller made a backup by itself", || {
        get(controller, "/metrics")?
            .1
            .contains("quoin_last_backup_timestamp_seconds 1")
            .then_some(())
    });
    let mut shown = quoin_attach::Metrics::default().render();
    for address in &ports {
        shown += &get(address, "/metrics").unwrap().1;
    }
    every_alert_is_on_metrics_that_there_are(&shown);

    // IO waits without a majority, and the target reports the volume and the reason.
    for pool in ["p2", "p3"] {
        signal(cluster.process(pool).pid(), "KILL");
    }
    let reason = wait_for_health(target, "the target is unwell", 503);
    assert!(reason.contains("volume db") && reason.contains("waits"), "{reason}");
    // No volume is opened without the controller; the roles that need it report that.
    signal(cluster.process("controller").pid(), "KILL");
    for (name, address) in [("pool", &pools[0]), ("node", node)] {
        let what = format!("the {name} misses the controller");
        assert!(wait_for_health(address, &what, 503).contains("controller: "));
    }
    // A target that is restarted meanwhile does not know its volumes: their IO waits for it.
    signal(cluster.process("target").pid(), "KILL");
    let mut again: Vec<String> =
        ["target", "--name", "n1", "--http", target.as_str()].map(Into::into).into();
    again.extend(["--state".into(), cluster.path("node"), "--run".into(), cluster.path("run")]);
    again.extend(["--controller".into(), cluster.controller.clone()]);
    cluster.run(&Place::here(), "target-again", again);
    eventually("it says that IO waits", || {
        let (_, body) = health(target)?;
        body["reason"].as_str()?.contains("IO of its volumes waits").then_some(())
    });
}

/// Compares the example of alert rules with the metrics of all roles.
fn every_alert_is_on_metrics_that_there_are(shown: &str) {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let there: BTreeSet<&str> =
        shown.lines().filter_map(|line| line.split(|letter| !is_of_name(letter)).next()).collect();
    let rules = include_str!("../../../packaging/prometheus/quoin.rules.yml");
    let rules: serde_yaml_ng::Value = serde_yaml_ng::from_str(rules).unwrap();
    let rules = rules["groups"][0]["rules"].as_sequence().unwrap();
    assert!(rules.len() > 10);
    for rule in rules {
        let expression = rule["expr"].as_str().unwrap();
        let mut names = expression
            .split(|letter| !is_of_name(letter))
            .filter(|word| word.starts_with("quoin_"))
            .peekable();
        assert!(names.peek().is_some(), "{expression} is on no metric");
        // Metrics of mirrors need a second cluster: quoin-control compares them (tests/control/mirrors.rs).
        let is_of_mirrors =
            |name: &&str| name.starts_with("quoin_mirror_") || *name == "quoin_peer_up";
        for name in names.filter(|name| !is_of_mirrors(name)) {
            assert!(there.contains(name), "{expression}: there is no {name}");
        }
        assert!(rule["annotations"]["summary"].is_string(), "{expression} says nothing");
    }
}
