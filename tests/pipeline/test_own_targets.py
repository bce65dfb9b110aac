"""Targets and their arguments, checked before anything starts by a process that imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import own_targets
from pipeline.config.own_targets import check_targets
from pipeline.core.errors import UsageError
from pipeline.keys.import_closure import source_file
from tests.trainers.tiny_runs import config
from trainers.core.config import TrainConfig
from trainers.core.options import parse

NETS = """import functools
import numpy as np; from torch import nn; print("no part of the answer")

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
@functools.cache
def wrapped(num_classes, size): return Plain(num_classes, 1, depth=size)
"""
OPTIM = """from torch.optim import Optimizer
class Step(Optimizer):
    def __init__(self, params, lr, beta=0.9): ...
def focal(logits, labels, gamma, alpha=1.0): ...
def top(logits, labels, k): ...
def turn(images, seeds, most): ...
def alone(logits, *, k=1): ...
def nothing(): ...
def any(*given): ...
class Bare: ...
class Still(Optimizer):
    def __init__(self, params): ...
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose targets one process has described, which takes seconds: it imports torch."""
    root = tmp_path_factory.mktemp("project")
    folder = root / "my_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .nets import Plain as Net\n")
    (folder / "nets.py").write_text(NETS)
    (folder / "blocks.py").write_text("from torch import nn\nclass Block(nn.Module): ...\n")
    (folder / "optim.py").write_text(OPTIM)
    return root


@pytest.fixture
def described(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {target for settings in (*FITS, *(one for one, _ in DOES_NOT_FIT)) for target in named(settings)}
    known = own_targets._describe(
        sorted(
            target for target in targets if target.startswith(("my_package:", "my_package.nets:", "my_package.optim:"))
        ),
        root,
        (),
    )
    monkeypatch.setattr(own_targets, "_describe", lambda targets, *_: {one: known[one] for one in targets})


def named(settings: Any) -> Iterator[str]:
    """The targets in the settings."""
    for value in settings.values():
        if isinstance(value, dict):
            yield from named(value)
        elif isinstance(value, str) and ":" in value:
            yield value


def model(target: str, **args: Any) -> dict[str, Any]:
    return {"model": {"name": "own", "target": target, "args": args}}


def optimizer(target: str, **args: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "own", "target": target, "args": args}}


def checked(root: Path, settings: dict[str, Any]) -> None:
    train: TrainConfig = parse(config(settings))
    check_targets(train, root)


FITS = [
    model("my_package.nets:Plain", depth=1),
    model("my_package.nets:Same", depth=1, width=2),
    model("my_package:Net", depth=1),
    model("my_package.nets:Open", anything=1),
    model("my_package.nets:Foreign", anything=1),  # torch's own takes any
    model("my_package.nets:made", depth=1),
    model("my_package.nets:wrapped", size=1),
    model("my_package.nets:Quick", speed=1),
    model("my_package.nets:Twice", later=1),  # of two with one name the later counts, as in Python
    optimizer("my_package.optim:Step", beta=0.5),
    {"trainer.loss": "my_package.optim:focal", "trainer.loss_args": {"gamma": 2}},
    {"dataset.augmentation": "my_package.optim:turn", "dataset.augmentation_args": {"most": 2}},
    {"trainer.loss": "my_package.optim:any"},
    {"trainer.loss": "my_package.optim:Bare"},
]
DOES_NOT_FIT = [
    (model("my_package.nets:Plain", widht=1, depth=1),
     "model.args.widht is no argument of Plain (my_package/nets.py:7); did you mean width? valid: channels, "),
    (model("my_package.nets:wrapped", big=1), "big is no argument of wrapped (my_package/nets.py:30)"),
    (model("my_package.nets:Twice", earlier=1),
     "model.args.earlier is no argument of Twice (my_package/nets.py:26); did you mean later?"),
    (model("my_package:Net"), "Plain (my_package/nets.py:7) needs depth, which has no default"),
    (model("my_package.nets:Same", dept=1), "is no argument of Same (my_package/nets.py:11); did you mean depth?"),
    (model("my_package.nets:Plane"),
     "model.target=my_package.nets:Plane: my_package/nets.py has no class or function Plane; did you mean Plain?"),
    (model("my_package.optim:Net"),
     "optim.py has no class or function Net; it has: Step, focal, top, turn, alone, nothing, any, Bare"),
    (model("my_package.nets:SIZE"),
     "model.target=my_package.nets:SIZE: SIZE in my_package/nets.py is 3, and no class or function"),
    (model("my_package.nets:blocks"),
     "model.target=my_package.nets:blocks: blocks in my_package/nets.py is a module, and no class or function"),
    (model("os:system"),
     "model.target=os:system: os is a module of Python's own, and none of its classes or functions is made"),
    (model("my_package.net:Net"),
     "module my_package.net under {root}, nor is it installed here; did you mean my_package.nets?"),
    (model("my_packag.nets:Net"),
     "module my_packag.nets under {root}, nor is it installed here; did you mean my_package?"),
    (optimizer("my_package.optim:Step", bta=1),
     "bta is no argument of Step (my_package/optim.py:2); did you mean beta? valid: beta, lr"),
    ({"trainer.loss": "my_package.optim:focal"}, "focal (my_package/optim.py:4) needs gamma, which has no default"),
    ({"trainer.loss": "my_package.optim:focal", "trainer.loss_args": {"gama": 1}},
     "loss_args.gama is no argument of focal (my_package/optim.py:4); did you mean gamma? valid: alpha, gamma"),
    ({"dataset.augmentation": "my_package.optim:turn", "dataset.augmentation_args": {"mots": 2}},
     "dataset.augmentation_args.mots is no argument of turn (my_package/optim.py:6); did you mean most?"),
    ({"trainer.metrics": {"top": "my_package.optim:top"}},
     "top (my_package/optim.py:5) needs k; a metric gets logits and labels alone"),
    ({"trainer.metrics": {"top": "my_package.optim:alone"}},
     "alone (my_package/optim.py:7) takes 1 argument by place; trainer.metrics is called with logits and labels"),
    ({"dataset.augmentation": "my_package.optim:nothing"},
     "nothing (my_package/optim.py:8) takes no arguments by place; dataset.augmentation is called with image"),
    (optimizer("my_package.optim:nothing"),
     "optimizer.target=my_package.optim:nothing: nothing (my_package/optim.py:8) is a function"),
    (optimizer("my_package.optim:Still"),
     "Still (my_package/optim.py:11) has no argument lr, which every optimizer gets"),
    (model("my_package.optim:Bare"), "Bare (my_package/optim.py:10) is no subclass of torch.nn.Module"),
]  # fmt: skip


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("settings", FITS)
def test_what_fits_passes(root: Path, settings: dict[str, Any]) -> None:
    checked(root, settings)
    assert "my_package" not in sys.modules


@pytest.mark.slow
@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(("settings", "said"), DOES_NOT_FIT)
def test_what_does_not_is_told_with_file_line_and_near_words(root: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(root, settings)
    assert said.replace("{root}", str(root)) in str(caught.value)


LOSS = {"trainer.loss": "losses:focal", "trainer.loss_args": {"gama": 1}}


def refusal(root: Path, text: str) -> str:
    (root / "losses.py").write_text(text)
    with pytest.raises(UsageError) as caught:
        checked(root, LOSS)
    return str(caught.value)


def test_an_answer_is_kept_while_no_imported_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(tmp_path, "def focal(logits, labels, gamma): ...")
    assert said.startswith("trainer.loss_args.gama is no argument of focal (losses.py:1); did you mean gamma?")
    with monkeypatch.context() as without:
        without.setattr("pipeline.core.processes.process.run", None)
        assert refusal(tmp_path, "def focal(logits, labels, gamma): ...") == said
    assert "focal (losses.py:2)" in refusal(tmp_path, "# a comment moves it\ndef focal(logits, labels, gamma): ...")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nlimit = undefined", "trainer.loss=losses:focal: losses.py:2: NameError: name 'undefined' is not defined"),
        ("import sys\nsys.exit('no')", "losses.py:2: SystemExit: no"),
        ("from math import nothing", "losses.py:1: ImportError: cannot import name 'nothing' from 'math'"),
        ("def focal(:", "losses.py:1 can't be parsed: invalid syntax"),
    ],
)
def test_a_module_that_can_not_be_imported_is_one_message(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "import ctypes; ctypes.CDLL('libcuda.so.99')",
        "import logging.config; logging.config.dictConfig({})",  # a package raises
        "import os; os._exit(3)",
        "import time; time.sleep(60)",
    ],
)
def test_what_only_a_host_can_tell_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(own_targets, "_IMPORT_S", 2.0)
    (tmp_path / "losses.py").write_text(text)
    checked(tmp_path, LOSS)


def test_a_module_is_looked_for_where_the_ranks_will_find_it(root: Path, tmp_path: Path) -> None:
    assert source_file(root, "my_package.nets") == root / "my_package/nets.py"
    assert source_file(root, "my_package.gone") is None
    assert source_file(tmp_path / "elsewhere", "my_package.nets", [str(root)]) == root / "my_package/nets.py"
