"""What Python's train and sweep make of their arguments, and of the answer of a sweep."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline import notebook
from pipeline.core.errors import UsageError
from pipeline.notebook import Trial, _best_first, _overrides, _script_line


@pytest.mark.parametrize(
    ("typed", "fields", "words"),
    [
        (("run train.py --epochs 3",), {"lr": 0.1, "fast": True}, "run train.py --epochs 3 --lr 0.1 --fast"),
        (("torchrun", "train.py"), {"lr": [0.1, 0.01]}, "torchrun --sweep lr=0.1,0.01 train.py"),
        (("run", "a.py"), {"name": ["a,b", "c"], "at": None, "fast": False}, "run --sweep name='a,b',c a.py"),
        (
            ("run", "a.py"),
            {"fast": [True, False], "lr": (1e-5, 2)},
            "run --sweep fast=true,false --sweep lr=1e-05,2 a.py",
        ),
        (("experiment=quickstart",), {"lr": 0.1}, ""),
        ((), {"lr": 0.1}, ""),
    ],
)
def test_fields_are_options_of_the_script_and_lists_are_swept(
    typed: tuple[str, ...], fields: dict[str, Any], words: str
) -> None:
    assert _script_line(typed, fields) == words.split()


def test_a_mapping_of_python_is_one_for_hydra_too() -> None:
    (word,) = _overrides({"cluster.env": {"A": "it's", "B": None, "C": {"deep": [True, 0.5]}}}, ())
    assert OverridesParser.create().parse_override(word).value() == {"A": "it's", "B": None, "C": {"deep": [True, 0.5]}}


@pytest.mark.parametrize(
    ("metric", "direction", "order"),
    [("val/loss", "minimize", "badc"), ("val/loss", "maximize", "dabc"), ("val/accuracy", "maximize", "cabd")],
)
def test_the_trials_of_a_sweep_come_best_first_in_the_direction_of_its_metric(
    metric: str, direction: str, order: str
) -> None:
    values: dict[str, dict[str, Any]] = {
        "a": {"val/loss": 0.2, "val/accuracy": 0.1},
        "b": {"val/loss": 0.1},
        "c": {"val/accuracy": 0.5},
        "d": {"val/loss": "inf"},
    }
    trials = [Trial(key=key, state="FINISHED", chosen=(), values=of) for key, of in values.items()]
    assert "".join(trial.key for trial in _best_first(trials, metric, direction)) == order


def test_overrides_may_be_a_list_or_stand_in_one_text() -> None:
    assert notebook._words(("seed=1 optimizer.lr=0.1", ["model=own"])) == ("seed=1", "optimizer.lr=0.1", "model=own")
    quoted = "program.args.text='a=b c=d'"
    assert notebook._words((quoted,)) == (quoted,)
    assert notebook._words(("run train.py --tag a=b",)) == ("run train.py --tag a=b",)
    for value in (None, {"seed": 1}):
        with pytest.raises(UsageError, match=r"is no override\n  try: paceline\.train\("):
            notebook._words((value,))
