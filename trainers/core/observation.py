"""Observation of a program that runs user-defined code: it starts here, and leaves out certain zones of the host.

``observer`` is the code that notes what a process reads, and ``dependencies`` what follows from the notes. Standard
library only, as the controller uses this, too.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainers.contract import run_folder, variables
from trainers.core import observer
from trainers.core.dependencies import COPIED, NOTES, Places, Seen, as_json
from trainers.core.observer import ORIGIN, PROJECT, SKIP, WORK

_SYSTEM = (
    *("/proc", "/dev", "/sys", "/run", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/System", "/Library"),
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/share"),
)
_CACHES = (  # recreated if lost; other files in ~/.cache or ~/.config may be weights or settings
    *("~/.cache/matplotlib", "~/.cache/fontconfig", "~/.cache/pip", "~/.triton", "~/.nv"),
    f"{os.environ.get('XDG_CONFIG_HOME') or '~/.config'}/mlflow",  # telemetry.json alone
)
_SECRETS = (
    *("~/.ssh", "~/.netrc", "~/.aws", "~/.mlflow"),
    *("~/.cache/huggingface/token", "~/.cache/huggingface/stored_tokens"),
)
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR")


def zones_of(places: Places) -> list[tuple[str, str]]:
    """Return (kind, real path) of each zone; the innermost zone decides about a file."""
    known = [(WORK, places.work), (SKIP, places.run_dir), (PROJECT, places.project), (ORIGIN, places.origin)]
    split = [os.path.split(path) for path in places.data]
    return [
        *((kind, os.path.realpath(path)) for kind, path in known if path is not None),
        *((SKIP, os.path.realpath(path)) for path in places.data),
        *((SKIP, os.path.join(os.path.realpath(folder), name)) for folder, name in split),  # noqa: PTH118  (a link to one file)
        *of_host(),
    ]


def of_host() -> list[tuple[str, str]]:
    """Return the zones of the host: Python, installed distributions (also in the project), system and caches."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    prefix = [sys.prefix] if sys.prefix != sys.base_prefix else []
    own = [f"{top}/{name}" for top in (sys.prefix, sys.base_prefix) for name in ("lib", "share", "etc", "bin", "ssl")]
    with suppress(KeyError, OSError):
        own.append(f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    caches = [*_CACHES, *_SECRETS, *filter(None, (os.environ.get(name) for name in _CACHE_VARIABLES))]
    folders = [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), site.getusersitepackages()]
    folders += [entry for entry in sys.path if entry and any(Path(entry).glob("*.dist-info"))]  # named by a .pth file
    plugins = [Path(entry, "hydra_plugins") for entry in sys.path if entry]  # each application of Hydra imports them
    folders += [str(folder) for folder in plugins if (folder / "paceline_plugins.py").exists()]
    everything = [*folders, *prefix, *own, *_SYSTEM, *(os.path.expanduser(path) for path in caches)]  # noqa: PTH111
    return [(SKIP, os.path.realpath(path)) for path in dict.fromkeys(everything)]


class Observed:
    """Observation of a program that is started with ``site`` first on PYTHONPATH. Call ``seen`` when it has ended."""

    def __init__(
        self,
        folder: Path,
        zones: Sequence[tuple[str, str]],
        *,
        watches: bool = True,
        in_copy: bool = False,
        first: str = "",
    ) -> None:
        """``folder`` belongs to this attempt; ``first`` is code that each process runs first. Raises OSError."""
        self.notes, self.site = folder / NOTES, folder / "site"
        for path in (self.notes, self.site):
            path.mkdir(parents=True)
        arguments = {
            "folder": str(self.site),
            "zones": [*zones],
            "report": str(self.notes),
            "watches": watches,
            "in_copy": in_copy,
        }
        text = Path(observer.__file__).read_text(encoding="utf-8")
        (self.site / "sitecustomize.py").write_text(f"{text}\n{first}\nbegin(**{arguments!r})\n", encoding="utf-8")

    def seen(self) -> Seen:
        """Read the notes of all processes. Raises OSError."""
        return Seen(self.notes)


class OfRank:
    """Observation of this process, a rank of the built-in trainer that runs user-defined code."""

    @classmethod
    def of(cls, run_dir: Path, node_rank: int, local_rank: int) -> OfRank | None:
        """Start to observe; None if the run folder can't be read or written, which later code reports."""
        with suppress(OSError, ValueError):
            config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
            return cls(run_dir, config, node_rank, is_first=local_rank == 0)
        return None

    def __init__(self, run_dir: Path, config: Mapping[str, Any], node_rank: int, *, is_first: bool) -> None:
        """Raises OSError."""
        attempt = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
        self._notes = run_dir / ".seen" / f"{attempt}-{node_rank}"  # shared by all ranks of the node
        for earlier in self._notes.parent.glob("*") if is_first else ():
            if not earlier.name.startswith(f"{attempt}-"):
                shutil.rmtree(earlier, ignore_errors=True)
        self._notes.mkdir(parents=True, exist_ok=True)
        code, whole = run_dir / "code", (config.get("model") or {}).get("inputs") or ()
        self.places = Places(
            run_dir=run_dir,
            snapshot=code,
            work=code,
            data=(str(run_dir / "data"),),
            project=project_of(config, run_dir),
            whole=whole,
        )
        observer.start(zones_of(self.places), str(self._notes))

    def close(self) -> dict[str, Any]:
        """Return the record of this node's ranks, with the files of the project that the key lacks. Raises OSError.

        Call it once for all ranks of the node.
        """
        seen = Seen(self._notes)
        shutil.rmtree(self._notes, ignore_errors=True)
        with suppress(OSError):  # not empty: another node's notes may lie there
            self._notes.parent.rmdir()
        return {**seen.record(places=self.places), "unkeyed": as_json(seen.unkeyed(self.places, ended_well=True))}


def project_of(config: Mapping[str, Any], run_dir: Path) -> Path | None:
    """Return the checkout, if it lies on this host: from PACELINE_PROJECT, else the folder above that of the runs."""
    named = os.environ.get(variables.PROJECT)
    if named:
        return Path(named) if Path(named).is_dir() else None
    runs = Path(str(config.get("paths", {}).get("runs", "")))
    if runs.is_absolute() or not runs.parts or run_dir.parent.parts[-len(runs.parts) :] != runs.parts:
        return None
    return run_dir.parents[len(runs.parts)]


def origin_of(config: Mapping[str, Any], script: str) -> Path | None:
    """Return the folder of a script outside of the project, if it lies on this host."""
    typed = str(config["program"].get("script") or "")
    inside = script.removeprefix(COPIED)
    if not script.startswith(COPIED) or not os.path.isabs(typed) or not typed.endswith(f"/{inside}"):  # noqa: PTH117
        return None
    folder = Path(typed.removesuffix(f"/{inside}") or "/")
    return folder if folder.is_dir() else None
