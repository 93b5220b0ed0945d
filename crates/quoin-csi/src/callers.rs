//! Callers that are known by a secret, and the calls that each may make.
//!
//! The operator may give a list of callers. Each call that carries secrets must then carry the token of
//! one of them as the secret `callerToken`. A call without it, or with another one, is
//! unauthenticated; a caller that may not make the call has no permission. Without a list no token is
//! needed, and the permissions of the socket decide.
//!
//! The list holds digests of tokens, so its readers cannot call.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest;
use serde::Deserialize;
use tonic::Status;

use crate::refusal;

/// Name of the secret.
pub const CALLER_TOKEN: &str = "callerToken";
/// Largest list that is read, and most callers in it.
const LIST_BYTES_MAX: u64 = 1 << 20;
const CALLERS_MAX: usize = 1024;
/// Length of the shortest token, since one that is guessed protects nothing. The list has digests
/// alone, so a shorter token is refused where it is shown.
const TOKEN_BYTES_MIN: usize = 16;
/// Stands for every call.
const EVERY: &str = "*";

/// Calls of CSI and CSI-Addons that carry secrets.
const CALLS: &[&str] = &[
    "ControllerExpandVolume",
    "ControllerGetVolumeGroup",
    "ControllerGetVolumeHealth",
    "ControllerListVolumeHealth",
    "ControllerModifyVolume",
    "ControllerPublishVolume",
    "ControllerReclaimSpace",
    "ControllerUnpublishVolume",
    "CreateSnapshot",
    "CreateVolume",
    "CreateVolumeGroup",
    "CreateVolumeGroupSnapshot",
    "DeleteSnapshot",
    "DeleteVolume",
    "DeleteVolumeGroup",
    "DeleteVolumeGroupSnapshot",
    "DemoteVolume",
    "DisableVolumeReplication",
    "EnableVolumeReplication",
    "EncryptionKeyRotate",
    "FenceClusterNetwork",
    "GetFenceClients",
    "GetMetadataAllocated",
    "GetMetadataDelta",
    "GetReplicationDestinationInfo",
    "GetSnapshot",
    "GetVolumeGroupSnapshot",
    "GetVolumeReplicationInfo",
    "ListClusterFence",
    "ListSnapshots",
    "ListVolumeGroups",
    "ModifyVolumeGroupMembership",
    "NodeExpandVolume",
    "NodeGetStorageHealth",
    "NodeHealer",
    "NodePublishVolume",
    "NodeReclaimSpace",
    "NodeStageVolume",
    "PromoteVolume",
    "ResyncVolume",
    "UnfenceClusterNetwork",
    "ValidateVolumeCapabilities",
];

/// Why a list of callers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CallersError {
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {why}")]
    Malformed { path: PathBuf, why: String },
}

/// List of callers; by default there is none, and no token is needed.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    /// `None`: no token is needed.
    listed: Option<Vec<Caller>>,
}

#[derive(Clone, Debug)]
struct Caller {
    name: String,
    digest: Vec<u8>,
    may: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    callers: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Entry {
    name: String,
    token_sha256: String,
    may: Vec<String>,
}

impl Callers {
    /// Reads the operator's list.
    ///
    /// # Errors
    /// It cannot be read, or an entry of it breaks a rule; the message names both.
    pub fn read(path: &Path) -> Result<Self, CallersError> {
        let failed = |source| CallersError::Read { path: path.to_owned(), source };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        let malformed = |why| CallersError::Malformed { path: path.to_owned(), why };
        if bytes > LIST_BYTES_MAX {
            return Err(malformed(format!("{bytes} bytes; {LIST_BYTES_MAX} are allowed")));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        Self::parse(&text).map_err(malformed)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let document: Document = serde_yaml_ng::from_str(text).map_err(|why| why.to_string())?;
        if document.callers.len() > CALLERS_MAX {
            return Err(format!("callers: at most {CALLERS_MAX} are possible"));
        }
        let mut listed = Vec::new();
        for entry in document.callers {
            listed.push(Caller::of(entry)?);
        }
        Ok(Self { listed: Some(listed) })
    }

    /// Lets a call pass whose caller may make it.
    ///
    /// # Errors
    /// 16 without the token of a caller, 7 where that caller may not make this call.
    pub fn check(
        &self,
        call: &'static str,
        secrets: &HashMap<String, String>,
    ) -> Result<(), Status> {
        let Some(listed) = &self.listed else { return Ok(()) };
        let Some(token) = secrets.get(CALLER_TOKEN) else {
            let why = format!("{call} needs the secret {CALLER_TOKEN:?}, the token of a caller");
            return Err(refusal::unauthenticated(why));
        };
        let digest = digest::digest(&digest::SHA256, token.as_bytes());
        let known = |caller: &&Caller| caller.digest == digest.as_ref();
        let caller = listed.iter().find(known).filter(|_| token.len() >= TOKEN_BYTES_MIN);
        let Some(caller) = caller else {
            let why = format!("{call}: the secret {CALLER_TOKEN:?} is the token of no caller");
            return Err(refusal::unauthenticated(why));
        };
        match caller.may.contains(call) || caller.may.contains(EVERY) {
            true => Ok(()),
            false => Err(refusal::not_permitted(&caller.name, call)),
        }
    }
}

impl Caller {
    fn of(entry: Entry) -> Result<Self, String> {
        let Entry { name, token_sha256, may } = entry;
        if name.is_empty() || name.len() > 128 {
            return Err("callers: a name has 1 to 128 bytes".to_owned());
        }
        let digest = hex::decode(&token_sha256).ok().filter(|digest| digest.len() == 32);
        let Some(digest) = digest else {
            return Err(format!(
                "caller {name:?}: tokenSha256 has 64 hex digits, as `sha256sum` prints them"
            ));
        };
        for call in &may {
            if call != EVERY && !CALLS.contains(&call.as_str()) {
                let hint = match quoin_api::volume::nearest(call, CALLS.iter().copied()) {
                    Some(nearest) => format!("; did you mean {nearest:?}?"),
                    None => format!("; there are {} and {EVERY:?}", CALLS.join(", ")),
                };
                return Err(format!("caller {name:?}: no call {call:?} carries secrets{hint}"));
            }
        }
        Ok(Self { name, digest, may: may.into_iter().collect() })
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    const TOKEN: &str = "a token of a caller";

    fn sha256(token: &str) -> String {
        hex::encode(digest::digest(&digest::SHA256, token.as_bytes()))
    }

    fn list(token: &str, may: &str) -> String {
        format!("callers: [{{name: maker, tokenSha256: {}, may: [{may}]}}]", sha256(token))
    }

    fn code(callers: &Callers, call: &'static str, token: Option<&str>) -> Code {
        let secrets = token.map(|token| (CALLER_TOKEN.to_owned(), token.to_owned()));
        match callers.check(call, &secrets.into_iter().collect()) {
            Ok(()) => Code::Ok,
            Err(status) => {
                let message = status.message();
                assert!(message.contains(call), "{message}");
                assert!(
                    token.is_none_or(|token| token.is_empty() || !message.contains(token)),
                    "{message}"
                );
                status.code()
            }
        }
    }

    #[test]
    fn a_call_passes_with_the_token_of_a_caller_that_may_make_it_and_with_no_other() {
        let callers = Callers::parse(&list(TOKEN, "CreateVolume, ListSnapshots")).unwrap();
        for (call, token, expected) in [
            ("CreateVolume", Some(TOKEN), Code::Ok),
            ("ListSnapshots", Some(TOKEN), Code::Ok),
            ("DeleteVolume", Some(TOKEN), Code::PermissionDenied),
            ("CreateVolume", Some("another token of a caller"), Code::Unauthenticated),
            ("CreateVolume", Some(""), Code::Unauthenticated),
            ("DeleteVolume", None, Code::Unauthenticated),
        ] {
            assert_eq!(code(&callers, call, token), expected, "{call} {token:?}");
        }
        let every = Callers::parse(&list(TOKEN, "'*'")).unwrap();
        assert_eq!(code(&every, "DeleteVolume", Some(TOKEN)), Code::Ok);
        let short = Callers::parse(&list("short", "'*'")).unwrap();
        assert_eq!(code(&short, "DeleteVolume", Some("short")), Code::Unauthenticated);
        let nobody = Callers::parse("callers: []").unwrap();
        assert_eq!(code(&nobody, "CreateVolume", Some(TOKEN)), Code::Unauthenticated);
        assert_eq!(code(&Callers::default(), "CreateVolume", None), Code::Ok);
    }

    #[test]
    fn tokens_names_and_lists_are_taken_at_their_limits() {
        for (bytes, code_of) in [(15, Code::Unauthenticated), (16, Code::Ok), (17, Code::Ok)] {
            let token = "t".repeat(bytes);
            let callers = Callers::parse(&list(&token, "'*'")).unwrap();
            assert_eq!(code(&callers, "DeleteVolume", Some(&token)), code_of, "{bytes} bytes");
        }
        let named = |bytes: usize| {
            let name = "n".repeat(bytes);
            format!("callers: [{{name: '{name}', tokenSha256: {}, may: []}}]", sha256(TOKEN))
        };
        for (bytes, is_taken) in [(0, false), (1, true), (127, true), (128, true), (129, false)] {
            assert_eq!(Callers::parse(&named(bytes)).is_ok(), is_taken, "{bytes} bytes");
        }
        let many = |count: usize| {
            let entry = format!("  - {{name: n, tokenSha256: {}, may: []}}\n", sha256(TOKEN));
            format!("callers:\n{}", entry.repeat(count))
        };
        for (count, is_taken) in [(1023, true), (1024, true), (1025, false)] {
            assert_eq!(Callers::parse(&many(count)).is_ok(), is_taken, "{count} callers");
        }
        for (digits, is_taken) in [(62, false), (63, false), (64, true), (65, false), (66, false)] {
            let text =
                format!("callers: [{{name: n, tokenSha256: {}, may: []}}]", "a".repeat(digits));
            assert_eq!(Callers::parse(&text).is_ok(), is_taken, "{digits} digits");
        }
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("callers.yaml");
        for (bytes, is_taken) in [((1 << 20) - 1, true), (1 << 20, true), ((1 << 20) + 1, false)] {
            let mut text = list(TOKEN, "'*'");
            text.push_str("\n#");
            text.push_str(&"x".repeat(bytes - text.len()));
            std::fs::write(&file, text).unwrap();
            assert_eq!(Callers::read(&file).is_ok(), is_taken, "{bytes} bytes");
        }
        // The last one of many counts as the first does.
        let last = format!(
            "{}  - {{name: last, tokenSha256: {}, may: ['*']}}\n",
            many(1023).replace(&sha256(TOKEN), &sha256("another token of a caller")),
            sha256(TOKEN)
        );
        let callers = Callers::parse(&last).unwrap();
        assert_eq!(code(&callers, "DeleteVolume", Some(TOKEN)), Code::Ok);
    }

    #[test]
    fn a_list_that_breaks_a_rule_is_refused_with_the_rule() {
        let other = format!("{}\n", list(TOKEN, "CreateVolumes"));
        let digest = "callers: [{name: maker, tokenSha256: abc, may: []}]";
        let name = format!("callers: [{{name: '', tokenSha256: {}, may: []}}]", sha256(TOKEN));
        let field = "callers: [{name: maker, token: abc, may: []}]";
        for (text, rule) in [
            (other.as_str(), "did you mean \"CreateVolume\"?"),
            (digest, "64 hex digits"),
            (&name, "1 to 128 bytes"),
            (field, "unknown field"),
            ("callers", "callers"),
        ] {
            let why = Callers::parse(text).unwrap_err();
            assert!(why.contains(rule), "{why}");
        }
        let error = Callers::read(Path::new("/nowhere/callers.yaml")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/callers.yaml"), "{error}");
    }
}
