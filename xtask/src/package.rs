//! `cargo xtask package`: a Debian package with the binary, its systemd units, its configuration
//! and the documents.
//!
//! `dpkg-deb` is needed, which every Debian machine has, and `objcopy` of binutils, without which none
//! links a binary. The package depends on the C library that the binary was linked with, as the binary
//! itself names it. Debug symbols are a package of their own.

use crate::run;
use anyhow::{Context, Result, bail};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Options {
    /// Take this binary instead of building one in release.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// The directory that the package is written to [default: `package` in the target directory].
    #[arg(long, value_name = "DIRECTORY")]
    output: Option<PathBuf>,
    /// The revision of the package behind the version, as in 0.1.0-2.
    #[arg(long, default_value_t = 1)]
    revision: u32,
}

/// A file of the package: its place in the tree, its place on the host, and its mode.
struct Item {
    from: PathBuf,
    to: String,
    mode: u32,
}

/// Files that users edit: dpkg asks before it replaces a changed one.
const CONFIGURATION: &str = "/etc/quoin/controller.conf";

pub fn run(options: &Options) -> Result<()> {
    let root = run::workspace_root();
    let binary = match &options.binary {
        Some(binary) => binary.clone(),
        None => run::release_binary("quoin", "quoin")?,
    };
    let output = match &options.output {
        Some(output) => output.clone(),
        None => run::target_directory()?.join("package"),
    };
    let version = format!("{}-{}", env!("CARGO_PKG_VERSION"), options.revision);
    let architecture = stdout(Command::new("dpkg").arg("--print-architecture"))?;
    let name = format!("quoin_{version}_{}", architecture.trim());
    let debug = format!("quoin-dbgsym_{version}_{}", architecture.trim());
    let staging = output.join(&name);
    for old in [&staging, &output.join(&debug)] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("clear {}", old.display()))?;
        }
    }
    for item in items(&root, &binary)? {
        place(&staging, &item)?;
    }
    strip(&binary, &staging.join("usr/bin/quoin"), &output.join(&debug).join(DEBUG_FILE))?;
    let pages = stdout(Command::new(&binary).args(["manual", "--list"]))?;
    for group in pages.lines() {
        let page = stdout(Command::new(&binary).args(["manual", group]))?;
        write(&staging.join(format!("usr/share/man/man1/quoin-{group}.1")), &page, 0o644)?;
    }
    let page = stdout(Command::new(&binary).arg("manual"))?;
    write(&staging.join("usr/share/man/man1/quoin.1"), &page, 0o644)?;
    let completion = stdout(Command::new(&binary).args(["completion", "bash"]))?;
    write(&staging.join("usr/share/bash-completion/completions/quoin"), &completion, 0o644)?;
    let content = fs::read(&binary).with_context(|| format!("read {}", binary.display()))?;
    let libc = libc_version(&content).context("the binary names no version of the C library")?;
    let control = format!(
        "Package: quoin\nVersion: {version}\nArchitecture: {}\nMaintainer: Quoin maintainers \
         <maintainers@quoin.io>\nDepends: libc6 (>= {libc}), libgcc-s1, e2fsprogs, mount, \
         util-linux\nRecommends: xfsprogs\nSection: admin\nPriority: optional\n\
         Description: replicated block storage for containers and hosts\n \
         Volumes are kept as several replicas on several hosts. A write is acknowledged once a\n \
         majority holds it. One binary has all parts: controller, pools, targets, CSI.\n",
        architecture.trim()
    );
    write(&staging.join("DEBIAN/control"), &control, 0o644)?;
    write(&staging.join("DEBIAN/conffiles"), &format!("{CONFIGURATION}\n"), 0o644)?;
    let control = format!(
        "Package: quoin-dbgsym\nVersion: {version}\nArchitecture: {}\nMaintainer: Quoin maintainers \
         <maintainers@quoin.io>\nDepends: quoin (= {version})\nSection: debug\nPriority: optional\n\
         Description: debug symbols of quoin\n They give names and lines to what a debugger or perf \
         shows.\n",
        architecture.trim()
    );
    write(&output.join(&debug).join("DEBIAN/control"), &control, 0o644)?;
    build(&output, &debug)?;
    println!("{}", build(&output, &name)?.display());
    Ok(())
}

/// Builds a package of a staging directory, and removes that.
fn build(output: &Path, name: &str) -> Result<PathBuf> {
    let (staging, package) = (output.join(name), output.join(format!("{name}.deb")));
    let mut build = Command::new("dpkg-deb");
    build.args(["-Zgzip", "--build", "--root-owner-group"]).arg(&staging).arg(&package);
    stdout(&mut build)?;
    fs::remove_dir_all(&staging).with_context(|| format!("clear {}", staging.display()))?;
    Ok(package)
}

/// The place where debuggers look for the symbols of `/usr/bin/quoin`.
const DEBUG_FILE: &str = "usr/lib/debug/usr/bin/quoin.debug";

/// Puts a binary's symbols into a file of their own, and the binary without them at `stripped`.
fn strip(binary: &Path, stripped: &Path, symbols: &Path) -> Result<()> {
    make_parent(symbols)?;
    stdout(Command::new("objcopy").arg("--only-keep-debug").arg(binary).arg(symbols))?;
    fs::set_permissions(symbols, Permissions::from_mode(0o644))
        .with_context(|| format!("set the mode of {}", symbols.display()))?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(symbols);
    stdout(Command::new("objcopy").arg("--strip-unneeded").arg(link).arg(binary).arg(stripped))?;
    Ok(())
}

/// Returns all files that are copied from the tree unchanged.
fn items(root: &Path, binary: &Path) -> Result<Vec<Item>> {
    let item = |from: PathBuf, to: String, mode| Item { from, to, mode };
    let packaging = root.join("packaging");
    let mut items = vec![item(binary.into(), "usr/bin/quoin".into(), 0o755)];
    for unit in names_in(&packaging.join("systemd"))? {
        let from = packaging.join("systemd").join(&unit);
        items.push(item(from, format!("lib/systemd/system/{unit}"), 0o644));
    }
    for generator in names_in(&packaging.join("systemd-generators"))? {
        let from = packaging.join("systemd-generators").join(&generator);
        items.push(item(from, format!("lib/systemd/system-generators/{generator}"), 0o755));
    }
    for rules in names_in(&packaging.join("udev"))? {
        let from = packaging.join("udev").join(&rules);
        items.push(item(from, format!("lib/udev/rules.d/{rules}"), 0o644));
    }
    for rules in names_in(&packaging.join("prometheus"))? {
        let from = packaging.join("prometheus").join(&rules);
        items.push(item(from, format!("usr/share/doc/quoin/prometheus/{rules}"), 0o644));
    }
    for script in names_in(&packaging.join("debian"))? {
        let from = packaging.join("debian").join(&script);
        items.push(item(from, format!("DEBIAN/{script}"), 0o755));
    }
    for file in names_in(&packaging.join("etc"))? {
        let from = packaging.join("etc").join(&file);
        let to = match file.ends_with(".example") {
            true => format!("usr/share/doc/quoin/{file}"),
            false => format!("etc/quoin/{file}"),
        };
        items.push(item(from, to, 0o644));
    }
    for page in names_in(&root.join("docs"))?.iter().filter(|name| name.ends_with(".md")) {
        items.push(item(
            root.join("docs").join(page),
            format!("usr/share/doc/quoin/{page}"),
            0o644,
        ));
    }
    for (file, to) in
        [("LICENSE", "copyright"), ("README.md", "README.md"), ("CHANGELOG.md", "CHANGELOG.md")]
    {
        items.push(item(root.join(file), format!("usr/share/doc/quoin/{to}"), 0o644));
    }
    Ok(items)
}

fn names_in(directory: &Path) -> Result<Vec<String>> {
    let shown = directory.display();
    let entries = fs::read_dir(directory).with_context(|| format!("list {shown}"))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names: Vec<_> =
        names.collect::<std::io::Result<_>>().with_context(|| format!("list {shown}"))?;
    names.sort_unstable();
    Ok(names)
}

fn place(staging: &Path, item: &Item) -> Result<()> {
    let to = staging.join(&item.to);
    make_parent(&to)?;
    fs::copy(&item.from, &to)
        .with_context(|| format!("copy {} to {}", item.from.display(), to.display()))?;
    fs::set_permissions(&to, Permissions::from_mode(item.mode))
        .with_context(|| format!("set the mode of {}", to.display()))
}

fn write(to: &Path, content: &str, mode: u32) -> Result<()> {
    make_parent(to)?;
    fs::write(to, content).with_context(|| format!("write {}", to.display()))?;
    fs::set_permissions(to, Permissions::from_mode(mode))
        .with_context(|| format!("set the mode of {}", to.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().context("a file lies in a directory")?;
    fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))
}

fn stdout(command: &mut Command) -> Result<String> {
    let shown = run::show(command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the newest version of the C library that a binary requires: symbols carry it as
/// `GLIBC_2.36`.
fn libc_version(binary: &[u8]) -> Option<String> {
    const MARK: &[u8] = b"GLIBC_2.";
    let starts = (0..binary.len().saturating_sub(MARK.len()))
        .filter(|start| binary[*start..].starts_with(MARK));
    let minors = starts.filter_map(|start| {
        let digits = binary[start + MARK.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        let digits: Vec<u8> = digits.copied().take(4).collect();
        String::from_utf8(digits).ok()?.parse::<u32>().ok()
    });
    minors.max().map(|minor| format!("2.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_the_c_library_that_a_binary_names_is_found() {
        let binary = b"\0GLIBC_2.2.5\0GLIBC_2.34\0xGLIBC_2.9\0GLIBC_2.\0GLIBC_PRIVATE";
        assert_eq!(libc_version(binary).as_deref(), Some("2.34"));
        assert_eq!(libc_version(b"nothing"), None);
    }

    #[test]
    fn every_unit_waits_for_its_configuration_and_starts_with_the_target_of_the_host() {
        let units = run::workspace_root().join("packaging/systemd");
        for name in names_in(&units).unwrap() {
            let text = fs::read_to_string(units.join(&name)).unwrap();
            if name == "quoin.target" {
                continue;
            }
            assert!(text.contains("\nConditionPathExists="), "{name} starts on every host");
            assert!(text.contains("\nWantedBy=quoin.target"), "{name} is started by nothing");
            // systemd stops restarting a unit that failed five times within ten seconds, by
            // default.
            assert!(text.contains("\nStartLimitIntervalSec=0"), "{name} is given up");
            let is_volume = name.starts_with("quoin-volume@");
            let restart = if is_volume { "\nRestart=on-failure" } else { "\nRestart=always" };
            assert!(text.contains(restart), "{name} stays down");
            // Units that keep devices and mounts are not stopped with the rest.
            let is_part = !is_volume && name != "quoin-attach-holder.service";
            // A service gains no rights by programs that it starts.
            let is_confined = text.contains("\nNoNewPrivileges=yes");
            assert!(is_volume || is_confined, "{name} may gain rights");
            // Mounts of a service with a mount table of its own stay in that table.
            let mounts = name.contains("attach") || name.contains("node") || is_volume;
            assert!(!(mounts && text.contains("\nProtect")), "{name} mounts for itself alone");
            assert_eq!(text.contains("\nPartOf=quoin.target"), is_part, "{name}");
        }
    }
}
