//! `kubectl quoin`: the plugin calls kubectl as a person would by hand.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use crate::common::dev::Scratch;

/// A kubectl that writes down how it is called, and knows who holds the Lease.
fn kubectl(scratch: &Scratch, holder: &str) -> String {
    let (path, calls) = (scratch.0.join("kubectl"), scratch.0.join("calls"));
    let calls = calls.display();
    let script = format!(
        "#!/bin/sh\nprintf '%s|' \"$@\" >> {calls}; echo >> {calls}\n\
         case \"$*\" in *'get lease'*) printf '{holder}';; *) exit 3;; esac\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn kubectl_quoin_runs_a_command_where_the_controller_rules_and_ends_as_it_ends() {
    let scratch = Scratch::new("kubectl");
    let plugin = scratch.0.join("kubectl-quoin");
    symlink(env!("CARGO_BIN_EXE_quoin"), &plugin).unwrap();
    let caller = kubectl(&scratch, "quoin-controller-1_0a1b2c3d");
    let ended = Command::new(&plugin)
        .args(["--context", "east", "volume", "list", "--namespace", "shop"])
        .env("KUBECTL_PLUGINS_CALLER", &caller)
        .env("QUOIN_NAMESPACE", "storage")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(3), "the command's own exit code");
    let calls = fs::read_to_string(scratch.0.join("calls")).unwrap();
    assert_eq!(
        calls.lines().collect::<Vec<_>>(),
        [
            "--context|east|--namespace|storage|get|lease|quoin-controller|--ignore-not-found|\
             --output|jsonpath={.spec.holderIdentity}|",
            "--context|east|--namespace|storage|exec|--stdin|quoin-controller-1|--container|\
             controller|--|quoin|volume|list|--namespace|shop|",
        ]
    );

    let help = Command::new(&plugin).output().unwrap();
    assert!(help.status.success());
    assert!(String::from_utf8_lossy(&help.stdout).contains("kubectl quoin status"));
    let refused = Command::new(&plugin).args(["--socket", "x"]).output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--kubeconfig"));
}
