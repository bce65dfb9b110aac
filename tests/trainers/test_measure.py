"""The measuring module on tiny runs: the Trainer's own steps and a reference loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.tiny_runs import MakeRun
from trainers.core.options import load
from trainers.data.pack import open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.measuring.speeds import run
from trainers.measuring.throughput import OwnLoop, ReferenceLoop, flop_per_image, measure
from trainers.training.loop import Trainer

CUDNN = torch.backends.cudnn
ALONE = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")


def with_options(run_dir: Path, **options: float) -> Path:
    path = run_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "measure": options}))
    return path


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((path.parent / "measure.json").read_text())
    return value


def measure_on_this_rank(run_dir: Path) -> None:
    next_port()
    path = run_dir / "config.json"
    measure(path, json.loads(path.read_text())["measure"])


def test_two_ranks_measure_both_loops_in_pairs(make_run: MakeRun) -> None:
    path = with_options(make_run(), pairs=2, block_s=0.05)
    out = call_on_ranks("tests.trainers.test_measure:measure_on_this_rank", path.parent)[0]
    assert "pair 2/2: Paceline" in out
    result = read(path)
    assert (result["world_size"], result["global_batch_size"], len(result["pairs"])) == (2, 12, 2)
    assert all(rate > 0 for pair in result["pairs"] for rate in pair.values())


def test_one_rank_alone_is_measured(make_run: MakeRun) -> None:
    path = make_run() / "config.json"
    measure(path, {"pairs": 1, "block_s": 0.02})
    result = read(path)
    assert result["hardware"]["peak_flop_per_s"] is None
    assert result["steps_a_block"] >= 1


def test_operations_of_a_convolution_are_counted_forward_and_backward(make_run: MakeRun) -> None:
    run_dir = make_run()
    pack = open_pack(run_dir / "data")
    counted = flop_per_image(load(run_dir / "config.json"), pack, ALONE)
    forward = 2 * (6 * 6 * 4 * 9 + 4 * 4 * 8 * 4 * 9 + 32 * 16 + 16 * 3)
    first = 2 * 6 * 6 * 4 * 9  # the gradient by the image itself isn't computed
    assert counted == 3 * forward - first


def test_the_own_loop_takes_the_steps_of_a_training(make_run: MakeRun) -> None:
    weights = []
    for name in ("loop", "training"):
        run_dir = make_run(name, trainer__max_steps=7)
        trainer = Trainer(load(run_dir / "config.json"), open_pack(run_dir / "data"), ALONE, run_dir)
        trainer.prepare()
        if name == "loop":
            OwnLoop(trainer).run(7)
        else:
            trainer.train()
        trainer.close()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_plain_loop_trains(make_run: MakeRun, optimizer: str) -> None:
    plain = {"dataset__crop_padding": 0, "dataset__flip": False, "model__dropout": 0.0}
    run_dir = make_run(**plain, optimizer={"name": optimizer, "lr": 2.0 if optimizer == "sgd" else 0.1})
    loop = ReferenceLoop(load(run_dir / "config.json"), open_pack(run_dir / "data"), ALONE, precision="fp32")
    first = loop._train(torch.arange(12))
    loop.run(100)
    assert float(loop._train(torch.arange(12))) < float(first) / 2


def test_the_plain_loop_takes_the_quickest_kernels_whatever_the_trainer_takes(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run() / "config.json"
    trainer = Trainer(load(path), open_pack(path.parent / "data"), ALONE, path.parent)
    assert (CUDNN.benchmark, CUDNN.deterministic) == (False, True)
    seen = []
    loop = ReferenceLoop(trainer.config, trainer.pack, ALONE, precision="fp32")
    monkeypatch.setattr(loop, "_run", lambda _: seen.append((CUDNN.benchmark, CUDNN.deterministic)))
    loop.run(1)
    assert seen == [(True, False)]
    assert (CUDNN.benchmark, CUDNN.deterministic) == (False, True)


def test_one_switch_lets_cudnn_choose_by_measuring(make_run: MakeRun) -> None:
    path = make_run(trainer__deterministic=False) / "config.json"
    try:
        Trainer(load(path), open_pack(path.parent / "data"), ALONE, path.parent)
        assert (CUDNN.benchmark, CUDNN.deterministic) == (True, False)
    finally:
        CUDNN.benchmark, CUDNN.deterministic = False, False  # torch's defaults


def measure_hosts_on_this_rank(folder: Path) -> None:
    next_port()
    run("gloo", folder / "out.json", side=32, size_bytes=4096)


@pytest.mark.ci
@pytest.mark.long
def test_each_rank_each_node_and_each_pair_are_measured(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_measure:measure_hosts_on_this_rank", tmp_path, nnodes=2, nproc=2)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(rank["rank"], rank["node_rank"]) for rank in result["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert min(rank["flop_per_s"] for rank in result["ranks"]) > 0
    groups = [(group["nodes"], group["ranks"], group["wrong_elements"]) for group in result["groups"]]
    assert groups == [([0], 2, 0), ([1], 2, 0), ([0, 1], 4, 0)]
    assert min(group["bus_bytes_per_s"] for group in result["groups"]) > 0


@pytest.mark.ci
@pytest.mark.long
def test_one_rank_alone_is_measured_without_anybody_to_add_up_with(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_measure:measure_hosts_on_this_rank", tmp_path, nproc=1)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (len(result["ranks"]), result["groups"]) == (1, [])
