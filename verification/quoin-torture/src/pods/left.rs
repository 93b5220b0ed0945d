//! Whatever of volumes is on the host: by the kernel's tables, the directories of Quoin, and the word of the
//! node.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::csi::Volume;
use crate::cluster::{Cluster, NODE_HTTP};

/// Directory of stable names of devices.
const LINKS: &str = "/dev/quoin";

fn loops() -> Result<Vec<(PathBuf, String)>> {
    let mut loops = Vec::new();
    for entry in std::fs::read_dir("/sys/block").context("/sys/block")? {
        let entry = entry?;
        // Not there: it is no loop device, or has no file.
        if let Ok(file) = std::fs::read_to_string(entry.path().join("loop/backing_file")) {
            loops.push((Path::new("/dev").join(entry.file_name()), file.trim().to_owned()));
        }
    }
    Ok(loops)
}

/// The devices of a volume. `files`: the directory of the attach process's files.
pub fn loop_devices(files: &Path, id: &str) -> Vec<PathBuf> {
    let files = files.canonicalize().unwrap_or_else(|_| files.to_owned());
    let file = files.join(id).display().to_string();
    let all = loops().unwrap_or_default();
    all.into_iter().filter(|(_, of)| of.starts_with(&file)).map(|(device, _)| device).collect()
}

/// Mounts whose line of the kernel's table has one of these words.
fn mounts(words: &[String]) -> Result<Vec<String>> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
    let has = |line: &&str| words.iter().any(|word| line.contains(word.as_str()));
    Ok(mounts.lines().filter(has).map(|line| format!("mount {line}")).collect())
}

pub fn links(is_meant: impl Fn(&str, &Path) -> bool) -> Vec<String> {
    // Not there: nothing was ever attached.
    let entries = std::fs::read_dir(LINKS).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let name = entry.file_name().to_string_lossy().into_owned();
        is_meant(&name, &target).then(|| format!("link {name} to {}", target.display()))
    });
    named.collect()
}

/// Whatever is left of one volume.
pub fn of_volume(directory: &Path, volume: &Volume) -> Result<Vec<String>> {
    let paths = [&volume.staging, &volume.target].map(|path| path.display().to_string());
    let mut left = mounts(&[&paths[..], std::slice::from_ref(&volume.id)].concat())?;
    let devices = loop_devices(&directory.join("run/attach/volumes"), &volume.id);
    left.extend(devices.iter().map(|device| format!("device {}", device.display())));
    left.extend(links(|name, _| name == volume.name || name.contains(&volume.id)));
    Ok(left)
}

/// Whatever is left of any volume of the cluster, and what its node has to say.
pub fn of_all(cluster: &Cluster) -> Result<Vec<String>> {
    let directory = cluster.directory.display().to_string();
    let own = cluster.small_disk.as_ref().map(|disk| disk.mount.display().to_string());
    let is_own = |line: &String| own.as_ref().is_some_and(|own| line.contains(own.as_str()));
    let mut left = mounts(std::slice::from_ref(&directory))?;
    left.retain(|line| !is_own(line));
    let run = cluster.directory.join("run").display().to_string();
    let of_volumes = loops()?.into_iter().filter(|(_, file)| file.starts_with(&run));
    left.extend(of_volumes.map(|(device, file)| format!("device {} on {file}", device.display())));
    // A link leads to no device any more where its volume is gone.
    left.extend(links(|_, target| !target.exists()));
    let files = std::fs::read_dir(cluster.directory.join("run/attach/volumes"))?;
    left.extend(files.flatten().map(|file| format!("file {}", file.path().display())));
    let health = crate::turns::get(cluster, "node", NODE_HTTP, "/healthz")?;
    if !health.starts_with("HTTP/1.1 200") {
        left.push(format!("the node says: {}", health.lines().last().unwrap_or_default()));
    }
    Ok(left)
}

/// Returns whether the attach process has its holder, which it has sent all devices then.
pub fn is_held(cluster: &Cluster) -> Result<bool> {
    let metrics = crate::turns::get(cluster, "node", crate::cluster::ATTACH_HTTP, "/metrics")?;
    let up = metrics.lines().find(|line| line.starts_with("quoin_attach_holder_up"));
    Ok(up.context("quoin_attach_holder_up")?.ends_with(" 1"))
}
