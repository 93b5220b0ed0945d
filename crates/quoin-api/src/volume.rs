//! The options of a volume: each has a type here, a field of [`VolumeOptions`] and a row of
//! [`OPTIONS`].
//!
//! The message [`VolumeSpec`] is a request: an option that is empty, 0 or unspecified was not
//! given. [`VolumeOptions`] is complete, with every default filled in; records hold it. The faces
//! (parameters of storage classes, documents, the command line) iterate over the table and have no
//! list of their own, so all of them know an added option.

mod replace_after;
mod written;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::control::{self, VolumeSpec};
pub use replace_after::{NotATime, ReplaceAfter, parse_time, write_time};

/// A word that is not among an option's values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotAChoice(String);

impl NotAChoice {
    fn new(given: &str, choices: &str) -> Self {
        let given: String = given.chars().take(40).collect();
        Self(format!("{given:?} is none of: {choices}"))
    }
}

impl fmt::Display for NotAChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Defines an option whose value is one of a few words; the first is the default.
macro_rules! choices {
    ($(#[$doc:meta])* $name:ident, $choices:literal: $($(#[$meaning:meta])* $choice:ident = $word:literal),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name {
            $($(#[$meaning])* $choice),+
        }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$choice),+];
            /// Values for refusals and help.
            const CHOICES: &str = $choices;

            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$choice => $word),+
                }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::ALL[0]
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = NotAChoice;

            fn from_str(text: &str) -> Result<Self, NotAChoice> {
                let found = Self::ALL.iter().copied().find(|choice| choice.as_str() == text);
                found.ok_or_else(|| NotAChoice::new(text, Self::CHOICES))
            }
        }
    };
}

choices!(
    /// Moment at which a replica holds a write.
    Durability, "cache | media":
    /// The replica's operating system has the write.
    Cache = "cache",
    /// The replica's medium has the write.
    Media = "media"
);
choices!(
    /// Failure domain that no two replicas of a volume may share.
    Spread, "host | pool | rack | zone":
    Host = "host",
    Pool = "pool",
    /// By the segment `quoin.io/rack` of pools.
    Rack = "rack",
    /// By the segment `quoin.io/zone` of pools.
    Zone = "zone"
);
choices!(
    /// Relation of a volume's replicas to the nodes that use it.
    Local, "any | preferred | pinned | required":
    /// Replicas are anywhere, and so are users.
    Any = "any",
    /// One replica is on the node that the volume is made for, where that has room.
    Preferred = "preferred",
    /// Replicas and users are in the topologies of the request.
    Pinned = "pinned",
    /// The volume is used on nodes that have a replica.
    Required = "required"
);
choices!(
    /// Behaviour of IO while there is no quorum.
    OnQuorumLoss, "wait | fail":
    Wait = "wait",
    Fail = "fail"
);
choices!(
    /// Behaviour of writes while the pools are full.
    OnFull, "wait | enospc":
    Wait = "wait",
    NoSpace = "enospc"
);
choices!(
    /// Condition under which a read may be answered.
    Reads, "leased | confirmed":
    /// Reads are answered while the target holds its lease.
    Leased = "leased",
    /// Reads are answered after a quorum confirmed that no other target serves.
    Confirmed = "confirmed"
);
choices!(
    /// The file system that a node makes where none is named.
    FileSystem, "ext4 | xfs":
    Ext4 = "ext4",
    Xfs = "xfs"
);
choices!(
    /// Way in which a node makes a block device.
    Frontend, "fuse | nbd":
    Fuse = "fuse",
    Nbd = "nbd"
);
choices!(
    /// The logical block of the block device.
    BlockSize, "512 | 4096":
    Bytes4096 = "4096",
    Bytes512 = "512"
);

impl Spread {
    /// Key of the segment that says which domain a pool is in, where it is one of topology.
    pub const fn topology_key(self) -> Option<&'static str> {
        match self {
            Self::Host | Self::Pool => None,
            Self::Rack => Some(crate::topology::RACK_KEY),
            Self::Zone => Some(crate::topology::ZONE_KEY),
        }
    }
}

impl Local {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl BlockSize {
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bytes4096 => 4096,
            Self::Bytes512 => 512,
        }
    }
}

/// The smallest limit of bytes a second: with less than a block a volume would seem to hang.
pub const BANDWIDTH_LIMIT_MIN: u64 = 4096;

/// A limit in a request that says that there is to be none; 0 says nothing.
pub const NO_LIMIT: u64 = u64::MAX;
/// Word for it.
const OFF: &str = "off";

/// The options of a volume, complete. Serialized in the form of the records.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeOptions {
    #[serde(with = "written::variant")]
    pub durability: Durability,
    #[serde(with = "written::variant")]
    pub spread: Spread,
    #[serde(with = "written::word")]
    pub on_quorum_loss: OnQuorumLoss,
    #[serde(with = "written::word")]
    pub on_full: OnFull,
    #[serde(with = "written::word")]
    pub reads: Reads,
    #[serde(with = "written::number")]
    pub block_size: BlockSize,
    /// `None`: the node's default.
    #[serde(with = "written::word_or_empty")]
    pub fs_type: Option<FileSystem>,
    /// `None`: the best that the node supports.
    #[serde(with = "written::word_or_empty")]
    pub frontend: Option<Frontend>,
    /// IOs a second; 0: no limit.
    #[serde(default)]
    pub iops_limit: u64,
    /// Bytes a second; 0: no limit.
    #[serde(default)]
    pub bandwidth_limit: u64,
    /// `None`: the cluster's.
    #[serde(default, with = "written::word_or_null")]
    pub replace_after: Option<ReplaceAfter>,
    #[serde(default, with = "written::word", skip_serializing_if = "Local::is_default")]
    pub local: Local,
}

/// A requested option that breaks its rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WrongOption {
    pub key: &'static str,
    pub rule: String,
}

impl VolumeOptions {
    /// Completes the requested options with defaults.
    ///
    /// # Errors
    /// The first option whose value is none of its choices.
    pub fn complete(asked: &VolumeSpec, spread: Spread) -> Result<Self, WrongOption> {
        // The row of each option checks its text, as in the faces.
        for option in &OPTIONS {
            if let Some(given) = option.given(asked) {
                let checked = option.set(&mut VolumeSpec::default(), &given);
                checked.map_err(|rule| WrongOption { key: option.key, rule })?;
            }
        }
        let size = |bytes: &u32| BlockSize::ALL.iter().copied().find(|s| s.bytes() == *bytes);
        let limit = |asked: u64| if asked == NO_LIMIT { 0 } else { asked };
        Ok(Self {
            durability: asked.durability().try_into().unwrap_or_default(),
            spread: asked.spread().try_into().unwrap_or(spread),
            on_quorum_loss: asked.on_quorum_loss.parse().unwrap_or_default(),
            on_full: asked.on_full.parse().unwrap_or_default(),
            reads: asked.reads.parse().unwrap_or_default(),
            block_size: Some(&asked.block_size).and_then(size).unwrap_or_default(),
            fs_type: asked.fs_type.parse().ok(),
            frontend: asked.frontend.parse().ok(),
            iops_limit: limit(asked.iops_limit),
            bandwidth_limit: limit(asked.bandwidth_limit),
            replace_after: asked.replace_after.parse().ok(),
            local: asked.local.parse().unwrap_or_default(),
        })
    }

    /// Writes all options into a message.
    pub fn write(&self, message: &mut VolumeSpec) {
        let or_empty = |word: Option<&str>| word.unwrap_or_default().to_owned();
        message.set_durability(self.durability.into());
        message.set_spread(self.spread.into());
        message.on_quorum_loss = self.on_quorum_loss.to_string();
        message.on_full = self.on_full.to_string();
        message.reads = self.reads.to_string();
        message.block_size = self.block_size.bytes();
        message.fs_type = or_empty(self.fs_type.map(FileSystem::as_str));
        message.frontend = or_empty(self.frontend.map(Frontend::as_str));
        message.iops_limit = self.iops_limit;
        message.bandwidth_limit = self.bandwidth_limit;
        message.replace_after =
            self.replace_after.map(|after| after.to_string()).unwrap_or_default();
        message.local = self.local.to_string();
    }
}

/// One change of an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Changed {
    pub key: &'static str,
    pub before: String,
    pub after: String,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} to {}", self.key, self.before, self.after)
    }
}

/// Returns the known word that is most like an unknown one; `None`: none is alike.
pub fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Bound on what is compared, whatever was sent.
    const LETTERS_MAX: usize = 64;
    let letters = |word: &str| -> Vec<char> {
        word.chars().flat_map(char::to_lowercase).take(LETTERS_MAX).collect()
    };
    let unknown = letters(unknown);
    let distance = |known: &str| {
        let known = letters(known);
        let mut row: Vec<usize> = (0..=known.len()).collect();
        for (i, one) in unknown.iter().enumerate() {
            let mut diagonal = std::mem::replace(&mut row[0], i + 1);
            for (j, other) in known.iter().enumerate() {
                let replaced = diagonal + usize::from(one != other);
                diagonal = row[j + 1];
                row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
            }
        }
        row[known.len()]
    };
    let all = known.into_iter().map(|known| (distance(known), known));
    // Half of the word may differ; beyond that, a suggestion is noise.
    let alike = |(distance, known): &(usize, &str)| 2 * distance <= known.chars().count();
    all.filter(alike).min_by_key(|(distance, _)| *distance).map(|(_, known)| known)
}

/// Kind of the values of an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// One of these words.
    Words(&'static str),
    /// A number of units a second, with its minimum.
    Rate { what: &'static str, least: u64 },
    /// A time, or off.
    Time,
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Words(words) => f.write_str(words),
            Self::Rate { what, least } => {
                write!(f, "a number of {what} a second, at least {least} | off")
            }
            Self::Time => f.write_str("a time, as in 90s, 10m or 2h | off"),
        }
    }
}

/// One option of a volume, as every face accepts and shows it.
pub struct VolumeOption {
    /// Name in documents, storage classes and refusals.
    pub key: &'static str,
    /// Other spellings that storage classes may use.
    pub aliases: &'static [&'static str],
    pub values: Values,
    /// Text of `--help`.
    pub help: &'static str,
    /// Shown value where the record names none.
    pub absent: &'static str,
    /// True if it can be changed while the volume exists.
    pub changes: bool,
    given: fn(&VolumeSpec) -> String,
    set: fn(&mut VolumeSpec, &str) -> Result<(), String>,
}

impl VolumeOption {
    /// Returns the value in a message; `None`: not given.
    pub fn given(&self, spec: &VolumeSpec) -> Option<String> {
        Some((self.given)(spec)).filter(|given| !given.is_empty() && given != "0")
    }

    /// Sets a value.
    ///
    /// # Errors
    /// The rule that it violates.
    pub fn set(&self, spec: &mut VolumeSpec, value: &str) -> Result<(), String> {
        (self.set)(spec, value)
    }

    /// Applies the options of a request that may change to complete ones. Returns them, and each
    /// change with the value before and after it.
    ///
    /// # Errors
    /// The first option whose value is none of its choices.
    pub fn change(
        asked: &VolumeSpec,
        options: &VolumeOptions,
    ) -> Result<(VolumeOptions, Vec<Changed>), WrongOption> {
        let (mut now, mut changes) = (options.clone(), Vec::new());
        for option in OPTIONS.iter().filter(|option| option.changes) {
            let Some(wanted) = option.given(asked) else { continue };
            let mut message = VolumeSpec::default();
            now.write(&mut message);
            let before = option.shown(&message);
            let taken = option.set(&mut message, &wanted);
            taken.map_err(|rule| WrongOption { key: option.key, rule })?;
            let next = VolumeOptions::complete(&message, now.spread)?;
            if next != now {
                next.write(&mut message);
                changes.push(Changed { key: option.key, before, after: option.shown(&message) });
                now = next;
            }
        }
        Ok((now, changes))
    }

    /// Returns a request in which the options that it leaves open have the values of another one.
    ///
    /// # Errors
    /// The first option whose value is none of its choices.
    pub fn fill_in(asked: &VolumeSpec, own: &VolumeSpec) -> Result<VolumeSpec, WrongOption> {
        let mut filled = asked.clone();
        for option in OPTIONS.iter().filter(|option| option.given(asked).is_none()) {
            if let Some(value) = option.given(own) {
                let taken = option.set(&mut filled, &value);
                taken.map_err(|rule| WrongOption { key: option.key, rule })?;
            }
        }
        Ok(filled)
    }

    /// Returns the option that may not change and that a request gives another value, with the
    /// value that the volume has.
    pub fn fixed(asked: &VolumeSpec, options: &VolumeOptions) -> Option<(&'static str, String)> {
        let mut has = VolumeSpec::default();
        options.write(&mut has);
        let differs = |option: &&Self| {
            let asked = option.given(asked);
            asked.is_some_and(|asked| asked != option.given(&has).unwrap_or_default())
        };
        let fixed = OPTIONS.iter().filter(|option| !option.changes).find(differs)?;
        Some((fixed.key, fixed.shown(&has)))
    }

    /// The value for people.
    fn shown(&self, spec: &VolumeSpec) -> String {
        self.given(spec).unwrap_or_else(|| self.absent.to_owned())
    }

    /// Returns the option of this key or alias.
    pub fn find(key: &str) -> Option<&'static Self> {
        OPTIONS.iter().find(|one| one.key == key || one.aliases.contains(&key))
    }
}

fn check<T: FromStr<Err: fmt::Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|rule: T::Err| rule.to_string())
}

fn checked<T: FromStr<Err: fmt::Display>>(text: &str) -> Result<String, String> {
    check::<T>(text).map(|_| text.to_owned())
}

/// Parses digits alone: `parse` accepts a leading plus sign, which no user means.
fn rate(text: &str, what: &'static str, least: u64) -> Result<u64, String> {
    if text == OFF {
        return Ok(NO_LIMIT);
    }
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| is_number && *number >= least);
    let given: String = text.chars().take(40).collect();
    number.ok_or_else(|| format!("{given:?} is not {}", Values::Rate { what, least }))
}

/// Writes a limit of a message.
fn limit(limit: u64) -> String {
    if limit == NO_LIMIT { OFF.to_owned() } else { limit.to_string() }
}

const IOS: &str = "IOs";
const BYTES: &str = "bytes";

/// All options, in the order in which they are shown.
pub static OPTIONS: [VolumeOption; 12] = [
    VolumeOption {
        key: "durability",
        aliases: &[],
        values: Values::Words(Durability::CHOICES),
        help: "When a write counts as held: by the operating systems of a majority, or on their media",
        absent: "",
        changes: true,
        given: |spec| {
            Durability::try_from(spec.durability()).map_or(String::new(), |one| one.to_string())
        },
        set: |spec, text| {
            spec.set_durability(check::<Durability>(text)?.into());
            Ok(())
        },
    },
    VolumeOption {
        key: "spread",
        aliases: &[],
        values: Values::Words(Spread::CHOICES),
        help: "What no two replicas may share [default: host; in `quoin dev`: pool]",
        absent: "",
        changes: false,
        given: |spec| Spread::try_from(spec.spread()).map_or(String::new(), |one| one.to_string()),
        set: |spec, text| {
            spec.set_spread(check::<Spread>(text)?.into());
            Ok(())
        },
    },
    VolumeOption {
        key: "onQuorumLoss",
        aliases: &[],
        values: Values::Words(OnQuorumLoss::CHOICES),
        help: "What IO does without a quorum",
        absent: "",
        changes: true,
        given: |spec| spec.on_quorum_loss.clone(),
        set: |spec, text| {
            spec.on_quorum_loss = checked::<OnQuorumLoss>(text)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "onFull",
        aliases: &[],
        values: Values::Words(OnFull::CHOICES),
        help: "What writes do when the pools are full: wait for room, or fail with ENOSPC",
        absent: "",
        changes: true,
        given: |spec| spec.on_full.clone(),
        set: |spec, text| {
            spec.on_full = checked::<OnFull>(text)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "reads",
        aliases: &[],
        values: Values::Words(Reads::CHOICES),
        help: "When a read is answered: under the target's lease, or after a quorum confirmed it",
        absent: "",
        changes: true,
        given: |spec| spec.reads.clone(),
        set: |spec, text| {
            spec.reads = checked::<Reads>(text)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "blockSize",
        aliases: &[],
        values: Values::Words(BlockSize::CHOICES),
        help: "Logical block size",
        absent: "",
        changes: false,
        given: |spec| spec.block_size.to_string(),
        set: |spec, text| {
            spec.block_size = check::<BlockSize>(text)?.bytes();
            Ok(())
        },
    },
    VolumeOption {
        key: "fsType",
        aliases: &["fstype"],
        values: Values::Words(FileSystem::CHOICES),
        help: "File system that a node makes on the volume where none is named",
        absent: "the node's own",
        changes: false,
        given: |spec| spec.fs_type.clone(),
        set: |spec, text| {
            spec.fs_type = checked::<FileSystem>(text)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "frontend",
        aliases: &[],
        values: Values::Words(Frontend::CHOICES),
        help: "How a node makes a block device [default: the best that it can do]",
        absent: "the node's own",
        changes: false,
        given: |spec| spec.frontend.clone(),
        set: |spec, text| {
            spec.frontend = checked::<Frontend>(text)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "iopsLimit",
        aliases: &[],
        values: Values::Rate { what: IOS, least: 1 },
        help: "IOs a second that the volume serves; more wait [default: no limit]",
        absent: "no limit",
        changes: true,
        given: |spec| limit(spec.iops_limit),
        set: |spec, text| {
            spec.iops_limit = rate(text, IOS, 1)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "bandwidthLimit",
        aliases: &[],
        values: Values::Rate { what: BYTES, least: BANDWIDTH_LIMIT_MIN },
        help: "Bytes a second that are read and written; more wait [default: no limit]",
        absent: "no limit",
        changes: true,
        given: |spec| limit(spec.bandwidth_limit),
        set: |spec, text| {
            spec.bandwidth_limit = rate(text, BYTES, BANDWIDTH_LIMIT_MIN)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "replaceAfter",
        aliases: &[],
        values: Values::Time,
        help: "Replace a replica that is gone for so long (as in 90s, 10m, 2h), or `off` \
               [default: the cluster's, 10m]",
        absent: "the cluster's",
        changes: true,
        given: |spec| spec.replace_after.clone(),
        set: |spec, text| {
            spec.replace_after = checked::<ReplaceAfter>(text)?;
            Ok(())
        },
    },
    VolumeOption {
        key: "local",
        aliases: &[],
        values: Values::Words(Local::CHOICES),
        help: "Whether the volume has a replica on the node that uses it: anywhere, one there if it \
               has room, kept with its users to the listed topologies, or used only where replicas are \
               [default: any]",
        absent: "",
        changes: false,
        given: |spec| spec.local.clone(),
        set: |spec, text| {
            spec.local = checked::<Local>(text)?;
            Ok(())
        },
    },
];

impl From<Durability> for control::Durability {
    fn from(durability: Durability) -> Self {
        match durability {
            Durability::Cache => Self::Cache,
            Durability::Media => Self::Media,
        }
    }
}

/// An option that a message leaves unspecified.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unspecified;

impl TryFrom<control::Durability> for Durability {
    type Error = Unspecified;

    fn try_from(message: control::Durability) -> Result<Self, Unspecified> {
        match message {
            control::Durability::Unspecified => Err(Unspecified),
            control::Durability::Cache => Ok(Self::Cache),
            control::Durability::Media => Ok(Self::Media),
        }
    }
}

impl From<Spread> for control::Spread {
    fn from(spread: Spread) -> Self {
        match spread {
            Spread::Host => Self::Host,
            Spread::Pool => Self::Pool,
            Spread::Rack => Self::Rack,
            Spread::Zone => Self::Zone,
        }
    }
}

impl TryFrom<control::Spread> for Spread {
    type Error = Unspecified;

    fn try_from(message: control::Spread) -> Result<Self, Unspecified> {
        match message {
            control::Spread::Unspecified => Err(Unspecified),
            control::Spread::Host => Ok(Self::Host),
            control::Spread::Pool => Ok(Self::Pool),
            control::Spread::Rack => Ok(Self::Rack),
            control::Spread::Zone => Ok(Self::Zone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value of each option that is not its default.
    const OTHERS: [(&str, &str); 12] = [
        ("durability", "media"),
        ("spread", "pool"),
        ("onQuorumLoss", "fail"),
        ("onFull", "enospc"),
        ("reads", "confirmed"),
        ("blockSize", "512"),
        ("fsType", "xfs"),
        ("frontend", "nbd"),
        ("iopsLimit", "500"),
        ("bandwidthLimit", "4096"),
        ("replaceAfter", "off"),
        ("local", "required"),
    ];

    fn all_other() -> VolumeSpec {
        let mut spec = VolumeSpec::default();
        for (key, value) in OTHERS {
            VolumeOption::find(key).expect(key).set(&mut spec, value).unwrap();
        }
        spec
    }

    #[test]
    fn a_request_that_is_filled_in_has_every_option_of_the_other_one() {
        let other = all_other();
        assert_eq!(VolumeOption::fill_in(&VolumeSpec::default(), &other), Ok(other.clone()));
        assert_eq!(VolumeOption::fill_in(&other, &VolumeSpec::default()), Ok(other));
    }

    #[test]
    fn an_option_that_was_set_is_given_and_outlives_completion_and_its_record() {
        let asked = all_other();
        let options = VolumeOptions::complete(&asked, Spread::Host).unwrap();
        let record = serde_json::to_string(&options).unwrap();
        assert_eq!(serde_json::from_str::<VolumeOptions>(&record).unwrap(), options);
        let mut written = VolumeSpec::default();
        options.write(&mut written);
        assert_eq!(written, asked);
        for (option, (key, value)) in OPTIONS.iter().zip(OTHERS) {
            assert_eq!((option.key, option.given(&written).as_deref()), (key, Some(value)));
        }
    }

    #[test]
    fn what_was_not_asked_for_is_not_given_and_has_its_default() {
        let nothing = VolumeSpec::default();
        assert!(OPTIONS.iter().all(|option| option.given(&nothing).is_none()));
        let options = VolumeOptions::complete(&nothing, Spread::Pool).unwrap();
        assert_eq!((options.durability, options.spread), (Durability::Cache, Spread::Pool));
        assert_eq!((options.block_size.bytes(), options.replace_after), (4096, None));
        assert_eq!((options.fs_type, options.frontend), (None, None));
    }

    #[test]
    fn options_that_may_change_are_changed_one_by_one_and_told_with_both_values() {
        let made = VolumeOptions::complete(
            &VolumeSpec { iops_limit: 500, ..VolumeSpec::default() },
            Spread::Host,
        )
        .unwrap();
        let mut asked = VolumeSpec::default();
        for (key, value) in [("durability", "media"), ("iopsLimit", "off"), ("onFull", "wait")] {
            VolumeOption::find(key).unwrap().set(&mut asked, value).unwrap();
        }
        let (now, changes) = VolumeOption::change(&asked, &made).unwrap();
        assert_eq!((now.durability, now.iops_limit), (Durability::Media, 0));
        let words: Vec<_> = changes.iter().map(ToString::to_string).collect();
        assert_eq!(words, ["durability cache to media", "iopsLimit 500 to no limit"]);
        assert_eq!(VolumeOption::change(&asked, &now).unwrap(), (now.clone(), Vec::new()));
        assert_eq!(VolumeOption::fixed(&asked, &now), None);
        let asked = VolumeSpec { block_size: 512, ..VolumeSpec::default() };
        assert_eq!(VolumeOption::fixed(&asked, &now), Some(("blockSize", "4096".to_owned())));
        let asked = VolumeSpec { on_full: "explode".into(), ..VolumeSpec::default() };
        assert_eq!(VolumeOption::change(&asked, &now).unwrap_err().key, "onFull");
    }

    #[test]
    fn the_nearest_known_word_is_suggested_and_none_where_all_differ() {
        let known = || OPTIONS.iter().map(|option| option.key);
        assert_eq!(nearest("iopslimit", known()), Some("iopsLimit"));
        assert_eq!(nearest("durabilty", known()), Some("durability"));
        assert_eq!(nearest("onQuorum", known()), Some("onQuorumLoss"));
        assert_eq!(nearest("colour", known()), None);
        assert_eq!(nearest("", known()), None);
        assert_eq!(nearest(&"x".repeat(1 << 20), known()), None);
    }

    #[test]
    fn a_value_that_is_none_of_an_option_is_refused_with_those_that_are() {
        for option in &OPTIONS {
            for wrong in ["", "+1", "maybe", "0"] {
                let refused = option.set(&mut VolumeSpec::default(), wrong).unwrap_err();
                assert!(
                    refused.starts_with(&format!("{wrong:?} is n")),
                    "{}: {refused}",
                    option.key
                );
            }
        }
        let asked = VolumeSpec { on_full: "explode".into(), ..VolumeSpec::default() };
        let wrong = VolumeOptions::complete(&asked, Spread::Host).unwrap_err();
        assert_eq!(
            (wrong.key, wrong.rule.as_str()),
            ("onFull", "\"explode\" is none of: wait | enospc")
        );
        let asked = VolumeSpec { block_size: 1024, ..VolumeSpec::default() };
        assert_eq!(VolumeOptions::complete(&asked, Spread::Host).unwrap_err().key, "blockSize");
    }
}
