//! Contexts on disk: which controllers a user governs from here, and by which certificate.
//!
//! ```text
//! ~/.config/quoin/current-context      the name of the one in use
//! ~/.config/quoin/contexts/NAME/       an identity directory, and context.json
//! ```
//!
//! All of it is readable by its user alone: a key lets its reader do what the admin can.

use anyhow::{Context as _, Result, bail};
use quoin_identity::Identity;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::PathBuf;

const FILE: &str = "context.json";
const NAME_MAX: usize = 63;

/// Content of a context beside its certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// `host:port`.
    pub controller: String,
}

/// The contexts of a user.
#[derive(Clone, Debug)]
pub struct Contexts {
    root: PathBuf,
}

impl Contexts {
    /// Contexts of the user who runs this process.
    pub fn of_user() -> Result<Self> {
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        let absolute = |path: &PathBuf| path.is_absolute();
        let configuration = variable("XDG_CONFIG_HOME").filter(absolute);
        let home = || variable("HOME").filter(absolute).map(|home| home.join(".config"));
        match configuration.or_else(home) {
            Some(root) => Ok(Self { root: root.join("quoin") }),
            None => bail!("no directory for contexts: set HOME or XDG_CONFIG_HOME"),
        }
    }

    #[cfg(test)]
    pub fn at(root: &std::path::Path) -> Self {
        Self { root: root.into() }
    }

    /// The identity directory of a context, whether or not it exists.
    pub fn directory(&self, name: &str) -> PathBuf {
        self.root.join("contexts").join(name)
    }

    /// Identity directory ([`Self::directory`]) for a name that may become a context's.
    pub fn check(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        Ok(self.directory(name))
    }

    /// All names, in order.
    pub fn names(&self) -> Result<Vec<String>> {
        let directory = self.root.join("contexts");
        let entries = match std::fs::read_dir(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.with_context(|| format!("list {}", directory.display()))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| self.exists(name)).collect();
        names.sort_unstable();
        Ok(names)
    }

    pub fn exists(&self, name: &str) -> bool {
        check_name(name).is_ok() && self.directory(name).join(FILE).is_file()
    }

    /// Name of the context in use; `None` where none is in use, or it is gone.
    pub fn current(&self) -> Option<String> {
        let name = std::fs::read_to_string(self.current_file()).ok()?;
        Some(name.trim().to_owned()).filter(|name| self.exists(name))
    }

    pub fn load(&self, name: &str) -> Result<Entry> {
        check_name(name)?;
        let path = self.directory(name).join(FILE);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "there is no context {name}: `quoin context list` shows those that are there, and \
                 `quoin cluster join --role admin` makes one"
            ),
            read => read.with_context(|| format!("read {}", path.display()))?,
        };
        serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} is damaged: remove the context with `quoin context remove {name}` and join again",
                path.display()
            )
        })
    }

    pub fn identity(&self, name: &str) -> Result<Identity> {
        Identity::load(&self.directory(name)).with_context(|| format!("context {name}"))
    }

    /// Writes a context whose identity is in its directory, and makes it the current one.
    pub fn add(&self, name: &str, entry: &Entry) -> Result<()> {
        check_name(name)?;
        let text = serde_json::to_vec_pretty(entry)?;
        quoin_identity::write_private(&self.directory(name).join(FILE), &text)?;
        self.make_current(name)
    }

    pub fn make_current(&self, name: &str) -> Result<()> {
        self.load(name)?;
        quoin_identity::write_private(&self.current_file(), name.as_bytes())?;
        Ok(())
    }

    /// Removes a context with its key. Returns whether it was the current one.
    pub fn remove(&self, name: &str) -> Result<bool> {
        check_name(name)?;
        let was_current = self.current().as_deref() == Some(name);
        let directory = self.directory(name);
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.load(name)?;
            }
            removed => removed.with_context(|| format!("remove {}", directory.display()))?,
        }
        if was_current {
            let file = self.current_file();
            std::fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
        }
        Ok(was_current)
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.load(from)?;
        check_name(to)?;
        let target = self.directory(to);
        if target.exists() {
            bail!("there is a context {to} already: remove it first, or choose another name");
        }
        let was_current = self.current().as_deref() == Some(from);
        std::fs::rename(self.directory(from), &target)
            .with_context(|| format!("rename to {}", target.display()))?;
        if was_current {
            self.make_current(to)?;
        }
        Ok(())
    }

    fn current_file(&self) -> PathBuf {
        self.root.join("current-context")
    }
}

/// Names are names of directories too.
pub fn check_name(name: &str) -> Result<()> {
    let is_fit = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let fits = !name.is_empty()
        && name.len() <= NAME_MAX
        && !name.starts_with(['.', '-'])
        && name.chars().all(is_fit);
    if !fits {
        bail!(
            "{name:?} is not a name for a context: 1 to {NAME_MAX} letters, digits, `-`, `_` and \
             `.`, with a letter or a digit first"
        );
    }
    Ok(())
}

/// The name of a context where none is given: the controller's host.
pub fn default_name(controller: &str) -> String {
    let host = controller.rsplit_once(':').map_or(controller, |(host, _)| host);
    let plain: String = host
        .trim_matches(['[', ']'])
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' })
        .take(NAME_MAX)
        .collect();
    let plain = plain.trim_start_matches(['.', '-']);
    if plain.is_empty() { "cluster".into() } else { plain.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn made(contexts: &Contexts, name: &str) {
        quoin_identity::make_dir(&contexts.directory(name)).unwrap();
        contexts.add(name, &Entry { controller: format!("{name}:7400") }).unwrap();
    }

    #[test]
    fn the_newest_context_is_current_until_another_is_chosen_or_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let contexts = Contexts::at(&directory.path().join("quoin"));
        assert_eq!((contexts.names().unwrap().len(), contexts.current()), (0, None));
        made(&contexts, "here");
        made(&contexts, "far");
        assert_eq!(contexts.names().unwrap(), ["far", "here"]);
        assert_eq!(contexts.current().unwrap(), "far");
        contexts.make_current("here").unwrap();
        assert!(contexts.make_current("nowhere").is_err());
        contexts.rename("here", "near").unwrap();
        assert_eq!(contexts.current().unwrap(), "near");
        assert_eq!(contexts.load("near").unwrap().controller, "here:7400");
        assert!(contexts.rename("near", "far").unwrap_err().to_string().contains("already"));
        assert!(!contexts.remove("far").unwrap());
        assert!(contexts.remove("near").unwrap());
        assert_eq!(contexts.current(), None);
        assert!(contexts.remove("near").unwrap_err().to_string().contains("context list"));
    }

    #[test]
    fn contexts_are_readable_only_by_their_user() {
        let directory = tempfile::tempdir().unwrap();
        let contexts = Contexts::at(&directory.path().join("quoin"));
        made(&contexts, "a");
        let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(contexts.directory("a")), 0o700);
        assert_eq!(mode(contexts.directory("a").join(FILE)), 0o600);
        assert_eq!(mode(contexts.current_file()), 0o600);
    }

    #[test]
    fn no_name_is_a_path_outside_the_directory_of_contexts() {
        for wrong in ["", ".", "..", "../x", "a/b", "-a", ".a", "a b", "ä"] {
            assert!(check_name(wrong).is_err(), "{wrong:?}");
        }
        for controller in ["h1:7400", "[fd00::1]:7400", "../../etc:1", ":7400", "h1"] {
            check_name(&default_name(controller)).unwrap();
        }
        assert_eq!(default_name("h1:7400"), "h1");
        assert_eq!(default_name("[fd00::1]:7400"), "fd00--1");
    }

    #[test]
    fn a_damaged_context_is_refused_with_the_way_to_recreate_it() {
        let directory = tempfile::tempdir().unwrap();
        let contexts = Contexts::at(directory.path());
        made(&contexts, "a");
        std::fs::write(contexts.directory("a").join(FILE), "{").unwrap();
        let message = format!("{:#}", contexts.load("a").unwrap_err());
        assert!(
            message.contains("damaged") && message.contains("quoin context remove a"),
            "{message}"
        );
    }
}
