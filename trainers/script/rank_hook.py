"""Lets the node agent see a script's rank: its process id in memory, its stacks on a signal, and that it has ended.

Its text stands in the run's ``sitecustomize.py``, for each Python process. Standard library only, Python >= 3.8.
Nothing may raise. trainers/contract/beats.py describes the numbers.
"""

# At the start of a process, os.path is loaded and pathlib isn't.
# ruff: noqa: PTH112, PTH118, PTH120, PTH211
import atexit
import faulthandler
import os
import sys


def publish(
    beat_file: str, stacks_file: str, stacks_signal: int, ended_file: str, cells: "list[int]", pid_at: int
) -> None:
    """Publish the process that torchrun started as a rank; its children inherit its variables, and are not published.

    Names in the rank's folder: ``beat_file`` links to ``cells``, of which ``pid_at`` is the process id's;
    ``stacks_file`` gets stacks at ``stacks_signal``; ``ended_file`` is left at the end.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file or "LOCAL_RANK" not in os.environ:
        return
    folder = os.path.dirname(error_file)
    beat = os.path.join(folder, beat_file)
    if os.path.lexists(beat) or not os.path.isdir(folder):
        return
    try:
        cells[pid_at] = os.getpid()
        _publish(beat, cells)
        atexit.register(_note_end, os.path.join(folder, ended_file))
        stacks = os.open(os.path.join(folder, stacks_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(stacks_signal, stacks, all_threads=True)
    except Exception:  # no folder, no memory
        pass


def _publish(beat: str, cells: "list[int]") -> None:
    data = b"".join(cell.to_bytes(8, sys.byteorder, signed=True) for cell in cells)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-beat")
        os.write(descriptor, data)
        os.symlink("/proc/%d/fd/%d" % (os.getpid(), descriptor), beat)  # noqa: UP031  (gone with the process)
    else:
        with open(beat, "wb") as file:  # noqa: PTH123
            file.write(data)


def _note_end(path: str) -> None:
    """Leave the file, with a byte if there never was a process group, whose making replaces ``sys.excepthook``."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    is_alone = sys.excepthook is sys.__excepthook__ and not (c10d and c10d.GroupMember.WORLD)
    try:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(b"1" if is_alone else b"")
    except OSError:
        pass
