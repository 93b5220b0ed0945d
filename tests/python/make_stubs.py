#!/usr/bin/env python3
"""Makes the clients' stubs from the project's own csi.proto and the files of CSI-Addons.

Usage: make_stubs.py OUTPUT_DIRECTORY   (needs grpcio-tools; see requirements.txt)
"""

import pathlib
import sys

import grpc_tools
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[2] / "crates/quoin-api/proto"


def make(output):
    """Writes csi_pb2.py, csi_pb2_grpc.py and the package csi_addons into `output`."""
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    # The well-known types come with grpcio-tools.
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTO}",
        f"-I{well_known}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        str(PROTO / "csi.proto"),
        *(str(path) for path in sorted((PROTO / "csi-addons").glob("*.proto"))),
    ]
    code = protoc.main(arguments)
    if code != 0:
        sys.exit(f"the stubs could not be made from {PROTO}: protoc ended with {code}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(sys.argv[1])
