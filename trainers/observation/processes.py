"""The start of an observation: ``ObservedProgram`` prepares it for a program that is started next (a script, a step),
``ObservedRank`` begins it in this process, a rank of the built-in trainer."""

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
from trainers.observation import notes, unkeyed
from trainers.observation.input_record import InputRecord, record_inputs
from trainers.observation.notes import Notes
from trainers.observation.observer import ORIGIN, PROJECT, SKIP, WORK, hooks
from trainers.observation.unkeyed import OUTSIDE_PREFIX, Places, unkeyed_files

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
_PACKAGE = "_paceline_observer"
"""Name under which ``trainers.observation.observer`` travels: ``trainers`` may be a package of the program's."""

Zones = list[tuple[str, str]]
"""(zone, real path of a folder or file); the innermost zone decides about a file."""


def zones_of(places: Places) -> Zones:
    """Return the zones of a program's processes: its folders and data, and the skipped folders of the host."""
    named = [(WORK, places.work), (SKIP, places.run_dir), (PROJECT, places.project), (ORIGIN, places.origin)]
    split = [os.path.split(path) for path in places.data]
    return [
        *((zone, os.path.realpath(path)) for zone, path in named if path is not None),
        *((SKIP, os.path.realpath(path)) for path in places.data),
        *((SKIP, os.path.join(os.path.realpath(folder), name)) for folder, name in split),  # noqa: PTH118  (a link to one file)
        *zones_of_host(),
    ]


def zones_of_host() -> Zones:
    """Return the skipped folders of the host: Python, installed distributions, system, caches, secrets."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    environment = [sys.prefix] if sys.prefix != sys.base_prefix else []
    python = [
        f"{top}/{name}" for top in (sys.prefix, sys.base_prefix) for name in ("lib", "share", "etc", "bin", "ssl")
    ]
    with suppress(KeyError, OSError):
        python.append(f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    caches = [*_CACHES, *_SECRETS, *filter(None, (os.environ.get(name) for name in _CACHE_VARIABLES))]
    packages = [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), site.getusersitepackages()]
    packages += [entry for entry in sys.path if entry and any(Path(entry).glob("*.dist-info"))]  # named by a .pth file
    plugins = [Path(entry, "hydra_plugins") for entry in sys.path if entry]  # each application of Hydra imports them
    packages += [str(folder) for folder in plugins if (folder / "paceline_plugins.py").exists()]
    folders = [*packages, *environment, *python, *_SYSTEM, *(os.path.expanduser(path) for path in caches)]  # noqa: PTH111
    return [(SKIP, os.path.realpath(path)) for path in dict.fromkeys(folders)]


class ObservedProgram:
    """Observation of a program that is started with ``site`` first on PYTHONPATH, and of its child processes."""

    def __init__(
        self,
        folder: Path,
        zones: Sequence[tuple[str, str]],
        *,
        is_noting: bool = True,
        in_copy: bool = False,
        first: str = "",
    ) -> None:
        """Write the folder ``site``, whose sitecustomize.py begins the observation in each Python process. ``in_copy``:
        see ``hooks.begin``. ``first``: source text that runs before. Raises OSError.
        """
        self.notes_folder, self.site = folder / notes.FOLDER, folder / "site"
        for path in (self.notes_folder, self.site):
            path.mkdir(parents=True)
        package = Path(hooks.__file__).parent
        shutil.copytree(package, self.site / _PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        arguments = {
            "folder": str(self.site),
            "zones": [*zones],
            "notes": str(self.notes_folder),
            "is_noting": is_noting,
            "in_copy": in_copy,
        }
        begin = f"from {_PACKAGE}.hooks import begin\n{first}\nbegin(**{arguments!r})\n"
        (self.site / "sitecustomize.py").write_text(begin, encoding="utf-8")

    def notes(self) -> Notes:
        return Notes(self.notes_folder)


class ObservedRank:
    """Observation of this process, a rank of the built-in trainer that runs user-defined code."""

    @classmethod
    def of(cls, run_dir: Path, node_rank: int, local_rank: int) -> ObservedRank | None:
        """Begin to observe; None if the run folder can't be read or written, which later code reports."""
        with suppress(OSError, ValueError):
            config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
            return cls(run_dir, config, node_rank, is_first=local_rank == 0)
        return None

    def __init__(self, run_dir: Path, config: Mapping[str, Any], node_rank: int, *, is_first: bool) -> None:
        """``config``: the content of config.json; ``is_first``: the first rank of its node. Raises OSError."""
        attempt = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
        self._notes_folder = run_dir / ".seen" / f"{attempt}-{node_rank}"  # shared by all ranks of the node
        # remove what killed attempts left
        for folder in self._notes_folder.parent.glob("*") if is_first else ():
            if not folder.name.startswith(f"{attempt}-"):
                shutil.rmtree(folder, ignore_errors=True)
        self._notes_folder.mkdir(parents=True, exist_ok=True)
        self.places = Places(
            run_dir=run_dir,
            snapshot=run_dir / run_folder.CODE,
            work=run_dir / run_folder.CODE,
            data=(str(run_dir / run_folder.DATA),),
            project=project_of(config, run_dir),
            bytewise=(config.get("model") or {}).get("inputs") or (),
        )
        hooks.start(zones_of(self.places), str(self._notes_folder))

    def close(self) -> InputRecord:
        """Return the record of this node's ranks, once for all of them, with unkeyed files. Raises OSError."""
        read = Notes(self._notes_folder)
        shutil.rmtree(self._notes_folder, ignore_errors=True)
        with suppress(OSError):  # not empty: another node's notes may lie there
            self._notes_folder.parent.rmdir()
        record = record_inputs(read, places=self.places)
        record["unkeyed"] = unkeyed.as_json(unkeyed_files(read, self.places, ended_well=True))
        return record


def project_of(config: Mapping[str, Any], run_dir: Path) -> Path | None:
    """Return the project's folder, if it lies on this host: as the variable says, or by where the run folder lies."""
    project = os.environ.get(variables.PROJECT)
    if project:
        return Path(project) if Path(project).is_dir() else None
    runs = Path(str(config.get("paths", {}).get("runs", "")))
    if runs.is_absolute() or not runs.parts or run_dir.parent.parts[-len(runs.parts) :] != runs.parts:
        return None
    return run_dir.parents[len(runs.parts)]


def origin_of(config: Mapping[str, Any], script: str) -> Path | None:
    """Return the folder of a script outside of the project, if it is on this host; ``script``: its path in the copy."""
    typed = str(config["program"].get("script") or "")
    inside = script.removeprefix(OUTSIDE_PREFIX)
    if not script.startswith(OUTSIDE_PREFIX) or not os.path.isabs(typed) or not typed.endswith(f"/{inside}"):  # noqa: PTH117
        return None
    folder = Path(typed.removesuffix(f"/{inside}") or "/")
    return folder if folder.is_dir() else None
