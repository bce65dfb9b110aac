"""The hook in a script's ranks by which the node agent sees them: it publishes a rank's process id in memory, writes
stacks on a signal, and notes the end.

``trainers.script.start`` copies this text into the run's ``sitecustomize.py``, which each Python process of the script
runs at its start. Standard library only, Python >= 3.8. Nothing may raise. trainers/contract/beats.py describes the
numbers in memory."""

# At the start of a process, os.path is loaded and pathlib isn't.
# ruff: noqa: PTH112, PTH118, PTH120, PTH211
import atexit
import faulthandler
import os
import sys


def publish(
    beat_file: str, stacks_file: str, stacks_signal: int, ended_file: str, cells: "list[int]", pid_at: int
) -> None:
    """Publish this process, if torchrun started it as a rank. Its children, which inherit its variables, are not. Files
    in the rank's folder: ``beat_file`` is a link to the numbers ``cells`` (``pid_at``: the index of the process id),
    ``stacks_file`` gets the stacks at ``stacks_signal``, ``ended_file`` appears at the end.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file or "LOCAL_RANK" not in os.environ:
        return
    folder = os.path.dirname(error_file)
    beat = os.path.join(folder, beat_file)
    if os.path.lexists(beat) or not os.path.isdir(folder):  # the rank itself has published it: this is a child
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
    """Write the file, with a byte in it if the rank never had a process group: then ranks ran side by side unconnected.
    torch replaces ``sys.excepthook`` when it makes a process group, so this shows also after the group's end.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    is_alone = sys.excepthook is sys.__excepthook__ and not (c10d and c10d.GroupMember.WORLD)
    try:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(b"1" if is_alone else b"")
    except OSError:
        pass
