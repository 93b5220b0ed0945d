//! Requested use of a volume: raw or mounted, access mode, number of targets.
//!
//! Two faults of a capability are distinguished. It is *malformed* (no access type, no mode): the
//! code is always 3. Or it is *unsupported*, and each RPC has a code of its own for that. All modes
//! are served but those by which a file system would be written on one node and mounted on others:
//! ext4 and xfs bear one node alone, or readers alone. These are refused when the volume is created,
//! not when a pod waits for it.

use quoin_api::csi::VolumeCapability;
use quoin_api::csi::volume_capability::AccessType;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_node::{Access, FileSystem};
use tonic::Status;

use crate::refusal::{self, invalid};

const MOUNT_FLAGS_BYTES: usize = 4096;

/// A well-formed capability that Quoin serves.
#[derive(Clone, PartialEq, Eq)]
pub struct Capability {
    wanted: Wanted,
    mode: Mode,
}

#[derive(Clone, PartialEq, Eq)]
enum Wanted {
    Block,
    Mount { file_system: Option<FileSystem>, flags: Vec<String>, group: Option<u32> },
}

/// Why a capability was refused.
#[derive(Debug)]
pub enum CapabilityError {
    /// The capability is incomplete.
    Malformed(Status),
    /// The capability is complete and not served; the reason lists what is.
    Unsupported(String),
}

impl CapabilityError {
    /// Returns the refusal of RPCs whose tables call both invalid.
    pub fn invalid(self) -> Status {
        match self {
            Self::Malformed(status) => status,
            Self::Unsupported(why) => refusal::unsupported_capability(&why),
        }
    }

    /// Returns the refusal of staging and publishing, where an unsupported capability is a failed
    /// precondition.
    pub fn into_precondition_status(self) -> Status {
        match self {
            Self::Malformed(status) => status,
            Self::Unsupported(why) => crate::refusal::exceeds_capabilities(&why),
        }
    }
}

impl Capability {
    /// Reads a capability from a request's field.
    ///
    /// # Errors
    /// [`CapabilityError`].
    pub fn read(field: &str, given: Option<&VolumeCapability>) -> Result<Self, CapabilityError> {
        let malformed = |why: &str| CapabilityError::Malformed(invalid(field, why));
        let given =
            given.ok_or_else(|| CapabilityError::Malformed(crate::refusal::missing(field)))?;
        let access_type =
            given.access_type.as_ref().ok_or_else(|| malformed("has neither block nor mount"))?;
        let access_mode =
            given.access_mode.as_ref().ok_or_else(|| malformed("has no access_mode"))?;
        let mode = Mode::try_from(access_mode.mode)
            .ok()
            .filter(|mode| *mode != Mode::Unknown)
            .ok_or_else(|| malformed("has an access_mode that is unknown"))?;
        let wanted = match access_type {
            AccessType::Block(_) => Wanted::Block,
            AccessType::Mount(mount) => {
                let bytes: usize = mount.mount_flags.iter().map(String::len).sum();
                if bytes > MOUNT_FLAGS_BYTES {
                    return Err(malformed("has more than 4 KiB of mount_flags"));
                }
                quoin_node::parse_mount_flags(&mount.mount_flags)
                    .map_err(|why| malformed(&format!("has mount_flags of which {why}")))?;
                if mount.fs_type.len() > 128 || mount.volume_mount_group.len() > 128 {
                    return Err(malformed("has a field of more than 128 bytes"));
                }
                let group = match mount.volume_mount_group.as_str() {
                    "" => None,
                    text => Some(group_id(text).ok_or_else(|| {
                        malformed("has a volume_mount_group that is not the number of a group")
                    })?),
                };
                let file_system = match mount.fs_type.as_str() {
                    "" => None,
                    text => Some(text.parse().map_err(CapabilityError::Unsupported)?),
                };
                Wanted::Mount { file_system, flags: mount.mount_flags.clone(), group }
            }
        };
        let is_block = wanted == Wanted::Block;
        if matches!(mode, Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter) && !is_block {
            return Err(CapabilityError::Unsupported(format!(
                "access mode {} is not supported for a mounted volume: a file system that one node \
                 writes and others mount is damaged; take access type block, MULTI_NODE_READER_ONLY, \
                 or a SINGLE_NODE mode",
                mode.as_str_name()
            )));
        }
        Ok(Self { wanted, mode })
    }

    /// Returns the access mode's name.
    pub fn mode_name(&self) -> &'static str {
        self.mode.as_str_name()
    }

    /// Returns whether writes are forbidden.
    pub fn is_reader_only(&self) -> bool {
        matches!(self.mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly)
    }

    /// Returns how several nodes share the volume, in the control plane's words; empty: one node alone
    /// has it.
    pub fn sharing(&self) -> &'static str {
        match self.mode {
            Mode::MultiNodeReaderOnly => "read-only",
            Mode::MultiNodeSingleWriter => "single-writer",
            Mode::MultiNodeMultiWriter => "multi-writer",
            _ => "",
        }
    }

    /// Returns whether several target paths on one node are allowed.
    pub fn several_targets(&self) -> bool {
        self.mode == Mode::SingleNodeMultiWriter || !self.sharing().is_empty()
    }

    pub fn is_block(&self) -> bool {
        self.wanted == Wanted::Block
    }

    /// Returns the file system that the caller named.
    pub fn file_system(&self) -> Option<FileSystem> {
        match &self.wanted {
            Wanted::Block => None,
            Wanted::Mount { file_system, .. } => *file_system,
        }
    }

    /// Returns the access for the node, with the volume's own file system where the caller named
    /// none.
    pub fn access(&self, default: FileSystem) -> Access {
        match &self.wanted {
            Wanted::Block => Access::Block,
            Wanted::Mount { file_system, flags, .. } => {
                Access::Mount { file_system: file_system.unwrap_or(default), flags: flags.clone() }
            }
        }
    }

    /// Returns the group that the root directory of the file system is to belong to.
    pub fn group(&self) -> Option<u32> {
        match &self.wanted {
            Wanted::Block => None,
            Wanted::Mount { group, .. } => *group,
        }
    }

    /// Returns the text by which publications are compared: access type, mode and readonly. It has
    /// no mount flags, as it is stored and shown.
    pub fn usage(&self, readonly: bool) -> String {
        let access = if self.is_block() { "block" } else { "mount" };
        let readonly = if readonly { " readonly" } else { "" };
        format!("{access} {}{readonly}", self.mode_name())
    }
}

/// Parses the number of a group; the largest one stands for none in system calls.
fn group_id(text: &str) -> Option<u32> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|group| is_number && *group != u32::MAX)
}

/// Reads a list that may not be empty.
///
/// # Errors
/// As [`Capability::read`].
pub fn read_all(given: &[VolumeCapability]) -> Result<Vec<Capability>, CapabilityError> {
    if given.is_empty() {
        return Err(CapabilityError::Malformed(crate::refusal::missing("volume_capabilities")));
    }
    // A malformed capability takes precedence over an unsupported one before it.
    let mut unsupported = None;
    let mut capabilities = Vec::with_capacity(given.len());
    for one in given {
        match Capability::read("volume_capabilities", Some(one)) {
            Ok(capability) => capabilities.push(capability),
            Err(trouble @ CapabilityError::Malformed(_)) => return Err(trouble),
            Err(trouble) => unsupported = unsupported.or(Some(trouble)),
        }
    }
    match unsupported {
        Some(trouble) => Err(trouble),
        None => Ok(capabilities),
    }
}

#[cfg(test)]
mod tests {
    use quoin_api::csi::volume_capability::{AccessMode, BlockVolume, MountVolume};

    use super::*;

    fn given(access_type: Option<AccessType>, mode: i32) -> VolumeCapability {
        VolumeCapability { access_type, access_mode: Some(AccessMode { mode }) }
    }
    fn block() -> Option<AccessType> {
        Some(AccessType::Block(BlockVolume {}))
    }
    fn mount(fs_type: &str, flags: &[&str]) -> Option<AccessType> {
        Some(AccessType::Mount(MountVolume {
            fs_type: fs_type.to_owned(),
            mount_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            volume_mount_group: String::new(),
        }))
    }
    fn malformed(given: &VolumeCapability) -> bool {
        matches!(Capability::read("c", Some(given)), Err(CapabilityError::Malformed(_)))
    }
    fn unsupported(given: &VolumeCapability) -> bool {
        matches!(Capability::read("c", Some(given)), Err(CapabilityError::Unsupported(_)))
    }

    /// Proves CSI-VOLCAP-09, CSI-VOLCAP-10, CSI-ACCESSMODE-01: the rule that all RPCs share.
    #[test]
    fn a_capability_without_type_or_mode_is_malformed() {
        assert!(malformed(&given(None, 1)));
        assert!(malformed(&VolumeCapability { access_type: block(), access_mode: None }));
        for mode in [0, 8, -1, i32::MAX] {
            assert!(malformed(&given(block(), mode)));
        }
        assert!(matches!(Capability::read("c", None), Err(CapabilityError::Malformed(_))));
    }

    /// Proves CSI-VOLCAP-04: 4 KiB of flags are the most.
    #[test]
    fn more_than_4_kib_of_mount_flags_are_malformed() {
        assert!(!malformed(&given(mount("", &["x".repeat(4000).as_str()]), 1)));
        let (one, two) = ("x".repeat(4000), "y".repeat(97));
        assert!(malformed(&given(mount("", &[&one, &two]), 1)));
    }

    #[test]
    fn the_texts_of_a_mount_are_taken_at_their_limits_and_no_longer() {
        // Two flags, as their sum counts; a comma is added between them for the kernel.
        for (bytes, is_taken) in [(4093, true), (4094, true), (4095, false), (4097, false)] {
            let (one, two) = ("x".repeat(1000), "y".repeat(bytes - 1000));
            let given = given(mount("", &[&one, &two]), 1);
            assert_eq!(!malformed(&given), is_taken, "flags of {bytes} bytes");
        }
        // Flags of the kernel take no room among the options.
        for (last, is_taken) in [("rw", true), ("rw,", false)] {
            let mut flags = vec!["ro"; 2047];
            flags.push(last);
            assert_eq!(!malformed(&given(mount("", &flags), 1)), is_taken, "{last}");
        }
        let with = |fs_type: &str, group: &str| {
            let mount = MountVolume {
                fs_type: fs_type.to_owned(),
                mount_flags: Vec::new(),
                volume_mount_group: group.to_owned(),
            };
            given(Some(AccessType::Mount(mount)), 1)
        };
        for bytes in [127, 128] {
            assert!(unsupported(&with(&"x".repeat(bytes), "")), "it is none that is served");
            let group = format!("{}7", "0".repeat(bytes - 1));
            assert!(!malformed(&with("", &group)), "a group of {bytes} digits");
        }
        assert!(malformed(&with(&"x".repeat(129), "")));
        assert!(malformed(&with("", &format!("{}7", "0".repeat(128)))));
    }

    /// Every mode with every access type: what else follows of it.
    #[test]
    fn every_mode_has_its_own_sharing_targets_and_right_to_write() {
        use Mode::{
            MultiNodeMultiWriter, MultiNodeReaderOnly, MultiNodeSingleWriter,
            SingleNodeMultiWriter, SingleNodeReaderOnly, SingleNodeSingleWriter, SingleNodeWriter,
        };
        for (mode, reads_only, sharing, several, of_mounts) in [
            (SingleNodeWriter, false, "", false, true),
            (SingleNodeReaderOnly, true, "", false, true),
            (MultiNodeReaderOnly, true, "read-only", true, true),
            (MultiNodeSingleWriter, false, "single-writer", true, false),
            (MultiNodeMultiWriter, false, "multi-writer", true, false),
            (SingleNodeSingleWriter, false, "", false, true),
            (SingleNodeMultiWriter, false, "", true, true),
        ] {
            for (access_type, is_block) in [(block(), true), (mount("xfs", &["noatime"]), false)] {
                let read = Capability::read("c", Some(&given(access_type, mode.into())));
                let Ok(read) = read else {
                    assert!(!is_block && !of_mounts, "{mode:?}");
                    continue;
                };
                assert!(is_block || of_mounts, "{mode:?}");
                let found = (read.is_reader_only(), read.sharing(), read.several_targets());
                assert_eq!(found, (reads_only, sharing, several), "{mode:?}");
                assert_eq!((read.is_block(), read.mode_name()), (is_block, mode.as_str_name()));
                let access = if is_block { "block" } else { "mount" };
                assert_eq!(read.usage(false), format!("{access} {}", mode.as_str_name()));
                let file_system = (!is_block).then_some(FileSystem::Xfs);
                assert_eq!((read.file_system(), read.group()), (file_system, None));
                let flags = vec!["noatime".to_owned()];
                let wanted = match is_block {
                    true => Access::Block,
                    false => Access::Mount { file_system: FileSystem::Xfs, flags },
                };
                assert_eq!(read.access(FileSystem::Ext4), wanted);
            }
        }
    }

    #[test]
    fn an_unserved_capability_is_unsupported_and_the_error_names_the_served_ones() {
        for mode in [4, 5] {
            assert!(unsupported(&given(mount("", &[]), mode)));
        }
        let Err(CapabilityError::Unsupported(why)) =
            Capability::read("c", Some(&given(mount("btrfs", &[]), 1)))
        else {
            panic!("btrfs was accepted");
        };
        assert!(why.contains("ext4") && why.contains("xfs"), "{why}");
        for mode in [1, 2, 3, 6, 7] {
            assert!(Capability::read("c", Some(&given(mount("xfs", &[]), mode))).is_ok());
        }
        for mode in 1..=7 {
            assert!(Capability::read("c", Some(&given(block(), mode))).is_ok());
        }
    }

    #[test]
    fn a_malformed_capability_in_a_list_outranks_an_unsupported_one() {
        let list = [given(mount("", &[]), 5), given(None, 1)];
        assert!(matches!(read_all(&list), Err(CapabilityError::Malformed(_))));
        assert!(matches!(read_all(&list[..1]), Err(CapabilityError::Unsupported(_))));
        assert!(matches!(read_all(&[]), Err(CapabilityError::Malformed(_))));
    }

    /// Proves CSI-VOLCAP-03: flags appear neither in the stored usage nor in a refusal.
    #[test]
    fn mount_flags_are_neither_in_the_usage_nor_in_an_error() {
        let taken = Capability::read("c", Some(&given(mount("", &["password=hunter2"]), 1)));
        assert_eq!(taken.ok().unwrap().usage(true), "mount SINGLE_NODE_WRITER readonly");
        let refused = Capability::read("c", Some(&given(mount("", &["loop,password=hunter2"]), 1)));
        let Err(CapabilityError::Malformed(status)) = refused else {
            panic!("the flag loop was accepted")
        };
        assert!(!status.message().contains("hunter2"));
    }

    #[test]
    fn a_mount_group_is_the_number_of_a_group() {
        let with = |group: &str| {
            let Some(AccessType::Mount(mount)) = mount("", &[]) else { panic!() };
            let group = group.to_owned();
            let mount = MountVolume { volume_mount_group: group, ..mount };
            given(Some(AccessType::Mount(mount)), 1)
        };
        let group = |text| Capability::read("c", Some(&with(text))).ok().unwrap().group();
        assert_eq!((group(""), group("0"), group("4294967294")), (None, Some(0), Some(4294967294)));
        for wrong in ["staff", "-1", "+7", "4294967295", "1e3", " 7"] {
            assert!(malformed(&with(wrong)), "{wrong}");
        }
    }

    #[test]
    fn an_empty_file_system_type_means_the_default() {
        let plain = Capability::read("c", Some(&given(mount("", &[]), 1))).ok().unwrap();
        let Access::Mount { file_system, .. } = plain.access(FileSystem::Xfs) else { panic!() };
        assert_eq!(file_system, FileSystem::Xfs);
    }
}
