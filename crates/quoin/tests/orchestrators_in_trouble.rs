//! Orders of calls of orchestrators while mirrors, targets and controllers of both clusters are killed between any two
//! calls, mirrors stand still, and the link between them is cut: packets of one direction, or of both, are swallowed.
//!
//! A seed draws the moves of an application over a group of two volumes. Its writes have numbers, so each instant of
//! the group is what the first so many of them made: each side that is promoted has to show one, of all that was
//! acknowledged after a planned move, and else of all that was told to be there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use quoin_api::csi_addons::replication::ReplicationSource;
use quoin_nbd::client::Client;
use rand::{Rng, SeedableRng, rngs::StdRng};
use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Status};

use crate::common::network::Loopback;
use crate::common::{Place, Scratch};
use crate::mirrors::{LOST, hold_all};
use crate::support::block;
use crate::support::orchestrator::*;

const BLOCKS: u64 = VOLUME_BYTES / BLOCK;
/// Blocks that are written, so that many are written again.
const WRITTEN: u64 = 600;
/// Time of moves while both sides live, and most faults, of the run in the suite.
const MOVES_FOR: Duration = Duration::from_secs(15);
const FAULTS: u32 = 12;
/// Seconds of a longer run, with as many faults as come.
const LONGER: &str = "QUOIN_ORCHESTRATORS_S";
const SEED: &str = "QUOIN_ORCHESTRATORS_SEED";

/// Write of the application, whose number is its place among all.
struct Write {
    volume: usize,
    lba: u64,
    version: u64,
    acknowledged: SystemTime,
}

struct Trouble<'a> {
    sides: [Side<'a>; 2],
    random: StdRng,
    faults_left: u32,
    /// A side whose processes are held.
    lost: Option<usize>,
    ids: [String; 2],
    group: String,
    class: &'static str,
    writes: Vec<Write>,
    last_version: u64,
    /// Newest time that the present primary told.
    told: SystemTime,
    began: Instant,
    thaws: Vec<std::thread::JoinHandle<()>>,
    /// The network of both clusters; `None`: none can be made, and no link is cut.
    network: Option<Arc<Loopback>>,
    /// Ports of both mirrors.
    ports: [u16; 2],
    /// Until when packets from this side are swallowed.
    cut_until: [Instant; 2],
}

/// Port at which the mirror of a cluster listens.
fn mirror_port(directory: &Path) -> u16 {
    let text = std::fs::read(directory.join("dev.json")).unwrap();
    let settings: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let address: std::net::SocketAddr =
        settings["mirror_listen"].as_str().unwrap().parse().unwrap();
    address.port()
}

fn passes(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Aborted | Code::DeadlineExceeded)
}

impl Trouble<'_> {
    fn source(&self) -> Option<ReplicationSource> {
        group(&self.group)
    }

    fn say(&self, what: &str) {
        println!("{:6.1} s  {what}", self.began.elapsed().as_secs_f64());
    }

    /// Has what a side sends to the other one swallowed for a while, or what both send.
    fn cut(&mut self, network: &Arc<Loopback>) {
        let from = self.random.random_range(0..2);
        let is_both = self.random.random_bool(0.5);
        let lasts = Duration::from_millis(self.random.random_range(300..4000));
        let sides = if is_both { vec![from, 1 - from] } else { vec![from] };
        let now = Instant::now();
        // A cut that lasts is not cut again.
        let sides: Vec<usize> = sides.into_iter().filter(|s| self.cut_until[*s] < now).collect();
        for side in sides {
            self.say(&format!(
                "  what {} sends to the other side is swallowed for {} ms",
                ["first", "second"][side],
                lasts.as_millis()
            ));
            self.cut_until[side] = now + lasts + Duration::from_secs(1);
            // On connections that it dialled, and on those that the other side dialled.
            let ends = [("dport", self.ports[1 - side]), ("sport", self.ports[side])];
            ends.iter().for_each(|(end, port)| network.swallow("add", end, *port));
            let network = network.clone();
            self.thaws.push(std::thread::spawn(move || {
                std::thread::sleep(lasts);
                ends.iter().for_each(|(end, port)| network.swallow("del", end, *port));
            }));
        }
    }

    /// Kills or stops a process, or cuts the link, now and then.
    fn fault(&mut self) {
        if self.faults_left == 0 || !self.random.random_bool(0.12) {
            return;
        }
        self.faults_left -= 1;
        if self.random.random_bool(0.3)
            && let Some(network) = self.network.clone()
        {
            return self.cut(&network);
        }
        let side = self.lost.map_or_else(|| self.random.random_range(0..2), |lost| 1 - lost);
        let process = LOST[self.random.random_range(0..LOST.len())];
        let text = std::fs::read(self.sides[side].directory.join("run/processes.json")).unwrap();
        let pids: BTreeMap<String, i32> = serde_json::from_slice(&text).unwrap();
        // A process that was killed just now is not started again yet.
        let Some(pid) = pids.get(process).and_then(|pid| Pid::from_raw(*pid)) else { return };
        let name = ["first", "second"][side];
        if process == "mirror" && self.random.random_bool(0.5) {
            let stopped = Duration::from_millis(self.random.random_range(300..4000));
            self.say(&format!(
                "  the mirror of {name} stands still for {} ms",
                stopped.as_millis()
            ));
            let _ = kill_process(pid, Signal::STOP);
            self.thaws.push(std::thread::spawn(move || {
                std::thread::sleep(stopped);
                let _ = kill_process(pid, Signal::CONT);
            }));
            return;
        }
        self.say(&format!("  kill -9 of the {process} of {name}"));
        let _ = kill_process(pid, Signal::KILL);
    }

    /// Makes a call until it has the code, while its codes are passing ones.
    fn ends_with<T: std::fmt::Debug>(
        &mut self,
        what: &str,
        expected: Code,
        mut call: impl FnMut(&mut Self) -> Result<T, Status>,
    ) {
        let began = Instant::now();
        loop {
            self.fault();
            let answer = call(self);
            let found = code(&answer);
            if found == expected {
                return;
            }
            assert!(
                passes(found) && began.elapsed() < BUDGET,
                "{what}: not {expected:?}, but {answer:?}"
            );
            std::thread::sleep(AGAIN);
        }
    }

    fn succeeds(&mut self, what: &str, mut call: impl FnMut(&mut Self) -> Result<(), Status>) {
        self.ends_with(what, Code::Ok, |this| call(this));
    }

    /// The application writes blocks of both volumes, each acknowledged before the next one.
    fn write(&mut self, clients: &[Client; 2], count: usize) {
        for n in 0..count {
            if n % 20 == 7 {
                self.fault();
            }
            self.last_version += 1;
            let (volume, lba) =
                (self.random.random_range(0..2), self.random.random_range(0..WRITTEN));
            let bytes = block(lba, self.last_version);
            clients[volume].write(lba * BLOCK, bytes.into(), true).unwrap();
            let (version, acknowledged) = (self.last_version, SystemTime::now());
            self.writes.push(Write { volume, lba, version, acknowledged });
        }
    }

    fn open(&mut self, side: usize) -> [Client; 2] {
        let ids = self.ids.clone();
        for id in &ids {
            self.succeeds("ControllerPublishVolume", |this| this.sides[side].publish(id));
        }
        ids.map(|id| self.sides[side].connect(&id))
    }

    fn unpublish(&mut self, side: usize) {
        for id in self.ids.clone() {
            self.fault();
            self.sides[side].unpublish(&id);
        }
    }

    /// Compares every byte; returns how many writes the group shows the effect of.
    fn compare(&self, clients: &[Client; 2]) -> usize {
        const PIECE: u64 = 1 << 20;
        let mut of_block: BTreeMap<(usize, u64), Vec<usize>> = BTreeMap::new();
        for (number, write) in self.writes.iter().enumerate() {
            of_block.entry((write.volume, write.lba)).or_default().push(number);
        }
        // The first so many writes: at least, and less than.
        let (mut least, mut below) = (0, self.writes.len() + 1);
        for (volume, client) in clients.iter().enumerate() {
            for lba in 0..BLOCKS {
                let offset = lba * BLOCK;
                if !offset.is_multiple_of(PIECE) {
                    continue;
                }
                let found = client.read(offset, PIECE as u32).unwrap();
                for (at, found) in found.chunks(BLOCK as usize).enumerate() {
                    let lba = lba + at as u64;
                    let numbers = of_block.get(&(volume, lba)).map_or(&[][..], Vec::as_slice);
                    let is_of = |n: &&usize| found == &block(lba, self.writes[**n].version)[..];
                    let shown = numbers.iter().rfind(is_of);
                    let is_hole = found.iter().all(|byte| *byte == 0);
                    assert!(shown.is_some() || is_hole, "volume {volume}: block {lba} is torn");
                    least = least.max(shown.map_or(0, |number| number + 1));
                    let next =
                        numbers.iter().find(|number| shown.is_none_or(|shown| *number > shown));
                    below = below.min(next.map_or(usize::MAX, |number| number + 1));
                }
            }
        }
        assert!(least < below, "the volumes are not of one instant: {least} and {below}");
        least
    }

    /// All that was acknowledged is there.
    fn assert_whole(&self, clients: &[Client; 2]) {
        assert_eq!(self.compare(clients), self.writes.len(), "writes are missing");
    }

    /// All that was told to be there is there; the rest is lost from here on.
    fn take_over_what_is_there(&mut self, clients: &[Client; 2]) {
        let shown = self.compare(clients);
        // A block that was written twice with one instant between them is of either number.
        if let Some(missing) = self.writes.get(shown) {
            assert!(
                missing.acknowledged >= self.told,
                "a write that was acknowledged {:?} before the told time is missing",
                self.told.duration_since(missing.acknowledged)
            );
        }
        self.say(&format!(
            "  {} of {} writes are lost",
            self.writes.len() - shown,
            self.writes.len()
        ));
        self.writes.truncate(shown);
    }

    /// Asks the primary what is on the other side.
    fn ask(&mut self, side: usize) {
        if let Ok(info) = self.sides[side].info(&self.source()) {
            let at = info.last_sync_time.unwrap();
            let since = Duration::new(at.seconds as u64, at.nanos as u32);
            self.told = self.told.max(UNIX_EPOCH + since);
        }
    }

    fn wait_for_sync(&mut self, side: usize) {
        let (after, began) = (SystemTime::now(), Instant::now());
        while self.told <= after {
            self.fault();
            self.ask(side);
            assert!(began.elapsed() < BUDGET, "it is not synced");
            std::thread::sleep(AGAIN);
        }
    }

    /// Two managers at once have a side be primary.
    fn become_primary(&mut self, side: usize) {
        self.fault();
        let (to, source, class) = (&self.sides[side], self.source(), self.class);
        let turn = || retried("turn", || to.turn_primary(&source, class));
        std::thread::scope(|scope| {
            scope.spawn(turn);
            turn();
        });
        let (ids, group) = (self.ids.clone(), self.group.clone());
        self.succeeds("ModifyVolumeGroupMembership", |this| {
            let members = ids.each_ref().map(String::as_str);
            let count = this.sides[side].modify_group(&group, &members)?;
            assert_eq!(count, 2, "the members are what they were");
            Ok(())
        });
        // Times that the former primary told are of another reign.
        self.told = UNIX_EPOCH;
    }

    /// A side that was left follows, and is cleaned up in any order, again and again.
    fn become_copy(&mut self, side: usize) {
        let source = self.source();
        self.succeeds("DemoteVolume", |this| this.sides[side].demote(&source, false));
        let (began, mut is_cleaned) = (Instant::now(), false);
        loop {
            self.fault();
            let ready = self.sides[side].resync(&source, true);
            if !is_cleaned && self.random.random_bool(0.5) {
                is_cleaned = true;
                self.clean_up(side);
            }
            if ready.as_ref().is_ok_and(|ready| *ready) {
                break;
            }
            assert!(began.elapsed() < BUDGET, "it does not follow: {ready:?}");
            std::thread::sleep(AGAIN);
            self.succeeds("DemoteVolume", |this| this.sides[side].demote(&source, false));
        }
        self.clean_up(side);
    }

    fn clean_up(&mut self, side: usize) {
        let (source, ids, group) = (self.source(), self.ids.clone(), self.group.clone());
        for _ in 0..self.random.random_range(4..8) {
            let (what, id) = (self.random.random_range(0..4), self.random.random_range(0..2));
            self.succeeds("clean-up", |this| {
                let side = &this.sides[side];
                let coded =
                    |code| if code == Code::Ok { Ok(()) } else { Err(Status::new(code, "")) };
                match what {
                    0 => coded(side.disable(&source)),
                    1 => coded(side.delete(&ids[id])),
                    2 => side.modify_group(&group, &[]).map(|count| assert_eq!(count, 2)),
                    _ => coded(side.delete_group(&group)),
                }
            });
        }
        let id = ids[0].clone();
        self.ends_with("a copy is published", Code::FailedPrecondition, |this| {
            this.sides[side].publish(&id)
        });
    }

    fn work(&mut self, side: usize) {
        let clients = self.open(side);
        let count = self.random.random_range(30..120);
        self.write(&clients, count);
        self.ask(side);
        drop(clients);
        self.unpublish(side);
    }

    fn relocate(&mut self, from: usize) {
        self.say("relocation");
        let source = self.source();
        self.work(from);
        self.succeeds("DemoteVolume", |this| this.sides[from].demote(&source, false));
        self.become_primary(1 - from);
        let clients = self.open(1 - from);
        self.assert_whole(&clients);
        self.write(&clients, 20);
        drop(clients);
        self.unpublish(1 - from);
        self.become_copy(from);
    }

    /// The primary is alive, and its application too: with `takeOver` it steps down.
    fn take_over(&mut self, from: usize) {
        self.say("take-over of a live primary");
        let clients = self.open(from);
        self.write(&clients, 40);
        self.become_primary(1 - from);
        drop(clients);
        let clients = self.open(1 - from);
        self.assert_whole(&clients);
        self.write(&clients, 20);
        drop(clients);
        self.unpublish(1 - from);
        self.unpublish(from);
        self.become_copy(from);
    }

    fn fail_over(&mut self, from: usize) {
        self.say("failover");
        let clients = self.open(from);
        self.write(&clients, 60);
        self.wait_for_sync(from);
        self.write(&clients, 40);
        self.ask(from);
        let told = self.told;
        // Held processes are all there before.
        self.settle(from);
        hold_all(&self.sides[from].directory.clone(), &LOST, true);
        self.lost = Some(from);
        drop(clients);
        self.become_primary(1 - from);
        self.told = told;
        let clients = self.open(1 - from);
        self.take_over_what_is_there(&clients);
        self.told = UNIX_EPOCH;
        self.write(&clients, 40);
        drop(clients);
        self.unpublish(1 - from);
        self.say("the lost side is back");
        hold_all(&self.sides[from].directory.clone(), &LOST, false);
        self.lost = None;
        self.unpublish(from);
        self.become_copy(from);
        self.wait_for_sync(1 - from);
    }

    /// Waits until the processes of a side are there.
    fn settle(&mut self, side: usize) {
        self.thaws.drain(..).for_each(|thaw| thaw.join().unwrap());
        let began = Instant::now();
        loop {
            let path = self.sides[side].directory.join("run/processes.json");
            let text = std::fs::read(path).unwrap_or_default();
            let pids: BTreeMap<String, i32> = serde_json::from_slice(&text).unwrap_or_default();
            let lives = |process: &&str| {
                let pid = pids.get(*process);
                pid.is_some_and(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok())
            };
            if LOST.iter().all(lives) {
                return;
            }
            assert!(began.elapsed() < BUDGET, "a process is not started again");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The application is deleted; its copies are orphans, which are emptied and used alone.
    fn end(&mut self, primary: usize) {
        self.say("the application is deleted, and its orphan emptied");
        let (source, group, ids) = (self.source(), self.group.clone(), self.ids.clone());
        self.work(primary);
        self.wait_for_sync(primary);
        // Some of it is not there yet.
        self.work(primary);
        let coded = |code| if code == Code::Ok { Ok(()) } else { Err(Status::new(code, "")) };
        self.succeeds("DisableVolumeReplication", |this| {
            coded(this.sides[primary].disable(&source))
        });
        let copy = 1 - primary;
        let began = Instant::now();
        // It may be a copy still, which keeps its members.
        loop {
            self.fault();
            let members = self.sides[copy].modify_group(&group, &[]);
            match members {
                Ok(0) => break,
                Ok(_) => {}
                Err(why) => assert!(passes(why.code()), "{why:?}"),
            }
            assert!(began.elapsed() < BUDGET, "the orphan keeps its members");
            std::thread::sleep(AGAIN);
        }
        let clients = self.open(copy);
        self.take_over_what_is_there(&clients);
        drop(clients);
        self.unpublish(copy);
        self.succeeds("DeleteVolumeGroup", |this| coded(this.sides[copy].delete_group(&group)));
        for id in &ids {
            self.succeeds("DeleteVolume", |this| coded(this.sides[copy].delete(id)));
        }
    }
}

/// Proves REPL-PROMOTE-20, REPL-INFO-22, REPL-COPY-01.
#[test]
fn orders_of_calls_under_killed_processes_and_cut_links_leave_every_byte_where_the_roles_say() {
    let longer = std::env::var(LONGER).ok().map(|text| text.parse().expect("seconds"));
    let seed = std::env::var(SEED).ok().map(|text| text.parse().expect("a number"));
    let seed = seed.unwrap_or_else(rand::random);
    println!("seed {seed}, {SEED} repeats it");
    let scratch = Scratch::new("trouble");
    let runtime = runtime();
    let network = Loopback::new().map(Arc::new);
    let place = network.as_ref().map_or_else(Place::here, |network| network.place());
    let (dev, sides) = start_at(&place, &scratch, &runtime);
    let ports = sides.each_ref().map(|side| mirror_port(&side.directory));
    let mut random = StdRng::seed_from_u64(seed);
    let class = ["refuse", "takeOver"][random.random_range(0..2)];
    let ids = ["a", "b"].map(|name| sides[0].create(name, None));
    let group = sides[0].create_group("vgr", &ids.each_ref().map(String::as_str));
    let mut trouble = Trouble {
        sides,
        random,
        faults_left: 0,
        lost: None,
        ids,
        group,
        class,
        writes: Vec::new(),
        last_version: 0,
        told: UNIX_EPOCH,
        began: Instant::now(),
        thaws: Vec::new(),
        network,
        ports,
        cut_until: [Instant::now(); 2],
    };
    trouble.say(&format!("deployed, onLivePeer: {class}"));
    trouble.become_primary(0);
    trouble.work(0);
    trouble.faults_left = if longer.is_some() { u32::MAX } else { FAULTS };
    let (mut primary, mut moves) = (0, 0);
    let moves_for = longer.map_or(MOVES_FOR, Duration::from_secs);
    while trouble.began.elapsed() < moves_for {
        match trouble.random.random_range(0..8) {
            0 if longer.is_some() => trouble.fail_over(primary),
            1..=3 if class == "takeOver" => trouble.take_over(primary),
            _ => trouble.relocate(primary),
        }
        (primary, moves) = (1 - primary, moves + 1);
    }
    trouble.fail_over(primary);
    primary = 1 - primary;
    trouble.end(primary);
    trouble.say(&format!("{moves} moves and a failover, {} writes", trouble.last_version));
    for side in 0..2 {
        trouble.settle(side);
    }
    dev.stop();
}
