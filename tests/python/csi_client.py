#!/usr/bin/env python3
"""Drives a CSI socket from the life of a volume's beginning to its end, as Kubernetes does.

A client in another language than the driver's: what Rust's libraries forgive each other, this
one does not. Every step prints a line; the first wrong answer ends the run with exit code 1.

Usage:
  python3 -m venv .venv && .venv/bin/pip install -r requirements.txt
  .venv/bin/python csi_client.py --socket /path/csi.sock [--controller-only NODE]
"""

import argparse
import hashlib
import importlib
import os
import pathlib
import sys
import tempfile
import time
import uuid

import grpc

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
# An id of a form that the driver never gives out.
UNKNOWN = "fake-vol-id-0123456789"
# Packages of CSI-Addons.
ADDONS = (
    "encryptionkeyrotation",
    "fence",
    "healer",
    "identity",
    "reclaimspace",
    "replication",
    "volumegroup",
)


def load_stubs():
    """Makes the stubs in a temporary directory and imports them; what is imported needs no files."""
    sys.path.insert(0, str(HERE))
    import make_stubs

    with tempfile.TemporaryDirectory(prefix="quoin-csi-stubs-") as directory:
        make_stubs.make(directory)
        sys.path.insert(0, directory)
        import csi_pb2
        import csi_pb2_grpc

        # They stay loaded: `from csi_addons import ...` needs no files any more.
        for package in ADDONS:
            importlib.import_module(f"csi_addons.{package}_pb2")
            importlib.import_module(f"csi_addons.{package}_pb2_grpc")
        sys.path.remove(directory)
    return csi_pb2, csi_pb2_grpc


class Failure(Exception):
    """An answer that is not the one the interface asks for."""


class Driver:
    """The three services of one socket, with the patience of an orchestrator."""

    AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)

    def __init__(self, socket, stubs, patience_s=60):
        # No options: the C core then sends the path of the socket as `:authority`.
        channel = grpc.insecure_channel(f"unix://{socket}")
        self.patience_s = patience_s
        self.identity = stubs.IdentityStub(channel)
        self.controller = stubs.ControllerStub(channel)
        self.node = stubs.NodeStub(channel)
        self.group = stubs.GroupControllerStub(channel)
        self.metadata = stubs.SnapshotMetadataStub(channel)

    def call(self, method, request):
        """Calls until it is answered; what is busy or away is asked again."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return method(request, timeout=60)
            except grpc.RpcError as error:
                if error.code() not in self.AGAIN or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def refused(self, method, request, code):
        """Calls once and wants exactly this refusal: a code, a message, no details."""
        try:
            answer = method(request, timeout=60)
        except grpc.RpcError as error:
            if error.code() != code:
                raise Failure(f"{code.name} was expected, {error.code().name} came: {error.details()}")
            if not error.details():
                raise Failure(f"{code.name} came without a message")
            trailers = {key for key, _ in error.trailing_metadata() or ()}
            if "grpc-status-details-bin" in trailers:
                raise Failure(f"{code.name} came with details")
            return error.details()
        raise Failure(f"{code.name} was expected, an answer came: {answer}")


def step(text):
    print(f"  {text}", flush=True)


def check(condition, text):
    if not condition:
        raise Failure(text)


def identity(driver, pb):
    info = driver.call(driver.identity.GetPluginInfo, pb.GetPluginInfoRequest())
    check(info.name and info.vendor_version, "name or version is empty")
    check(info.name[0].isalpha() and info.name[-1].isalpha(), "the name ends with no letter")
    driver.call(driver.identity.GetPluginCapabilities, pb.GetPluginCapabilitiesRequest())
    deadline = time.monotonic() + driver.patience_s
    while not driver.call(driver.identity.Probe, pb.ProbeRequest()).ready.value:
        check(time.monotonic() < deadline, "the plugin does not become ready")
        time.sleep(0.1)
    step(f"identity: {info.name} {info.vendor_version}, ready")


def refusals(driver, pb, capability, has_node):
    """A few wrong requests; the whole tables are tested elsewhere."""
    code = grpc.StatusCode
    controller, node = driver.controller, driver.node
    driver.refused(controller.CreateVolume, pb.CreateVolumeRequest(), code.INVALID_ARGUMENT)
    bad = pb.CreateVolumeRequest(
        name="x", volume_capabilities=[capability], parameters={"colour": "red"}
    )
    message = driver.refused(controller.CreateVolume, bad, code.INVALID_ARGUMENT)
    check("colour" in message, "an unknown parameter is not named")
    driver.refused(
        controller.ListVolumes,
        pb.ListVolumesRequest(starting_token="invalid-token"),
        code.ABORTED,
    )
    driver.refused(
        controller.ControllerGetVolume,
        pb.ControllerGetVolumeRequest(volume_id=UNKNOWN),
        code.NOT_FOUND,
    )
    driver.call(controller.DeleteVolume, pb.DeleteVolumeRequest(volume_id=UNKNOWN))
    driver.refused(controller.CreateSnapshot, pb.CreateSnapshotRequest(), code.INVALID_ARGUMENT)
    groups = driver.call(
        driver.group.GroupControllerGetCapabilities, pb.GroupControllerGetCapabilitiesRequest()
    )
    check(len(groups.capabilities) == 1, "group snapshots are one capability")
    driver.refused(
        driver.group.CreateVolumeGroupSnapshot,
        pb.CreateVolumeGroupSnapshotRequest(),
        code.INVALID_ARGUMENT,
    )
    far = pb.CreateVolumeRequest(
        name="far",
        volume_capabilities=[capability],
        capacity_range=pb.CapacityRange(required_bytes=(1 << 63) - 1),
    )
    driver.refused(controller.CreateVolume, far, code.OUT_OF_RANGE)
    far.capacity_range.required_bytes = -1
    driver.refused(controller.CreateVolume, far, code.INVALID_ARGUMENT)
    stage = pb.NodeStageVolumeRequest()
    if has_node:
        driver.refused(node.NodeStageVolume, stage, code.INVALID_ARGUMENT)
        driver.refused(
            node.NodeGetVolumeStats,
            pb.NodeGetVolumeStatsRequest(volume_id=UNKNOWN, volume_path="some/path"),
            code.NOT_FOUND,
        )
    else:
        driver.refused(node.NodeStageVolume, stage, code.UNIMPLEMENTED)
    step("refusals: the codes that the interface prints, with messages and without details")


def create(driver, pb, name, capability, size, parameters):
    request = pb.CreateVolumeRequest(
        name=name,
        capacity_range=pb.CapacityRange(required_bytes=size),
        volume_capabilities=[capability],
        parameters=parameters,
    )
    volume = driver.call(driver.controller.CreateVolume, request).volume
    again = driver.call(driver.controller.CreateVolume, request).volume
    check(volume == again, "a repeated CreateVolume answers differently")
    check(volume.capacity_bytes >= size, "the volume is too small")
    request.capacity_range.required_bytes = 2 * size
    driver.refused(driver.controller.CreateVolume, request, grpc.StatusCode.ALREADY_EXISTS)
    listed = driver.call(driver.controller.ListVolumes, pb.ListVolumesRequest())
    check(volume.volume_id in [one.volume.volume_id for one in listed.entries], "it is not listed")
    step(f"created {volume.volume_id}, {volume.capacity_bytes >> 20} MiB")
    return volume


def validate(driver, pb, volume, capability):
    """A volume that somebody else made is usable once its capabilities are confirmed."""
    request = pb.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_capabilities=[capability],
        volume_context=volume.volume_context,
    )
    answer = driver.call(driver.controller.ValidateVolumeCapabilities, request)
    check(list(answer.confirmed.volume_capabilities) == [capability], "not confirmed")
    other = pb.VolumeCapability()
    other.CopyFrom(capability)
    other.mount.fs_type = "zfs"
    request.volume_capabilities.append(other)
    answer = driver.call(driver.controller.ValidateVolumeCapabilities, request)
    check(not answer.HasField("confirmed") and answer.message, "confirmed too much")


def publish(driver, pb, volume, capability, node_id):
    if node_id is None:
        node_id = driver.call(driver.node.NodeGetInfo, pb.NodeGetInfoRequest()).node_id
    request = pb.ControllerPublishVolumeRequest(
        volume_id=volume.volume_id,
        node_id=node_id,
        volume_capability=capability,
        volume_context=volume.volume_context,
    )
    context = driver.call(driver.controller.ControllerPublishVolume, request).publish_context
    again = driver.call(driver.controller.ControllerPublishVolume, request).publish_context
    check(dict(context) == dict(again), "a repeated publish answers differently")
    request.readonly = True
    driver.refused(
        driver.controller.ControllerPublishVolume, request, grpc.StatusCode.ALREADY_EXISTS
    )
    driver.refused(
        driver.controller.DeleteVolume,
        pb.DeleteVolumeRequest(volume_id=volume.volume_id),
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    step(f"published to {node_id}")
    return node_id, context


def use(driver, pb, volume, context, capability, directory, is_block):
    """Stages, publishes, writes, takes back, and finds the data again the second time."""
    staging, target = directory / "staging", directory / "pods" / "target"
    staging.mkdir(parents=True)
    target.parent.mkdir()
    stage = pb.NodeStageVolumeRequest(
        volume_id=volume.volume_id,
        publish_context=context,
        staging_target_path=str(staging),
        volume_capability=capability,
        volume_context=volume.volume_context,
    )
    place = pb.NodePublishVolumeRequest(
        volume_id=volume.volume_id,
        publish_context=context,
        staging_target_path=str(staging),
        target_path=str(target),
        volume_capability=capability,
        volume_context=volume.volume_context,
    )
    unplace = pb.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=str(target))
    unstage = pb.NodeUnstageVolumeRequest(
        volume_id=volume.volume_id, staging_target_path=str(staging)
    )
    driver.refused(driver.node.NodePublishVolume, place, grpc.StatusCode.FAILED_PRECONDITION)
    payload = os.urandom(4 * MIB)
    digest = hashlib.sha256(payload).hexdigest()
    for turn in ("first", "second"):
        for _ in range(2):
            driver.call(driver.node.NodeStageVolume, stage)
        for _ in range(2):
            driver.call(driver.node.NodePublishVolume, place)
        file = target if is_block else target / "payload"
        if turn == "first":
            descriptor = os.open(file, os.O_WRONLY | (0 if is_block else os.O_CREAT))
            os.write(descriptor, payload)
            os.fsync(descriptor)
            os.close(descriptor)
        with open(file, "rb") as opened:
            found = hashlib.sha256(opened.read(len(payload))).hexdigest()
        check(found == digest, f"the data differs at the {turn} turn")
        stats = driver.call(
            driver.node.NodeGetVolumeStats,
            pb.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=str(target)),
        )
        check(stats.usage and stats.usage[0].total > 0, "no figures")
        driver.refused(driver.node.NodeUnstageVolume, unstage, grpc.StatusCode.FAILED_PRECONDITION)
        for _ in range(2):
            driver.call(driver.node.NodeUnpublishVolume, unplace)
        check(not target.exists(), "the target is left behind")
        for _ in range(2):
            driver.call(driver.node.NodeUnstageVolume, unstage)
        step(f"staged, published, {'written' if turn == 'first' else 'read again'}, taken back")


def look_only(driver, pb, volume, node_id, capability, directory, is_block):
    """Published read-only by the controller: the node cannot write, whatever it asks for."""
    driver.call(
        driver.controller.ControllerUnpublishVolume,
        pb.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id=node_id),
    )
    publish = pb.ControllerPublishVolumeRequest(
        volume_id=volume.volume_id, node_id=node_id, volume_capability=capability, readonly=True
    )
    context = driver.call(driver.controller.ControllerPublishVolume, publish).publish_context
    staging, target = directory / "staging", directory / "pods" / "target"
    stage = pb.NodeStageVolumeRequest(
        volume_id=volume.volume_id,
        publish_context=context,
        staging_target_path=str(staging),
        volume_capability=capability,
    )
    driver.call(driver.node.NodeStageVolume, stage)
    place = pb.NodePublishVolumeRequest(
        volume_id=volume.volume_id,
        publish_context=context,
        staging_target_path=str(staging),
        target_path=str(target),
        volume_capability=capability,
    )
    driver.call(driver.node.NodePublishVolume, place)
    try:
        with open(target if is_block else target / "payload", "r+b", buffering=0) as file:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
        raise Failure("a node wrote to a volume that it was given read-only")
    except OSError as error:
        refusal = error.strerror
    driver.call(
        driver.node.NodeUnpublishVolume,
        pb.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=str(target)),
    )
    driver.call(
        driver.node.NodeUnstageVolume,
        pb.NodeUnstageVolumeRequest(
            volume_id=volume.volume_id, staging_target_path=str(staging)
        ),
    )
    step(f"published read-only; a write: {refusal}")


class InUse:
    """A volume on this node from publishing to unpublishing."""

    def __init__(self, driver, pb, volume, node_id, capability, directory, readonly=False):
        self.driver, self.pb, self.volume, self.node_id = driver, pb, volume, node_id
        self.capability, self.directory, self.readonly = capability, directory, readonly
        self.staging, self.target = directory / "staging", directory / "pods" / "target"

    def __enter__(self):
        driver, pb = self.driver, self.pb
        self.staging.mkdir(parents=True)
        self.target.parent.mkdir()
        publish = pb.ControllerPublishVolumeRequest(
            volume_id=self.volume.volume_id,
            node_id=self.node_id,
            volume_capability=self.capability,
            volume_context=self.volume.volume_context,
            readonly=self.readonly,
        )
        context = driver.call(driver.controller.ControllerPublishVolume, publish).publish_context
        stage = pb.NodeStageVolumeRequest(
            volume_id=self.volume.volume_id,
            publish_context=context,
            staging_target_path=str(self.staging),
            volume_capability=self.capability,
            volume_context=self.volume.volume_context,
        )
        driver.call(driver.node.NodeStageVolume, stage)
        place = pb.NodePublishVolumeRequest(
            volume_id=self.volume.volume_id,
            publish_context=context,
            staging_target_path=str(self.staging),
            target_path=str(self.target),
            volume_capability=self.capability,
            volume_context=self.volume.volume_context,
            readonly=self.readonly,
        )
        driver.call(driver.node.NodePublishVolume, place)
        return self.target

    def __exit__(self, *_):
        driver, pb, volume_id = self.driver, self.pb, self.volume.volume_id
        driver.call(
            driver.node.NodeUnpublishVolume,
            pb.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=str(self.target)),
        )
        driver.call(
            driver.node.NodeUnstageVolume,
            pb.NodeUnstageVolumeRequest(
                volume_id=volume_id, staging_target_path=str(self.staging)
            ),
        )
        driver.call(
            driver.controller.ControllerUnpublishVolume,
            pb.ControllerUnpublishVolumeRequest(volume_id=volume_id, node_id=self.node_id),
        )


def copies(driver, pb, volume, node_id, capability, directory, is_block):
    """Larger volumes, made from a snapshot of the volume in use and from itself, used beside it."""
    driver.call(
        driver.controller.ControllerUnpublishVolume,
        pb.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id=node_id),
    )
    payloads = [os.urandom(MIB) for _ in range(2)]

    def write(target, payload):
        with open(target if is_block else target / "copied", "r+b" if is_block else "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())

    def read(target):
        with open(target if is_block else target / "copied", "rb") as file:
            return file.read(MIB)

    made = []
    with InUse(driver, pb, volume, node_id, capability, directory / "source") as source:
        write(source, payloads[0])
        cut = pb.CreateSnapshotRequest(
            source_volume_id=volume.volume_id, name=f"cut-{volume.volume_id}"
        )
        snapshot = driver.call(driver.controller.CreateSnapshot, cut).snapshot
        write(source, payloads[1])
        sources = (
            pb.VolumeContentSource(
                snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=snapshot.snapshot_id)
            ),
            pb.VolumeContentSource(
                volume=pb.VolumeContentSource.VolumeSource(volume_id=volume.volume_id)
            ),
        )
        size = 2 * volume.capacity_bytes
        for number, (content, payload) in enumerate(zip(sources, payloads)):
            request = pb.CreateVolumeRequest(
                name=f"copy-{number}-{volume.volume_id}",
                capacity_range=pb.CapacityRange(required_bytes=size),
                volume_capabilities=[capability],
                volume_content_source=content,
            )
            copy = driver.call(driver.controller.CreateVolume, request).volume
            again = driver.call(driver.controller.CreateVolume, request).volume
            check(copy == again and copy.content_source == content, "its source differs")
            check(copy.capacity_bytes >= size, "the copy is too small")
            made.append(copy)
            place = directory / f"copy-{number}-only-read"
            with InUse(driver, pb, copy, node_id, capability, place, readonly=True) as target:
                check(read(target) == payload, f"copy {number} has another content, only read")
                try:
                    write(target, payload)
                except OSError:
                    pass
                else:
                    raise AssertionError(f"copy {number} is written where it is only to be read")
            place = directory / f"copy-{number}"
            with InUse(driver, pb, copy, node_id, capability, place) as target:
                check(read(target) == payload, f"copy {number} has another content")
                if is_block:
                    with open(target, "rb") as file:
                        shown = file.seek(0, os.SEEK_END)
                        file.seek(volume.capacity_bytes)
                        check(not any(file.read(MIB)), "something lies behind the source's end")
                else:
                    figures = os.statvfs(target)
                    shown = figures.f_blocks * figures.f_frsize
                check(shown > 1.5 * volume.capacity_bytes, f"copy {number} shows {shown} bytes")
                write(target, os.urandom(MIB))
        check(read(source) == payloads[1], "a copy changed its source")
    driver.call(
        driver.controller.DeleteSnapshot,
        pb.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id),
    )
    for copy in made:
        driver.call(
            driver.controller.DeleteVolume, pb.DeleteVolumeRequest(volume_id=copy.volume_id)
        )
    step("copied by a snapshot and as it is, into larger volumes, and used beside them")


def modify(driver, pb, volume):
    """Changes options of a volume in use; the answer says that they rule."""
    request = pb.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id,
        mutable_parameters={"durability": "media", "iopsLimit": "100000"},
    )
    for _ in range(2):
        driver.call(driver.controller.ControllerModifyVolume, request)
    request.mutable_parameters["durabilty"] = "media"
    message = driver.refused(
        driver.controller.ControllerModifyVolume, request, grpc.StatusCode.INVALID_ARGUMENT
    )
    check("durabilty" in message and '"durability"' in message, "no hint at the known key")
    shown = driver.call(
        driver.controller.ControllerGetVolume,
        pb.ControllerGetVolumeRequest(volume_id=volume.volume_id),
    )
    check(shown.volume.volume_context == volume.volume_context, "the context has changed")
    step("modified while it is used")


def judge(driver, pb, volume, has_node):
    """A volume that is well has no entry, on either side."""
    request = pb.ControllerGetVolumeHealthRequest(volume_id=volume.volume_id)
    deadline = time.monotonic() + driver.patience_s
    while True:
        health = driver.call(driver.controller.ControllerGetVolumeHealth, request).volume_health
        check(health.volume_id == volume.volume_id, "the health is another volume's")
        if not health.health_statuses:
            break
        check(time.monotonic() < deadline, f"it is not well: {health}")
        time.sleep(0.1)
    driver.refused(
        driver.controller.ControllerGetVolumeHealth,
        pb.ControllerGetVolumeHealthRequest(volume_id=UNKNOWN),
        grpc.StatusCode.NOT_FOUND,
    )
    driver.call(driver.controller.ControllerListVolumeHealth, pb.ControllerListVolumeHealthRequest())
    if has_node:
        request = pb.NodeGetVolumeHealthRequest(volume_id=volume.volume_id)
        health = driver.call(driver.node.NodeGetVolumeHealth, request).volume_health
        check(not health.health_statuses, f"the node finds a fault: {health}")
        storage = driver.call(driver.node.NodeGetStorageHealth, pb.NodeGetStorageHealthRequest())
        check(not storage.backend_health, f"the node does not reach the storage: {storage}")
    step("well, in the controller's view" + (" and the node's" if has_node else ""))


def grow(driver, pb, volume):
    bigger = volume.capacity_bytes * 2
    answer = driver.call(
        driver.controller.ControllerExpandVolume,
        pb.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id,
            capacity_range=pb.CapacityRange(required_bytes=bigger),
        ),
    )
    check(answer.capacity_bytes >= bigger, "it did not grow")
    shown = driver.call(
        driver.controller.ControllerGetVolume,
        pb.ControllerGetVolumeRequest(volume_id=volume.volume_id),
    )
    check(shown.volume.capacity_bytes == answer.capacity_bytes, "the new size is not shown")
    step(f"grown to {answer.capacity_bytes >> 20} MiB")


def remove(driver, pb, volume, node_id):
    unpublish = pb.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id=node_id)
    delete = pb.DeleteVolumeRequest(volume_id=volume.volume_id)
    for _ in range(2):
        driver.call(driver.controller.ControllerUnpublishVolume, unpublish)
    for _ in range(2):
        driver.call(driver.controller.DeleteVolume, delete)
    driver.refused(
        driver.controller.ControllerGetVolume,
        pb.ControllerGetVolumeRequest(volume_id=volume.volume_id),
        grpc.StatusCode.NOT_FOUND,
    )
    step("unpublished and deleted")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", required=True, help="path of the CSI socket")
    parser.add_argument(
        "--controller-only", metavar="NODE", help="call no node; publish to the one of this name"
    )
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--parameter", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    pb, stubs = load_stubs()
    driver = Driver(options.socket, stubs)
    parameters = dict(one.split("=", 1) for one in options.parameter)

    mode = pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    access = pb.VolumeCapability.AccessMode(mode=mode)
    block = pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=access)

    def mounted(fs_type):
        mount = pb.VolumeCapability.MountVolume(fs_type=fs_type)
        return pb.VolumeCapability(mount=mount, access_mode=access)

    try:
        identity(driver, pb)
        refusals(driver, pb, block, options.controller_only is None)
        for kind, capability in (("ext4", mounted("ext4")), ("xfs", mounted("xfs")), ("block", block)):
            print(f"{kind}:", flush=True)
            name = f"python-{kind}-{uuid.uuid4()}"
            volume = create(driver, pb, name, capability, options.size_mib * MIB, parameters)
            validate(driver, pb, volume, capability)
            node_id, context = publish(driver, pb, volume, capability, options.controller_only)
            modify(driver, pb, volume)
            judge(driver, pb, volume, options.controller_only is None)
            if options.controller_only is None:
                with tempfile.TemporaryDirectory(prefix="quoin-csi-") as directory:
                    path = pathlib.Path(directory)
                    is_block = kind == "block"
                    use(driver, pb, volume, context, capability, path, is_block)
                    look_only(driver, pb, volume, node_id, capability, path, is_block)
                    copies(driver, pb, volume, node_id, capability, path, is_block)
            grow(driver, pb, volume)
            remove(driver, pb, volume, node_id)
    except (Failure, grpc.RpcError) as error:
        text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else error
        sys.exit(f"failed: {text}")
    print("all answers were as the interface asks")


if __name__ == "__main__":
    main()
