"""What was typed: verb, overrides in their order, options of the verb."""

from __future__ import annotations

import re
import threading
from typing import NoReturn

import pytest

from pipeline.cli import finished, loader, output
from pipeline.cli.commands import train
from pipeline.cli.invocation import QUIET, VERBOSE, Invocation, flags_as_words, parse, without_verbosity
from pipeline.cli.output import COMMAND_VARIABLE, is_warning, note, say, say_log
from pipeline.cli.session import Session
from pipeline.config import compose
from pipeline.core.errors import UsageError
from pipeline.core.processes import threads
from tests.waiting import HANG_S


def test_overrides_keep_order_prefixes_and_duplicates() -> None:
    words = [
        "cluster=two_node",
        "+a=1",
        "train",
        "++b=2",
        "~c",
        "optimizer.lr=0.1",
        "optimizer.lr=0.2",
        "x='a=b'",
        "db@p=q",
    ]
    typed = parse(words)
    assert typed.verb == "train"
    assert typed.overrides == tuple(word for word in words if word != "train")


@pytest.mark.parametrize(
    ("line", "options", "overrides"),
    [
        ("run -n 2 --verbosity=2 train seed=1", {}, ("seed=1",)),  # doit's own
        ("evaluate run=abc seed=1", {"run": "abc"}, ("seed=1",)),
        ("preflight preflight.deep=true seed=1", {"deep": "true"}, ("seed=1",)),  # with the verb in front
        ("train preflight.deep=1", {"preflight.deep": "1"}, ()),
    ],
)
def test_options_are_told_from_overrides(line: str, options: dict[str, str], overrides: tuple[str, ...]) -> None:
    typed = parse(line.split())
    assert (typed.options, typed.overrides) == (options, overrides)


def test_a_finished_run_is_repeated_with_doits_option_also_among_others() -> None:
    assert all(parse([flag, "train", "seed=1"]).repeats for flag in ("-a", "-ka", "-ak", "--always-execute"))
    assert not parse(["-k", "-n", "1", "train", "seed=a"]).repeats


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", ""], "argument 2 is empty"),
        (["train", "  "], "argument 2 is empty"),
        (["lab", "host=2"], "doit lab takes no 'host'; did you mean hosts=2?"),
        (["benchmark", "pairs=0"], "pairs=0 must be a whole number from 1"),
        (["plot", "x=epochs"], "x=epochs is not known; did you mean epoch?"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(words)


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "\udcff"])
def test_an_option_that_cannot_be_printed_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"run='.*' holds what can't be printed"):
        parse(["status", f"run={value}"])


def test_a_switch_of_a_verb_is_on_or_off() -> None:
    typed = parse(["sweep", "json=1", "fork=TRUE", "retry_failed=no"])
    assert [typed.is_on(name) for name in ("json", "fork", "retry_failed", "detach")] == [True, True, False, False]
    with pytest.raises(UsageError, match="fork=maybe must be 1 or 0"):
        parse(["sweep", "fork=maybe"])
    with pytest.raises(UsageError, match="force=maybe must be 1 or 0"):
        flags_as_words(["train", "force=maybe"])


def test_a_named_run_has_its_own_configuration_and_takes_no_further_words() -> None:
    asked = Invocation(verb="why", overrides=("optimizer.lr=0.2",), options={"run": "cf0848"})
    with pytest.raises(UsageError, match=r"doit why KEY takes no 'optimizer.lr=0.2': the run has its own"):
        Session(asked).config  # noqa: B018


def test_a_configuration_or_a_key_that_takes_long_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy computer the first line came after 20 s."""
    told = threading.Event()

    def hear(text: str) -> None:
        note(text)
        told.set()

    def slowly(*_: object) -> NoReturn:
        told.clear()
        assert told.wait(HANG_S)
        raise UsageError("it took long")

    monkeypatch.setattr(threads.WaitReports.__init__, "__defaults__", (0.05,))
    monkeypatch.setattr(finished, "note", hear)
    monkeypatch.setattr("pipeline.cli.session.note", hear)
    monkeypatch.setattr(compose, "compose_config", slowly)
    current = Session(Invocation(verb="train", overrides=("trainer.log_every_steps=987",)))  # nobody's: not remembered
    with pytest.raises(UsageError, match="it took long"):
        current.config  # noqa: B018
    assert re.match(r"still composing the configuration \(\d+ s\)\n", capsys.readouterr().err)
    monkeypatch.setattr(Session, "pack", object())
    monkeypatch.setattr(Session, "run", property(slowly))
    with pytest.raises(UsageError, match="it took long"):
        train.train_all(current)
    assert re.match(r"still looking up the run \(\d+ s\)\n", capsys.readouterr().err)


@pytest.mark.parametrize("said", ["paceline", "doit"])
def test_the_next_command_is_told_in_the_words_that_were_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    if said == "paceline":
        monkeypatch.setenv(COMMAND_VARIABLE, said)
    assert output.command() == said
    assert str(loader.invalid("doit train trainer.epochs=3")) == f"{said} train trainer.epochs=3"
    say_log("node0:0 | doit train")
    say("doit's own options; try: doit lab down=1\n  prove  doit reproduce 0c, as `doit help run` says")
    say('{"reason": "try doit fetch"}')
    assert capsys.readouterr().out == (
        "node0:0 | doit train\n"
        f"doit's own options; try: {said} lab down=1\n  prove  {said} reproduce 0c, as `{said} help run` says\n"
        f'{{"reason": "try {said} fetch"}}\n'
    )


@pytest.mark.parametrize(
    ("words", "level", "rest"),
    [
        ("-v 0 train seed=1", QUIET, "train seed=1"),
        ("train -v 2 seed=1", VERBOSE, "train seed=1"),
        ("train --verbosity=2 -v 0", QUIET, "train"),
        ("train -v", None, "train -v"),
        ("train -v 3", None, "train -v 3"),
        ("train seed=-v", None, "train seed=-v"),
    ],
)
def test_how_much_is_shown_may_be_said_anywhere_and_the_last_word_counts(
    words: str, level: int | None, rest: str
) -> None:
    assert without_verbosity(words.split()) == (level, rest.split())


def test_without_words_but_the_end_warnings_and_errors_are_shown() -> None:
    shown = ("WARNING: no checkpoint", "node1:0 | warning: loss is nan", "trial 1 | ERROR: x")
    assert [line for line in (*shown, "epoch 1/20  loss 2.3", "0 warnings so far") if is_warning(line)] == [*shown]
