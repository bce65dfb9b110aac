"""The thread that writes to the terminal: a real one (a pty), a pipe that nobody reads, one that stands still."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pipeline.live.screen import Screen, is_live
from tests.pipeline import test_printable

PROGRAM = """
import sys, time
from pipeline.cluster.events import LogLine
from pipeline.live.state import RunPicture, RunState
from pipeline.live.screen import Screen
from pathlib import Path
words = LogLine(host="node0", rank=0, text="19 steps an epoch, 380 steps")
began = time.monotonic()
with Screen(RunPicture(RunState(key="cf08", title="digits"), Path(sys.argv[1]))) as screen:
    screen.show_event(words)
    for number in range(int(sys.argv[2])):
        screen.say(f"node0:0 | line {number} [red]x[/] \\x1b[2J" + sys.argv[4])
        time.sleep(float(sys.argv[3]))
    Path(sys.argv[1], "said").write_text(f"said in {time.monotonic() - began:.1f}")
print("FINISHED")
"""


class Terminal:
    """A pseudo-terminal of its own with a program on it, which writes to ``said`` how long it took to say all."""

    def __init__(self, folder: Path, *words: str, rows: int = 24, columns: int = 100, **env: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.said = folder / "said"
        self.said.touch()
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path.cwd()), **env}
        environment.pop("COLUMNS", None)  # which pytest's workers have
        argv = [sys.executable, "-c", PROGRAM, str(folder), *words]
        self.child = subprocess.Popen(argv, stdout=slave, stdin=slave, stderr=slave, env=environment)
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until: str = "", timeout_s: float = 30.0) -> str:
        """What comes up to ``until``, or to the end."""
        seen, end = b"", time.monotonic() + timeout_s
        while (not until or until.encode() not in seen) and time.monotonic() < end:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the program has ended
                break
            if not data:
                break
            seen += data
        return seen.decode()


@pytest.mark.slow
def test_lines_go_above_the_view_and_none_is_lost_when_the_terminal_is_resized(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "40", "0.05", "")
    before = terminal.read(until="line 5 ")
    terminal.resize(10, 40)
    after = terminal.read()
    assert terminal.child.wait(timeout=30) == 0
    seen = before + after
    assert [f"line {number} [red]x[/] " in seen for number in range(40)] == [True] * 40
    assert "run cf08  digits" in re.sub(r"\x1b\[[0-9;]*m", "", before)
    assert "\x1b[2J" not in seen  # a rank's own control characters move no cursor
    assert seen.rstrip().endswith("FINISHED")
    assert before.rindex("\x1b[?25h") > before.rindex("\x1b[?25l")  # the cursor stays, whatever ends the view


@pytest.mark.slow
def test_a_ranks_colours_reach_a_terminal_and_nothing_else_of_it_does(tmp_path: Path) -> None:
    line = "\x1b[31mred\x1b[0m \x1b]0;owned\x07"
    coloured = Terminal(tmp_path, "3", "0.05", line).read()
    assert re.search(r"\x1b\[31mred\x1b\[0m .x1b\]0;owned.x07", coloured)
    assert "\x1b]0;" not in coloured
    plain = Terminal(tmp_path, "3", "0.05", line, NO_COLOR="1").read()
    assert r"red \x1b]0;owned\x07" in plain
    assert not re.search(r"\x1b\[[0-9;]*m", plain), "bold and dim go with the colours"


@pytest.mark.slow
def test_who_has_something_to_say_never_waits_for_a_terminal_that_takes_nothing(tmp_path: Path) -> None:
    """Nobody reads the pty, as after Ctrl-S: half a megabyte is far beyond what it holds by itself."""
    terminal = Terminal(tmp_path, "1000", "0", "." * 500)
    end = time.monotonic() + 30
    while "said in" not in terminal.said.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert float(terminal.said.read_text().split()[-1]) < 5.0
    assert terminal.child.poll() is None  # and it ends when all is written
    seen = terminal.read()
    assert "line 999 " in seen
    assert terminal.child.wait(timeout=30) == 0


def test_a_screen_that_ends_while_its_thread_looks_for_news_ends(capsys: pytest.CaptureFixture[str]) -> None:
    class Ended(Screen):
        def _take_queue(self) -> Any:
            if not self._is_over:  # what __exit__ does in another thread
                self._is_over = True
                self._woken.set()
            return super()._take_queue()

    screen = Ended()
    screen.say("one")
    writer = threading.Thread(target=screen._write, daemon=True)
    writer.start()
    writer.join(2.0)
    assert not writer.is_alive()
    assert capsys.readouterr() == ("", "one\n")


@pytest.mark.parametrize(
    ("environment", "live"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({}, False), ({"TERM": "xterm", "CI": "true"}, False)],
)
def test_a_view_needs_a_terminal_that_moves_its_cursor(environment: dict[str, str], live: bool) -> None:
    assert is_live(test_printable.Terminal(), environment) is live
    assert not is_live(StringIO(), environment)
