//! Remains on a host, compared with what the records say: one table of all that Quoin has made there, and
//! one function from that table to the steps.
//!
//! Promises: where nothing is said of a volume, nothing of it is changed; of a volume that is attached here
//! only what belongs to no attachment goes; nothing is taken from a user, who is named instead; what
//! somebody else made is named and left; and once its users have gone, nothing of a volume that is not
//! attached here stays.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Kind of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Loop device that the attach process has made.
    Device,
    /// FUSE file below it.
    File,
    /// Link to it under the volume's name.
    Link,
    /// Mount at a path of the node's own records.
    Staged,
    /// Mount that somebody else made, of the volume's file system or of one on a partition.
    Foreign,
    /// File by which the volume is attached at boot.
    AtBoot,
}

/// A piece of a volume on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub volume: String,
    pub kind: Kind,
    pub path: PathBuf,
    /// Something is known to use it.
    pub is_used: bool,
}

/// A volume at the attach process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attachment {
    pub device: PathBuf,
    /// Number of the request to attach it; 0: it is worked on.
    pub asked: u64,
    pub in_use: bool,
    /// All its IO fails for good.
    pub is_dead: bool,
    /// 0: unknown.
    pub size_bytes: u64,
}

/// Word of the records on a volume here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Word {
    /// Name for people; empty: unknown.
    pub name: String,
    pub standing: Standing,
    /// Node that has used the volume since, and its first epoch.
    pub served_elsewhere: Option<(String, u64)>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Standing {
    /// Attached to this host; 0: no growth is due.
    Here {
        size_bytes: u64,
    },
    NotHere,
    Deleted,
    #[default]
    Unknown,
}

/// All that Quoin has made on a host, and what is said of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub pieces: Vec<Piece>,
    /// `None`: the attach process does not answer.
    pub attachments: Option<BTreeMap<String, Attachment>>,
    pub words: BTreeMap<String, Word>,
}

/// Next step with a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The device is of an earlier use: its IO fails.
    FailEarlierUse {
        volume: String,
        node: String,
        since_epoch: u64,
    },
    /// The device goes, or fails its IO where it is in use.
    EndDevice {
        volume: String,
        asked: u64,
        why: &'static str,
    },
    Grow {
        volume: String,
        size_bytes: u64,
    },
    /// The mounts of the node's records go, unless a process uses them, and the device after them.
    TakeDown {
        volume: String,
        why: &'static str,
    },
    /// The attach process removes what belongs to no attachment.
    Sweep {
        volume: String,
    },
    /// People are told of it.
    Name {
        volume: String,
        text: String,
    },
}

impl Standing {
    /// Reason for which nothing of the volume is to be here, if that is so.
    fn gone(self) -> Option<&'static str> {
        match self {
            Self::Deleted => Some("its volume is deleted"),
            Self::NotHere => Some("its volume is not attached to this host any more"),
            Self::Here { .. } | Self::Unknown => None,
        }
    }
}

/// Returns the next steps.
#[must_use]
pub fn decide(table: &Table) -> Vec<Step> {
    let Some(attachments) = &table.attachments else { return Vec::new() };
    let of_pieces = table.pieces.iter().map(|piece| &piece.volume);
    let volumes: BTreeSet<&String> = of_pieces.chain(attachments.keys()).collect();
    let mut steps = Vec::new();
    for volume in volumes {
        let pieces: Vec<_> = table.pieces.iter().filter(|one| one.volume == *volume).collect();
        let attachment = attachments.get(volume);
        let unknown = Word::default();
        let word = table.words.get(volume).unwrap_or(&unknown);
        match attachment {
            Some(attachment) => with_device(volume, attachment, word, &pieces, &mut steps),
            None => without_device(volume, word, &pieces, &mut steps),
        }
        let staged = pieces.iter().any(|piece| piece.kind == Kind::Staged);
        let is_over = attachment.is_none_or(|attachment| attachment.is_dead);
        if let Some(why) = word.standing.gone().filter(|_| staged && is_over) {
            steps.push(Step::TakeDown { volume: volume.clone(), why });
        }
        let at_boot = pieces.iter().find(|piece| piece.kind == Kind::AtBoot);
        if let Some(piece) = at_boot.filter(|_| word.standing == Standing::Deleted) {
            let text = format!(
                "{} attaches it at boot, and it is deleted: `quoin volume detach {volume}` removes that",
                piece.path.display()
            );
            steps.push(Step::Name { volume: volume.clone(), text });
        }
    }
    steps
}

fn with_device(
    volume: &str,
    attachment: &Attachment,
    word: &Word,
    pieces: &[&Piece],
    steps: &mut Vec<Step>,
) {
    let volume = volume.to_owned();
    if let Some((node, since_epoch)) = word.served_elsewhere.clone() {
        let text = quoin_attach::served_elsewhere(&node, since_epoch);
        steps.push(Step::FailEarlierUse { volume: volume.clone(), node, since_epoch });
        steps.push(Step::Name { volume: volume.clone(), text });
    }
    let is_spent = |piece: &&&Piece| {
        piece.kind == Kind::Device && !piece.is_used && piece.path != attachment.device
    };
    if !attachment.device.as_os_str().is_empty() && pieces.iter().any(|piece| is_spent(&piece)) {
        steps.push(Step::Sweep { volume: volume.clone() });
    }
    match (word.standing, word.standing.gone()) {
        (_, Some(why)) => {
            if attachment.in_use && word.served_elsewhere.is_none() {
                let text = in_use(attachment, why, pieces);
                steps.push(Step::Name { volume: volume.clone(), text });
            }
            if attachment.asked != 0 {
                steps.push(Step::EndDevice { volume, asked: attachment.asked, why });
            }
        }
        (Standing::Here { size_bytes }, None)
            if !attachment.is_dead
                && word.served_elsewhere.is_none()
                && (1..size_bytes).contains(&attachment.size_bytes) =>
        {
            steps.push(Step::Grow { volume, size_bytes });
        }
        _ => {}
    }
}

fn without_device(volume: &str, word: &Word, pieces: &[&Piece], steps: &mut Vec<Step>) {
    let made = |piece: &&&Piece| matches!(piece.kind, Kind::Device | Kind::File | Kind::Link);
    let made: Vec<_> = pieces.iter().filter(made).collect();
    if let Some(used) = made.iter().find(|piece| piece.is_used) {
        let text = format!(
            "{} belongs to no attachment and is in use: end its users, and it goes by itself",
            used.path.display()
        );
        steps.push(Step::Name { volume: volume.to_owned(), text });
    } else if !made.is_empty() {
        steps.push(Step::Sweep { volume: volume.to_owned() });
    }
    let foreign = pieces.iter().find(|piece| piece.kind == Kind::Foreign);
    if let Some((why, piece)) = word.standing.gone().zip(foreign) {
        let path = piece.path.display();
        let text = format!("{path} is still mounted and {why}: end its users and unmount it");
        steps.push(Step::Name { volume: volume.to_owned(), text });
    }
}

/// Text about a device whose volume is attached here no more, with the way out.
fn in_use(attachment: &Attachment, why: &str, pieces: &[&Piece]) -> String {
    let is_mount = |piece: &&&Piece| matches!(piece.kind, Kind::Staged | Kind::Foreign);
    let mounts: BTreeSet<_> =
        pieces.iter().filter(is_mount).map(|piece| piece.path.display().to_string()).collect();
    let shown = attachment.device.display();
    let way_out = match mounts.is_empty() {
        true => "end the programs that have it open".to_owned(),
        false => {
            let mounts = mounts.into_iter().collect::<Vec<_>>().join(" and ");
            format!("end the users of {mounts} and unmount it")
        }
    };
    format!("{shown} is still in use and {why}: {way_out}, and it goes by itself")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VOLUME: &str = "v";

    /// A volume on a host in the plainest words: what is there, who uses it, and what is said.
    #[derive(Debug, Clone)]
    struct Model {
        /// The attach process has a device of it, which is dead or alive.
        device: Option<bool>,
        size_bytes: u64,
        /// Pieces of the attach process that are of no attachment.
        stray: bool,
        staged: bool,
        foreign: bool,
        at_boot: bool,
        /// A process has the mount open, or the device, or the stray piece.
        is_used: bool,
        word: Word,
        is_attach_away: bool,
    }

    impl Model {
        fn table(&self) -> Table {
            let piece = |is_there: bool, kind, path: &str, is_used| {
                is_there.then(|| Piece { volume: VOLUME.into(), kind, path: path.into(), is_used })
            };
            let pieces = [
                piece(self.stray, Kind::Device, "/dev/loop9", self.is_used),
                piece(self.device.is_some(), Kind::Device, "/dev/loop8", self.is_used),
                piece(self.device.is_some(), Kind::Link, "/dev/quoin/v", false),
                piece(self.staged, Kind::Staged, "/stage", false),
                piece(self.foreign, Kind::Foreign, "/mnt", false),
                piece(self.at_boot, Kind::AtBoot, "/etc/quoin/volumes/v.json", false),
            ];
            let attachment = self.device.map(|is_dead| Attachment {
                device: "/dev/loop8".into(),
                asked: 7,
                in_use: self.is_used || self.staged || self.foreign,
                is_dead,
                size_bytes: self.size_bytes,
            });
            let attachments = attachment.map(|one| (VOLUME.to_owned(), one)).into_iter().collect();
            Table {
                pieces: pieces.into_iter().flatten().collect(),
                attachments: (!self.is_attach_away).then_some(attachments),
                words: BTreeMap::from([(VOLUME.to_owned(), self.word.clone())]),
            }
        }

        /// Effect of a step, as the attach process and the node have it.
        fn follow(&mut self, step: &Step) {
            match step {
                Step::FailEarlierUse { .. } => self.device = self.device.map(|_| true),
                Step::EndDevice { asked, .. } => {
                    assert_eq!(*asked, 7);
                    let is_busy = self.is_used || self.staged || self.foreign;
                    self.device = is_busy.then_some(true);
                }
                Step::Grow { size_bytes, .. } => {
                    assert!(*size_bytes > self.size_bytes && self.device == Some(false));
                    self.size_bytes = *size_bytes;
                }
                Step::TakeDown { .. } => {
                    assert!(self.device != Some(false), "a device that works");
                    self.staged = self.is_used;
                    if !self.is_used && !self.foreign {
                        self.device = None;
                    }
                }
                Step::Sweep { .. } => {
                    assert!(!self.is_used);
                    self.stray = false;
                }
                Step::Name { .. } => {}
            }
        }

        fn settle(&mut self) -> Vec<Step> {
            for _ in 0..6 {
                for step in decide(&self.table()) {
                    self.follow(&step);
                }
            }
            decide(&self.table())
        }
    }

    fn words() -> impl Strategy<Value = Word> {
        let standing = prop_oneof![
            (0_u64..200).prop_map(|size_bytes| Standing::Here { size_bytes }),
            Just(Standing::NotHere),
            Just(Standing::Deleted),
            Just(Standing::Unknown),
        ];
        let elsewhere = proptest::option::of(Just(("h2".to_owned(), 9)));
        (standing, elsewhere).prop_map(|(standing, served_elsewhere)| Word {
            name: "db".into(),
            standing,
            served_elsewhere,
        })
    }

    prop_compose! {
        fn models()(
            device in proptest::option::of(any::<bool>()),
            size_bytes in 0_u64..200,
            [stray, staged, foreign, at_boot, is_used, is_attach_away] in any::<[bool; 6]>(),
            word in words(),
        ) -> Model {
            Model { device, size_bytes, stray, staged, foreign, at_boot, is_used, word, is_attach_away }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn nothing_of_a_volume_that_is_not_here_stays_once_its_users_have_gone(mut model in models()) {
            model.is_attach_away = false;
            let is_gone = model.word.standing.gone().is_some();
            let was_used = model.is_used;
            let left = model.settle();
            if is_gone && was_used {
                // Whatever is used is still there, dead and named.
                prop_assert!(model.device != Some(false));
                let something = model.device.is_some() || model.stray;
                let is_named = left.iter().any(|step| matches!(step, Step::Name { .. } | Step::TakeDown { .. }));
                prop_assert!(!something || is_named, "{model:?} {left:?}");
            }
            model.is_used = false;
            let left = model.settle();
            if is_gone {
                prop_assert!(!model.staged, "{model:?}");
                prop_assert_eq!(model.device.is_some() && !model.foreign, false, "{:?}", model);
            }
            prop_assert!(!model.stray, "{model:?}");
            // All that is left is only told of, and the same each time.
            for step in &left {
                let is_told = matches!(step, Step::Name { .. });
                let is_foreign = model.foreign && matches!(step, Step::EndDevice { .. });
                let is_dead = matches!(step, Step::FailEarlierUse { .. });
                prop_assert!(is_told || is_foreign || is_dead, "{model:?} {step:?}");
            }
            let is_untold = is_gone && model.foreign && left.is_empty();
            prop_assert!(!is_untold, "what a person mounted is told of");
        }

        #[test]
        fn what_is_attached_here_or_not_spoken_of_stays_as_it_is(mut model in models()) {
            let before = model.clone();
            let keeps = before.word.standing.gone().is_none() || before.is_attach_away;
            prop_assume!(keeps);
            model.settle();
            prop_assert_eq!((model.staged, model.foreign), (before.staged, before.foreign));
            let is_served_elsewhere = before.word.served_elsewhere.is_some();
            prop_assert_eq!(model.device.is_some(), before.device.is_some());
            if !is_served_elsewhere || before.is_attach_away {
                prop_assert_eq!(model.device, before.device);
            }
            match before.word.standing {
                Standing::Here { size_bytes } if before.device == Some(false)
                    && !is_served_elsewhere && !before.is_attach_away && before.size_bytes > 0 =>
                {
                    prop_assert_eq!(model.size_bytes, size_bytes.max(before.size_bytes));
                }
                _ if before.device != Some(false) || before.is_attach_away =>
                    prop_assert_eq!(model.size_bytes, before.size_bytes),
                _ => {}
            }
        }
    }

    #[test]
    fn what_is_in_use_is_named_with_its_mounts_and_the_way_out() {
        let model = Model {
            device: Some(false),
            size_bytes: 1,
            stray: false,
            staged: true,
            foreign: true,
            at_boot: true,
            is_used: true,
            word: Word { standing: Standing::Deleted, ..Word::default() },
            is_attach_away: false,
        };
        let named = |model: &Model| -> String {
            let steps = decide(&model.table()).into_iter();
            let text = |step| match step {
                Step::Name { text, .. } => Some(text),
                _ => None,
            };
            steps.filter_map(text).collect::<Vec<_>>().join("; ")
        };
        let text = named(&model);
        for words in
            ["/dev/loop8", "deleted", "/mnt and /stage", "goes by itself", "v.json", "detach v"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        let alone = Model { staged: false, foreign: false, at_boot: false, ..model.clone() };
        assert!(named(&alone).contains("programs that have it open"));
        let stray = Model { device: None, stray: true, ..alone };
        assert!(named(&stray).contains("/dev/loop9 belongs to no attachment"));
        let mounted = Model { device: None, foreign: true, ..model };
        assert!(named(&mounted).contains("/mnt is still mounted and its volume is deleted"));
    }
}
