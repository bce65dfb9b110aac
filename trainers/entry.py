"""The start and end of a rank of the built-in programs (``trainers.classifier``, ``trainers.measuring.measure``): read
the command line (``--config RUN_DIR/config.json``), restrict the import path, report errors."""

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
    """Call ``run`` with the path of config.json while the agent watches this rank; end the process if it fails."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", type=Path, required=True, help="config.json in the run folder")
    path: Path = parser.parse_args().config
    running = _note_running()
    # without torchrun there is no folder in which the agent looks for a heartbeat
    if running is not None:
        HEARTBEAT.publish(running.parent)
    run_entry(lambda: run(path.resolve()))
    if running is not None:
        running.unlink(missing_ok=True)


def run_entry(run: Callable[[], None]) -> None:
    """Call ``run``; if it fails, print the error (in one line per node if a user can fix it) and exit with code 1."""
    _restrict_import_path()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # a node needs no numpy
    gc.disable()  # imports make half a million objects that stay; without collections they take a quarter less time
    from torch.distributed.elastic.multiprocessing.errors import record  # torch: only now is sys.path set

    ranks = read_ranks()  # before a user's model may change the environment
    try:
        # ``record`` writes an error to TORCHELASTIC_ERROR_FILE, where the agent reads it
        record(_with_recordable_errors(run))()
    except (ConfigError, TrainerError) as error:
        if ranks.local_rank == 0:  # all ranks of a node have the same error
            print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        leave(1)
    except Exception:
        print(marked(traceback.format_exc(), ranks.rank), file=sys.stderr, flush=True)
        leave(1)


def _restrict_import_path() -> None:
    """Keep only the run's code snapshot, PYTHONPATH and installed packages on ``sys.path``. Else a module that the
    snapshot lacks could be imported from a working tree, which one host has and another hasn't, and which the run's key
    doesn't cover. Editable installs (``pip install -e``) are such trees: their finders go too.
    """
    snapshot = str(Path(__file__).parents[1])
    pythonpath = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = _installation()
    kept = [entry for entry in sys.path if _is_installed(entry, folders) or _is_any(entry, pythonpath)]
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
    # python311.zip, beside the folder of the standard library; the first two of ``folders`` are that folder
    if path.suffix == ".zip" and path.parent in [Path(folder).resolve().parent for folder in folders[:2]]:
        return True
    if any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
        return True
    # an empty entry means the working directory
    return bool(entry) and any(path.glob("*.dist-info"))


def _is_any(entry: str, others: Sequence[str]) -> bool:
    return Path(entry).resolve() in [Path(other).resolve() for other in others]


def _is_editable(finder: object) -> bool:
    """Return True for an import finder of an editable install: all build tools have "editable" in its module's name."""
    owner = finder if isinstance(finder, type) else type(finder)
    return "editable" in owner.__module__


def marked(text: str, rank: int) -> str:
    """Put the rank in front of each line, as torch does, because the ranks of a node write into one log."""
    return "\n".join(f"[rank{rank}]: {line}" for line in text.rstrip("\n").split("\n"))


def _note_running() -> Path | None:
    """Create a file that ``start`` removes at a good end; if it stays, the agent knows that the run was not over."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return None
    path = Path(error_file).with_name(f"{RUNNING}{os.getpid()}")
    with suppress(OSError):  # other writes report a full disk
        path.touch()
    return path


def _with_recordable_errors(run: Callable[[], None]) -> Callable[[], None]:
    """Return ``run``, but raising only Exceptions: torch's ``record`` takes a SystemExit(0) for a good end."""

    def with_exceptions() -> None:
        try:
            run()
        except Exception:
            raise
        except BaseException as error:
            raise recordable(error).with_traceback(error.__traceback__) from None

    return with_exceptions


def recordable(error: BaseException) -> Exception:
    """Return an Exception with the class name of ``error``, which is no Exception (SystemExit, KeyboardInterrupt)."""
    text = f"{error} (it ends a process, and the run was not over; raise an Exception that says why)".lstrip()
    namesake: Exception = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})(text)
    return namesake


def leave(code: int = 0) -> None:
    """End the process without Python's cleanup; call it when all results are on the disk, or the error is printed.
    Cleanup would unload torch, which takes half a second. And sometimes a thread of gloo aborts a process during its
    cleanup, so that a success would count as a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
