"""Which error is called the first, and what it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pipeline.cluster.agent.requests import NodeEnd, RankFailure
from pipeline.cluster.attempt.failures import (
    HeldTracebacks,
    cause,
    failure_text,
    first_error,
    is_worth_showing,
    port_was_taken,
    shortened,
)
from pipeline.cluster.events import LogLine, NodeExit, NodeLost, RankError
from pipeline.cluster.launchers.transport.answers import node_end
from pipeline.core.errors import HostError, TrainingError
from pipeline.core.specs import LaunchPlan, NodePlan
from pipeline.execution.complete import _journal_line as line_of

ECHO = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3"


RUN_ID = "k-abcdef-1-aa"


def node(rank: int) -> NodePlan:
    return NodePlan(
        node_rank=rank,
        host=f"node{rank}",
        identity="",
        address="",
        argv=(),
        env={},
        run_dir=f"/w/runs/{RUN_ID}/node{rank}",
        data_dir="",
        state_dir=f"/w/runs/{RUN_ID}/node{rank}/agent",
        first_rank=rank,
        nproc_per_node=1,
    )


PLAN = LaunchPlan(
    run_key="k",
    run_id=RUN_ID,
    attempt=1,
    launcher="pssh",
    master_addr="",
    master_port=1,
    world_size=2,
    lease_s=1.0,
    nodes=(node(0), node(1)),
)


def ended(host: str, *errors: RankError, reason: str = "") -> NodeExit:
    return NodeExit(host=host, code=1, reason=reason, errors=errors)


def error(rank: int, unix_time: float, message: str) -> RankError:
    return RankError(rank=rank, unix_time=unix_time, message=message, traceback=f"Traceback …\n{message}")


def test_the_earliest_of_two_real_errors() -> None:
    ends = {
        "node0": ended("node0", error(0, 2.0, "KeyError: 1")),
        "node1": ended("node1", error(1, 1.0, "KeyError: 2")),
    }
    assert first_error(ends) == ("node1", error(1, 1.0, "KeyError: 2"))


def test_an_exit_code_of_0_comes_before_its_echoes_and_behind_what_a_rank_tells_of() -> None:
    early = error(1, 3.0, "ended with exit code 0 before the run was over; take out what ends the process")
    ends = {"node0": ended("node0", error(0, 1.0, ECHO)), "node1": ended("node1", early)}
    assert first_error(ends) == ("node1", early)
    ends["node0"] = ended("node0", error(0, 4.0, "ValueError: boom"))
    assert first_error(ends) == ("node0", error(0, 4.0, "ValueError: boom"))


LOST = {host: NodeLost(host=host, reason="no longer answers") for host in ("node0", "node1")}


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (  # the first error that is no consequence of another
            [ended("node0", error(0, 1.0, ECHO)), ended("node1", error(1, 1.2, "ValueError: boom"))],
            " on node1, rank 1: ValueError: boom\n  Traceback …\nended with it: node0",
        ),
        (  # the trainer explains it, so it has no traceback
            [ended("node0", error(0, 1.0, "TrainerError: x.pt could not be written (No space left on device)"))],
            " on node0, rank 0: x.pt could not be written (No space left on device)",
        ),
        (  # a host is lost, and a rank of another one notices it
            [ended("node0", error(0, 1.0, ECHO)), LOST["node1"]],
            ": node1 no longer answers\nended with it: node0",
        ),
        ([*LOST.values()], ": node0 no longer answers\nno longer answers either: node1"),
        (
            [ended("node0", reason="torchrun ended with exit code 1\nNo module named torch")],
            " on node0: torchrun ended with exit code 1\nNo module named torch",
        ),
        (
            [ended("node0", reason="torchrun ended with exit code 1\nx\npaceline: error: no foo in PATH")],
            " on node0: no foo in PATH",
        ),
    ],
)
def test_text_names_what_failed_first_the_other_hosts_and_the_logs(ends: list[NodeExit | NodeLost], text: str) -> None:
    assert failure_text(PLAN, {end.host: end for end in ends}, Path("l")) == f"training failed{text}\nlogs: l"


def test_a_removed_run_folder_is_one_sentence_without_the_place_of_its_logs() -> None:
    why = "the run's folder /r/k was removed while the run was going on"
    ends = {host: NodeLost(host=host, reason=why, is_explained=True) for host in ("node0", "node1")}
    assert failure_text(PLAN, ends, None) == f"training failed on node0: {why}\nended with it: node1"


def test_what_several_ranks_end_with_is_told_once_with_the_persons_own_file() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/r/k/code/trainers/training/step.py", line 9, in _backward\n    logits = network(images)\n'
        '  File "/env/torch/nn/modules/module.py", line 7, in _call_impl\n    return forward_call()\n'
        '  File "/r/k/code/trainers/models/mine.py", line 61, in forward\n    return self.head(x)\n           ^^^^\n'
        '  File "/env/torch/nn/modules/linear.py", line 134, in forward\n    return F.linear()\n'
    )

    def failed(rank: int) -> RankError:
        message = f"RuntimeError: shapes (32x{rank})"
        return RankError(rank=rank, unix_time=rank, message=message, traceback=f"{trace}{message}\n")

    ranks = [failed(rank) for rank in (0, 1, 2, 4)]
    ends = {"node0": ended("node0", *ranks[:2]), "node1": ended("node1", *ranks[2:], error(5, 9.0, ECHO))}
    plan = dataclasses.replace(PLAN, nodes=tuple(dataclasses.replace(item, run_dir="/r/k") for item in PLAN.nodes))
    assert failure_text(plan, ends, Path("logs")) == (
        "training failed on node0, rank 0: RuntimeError: shapes (32x0)\n"
        "  Traceback (most recent call last):\n"
        '    File "trainers/models/mine.py", line 61, in forward\n      return self.head(x)\n             ^^^^\n'
        '    File "/env/torch/nn/modules/linear.py", line 134, in forward\n      return F.linear()\n'
        "ended with it: node1\nlogs: logs"
    )


@pytest.mark.parametrize("before", ["", "my.models.", "trainers.entry.", "__main__.f.<locals>."])
def test_the_error_is_told_once_wherever_its_class_is_of(before: str) -> None:
    message = "E: two\nlines."
    failed = RankError(rank=1, unix_time=1, message=message, traceback=f"Traceback …\n  File …\n{before}{message}\n")
    text = failure_text(PLAN, {"node1": ended("node1", failed)}, Path("logs"))
    assert text == "training failed on node1, rank 1: E: two\nlines.\n  Traceback …\n    File …\nlogs: logs"


def test_what_a_rank_says_moves_no_cursor_and_sets_no_colour() -> None:
    failure = RankFailure(rank=1, unix_time=1.0, message="E: \x1b[31mred\r\n\té", traceback="\x9b2J")
    reported = NodeEnd(code=1, reason="failed\x07", tail=("\x1b[0m",), errors=(failure,))
    end = node_end("node1", reported, clock_correction_s=0)
    assert isinstance(end, NodeExit)
    assert end.reason == "failed\\x07\n\\x1b[0m"
    assert (end.errors[0].message, end.errors[0].traceback) == ("E: \\x1b[31mred\\r\n\té", "\\x9b2J")


def test_a_mismatch_that_gloo_has_found_is_told_in_words() -> None:
    said = "[enforce fail] 24 vs 8. Is there a distributed collective mismatch in your code? (signal 6 (SIGABRT))"
    ends = {"node0": ended("node0", error(0, 2.0, ECHO)), "node1": ended("node1", error(1, 1.0, said))}
    text = failure_text(PLAN, ends, Path("logs"))
    assert text.startswith(f"training failed on node1, rank 1: {said}\n")
    assert "\nranks were in different collectives: one of them has left one out, or made one of its own" in text


def test_only_node_zero_can_have_lost_the_port() -> None:
    taken = "RuntimeError: The server socket has failed to listen … EADDRINUSE … address already in use"
    assert port_was_taken(PLAN, {"node0": ended("node0", reason=taken)})
    assert not port_was_taken(PLAN, {"node1": ended("node1", reason=taken)})
    assert not port_was_taken(PLAN, {"node0": ended("node0", error(0, 1.0, "x"), reason=taken)})


def test_a_full_disk_is_the_cause_where_other_hosts_only_tell_of_its_end(tmp_path: Path) -> None:
    """The rank there could not write down its own error."""
    full = "a rank failed; the host has a full disk ([Errno 28] No space left on device: '/w', 0 bytes are free there)"
    ends = {"node1": ended("node1", error(1, 1.0, ECHO)), "node0": ended("node0", reason=full)}
    text = failure_text(PLAN, ends, tmp_path)
    assert text == f"training failed on node0: {full}\nended with it: node1\nlogs: {tmp_path}"
    assert cause(ends) == "disk"
    ends["node1"] = ended("node1", error(1, 1.0, "ValueError: boom"))
    assert failure_text(PLAN, ends, tmp_path).startswith("training failed on node1, rank 1: Val")


def test_the_journal_gets_one_line_of_an_error() -> None:
    assert line_of(TrainingError("training failed on node0, rank 0: E\n  Traceback …\nlogs: x")).endswith("rank 0: E")
    assert line_of(HostError("probe: 1 of 2 hosts\n  node7: unreachable")) == "probe: 1 of 2 hosts; node7: unreachable"


UNCAUGHT = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    f()", "E: a", "", "b"]
CAUGHT = [
    *UNCAUGHT[:4], "", "During handling of the above exception, another exception occurred:", "", *UNCAUGHT[:3], "E: b"
]  # fmt: skip


def shown(*lines: tuple[int, str]) -> tuple[list[str], list[str]]:
    """What is shown while the lines come, and what after a good end."""
    seen: list[str] = []
    tracebacks = HeldTracebacks(lambda line: seen.append(f"{line.rank} {line.text}"))
    for rank, text in lines:
        tracebacks.add(LogLine(host="node0", rank=rank, text=text))
    before = [*seen]
    tracebacks.release()
    return before, seen[len(before) :]


def test_an_exception_that_ends_a_rank_is_held_back_while_other_ranks_are_shown() -> None:
    lines = [(rank, f"[rank{rank}]: {text}") for text in UNCAUGHT for rank in (0, 1)]
    assert shown((0, "epoch 1"), *lines, (2, "epoch 1"), (0, "bye"))[0] == ["0 epoch 1", "2 epoch 1", "0 bye"]


def test_a_traceback_that_the_program_has_caught_is_shown_as_soon_as_the_rank_says_something_else() -> None:
    assert shown(*((0, text) for text in [*CAUGHT, "epoch 1"]))[0] == [*(f"0 {text}" for text in CAUGHT), "0 epoch 1"]


def test_an_error_that_the_trainer_explains_is_left_to_the_end_of_the_attempt() -> None:
    lines = [(0, "paceline: error: trainer.loss=a:b returned [2]"), (0, "a number was needed")]
    assert shown(*lines, (1, "epoch 1")) == (["1 epoch 1"], [f"0 {text}" for _, text in lines])


@pytest.mark.parametrize(
    ("rank", "text", "shown"),
    [
        (0, "epoch 1", True),
        (None, "W1122 torch/distributed/run.py: setting OMP_NUM_THREADS", False),
        (None, "paceline: torchrun is at 10.0.0.1:29500", False),
        (None, "paceline: WARNING: loss was nan", True),
    ],
)
def test_of_what_no_rank_says_only_a_warning_is_shown(rank: int | None, text: str, shown: bool) -> None:
    assert is_worth_showing(LogLine(host="node0", rank=rank, text=text)) is shown


def test_the_lines_of_a_script_are_shown_from_its_own_copy_of_the_snapshot() -> None:
    frames = [
        ("/r/0123/work/node1/above/above/code/sub/t.py", "main()"),
        ("/usr/lib/x.py", "inner()"),
        ("/usr/lib/y.py", "raise"),
    ]
    text = "Traceback:\n" + "".join(f'  File "{path}", line 3, in f\n    {line}\n' for path, line in frames)
    assert shortened(text, "0123") == (
        'Traceback:\n  File "sub/t.py", line 3, in f\n    main()\n  File "/usr/lib/y.py", line 3, in f\n    raise'
    )
