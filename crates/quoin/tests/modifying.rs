//! Options of a volume in use, changed on the command line, and its health as `quoin volume doctor`
//! tells it: real processes throughout.

use crate::common;

use std::time::{Duration, Instant};

use bytes::Bytes;
use common::dev::Dev;
use common::{Scratch, eventually, signal};
use quoin_nbd::client::Client;

const BLOCK: usize = 4096;

fn write(client: &Client, count: u64) -> Duration {
    let began = Instant::now();
    for n in 0..count {
        client.write(n * BLOCK as u64, Bytes::from(vec![n as u8; BLOCK]), false).unwrap();
    }
    began.elapsed()
}

fn modified(dev: &Dev, flags: &[&str]) -> serde_json::Value {
    let began = Instant::now();
    let answer = dev.json(&[&["volume", "modify", "db"], flags].concat());
    assert_eq!(answer["inForce"], true, "{answer}");
    // Processes of other tests take their share of the machine.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    answer
}

#[test]
fn options_of_a_volume_in_use_change_without_a_new_attachment_and_outlive_every_process() {
    let scratch = Scratch::new("modifying");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let client = dev.client("db");
    assert!(write(&client, 40) < Duration::from_secs(20));

    let answer = modified(&dev, &["--iops-limit", "10"]);
    assert_eq!(answer["changes"][0], "iopsLimit no limit to 10");
    let limited = write(&client, 40);
    assert!(limited > Duration::from_millis(2500), "a burst of 10, then 10 a second: {limited:?}");
    modified(&dev, &["--iops-limit", "off"]);
    assert!(write(&client, 40) < limited / 2, "no limit any more");

    let answer = modified(&dev, &["--durability", "media", "--on-full", "enospc"]);
    assert_eq!(answer["volume"]["durability"], "media");
    write(&client, 10);
    let text = dev.ok(&["volume", "modify", "db", "--durability", "media"]);
    assert_eq!(text, "volume db: already so");
    let dry = dev.ok(&["volume", "modify", "db", "--reads", "confirmed", "--dry-run"]);
    assert!(dry.contains("reads leased to confirmed (would change)"), "{dry}");

    for flags in
        [&["--block-size", "512"][..], &["--durability", "disk"], &[], &["--replicas", "9"]]
    {
        let refused = dev.quoin(&[&["volume", "modify", "db"], flags].concat());
        assert!(!refused.status.success(), "{flags:?}");
    }
    let refused = dev.quoin(&["volume", "modify", "db", "--replicas", "2"]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(words.contains("quoin replica remove"), "{words}");

    // The present attachment is the first one, also after its target was killed.
    for process in ["controller", "target"] {
        let pid = dev.pid(process).unwrap_or_else(|| panic!("{process}: {:?}", dev.processes()));
        signal(pid, "KILL");
        eventually("it runs again", || dev.pid(process).filter(|now| *now != pid));
        write(&client, 5);
        dev.wait_for_volume("db", "online under media", |volume| {
            common::dev::is_online(volume) && volume["durability"] == "media"
        });
    }
    let bytes = client.read(3 * BLOCK as u64, BLOCK as u32).unwrap();
    assert_eq!(bytes[..], [3; BLOCK]);
    drop(client);
    dev.stop();
}

#[test]
fn the_doctor_says_what_is_wrong_by_its_exit_code_too_and_what_can_be_done() {
    let scratch = Scratch::new("doctor");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let client = dev.client("db");
    write(&client, 10);
    dev.wait_for_volume("db", "online", common::dev::is_online);
    let well = dev.json(&["volume", "doctor", "db"]);
    assert_eq!((&well["well"], well["conditions"].as_array().unwrap().len()), (&true.into(), 0));

    let pool = dev.processes().into_iter().find(|(name, _)| name.starts_with("pool"));
    let (name, pid) = pool.map(|(name, pid)| (name, pid.as_i64().unwrap())).unwrap();
    signal(pid, "STOP");
    write(&client, 1);
    let conditions = eventually("it is ill", || {
        let output = dev.quoin(&["volume", "doctor", "db", "-o", "json"]);
        let view: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        (output.status.code() == Some(3)).then(|| view["conditions"].clone())
    });
    let offline = conditions.as_array().unwrap().iter().find(|c| c["reason"] == "ReplicaOffline");
    let offline = offline.unwrap_or_else(|| panic!("{name}: {conditions}"));
    assert_eq!(offline["severity"], "Degraded");
    for field in ["message", "action", "wayOut"] {
        assert!(!offline[field].as_str().unwrap().is_empty(), "{field}: {conditions}");
    }
    signal(pid, "CONT");
    eventually("it is well", || {
        dev.quoin(&["volume", "doctor", "db"]).status.success().then_some(())
    });
    let unknown = dev.quoin(&["volume", "doctor", "nowhere"]);
    assert_eq!(unknown.status.code(), Some(1));
    drop(client);
    dev.stop();
}
