//! The Debian package on a machine of its own: installed, used by its units, upgraded under a
//! mounted volume, refused removal while that is mounted, removed, installed again and purged.
//! Needs root.

use crate::common;
use crate::machines;

use common::Scratch;
use machines::{Machine, build_package};

const PARTS: [&str; 6] = [
    "quoin-attach-holder.service",
    "quoin-attach.service",
    "quoin-controller.service",
    "quoin-node.service",
    "quoin-pool@a.service",
    "quoin-target.service",
];

fn wait_until_online(machine: &Machine) {
    for member in ["pool", "node"] {
        let listed = format!("quoin {member} list | grep -q Online");
        machine.eventually_ok(&format!("the {member} is online"), &listed);
    }
}

#[test]
fn a_host_installs_uses_upgrades_removes_and_installs_the_package_again() {
    if !machines::is_supported() {
        return;
    }
    let scratch = Scratch::new("package");
    let packages = scratch.0.join("packages");
    let (first, second) = (build_package(&packages, 1), build_package(&packages, 2));
    let mut machine = Machine::new(&scratch.0, "host-a");
    machine.install(&first);
    assert!(machine.ok("quoin version").contains(env!("CARGO_PKG_VERSION")));
    assert!(machine.ok("cat /usr/share/man/man1/quoin-volume.1").contains("quoin volume create"));
    let symbols = machine.run("readelf -S /usr/bin/quoin");
    let sections = String::from_utf8_lossy(&symbols.stdout).into_owned();
    assert!(sections.contains(".gnu_debuglink") && !sections.contains(".symtab"), "{sections}");
    let (of, debug) = (first.display().to_string(), "quoin-dbgsym");
    let debug = of.replace("/quoin_", &format!("/{debug}_"));
    assert!(std::path::Path::new(&debug).exists(), "{debug}");
    if machine.run("command -v systemd-analyze").status.success() {
        let units = "/lib/systemd/system/quoin*.service /lib/systemd/system/quoin.target";
        let printed = machine.ok(&format!("systemd-analyze verify --man=no {units} 2>&1"));
        assert!(!printed.contains("quoin"), "{printed}");
    }

    // A host with all roles: controller, one pool, a node. Examples are filled in as they instruct.
    machine.ok("quoin controller init --state /var/lib/quoin/controller");
    machine.systemctl("enable --now quoin.target");
    assert_eq!(machine.active(), ["quoin-controller.service", "quoin.target"]);
    machine.eventually_ok("the controller answers", "quoin cluster info");
    let fill_in = |machine: &Machine, example: &str, role: &str| {
        let token = machine.ok(&format!("quoin token create --role {role}"));
        machine.ok(&format!(
            "umask 077; sed -e 's/^CONTROLLER=.*/CONTROLLER=127.0.0.1:7400/' \
             -e 's/^QUOIN_JOIN_TOKEN=.*/QUOIN_JOIN_TOKEN={token}/' \
             -e 's/100GiB/1GiB/' \
             /usr/share/doc/quoin/{example}.conf.example > /etc/quoin/{}",
            if role == "pool" { "pool-a.conf" } else { "node.conf" }
        ));
    };
    fill_in(&machine, "pool", "pool");
    fill_in(&machine, "node", "node");
    machine.systemctl("daemon-reload");
    machine.systemctl("start quoin.target");
    wait_until_online(&machine);
    // Names are those of the host, and a token that was removed from the file is not missed.
    assert!(machine.ok("quoin pool list").contains("host-a-a"));
    machine.ok("sed -i 's/^QUOIN_JOIN_TOKEN=.*/QUOIN_JOIN_TOKEN=/' /etc/quoin/*.conf");
    machine.ok("quoin volume create db --size 64MiB --replicas 1");
    let attach = "quoin volume attach db";
    let device = machine.ok(attach);
    machine.ok(&format!("mkfs.ext4 -q {device} && mkdir /srv/db && mount {device} /srv/db"));
    machine.ok("echo before > /srv/db/file && sync /srv/db/file");

    // Everything at once is restarted below a mounted volume, all but the holder.
    machine.systemctl("restart quoin.target");
    machine.ok("echo restarted >> /srv/db/file && sync /srv/db/file");

    // The upgrade, by the calls of the package's own script to systemd.
    machine.listen_to_scripts();
    machine.install(&second);
    assert!(machine.ok("dpkg-query -W quoin").ends_with("-2"));
    let calls = machine.carry_out();
    let restarted: Vec<&str> = calls
        .iter()
        .filter_map(|call| call.strip_prefix("try-restart quoin-")?.strip_suffix(".service"))
        .collect();
    assert_eq!(restarted, ["controller", "pool@a", "target", "attach", "node", "mirror"]);
    assert_eq!(calls[0], "daemon-reload");
    let mut active = machine.active();
    active.retain(|unit| unit != "quoin.target");
    active.sort();
    assert_eq!(active, PARTS);
    machine.ok("echo after >> /srv/db/file && sync /srv/db/file");
    let content = "before\nrestarted\nafter";
    assert_eq!(machine.ok("cat /srv/db/file"), content);

    // A mounted volume keeps the package.
    let device = machine.ok(&format!("readlink -f {device}"));
    let printed = machine.refused("dpkg -r quoin");
    assert!(printed.contains(&format!("{device} is mounted")), "{printed}");
    machine.eventually_ok("the controller answers", "quoin volume list");
    machine.ok("umount /srv/db && quoin volume detach db");
    machine.ok("dpkg -r quoin");
    machine.carry_out();
    assert_eq!(machine.active(), ["quoin.target"], "removal stops all that ran");
    assert!(!machine.run("quoin version").status.success());
    machine.ok("test -e /var/lib/quoin/controller/records.redb");

    // Everything that the package served is there again with it.
    machine.install(&second);
    machine.carry_out();
    machine.systemctl("start quoin.target");
    machine.eventually_ok("the controller answers", "quoin cluster info");
    wait_until_online(&machine);
    let device = machine.ok(attach);
    machine.ok(&format!("mount {device} /srv/db"));
    assert_eq!(machine.ok("cat /srv/db/file"), content);
    machine.ok("umount /srv/db && quoin volume detach db");
    machine.systemctl("stop quoin.target");
    machine.systemctl("stop quoin-attach-holder");
    let printed = machine.ok("dpkg -P quoin");
    assert!(printed.contains("/var/lib/quoin"), "{printed}");
    machine.ok("test ! -e /etc/quoin && test -e /var/lib/quoin/controller/records.redb");
}

/// Makes a controller, a pool and a node on one machine, online.
fn host_of_all(machine: &mut Machine) {
    machine.ok("quoin controller init --state /var/lib/quoin/controller");
    machine.systemctl("enable --now quoin.target");
    machine.eventually_ok("the controller answers", "quoin cluster info");
    for (role, file) in [("pool", "pool-a"), ("node", "node")] {
        let token = machine.ok(&format!("quoin token create --role {role}"));
        let options = "--capacity 1GiB";
        machine.write(
            &format!("/etc/quoin/{file}.conf"),
            &format!(
                "CONTROLLER=127.0.0.1:7400\nDATA=/srv/pool\nOPTIONS=\"{options}\"\n\
                 QUOIN_JOIN_TOKEN={token}\n"
            ),
        );
    }
    machine.systemctl("daemon-reload");
    machine.systemctl("start quoin.target");
    wait_until_online(machine);
}

#[test]
fn a_volume_is_attached_and_mounted_again_after_the_host_was_killed_and_booted() {
    if !machines::is_supported() {
        return;
    }
    let scratch = Scratch::new("at-boot");
    let package = build_package(&scratch.0.join("package"), 1);
    let mut machine = Machine::new(&scratch.0, "host-b");
    machine.install(&package);
    machine.ok("echo '# as it was' > /etc/fstab");
    host_of_all(&mut machine);
    machine.ok("quoin volume create my-db --size 64MiB --replicas 1");

    // Without a file system there is nothing to mount, and nothing is written.
    let at_boot = "quoin volume attach my-db --at-boot --mount '/srv/my db'";
    let printed = machine.refused(at_boot);
    assert!(
        printed.contains("no file system") && printed.contains("attached as /dev/quoin/my-db"),
        "{printed}"
    );
    // The link is there for the file system to be made on.
    machine.ok("test -b /dev/quoin/my-db");
    assert_eq!(machine.ok("cat /etc/fstab"), "# as it was");
    machine.ok("test ! -e /etc/quoin/volumes");
    let device = machine.ok("quoin volume attach my-db");
    machine.ok(&format!("mkfs.ext4 -q {device}"));

    // Each written file is printed.
    let printed = machine.ok(&format!("{at_boot} 2>&1"));
    let unit = "quoin-volume@my\\x2ddb.service";
    for path in [
        "/etc/quoin/volumes/my\\x2ddb.json",
        "/etc/systemd/system/quoin.target.wants/",
        "/etc/fstab",
    ] {
        assert!(printed.contains(&format!("wrote {path}")), "{path}: {printed}");
    }
    let line = machine.ok("grep 'srv/my.040db' /etc/fstab");
    let options =
        "ext4 nosuid,nodev,nofail,_netdev,x-systemd.requires=quoin-volume@my\\134x2ddb.service,";
    assert!(line.starts_with("/dev/quoin/my-db ") && line.contains(options), "{line}");
    machine.ok(&format!("test -L '/etc/systemd/system/quoin.target.wants/{unit}'"));
    machine.ok("echo before > '/srv/my db/file' && sync '/srv/my db/file'");
    // The same command again changes nothing.
    machine.ok(at_boot);
    assert_eq!(machine.ok("wc -l < /etc/fstab"), "2");
    // A clone has all that its source has, the UUID too, and is not mounted in its place.
    machine.ok("umount '/srv/my db'");
    machine.ok("quoin volume create copy --from-volume my-db");
    let copy = machine.ok("quoin volume attach copy");
    let at = machine.ok("mktemp -d");
    machine.ok(&format!("mount {copy} {at} && echo copy > {at}/file && umount {at}"));
    machine.ok("quoin volume attach-at-boot --run /run/quoin --timeout 60 my-db");
    assert_eq!(machine.ok("cat '/srv/my db/file'"), "before");
    // Another mount there is reported, and left alone.
    machine.ok(&format!("umount '/srv/my db' && mount {copy} '/srv/my db'"));
    let printed =
        machine.refused("quoin volume attach-at-boot --run /run/quoin --timeout 60 my-db");
    assert!(printed.contains("another file system mounted"), "{printed}");
    machine.ok("umount '/srv/my db' && quoin volume detach copy && quoin volume delete copy --yes");
    machine.ok(at_boot);

    // A boot reads the key of an encrypted volume, from a file that others cannot read.
    machine.ok("printf %064d 1 > /root/key && chmod 644 /root/key");
    machine
        .ok("quoin volume create secret --size 64MiB --replicas 1 --encrypt --key-file /root/key");
    let secret = "quoin volume attach secret --at-boot --key-file";
    let printed = machine.refused(&format!("{secret} - < /root/key"));
    assert!(printed.contains("a boot has no standard input"), "{printed}");
    let printed = machine.refused(&format!("{secret} /root/key"));
    assert!(printed.contains("is open to others (mode 644)"), "{printed}");
    machine.ok("chmod 600 /root/key");
    machine.ok(&format!("{secret} /root/key && mkfs.ext4 -q /dev/quoin/secret"));
    machine.ok(&format!("mkdir /srv/secret && {secret} /root/key --mount /srv/secret"));
    machine.ok("echo secret > /srv/secret/file && sync /srv/secret/file");

    // The records name this host as the volume's owner, so its target serves it.
    machine.crash();
    machine.boot();
    machine.eventually_ok("it is mounted again", "mountpoint -q '/srv/my db'");
    assert_eq!(machine.ok("cat '/srv/my db/file'"), "before");
    machine.ok("test -b /dev/quoin/my-db");
    machine.eventually_ok("the encrypted one too", "mountpoint -q /srv/secret");
    assert_eq!(machine.ok("cat /srv/secret/file"), "secret");
    machine.ok("printf %064d 2 > /root/key");
    let again = "quoin volume attach-at-boot --run /run/quoin --timeout 60 secret";
    let printed = machine.refused(again);
    assert!(printed.contains("opens no slot that the volume had"), "{printed}");
    machine.ok("umount /srv/secret && quoin volume detach secret");

    // The volume is not removed in use. Detached, nothing of it is left for the next boot.
    let printed = machine.refused("quoin volume detach my-db");
    assert!(printed.contains("unmount"), "{printed}");
    machine.ok("umount '/srv/my db'");
    let printed = machine.ok("quoin volume detach my-db 2>&1");
    assert!(printed.contains("removed /etc/fstab: its line"), "{printed}");
    assert_eq!(machine.ok("cat /etc/fstab"), "# as it was");
    let left = "find /etc/quoin/volumes /etc/systemd/system/quoin.target.wants -mindepth 1";
    assert_eq!(machine.ok(left), "");
}
