"""The bill of materials of the image: all crates of Cargo.lock as CycloneDX, and with --packages Debian's as well.

    python3 deploy/image/sbom.py --lock Cargo.lock > crates.cdx.json
    podman run --rm --entrypoint cat IMAGE /usr/share/quoin-packages.tsv > packages.tsv
    python3 deploy/image/sbom.py --lock Cargo.lock --packages packages.tsv > image.cdx.json
"""

import argparse
import json
import tomllib
from urllib.parse import quote


def crates(path):
    with open(path, "rb") as file:
        locked = tomllib.load(file)["package"]
    for one in locked:
        purl = f"pkg:cargo/{one['name']}@{one['version']}"
        component = {"type": "library", "bom-ref": purl, "name": one["name"], "version": one["version"], "purl": purl}
        if "checksum" in one:
            component["hashes"] = [{"alg": "SHA-256", "content": one["checksum"]}]
        yield component


def packages(path):
    with open(path, encoding="utf-8") as file:
        for line in file.read().splitlines():
            name, version, architecture = line.split("\t")
            purl = f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={architecture}"
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--lock", required=True)
    options.add_argument("--packages")
    options = options.parse_args()
    components = list(crates(options.lock))
    if options.packages:
        components += packages(options.packages)
    version = next(one["version"] for one in components if one["name"] == "quoin")
    product = {"type": "application", "name": "quoin", "version": version, "licenses": [{"license": {"id": "Apache-2.0"}}]}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    print(json.dumps({**bill, "metadata": {"component": product}, "components": components}, indent=1))


if __name__ == "__main__":
    main()
