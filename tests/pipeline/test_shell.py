"""Children: their ends as data, apart from the terminal's Ctrl-C, and ended when the wait is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.core.errors import PacelineError
from pipeline.core.processes import process
from tests.waiting import HANG_S


def test_apart_reads_a_file_and_is_in_a_session_of_its_own(tmp_path: Path) -> None:
    stdin = tmp_path / "in"
    stdin.write_text("from a file\n")
    with stdin.open("rb") as file:
        file.read()  # it is read from its beginning all the same
        done = process.run_apart(["sh", "-c", "cat; ps -o sid= -p $$"], stdin=file, timeout_s=HANG_S)
    text, session = done.stdout.splitlines()
    assert text == "from a file"
    assert int(session) != os.getsid(0)


def test_what_an_attached_child_prints_is_no_result_of_the_command_and_comes_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert process.attached(["sh", "-c", "echo FINISHED; echo warning >&2"], cwd=Path("/"), env={}) == 0
    assert capfd.readouterr() == ("", "FINISHED\nwarning\n")


@pytest.mark.slow
def test_too_slow_a_child_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "note"
    command = f"trap 'echo got INT > \"{note}\"; exit 1' INT; echo; while :; do sleep 0.05; done"
    with Path("/dev/null").open("rb") as file, pytest.raises(PacelineError, match=r"was still running after 0\.5 s"):
        process.run_apart(["sh", "-c", command], stdin=file, timeout_s=0.5)
    assert note.read_text() == "got INT\n"


STARTS: dict[str, Callable[[list[str]], object]] = {
    "run": process.run,
    "attached": partial(process.attached, cwd=Path("/"), env={}),
    "stream": process.stream,
}


@pytest.mark.parametrize("start", STARTS)
def test_a_program_that_is_missing_or_cannot_be_run_is_named(start: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="program not found: no-such-program"):
        STARTS[start](["no-such-program"])
    with pytest.raises(PacelineError, match=f"{tmp_path} can't be run: Permission denied"):
        STARTS[start]([str(tmp_path)])


def test_stream_is_not_reached_by_signals_to_our_group() -> None:
    child = process.stream(["sleep", "60"])
    try:
        assert os.getpgid(child.pid) != os.getpgid(0)
    finally:
        child.send_signal(signal.SIGKILL)
        with child:
            pass
