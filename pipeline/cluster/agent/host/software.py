"""Find the software of the interpreter that runs this module: Python, torch, installed packages. Nothing is imported.

The module imports only the standard library, because its text is also run by the Python of a container image.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec


def torch_versions() -> tuple[str | None, str | None]:
    """Return the versions of (torch, its CUDA) from the text of torch/version.py: importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None, None
    text = ""
    with contextlib.suppress(OSError):
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    patterns = (r"""^__version__ = ['"]([^'"]+)""", r"""^cuda\b.*= ['"]([^'"]+)""")
    torch, cuda = (re.search(pattern, text, re.MULTILINE) for pattern in patterns)
    return torch and torch.group(1), cuda and cuda.group(1)


def packages(named: Sequence[str]) -> dict[str, str]:
    """Return package → version, by the names of metadata folders; for packages in ``named`` with ``content_digest``."""
    versions: dict[str, str] = {}
    wanted = {normal(name) for name in named}
    for folder in reversed([path for path in sys.path if os.path.isdir(path)]):  # the first on the path counts
        for name in os.listdir(folder):
            project, version = distribution_of(name)
            label = normal(project)
            if version:
                versions[label] = version + (content_digest(os.path.join(folder, name)) if label in wanted else "")
    return dict(sorted(versions.items()))


def content_digest(metadata: str) -> str:
    """Return `` (content DIGEST)`` of a package installed from a folder or repository, and '' of one from an index.

    Such a package can change without a new version. pipeline/keys/installed.py computes the same.
    """
    if not os.path.exists(os.path.join(metadata, "direct_url.json")):
        return ""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(os.path.join(metadata, "RECORD"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    # only files of the package itself: scripts lie outside, and metadata and bytecode differ between installations
    files = sorted(line for line in lines if not re.match(r"\.\.|/|[^,]*(\.dist-info/|\.pyc,)", line))
    digest = hashlib.sha256("\n".join(files).encode()).hexdigest()
    return f" (content {digest[:12]})"


def distribution_of(name: str) -> tuple[str, str]:
    """Return project and version from a metadata folder's name: x-1.0.dist-info, or Debian's x-1.0.egg-info."""
    if name.endswith(".dist-info"):
        project, _, version = name[: -len(".dist-info")].rpartition("-")
        return project, version
    legacy = name.endswith(".egg-info") and re.fullmatch(r"([^-]+)-([^-]+)(-py[\d.]+)?\.egg-info", name)
    return (legacy.group(1), legacy.group(2)) if legacy else ("", "")


def normal(name: str) -> str:
    """Return a distribution's name in the normal form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def modules(names: Sequence[str], python_path: Sequence[str]) -> dict[str, str]:
    """Return module → version of its distribution, for those of ``names`` that a rank could import."""
    if not names:
        return {}
    path = [*python_path, *(entry for entry in sys.path if is_installed(entry))]
    return {name: version_of_module(name, path) for name in names if is_importable(name, path)}


def is_installed(entry: str) -> bool:
    """Return whether an entry of sys.path holds installed packages; ranks drop the others (trainers/entry.py)."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    path = os.path.realpath(entry)
    if any(f"{path}/".startswith(f"{os.path.realpath(folder)}/") for folder in folders):
        return True
    return bool(entry) and bool(glob.glob(os.path.join(glob.escape(path), "*.dist-info")))


def is_importable(name: str, path: list[str]) -> bool:
    for part in name.split("."):  # part by part, because a dotted name would import its parent
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return True


def version_of_module(name: str, path: list[str]) -> str:
    """Return the version of the installed distribution that lists the module's file; ``unknown`` if none does."""
    from importlib.metadata import distributions  # rarely needed, and imports the e-mail package

    begin = name.replace(".", "/")
    for distribution in distributions(path=path):
        files = distribution.read_text("RECORD") or ""
        top_level = (distribution.read_text("top_level.txt") or "").split()
        if re.search(rf"^{re.escape(begin)}[/.]", files, re.MULTILINE) or (not files and name in top_level):
            return distribution.version
    return "unknown"


def software(names: Sequence[str], python_path: Sequence[str]) -> dict[str, object]:
    """Return the fields of ``HostFacts`` about software. ``modules``: those of ``names`` that are no distribution."""
    installed = packages(names)
    others = [name for name in names if normal(name) not in installed]
    torch, cuda = torch_versions()
    return {
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "torch_version": torch,
        "torch_cuda": cuda,
        "packages": installed,
        "modules": modules(others, python_path),
    }
