"""Targets and their arguments, checked in the source before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.own_targets import check_targets
from pipeline.core.errors import UsageError
from pipeline.keys.import_closure import source_of
from tests.trainers.tiny_runs import config
from trainers.core.config import TrainConfig
from trainers.core.options import parse

NETS = """
import numpy as np; from torch import nn

from . import blocks
from .blocks import Block

class Plain(nn.Module):
    def __init__(self, num_classes, channels, width=8, *, depth):
        super().__init__()

class Same(Plain):
    pass

class Foreign(Block):
    pass

class Open(nn.Module):
    def __init__(self, **settings): ...

made = Plain
SIZE = 3
try:
    from fast import Quick
except ImportError:
    def Quick(num_classes, speed): ...
class Twice(nn.Module):
    def __init__(self, num_classes, earlier): ...
class Twice(nn.Module):
    def __init__(self, num_classes, later): ...
"""
OPTIM = """
class Step(Optimizer):
    def __init__(self, params, lr, beta=0.9): ...
def focal(logits, labels, gamma, alpha=1.0): ...
def top(logits, labels, k): ...
def turn(images, seeds, most): ...
def alone(logits, *, k=1): ...
def nothing(): ...
def any(*given): ...
class Bare: ...
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .nets import Plain as Net\n")
    (folder / "nets.py").write_text(NETS)
    (folder / "blocks.py").write_text("class Block: ...\n")
    (folder / "optim.py").write_text(OPTIM)
    (folder / "torn.py").write_text("\nclass Net(:\n")
    return tmp_path


def model(target: str, **args: Any) -> dict[str, Any]:
    return {"model": {"name": "own", "target": target, "args": args}}


def optimizer(target: str, **args: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "own", "target": target, "args": args}}


def checked(root: Path, settings: dict[str, Any]) -> None:
    train: TrainConfig = parse(config(settings))
    check_targets(train, root)


@pytest.mark.parametrize(
    "settings",
    [
        model("my_package.nets:Plain", depth=1),
        model("my_package.nets:Same", depth=1, width=2),
        model("my_package:Net", depth=1),
        model("my_package.nets:Open", anything=1),
        model("my_package.nets:Foreign", anything=1),  # its base is elsewhere: the hosts will tell
        model("my_package.nets:made", anything=1),
        model("my_package.nets:Quick", speed=1),
        model("my_package.nets:Twice", later=1),  # of two with one name the later counts, as in Python
        optimizer("my_package.optim:Step", beta=0.5),
        {"trainer.loss": "my_package.optim:focal", "trainer.loss_args": {"gamma": 2}},
        {"dataset.augmentation": "my_package.optim:turn", "dataset.augmentation_args": {"most": 2}},
        {"trainer.loss": "my_package.optim:any"},
        {"trainer.loss": "my_package.optim:Bare"},
    ],
)
def test_what_fits_passes_and_what_only_running_tells_too(root: Path, settings: dict[str, Any]) -> None:
    checked(root, settings)
    assert "my_package" not in sys.modules


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            model("my_package.nets:Plain", widht=1, depth=1),
            "model.args.widht is no argument of Plain (my_package/nets.py:7); did you mean width? valid: channels, ",
        ),
        (
            model("my_package.nets:Twice", earlier=1),
            "model.args.earlier is no argument of Twice (my_package/nets.py:28); did you mean later?",
        ),
        (model("my_package:Net"), "Plain (my_package/nets.py:7) needs depth, which has no default"),
        (model("my_package.nets:Same", dept=1), "is no argument of Same (my_package/nets.py:11); did you mean depth?"),
        (
            model("my_package.nets:Plane"),
            "model.target=my_package.nets:Plane: my_package/nets.py has no class or function Plane; did you mean Plain "
            "(my_package/nets.py:7)?",
        ),
        (
            model("my_package.optim:Net"),
            "optim.py has no class or function Net; it has: Step, focal, top, turn, alone, nothing, any, Bare",
        ),
        (
            model("my_package.nets:SIZE"),
            "model.target=my_package.nets:SIZE: SIZE (my_package/nets.py:21) is 3, and no class or function; it has: ",
        ),
        (
            model("my_package.nets:blocks"),
            "model.target=my_package.nets:blocks: blocks (my_package/nets.py:4) is a module, and no class or function",
        ),
        (model("my_package.nets:np"), "np (my_package/nets.py:2) is a module, and no class or function; did you mean"),
        (
            model("os:system"),
            "model.target=os:system: os is a module of Python's own, and none of its classes or functions is made",
        ),
        (model("my_package.torn:Net"), "my_package/torn.py:2: invalid syntax"),
        (
            model("my_package.net:Net"),
            "module my_package.net under {root}, nor is it installed here; did you mean my_package.nets?",
        ),
        (
            model("my_packag.nets:Net"),
            "module my_packag.nets under {root}, nor is it installed here; did you mean my_package?",
        ),
        (
            optimizer("my_package.optim:Step", bta=1),
            "bta is no argument of Step (my_package/optim.py:2); did you mean beta? valid: beta, lr",
        ),
        ({"trainer.loss": "my_package.optim:focal"}, "focal (my_package/optim.py:4) needs gamma, which has no default"),
        (
            {"trainer.loss": "my_package.optim:focal", "trainer.loss_args": {"gama": 1}},
            "loss_args.gama is no argument of focal (my_package/optim.py:4); did you mean gamma? valid: alpha, gamma",
        ),
        (
            {"dataset.augmentation": "my_package.optim:turn", "dataset.augmentation_args": {"mots": 2}},
            "dataset.augmentation_args.mots is no argument of turn (my_package/optim.py:6); did you mean most?",
        ),
        (
            {"trainer.metrics": {"top": "my_package.optim:top"}},
            "top (my_package/optim.py:5) needs k; a metric gets logits and labels alone",
        ),
        (
            {"trainer.metrics": {"top": "my_package.optim:alone"}},
            "alone (my_package/optim.py:7) takes 1 argument by place; trainer.metrics is called with logits and labels",
        ),
        (
            {"dataset.augmentation": "my_package.optim:nothing"},
            "nothing (my_package/optim.py:8) takes no arguments by place; dataset.augmentation is called with image",
        ),
        (
            optimizer("my_package.optim:nothing"),
            "optimizer.target=my_package.optim:nothing: nothing (my_package/optim.py:8) is a function",
        ),
        (model("my_package.optim:Bare"), "Bare (my_package/optim.py:10) is a class without a base"),
    ],
)
def test_what_does_not_is_told_with_file_line_and_near_words(root: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(root, settings)
    assert said.replace("{root}", str(root)) in str(caught.value)


def test_a_module_is_looked_for_where_the_ranks_will_find_it(root: Path, tmp_path: Path) -> None:
    assert source_of(root, "my_package.nets") == root / "my_package/nets.py"
    assert source_of(root, "my_package.gone") is None
    assert source_of(tmp_path / "elsewhere", "my_package.nets", [str(root)]) == root / "my_package/nets.py"
