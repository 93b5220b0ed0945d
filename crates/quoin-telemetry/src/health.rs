//! Problems that a role knows of itself, for `/healthz`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Problems by subject; an empty map means healthy. Cheap to clone, shared by all clones.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<BTreeMap<String, String>>>);

impl Health {
    /// Creates the health of a role that is unhealthy until it has reported each of these subjects.
    #[must_use]
    pub fn starting(about: &[&str]) -> Self {
        let health = Self::default();
        for about in about {
            health.set(about, Some("it has not reported since its start".to_owned()));
        }
        health
    }

    /// Sets the problem of one subject; `None`: it is healthy.
    pub fn set(&self, about: &str, problem: Option<String>) {
        match problem {
            Some(problem) => self.lock().insert(about.to_owned(), problem),
            None => self.lock().remove(about),
        };
    }

    /// Replaces all problems whose subjects begin with `prefix`.
    pub fn replace(&self, prefix: &str, problems: impl IntoIterator<Item = (String, String)>) {
        let mut all = self.lock();
        all.retain(|about, _| !about.starts_with(prefix));
        all.extend(problems.into_iter().map(|(about, why)| (format!("{prefix}{about}"), why)));
    }

    /// # Errors
    /// Everything that is wrong, in one line.
    pub fn check(&self) -> Result<(), String> {
        let all = self.lock();
        if all.is_empty() {
            return Ok(());
        }
        let lines: Vec<_> = all.iter().map(|(about, why)| format!("{about}: {why}")).collect();
        Err(lines.join("; "))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_healthy_when_no_subject_has_a_problem() {
        let health = Health::starting(&["controller"]);
        assert!(health.check().unwrap_err().contains("controller"));
        health.set("controller", None);
        assert_eq!(health.check(), Ok(()));
        health.replace("volume ", [("a".into(), "waits".into()), ("b".into(), "waits".into())]);
        health.replace("volume ", [("b".into(), "waits for pool p1".into())]);
        health.set("disk", Some("full".into()));
        assert_eq!(health.check().unwrap_err(), "disk: full; volume b: waits for pool p1");
    }
}
