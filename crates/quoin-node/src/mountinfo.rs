//! Parser of `/proc/self/mountinfo`: the mounts of this process's mount namespace.
//!
//! The kernel escapes space, tab, newline and backslash as octal (`\040`), and a path may contain
//! anything else, so lines are parsed as bytes. A line that cannot be parsed is an error of that
//! line only: one odd mount must not hide all others from the node.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    pub parent: u64,
    /// Device number of the mounted file system.
    pub major: u32,
    pub minor: u32,
    /// Part of that file system that is mounted here.
    pub root: PathBuf,
    pub mount_point: PathBuf,
    /// Peer group of this mount, where it is shared: what is mounted or unmounted below one of its mounts
    /// is below all of them.
    pub peer_group: Option<u64>,
    /// Peer groups from which it receives what is mounted and unmounted.
    pub masters: Vec<u64>,
    /// Options of this mount (`ro`, `noatime`, …).
    pub options: Vec<String>,
    pub fs_type: String,
    pub source: String,
    /// Options of the file system itself; with `ro` here it accepts no writes at all.
    pub super_options: Vec<String>,
}

impl Mount {
    /// Returns whether writes through this mount fail.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.options.iter().chain(&self.super_options).any(|option| option == "ro")
    }
}

/// Parses one line; `None` if it does not have the form that proc(5) gives.
#[must_use]
pub fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let device = fields.next()?;
    let colon = device.iter().position(|byte| *byte == b':')?;
    let major = u32::try_from(number(&device[..colon])?).ok()?;
    let minor = u32::try_from(number(&device[colon + 1..])?).ok()?;
    let root = path(fields.next()?)?;
    let mount_point = path(fields.next()?)?;
    let options = options(fields.next()?);
    // Any number of optional fields, ended by a single dash.
    let (mut peer_group, mut masters) = (None, Vec::new());
    loop {
        let field = fields.next()?;
        if field == b"-" {
            break;
        }
        if let Some(group) = field.strip_prefix(b"shared:") {
            peer_group = number(group);
        }
        for tag in [&b"master:"[..], b"propagate_from:"] {
            masters.extend(field.strip_prefix(tag).and_then(number));
        }
    }
    let fs_type = String::from_utf8_lossy(&unescape(fields.next()?)?).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)?).into_owned();
    let super_options = self::options(fields.next().unwrap_or_default());
    if !mount_point.is_absolute() {
        return None;
    }
    Some(Mount {
        id,
        parent,
        major,
        minor,
        root,
        mount_point,
        peer_group,
        masters,
        options,
        fs_type,
        source,
        super_options,
    })
}

/// Returns every mount that could be parsed, in the kernel's order (a later one on the same mount
/// point covers an earlier one).
#[must_use]
pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// Returns the mounts of this process's namespace.
///
/// # Errors
/// If `/proc/self/mountinfo` cannot be read.
pub fn read() -> Result<Vec<Mount>, Error> {
    let path = Path::new("/proc/self/mountinfo");
    let text = std::fs::read(path).map_err(Error::io("reading", path))?;
    Ok(parse(&text))
}

/// Returns the topmost mount at exactly this path.
#[must_use]
pub fn at<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().rev().find(|mount| mount.mount_point == path)
}

/// The mounts that the kernel takes away with one of this process's: those that were propagated to other
/// tables of mounts, as into a container, and go again by the same way.
pub struct Companions<'a> {
    parent: &'a Mount,
    place: PathBuf,
    /// Peer groups to which the parent's are propagated.
    groups: BTreeSet<u64>,
}

impl<'a> Companions<'a> {
    /// Returns those of a mount of the first table; `None`: it has none. Slaves of slaves are found as far as
    /// the tables show them.
    #[must_use]
    pub fn of(mount: &Mount, tables: &[&'a [Mount]]) -> Option<Self> {
        let parent = tables.first()?.iter().find(|parent| parent.id == mount.parent)?;
        let mut groups = BTreeSet::from([parent.peer_group?]);
        loop {
            let all = tables.iter().flat_map(|table| table.iter());
            let reached = all.filter(|one| one.masters.iter().any(|group| groups.contains(group)));
            let more: Vec<u64> = reached.filter_map(|one| one.peer_group).collect();
            let before = groups.len();
            groups.extend(more);
            if groups.len() == before {
                break;
            }
        }
        Some(Self { parent, place: place_in(mount, parent)?, groups })
    }

    /// Returns whether a mount of another table is one of them.
    #[must_use]
    pub fn have(&self, mount: &Mount, table: &[Mount]) -> bool {
        let Some(parent) = table.iter().find(|parent| parent.id == mount.parent) else {
            return false;
        };
        let receives = parent.peer_group.iter().chain(&parent.masters);
        let is_same_file_system =
            (parent.major, parent.minor) == (self.parent.major, self.parent.minor);
        is_same_file_system
            && receives.into_iter().any(|group| self.groups.contains(group))
            && place_in(mount, parent).as_ref() == Some(&self.place)
    }
}

/// Returns the place of a mount in the file system of its parent.
fn place_in(mount: &Mount, parent: &Mount) -> Option<PathBuf> {
    Some(parent.root.join(mount.mount_point.strip_prefix(&parent.mount_point).ok()?))
}

fn number(field: &[u8]) -> Option<u64> {
    // `str::parse` would accept a leading plus sign, which the kernel never writes.
    if field.is_empty() || !field.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn path(field: &[u8]) -> Option<PathBuf> {
    let bytes = unescape(field)?;
    (!bytes.is_empty()).then(|| PathBuf::from(OsString::from_vec(bytes)))
}

fn options(field: &[u8]) -> Vec<String> {
    field
        .split(|byte| *byte == b',')
        .filter(|option| !option.is_empty())
        .map(|option| String::from_utf8_lossy(option).into_owned())
        .collect()
}

/// Undoes the kernel's octal escapes; `None` for an escape that it never writes.
fn unescape(field: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'\\' {
            out.push(byte);
            rest = tail;
            continue;
        }
        let digits = tail.get(..3)?;
        if !digits.iter().all(|digit| (b'0'..=b'7').contains(digit)) {
            return None;
        }
        let value = digits.iter().fold(0_u32, |sum, digit| sum * 8 + u32::from(digit - b'0'));
        out.push(u8::try_from(value).ok()?);
        rest = &tail[3..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_with_optional_fields_and_escapes_is_parsed() {
        let line = br"36 35 98:0 /mnt\0401 /mnt\134two\011x rw,noatime shared:1 master:2 - ext3 /dev/ro\012ot ro,errors=continue";
        let mount = parse_line(line).unwrap();
        assert_eq!((mount.id, mount.parent, mount.major, mount.minor), (36, 35, 98, 0));
        assert_eq!(mount.root, Path::new("/mnt 1"));
        assert_eq!(mount.mount_point, Path::new("/mnt\\two\tx"));
        assert_eq!(mount.options, ["rw", "noatime"]);
        assert_eq!(mount.fs_type, "ext3");
        assert_eq!(mount.source, "/dev/ro\not");
        assert!(mount.is_read_only());
        assert_eq!((mount.peer_group, mount.masters), (Some(1), vec![2]));
    }

    #[test]
    fn a_line_without_optional_fields_or_super_options_is_parsed() {
        let mount = parse_line(b"1 0 0:1 / / rw - rootfs none rw").unwrap();
        assert!(!mount.is_read_only());
        assert!(parse_line(b"1 0 0:1 / / rw - rootfs none").is_some());
    }

    #[test]
    fn malformed_lines_are_not_parsed_as_mounts() {
        for line in [
            &b""[..],
            b"36",
            b"36 35 98:0 / /mnt rw",
            b"36 35 98:0 / /mnt rw shared:1",
            b"36 35 98:0 / /mnt rw -",
            b"36 35 98:0 / relative rw - ext4 /dev/x rw",
            b"36 35 98-0 / /mnt rw - ext4 /dev/x rw",
            b"36 35 98:99999999999 / /mnt rw - ext4 /dev/x rw",
            b"+6 35 98:0 / /mnt rw - ext4 /dev/x rw",
            b"99999999999999999999 35 98:0 / /mnt rw - ext4 /dev/x rw",
            b"36 35 98:0 / /mnt\\ rw - ext4 /dev/x rw",
            b"36 35 98:0 / /mnt\\777 rw - ext4 /dev/x rw",
            b"36 35 98:0 / /mnt\\09x rw - ext4 /dev/x rw",
        ] {
            assert_eq!(parse_line(line), None, "{}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn a_malformed_line_is_skipped_and_the_last_mount_of_a_path_counts() {
        let text = b"1 0 0:1 / /a rw - tmpfs one rw\ngarbage\n2 0 0:2 / /a rw - tmpfs two rw\n";
        let mounts = parse(text);
        assert_eq!(mounts.len(), 2);
        assert_eq!(at(&mounts, Path::new("/a")).unwrap().source, "two");
        assert_eq!(at(&mounts, Path::new("/a/b")), None);
    }

    #[test]
    fn the_mounts_of_this_process_are_read() {
        assert!(at(&read().unwrap(), Path::new("/")).is_some());
    }

    proptest! {
        #[test]
        fn no_input_makes_the_parser_panic(text in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&text);
        }

        #[test]
        fn every_path_that_the_kernel_escapes_is_decoded_to_the_original(
            name in proptest::collection::vec(1_u8.., 1..60),
        ) {
            let mut escaped = Vec::new();
            for byte in &name {
                match byte {
                    b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
                    other => escaped.push(*other),
                }
            }
            let line = [&b"1 0 0:1 / /"[..], &escaped, b" rw - ext4 /dev/x rw"].concat();
            let mut expected = vec![b'/'];
            expected.extend(&name);
            let mount = parse_line(&line).unwrap();
            prop_assert_eq!(mount.mount_point.into_os_string().into_vec(), expected);
        }
    }
}
