//! `kubectl quoin`: this binary under the name `kubectl-quoin`, which runs a command in the pod of the controller that rules.
//!
//! Everything from the first word on that is no option of kubectl is the command. The controller that rules is the holder
//! of its Lease; where the records lie elsewhere there is no Lease, and the first controller is asked, which says who
//! rules if it does not.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Name by which kubectl finds its plugin.
const PLUGIN: &str = "kubectl-quoin";
/// Name that kubectl gives the program which called the plugin.
const CALLER: &str = "KUBECTL_PLUGINS_CALLER";
const NAMESPACE: &str = "quoin-system";
/// Options of kubectl that lead to a cluster, and its namespace.
const OPTIONS: [&str; 8] = [
    "-n",
    "--namespace",
    "--context",
    "--cluster",
    "--kubeconfig",
    "--user",
    "--server",
    "--token",
];
const HELP: &str = "\
Run a quoin command in the pod of the controller that rules.

Usage: kubectl quoin [-n NAMESPACE] [--context NAME] [--kubeconfig FILE] COMMAND…

Options of kubectl come before the command; the namespace is quoin-system, or QUOIN_NAMESPACE.
The controllers have the chart's default name, quoin-controller.

Examples:
  kubectl quoin status
  kubectl quoin volume list --namespace shop
  kubectl quoin -n storage volume doctor pvc-1
  kubectl quoin help volume        help of the commands themselves";

/// Returns true if kubectl called this binary.
pub fn is_plugin() -> bool {
    std::env::args_os()
        .next()
        .is_some_and(|name| Path::new(&name).file_name() == Some(PLUGIN.as_ref()))
}

/// Call of a plugin.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    /// Options of kubectl, without the namespace.
    options: Vec<OsString>,
    namespace: Option<OsString>,
    command: Vec<OsString>,
}

fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Call> {
    let mut words = words.into_iter().peekable();
    let (mut options, mut namespace) = (Vec::new(), None);
    while let Some(word) = words.next_if(|word| word.to_string_lossy().starts_with('-')) {
        let text = word.to_string_lossy().into_owned();
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(OsString::from(value))),
            None => (text, None),
        };
        if key == "--" {
            break;
        }
        if key == "--help" || key == "-h" {
            return Ok(Call { options, namespace, command: Vec::new() });
        }
        if !OPTIONS.contains(&key.as_str()) {
            bail!(
                "{key} is no option of kubectl that comes before a command: {}",
                OPTIONS.join(", ")
            );
        }
        let value =
            value.or_else(|| words.next()).with_context(|| format!("{key} needs a value"))?;
        match key.as_str() {
            "-n" | "--namespace" => namespace = Some(value),
            _ => options.extend([key.into(), value]),
        }
    }
    Ok(Call { options, namespace, command: words.collect() })
}

/// Becomes `kubectl exec` of the command.
///
/// # Errors
/// The words are no call, or kubectl cannot be started.
pub fn run() -> Result<()> {
    let Call { options, namespace, command } = parse(std::env::args_os().skip(1))?;
    if command.is_empty() {
        return crate::output::print_line(HELP);
    }
    let kubectl = std::env::var_os(CALLER).unwrap_or_else(|| "kubectl".into());
    let namespace = namespace.or_else(|| std::env::var_os("QUOIN_NAMESPACE"));
    let namespace = namespace.unwrap_or_else(|| NAMESPACE.into());
    let call = || {
        let mut call = Command::new(&kubectl);
        call.args(&options).arg("--namespace").arg(&namespace);
        call
    };
    let holder = call()
        .args(["get", "lease", "quoin-controller", "--ignore-not-found"])
        .args(["--output", "jsonpath={.spec.holderIdentity}"])
        .output()
        .with_context(|| format!("start {}", Path::new(&kubectl).display()))?;
    if !holder.status.success() {
        bail!("{}", String::from_utf8_lossy(&holder.stderr).trim());
    }
    let pod = pod_of(&String::from_utf8_lossy(&holder.stdout));
    let mut exec = call();
    exec.arg("exec");
    if !std::io::stdin().is_terminal() || std::io::stdout().is_terminal() {
        exec.arg("--stdin");
    }
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        exec.arg("--tty");
    }
    exec.arg(&pod).args(["--container", "controller", "--", "quoin"]).args(&command);
    Err(exec.exec()).with_context(|| format!("start {}", Path::new(&kubectl).display()))
}

/// Pod of the holder of the Lease; the first one where nobody holds it.
fn pod_of(holder: &str) -> String {
    let name = holder.trim().rsplit_once('_').map_or("", |(name, _)| name);
    if name.is_empty() { "quoin-controller-0".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &[&str]) -> Result<Call> {
        parse(words.iter().map(OsString::from))
    }

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn options_before_the_command_are_kubectls_and_those_behind_it_are_the_commands() {
        let parsed =
            call(&["--context=east", "-n", "storage", "volume", "list", "--namespace", "shop"]);
        let parsed = parsed.unwrap();
        assert_eq!(parsed.options, words(&["--context", "east"]));
        assert_eq!(parsed.namespace, Some("storage".into()));
        assert_eq!(parsed.command, words(&["volume", "list", "--namespace", "shop"]));
        assert_eq!(call(&["--", "--version"]).unwrap().command, words(&["--version"]));
        assert!(call(&["--help"]).unwrap().command.is_empty());
    }

    #[test]
    fn what_is_no_option_of_kubectl_is_refused_with_those_that_are() {
        let refused = call(&["--socket", "x", "status"]).unwrap_err().to_string();
        assert!(refused.contains("--socket") && refused.contains("--kubeconfig"), "{refused}");
        assert!(call(&["-n"]).unwrap_err().to_string().contains("needs a value"));
    }

    #[test]
    fn the_pod_is_that_of_the_holder_of_the_lease() {
        assert_eq!(pod_of("quoin-controller-1_0a1b2c3d\n"), "quoin-controller-1");
        assert_eq!(pod_of(""), "quoin-controller-0");
    }
}
