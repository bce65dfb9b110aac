"""JSON answers: one object on stdout, for data, for errors, and for verbs that have nothing but lines."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import pytest

from pipeline.cli.output import (
    COMMAND_VARIABLE,
    answer,
    answer_event,
    answer_with_error,
    begin_answer,
    coloured,
    finish_answer,
    say,
)
from pipeline.cli.verbs import VERBS
from pipeline.cluster.events import LogLine, MetricsLine
from pipeline.core.errors import HostError, TrainingError, UsageError
from tests.pipeline.test_printable import Terminal


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["doit", "train", "seed=1", "json=1"])
    begin_answer()


def read(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.usefixtures("typed")
def test_an_answer_stands_alone_on_stdout_and_lines_for_people_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("FINISHED")
    answer({"loss": math.nan, "best": [math.inf, 1.5]})
    finish_answer()  # it has answered already
    value, err = read(capsys)
    assert value == {
        "schema": "paceline.train/1",
        "ok": True,
        "data": {"loss": "NaN", "best": ["inf", 1.5]},
        "error": None,
    }
    assert err == "FINISHED\n"


@pytest.mark.usefixtures("typed")
def test_a_verb_without_data_answers_with_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo")
    finish_answer()
    assert read(capsys)[0]["data"] == {"lines": ["one", "two"]}


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize(
    ("error", "known"),
    [
        (UsageError("no such model", hint="model=resnet18"), ("usage", "no such model", "model=resnet18")),
        (HostError("node1: no torch"), ("hosts", "node1: no torch", None)),
        (TrainingError("rank 1 ended", cause="memory"), ("training.memory", "rank 1 ended", None)),
        (ZeroDivisionError("x"), ("unexpected", "what a person is shown", None)),
    ],
)
def test_an_error_has_a_code_a_message_and_a_hint(
    capsys: pytest.CaptureFixture[str], error: Exception, known: tuple[str, str, str | None]
) -> None:
    answer_with_error(error, "what a person is shown")
    value, _ = read(capsys)
    assert (value["ok"], value["data"]) == (False, None)
    assert value["error"] == dict(zip(("code", "message", "hint"), known, strict=True))


@pytest.mark.usefixtures("typed")
def test_events_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    answer_event(MetricsLine(text='{"step": 3, "metrics": {"train/loss": 0.5}}'))
    answer_event(LogLine(host="node1", rank=2, text="hello"))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"schema": "paceline.event/1", "event": "metrics", "step": 3, "metrics": {"train/loss": 0.5}},
        {"schema": "paceline.event/1", "event": "log_line", "host": "node1", "rank": 2, "text": "hello"},
    ]


def test_without_the_word_nothing_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["doit", "train"])
    begin_answer()
    finish_answer()
    answer_with_error(UsageError("x"), "x")
    assert capsys.readouterr().out == ""


def test_every_verb_that_ends_by_itself_takes_json() -> None:
    assert {name for name, verb in VERBS.items() if "json" not in verb.options} == {"torchrun", "ui", "mcp"}


def test_how_something_stands_is_in_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("FINISHED cf0848: loss 1", Terminal()) == "\x1b[32mFINISHED\x1b[0m cf0848: loss 1"
    assert coloured("ERROR: no host", Terminal()) == "\x1b[1;31mERROR:\x1b[0m no host"
    assert coloured("a FINISHED run", Terminal()) == "a FINISHED run"
    assert coloured("ERROR: no host", io.StringIO()) == "ERROR: no host"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("ERROR: no host", Terminal()) == "ERROR: no host"


@pytest.mark.usefixtures("typed")
def test_a_hint_names_the_command_as_it_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "paceline")
    error = UsageError("doit logs takes one key", hint="doit runs")
    answer_with_error(error, str(error))
    said = read(capsys)[0]["error"]
    assert (said["message"], said["hint"]) == ("paceline logs takes one key", "paceline runs")
