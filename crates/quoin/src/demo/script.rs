//! Steps of the demo.

use anyhow::{Context, Result, bail};
use quoin_api::control::Volume;
use quoin_nbd::client::{Address, Client, ClientOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cluster::{DevCluster, POOL_NAMES};
use super::csi::{Claim, Orchestrator};
use super::documents::{DOCUMENT_BYTES, Document};
use super::load::{Load, WORKER_PAGES};
use super::second_node::{self, SecondNode};
use super::surface::{DirectFile, PAGE_BYTES, Region, Surface};
use super::{CLUSTER, DemoOptions, interrupt, print_line, show_bytes};
use crate::client;

const DOCUMENTS: u64 = 8;
const WORKERS: u64 = 4;
/// How long IO may stand still before the demo calls it a failure.
const FLOW_BUDGET: Duration = Duration::from_secs(60);
const REBUILD_BUDGET: Duration = Duration::from_secs(180);

/// A line of the summary.
struct Outcome {
    step: &'static str,
    pause: Option<Duration>,
    recovered: Option<Duration>,
}

pub fn run(options: &DemoOptions, directory: &Path) -> Result<()> {
    let mounted = can_mount(options);
    let cluster_directory = directory.join(CLUSTER);
    print_timed(&format!(
        "starting an all-in-one Quoin: controller, four pools, target{}, node",
        if mounted { ", attach" } else { "" }
    ));
    let cluster = DevCluster::start(&cluster_directory, mounted)?;
    let socket = cluster.layout.csi_socket();
    let nbd = cluster.layout.nbd();
    let orchestrator = Orchestrator::new(&socket, directory, nbd.clone())?;
    let beside = Orchestrator::new(&socket, &directory.join("copy"), nbd)?;
    let cluster = Some(cluster);
    let only = options.only.clone();
    let outcomes = Vec::new();
    let mut demo = Demo { cluster, orchestrator, beside, mounted, only, replicas: 3, outcomes };
    demo.play(options.size, directory)
}

/// Returns true if the demo mounts a file system: as root with FUSE. Otherwise prints what it does
/// instead.
fn can_mount(options: &DemoOptions) -> bool {
    let reason = match crate::host::can_attach() {
        _ if options.user_space => "as asked".into(),
        Ok(()) => return true,
        Err(reason) => reason,
    };
    print_timed(&format!("the volume is used over NBD by a client in this process: {reason}"));
    false
}

/// Linux 6.9 sends to a new attach process what an old one did not answer.
fn kernel_sends_again() -> bool {
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 9)
}

struct Demo {
    cluster: Option<DevCluster>,
    orchestrator: Orchestrator,
    /// The same one, with paths of its own for a copy of the volume.
    beside: Orchestrator,
    mounted: bool,
    /// Harm whose line has not these words is left out.
    only: Option<String>,
    /// Number of replicas that the volume is to have now.
    replicas: usize,
    outcomes: Vec<Outcome>,
}

impl Demo {
    fn play(&mut self, size: u64, directory: &Path) -> Result<()> {
        let node = self.node_name()?;
        print_timed(&format!(
            "creating a volume of {} with three replicas over the CSI socket",
            show_bytes(size)
        ));
        let mut claim = self.orchestrator.create("demo", size)?;
        self.attach(&mut claim, &node)?;

        print_timed(&format!("writing {DOCUMENTS} files of {}", show_bytes(DOCUMENT_BYTES)));
        let documents = self.documents(&claim, true)?;
        for document in &documents {
            document.write()?;
            interrupt::check()?;
        }
        self.verify(&documents)?;

        print_timed(&format!(
            "starting the application: {WORKERS} writers and readers that verify what they read"
        ));
        let load = Load::start(self.surfaces(
            &self.orchestrator,
            &claim,
            WORKERS,
            WORKER_PAGES * PAGE_BYTES as u64,
            "load",
            true,
        )?);
        load.flows_again(FLOW_BUDGET)?;
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(2) {
            interrupt::check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let quiet = load.read(0);
        note(&format!(
            "undisturbed: {} operations, the slowest {}",
            quiet.operations,
            millis(quiet.pause)
        ));

        self.step(
            "kill -9 of a pool; it comes back and catches up",
            &claim,
            &load,
            &documents,
            |demo| {
                let pools = demo.pools_of(&claim)?;
                demo.cluster()?.kill(&[&*pools[1]])
            },
        )?;
        self.step(
            "a replica wiped with its pool, and rebuilt",
            &claim,
            &load,
            &documents,
            |demo| {
                let pools = demo.pools_of(&claim)?;
                let cluster = demo.cluster()?;
                let before = demo.guid_in(&claim, &pools[2])?;
                let data = cluster.layout.pool_data(&pools[2]);
                cluster.kill_and_hold(&pools[2], || wipe(&data))?;
                demo.wait_for_another_guid(&claim, &pools[2], &before)
            },
        )?;
        let step = "kill -9 of the target; IO continues at a higher epoch";
        let before = self.volume(&claim)?.epoch;
        self.step(step, &claim, &load, &documents, |demo| demo.cluster()?.kill(&["target"]))?;
        if self.includes(step) {
            let after = self.volume(&claim)?.epoch;
            if after <= before {
                bail!("the epoch did not grow: {before}, then {after}");
            }
            note(&format!("epoch {before} before, {after} now"));
        }
        self.step("kill -9 of the controller", &claim, &load, &documents, |demo| {
            demo.cluster()?.kill(&["controller"])
        })?;
        if self.mounted && kernel_sends_again() {
            self.step(
                "kill -9 of the attach process, which serves the block device",
                &claim,
                &load,
                &documents,
                |demo| demo.cluster()?.kill(&["attach"]),
            )?;
        }
        self.step(
            "kill -9 of all of them at once, and of the node",
            &claim,
            &load,
            &documents,
            |demo| {
                let others = ["controller", "target", "node"];
                demo.cluster()?.kill(&[&others[..], &POOL_NAMES[..]].concat())
            },
        )?;
        self.membership(&claim, &load, &documents)?;
        self.copy(&claim, &load, &documents, &node, size)?;
        let step = "the volume grows under the application";
        self.step(step, &claim, &load, &documents, |demo| {
            if !demo.orchestrator.grow(&claim, size + size / 2, demo.mounted)? {
                note("its ext4 may not grow while mounted here; it grows with the next staging");
            }
            Ok(())
        })?;

        print_timed("the application ends, after checking every page it ever wrote");
        load.finish()?;
        drop(documents);
        self.fail_over(&mut claim, &node, directory)?;
        self.cold_start(&mut claim, &node, &directory.join(CLUSTER))?;
        self.summary();

        print_timed("taking everything down");
        if self.mounted {
            self.orchestrator.unmount(&claim)?;
        }
        self.orchestrator.delete(&claim, &node)?;
        self.cluster.take().map_or(Ok(()), DevCluster::stop)
    }

    /// Replicas are added, taken away, moved and replaced under the application.
    fn membership(&mut self, claim: &Claim, load: &Load, documents: &[Document]) -> Result<()> {
        let volume = &*claim.volume_id;
        let step = "quoin volume scale --replicas 4: a replica is added";
        self.step(step, claim, load, documents, |demo| {
            demo.replicas = 4;
            demo.cluster()?.command(&["volume", "scale", volume, "--replicas", "4", "--wait"])
        })?;
        let step = "quoin replica remove: a replica is removed";
        self.step(step, claim, load, documents, |demo| {
            let pools = demo.pools_of(claim)?;
            demo.replicas -= 1;
            demo.cluster()?.command(&["replica", "remove", volume, &pools[0], "--wait"])
        })?;
        let step = "quoin replica move: a replica moves to another pool";
        self.step(step, claim, load, documents, |demo| {
            let pools = demo.pools_of(claim)?;
            let free = POOL_NAMES.into_iter().find(|name| pools.iter().all(|pool| pool != name));
            let way = [&*pools[0], "--to", free.context("every pool has a replica")?];
            demo.cluster()?.command(&[&["replica", "move", volume], &way[..], &["--wait"]].concat())
        })?;
        let step = "quoin replica replace, while its pool is down";
        self.step(step, claim, load, documents, |demo| {
            let pools = demo.pools_of(claim)?;
            let cluster = demo.cluster()?;
            cluster.kill_and_hold(&pools[1], || {
                cluster.command(&["replica", "replace", volume, &pools[1], "--wait"])
            })
        })
    }

    /// A snapshot, a copy of it that is used beside the volume, and the copy's return to what it was.
    fn copy(
        &mut self,
        claim: &Claim,
        load: &Load,
        documents: &[Document],
        node: &str,
        size: u64,
    ) -> Result<()> {
        let step = "a snapshot, a copy twice as large used beside the volume, and its revert";
        self.step(step, claim, load, documents, |demo| {
            let began = Instant::now();
            let snapshot = demo.orchestrator.snapshot(claim, "demo-snapshot")?;
            let cut = began.elapsed();
            let mut copy = demo.beside.create_from("demo-copy", 2 * size, Some(&snapshot))?;
            let made = began.elapsed().saturating_sub(cut);
            note(&format!("snapshot after {}, copy of it after {}", millis(cut), millis(made)));
            let own = demo.use_copy(&mut copy, node)?;
            demo.verify(&own)?;
            // Data written to the copy is lost with its revert, and the volume never has it.
            let kept = demo.beside.snapshot(&copy, "demo-copy-snapshot")?;
            let other = Document { seed: 0x0c0_9135, ..own.into_iter().next().context("none")? };
            other.write()?;
            other.verify()?;
            drop(other);
            demo.leave_copy(&copy, node)?;
            let revert = ["snapshot", "revert", "demo-copy", "demo-copy-snapshot", "--yes"];
            demo.cluster()?.command(&revert)?;
            let own = demo.use_copy(&mut copy, node)?;
            demo.verify(&own)?;
            drop(own);
            demo.leave_copy(&copy, node)?;
            for snapshot in [kept, snapshot] {
                demo.beside.delete_snapshot(&snapshot)?;
            }
            demo.beside.delete(&copy, node)
        })
    }

    /// Publishes a copy beside the volume, and returns the files that it has of it.
    fn use_copy(&self, copy: &mut Claim, node: &str) -> Result<Vec<Document>> {
        self.beside.publish(copy, node)?;
        if self.mounted {
            self.beside.stage(copy)?;
            self.beside.node_publish(copy)?;
        }
        self.documents_at(&self.beside, copy, false)
    }

    fn leave_copy(&self, copy: &Claim, node: &str) -> Result<()> {
        if self.mounted {
            self.beside.unmount(copy)?;
        }
        self.beside.unpublish(copy, node)
    }

    fn includes(&self, step: &str) -> bool {
        self.only.as_ref().is_none_or(|words| step.contains(words.as_str()))
    }

    /// The pools that hold the volume's replicas.
    fn pools_of(&self, claim: &Claim) -> Result<Vec<String>> {
        let mut pools: Vec<_> =
            self.volume(claim)?.replicas.into_iter().map(|replica| replica.pool).collect();
        pools.sort_unstable();
        if pools.len() != self.replicas {
            bail!("the volume has replicas in {}", pools.join(", "));
        }
        Ok(pools)
    }

    fn cluster(&self) -> Result<&DevCluster> {
        self.cluster.as_ref().context("the cluster is stopped")
    }

    fn node_name(&self) -> Result<String> {
        if self.mounted {
            return self.orchestrator.node_id();
        }
        self.orchestrator.node_at(&self.cluster()?.layout.admin_socket())
    }

    fn volume(&self, claim: &Claim) -> Result<Volume> {
        let socket = self.cluster()?.layout.admin_socket();
        self.orchestrator.ask(async {
            let mut cluster = client::connect(&socket).await?;
            client::get_volume(&mut cluster, &claim.volume_id).await
        })
    }

    /// The node is lost while it has the volume; a second one takes it over and gives it back, and the
    /// first one, which returns, begins anew.
    fn fail_over(&mut self, claim: &mut Claim, node: &str, directory: &Path) -> Result<()> {
        let step = "the node is lost, and a second node takes over its volume";
        interrupt::check()?;
        if !self.includes(step) {
            return Ok(());
        }
        print_timed(step);
        let cluster = self.cluster()?;
        let second = SecondNode::start(cluster, &self.orchestrator, directory, self.mounted)?;
        let place = &second.orchestrator;
        let mut taken = claim.clone();
        let mut recovered = Duration::ZERO;
        let began = Instant::now();
        cluster.kill_and_hold("target", || {
            cluster.kill_and_hold("node", || {
                place.take_over(&mut taken, second_node::NAME)?;
                if self.mounted {
                    place.stage(&taken)?;
                    place.node_publish(&taken)?;
                }
                self.verify(&self.documents_at(place, &taken, false)?)?;
                recovered = began.elapsed();
                Ok(())
            })
        })?;
        note(&format!(
            "taken over and verified after {:.1} s; the first node is back",
            recovered.as_secs_f64()
        ));
        if self.mounted {
            place.unmount(&taken)?;
            // The mount of the first node is dead; orchestrators unmount it.
            self.orchestrator.unmount(claim)?;
        }
        place.unpublish(&taken, second_node::NAME)?;
        drop(second);
        self.attach(claim, node)?;
        self.verify(&self.documents(claim, false)?)?;
        self.outcomes.push(Outcome { step, pause: None, recovered: Some(recovered) });
        Ok(())
    }

    /// Publishes to the node; as root also stages (ext4) and mounts.
    fn attach(&self, claim: &mut Claim, node: &str) -> Result<()> {
        self.orchestrator.publish(claim, node)?;
        if self.mounted {
            self.orchestrator.stage(claim)?;
            self.orchestrator.node_publish(claim)?;
            note(&format!(
                "published, staged (ext4) and mounted at {}",
                self.orchestrator.mount().display()
            ));
        } else {
            note("published; served over NBD");
        }
        Ok(())
    }

    /// `count` surfaces of `bytes` each: files of the mount, or regions of the volume.
    fn surfaces(
        &self,
        place: &Orchestrator,
        claim: &Claim,
        count: u64,
        bytes: u64,
        name: &str,
        create: bool,
    ) -> Result<Vec<Arc<dyn Surface>>> {
        if self.mounted {
            let open = if create { DirectFile::create } else { DirectFile::open };
            let files =
                (0..count).map(|index| open(&place.mount().join(format!("{name}-{index}"))));
            return files.map(|file| Ok(Arc::new(file?) as Arc<dyn Surface>)).collect();
        }
        let client = Arc::new(nbd_client(&place.nbd_socket(claim))?);
        // Documents come first on the volume, the application's pages behind them.
        let base = if name == "load" { DOCUMENTS * DOCUMENT_BYTES } else { 0 };
        let regions =
            (0..count).map(|index| Region { client: client.clone(), start: base + index * bytes });
        Ok(regions.map(|region| Arc::new(region) as Arc<dyn Surface>).collect())
    }

    fn documents(&self, claim: &Claim, create: bool) -> Result<Vec<Document>> {
        self.documents_at(&self.orchestrator, claim, create)
    }

    fn documents_at(
        &self,
        place: &Orchestrator,
        claim: &Claim,
        create: bool,
    ) -> Result<Vec<Document>> {
        let surfaces = self.surfaces(place, claim, DOCUMENTS, DOCUMENT_BYTES, "file", create)?;
        Ok(surfaces
            .into_iter()
            .enumerate()
            .map(|(index, surface)| Document {
                name: format!("file-{index}"),
                surface,
                seed: 0x5eed_0000 + index as u64,
            })
            .collect())
    }

    fn verify(&self, documents: &[Document]) -> Result<()> {
        let mut all = 0;
        for document in documents {
            all ^= document.verify()?.rotate_left(3);
            interrupt::check()?;
        }
        note(&format!("{} files verified byte by byte (checksum {all:08x})", documents.len()));
        Ok(())
    }

    /// Does harm under load, waits until IO flows and every replica is in sync again, and
    /// verifies the files.
    fn step(
        &mut self,
        step: &'static str,
        claim: &Claim,
        load: &Load,
        documents: &[Document],
        harm: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        interrupt::check()?;
        if !self.includes(step) {
            return Ok(());
        }
        print_timed(step);
        let operations = load.operations();
        load.read(operations);
        let began = Instant::now();
        harm(self)?;
        load.flows_again(FLOW_BUDGET)?;
        let recovered = self.wait_until_in_sync(claim, load, began)?;
        let reading = load.read(operations);
        note(&format!(
            "IO paused for {} at most; all {} replicas in sync after {:.1} s; {} operations meanwhile, no error",
            millis(reading.pause),
            self.replicas,
            recovered.as_secs_f64(),
            reading.operations
        ));
        self.verify(documents)?;
        load.check()?;
        self.outcomes.push(Outcome {
            step,
            pause: Some(reading.pause),
            recovered: Some(recovered),
        });
        Ok(())
    }

    fn wait_until_in_sync(&self, claim: &Claim, load: &Load, began: Instant) -> Result<Duration> {
        let mut shown = String::new();
        loop {
            interrupt::check()?;
            load.check()?;
            // The controller may be the one that was killed: it is asked again.
            let state = match self.volume(claim) {
                Ok(volume) => {
                    let phases: Vec<_> =
                        volume.replicas.iter().map(|replica| replica.phase.as_str()).collect();
                    if volume.health == "Online"
                        && phases.len() == self.replicas
                        && phases.iter().all(|phase| *phase == "InSync")
                    {
                        return Ok(began.elapsed());
                    }
                    format!("{}: {}", volume.health, phases.join(", "))
                }
                Err(error) => format!("{error:#}"),
            };
            if state != shown {
                note(&state);
                shown = state;
            }
            if began.elapsed() > REBUILD_BUDGET {
                bail!(
                    "not all replicas are in sync after {} s ({shown})",
                    REBUILD_BUDGET.as_secs()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Which incarnation of the volume's data a pool holds.
    fn guid_in(&self, claim: &Claim, pool: &str) -> Result<String> {
        let volume = self.volume(claim)?;
        let replica = volume.replicas.iter().find(|replica| replica.pool == pool);
        Ok(replica.with_context(|| format!("no replica in {pool}"))?.guid.clone())
    }

    /// Until the controller knows of the loss, it still shows the replica that is gone.
    fn wait_for_another_guid(&self, claim: &Claim, pool: &str, before: &str) -> Result<()> {
        let began = Instant::now();
        while self.guid_in(claim, pool)? == before {
            interrupt::check()?;
            if began.elapsed() > FLOW_BUDGET {
                bail!("the loss of the replica in {pool} is not detected");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Power loss as far as a process can play it, then a start from what is on disk.
    fn cold_start(&mut self, claim: &mut Claim, node: &str, directory: &Path) -> Result<()> {
        let step = match self.mounted {
            true => "kill -9 of everything with the mount in place, then a cold start",
            false => "kill -9 of everything, then a cold start",
        };
        print_timed(step);
        self.cluster.take().map_or(Ok(()), DevCluster::crash)?;
        let began = Instant::now();
        self.cluster = Some(DevCluster::start_again(directory, self.mounted)?);
        interrupt::check()?;
        if self.mounted {
            // Orchestrators do this after a node came back: clean up, then begin again.
            self.orchestrator.unmount(claim)?;
        }
        self.attach(claim, node)?;
        let documents = self.documents(claim, false)?;
        self.verify(&documents)?;
        let recovered = began.elapsed();
        note(&format!(
            "up, {} and verified {:.1} s after the start began",
            if self.mounted { "mounted" } else { "served over NBD" },
            recovered.as_secs_f64()
        ));
        self.outcomes.push(Outcome { step, pause: None, recovered: Some(recovered) });
        Ok(())
    }

    fn summary(&self) {
        print_line(&format!(
            "\n{:<66} {:>10} {:>12}",
            "all files verified after each of", "IO paused", "whole again"
        ));
        for outcome in &self.outcomes {
            let pause = outcome.pause.map_or_else(|| "-".into(), millis);
            let recovered = outcome
                .recovered
                .map_or_else(|| "-".into(), |time| format!("{:.1} s", time.as_secs_f64()));
            print_line(&format!("{:<66} {pause:>10} {recovered:>12}", outcome.step));
        }
        print_line("errors seen by the application: none");
        if !self.mounted {
            print_line(
                "the application used the volume over NBD; as root the same demo mounts it through CSI",
            );
        }
        print_line("");
    }
}

fn nbd_client(socket: &Path) -> Result<Client> {
    let began = Instant::now();
    loop {
        interrupt::check()?;
        match Client::connect(ClientOptions::new(Address::Unix(socket.to_owned()))) {
            Ok(client) => return Ok(client),
            Err(error) if began.elapsed() > FLOW_BUDGET => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Everything in the pool's data directory or file.
fn wipe(data: &Path) -> Result<()> {
    let metadata = std::fs::metadata(data).with_context(|| format!("{}", data.display()))?;
    let gone =
        if metadata.is_dir() { std::fs::remove_dir_all(data) } else { std::fs::remove_file(data) };
    gone.with_context(|| format!("wipe {}", data.display()))
}

fn millis(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1000.0)
}

pub(super) fn print_timed(line: &str) {
    use std::sync::OnceLock;
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let began = BEGAN.get_or_init(Instant::now);
    print_line(&format!("[{:>5.1} s] {line}", began.elapsed().as_secs_f64()));
}

pub(super) fn note(line: &str) {
    print_line(&format!("          {line}"));
}
