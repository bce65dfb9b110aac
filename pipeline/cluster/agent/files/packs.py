"""The data pack on this node: received once, verified, and linked into a run's folder."""

from __future__ import annotations

import os
import shutil
import sys

from ..node import sha256_of_rest
from ..requests import PutPackRequest
from ..wire import Json, read_json, say
from .folders import unpack


def holds_pack(folder: str, digest: str) -> bool:
    """Whether ``folder`` is the complete data pack: its digest, and the sizes that the manifest implies."""
    manifest = read_json(os.path.join(folder, "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("digest") != digest:
        return False
    try:
        sizes = manifest.get("files") or image_sizes(manifest)
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in sizes.items())
    except (KeyError, TypeError, AttributeError, OSError):
        return False


def image_sizes(manifest: Json) -> Json:
    """Return the sizes of the files in a pack of images, in bytes. Raises KeyError, TypeError."""
    count = manifest["count"]
    image_bytes = manifest["channels"] * manifest["height"] * manifest["width"]
    return {"images.bin": count * image_bytes, "labels.bin": count * 8}


def pack_folder(request: PutPackRequest) -> str:
    """Return the data pack's folder; anything there that isn't the pack is removed."""
    folder = os.path.join(os.path.expanduser(request.workdir), "data", request.pack_digest)
    if os.path.isdir(folder) and not holds_pack(folder, request.pack_digest):
        shutil.rmtree(folder)
    return folder


def put_pack(request: PutPackRequest) -> None:
    """Unpack the data pack from the tar on stdin to ``workdir/data/<digest>``, once, completely."""
    folder = pack_folder(request)

    def check(unpacked: str) -> None:
        if not holds_pack(unpacked, request.pack_digest) or not has_digests(unpacked):
            raise SystemExit(f"the data pack arrived damaged in {folder}")

    if not os.path.isdir(folder):
        unpack(sys.stdin.buffer, folder, check)
    say(pack_path=folder)


def has_digests(folder: str) -> bool:
    """Whether every file of a data pack has the sha256 in the manifest."""
    manifest = read_json(os.path.join(folder, "manifest.json"))
    digests = manifest.get("sha256") if isinstance(manifest, dict) else None
    for name, sha256 in (digests or {}).items():
        with open(os.path.join(folder, name), "rb") as file:
            if sha256_of_rest(file) != sha256:
                return False
    return True


def link_pack(run_dir: str, data_dir: str) -> None:
    """Link ``run_dir/data`` to the data pack. Raises SystemExit: it is missing."""
    link = os.path.join(run_dir, "data")
    if not os.path.lexists(link):
        os.symlink(data_dir, link)
    if not os.path.exists(os.path.join(link, "manifest.json")):
        raise SystemExit(f"the data pack is missing: no manifest.json in {data_dir}; the same command makes it again")
