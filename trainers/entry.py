"""The start of a rank: its command line (``--config RUN_DIR/config.json``), its import path, errors as one line."""

from __future__ import annotations

import argparse
import gc
import os
import site
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trainers.contract.beats import RUNNING
from trainers.core.config import ConfigError
from trainers.core.errors import TrainerError
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.ranks import read_ranks


def start(program: str, run: Callable[[Path], None], description: str | None = None) -> None:
    """Call ``run`` with the path of config.json from the command line, while the node agent watches this rank."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", type=Path, required=True, help="config.json in the run folder")
    path: Path = parser.parse_args().config
    running = _note_running()
    if running is not None:
        HEARTBEAT.publish(running.parent)
    run_entry(lambda: run(path.resolve()))
    if running is not None:
        running.unlink(missing_ok=True)


def run_entry(run: Callable[[], None]) -> None:
    """Call ``run`` in this rank. An error that a user can fix is one line, once per node, with exit code 1."""
    _leave_snapshot_and_installed()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # a node needs no numpy
    gc.disable()  # imports make half a million objects that stay; so they take a quarter less time
    from torch.distributed.elastic.multiprocessing.errors import record  # torch: only now is sys.path set

    ranks = read_ranks()  # before a user's model may change the environment
    try:
        # writes an error to TORCHELASTIC_ERROR_FILE, for the agent
        record(_with_recordable_errors(run))()
    except (ConfigError, TrainerError) as error:
        if ranks.local_rank == 0:
            print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        leave(1)
    except Exception:
        print(marked(traceback.format_exc(), ranks.rank), file=sys.stderr, flush=True)
        leave(1)


def _leave_snapshot_and_installed() -> None:
    """Remove all other entries from ``sys.path``, and the finders of editable installs: a module missing from the
    snapshot would be imported from a working tree, which is no part of the key, on one host and not on another.
    """
    snapshot = str(Path(__file__).parents[1])
    of_pythonpath = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = _installation()
    kept = [entry for entry in sys.path if _is_installed(entry, folders) or _is_any(entry, of_pythonpath)]
    sys.path[:] = [snapshot, *(entry for entry in kept if not _is_any(entry, [snapshot]))]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_editable(finder)]


def _installation() -> list[str]:
    """Return the folders of the standard library and of installed distributions, with user site-packages if enabled."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), *user]


def _is_installed(entry: str, folders: Sequence[str]) -> bool:
    """Return True for a path in ``folders``, the zipped standard library, or another folder with distributions."""
    path = Path(entry).resolve()
    if path.suffix == ".zip" and path.parent in [Path(folder).resolve().parent for folder in folders[:2]]:
        return True
    if any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
        return True
    return bool(entry) and any(path.glob("*.dist-info"))


def _is_any(entry: str, others: Sequence[str]) -> bool:
    return Path(entry).resolve() in [Path(other).resolve() for other in others]


def _is_editable(finder: object) -> bool:
    """Return True for a finder of an editable install: setuptools, hatchling, scikit-build and meson all name it so."""
    owner = finder if isinstance(finder, type) else type(finder)
    return "editable" in owner.__module__


def marked(text: str, rank: int) -> str:
    """Put the rank in front of each line, as torch does: an exception's text may have thousands of lines."""
    return "\n".join(f"[rank{rank}]: {line}" for line in text.rstrip("\n").split("\n"))


def _note_running() -> Path | None:
    """Create a file that is removed at a good end: it shows the agent that the run was not over."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return None
    path = Path(error_file).with_name(f"{RUNNING}{os.getpid()}")
    with suppress(OSError):  # other writes report a full disk
        path.touch()
    return path


def _with_recordable_errors(run: Callable[[], None]) -> Callable[[], None]:
    """Return ``run`` with errors that torch's ``record`` handles: it takes SystemExit(0) for a good end."""

    def recorded() -> None:
        try:
            run()
        except Exception:
            raise
        except BaseException as error:
            raise recordable(error).with_traceback(error.__traceback__) from None

    return recorded


def recordable(error: BaseException) -> Exception:
    """Return an Exception of the same name for an error that is none, such as SystemExit."""
    text = f"{error} (it ends a process, and the run was not over; raise an Exception that says why)".lstrip()
    named: Exception = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})(text)
    return named


def leave(code: int = 0) -> None:
    """End the process now: all results are on the disk, or the error is printed.

    Unloading torch would take every rank another half second, and sometimes a thread of gloo aborts a process that ends
    in order, so that a success would count as a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
