"""Lets the node agent see a script's rank: its process id in memory, and at a signal its threads' stacks in a file.
A rank that has ended without a process group leaves a file, by which ``trainers.script.start`` can warn of it.

``trainers.script.start`` has it written into the ``sitecustomize.py`` of the run, with a call of ``publish``: so it
runs in each Python process of the run. Standard library only and Python >= 3.8. Nothing here may raise: a rank that
can't be seen trains all the same. trainers/contract/beats.py describes the numbers.
"""

# It runs at the start of each process: os.path is loaded by then, pathlib isn't.
# ruff: noqa: PTH112, PTH118, PTH120, PTH211, SIM105
import atexit
import faulthandler
import os
import sys

ALONE = "alone"
"""File beside a rank's logs: it has ended, and no process group of torch ever was in it."""


def publish(beat_file: str, stacks_file: str, stacks_signal: int, cells: "list[int]", pid_at: int) -> None:
    """Do so in the process that torchrun started as a rank; what that starts inherits its variables and isn't one.

    Args:
        beat_file: name of the link to the rank's numbers, ``cells``, of which ``pid_at`` is the process id's.
        stacks_file: name of the file for the stacks, which are written at ``stacks_signal``.
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
        atexit.register(_note_alone, folder)
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


def _note_alone(folder: str) -> None:
    """Leave ALONE where it is certain. ``init_process_group`` replaces the hook for exceptions, and what ends the group
    doesn't put it back."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if sys.excepthook is sys.__excepthook__ and not (c10d and c10d.GroupMember.WORLD):
        try:
            open(os.path.join(folder, ALONE), "wb").close()  # noqa: PTH123
        except OSError:
            pass
