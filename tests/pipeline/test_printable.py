"""What came from elsewhere moves no terminal's cursor: values, lines of logs, errors; commands stay copyable."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.cli.commands import runs
from pipeline.cli.output import say
from pipeline.comparing import groups
from pipeline.comparing.groups import command_line
from pipeline.core.printable import hydra_text, printable, program_lines, shell_line, takes_colours, without_host
from pipeline.keys.content_key import Difference
from pipeline.runs.contents import short_value
from pipeline.sweep import results

HOSTILE = "\x1b[2J\x9b31m\u202ea\nb"
SHOWN = r"\x1b[2J\x9b31m\u202ea\nb"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def in_a_list(value: str) -> str:
    return runs._fields({"x": value}, {})[0].removeprefix("x=")


@pytest.mark.parametrize("shown", [printable, short_value, groups.shown, in_a_list])
def test_a_value_is_one_piece_of_a_line_and_no_escape(shown: Callable[[str], str]) -> None:
    assert shown(HOSTILE) == SHOWN
    assert shown("été 类\u3000别") == "été 类\u3000别"


def test_what_two_keys_differ_in_is_shown_escaped() -> None:
    said = str(Difference(part="config", field="program.args.tag", old="a\tb", new=HOSTILE))
    assert said == rf"program.args.tag: a\tb → {SHOWN}"


def test_the_sweeps_list_of_what_failed_says_each_reason_once() -> None:
    trials = [
        results.TrialResult(
            number=number,
            key=f"k{number}",
            state="FAILED",
            chosen=(f"x={HOSTILE}",),
            overrides=(),
            values={},
            detail=why,
        )
        for number, why in enumerate((HOSTILE, "other", f"training failed on localhost, rank 1: {HOSTILE}"))
    ]
    assert results.text(trials, 3).split("\n\n")[-2:] == [
        rf"2 trials FAILED: {SHOWN}" f"\n  trial 0  k0  x={SHOWN}\n  trial 2  k2  x={SHOWN}",
        f"FAILED: other\n  trial 1  k1  x={SHOWN}",
    ]


def test_lines_on_a_terminal_are_escaped_and_what_is_kept_in_a_file_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), f"x {printable(HOSTILE[:-2])}\nb\n"), (io.StringIO(), f"x\t{HOSTILE}\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        say(f"x\t{HOSTILE}")
        assert stream.getvalue().replace("       ", " ") == expected


PROGRAM = "\x1b[1;31mred\x1b[0m \x1b]0;owned\x07\x1b[2Jx\ty"


def test_of_a_programs_control_sequences_its_colours_alone_pass_and_only_to_a_terminal() -> None:
    safe = r"\x1b]0;owned\x07x"
    assert program_lines(PROGRAM, terminal=False, colours=False) == f"red {safe}\ty"
    assert program_lines(PROGRAM, terminal=True, colours=False).startswith(f"red {safe} ")
    assert program_lines(PROGRAM, terminal=True, colours=True).startswith(f"\x1b[1;31mred\x1b[0m {safe} ")
    left_on = program_lines("\x1b[31mred\nplain", terminal=True, colours=True)
    assert left_on == "\x1b[31mred\x1b[0m\nplain", "a colour ends with its line"
    around_cursor = program_lines("\x1b[\x1b[K31mhi", terminal=True, colours=True)
    assert around_cursor == "\x1b[31mhi\x1b[0m", "a colour may appear only when what moves the cursor is taken out"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"a": {"b": "it's", "c": None}, "d": [True, 0.5]}, r"{a: {b: 'it\'s', c: null}, d: [true, 0.5]}"),
        ([{"name": "c", "port": 2200}], "[{name: 'c', port: 2200}]"),
        ([1e-07, -3, "null", "1"], "[1e-07, -3, 'null', '1']"),
        (np.float64(0.1), "0.1"),
        ({}, "{}"),
    ],
)
def test_hydra_reads_a_written_value_as_the_same(value: Any, written: str) -> None:
    assert hydra_text(value) == written
    assert OverridesParser.create().parse_override(f"x={written}").value() == value


@pytest.mark.parametrize("environment", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_and_a_dumb_terminal_take_no_colours(environment: dict[str, str]) -> None:
    assert not takes_colours(Terminal(), environment)
    assert takes_colours(Terminal(), {"TERM": "xterm"})
    assert not takes_colours(io.StringIO(), {"TERM": "xterm"})


@pytest.mark.parametrize("word", [HOSTILE, "it's \\ \x7f", "\U000e0041'", "plain words"])
def test_a_command_line_is_printable_and_a_shell_reads_the_same_words(word: str) -> None:
    line = shell_line(["printf", "%s", word])
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert done.stdout.decode() == word
    assert command_line("train", [word]).isprintable()


def test_a_line_for_people_is_folded_at_a_terminals_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for stdout, expected in (
        (Terminal(), "FINISHED 1: loss\n    0.5, 1 rank\n"),
        (io.StringIO(), "FINISHED 1: loss 0.5, 1 rank\n"),
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setenv("COLUMNS", "20")
        say("FINISHED 1: loss 0.5, 1 rank", folds=True)
        assert stdout.getvalue() == expected


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("localhost:0 | epoch 1/2", "epoch 1/2"),
        ("localhost:- | torchrun's own", "torchrun's own"),
        ("localhost:3 | x", "rank 3 | x"),
        ("trial  3 | localhost:1 | a\ntrial  3 | localhost:0 | b", "trial  3 | rank 1 | a\ntrial  3 | b"),
        ("node0:0 | localhost:0 | x", "node0:0 | localhost:0 | x"),
    ],
)
def test_lines_of_this_computer_are_shown_without_its_name(line: str, shown: str) -> None:
    assert without_host(line) == shown
