//! Failovers of many groups, to and fro, while processes of both clusters are killed: whatever a promotion shows is
//! compared, byte by byte, with what its clients wrote.
//!
//! A client writes the blocks of its group one after the other, so each instant of the group is what the first so
//! many writes made. A promoted group has to show one such instant, and all that was acknowledged before the time
//! that was told.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use prost_types::Timestamp;

use super::{Two, eventually};
use crate::compare::median;
use crate::further::Fact;
use crate::nbd::{self, Request};
use crate::product::Away;
use crate::{Error, load, usage};

pub const FAILOVERS: &str = "mirror-failovers";
pub const TAKE_OVER: &str = "mirror-take-over";

const GROUPS: usize = 10;
pub(super) const MEMBERS: usize = 5;
const VOLUME_BLOCKS: u64 = 2048;
const BLOCK_BYTES: usize = 4096;
const WRITES_FOR: Duration = Duration::from_secs(25);
const WRITE_EVERY: Duration = Duration::from_millis(10);
const KILL_EVERY: Duration = Duration::from_secs(3);
const TRY_AGAIN: Duration = Duration::from_millis(100);
/// Time for an answer: a target that was killed serves again within it.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// Groups whose ten volumes make a measurement.
pub(super) const TIMED: usize = 2;
/// Processes of a cluster that is lost, and those that are killed before.
const LOST: [&str; 3] = ["controller", "target", "mirror"];
const KILLED: [&str; 4] = ["controller", "target", "mirror", "pool"];

/// One of the two clusters.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pub two: &'a Two<'a>,
    pub is_second: bool,
    /// Ids of volumes by their names, where an orchestrator attaches them: clients only connect.
    pub published: Option<&'a HashMap<String, String>>,
}

/// Write of a client.
struct Record {
    member: usize,
    block: u64,
    id: u64,
    acknowledged: Option<SystemTime>,
}

/// All writes of a group that its present content is made of, in their order.
#[derive(Default)]
pub(super) struct History {
    records: Vec<Record>,
    last_id: u64,
}

/// Result of a comparison.
#[derive(Default)]
pub(super) struct Compared {
    /// Blocks that are of no instant.
    pub wrong: u64,
    /// Writes that are missing though their time was told.
    pub untold: u64,
}

pub(super) fn name(group: usize, member: usize) -> String {
    format!("f{group}-{member}")
}

pub(super) fn group_name(group: usize) -> String {
    format!("fg{group}")
}

fn content(id: u64) -> Vec<u8> {
    let mut state = id;
    let words = (1..BLOCK_BYTES / 8).flat_map(|_| load::next(&mut state).to_le_bytes());
    id.to_le_bytes().into_iter().chain(words).collect()
}

impl Side<'_> {
    pub fn other(self) -> Self {
        Self { is_second: !self.is_second, ..self }
    }

    /// The directory with the sockets of its processes.
    pub fn directory(self) -> PathBuf {
        self.two.product.path(if self.is_second { "peer/run" } else { "run" })
    }

    pub fn command(self, arguments: &[&str]) -> Result<String, Error> {
        self.two.on(self.is_second, arguments)
    }

    fn status(self, group: usize) -> Result<serde_json::Value, Error> {
        self.two.status_on(self.is_second, &group_name(group))
    }

    fn pids_of(self, role: &str) -> Vec<u32> {
        self.two.pids_of(role, self.is_second)
    }

    /// Kills the processes without which a cluster is lost; they stay away until they are given back.
    pub fn lose(self) -> Result<Vec<Away>, Error> {
        let cluster = if self.is_second { "peer" } else { "" };
        let hold = |role: &&str| self.two.product.hold_below(cluster, role);
        let away = LOST.iter().map(hold).collect();
        LOST.iter().for_each(|role| usage::end(&self.pids_of(role)));
        away
    }

    fn connect(self, volume: &str) -> Result<UnixStream, Error> {
        eventually("the volume is served", || Ok(self.try_connect(volume)))
    }

    /// `None`: it is not served here now.
    fn try_connect(self, volume: &str) -> Option<UnixStream> {
        let socket = match self.published {
            Some(ids) => self.directory().join(format!("nbd/{}.sock", ids.get(volume)?)),
            None => {
                let attached = self.command(&["volume", "attach", volume, "--nbd"]).ok()?;
                let (_, socket) = attached.split_once("socket=")?;
                PathBuf::from(socket.split_whitespace().next()?)
            }
        };
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(SERVED_WITHIN)).ok()?;
        nbd::negotiate(&mut stream).ok()?;
        Some(stream)
    }
}

impl History {
    fn next(&mut self, random: &mut u64) -> (usize, u64, u64) {
        self.last_id += 1;
        let draw = load::next(random);
        let (member, block) = (draw as usize % MEMBERS, (draw >> 32) % VOLUME_BLOCKS);
        self.records.push(Record { member, block, id: self.last_id, acknowledged: None });
        (member, block, self.last_id)
    }

    /// Writes until it is stopped. A write whose answer was lost is made again.
    fn write(&mut self, side: Side<'_>, group: usize, stop: &AtomicBool) {
        let mut streams = BTreeMap::new();
        let mut random = self.last_id ^ (group as u64) << 32;
        while !stop.load(Ordering::Relaxed) {
            let (member, block, id) = self.next(&mut random);
            let data = content(id);
            let offset = block * BLOCK_BYTES as u64;
            let request = |command, length| Request { command, handle: 1, offset, length };
            while !stop.load(Ordering::Relaxed) {
                let stream = match streams.entry(member) {
                    Entry::Occupied(held) => held.into_mut(),
                    Entry::Vacant(place) => match side.try_connect(&name(group, member)) {
                        Some(stream) => place.insert(stream),
                        None => {
                            std::thread::sleep(TRY_AGAIN);
                            continue;
                        }
                    },
                };
                match nbd::ask(stream, &request(nbd::WRITE, BLOCK_BYTES as u32), &data) {
                    Ok(()) => {
                        if let Some(record) = self.records.last_mut() {
                            record.acknowledged = Some(SystemTime::now());
                        }
                        break;
                    }
                    Err(_) => drop(streams.remove(&member)),
                }
            }
            std::thread::sleep(WRITE_EVERY);
        }
    }

    /// Compares what a side shows with what the first so many writes made, and forgets the others.
    fn compare(
        &mut self,
        side: Side<'_>,
        group: usize,
        told: SystemTime,
    ) -> Result<Compared, Error> {
        let mut shown = Vec::new();
        for member in 0..MEMBERS {
            let mut stream = side.connect(&name(group, member))?;
            let length = VOLUME_BLOCKS as u32 * BLOCK_BYTES as u32;
            let read = Request { command: nbd::READ, handle: 1, offset: 0, length };
            nbd::ask(&mut stream, &read, &[])?;
            let mut bytes = vec![0; length as usize];
            stream.read_exact(&mut bytes).map_err(Error::io("read a volume"))?;
            shown.push(bytes);
        }
        let blocks = shown.iter().enumerate().flat_map(|(member, bytes)| {
            bytes.chunks(BLOCK_BYTES).zip(0u64..).map(move |(data, block)| ((member, block), data))
        });
        let id = |data: &[u8]| u64::from_le_bytes(data[..8].try_into().unwrap_or_default());
        let newest = blocks.clone().map(|(_, data)| id(data)).max().unwrap_or_default();
        let kept = self.records.iter().take_while(|record| record.id <= newest).count();
        let lost = self.records.split_off(kept);
        let mut last = BTreeMap::new();
        for record in &self.records {
            last.insert((record.member, record.block), record.id);
        }
        let is_wrong = |(at, data): &((usize, u64), &[u8])| match last.get(at) {
            Some(id) => *data != content(*id),
            None => data.iter().any(|byte| *byte != 0),
        };
        let is_untold = |record: &&Record| record.acknowledged.is_some_and(|at| at < told);
        Ok(Compared {
            wrong: blocks.filter(is_wrong).count() as u64,
            untold: lost.iter().filter(is_untold).count() as u64,
        })
    }
}

/// Makes groups on the first side, and has them mirrored.
fn make_groups(two: &Two<'_>, groups: usize, flags: &[&str]) -> Result<(), Error> {
    make_groups_of(two, groups, MEMBERS, flags)
}

/// As above, with so many members.
pub(super) fn make_groups_of(
    two: &Two<'_>,
    groups: usize,
    members: usize,
    flags: &[&str],
) -> Result<(), Error> {
    for group in 0..groups {
        let names: Vec<String> = (0..members).map(|member| name(group, member)).collect();
        for volume in &names {
            let size = (VOLUME_BLOCKS * BLOCK_BYTES as u64).to_string();
            two.first(&["volume", "create", volume, "--size", &size, "--replicas", "2"])?;
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        two.first(&[&["group", "create", &group_name(group)][..], &names].concat())?;
        two.enable(&group_name(group), flags)?;
    }
    Ok(())
}

/// Has a client write to each group while `during` runs.
///
/// # Errors
/// Errors of `during`, or nothing was acknowledged of some group.
pub(super) fn while_writing<T>(
    side: Side<'_>,
    histories: &mut [History],
    during: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let stop = AtomicBool::new(false);
    let before: Vec<u64> = histories.iter().map(|history| history.last_id).collect();
    let outcome = std::thread::scope(|scope| {
        let stop = &stop;
        let write = |(group, history): (usize, &mut History)| history.write(side, group, stop);
        let clients = histories.iter_mut().enumerate();
        let clients: Vec<_> = clients.map(|client| scope.spawn(move || write(client))).collect();
        let outcome = during();
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().map_err(|_| Error::Failed("a client panicked".to_owned()))?;
        }
        outcome
    })?;
    let has_written = |(history, before): (&History, u64)| {
        history.records.iter().any(|record| record.id > before && record.acknowledged.is_some())
    };
    match histories.iter().zip(before).all(has_written) {
        true => Ok(outcome),
        false => Err(Error::Failed("no write of a group was acknowledged".to_owned())),
    }
}

/// Compares all groups. `told`: the time before which each has everything.
pub(super) fn compare_all(
    side: Side<'_>,
    histories: &mut [History],
    told: impl Fn(usize) -> SystemTime,
) -> Result<Compared, Error> {
    let mut all = Compared::default();
    for (group, history) in histories.iter_mut().enumerate() {
        let compared = history.compare(side, group, told(group))?;
        all.wrong += compared.wrong;
        all.untold += compared.untold;
    }
    Ok(all)
}

/// A copy takes over from a live primary whose clients write.
pub(super) fn take_over(two: &Two<'_>) -> Result<Vec<Fact>, Error> {
    make_groups(two, TIMED, &["--take-over"])?;
    let first = Side { two, is_second: false, published: None };
    let second = first.other();
    let mut histories: Vec<History> = (0..TIMED).map(|_| History::default()).collect();
    let took = while_writing(first, &mut histories, || {
        std::thread::sleep(WRITES_FOR);
        let began = Instant::now();
        for group in 0..TIMED {
            second.command(&["mirror", "promote", &group_name(group), "--force"])?;
        }
        Ok(began.elapsed().as_secs_f64())
    })?;
    let now = SystemTime::now();
    let lost = compare_all(second, &mut histories, |_| now)?;
    Ok(vec![
        Fact::of(TAKE_OVER, "took", took, "s for ten volumes", 5.0),
        Fact::of(TAKE_OVER, "wrong", lost.wrong as f64, "blocks", 0.0),
        Fact::of(TAKE_OVER, "lost", lost.untold as f64, "acknowledged writes", 0.0),
    ])
}

/// A promotion where nearly all of a transfer was fed beyond the point that it shows.
pub(super) fn fed_beyond(two: &Two<'_>) -> Result<Vec<Fact>, Error> {
    let socket = two.product.volume_with("beyond", crate::Class::Cache, super::LONG_BYTES, 2)?;
    let limit = ["--bandwidth-limit", "128MiB", "--compression", "none"];
    two.enable("beyond", &limit)?;
    let mut generator = load::Generator::connect(&socket)?;
    generator.fill(1 << 20)?;
    let nearly_all = super::LONG_BYTES - (super::LONG_BYTES >> 3);
    eventually("nearly all is fed", || {
        Ok(two.taken_bytes("beyond").filter(|taken| *taken >= nearly_all).map(drop))
    })?;
    let first = Side { two, is_second: false, published: None };
    let second = first.other();
    let away = first.lose()?;
    drop(generator);
    eventually("the other cluster is silent", || {
        let text = two.second(&["mirror", "status", "beyond"]).unwrap_or_default();
        Ok(text.contains("silent").then_some(()))
    })?;
    let began = Instant::now();
    second.command(&["mirror", "promote", "beyond", "--force"])?;
    let took = began.elapsed().as_secs_f64();
    away.into_iter().try_for_each(Away::give_back)?;
    Ok(vec![Fact::of(super::BEYOND, "promote", took, "s", 5.0)])
}

pub(super) fn failovers(two: &Two<'_>) -> Result<Vec<Fact>, Error> {
    let mut side = Side { two, is_second: false, published: None };
    make_groups(two, GROUPS, &[])?;
    let mut histories: Vec<History> = (0..GROUPS).map(|_| History::default()).collect();
    let (mut all, mut promotions) = (Compared::default(), Vec::new());
    let mut random = two.seed();
    let rounds = two.failovers;
    for round in 1..=rounds {
        let away = while_writing(side, &mut histories, || lose_after_kills(side, &mut random))?;
        let other = side.other();
        let told = silent(other, GROUPS)?;
        let began = Instant::now();
        for group in 0..GROUPS {
            other.command(&["mirror", "promote", &group_name(group), "--force"])?;
            if group + 1 == TIMED {
                promotions.push(began.elapsed().as_secs_f64());
            }
        }
        let found = compare_all(other, &mut histories, |group| told[group])?;
        eprintln!(
            "failover {round} of {rounds}: {} blocks wrong, {} writes untold",
            found.wrong, found.untold
        );
        all.wrong += found.wrong;
        all.untold += found.untold;
        away.into_iter().try_for_each(Away::give_back)?;
        come_back(side, GROUPS)?;
        side = other;
    }
    Ok(vec![
        Fact::of(FAILOVERS, "wrong", all.wrong as f64, "blocks", 0.0),
        Fact::of(FAILOVERS, "untold", all.untold as f64, "writes lost", 0.0),
        Fact::of(FAILOVERS, "promote", median(promotions), "s for ten volumes", 3.0),
    ])
}

/// Kills processes of both sides for a while, and then the side.
pub(super) fn lose_after_kills(side: Side<'_>, random: &mut u64) -> Result<Vec<Away>, Error> {
    kill_for_a_while(side, random);
    side.lose()
}

/// Kills processes of both sides, one after the other.
pub(super) fn kill_for_a_while(side: Side<'_>, random: &mut u64) {
    let end = Instant::now() + WRITES_FOR;
    while Instant::now() < end {
        std::thread::sleep(KILL_EVERY);
        let draw = load::next(random) as usize;
        let of = if draw.is_multiple_of(2) { side } else { side.other() };
        let pids = of.pids_of(KILLED[draw / 2 % KILLED.len()]);
        if let Some(pid) = pids.get(draw / 16 % pids.len().max(1)) {
            usage::end(&[*pid]);
        }
    }
}

/// The time that is told of each group, once the other side counts as silent for it.
pub(super) fn silent(side: Side<'_>, groups: usize) -> Result<Vec<SystemTime>, Error> {
    let mut told = Vec::new();
    for group in 0..groups {
        told.push(eventually("the other cluster is silent", || {
            let Ok(status) = side.status(group) else { return Ok(None) };
            let is_silent = status["message"].as_str().is_some_and(|text| text.contains("silent"));
            // The lag is by an estimate of the other side's clock, and is no measure.
            let told = status["syncedAt"].as_str().and_then(|at| at.parse::<Timestamp>().ok());
            let told = told.and_then(|at| SystemTime::try_from(at).ok());
            Ok(told.filter(|_| is_silent))
        })?);
    }
    Ok(told)
}

/// A side that was lost comes back, and follows as a copy.
pub(super) fn come_back(side: Side<'_>, groups: usize) -> Result<(), Error> {
    for group in 0..groups {
        let name = group_name(group);
        for member in 0..MEMBERS {
            // It was attached when the side was lost.
            let volume = self::name(group, member);
            eventually("a volume is detached", || {
                Ok(side.command(&["volume", "detach", &volume]).ok())
            })?;
        }
        eventually("both sides have met", || {
            let Ok(status) = side.status(group) else { return Ok(None) };
            let text = status["message"].as_str().unwrap_or_default().to_owned();
            let has_met = text.contains("split brain") || status["role"] == "diverged";
            Ok((has_met && side.command(&["mirror", "demote", &name]).is_ok()).then_some(()))
        })?;
        eventually("the lost side has diverged, or follows", || {
            let Ok(status) = side.status(group) else { return Ok(None) };
            if status["role"] == "diverged" {
                let _ = side.command(&["mirror", "resync", &name, "--force"]);
            }
            Ok((status["role"] == "secondary").then_some(()))
        })?;
    }
    let began = Instant::now();
    for group in 0..groups {
        let followed = eventually("the lost side has a point of after it came back", || {
            let Ok(status) = side.other().status(group) else { return Ok(None) };
            let lag_ms = status["lagMs"].as_u64().map(u128::from);
            Ok(lag_ms.filter(|lag_ms| *lag_ms < began.elapsed().as_millis()).map(drop))
        });
        if followed.is_err() {
            let (there, here) = (side.other().status(group)?, side.status(group)?);
            eprintln!("its primary: {there:#}\nthe lost side: {here:#}");
        }
        followed?;
    }
    Ok(())
}
