"""What a host tells of the ranks that failed there: the last traceback, the reason of a crash, cut where it is long."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.agent.requests import RankFailure
from pipeline.cluster.agent.running import rank_ends
from pipeline.cluster.agent.running.rank_ends import RankExit


def printed(tmp_path: Path, stderr: str, rank_exit: RankExit | None, script_code: int = 0) -> tuple[str, str]:
    """Message and traceback of a rank with this output; empty if there is no error."""
    path = tmp_path / "stderr.log"
    path.write_text(stderr)
    error = rank_ends.printed_error(str(path), 0, rank_exit, script_code=script_code)
    return (error.message, error.traceback) if error is not None else ("", "")


def test_a_rank_that_leaves_with_a_line_of_its_own_is_told_with_it(tmp_path: Path) -> None:
    usage = "usage: train.py [-h]\r\n 10%|#\r100%|##\ntrain.py: error: argument --lr: invalid\n[W1] not called\n"
    for rank_exit, code in ((RankExit(2, 5.0), 0), (None, 2)):
        message, _ = printed(tmp_path, usage, rank_exit, code)
        assert message == "ended with exit code 2; it said last: train.py: error: argument --lr: invalid"
    assert printed(tmp_path, "diverged\n", None, 1) == ("ended with exit code 1; it said last: diverged", "")
    assert printed(tmp_path, "\n", None, 2) == ("", "")


def test_printed_error_is_the_last_traceback_of_a_rank_that_ended_by_it(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nModuleNotFoundError: No module named x\n'
    assert printed(tmp_path, f"handled:\n{trace}and on\n", None) == ("", "")
    assert printed(tmp_path, f"handled:\n{trace}and on\n", RankExit(-11, 5.0))[0] == "ended with signal 11 (SIGSEGV)"
    failed = ("ModuleNotFoundError: No module named x", trace.rstrip())
    warned = f"warning\n{trace}[W1] destroy_process_group() was not called\n"
    marked = "".join(f"[rank1]: {line}\n" for line in trace.splitlines())
    for stderr in (warned, marked):
        assert printed(tmp_path, stderr, RankExit(1, 5.0)) == failed


@pytest.mark.parametrize("mark", ["", "[rank0]: "])
def test_the_error_of_a_loader_s_worker_is_the_one_that_it_raised(tmp_path: Path, mark: str) -> None:
    lines = [
        "Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    reraise()",
        "OSError: Caught OSError in DataLoader worker process 0.", "Original Traceback (most recent call last):",
        '  File "x.py", line 9, in __getitem__', "    f()", "OSError: truncated image",
    ]  # fmt: skip
    stderr = "".join(f"{mark}{line}\n" for line in lines) + f"{mark}\n"
    message, traceback = printed(tmp_path, stderr, RankExit(1, 5.0))
    assert message == "OSError: truncated image"
    assert "line 9, in __getitem__" in traceback


@pytest.mark.parametrize("mark", ["", "[rank0]: "])
def test_all_lines_of_an_exception_are_its_message_and_none_of_what_is_said_afterwards(
    tmp_path: Path, mark: str
) -> None:
    message = "RuntimeError: one\n\n# head\n| a |"
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1', "    f()", *message.split("\n")]
    told = "\n".join(f"{mark}{line}" if line else "" for line in lines)
    stderr = f"before\n{told}\n[W1123 a.cpp:1] Warning: destroy_process_group() was not called\nmore\n"
    assert printed(tmp_path, stderr, RankExit(1, 5.0)) == (message, "\n".join(lines))
    assert printed(tmp_path, stderr, None, 1) == (message, "\n".join(lines))


def test_what_a_progress_bar_does_to_the_screen_is_no_part_of_the_error(tmp_path: Path) -> None:
    end = "\r          \x1b[A\n\r 17%|#7 | 100/600 [00:01<00:09]\n"
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no such column\n'
    stderr = f" 10%|# | 60/600\r 17%|#7 | 100/600\n{trace}\r      \x1b[A\n"
    assert printed(tmp_path, stderr, RankExit(1, 5.0))[0] == "ValueError: no such column"
    assert rank_ends.without_bars(end) == "\n 17%|#7 | 100/600 [00:01<00:09]\n"


def test_of_a_traceback_that_breaks_off_no_frame_is_taken_for_the_error(tmp_path: Path) -> None:
    stderr = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\n  File "lo'
    message, traceback = printed(tmp_path, stderr, RankExit(1, 5.0))
    assert message == "its traceback breaks off: is the disk full, or ulimit -f too low?"
    assert traceback.endswith('\n  File "lo')


def test_of_a_rank_that_crashed_the_reason_and_its_own_stack_are_told(tmp_path: Path) -> None:
    stderr = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail] 24 vs 8. Is there a distributed collective mismatch in your code?\n"
        "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
        '  File "listen.py", line 75 in _listen\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "sum.py", line 2 in inner\n  File "net.py", line 1 in outer\n\nExtension modules: numpy (total: 1)\n'
    )
    crashed = (
        "[enforce fail] 24 vs 8. Is there a distributed collective mismatch in your code? (signal 6 (SIGABRT))",
        '  File "net.py", line 1 in outer\n  File "sum.py", line 2 in inner',
    )
    for code in (-6, 0):  # 0: torchrun was ended before it could tell the signal
        assert printed(tmp_path, stderr, RankExit(code, 5.0)) == crashed


def test_what_a_rank_says_of_its_error_is_cut_and_has_no_half_characters() -> None:
    text = "ValueError: \udcff " + "x" * 5000
    error = RankFailure(rank=0, unix_time=1.0, message=text, traceback=f"Traceback …\n{text}\n")
    told = rank_ends.masked_and_cut(error, lambda text: text.replace("Trace", "***"))
    assert told.message.startswith("ValueError: ? xxx")
    assert told.message.endswith("x… (cut: 3,014 more characters are in the log)")
    assert told.traceback == f"***back …\n{told.message}"
    lines = "\n".join(f"line {number}" for number in range(1000))
    told = rank_ends.masked_and_cut(RankFailure(0, 1.0, lines, f"Trace\n{lines}"), str)
    assert told.message.split("\n")[7:10] == ["line 7", "… 988 lines, see the log", "line 996"]
    assert told.traceback == f"Trace\n{told.message}"
    short = RankFailure(rank=0, unix_time=1.0, message="KeyError: 1")
    assert rank_ends.masked_and_cut(short, str) == short
