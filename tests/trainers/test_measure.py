"""Measurements on tiny runs: the Trainer's own steps, a reference loop, and all-reduces of real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.tiny_runs import MakeRun
from trainers.core.options import load
from trainers.data.pack import open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.measuring.speeds import Timing, count_wrong, fill, run
from trainers.measuring.throughput import OwnLoop, ReferenceLoop, flop_per_image, measure, peak_flop_per_s
from trainers.training.loop import Trainer

CUDNN = torch.backends.cudnn
ALONE = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")


def with_options(run_dir: Path, **options: float) -> Path:
    path = run_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "measure": options}))
    return path


def measure_on_this_rank(run_dir: Path) -> None:
    next_port()
    path = run_dir / "config.json"
    measure(path, json.loads(path.read_text())["measure"])


def test_two_ranks_measure_both_loops_in_pairs(make_run: MakeRun) -> None:
    path = with_options(make_run(), pairs=2, block_s=0.05)
    out = call_on_ranks("tests.trainers.test_measure:measure_on_this_rank", path.parent)[0]
    assert "pair 2/2: Paceline" in out
    result = json.loads((path.parent / "measure.json").read_text())
    assert (result["world_size"], result["global_batch_size"], len(result["pairs"])) == (2, 12, 2)
    assert all(rate > 0 for pair in result["pairs"] for rate in pair.values())


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


def test_two_ranks_say_who_they_are_and_add_up_right(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_measure:measure_hosts_on_this_rank", tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(rank["rank"], rank["device"][:3]) for rank in result["ranks"]] == [(0, "cpu"), (1, "cpu")]
    (group,) = result["groups"]
    assert (group["size_bytes"], group["ranks"], group["wrong_elements"]) == (4096, 2, 0)
    assert 0 < group["min_s"] <= group["median_s"] <= group["max_s"]


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


def test_bus_bandwidth_of_four_ranks_is_half_as_much_again() -> None:
    timing = Timing(size_bytes=4000, ranks=4, n=1, calls=1, min_s=0.001, median_s=0.002, max_s=0.003, wrong_elements=0)
    assert timing.algorithm_bytes_per_s == 2e6
    assert timing.bus_bytes_per_s == 3e6


def test_a_single_wrong_element_is_counted() -> None:
    buffer = torch.empty(2_000_001)
    fill(buffer, 3)
    assert buffer[:9].tolist() == [3, 6, 9, 12, 15, 18, 21, 3, 6]
    assert count_wrong(buffer, 3) == 0
    buffer[1_900_000] += 1
    assert count_wrong(buffer, 3) == 1


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "peak"),
    [
        ("NVIDIA H200", "bf16", True, 989.4e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", True, 156e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", False, 19.5e12),
        ("NVIDIA L4", "bf16", True, 121e12),
        ("Tesla T4", "bf16", True, None),
        ("NVIDIA RTX A4000", "bf16", True, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", True, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_the_precision(name: str, precision: str, tf32: bool, peak: float | None) -> None:
    assert peak_flop_per_s(name, precision, tf32=tf32) == peak
