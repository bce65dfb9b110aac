"""`doit torchrun …`: the command line that somebody has typed already, with a key, a record and a second call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_provenance import Checkout, copied

TRAIN = """
import argparse, json
import paceline
from .net import START
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float)
p.add_argument("--config")
p.add_argument("--data")
a = p.parse_args()
scale = json.load(open(a.config))["scale"] + len(open(f"{a.data}/x.txt").read())
for step in range(1, 4):
    paceline.log(step, loss=START * scale * a.lr / step)
open("state.txt", "w").write(str(START))
"""
LINE = ("tracking=none", "-m", "nets.train", "--config", "config.json", "--data", "images", "--lr")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, str]:
    checkout = copied(tmp_path_factory.mktemp("of torchrun") / "project")
    files = {"nets/__init__.py": "", "nets/net.py": "START = 2.0\n", "nets/train.py": TRAIN}
    for name, text in {**files, "config.json": '{"scale": 3}', "images/x.txt": "abc"}.items():
        (checkout.root / name).parent.mkdir(exist_ok=True)
        (checkout.root / name).write_text(text)
    return checkout, checkout.doit("torchrun", *LINE, "0.1")


@pytest.mark.ci
@pytest.mark.long
def test_a_module_with_its_package_its_file_and_its_folder_of_data_trains(trained: tuple[Checkout, str]) -> None:
    checkout, said = trained
    assert "FINISHED" in said
    assert "loss 0.4" in said  # 2.0 * (3 + 3) * 0.1 / 3
    (folder,) = checkout.runs().values()
    snapshot = {path.relative_to(folder / "code").as_posix() for path in (folder / "code").rglob("*")}
    assert {"nets/__init__.py", "nets/net.py", "nets/train.py", "config.json"} <= snapshot
    assert [path.name for path in folder.glob("outputs/**/state.txt")] == ["state.txt"]


def test_the_same_line_and_the_same_overrides_start_nothing(trained: tuple[Checkout, str]) -> None:
    checkout, _ = trained
    assert "is finished" in checkout.doit("torchrun", *LINE, "0.1")
    data = f"program.args.data='{checkout.root}/images'"
    overrides = ("program.module=nets.train", "program.args.config=config.json", data, "program.args.lr=0.1")
    rest = ("program.inputs=[config.json]", "cluster.nproc_per_node=1", "tracking=none")
    assert "is finished" in checkout.doit("train", *overrides, *rest)


def test_an_edit_of_what_it_imports_reads_or_is_given_changes_its_key(trained: tuple[Checkout, str]) -> None:
    checkout, _ = trained
    for name, text, shown in (
        ("nets/net.py", "START = 3.0\n", "nets/net.py"),
        ("config.json", '{"scale": 4}', "config.json"),
        ("images/x.txt", "abcd", "program.args.data"),
    ):
        before = (checkout.root / name).read_text()
        (checkout.root / name).write_text(text)
        assert shown in checkout.doit("why", "torchrun", *LINE, "0.1")
        (checkout.root / name).write_text(before)


@pytest.mark.ci
@pytest.mark.long
def test_a_sweep_of_a_flag_trains_what_is_new(trained: tuple[Checkout, str]) -> None:
    checkout, _ = trained
    said = checkout.doit("torchrun", "--sweep", "lr=0.1,0.2", *LINE[:-1])
    assert "2 of 2 trials finished" in said
    assert len(checkout.runs()) == 2


def test_a_script_starts_once_as_python_starts_it(trained: tuple[Checkout, str], tmp_path: Path) -> None:
    checkout, _ = trained
    (checkout.root / "alone.py").write_text("import os, sys; print('argv', sys.argv[1:], 'RANK' in os.environ)\n")
    assert "argv ['--x=1', 'tr{a}', '${b}'] False" in checkout.doit(
        "run", "tracking=none", "alone.py", "--x=1", "tr{a}", "${b}"
    )


@pytest.mark.ci
@pytest.mark.long
def test_a_rank_that_leaves_early_is_named_and_not_the_one_that_waited_for_it(trained: tuple[Checkout, str]) -> None:
    checkout, _ = trained
    (checkout.root / "leaves.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1: sys.exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    said = checkout.doit("torchrun", "tracking=none", "--nproc-per-node", "2", "leaves.py", code=1)
    assert "training failed on localhost, rank 1: ended with exit code 0 while others went on" in said
