#!/usr/bin/env python3
"""Asserts the rows of the register that a client can see, against a running cluster.

Each check names its rows of docs/requirements.csv. All checks run twice for a mounted and for a block
volume: against the plugin as it was started, and against the one that took its place after it was
killed. A row is asserted if every check that names it held in all of these runs.

Usage: conformance.py --dev DIRECTORY [--report FILE | --check FILE]
  DIRECTORY is that of `quoin dev`. --report writes the table, --check compares it with a file.
"""

import argparse
import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import grpc

from csi_client import MIB, UNKNOWN, Driver, Failure, check, load_stubs

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = grpc.StatusCode
ZEROES = "0" * 32
# Of the volumes: the smallest that every file system takes, and what one is grown to.
SIZE, GROWN = 320 * MIB, 512 * MIB
# Control characters that no name may have, at both ends of each range.
BANNED = "\x00\x08\x0b\x0c\x0e\x1f\x7f\x9f"


class Rows:
    """Which rows were asserted, and which failed."""

    def __init__(self):
        self.held, self.failed = set(), {}

    def row(self, names, assertion):
        """Runs one check for these rows."""
        names = names.split()
        try:
            assertion()
        except (Failure, grpc.RpcError, OSError) as error:
            text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
            for name in names:
                self.failed[name] = text
                print(f"  FAILED {name}: {text}", flush=True)
            return
        self.held.update(names)


class Conformance:
    def __init__(self, driver, pb, rows, kind, directory):
        self.driver, self.pb, self.rows, self.kind = driver, pb, rows, kind
        self.directory, self.name = directory, f"{kind}-{uuid.uuid4()}"
        self.is_block = kind == "block"
        mode = pb.VolumeCapability.AccessMode
        self.modes = mode
        self.capability = self.capability_of(mode.SINGLE_NODE_WRITER)
        self.node_id = driver.call(driver.node.NodeGetInfo, pb.NodeGetInfoRequest()).node_id
        self.made = []

    # What checks are made of.

    def row(self, names, assertion):
        self.rows.row(names, assertion)

    def refused(self, names, method, request, code):
        """These rows want this refusal; that it is plain is checked with each."""
        plain = "CSI-ERR-01 CSI-ERR-02 CSI-ERR-03 CSI-ERR-12 CSI-ERR-14"
        self.row(f"{names} {plain}", lambda: self.driver.refused(method, request, code))

    def capability_of(self, mode, fs_type="xfs", flags=()):
        pb = self.pb
        access = pb.VolumeCapability.AccessMode(mode=mode)
        if self.is_block:
            return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=access)
        mount = pb.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=list(flags))
        return pb.VolumeCapability(mount=mount, access_mode=access)

    def incapable(self):
        """Capabilities that are malformed, one way each."""
        pb = self.pb
        without_access = pb.VolumeCapability()
        without_access.CopyFrom(self.capability)
        without_access.ClearField("block" if self.is_block else "mount")
        without_mode = pb.VolumeCapability()
        without_mode.CopyFrom(self.capability)
        without_mode.ClearField("access_mode")
        unknown, outside = self.capability_of(0), self.capability_of(99)
        return (
            ("CSI-VOLCAP-09", without_access),
            ("CSI-VOLCAP-10", without_mode),
            ("CSI-ACCESSMODE-01", unknown),
            ("CSI-ACCESSMODE-01", outside),
        )

    def create(self, name, required=SIZE, limit=0, **fields):
        fields.setdefault("volume_capabilities", [self.capability])
        return self.pb.CreateVolumeRequest(
            name=name,
            capacity_range=self.pb.CapacityRange(required_bytes=required, limit_bytes=limit),
            **fields,
        )

    def make(self, name, *sizes, **fields):
        request = self.create(name, *sizes, **fields)
        volume = self.driver.call(self.driver.controller.CreateVolume, request).volume
        self.made.append(volume.volume_id)
        return volume

    def publication(self, volume_id, node_id=None, **fields):
        fields.setdefault("volume_capability", self.capability)
        return self.pb.ControllerPublishVolumeRequest(
            volume_id=volume_id, node_id=self.node_id if node_id is None else node_id, **fields
        )

    def stage(self, volume_id, path, context=None, **fields):
        fields.setdefault("volume_capability", self.capability)
        return self.pb.NodeStageVolumeRequest(
            volume_id=volume_id, staging_target_path=str(path), publish_context=context, **fields
        )

    def place(self, volume_id, staging, target, context=None, **fields):
        fields.setdefault("volume_capability", self.capability)
        return self.pb.NodePublishVolumeRequest(
            volume_id=volume_id,
            staging_target_path=str(staging),
            target_path=str(target),
            publish_context=context,
            **fields,
        )

    def snap(self, volume_id, name, **fields):
        return self.pb.CreateSnapshotRequest(source_volume_id=volume_id, name=name, **fields)

    def mounts_at(self, path):
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            return [line for line in file if line.split()[4] == str(path)]

    # The checks, service by service.

    def identity(self):
        pb, identity = self.pb, self.driver.identity
        info = self.driver.call(identity.GetPluginInfo, pb.GetPluginInfoRequest())

        def name():
            check(0 < len(info.name) <= 63, "the name is empty or too long")
            check(info.name[0].isalnum() and info.name[-1].isalnum(), "its ends")
            check(all(c.isalnum() or c in "-." for c in info.name), "its characters")
            check("." in info.name and info.vendor_version, "no domain, or no version")

        self.row("CSI-PLUGININFO-02 CSI-PLUGININFO-04 CSI-PLUGININFO-05 CSI-PLUGININFO-06", name)
        self.row("CSI-PLUGININFO-07 CSI-SERVICES-08 CSI-FIELD-01", name)
        ready = self.driver.call(identity.Probe, pb.ProbeRequest()).ready.value
        self.row(
            "CSI-PROBE-01 CSI-PROBE-08 CSI-PROTOCOL-07 CSI-SERVICES-05",
            lambda: check(ready, "not ready"),
        )
        told = self.driver.call(identity.GetPluginCapabilities, pb.GetPluginCapabilitiesRequest())
        services = {one.service.type for one in told.capabilities if one.HasField("service")}
        grows = {one.volume_expansion.type for one in told.capabilities if one.HasField("volume_expansion")}
        service = pb.PluginCapability.Service
        self.row(
            "CSI-PLUGINCAPS-01 CSIN-METADATA-01 CSIN-SNAPTOPO-01 CSIN-GROUP-01",
            lambda: check(
                services
                >= {
                    service.CONTROLLER_SERVICE,
                    service.VOLUME_ACCESSIBILITY_CONSTRAINTS,
                    service.GROUP_CONTROLLER_SERVICE,
                    service.SNAPSHOT_METADATA_SERVICE,
                    service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS,
                },
                f"services {services}",
            ),
        )
        online = pb.PluginCapability.VolumeExpansion.ONLINE
        self.row("CSI-PLUGINCAPS-09 CSI-PLUGINCAPS-13", lambda: check(grows == {online}, f"{grows}"))

    def addons(self):
        """Identity on the socket of CSI-Addons: the same driver, and what this process serves."""
        from csi_addons import identity_pb2 as pb

        identity = self.driver.addons_identity
        info = self.driver.call(self.driver.identity.GetPluginInfo, self.pb.GetPluginInfoRequest())

        def named():
            told = self.driver.call(identity.GetIdentity, pb.GetIdentityRequest())
            check((told.name, told.vendor_version) == (info.name, info.vendor_version), f"{told}")
            check(0 < len(told.name) <= 63 and told.vendor_version, f"{told}")

        self.row("ADDONS-IDENTITY-01 ADDONS-IDENTITY-03", named)

        def listed():
            told = self.driver.call(identity.GetCapabilities, pb.GetCapabilitiesRequest()).capabilities
            kinds = [one.WhichOneof("type") for one in told]
            types = [(kind, getattr(one, kind).type) for kind, one in zip(kinds, told, strict=True)]
            check(all(number for _, number in types), f"a type is unknown: {types}")
            check(len(set(types)) == len(types), f"one is told twice: {types}")
            service = pb.Capability.Service
            for number in (service.CONTROLLER_SERVICE, service.NODE_SERVICE):
                check(("service", number) in types, f"{types}")

        self.row("ADDONS-IDENTITY-06", listed)

        def probed():
            told = self.driver.call(identity.Probe, pb.ProbeRequest())
            check(told.HasField("ready") and told.ready.value, f"{told}")

        self.row("ADDONS-IDENTITY-08", probed)

    def healing(self, volume, staging, target, elsewhere):
        """The healer on both sockets, of a volume that is well and of one whose target lost its mount."""
        from csi_addons import healer_pb2 as pb

        bad, absent = CODE.INVALID_ARGUMENT, CODE.NOT_FOUND
        long = "/" + "x" * 127
        whole = dict(
            volume_id=volume.volume_id,
            volume_path=str(target),
            staging_target_path=str(staging),
            volume_capability=self.capability,
            volume_context=volume.volume_context,
        )
        for healer in self.driver.healers:
            heal = healer.NodeHealer
            ask = lambda **fields: pb.NodeHealerRequest(**{**whole, **fields})
            self.refused("HEAL-REQ-01 HEAL-ERR-01", heal, ask(volume_id=""), bad)
            self.refused("HEAL-REQ-02 HEAL-ERR-01", heal, ask(volume_path=""), bad)
            self.refused("HEAL-REQ-12", heal, ask(volume_path="a/b"), bad)
            self.refused("HEAL-REQ-06", heal, ask(staging_target_path="a/b"), bad)
            other = {key: "other" for key in volume.volume_context}
            self.refused("HEAL-REQ-11", heal, ask(volume_context=other), bad)
            self.refused("HEAL-ERR-02", heal, ask(volume_id=UNKNOWN), absent)
            self.refused("HEAL-ERR-10", heal, ask(volume_path=str(elsewhere)), absent)
            # Long paths are no fault of the request.
            self.refused("HEAL-REQ-04", heal, ask(volume_path=long), absent)
            self.refused("HEAL-REQ-07", heal, ask(staging_target_path=long), absent)

            def well():
                for path in (target, staging):
                    told = self.driver.call(heal, ask(volume_path=str(path)))
                    check(told.message and not told.abnormal, f"{told}")

            self.row("HEAL-GENERAL-03 HEAL-GENERAL-04 HEAL-RESP-01 HEAL-RESP-02", well)

            def healed():
                subprocess.run(["umount", str(target)], check=True)
                check(not self.mounts_at(target), "it is mounted still")
                well()
                check(len(self.mounts_at(target)) == 1, "not one mount")

            self.row("HEAL-GENERAL-04 HEAL-RESP-03", healed)

    def reclaiming(self, volume, staging, elsewhere):
        """Space that is given back, of a volume that is in use."""
        from csi_addons import reclaimspace_pb2 as pb

        bad, absent = CODE.INVALID_ARGUMENT, CODE.NOT_FOUND
        on_node, of_pools = self.driver.reclaims_on_node, self.driver.reclaims
        whole = dict(volume_id=volume.volume_id, staging_target_path=str(staging))
        ask = lambda **fields: pb.NodeReclaimSpaceRequest(**{**whole, **fields})
        order = lambda volume_id, **fields: pb.ControllerReclaimSpaceRequest(volume_id=volume_id, **fields)
        self.refused("ADDONS-RECLAIM-02", on_node, ask(volume_id=""), bad)
        self.refused("ADDONS-RECLAIM-02", of_pools, order(""), bad)
        self.refused("ADDONS-RECLAIM-03", on_node, ask(volume_id=UNKNOWN), absent)
        self.refused("ADDONS-RECLAIM-03", of_pools, order(UNKNOWN), absent)
        self.refused("ADDONS-RECLAIM-08", on_node, ask(staging_target_path=""), bad)
        self.refused("ADDONS-RECLAIM-08", on_node, ask(staging_target_path="a/b"), bad)
        self.refused("ADDONS-RECLAIM-08", on_node, ask(volume_path="a/b"), bad)
        self.refused("ADDONS-RECLAIM-09", on_node, ask(staging_target_path=str(elsewhere)), absent)
        self.row("ADDONS-RECLAIM-08", lambda: self.driver.call(on_node, ask()))

        def given_back():
            parameters = {**volume.volume_context, "storage.kubernetes.io/csiProvisionerIdentity": "x"}
            told = self.driver.call(of_pools, order(volume.volume_id, parameters=parameters))
            for usage in (told.pre_usage, told.post_usage):
                check(usage.usage_bytes >= 0, f"{told}")

        self.row("ADDONS-RECLAIM-05 ADDONS-RECLAIM-11", given_back)

    def rotation(self, volume):
        """Keys of an encrypted volume, and of one that has none."""
        from csi_addons import encryptionkeyrotation_pb2 as pb

        driver, rotate = self.driver, self.driver.rotates
        ask = lambda volume_id, **fields: pb.EncryptionKeyRotateRequest(volume_id=volume_id, **fields)
        keys = [f"{number}-correct horse battery staple" for number in range(3)]
        secret = lambda key: {"encryptionKey": key}
        self.refused("ADDONS-KEYROTATE-02", rotate, ask("", encryption_key=keys[1]), CODE.INVALID_ARGUMENT)
        self.refused("ADDONS-KEYROTATE-03", rotate, ask(UNKNOWN, encryption_key=keys[1]), CODE.NOT_FOUND)
        plain = ask(volume.volume_id, encryption_key=keys[1])
        self.refused("ADDONS-KEYROTATE-04", rotate, plain, CODE.FAILED_PRECONDITION)
        locked = self.make(
            f"{self.name}-locked", SIZE, parameters={"encrypted": "true"}, secrets=secret(keys[0])
        ).volume_id
        no_key = CODE.UNAUTHENTICATED
        self.refused("ADDONS-KEYROTATE-09", rotate, ask(locked), no_key)
        self.refused("ADDONS-KEYROTATE-09", rotate, ask(locked, encryption_key=keys[1]), no_key)
        wrong = ask(locked, encryption_key=keys[1], secrets=secret(keys[2]))
        self.refused("ADDONS-KEYROTATE-09", rotate, wrong, no_key)

        def rotated():
            request = ask(
                locked,
                encryption_key=keys[1],
                secrets=secret(keys[0]),
                parameters={"unheardOf": "x"},
                volume_capability=self.pb.VolumeCapability(),
            )
            driver.call(rotate, request)
            driver.call(rotate, ask(locked, encryption_key=keys[1], secrets=secret(keys[1])))

        self.row("ADDONS-KEYROTATE-08 ADDONS-KEYROTATE-10", rotated)
        staging = self.directory / "locked"
        staging.mkdir()
        context = driver.call(
            driver.controller.ControllerPublishVolume, self.publication(locked)
        ).publish_context
        stage = lambda key: self.stage(locked, staging, context, secrets=secret(key))
        self.refused("ADDONS-KEYROTATE-05", driver.node.NodeStageVolume, stage(keys[0]), no_key)

        def opened():
            driver.call(driver.node.NodeStageVolume, stage(keys[1]))
            # The target has the data key now: the new key alone is sent, as the secret.
            driver.call(rotate, ask(locked, secrets=secret(keys[2])))
            out = self.pb.NodeUnstageVolumeRequest(volume_id=locked, staging_target_path=str(staging))
            driver.call(driver.node.NodeUnstageVolume, out)
            driver.refused(driver.node.NodeStageVolume, stage(keys[1]), no_key)
            driver.call(driver.node.NodeStageVolume, stage(keys[2]))
            driver.call(driver.node.NodeUnstageVolume, out)

        self.row("ADDONS-KEYROTATE-05", opened)
        driver.call(
            driver.controller.ControllerUnpublishVolume,
            self.pb.ControllerUnpublishVolumeRequest(volume_id=locked, node_id=self.node_id),
        )

    def fencing(self):
        """Fences of addresses that nobody has."""
        from csi_addons import fence_pb2 as pb

        driver, fences = self.driver, self.driver.fences
        cidrs = lambda blocks: [pb.CIDR(cidr=block) for block in blocks]
        left_over = {"clusterID": "rook-ceph"}
        fence = lambda *blocks: pb.FenceClusterNetworkRequest(cidrs=cidrs(blocks), parameters=left_over)
        lift = lambda *blocks: pb.UnfenceClusterNetworkRequest(cidrs=cidrs(blocks), parameters=left_over)

        def fenced():
            listed = driver.call(fences.ListClusterFence, pb.ListClusterFenceRequest(parameters=left_over))
            return sorted(one.cidr for one in listed.cidrs)

        bad = CODE.INVALID_ARGUMENT
        for method, request in ((fences.FenceClusterNetwork, fence), (fences.UnfenceClusterNetwork, lift)):
            self.refused("ADDONS-FENCE-03", method, request(), bad)
            for wrong in ("192.0.2.7", "192.0.2.0/33", "node-a/32", "2001:db8::/129"):
                self.refused("ADDONS-FENCE-04", method, request("198.51.100.0/24", wrong), bad)

        def in_force():
            check(not fenced(), f"{fenced()}")
            for _ in range(2):
                driver.call(fences.FenceClusterNetwork, fence("192.0.2.0/24", "2001:db8::/64"))
            driver.call(fences.FenceClusterNetwork, fence("192.0.2.8/29"))
            check(fenced() == ["192.0.2.0/24", "192.0.2.8/29", "2001:db8::/64"], f"{fenced()}")
            # One that is not fenced counts as lifted, and another one stays.
            driver.call(fences.UnfenceClusterNetwork, lift("192.0.2.0/24", "198.51.100.0/24"))
            check(fenced() == ["192.0.2.8/29", "2001:db8::/64"], f"{fenced()}")
            for _ in range(2):
                driver.call(fences.UnfenceClusterNetwork, lift("192.0.2.8/29", "2001:db8::/64"))
            check(not fenced(), f"{fenced()}")

        self.row("ADDONS-FENCE-04 ADDONS-FENCE-09 ADDONS-FENCE-12 ADDONS-FENCE-14", in_force)

        def clients():
            told = driver.call(fences.GetFenceClients, pb.GetFenceClientsRequest(parameters=left_over)).clients
            check(len(told) == 1 and told[0].id == self.node_id, f"{told}")
            blocks = [one.cidr for one in told[0].addresses]
            check(blocks and all(block.endswith(("/32", "/128")) for block in blocks), f"{blocks}")
            check(not any(block.startswith("127.") or block == "::1/128" for block in blocks), f"{blocks}")

        self.row("ADDONS-FENCE-13 ADDONS-FENCE-14", clients)

    def volume_groups(self, volume):
        """Volume groups, whose members live on."""
        from csi_addons import volumegroup_pb2 as pb

        driver, groups = self.driver, self.driver.groups
        bad, absent, unfit = CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION
        first, second = volume.volume_id, self.make(f"{self.name}-member").volume_id
        name = f"{self.name}-group"
        create = lambda name, *ids, **class_: pb.CreateVolumeGroupRequest(
            name=name, volume_ids=ids, parameters=class_
        )
        modify = lambda group, *ids: pb.ModifyVolumeGroupMembershipRequest(volume_group_id=group, volume_ids=ids)
        delete = lambda group: pb.DeleteVolumeGroupRequest(volume_group_id=group)
        get = lambda group: pb.ControllerGetVolumeGroupRequest(volume_group_id=group)
        page = lambda **fields: pb.ListVolumeGroupsRequest(**fields)
        members = lambda group: sorted(one.volume_id for one in group.volumes)
        for wrong in ("", "x" * 129):
            self.refused("ADDONS-GROUP-02", groups.CreateVolumeGroup, create(wrong), bad)
        for class_ in ({"unheardOf": "x"}, {"schedulingInterval": "0m"}):
            self.refused("ADDONS-GROUP-06", groups.CreateVolumeGroup, create(name, first, **class_), bad)
        self.refused("ADDONS-GROUP-07", groups.CreateVolumeGroup, create(name, first, UNKNOWN), absent)
        made = driver.call(groups.CreateVolumeGroup, create(name, second, first, second)).volume_group
        group = made.volume_group_id
        both = sorted((first, second))
        self.row("ADDONS-GROUP-03", lambda: check(group and members(made) == both, f"{made}"))

        def again():
            told = driver.call(groups.CreateVolumeGroup, create(name, first)).volume_group
            check(told == made, f"{told}")

        self.row("ADDONS-GROUP-04", again)
        other = create(name, first, volumeGroupNamePrefix="dr-")
        self.refused("ADDONS-GROUP-05", groups.CreateVolumeGroup, other, CODE.ALREADY_EXISTS)
        taken = create(f"{name}-2", first)
        self.refused("ADDONS-GROUP-08", groups.CreateVolumeGroup, taken, unfit)
        self.refused("ADDONS-GROUP-09", groups.ModifyVolumeGroupMembership, modify("", first), bad)
        self.refused("ADDONS-GROUP-09", groups.DeleteVolumeGroup, delete(""), bad)
        self.refused("ADDONS-GROUP-09", groups.ControllerGetVolumeGroup, get(""), bad)
        self.refused("ADDONS-GROUP-12", groups.ModifyVolumeGroupMembership, modify(UNKNOWN, first), absent)
        self.refused("ADDONS-GROUP-12", groups.ModifyVolumeGroupMembership, modify(group, UNKNOWN), absent)
        empty = driver.call(groups.CreateVolumeGroup, create(f"{name}-3")).volume_group.volume_group_id
        self.refused("ADDONS-GROUP-13", groups.ModifyVolumeGroupMembership, modify(empty, first), bad)
        self.refused("ADDONS-GROUP-16", groups.DeleteVolumeGroup, delete(group), unfit)
        member = self.pb.DeleteVolumeRequest(volume_id=second)
        self.refused("ADDONS-GROUP-18", driver.controller.DeleteVolume, member, unfit)
        self.refused("ADDONS-GROUP-19", groups.ControllerGetVolumeGroup, get(UNKNOWN), absent)
        self.refused("ADDONS-GROUP-20", groups.ListVolumeGroups, page(max_entries=-1), bad)
        self.refused("ADDONS-GROUP-21", groups.ListVolumeGroups, page(starting_token="x"), CODE.ABORTED)

        def found():
            told = driver.call(groups.ControllerGetVolumeGroup, get(group)).volume_group
            check(members(told) == both and all(one.capacity_bytes for one in told.volumes), f"{told}")
            listed, token = [], ""
            while True:
                answer = driver.call(groups.ListVolumeGroups, page(max_entries=1, starting_token=token))
                check(len(answer.entries) <= 1, f"{answer}")
                listed += [one.volume_group.volume_group_id for one in answer.entries]
                token = answer.next_token
                if not token:
                    break
            check(group in listed and empty in listed, f"{listed}")

        self.row("ADDONS-GROUP-19 ADDONS-GROUP-20", found)

        def changed():
            for ids in ((second,), (second,), (first, second), ()):
                told = driver.call(groups.ModifyVolumeGroupMembership, modify(group, *ids)).volume_group
                check(members(told) == sorted(ids), f"{told}")
            for one in (group, group, empty, UNKNOWN):
                driver.call(groups.DeleteVolumeGroup, delete(one))
            for volume_id in both:
                request = self.pb.ControllerGetVolumeRequest(volume_id=volume_id)
                driver.call(driver.controller.ControllerGetVolume, request)

        self.row("ADDONS-GROUP-10 ADDONS-GROUP-15 ADDONS-GROUP-17", changed)

    def replication(self, volume):
        """Replication of a volume without a peer, as clients of both editions call it."""
        from csi_addons import replication_pb2 as pb

        driver, service = self.driver, self.driver.replication
        bad, absent, unfit = CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION
        of_volume = lambda volume_id: pb.ReplicationSource(
            volume=pb.ReplicationSource.VolumeSource(volume_id=volume_id)
        )
        # Rows: no source, an unknown one, one that is not replicated; of the first edition.
        for method, message, none, unknown, off, first in (
            ("EnableVolumeReplication", pb.EnableVolumeReplicationRequest,
             "REPL-ENABLE-03 REPL-ENABLE-11", "REPL-ENABLE-12", "REPL-ENABLE-17",
             "REPL1-ENABLE-01 REPL1-ENABLE-04|REPL1-ENABLE-05|"),
            ("DisableVolumeReplication", pb.DisableVolumeReplicationRequest,
             "REPL-DISABLE-03 REPL-DISABLE-11", "REPL-DISABLE-12", "",
             "REPL1-DISABLE-01 REPL1-DISABLE-04|REPL1-DISABLE-05|"),
            ("PromoteVolume", pb.PromoteVolumeRequest,
             "REPL-PROMOTE-03 REPL-PROMOTE-13", "REPL-PROMOTE-14", "REPL-PROMOTE-15",
             "REPL1-PROMOTE-01 REPL1-PROMOTE-05|REPL1-PROMOTE-06|REPL1-PROMOTE-07"),
            ("DemoteVolume", pb.DemoteVolumeRequest,
             "REPL-DEMOTE-03 REPL-DEMOTE-12", "REPL-DEMOTE-13", "REPL-DEMOTE-14",
             "REPL1-DEMOTE-01 REPL1-DEMOTE-05|REPL1-DEMOTE-06|REPL1-DEMOTE-07"),
            ("ResyncVolume", pb.ResyncVolumeRequest,
             "REPL-RESYNC-03 REPL-RESYNC-13", "REPL-RESYNC-14", "REPL-RESYNC-15",
             "REPL1-RESYNC-01 REPL1-RESYNC-05|REPL1-RESYNC-06|REPL1-RESYNC-07"),
            ("GetVolumeReplicationInfo", pb.GetVolumeReplicationInfoRequest,
             "REPL-INFO-03 REPL-INFO-13", "REPL-INFO-14", "REPL-INFO-15", "||"),
        ):
            call = getattr(service, method)
            first_none, first_unknown, first_off = first.split("|")
            self.refused(f"{none} {first_none}", call, message(), bad)
            self.refused(none, call, message(replication_source=of_volume("")), bad)
            self.refused(unknown, call, message(replication_source=of_volume(UNKNOWN)), absent)
            self.refused(first_unknown, call, message(volume_id=UNKNOWN), absent)
            here = volume.volume_id
            for rows, request in (
                (off, message(replication_source=of_volume(here))),
                (first_off, message(volume_id=here)),
            ):
                if method == "DisableVolumeReplication":
                    driver.call(call, request)
                else:
                    self.refused(rows, call, request, unfit)
        ask = lambda **fields: pb.GetReplicationDestinationInfoRequest(**fields)
        destination = service.GetReplicationDestinationInfo
        self.refused("REPL-DEST-02", destination, ask(), bad)
        self.refused("REPL-DEST-02", destination, ask(replication_source=pb.ReplicationSource()), bad)
        self.refused("REPL-DEST-02", destination, ask(replication_source=of_volume("")), bad)
        self.refused("REPL-DEST-03", destination, ask(replication_source=of_volume(UNKNOWN)), absent)
        here = ask(replication_source=of_volume(volume.volume_id))
        self.refused("REPL-DEST-04", destination, here, unfit)

    def capabilities(self):
        pb, driver = self.pb, self.driver
        told = driver.call(
            driver.controller.ControllerGetCapabilities, pb.ControllerGetCapabilitiesRequest()
        )
        told = [one.rpc.type for one in told.capabilities]
        every = set(pb.ControllerServiceCapability.RPC.Type.values()) - {0}
        self.row(
            "CSI-CTRLCAPS-01 CSI-CTRLCAPS-13 CSIN-MODIFY-01 CSIN-GETSNAPSHOT-01 CSIN-HEALTH-01",
            lambda: check(len(told) == len(set(told)) and every <= set(told), f"{every - set(told)}"),
        )
        told = driver.call(driver.node.NodeGetCapabilities, pb.NodeGetCapabilitiesRequest())
        told = [one.rpc.type for one in told.capabilities]
        # A plugin advertises VOLUME_MOUNT_GROUP with --volume-mount-group alone.
        by_flag = pb.NodeServiceCapability.RPC.VOLUME_MOUNT_GROUP
        every = set(pb.NodeServiceCapability.RPC.Type.values()) - {0, by_flag}
        self.row(
            "CSI-NODECAPS-01 CSI-NODECAPS-04 CSIN-HEALTH-03",
            lambda: check(len(told) == len(set(told)) and set(told) == every, f"{every ^ set(told)}"),
        )
        info = driver.call(driver.node.NodeGetInfo, pb.NodeGetInfoRequest())

        def node():
            check(0 < len(info.node_id) <= 256 and info.max_volumes_per_node >= 0, f"{info}")
            segments = info.accessible_topology.segments
            check(all(key.startswith("quoin.io/") for key in segments), f"{segments}")

        self.row("CSI-NODEINFO-01 CSI-NODEINFO-04 CSI-NODEINFO-07 CSI-NODEINFO-10", node)
        self.row("CSI-NODEINFO-11 CSI-TOPOLOGY-20", node)

    def creation(self):
        pb, controller, driver = self.pb, self.driver.controller, self.driver
        refuse = lambda names, request, code: self.refused(names, controller.CreateVolume, request, code)
        bad = CODE.INVALID_ARGUMENT
        refuse("CSI-CREATEVOLUME-08 CSI-ERR-05", self.create(""), bad)
        refuse("CSI-CREATEVOLUME-14 CSI-SIZE-02", self.create("x" * 129), bad)
        for letter in BANNED:
            refuse("CSI-CREATEVOLUME-13", self.create(f"a{letter}b"), bad)
        refuse("CSI-CREATEVOLUME-20 CSI-FIELD-02", self.create("x", volume_capabilities=[]), bad)
        for names, capability in self.incapable():
            refuse(names, self.create("x", volume_capabilities=[capability]), bad)
            both = [self.capability, capability]
            refuse(
                "CSI-CREATEVOLUME-17 CSI-CREATEVOLUME-19", self.create("x", volume_capabilities=both), bad
            )
        refuse("CSI-CREATEVOLUME-21", self.create("x", parameters={"colour": "red"}), bad)
        refuse("CSI-CREATEVOLUME-21", self.create("x", parameters={"replicas": "many"}), bad)
        refuse("CSI-SIZE-03", self.create("x", parameters={"replicas": "3" * 4096}), bad)
        refuse("CSI-SECRET-02", self.create("x", secrets={"pass word": "x"}), bad)
        refuse("CSIN-MODIFY-04", self.create("x", mutable_parameters={"colour": "red"}), bad)
        refuse("CSI-ERR-06", self.create("x", required=-1), bad)
        refuse("CSI-SOURCE-01", self.create("x", volume_content_source=pb.VolumeContentSource()), bad)
        snapshot = pb.VolumeContentSource.SnapshotSource
        volume = pb.VolumeContentSource.VolumeSource
        refuse(
            "CSI-SOURCE-02",
            self.create("x", volume_content_source=pb.VolumeContentSource(snapshot=snapshot())),
            bad,
        )
        refuse(
            "CSI-SOURCE-04",
            self.create("x", volume_content_source=pb.VolumeContentSource(volume=volume())),
            bad,
        )
        for unknown in (UNKNOWN, ZEROES):
            for source in (
                pb.VolumeContentSource(snapshot=snapshot(snapshot_id=unknown)),
                pb.VolumeContentSource(volume=volume(volume_id=unknown)),
            ):
                refuse(
                    "CSI-CREATEVOLUME-34 CSI-CTRLCAPS-10",
                    self.create("x", volume_content_source=source),
                    CODE.NOT_FOUND,
                )
        refuse("CSI-CREATEVOLUME-41", self.create("x", (1 << 63) - 1), CODE.OUT_OF_RANGE)
        refuse("CSI-CREATEVOLUME-41", self.create("x", SIZE + MIB, SIZE), CODE.OUT_OF_RANGE)
        topology = lambda *segments: [pb.Topology(segments=one) for one in segments]
        need = lambda requisite, preferred=(): pb.TopologyRequirement(
            requisite=topology(*requisite), preferred=topology(*preferred)
        )
        for names, needs in (
            ("CSI-TOPOLOGY-01", need([])),
            ("CSI-TOPOLOGY-09", need([{"quoin.io/node": "a"}], [{"quoin.io/node": "b"}])),
            ("CSI-TOPOLOGY-16", need([{"a/b/c": "d"}])),
            ("CSI-TOPOLOGY-16", need([{"quoin.io/": "d"}])),
            ("CSI-TOPOLOGY-17", need([{"quoin.io/-x": "d"}])),
            ("CSI-TOPOLOGY-18", need([{"Quoin_/zone": "d"}])),
            ("CSI-TOPOLOGY-21", need([{"quoin.io/zone": "d", "quoin.io/Zone": "d"}])),
            ("CSI-TOPOLOGY-22", need([{"quoin.io/zone": "-"}])),
            ("CSI-TOPOLOGY-22", need([{"quoin.io/zone": "x" * 64}])),
        ):
            refuse(names, self.create("x", accessibility_requirements=needs), bad)
        far = need([{"quoin.io/zone": "nowhere"}])
        refuse(
            "CSI-TOPOLOGY-12 CSI-CREATEVOLUME-40",
            self.create("x", accessibility_requirements=far, parameters={"local": "pinned"}),
            CODE.RESOURCE_EXHAUSTED,
        )
        volume = self.make(self.name)
        again = lambda **fields: driver.call(
            controller.CreateVolume, self.create(self.name, **fields)
        ).volume

        def whole():
            check(0 < len(volume.volume_id.encode()) <= 128, "its id")
            check(volume.capacity_bytes == SIZE, "its size")
            check(not volume.HasField("content_source"), "it has a source")
            check(again() == volume and again(required=SIZE - MIB) == volume, "a repeat differs")

        self.row("CSI-CREATEVOLUME-01 CSI-CREATEVOLUME-02 CSI-CREATEVOLUME-16", whole)
        self.row("CSI-CREATEVOLUME-30 CSI-VOLUME-02 CSI-VOLUME-03 CSI-VOLUME-14", whole)
        self.row("CSI-CAPACITY-01 CSI-FIELD-01 CSI-SIZE-01", whole)
        taken = CODE.ALREADY_EXISTS
        refuse("CSI-CREATEVOLUME-35", self.create(self.name, GROWN), taken)
        refuse("CSI-CREATEVOLUME-35", self.create(self.name, SIZE - MIB, SIZE - 1), taken)
        refuse("CSI-CREATEVOLUME-37", self.create(self.name, parameters={"replicas": "1"}), taken)
        self.row("CSI-CREATEVOLUME-37", lambda: check(again(parameters={"csi.storage.k8s.io/pv/name": "x"}) == volume, "an added key is compared"))
        pinned = dict(parameters={"local": "pinned"})
        bound = self.make(f"{self.name}-bound", **pinned)
        refuse("CSI-CREATEVOLUME-38", self.create(f"{self.name}-bound", accessibility_requirements=far, **pinned), taken)
        driver.call(controller.DeleteVolume, pb.DeleteVolumeRequest(volume_id=bound.volume_id))
        of_itself = pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=volume.volume_id))
        refuse("CSI-CREATEVOLUME-39", self.create(self.name, volume_content_source=of_itself), taken)
        names = ("n" * 128, f"a b/c'\"\t\n{uuid.uuid4()}", "名" * 30 + str(uuid.uuid4()))
        others = [self.make(name) for name in names]

        def apart():
            ids = {one.volume_id for one in others} | {volume.volume_id}
            check(len(ids) == len(others) + 1, "two volumes share an id")

        self.row("CSI-CREATEVOLUME-12 CSI-CREATEVOLUME-14 CSI-VOLUME-04", apart)
        for other in others:
            driver.call(controller.DeleteVolume, pb.DeleteVolumeRequest(volume_id=other.volume_id))
        return volume

    def reading(self, volume):
        pb, driver, controller = self.pb, self.driver, self.driver.controller
        listed = lambda **fields: driver.call(controller.ListVolumes, pb.ListVolumesRequest(**fields))

        def pages():
            ids, token = [], ""
            while True:
                page = listed(max_entries=1, starting_token=token)
                check(len(page.entries) <= 1, "more than were asked for")
                for entry in page.entries:
                    check(entry.HasField("volume") and entry.HasField("status"), "a part is missing")
                    check(entry.status.volume_condition.message, "no condition")
                    ids.append(entry.volume.volume_id)
                token = page.next_token
                if not token:
                    break
            check(ids.count(volume.volume_id) == 1 and len(ids) == len(set(ids)), f"{ids}")
            check({one.volume.volume_id for one in listed().entries} == set(ids), "pages differ")

        self.row("CSI-LISTVOLUMES-01 CSI-LISTVOLUMES-02 CSI-LISTVOLUMES-04 CSI-LISTVOLUMES-05", pages)
        self.row("CSI-LISTVOLUMES-11 CSI-LISTVOLUMES-12 CSI-LISTVOLUMES-13 CSI-CONDITION-02", pages)
        self.refused(
            "CSI-LISTVOLUMES-07", controller.ListVolumes, pb.ListVolumesRequest(max_entries=-1), CODE.INVALID_ARGUMENT
        )
        self.refused(
            "CSI-LISTVOLUMES-16", controller.ListVolumes, pb.ListVolumesRequest(starting_token="x"), CODE.ABORTED
        )
        get = lambda volume_id: pb.ControllerGetVolumeRequest(volume_id=volume_id)

        def shown():
            found = driver.call(controller.ControllerGetVolume, get(volume.volume_id))
            check(found.volume == volume and found.HasField("status"), "it is shown otherwise")
            check(found.status.HasField("volume_condition"), "no condition")
            entry = [one for one in listed().entries if one.volume.volume_id == volume.volume_id]
            check(entry[0].volume == volume, "it is listed otherwise")

        self.row("CSI-GETVOLUME-01 CSI-GETVOLUME-02 CSI-GETVOLUME-06 CSI-GETVOLUME-07", shown)
        self.row("CSI-VOLUME-12 CSI-VOLUME-15 CSI-SERVICES-06", shown)
        self.refused("CSI-GETVOLUME-04", controller.ControllerGetVolume, get(""), CODE.INVALID_ARGUMENT)
        for unknown in (UNKNOWN, ZEROES):
            self.refused("CSI-GETVOLUME-09", controller.ControllerGetVolume, get(unknown), CODE.NOT_FOUND)
        validation = lambda volume_id, *capabilities, **fields: pb.ValidateVolumeCapabilitiesRequest(
            volume_id=volume_id, volume_capabilities=capabilities, **fields
        )
        validate = lambda *capabilities, **fields: driver.call(
            controller.ValidateVolumeCapabilities, validation(volume.volume_id, *capabilities, **fields)
        )

        def confirmed():
            found = validate(self.capability, volume_context=volume.volume_context)
            check(list(found.confirmed.volume_capabilities) == [self.capability], "not confirmed")
            check(found == validate(self.capability, volume_context=volume.volume_context), "twice")
            other = dict(volume.volume_context)
            if other:
                other[next(iter(other))] = "another"
                check(not validate(self.capability, volume_context=other).HasField("confirmed"), "context")

        self.row("CSI-VALIDATE-01 CSI-VALIDATE-02 CSI-VALIDATE-03 CSI-VALIDATE-06", confirmed)
        self.row("CSI-VALIDATE-11 CSI-VALIDATE-13", confirmed)

        def unconfirmed():
            found = validate(self.capability, mutable_parameters={"colour": "red"})
            check(not found.HasField("confirmed") and "colour" in found.message, f"{found}")

        self.row("CSIN-MODIFY-06", unconfirmed)
        validator = controller.ValidateVolumeCapabilities
        self.refused("CSI-VALIDATE-05", validator, validation("", self.capability), CODE.INVALID_ARGUMENT)
        self.refused("CSI-VALIDATE-07", validator, validation(volume.volume_id), CODE.INVALID_ARGUMENT)
        self.refused("CSI-VALIDATE-17", validator, validation(UNKNOWN, self.capability), CODE.NOT_FOUND)
        for names, capability in self.incapable():
            self.refused(names, validator, validation(volume.volume_id, capability), CODE.INVALID_ARGUMENT)
        room = lambda **fields: driver.call(controller.GetCapacity, pb.GetCapacityRequest(**fields))

        def capacity():
            one = room(parameters={"replicas": "1"})
            three = room(parameters={"replicas": "3"})
            check(one.available_capacity >= three.available_capacity >= 0, "more for more replicas")
            check(three.maximum_volume_size.value >= 0 and three.minimum_volume_size.value >= 0, "sizes")
            far = pb.Topology(segments={"quoin.io/zone": "nowhere"})
            pinned = room(accessible_topology=far, parameters={"local": "pinned"})
            check(pinned.available_capacity == 0, "room where there is none")
            anywhere = room(accessible_topology=far).available_capacity
            check(anywhere == room().available_capacity, "a volume that is used anywhere has all the room")

        self.row("CSI-GETCAPACITY-01 CSI-GETCAPACITY-03 CSI-GETCAPACITY-04 CSI-GETCAPACITY-07", capacity)
        self.row("CSI-GETCAPACITY-09 CSI-GETCAPACITY-12", capacity)

    def modification(self, volume):
        pb, driver, controller = self.pb, self.driver, self.driver.controller
        change = lambda volume_id, **values: pb.ControllerModifyVolumeRequest(
            volume_id=volume_id, mutable_parameters=values
        )
        modify = controller.ControllerModifyVolume

        def changed():
            for _ in range(2):
                driver.call(modify, change(volume.volume_id, iopsLimit="5000"))
            driver.call(modify, change(volume.volume_id))
            found = driver.call(
                controller.ControllerGetVolume, pb.ControllerGetVolumeRequest(volume_id=volume.volume_id)
            )
            check(found.volume.volume_context == volume.volume_context, "the context changed")
            again = driver.call(controller.CreateVolume, self.create(self.name)).volume
            check(again.volume_id == volume.volume_id, "a repeat makes another one")

        self.row("CSIN-MODIFY-08 CSIN-MODIFY-12 CSIN-MODIFY-14 CSIN-MODIFY-05", changed)
        self.refused("CSIN-MODIFY-07", modify, change(""), CODE.INVALID_ARGUMENT)
        self.refused("CSIN-MODIFY-10", modify, change(volume.volume_id, colour="red"), CODE.INVALID_ARGUMENT)
        self.refused(
            "CSIN-MODIFY-10", modify, change(volume.volume_id, durability="soon"), CODE.INVALID_ARGUMENT
        )
        for unknown in (UNKNOWN, ZEROES):
            self.refused("CSIN-MODIFY-11", modify, change(unknown, reads="leased"), CODE.NOT_FOUND)

    def publishing(self, volume):
        pb, driver, controller = self.pb, self.driver, self.driver.controller
        publish, unpublish = controller.ControllerPublishVolume, controller.ControllerUnpublishVolume
        take_back = lambda volume_id, node_id="": pb.ControllerUnpublishVolumeRequest(
            volume_id=volume_id, node_id=node_id
        )
        bad, volume_id = CODE.INVALID_ARGUMENT, volume.volume_id
        self.refused("CSI-CTRLPUBLISH-08", publish, self.publication(""), bad)
        self.refused("CSI-CTRLPUBLISH-09", publish, self.publication(volume_id, ""), bad)
        self.refused(
            "CSI-CTRLPUBLISH-11", publish, self.publication(volume_id, volume_capability=None), bad
        )
        for names, capability in self.incapable():
            request = self.publication(volume_id, volume_capability=capability)
            self.refused(f"{names} CSI-CTRLPUBLISH-12", publish, request, bad)
        if volume.volume_context:
            other = {**volume.volume_context, next(iter(volume.volume_context)): "another"}
            request = self.publication(volume_id, volume_context=other)
            self.refused("CSI-CTRLPUBLISH-17", publish, request, bad)
        self.refused("CSI-CTRLPUBLISH-25", publish, self.publication(UNKNOWN), CODE.NOT_FOUND)
        self.refused("CSI-CTRLPUBLISH-26", publish, self.publication(volume_id, "nobody"), CODE.NOT_FOUND)
        context = dict(driver.call(publish, self.publication(volume_id)).publish_context)

        def published():
            again = driver.call(publish, self.publication(volume_id)).publish_context
            check(dict(again) == context, "another context")
            found = driver.call(
                controller.ControllerGetVolume, pb.ControllerGetVolumeRequest(volume_id=volume_id)
            )
            check(list(found.status.published_node_ids) == [self.node_id], "other nodes")

        self.row("CSI-CTRLPUBLISH-01 CSI-CTRLPUBLISH-04 CSI-CTRLPUBLISH-19 CSI-NODEINFO-05", published)
        self.row("CSI-GETVOLUME-05", published)
        self.refused(
            "CSI-CTRLPUBLISH-27", publish, self.publication(volume_id, readonly=True), CODE.ALREADY_EXISTS
        )
        self.refused(
            "CSI-DELETEVOLUME-12",
            controller.DeleteVolume,
            pb.DeleteVolumeRequest(volume_id=volume_id),
            CODE.FAILED_PRECONDITION,
        )
        self.refused("CSI-CTRLUNPUBLISH-08", unpublish, take_back(""), bad)
        return context

    def on_node(self, volume, context):
        """Staging, publishing, statistics, growth and back."""
        pb, driver, node = self.pb, self.driver, self.driver.node
        volume_id, bad = volume.volume_id, CODE.INVALID_ARGUMENT
        # Paths of 128 bytes and more are no strings of the interface.
        home = self.directory / ("d" * 130)
        staging, target = home / "staging", home / "pods" / "target"
        staging.mkdir(parents=True)
        target.parent.mkdir()
        file = home / "file"
        file.write_text("x")
        stage, publish = node.NodeStageVolume, node.NodePublishVolume
        self.refused("CSI-NODESTAGE-08", stage, self.stage("", staging), bad)
        self.refused("CSI-NODESTAGE-10", stage, self.stage(volume_id, "some/path"), bad)
        self.refused("CSI-NODESTAGE-11", stage, self.stage(volume_id, file, context), bad)
        self.refused("CSI-NODESTAGE-13", stage, self.stage(volume_id, ""), bad)
        self.refused("CSI-NODESTAGE-16", stage, self.stage(volume_id, staging, volume_capability=None), bad)
        self.refused("CSI-NODESTAGE-21", stage, self.stage(UNKNOWN, staging), CODE.NOT_FOUND)
        for names, capability in self.incapable():
            self.refused(names, stage, self.stage(volume_id, staging, volume_capability=capability), bad)
        many = self.capability_of(self.modes.MULTI_NODE_MULTI_WRITER)
        if not self.is_block:
            request = self.stage(volume_id, staging, context, volume_capability=many)
            self.refused("CSI-NODESTAGE-23 CSI-NODESTAGE-17", stage, request, CODE.FAILED_PRECONDITION)
            flags = self.capability_of(self.modes.SINGLE_NODE_WRITER, flags=["x" * 5000])
            request = self.stage(volume_id, staging, context, volume_capability=flags)
            self.refused("CSI-VOLCAP-04", stage, request, bad)
        place = lambda **fields: self.place(volume_id, staging, target, context, **fields)
        self.refused("CSI-INTERACT-10", publish, place(), CODE.FAILED_PRECONDITION)

        def staged():
            for _ in range(2):
                driver.call(stage, self.stage(volume_id, staging, context))
            check(self.is_block or len(self.mounts_at(staging)) == 1, "not one mount")

        self.row("CSI-NODESTAGE-01 CSI-NODESTAGE-02 CSI-NODESTAGE-05 CSI-NODESTAGE-15", staged)
        self.row("CSI-SIZE-04 CSI-CTRLPUBLISH-20 CSI-SERVICES-01", staged)
        elsewhere = home / "elsewhere"
        elsewhere.mkdir()
        self.refused(
            "CSI-NODESTAGE-24", stage, self.stage(volume_id, elsewhere, context), CODE.FAILED_PRECONDITION
        )
        self.refused("CSI-NODEPUBLISH-22", publish, self.place("", staging, target), bad)
        self.refused("CSI-NODEPUBLISH-24", publish, self.place(volume_id, "a/b", target), bad)
        self.refused("CSI-NODEPUBLISH-27", publish, self.place(volume_id, staging, "a/b"), bad)
        self.refused("CSI-NODEPUBLISH-32", publish, self.place(volume_id, staging, ""), bad)
        self.refused("CSI-NODEPUBLISH-34", publish, place(volume_capability=None), bad)
        self.refused("CSI-NODEPUBLISH-40", publish, self.place(UNKNOWN, staging, target), CODE.NOT_FOUND)
        self.refused(
            "CSI-NODEPUBLISH-43", publish, self.place(volume_id, "", target), CODE.FAILED_PRECONDITION
        )

        def published():
            for _ in range(2):
                driver.call(publish, place())
            check(len(self.mounts_at(target)) == 1, "not one mount")
            check(target.is_block_device() if self.is_block else target.is_dir(), "of another kind")

        self.row("CSI-NODEPUBLISH-01 CSI-NODEPUBLISH-03 CSI-NODEPUBLISH-26 CSI-NODEPUBLISH-31", published)
        self.row("CSI-NODEPUBLISH-33 CSI-NODEPUBLISH-21 CSI-CTRLCAPS-19 CSI-NODECAPS-07", published)
        self.row("CSI-NODEPUBLISH-29" if self.is_block else "CSI-NODEPUBLISH-30", published)
        self.refused("CSI-NODEPUBLISH-41", publish, place(readonly=True), CODE.ALREADY_EXISTS)
        content = os.urandom(MIB)

        def written():
            with open(target if self.is_block else target / "file", "r+b" if self.is_block else "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())

        self.row("CSI-NODEPUBLISH-36", written)
        stats = lambda volume_id, path, staging="": pb.NodeGetVolumeStatsRequest(
            volume_id=volume_id, volume_path=str(path), staging_target_path=str(staging)
        )

        def measured():
            for request in (stats(volume_id, target), stats(volume_id, target, staging)):
                found = driver.call(node.NodeGetVolumeStats, request)
                check(found.usage, "no figures")
                for usage in found.usage:
                    check(usage.total > 0 and usage.available >= 0 and usage.used >= 0, f"{usage}")
                    check(usage.unit in (1, 2), f"{usage}")
                check(found.volume_condition.message and not found.volume_condition.abnormal, f"{found}")

        self.row("CSI-NODESTATS-01 CSI-NODESTATS-09 CSI-NODESTATS-10 CSI-NODESTATS-11", measured)
        self.row("CSI-NODESTATS-13 CSI-NODESTATS-14 CSI-NODESTATS-15 CSI-NODESTATS-16", measured)
        self.row("CSI-NODESTATS-17 CSI-CONDITION-01", measured)
        ask = node.NodeGetVolumeStats
        self.refused("CSI-NODESTATS-05", ask, stats("", target), bad)
        self.refused("CSI-NODESTATS-07", ask, stats(volume_id, "some/path"), CODE.NOT_FOUND)
        self.refused("CSI-NODESTATS-08", ask, stats(volume_id, ""), bad)
        self.refused("CSI-NODESTATS-10", ask, stats(volume_id, target, "some/path"), bad)
        self.refused("CSI-NODESTATS-19", ask, stats(UNKNOWN, target), CODE.NOT_FOUND)
        self.refused("CSI-NODESTATS-19", ask, stats(volume_id, home), CODE.NOT_FOUND)
        self.healing(volume, staging, target, home / "pods" / "never")
        self.reclaiming(volume, staging, home / "pods" / "never")
        self.growth(volume, staging, target)
        back = lambda volume_id, path: pb.NodeUnpublishVolumeRequest(
            volume_id=volume_id, target_path=str(path)
        )
        down = lambda volume_id, path: pb.NodeUnstageVolumeRequest(
            volume_id=volume_id, staging_target_path=str(path)
        )
        unpublish, unstage = node.NodeUnpublishVolume, node.NodeUnstageVolume
        self.refused("CSI-INTERACT-11", unstage, down(volume_id, staging), CODE.FAILED_PRECONDITION)
        self.refused("CSI-NODEUNPUBLISH-05", unpublish, back("", target), bad)
        self.refused("CSI-NODEUNPUBLISH-06", unpublish, back(volume_id, "a/b"), bad)
        self.refused("CSI-NODEUNPUBLISH-08", unpublish, back(volume_id, ""), bad)
        self.refused("CSI-NODEUNPUBLISH-11", unpublish, back(UNKNOWN, home / "x"), CODE.NOT_FOUND)
        self.refused("CSI-NODEUNSTAGE-08", unstage, down("", staging), bad)
        self.refused("CSI-NODEUNSTAGE-09", unstage, down(volume_id, "a/b"), bad)
        self.refused("CSI-NODEUNSTAGE-10", unstage, down(volume_id, ""), bad)
        self.refused("CSI-NODEUNSTAGE-13", unstage, down(UNKNOWN, home / "x"), CODE.NOT_FOUND)

        def taken_back():
            for _ in range(2):
                driver.call(unpublish, back(volume_id, target))
            check(not target.exists() and not self.mounts_at(target), "something is left at the target")
            driver.call(unpublish, back(volume_id, home / "never"))

        self.row("CSI-NODEUNPUBLISH-01 CSI-NODEUNPUBLISH-03 CSI-NODEUNPUBLISH-07", taken_back)
        self.row("CSI-NODEUNPUBLISH-09", taken_back)

        def again_read_only():
            driver.call(publish, place(readonly=True))
            path = target if self.is_block else target / "file"
            with open(path, "rb") as opened:
                check(opened.read(MIB) == content, "another content")
            try:
                with open(path, "r+b", buffering=0) as opened:
                    opened.write(content[:4096])
                    os.fsync(opened.fileno())
            except OSError:
                return
            finally:
                driver.call(unpublish, back(volume_id, target))
            raise Failure("a write through a read-only publication")

        self.row("CSI-NODEPUBLISH-36", again_read_only)

        def unstaged():
            for _ in range(2):
                driver.call(unstage, down(volume_id, staging))
            check(not self.mounts_at(staging), "a mount is left")

        self.row("CSI-NODEUNSTAGE-01 CSI-NODEUNSTAGE-02 CSI-NODEUNSTAGE-05 CSI-NODEUNSTAGE-07", unstaged)
        self.row("CSI-NODEUNSTAGE-11", unstaged)

    def growth(self, volume, staging, target):
        pb, driver = self.pb, self.driver
        controller, node = driver.controller, driver.node
        volume_id, bad = volume.volume_id, CODE.INVALID_ARGUMENT
        grow = lambda volume_id, required=0, limit=0: pb.ControllerExpandVolumeRequest(
            volume_id=volume_id,
            capacity_range=pb.CapacityRange(required_bytes=required, limit_bytes=limit),
        )
        expand = controller.ControllerExpandVolume
        self.refused("CSI-CTRLEXPAND-12", expand, grow("", GROWN), bad)
        without = pb.ControllerExpandVolumeRequest(volume_id=volume_id)
        self.refused("CSI-CTRLEXPAND-13", expand, without, bad)
        self.refused("CSI-CTRLEXPAND-19", expand, grow(UNKNOWN, GROWN), CODE.NOT_FOUND)
        self.refused("CSI-CTRLEXPAND-21", expand, grow(volume_id, (1 << 63) - 1), CODE.OUT_OF_RANGE)
        self.refused("CSI-CTRLEXPAND-21", expand, grow(volume_id, 0, MIB), CODE.OUT_OF_RANGE)

        def grown():
            for _ in range(2):
                found = driver.call(expand, grow(volume_id, GROWN, GROWN))
                check(found.capacity_bytes == GROWN and found.node_expansion_required, f"{found}")

        self.row("CSI-CTRLEXPAND-01 CSI-CTRLEXPAND-02 CSI-CTRLEXPAND-16 CSI-CTRLEXPAND-17", grown)
        self.row("CSI-PLUGINCAPS-10 CSI-PLUGINCAPS-12 CSI-CTRLEXPAND-20", grown)
        request = lambda volume_id, path, staging="", **size: pb.NodeExpandVolumeRequest(
            volume_id=volume_id,
            volume_path=str(path),
            staging_target_path=str(staging),
            capacity_range=pb.CapacityRange(**size) if size else None,
        )
        on_node = node.NodeExpandVolume
        self.refused("CSI-NODEEXPAND-10", on_node, request("", target), bad)
        self.refused("CSI-NODEEXPAND-11", on_node, request(volume_id, ""), bad)
        self.refused("CSI-NODEEXPAND-14", on_node, request(volume_id, target, "a/b"), bad)
        self.refused("CSI-NODEEXPAND-21", on_node, request(UNKNOWN, target), CODE.NOT_FOUND)
        far = request(volume_id, target, required_bytes=1 << 50)
        self.refused("CSI-NODEEXPAND-23", on_node, far, CODE.OUT_OF_RANGE)

        def usable():
            for path in (target, target, staging):
                driver.call(on_node, request(volume_id, path, staging))
            if self.is_block:
                with open(target, "rb") as opened:
                    shown = opened.seek(0, os.SEEK_END)
            else:
                figures = os.statvfs(target)
                shown = figures.f_blocks * figures.f_frsize
            check(shown > (SIZE + GROWN) // 2, f"{shown} bytes are shown")

        self.row("CSI-NODEEXPAND-01 CSI-NODEEXPAND-02 CSI-NODEEXPAND-12 CSI-NODEEXPAND-15", usable)

    def snapshots(self, volume):
        """Of a volume that is published, so that a target serves it."""
        pb, driver, controller = self.pb, self.driver, self.driver.controller
        make, remove = controller.CreateSnapshot, controller.DeleteSnapshot
        volume_id, bad = volume.volume_id, CODE.INVALID_ARGUMENT
        self.refused("CSI-CREATESNAPSHOT-14", make, self.snap("", "s"), bad)
        self.refused("CSI-CREATESNAPSHOT-15", make, self.snap(volume_id, ""), bad)
        self.refused("CSI-CREATESNAPSHOT-16", make, self.snap(volume_id, "x" * 129), bad)
        for letter in BANNED:
            self.refused("CSI-CREATESNAPSHOT-17", make, self.snap(volume_id, f"a{letter}"), bad)
        unknown = self.snap(volume_id, "s", parameters={"colour": "red"})
        self.refused("CSI-CREATESNAPSHOT-19", make, unknown, bad)
        self.refused("CSI-CREATESNAPSHOT-21", make, self.snap(UNKNOWN, "s"), CODE.NOT_FOUND)
        empty = self.snap(volume_id, "s", accessibility_requirements=pb.TopologyRequirement())
        self.refused("CSIN-SNAPTOPO-05", make, empty, bad)
        name = f"s-{self.name}"
        first = driver.call(make, self.snap(volume_id, name)).snapshot
        second = driver.call(make, self.snap(volume_id, f"t-{self.name}")).snapshot

        def made():
            check(driver.call(make, self.snap(volume_id, name)).snapshot == first, "a repeat differs")
            check(0 < len(first.snapshot_id.encode()) <= 128, "its id")
            check(first.snapshot_id != second.snapshot_id, "two share an id")
            check(first.source_volume_id == volume_id and first.size_bytes >= 0, f"{first}")
            check(first.HasField("creation_time") and first.ready_to_use, f"{first}")
            check(not first.group_snapshot_id, "it is of a group")

        self.row("CSI-CREATESNAPSHOT-01 CSI-CREATESNAPSHOT-02 CSI-CREATESNAPSHOT-10", made)
        self.row("CSI-CREATESNAPSHOT-20 CSI-SNAPSHOT-02 CSI-SNAPSHOT-03 CSI-SNAPSHOT-05", made)
        self.row("CSI-SNAPSHOT-07 CSI-LISTSNAPSHOTS-17 CSIN-SNAPTOPO-02", made)
        other = self.make(f"other-{self.name}")
        self.refused("CSI-CREATESNAPSHOT-22", make, self.snap(other.volume_id, name), CODE.ALREADY_EXISTS)
        listed = lambda **fields: driver.call(controller.ListSnapshots, pb.ListSnapshotsRequest(**fields))

        def pages():
            found, token = [], ""
            while True:
                page = listed(source_volume_id=volume_id, max_entries=1, starting_token=token)
                check(len(page.entries) <= 1, "more than were asked for")
                found += [entry.snapshot for entry in page.entries]
                token = page.next_token
                if not token:
                    break
            check(sorted(one.snapshot_id for one in found) == sorted((first.snapshot_id, second.snapshot_id)), "others")
            one = listed(snapshot_id=first.snapshot_id).entries
            check([entry.snapshot for entry in one] == [first], "it is listed otherwise")
            check(not listed(snapshot_id=UNKNOWN).entries, "an unknown one is listed")

        self.row("CSI-LISTSNAPSHOTS-01 CSI-LISTSNAPSHOTS-02 CSI-LISTSNAPSHOTS-05 CSI-LISTSNAPSHOTS-06", pages)
        self.refused(
            "CSI-LISTSNAPSHOTS-08", controller.ListSnapshots, pb.ListSnapshotsRequest(max_entries=-1), bad
        )
        self.refused(
            "CSI-LISTSNAPSHOTS-16", controller.ListSnapshots, pb.ListSnapshotsRequest(starting_token="x"), CODE.ABORTED
        )
        get = lambda snapshot_id: pb.GetSnapshotRequest(snapshot_id=snapshot_id)
        self.row(
            "CSIN-GETSNAPSHOT-04 CSIN-GETSNAPSHOT-05",
            lambda: check(driver.call(controller.GetSnapshot, get(first.snapshot_id)).snapshot == first, "otherwise"),
        )
        self.refused("CSIN-GETSNAPSHOT-02", controller.GetSnapshot, get(""), bad)
        for nobody in (UNKNOWN, ZEROES):
            self.refused("CSIN-GETSNAPSHOT-03", controller.GetSnapshot, get(nobody), CODE.NOT_FOUND)
        self.metadata(first, second)
        source = pb.VolumeContentSource(
            snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=first.snapshot_id)
        )
        self.refused(
            "CSI-CREATEVOLUME-42 CSI-SNAPSHOT-01",
            controller.CreateVolume,
            self.create(f"tiny-{self.name}", SIZE, SIZE, volume_content_source=source),
            CODE.OUT_OF_RANGE,
        )
        clash = self.create(f"clash-{self.name}", volume_content_source=source, parameters={"blockSize": "512"})
        self.refused("CSI-CREATEVOLUME-32", controller.CreateVolume, clash, bad)
        copy = self.make(f"copy-{self.name}", volume_content_source=source)

        def copied():
            check(copy.content_source == source, "its source is not named")
            check(copy.capacity_bytes >= first.size_bytes, "it is smaller than its source")

        self.row("CSI-SOURCE-03 CSI-CTRLCAPS-07 CSI-SNAPSHOT-08 CSI-SNAPSHOT-01 CSI-VOLUME-14", copied)
        of_volume = pb.VolumeContentSource(
            volume=pb.VolumeContentSource.VolumeSource(volume_id=volume_id)
        )
        cloned = self.make(f"clone-{self.name}", volume_content_source=of_volume)
        self.row(
            "CSI-SOURCE-05 CSI-VOLUME-14",
            lambda: check(cloned.content_source == of_volume, "its source is not named"),
        )
        self.refused("CSI-DELETESNAPSHOT-07", remove, pb.DeleteSnapshotRequest(), bad)

        def removed():
            for snapshot_id in (first.snapshot_id, second.snapshot_id, first.snapshot_id, UNKNOWN):
                driver.call(remove, pb.DeleteSnapshotRequest(snapshot_id=snapshot_id))
            check(not listed(source_volume_id=volume_id).entries, "they are listed still")
            driver.refused(controller.GetSnapshot, get(first.snapshot_id), CODE.NOT_FOUND)

        self.row("CSI-DELETESNAPSHOT-01 CSI-DELETESNAPSHOT-02 CSI-SNAPSHOT-11", removed)

    def metadata(self, first, second):
        pb, driver = self.pb, self.driver
        allocated = lambda snapshot_id, **fields: pb.GetMetadataAllocatedRequest(snapshot_id=snapshot_id, **fields)
        delta = lambda base, target, **fields: pb.GetMetadataDeltaRequest(
            base_snapshot_id=base, target_snapshot_id=target, **fields
        )
        service = driver.metadata

        def stream(method, request):
            messages = list(method(request, timeout=60))
            if not messages:
                return []
            check(len({one.block_metadata_type for one in messages}) == 1, "two kinds")
            check(len({one.volume_capacity_bytes for one in messages}) == 1, "two sizes")
            check(messages[0].block_metadata_type != 0, "an unknown kind")
            check(messages[0].volume_capacity_bytes == second.size_bytes, "another size")
            end = 0
            for message in messages:
                check(not request.max_results or len(message.block_metadata) <= request.max_results, "too many")
                for one in message.block_metadata:
                    check(one.byte_offset >= end and one.size_bytes > 0, f"{one}")
                    end = one.byte_offset + one.size_bytes
                    check(request.starting_offset < end <= second.size_bytes, f"{one}")
            return [(one.byte_offset, one.size_bytes) for message in messages for one in message.block_metadata]

        def whole():
            ranges = stream(service.GetMetadataAllocated, allocated(first.snapshot_id))
            check(ranges, "nothing is allocated")
            few = stream(service.GetMetadataAllocated, allocated(first.snapshot_id, max_results=1))
            check(sum(size for _, size in ranges) == sum(size for _, size in few), "pages differ")
            stream(service.GetMetadataAllocated, allocated(first.snapshot_id, starting_offset=first.size_bytes))
            # They were cut one after the other, with nothing written between them.
            check(not stream(service.GetMetadataDelta, delta(first.snapshot_id, second.snapshot_id)), "changes")

        self.row("CSIN-METADATA-01 CSIN-METADATA-06 CSIN-METADATA-07 CSIN-METADATA-08", whole)
        self.row("CSIN-METADATA-09 CSIN-METADATA-10 CSIN-METADATA-11 CSIN-METADATA-12", whole)

        def refused(names, method, request, code):
            def assertion():
                try:
                    list(method(request, timeout=60))
                except grpc.RpcError as error:
                    check(error.code() == code and error.details(), f"{error.code()}: {error.details()}")
                    return
                raise Failure(f"{code.name} was expected")

            self.row(names, assertion)

        bad = CODE.INVALID_ARGUMENT
        refused("CSIN-METADATA-02", service.GetMetadataAllocated, allocated(""), bad)
        refused("CSIN-METADATA-02", service.GetMetadataDelta, delta("", second.snapshot_id), bad)
        refused(
            "CSIN-METADATA-02", service.GetMetadataAllocated, allocated(first.snapshot_id, max_results=-1), bad
        )
        refused("CSIN-METADATA-03", service.GetMetadataDelta, delta(second.snapshot_id, first.snapshot_id), bad)
        refused("CSIN-METADATA-03", service.GetMetadataDelta, delta(first.snapshot_id, first.snapshot_id), bad)
        refused("CSIN-METADATA-04", service.GetMetadataAllocated, allocated(UNKNOWN), CODE.NOT_FOUND)
        refused("CSIN-METADATA-04", service.GetMetadataDelta, delta(ZEROES, second.snapshot_id), CODE.NOT_FOUND)
        for offset in (-1, first.size_bytes + 1):
            request = allocated(first.snapshot_id, starting_offset=offset)
            refused("CSIN-METADATA-05", service.GetMetadataAllocated, request, CODE.OUT_OF_RANGE)

    def groups(self, volume):
        pb, driver = self.pb, self.driver
        group, bad = driver.group, CODE.INVALID_ARGUMENT
        make = lambda name, *ids, **fields: pb.CreateVolumeGroupSnapshotRequest(
            name=name, source_volume_ids=ids, **fields
        )
        create = group.CreateVolumeGroupSnapshot
        volume_id, name = volume.volume_id, f"g-{self.name}"
        told = driver.call(group.GroupControllerGetCapabilities, pb.GroupControllerGetCapabilitiesRequest())
        self.row("CSI-GROUPCAPS-01", lambda: check(len(told.capabilities) == 1, f"{told}"))
        self.refused("CSI-GROUPCREATE-12", create, make("", volume_id), bad)
        self.refused("CSI-GROUPCREATE-13", create, make("x" * 129, volume_id), bad)
        for letter in BANNED:
            self.refused("CSI-GROUPCREATE-13", create, make(f"a{letter}", volume_id), bad)
        self.refused("CSI-GROUPCREATE-14", create, make(name), bad)
        self.refused("CSI-GROUPCREATE-17", create, make(name, volume_id, parameters={"colour": "red"}), bad)
        self.refused("CSI-GROUPCREATE-19", create, make(name, UNKNOWN), CODE.NOT_FOUND)
        made = driver.call(create, make(name, volume_id)).group_snapshot
        ids = [one.snapshot_id for one in made.snapshots]
        get = lambda group_id, ids: pb.GetVolumeGroupSnapshotRequest(
            group_snapshot_id=group_id, snapshot_ids=ids
        )
        remove = lambda group_id, ids: pb.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=group_id, snapshot_ids=ids
        )

        def whole():
            check(driver.call(create, make(name, volume_id)).group_snapshot == made, "a repeat differs")
            check(made.group_snapshot_id and made.ready_to_use and made.HasField("creation_time"), f"{made}")
            check(len(ids) == 1, "not one member")
            for one in made.snapshots:
                check(one.group_snapshot_id == made.group_snapshot_id and one.ready_to_use, f"{one}")
                found = driver.call(
                    driver.controller.GetSnapshot, pb.GetSnapshotRequest(snapshot_id=one.snapshot_id)
                )
                check(found.snapshot == one, "a member is shown otherwise")
            found = driver.call(group.GetVolumeGroupSnapshot, get(made.group_snapshot_id, ids))
            check(found.group_snapshot == made, "it is shown otherwise")

        self.row("CSI-GROUPCREATE-01 CSI-GROUPCREATE-03 CSI-GROUPCREATE-04 CSI-GROUPCREATE-18", whole)
        self.row("CSI-GROUPSNAP-01 CSI-GROUPSNAP-03 CSI-GROUPSNAP-04 CSI-GROUPSNAP-05", whole)
        self.row("CSI-GROUPGET-01 CSI-GROUPGET-08 CSI-SNAPSHOT-09 CSI-SNAPSHOT-12 CSIN-GROUP-02", whole)
        self.row("CSIN-GROUP-03 CSIN-GETSNAPSHOT-06", whole)
        self.refused(
            "CSI-DELETESNAPSHOT-10",
            driver.controller.DeleteSnapshot,
            pb.DeleteSnapshotRequest(snapshot_id=ids[0]),
            bad,
        )
        other = self.make(f"lone-{self.name}")
        self.refused("CSI-GROUPCREATE-20", create, make(name, other.volume_id), CODE.ALREADY_EXISTS)
        self.refused("CSI-GROUPGET-03", group.GetVolumeGroupSnapshot, get("", ids), bad)
        self.refused("CSI-GROUPGET-05", group.GetVolumeGroupSnapshot, get(made.group_snapshot_id, [UNKNOWN]), bad)
        self.refused("CSI-GROUPGET-06", group.GetVolumeGroupSnapshot, get(made.group_snapshot_id, []), bad)
        self.refused("CSI-GROUPGET-11", group.GetVolumeGroupSnapshot, get(UNKNOWN, ids), CODE.NOT_FOUND)
        self.refused("CSI-GROUPDELETE-03", group.DeleteVolumeGroupSnapshot, remove("", ids), bad)
        self.refused(
            "CSI-GROUPDELETE-05", group.DeleteVolumeGroupSnapshot, remove(made.group_snapshot_id, [UNKNOWN]), bad
        )
        self.refused(
            "CSI-GROUPDELETE-06", group.DeleteVolumeGroupSnapshot, remove(made.group_snapshot_id, []), bad
        )

        def removed():
            for group_id in (made.group_snapshot_id, made.group_snapshot_id, UNKNOWN):
                driver.call(group.DeleteVolumeGroupSnapshot, remove(group_id, ids))
            listed = driver.call(
                driver.controller.ListSnapshots, pb.ListSnapshotsRequest(source_volume_id=volume_id)
            )
            check(not listed.entries, "members are listed still")

        self.row("CSI-GROUPDELETE-01 CSI-GROUPDELETE-02 CSI-DELETESNAPSHOT-06", removed)

    def health(self, volume):
        pb, driver = self.pb, self.driver
        controller, node, bad = driver.controller, driver.node, CODE.INVALID_ARGUMENT
        of_controller = lambda volume_id: pb.ControllerGetVolumeHealthRequest(volume_id=volume_id)
        listing = lambda **fields: pb.ControllerListVolumeHealthRequest(**fields)
        of_node = lambda volume_id, **fields: pb.NodeGetVolumeHealthRequest(volume_id=volume_id, **fields)
        ask, on_list, on_node = (
            controller.ControllerGetVolumeHealth,
            controller.ControllerListVolumeHealth,
            node.NodeGetVolumeHealth,
        )
        self.refused("CSIN-HEALTH-11", ask, of_controller(""), bad)
        self.refused("CSIN-HEALTH-12", ask, of_controller(UNKNOWN), CODE.NOT_FOUND)
        self.refused("CSIN-HEALTH-16", on_list, listing(max_entries=-1), bad)
        self.refused("CSIN-HEALTH-17", on_list, listing(starting_token="x"), CODE.ABORTED)
        self.refused("CSIN-HEALTH-18", on_node, of_node(""), bad)
        relative = of_node(volume.volume_id, volume_publish_path="some/path")
        self.refused("CSIN-HEALTH-18", on_node, relative, bad)
        self.refused("CSIN-HEALTH-20", on_node, of_node(UNKNOWN), CODE.NOT_FOUND)

        def well():
            deadline = time.monotonic() + driver.patience_s
            while True:
                found = driver.call(ask, of_controller(volume.volume_id)).volume_health
                check(found.volume_id == volume.volume_id, "of another volume")
                for entry in found.health_statuses:
                    check(entry.status in (1, 2, 3) and entry.reason, f"{entry}")
                if not found.health_statuses:
                    break
                check(time.monotonic() < deadline, f"{found}")
                time.sleep(0.1)
            ill = [one.volume_id for one in driver.call(on_list, listing()).entries]
            check(volume.volume_id not in ill, "a healthy volume is listed")
            found = driver.call(on_node, of_node(volume.volume_id)).volume_health
            check(found.volume_id == volume.volume_id and not found.health_statuses, f"{found}")
            storage = driver.call(node.NodeGetStorageHealth, pb.NodeGetStorageHealthRequest())
            check(not storage.backend_health, f"{storage}")

        self.row("CSIN-HEALTH-05 CSIN-HEALTH-13 CSIN-HEALTH-15 CSIN-HEALTH-22", well)

    def deletion(self):
        pb, driver, controller = self.pb, self.driver, self.driver.controller
        remove = lambda volume_id: pb.DeleteVolumeRequest(volume_id=volume_id)
        self.refused("CSI-DELETEVOLUME-09", controller.DeleteVolume, remove(""), CODE.INVALID_ARGUMENT)

        def gone():
            for volume_id in self.made + self.made + [UNKNOWN, ZEROES, "x" * 128]:
                driver.call(controller.DeleteVolume, remove(volume_id))
            listed = driver.call(controller.ListVolumes, pb.ListVolumesRequest())
            left = {one.volume.volume_id for one in listed.entries} & set(self.made)
            check(not left, f"{left} are listed still")

        self.row("CSI-DELETEVOLUME-01 CSI-DELETEVOLUME-02 CSI-DELETEVOLUME-06 CSI-DELETEVOLUME-07", gone)
        self.refused(
            "CSI-DELETEVOLUME-02", controller.DeleteVolume, remove("x" * 129), CODE.INVALID_ARGUMENT
        )

    def run(self):
        pb, driver = self.pb, self.driver
        self.identity()
        self.addons()
        self.capabilities()
        volume = self.creation()
        self.reading(volume)
        context = self.publishing(volume)
        self.modification(volume)
        self.on_node(volume, context)
        volume.capacity_bytes = GROWN
        self.snapshots(volume)
        self.groups(volume)
        self.health(volume)
        self.fencing()
        self.volume_groups(volume)
        self.replication(volume)
        self.rotation(volume)
        unpublish = driver.controller.ControllerUnpublishVolume

        def unpublished():
            for node_id in (self.node_id, self.node_id, ""):
                driver.call(
                    unpublish,
                    pb.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id=node_id),
                )
            found = driver.call(
                driver.controller.ControllerGetVolume,
                pb.ControllerGetVolumeRequest(volume_id=volume.volume_id),
            )
            check(not found.status.published_node_ids, "it is published still")

        self.row("CSI-CTRLUNPUBLISH-01 CSI-CTRLUNPUBLISH-05 CSI-CTRLUNPUBLISH-09 CSI-CTRLUNPUBLISH-10", unpublished)
        self.deletion()


def with_addons(driver, csi, addons):
    """Gives a driver the services of CSI-Addons; the healer is on both sockets."""
    from csi_addons import (
        encryptionkeyrotation_pb2_grpc,
        fence_pb2_grpc,
        healer_pb2_grpc,
        identity_pb2_grpc,
        reclaimspace_pb2_grpc,
        replication_pb2_grpc,
        volumegroup_pb2_grpc,
    )

    channels = [grpc.insecure_channel(f"unix://{socket}") for socket in (csi, addons)]
    driver.healers = [healer_pb2_grpc.HealerNodeStub(channel) for channel in channels]
    own = channels[1]
    driver.addons_identity = identity_pb2_grpc.IdentityStub(own)
    driver.fences = fence_pb2_grpc.FenceControllerStub(own)
    driver.groups = volumegroup_pb2_grpc.ControllerStub(own)
    driver.replication = replication_pb2_grpc.ControllerStub(own)
    driver.reclaims = reclaimspace_pb2_grpc.ReclaimSpaceControllerStub(own).ControllerReclaimSpace
    driver.reclaims_on_node = reclaimspace_pb2_grpc.ReclaimSpaceNodeStub(own).NodeReclaimSpace
    rotation = encryptionkeyrotation_pb2_grpc.EncryptionKeyRotationControllerStub(own)
    driver.rotates = rotation.EncryptionKeyRotate


def ready(driver, pb):
    deadline = time.monotonic() + driver.patience_s
    while True:
        try:
            if driver.identity.Probe(pb.ProbeRequest(), timeout=10).ready.value:
                return
        except grpc.RpcError:
            pass
        if time.monotonic() > deadline:
            raise Failure("the plugin does not become ready")
        time.sleep(0.1)


def restart(dev, driver, pb):
    """Kills the plugin; `quoin dev` starts another one on the same socket and records."""
    processes = dev / "run/processes.json"
    former = json.loads(processes.read_text())["node"]
    os.kill(former, signal.SIGKILL)
    deadline = time.monotonic() + driver.patience_s
    while json.loads(processes.read_text()).get("node") in (None, former):
        if time.monotonic() > deadline:
            raise Failure("the plugin is not started again")
        time.sleep(0.1)
    ready(driver, pb)


def table(rows):
    """The document: each row that this client asserts, with its text."""
    with open(ROOT / "docs/requirements.csv", encoding="utf-8", newline="") as file:
        register = list(csv.reader(file))
    ours = [row for row in register[1:] if row[0].startswith(("CSI-", "CSIN-", "ADDONS-", "HEAL-", "REPL-", "REPL1-"))]
    unknown = rows.held - {row[0] for row in ours}
    check(not unknown, f"no rows of the register: {sorted(unknown)}")
    asserted = [row for row in ours if row[0] in rows.held]
    lines = [
        "# Conformance",
        "",
        "`cargo xtask conformance` starts a cluster of real processes and asserts these rows of the register",
        "(`docs/requirements.csv`) by a client in Python, for a mounted and a block volume, against a fresh plugin and",
        "against the one that takes its place after it was killed. It writes this page.",
        "",
        f"{len(asserted)} of {len(ours)} rows are asserted. The others need faults, several nodes, or the insides of a",
        "process; tests of the tree name each of them (`cargo xtask trace --proven`).",
        "",
        "| row | what is required |",
        "|---|---|",
    ]
    lines += [f"| {row[0]} | {' '.join(row[-1].split()).replace('|', '&#124;')} |" for row in asserted]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dev", required=True, type=pathlib.Path, help="directory of `quoin dev`")
    parser.add_argument("--report", type=pathlib.Path, help="write the table of rows to this file")
    parser.add_argument("--check", type=pathlib.Path, help="compare the table with this file")
    options = parser.parse_args()
    pb, stubs = load_stubs()
    rows = Rows()
    socket = options.dev / "run/csi/csi.sock"
    try:
        for plugin in ("fresh", "restarted"):
            driver = Driver(socket, stubs)
            with_addons(driver, socket, options.dev / "run/csi-addons/csi-addons.sock")
            if plugin == "restarted":
                restart(options.dev, driver, pb)
            ready(driver, pb)
            for kind in ("mount", "block"):
                print(f"{plugin} plugin, {kind}", flush=True)
                with tempfile.TemporaryDirectory(prefix="quoin-csi-") as directory:
                    Conformance(driver, pb, rows, kind, pathlib.Path(directory)).run()
        if rows.failed:
            raise Failure(f"{len(rows.failed)} rows: {' '.join(sorted(rows.failed))}")
        text = table(rows)
        if options.report:
            options.report.write_text(text, encoding="utf-8")
        if options.check:
            is_same = options.check.read_text(encoding="utf-8") == text
            check(is_same, f"{options.check} is not up to date: run `cargo xtask conformance`")
    except (Failure, grpc.RpcError) as error:
        text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else error
        sys.exit(f"failed: {text}")
    print(f"{len(rows.held)} rows are asserted")


if __name__ == "__main__":
    main()
