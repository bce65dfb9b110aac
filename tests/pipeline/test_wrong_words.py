"""Words that beginners type, and the command or override that the answer names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli import wrong_words
from pipeline.cli.verbs import VERBS
from tests.integration import preloaded


@pytest.mark.parametrize(
    ("line", "word", "meant"),
    [
        ("train quickstart", "quickstart", "a choice is written with its group: doit train experiment=quickstart"),
        ("train experiment/digits.yaml", "experiment/digits.yaml", "with its group: doit train experiment=digits"),
        ("train digits", "digits", "doit train dataset=digits or experiment=digits"),
        ("delete cf0848", "delete", "did you mean doit clean?"),
        ("accelerate launch train.py", "accelerate", "did you mean doit torchrun --nproc-per-node RANKS train.py?"),
        ("python train.py", "python", "did you mean doit run train.py?"),
        ("resume cf0848", "resume", "the same command goes on where its run was"),
        ("train cluster.hosts=[a, b]", "b]", "a shell splits words at blanks: 'cluster.hosts=[a,b]'"),
        ("train seed=1 optimizer.lr = 0.1", "optimizer.lr", "around =: doit train seed=1 optimizer.lr=0.1"),
        ("train optimizer.lr =0.1", "optimizer.lr", "no blanks stand around =: doit train optimizer.lr=0.1"),
        ("train cf0848aa", "cf0848aa", "started with, not its key; doit triage cf0848aa shows those"),
        ("logs nokey", "nokey", "no run has such a key; doit runs lists them"),
        ("why latest", "latest", "did you mean last?"),
        ("submit", "submit", "did you mean doit train --detach?"),
        ("train.py --lr 1", "train.py", "did you mean doit run train.py --lr 1? with several ranks it is"),
        ("sbatch train.py", "sbatch", "did you mean doit train cluster=slurm?"),
        ("init mine", "init", "did you mean paceline init my_project, in the folder that is to hold it?"),
    ],
)  # fmt: skip
def test_a_word_that_is_no_command_is_answered_with_what_was_meant(line: str, word: str, meant: str) -> None:
    argv = line.split()
    verb = argv[0] if argv[0] in VERBS else None
    assert meant in (wrong_words.advice(word, argv, verb) or "")


def test_a_word_that_means_nothing_has_no_answer() -> None:
    assert wrong_words.advice("xyzzy", ["xyzzy"], None) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "program.script=examples/train.py", "--lr", "0.1"), "program.args.lr=0.1"),
        (("sweep", "optimizer.lr=[0.1, 0.2]"), "the trials of a sweep are written optimizer.lr=0.1,0.2"),
        (("sweep", "seed=0..3"), "the trials of a sweep are written seed='range(0,4)'"),
        (("train", "program=my/train.py"), "no option of program\n  try: program.script=my/train.py\n"),
        (("train", "dataset=examples"), "is dataset=folder\n  try: dataset=folder dataset.source=examples\n"),
        (("train", "cluster.hosts=a,b"), "cluster.hosts=a,b: hosts are a list, 'cluster.hosts=[a,b]'"),
    ],
)
def test_a_wrong_value_or_flag_is_answered_with_the_right_one(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = preloaded.doit(words[0], f"paths.runs={tmp_path}", *words[1:])
    assert (done.returncode, said in done.stdout) == (3, True), done.stdout
