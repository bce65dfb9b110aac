"""docs/own-models.md as printed, and what a person sees whose network fails on the hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from pipeline.lab import Lab
from tests.integration.commands import ROOT
from tests.integration.light import light_python
from tests.integration.test_provenance import Checkout, copied
from tests.waiting import ended

PARTS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .scale import FACTOR

class Net(nn.Module):
    def __init__(self, num_classes, channels, image_size, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(channels * image_size**2, width), nn.Linear(width, num_classes))

    def forward(self, images):
        return self.layers(images.flatten(1))

class Descent(torch.optim.SGD):
    def __init__(self, params, lr, beta):
        super().__init__(params, lr=lr, momentum=beta)

def loss(logits, labels, factor):
    return cross_entropy(logits, labels) * factor * FACTOR

def noise(image, most):
    return (image.int() + torch.randint(0, most, image.shape)).clamp(0, 255).to(torch.uint8)

def top3(logits, labels):
    return (logits.topk(3).indices == labels[:, None]).any(1).float()
"""
OF_ONE_S_OWN = (
    "experiment=quickstart",
    "model=own",
    "model.target=mine.parts:Net",
    "trainer.loss=mine.parts:loss",
    "trainer.loss_args.factor=2",
    "optimizer=own",
    "optimizer.target=mine.parts:Descent",
    "optimizer.args.beta=0.8",
    "dataset.augmentation=mine.parts:noise",
    "dataset.augmentation_args.most=8",
    "trainer.metrics.top3=mine.parts:top3",
    "trainer.max_steps=2",
    "tracking=none",
)
TWO_STEPS = "trainer.max_steps=2 cluster.nproc_per_node=2 ++cluster.env.OMP_NUM_THREADS=1 tracking=none"


def typed(checkout: Checkout, lines: str, words: str = TWO_STEPS) -> subprocess.CompletedProcess[str]:
    """Typed into a shell in the checkout, each command with ``words`` added: a training has two steps only."""
    python = light_python(forks_ranks=True).replace(" ", chr(92) + " ")
    behind = f'"${{@:1:1}}" {words} "${{@:2}}"'  # what stands at the end of torchrun's line is the script's
    doit = f"doit() {{ {python} -m doit {behind}; }}\n"
    env = {**os.environ, "PYTHONPATH": str(checkout.root)}
    return ended(["bash", "-c", doit + lines], cwd=checkout.root, env=env)


@pytest.mark.ci
@pytest.mark.long
def test_the_example_of_the_page_trains_as_printed_and_a_mistake_is_told_once(tmp_path: Path, fetched: Path) -> None:
    (example,) = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/own-models.md").read_text(), re.M | re.S)
    assert example.count("\n") <= 15
    checkout = copied(tmp_path / "project", fetched)
    done = typed(checkout, example)
    assert done.returncode == 0, done.stdout
    (result,) = (checkout.root / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["steps"] == 2
    code = json.loads((result.parent / "key.json").read_text())["code"]
    assert {"my_package/nets.py", "trainers/models/own.py"} <= set(code)
    assert (result.parent / "code/my_package/nets.py").is_file()

    nets = checkout.root / "my_package/nets.py"
    (nets.parent / "sizes.json").write_text("[1]")
    beside = "__import__('pathlib').Path(__file__).with_name('sizes.json').read_text(), oh(images)"
    nets.write_text(nets.read_text().replace("        return self", f"        {beside}\n        return self"))
    done = typed(checkout, example.splitlines()[-1])
    assert done.returncode == 1
    assert len(re.findall(r"name 'oh' is not defined", done.stdout)) == 1, done.stdout
    assert re.findall(r'File "([^"]+)", line (\d+)', done.stdout) == [("my_package/nets.py", "10")], done.stdout

    nets.rename(nets.with_name("net.py"))  # the words are remembered, and what they name is looked for all the same
    done = typed(checkout, example.splitlines()[-1])
    assert done.returncode == 3
    assert "model.target=my_package.nets:MyNet: there is no module my_package.nets under" in done.stdout, done.stdout
    assert "did you mean my_package.net?" in done.stdout


@pytest.mark.ci
@pytest.mark.long  # on one host: above; a sweep, and an edit that is accepted: test_sweep.py, test_accept.py
@pytest.mark.lab
def test_parts_of_ones_own_are_swept_on_two_hosts_and_an_edit_of_theirs_can_be_accepted(
    tmp_path: Path, fetched: Path, lab: Lab
) -> None:
    checkout = copied(tmp_path / "project", fetched)
    (checkout.root / "mine").mkdir()
    (checkout.root / "mine/parts.py").write_text(PARTS)
    scale = checkout.root / "mine/scale.py"
    scale.write_text("FACTOR = 1.0\n")
    words = (*OF_ONE_S_OWN, "cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'")
    assert "2 finished" in checkout.doit("sweep", *words, "model.args.width=4,8")
    for folder in checkout.runs().values():
        result = json.loads((folder / "result.json").read_text())
        assert (result["hosts"], result["nproc_per_node"]) == (["node0", "node1"], [1, 1])
        assert 0 < result["metrics"]["test/top3"] <= 1
        assert {"mine/parts.py", "mine/scale.py"} <= set(json.loads((folder / "key.json").read_text())["code"])
    assert "2 runs: digits mine.parts:Net mine.parts:Descent, " in checkout.doit("runs")
    widest = (*words, "model.args.width=8")
    scale.write_text("FACTOR = 1.0  # a comment\n")
    assert "is finished" in checkout.doit("train", *widest)
    scale.write_text("FACTOR = 2.0 / 2\n")
    assert "differs in:\n  mine/scale.py changed" in checkout.doit("accept", *widest)
    assert "is accepted, not proven" in checkout.doit("train", *widest)
    assert checkout.launches() == 2
