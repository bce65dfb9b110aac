"""Flags of a verb, and a run by its bare key, are the words that the verb has always taken."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pipeline.cli import invocation
from pipeline.cli.verbs import VERBS
from pipeline.core.errors import UsageError
from pipeline.runs import index
from tests.pipeline import finished_folder as folder


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stop cf0848", "stop run=cf0848"),
        ("evaluate last --json", "evaluate run=last json=1"),
        ("reproduce 495e1d.tar.gz --keep", "reproduce run=495e1d.tar.gz keep=1"),
        ("status cf0848 --watch", "status run=cf0848 watch=1"),
        ("plot --metric train/loss --output=x.pdf", "plot metric=train/loss file=x.pdf"),
        ("export cf0848 --output x.tar.gz", "export run=cf0848 to=x.tar.gz"),
        ("sync --no-data", "sync data=0"),
        ("clean --older-than 30 --yes", "clean older_than=30 yes=1"),
        ("train --preflight-deep seed=1", "train preflight.deep=1 seed=1"),
        ("train --force seed=1", "-a train seed=1"),
        ("train --dry-run seed=1", "plan seed=1"),
        ("train force=1 dry_run=0 seed=1", "-a train seed=1"),
        ("step clean -n 4", "-n 4 step clean"),
        ("sweep -n2 seed=0,1", "sweep sweep.slots=2 seed=0,1"),
        ("logs -f", "logs follow=1"),
        ("wait my-sweep", "wait run=my-sweep"),
        ("train --epochs 3 beef=1", "train --epochs 3 beef=1"),
        ("torchrun --nproc-per-node 2 train.py --json --run x", "torchrun --nproc-per-node 2 train.py --json --run x"),
        ("plan torchrun train.py --json", "plan torchrun train.py --json"),
        ("list --all", "list --all"),
    ],
)
def test_flags_and_a_bare_key_become_words(line: str, words: str) -> None:
    assert invocation.flags_as_words(shlex.split(line)) == shlex.split(words)


def test_every_option_of_every_verb_has_a_flag() -> None:
    for name, verb in VERBS.items():
        for option, about in verb.options.items():
            flag = about.typed(option)
            known = invocation.option_of(flag, name)
            assert known == (option, about), (name, flag)


def test_a_flag_without_its_value_is_refused_with_its_form() -> None:
    with pytest.raises(UsageError, match=r"^--metric of doit plot needs a value: --metric NAME\n  try: doit help plot"):
        invocation.flags_as_words(["plot", "--metric", "--log"])


def test_two_runs_are_refused_where_a_verb_takes_one() -> None:
    with pytest.raises(UsageError, match=r"^doit stop takes one run at a time, not cf0848 and 495e1d\n"):
        invocation.flags_as_words(["stop", "cf0848", "495e1d"])


def test_last_is_the_newest_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no runs under .* yet"):
        index.find(tmp_path, "last")
    keys = [folder.finished(tmp_path, config={**folder.CONFIG, "seed": seed}).key for seed in (5, 6)]
    assert index.find(tmp_path, "last").key == keys[1] != keys[0]
