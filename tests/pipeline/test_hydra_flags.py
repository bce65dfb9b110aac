"""Hydra's own command line: what it can't do is one clear error, with the exit code of wrong usage."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import pytest
from doit.exceptions import InvalidCommand
from doit.task import Task

from pipeline.cli import invocation, wrong_words
from pipeline.cli.loader import refuse_unknown
from pipeline.config.compose import read_flags
from pipeline.core.errors import UsageError
from pipeline.core.processes import process
from tests.integration.commands import ROOT
from tests.waiting import unhurried


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--shell-completion", "--shell-completion needs install=SHELL or uninstall=SHELL"),
        ("--experimental-rerun /nope", "try: doit reproduce KEY"),
        ("-cn quickstart", "/conf\n  try: experiment=quickstart"),
        ("-cp nowhere", "there is no folder "),
        ("-cd /nowhere", "there is no folder /nowhere"),
        ("--info seed=1", "argument --info/-i: invalid choice: 'seed=1'"),
    ],
)
def test_flags_that_hydra_answers_with_a_traceback_are_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        read_flags(line.split())


def test_the_words_behind_good_flags() -> None:
    assert read_flags(["--cfg", "job", "--resolve", "seed=1"]) == (("seed=1",), False, True)
    assert read_flags(["-m", "seed=1,2"]) == (("seed=1,2",), True, True)
    assert not read_flags(["--shell-completion", "install=bash"]).composes
    assert not read_flags(["-cd", "/", "-m", "+mine=x"]).composes


@pytest.mark.parametrize("line", ["-cn elsewhere train", "train -cd /", "train --config-path=/"])
def test_doit_says_that_it_takes_no_other_configuration(line: str) -> None:
    argv = line.split()
    with pytest.raises(UsageError, match=r"is an option of Hydra's command line, and doit always takes conf/config"):
        wrong_words.check(argv, invocation.parse(argv), [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train --epochs 3 seed=1", "doit train seed=1 trainer.epochs=3"),
        (
            "train --nproc_per_node=2 --lr 1 seed=1 force=1",
            "doit train seed=1 force=1 cluster.nproc_per_node=2 optimizer.lr=1",
        ),
        ("train seed=1 --dryrun", "doit train seed=1 --dry-run"),
        ("train --config conf/experiment/digits.yaml", "doit train experiment=digits"),
        ("train seed=1 train.py --lr 0.1", "doit torchrun seed=1 train.py --lr 0.1"),
        ("lab --zzz", "doit help lab"),
    ],
)
def test_an_override_with_dashes_is_shown_without(line: str, hint: str) -> None:
    argv = line.split()
    with pytest.raises(
        UsageError, match=r"^--\S+ is no option of doit \w+, which has --\S+.*; overrides have no dashes"
    ) as refused:
        wrong_words.check(argv, invocation.parse(argv), [])
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--json runs", "the options of doit runs stand behind it\n  try: doit runs --json"),
        ("train --resume", "--resume is no option of doit train: the same command goes on where its run was"),
        (
            "train -m seed=1,2 json=1",
            "-m is an option of Hydra's command line, which doit train doesn't take beside json=1",
        ),
        ("mcp --zzz", "--zzz is no option of doit mcp, which has none; overrides have no dashes"),
    ],
)
def test_a_flag_that_is_no_override_is_answered_in_its_own_words(line: str, said: str) -> None:
    argv = line.split()
    with pytest.raises(UsageError) as refused:
        wrong_words.check(argv, invocation.parse(argv), [])
    assert str(refused.value).startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train trainer.epochs 3", "'trainer.epochs' is no command; a field is set by =: doit train trainer.epochs=3"),
        ("plan my/net.py", "'my/net.py' is no command; a field is set by =: doit plan program.script=my/net.py"),
        ("train trian", "there is no command 'trian'; did you mean train? valid: "),
    ],
)
def test_a_forgotten_equals_sign_is_told_with_the_word_that_was_meant(line: str, said: str) -> None:
    tasks = [Task(name, []) for name in ("train", "plan", "runs")]
    with pytest.raises(InvalidCommand, match=re.escape(said)):
        refuse_unknown(tasks, line.split(), line.split()[0])


@pytest.mark.parametrize("line", ["train -c job seed=1", "train seed=1 -i defaults", "train --experimental-rerun=/x"])
def test_hydras_short_flags_behind_the_verb_are_hydras(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(process, "replace", started.append)
    argv = line.split()
    with contextlib.suppress(UsageError):  # the process would have been replaced before
        wrong_words.check(argv, invocation.parse(argv), [])
    assert started == [[sys.executable, "-m", "pipeline", *argv[1:]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-m seed=1,2 dry_run=1", "ERROR: unknown key 'dry_run'; it is an option of doit train, sweep; valid: "),
        ("-cd / --cfg job schedule=nope", "ERROR: schedule=nope: schedule has no option 'nope'; valid: "),
    ],
)  # fmt: skip
def test_what_doit_refuses_the_application_refuses_with_the_same_line(line: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *line.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")
    printed = unhurried(done.stderr)
    assert printed.startswith(said)
    assert len(printed.splitlines()) == 1


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("--cfg job -p cluster.hosts cluster=pssh cluster.hosts=[a,me@b:2222]", "- name: a\n"),
        ("program.script=dodo.py --cfg job -p program.script", "dodo.py\n"),
    ],
)
def test_the_application_takes_hosts_and_a_script_by_name_as_doit_does(line: str, printed: str) -> None:
    argv = [sys.executable, "-m", "pipeline", *line.split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed in done.stdout
