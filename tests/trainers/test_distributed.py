from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary
from trainers.contract import run_folder
from trainers.core.errors import TrainerError
from trainers.distributed import process_group
from trainers.distributed.process_group import choose_device, usable_gpus
from trainers.distributed.ranks import Ranks, read_attempt, read_ranks
from trainers.training.loop import Trainer
from trainers.training.session import run


def test_a_process_without_torchrun_is_the_only_rank() -> None:
    assert read_ranks({}) == Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, nnodes=1)


def test_the_place_of_a_rank_is_what_torchrun_says() -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    assert read_ranks(environment) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2, nnodes=2)


@pytest.mark.parametrize(
    ("backend", "gpus", "wanted"),
    [
        ("auto", 0, ("cpu", "gloo")),
        ("auto", 4, ("cuda:1", "nccl")),
        ("nccl", 2, ("cuda:1", "nccl")),
        ("gloo", 1, ("cuda:0", "gloo")),  # two ranks may share a GPU over gloo
    ],
)
def test_device_and_backend_follow_from_the_gpus(backend: str, gpus: int, wanted: tuple[str, str]) -> None:
    device, chosen = choose_device(backend, Ranks(local_rank=1, local_world_size=2), gpus=gpus, host="node0")
    assert (str(device), chosen) == wanted


def test_more_ranks_than_gpus_are_refused_for_nccl() -> None:
    with pytest.raises(TrainerError, match=r"nproc 4 > 2 GPUs on host node0.* set cluster.nproc_per_node=2"):
        choose_device("auto", Ranks(local_world_size=4), gpus=2, host="node0")


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(TrainerError, match="backend=nccl, but host node0 has no GPU"):
        choose_device("nccl", Ranks(), gpus=0, host="node0")


@pytest.mark.parametrize(("kind", "count"), [(None, 2), ("cuda", 2), ("cpu", 0)])
def test_a_rank_leaves_gpus_alone_that_the_key_does_not_name(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert usable_gpus(kind, "node0") == count


def test_a_rank_without_the_gpu_that_the_key_names_does_not_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainerError, match=r"key says cuda, but torch .* on host node0 sees no GPU.*device=cpu"):
        usable_gpus("cuda", "node0")


INFINIBAND = """\
testgpu2:3255:3262 [1] NCCL INFO NCCL_IB_HCA set to mlx5_0
testgpu2:3255:3262 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ibs65:10.10.10.101<0>
testgpu2:3255:3262 [1] NCCL INFO Using non-device net plugin version 0
testgpu2:3255:3262 [1] NCCL INFO Using network IB
"""
SOCKETS = """\
node1:924:1152 [5] NCCL INFO NET/IB : No device found.
node1:924:1152 [5] NCCL INFO NET/Socket : Using [0]ibp12s0:10.149.0.32<0>
node1:924:1152 [5] NCCL INFO Using network Socket
"""
OLD = """\
master_node:20:289 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>
master_node:20:289 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
"""
PLUGIN = "qh100-gpu19:49355:49414 [1] NCCL INFO Using network IBext\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SOCKETS, "NCCL sends over sockets ([0]ibp12s0:10.149.0.32<0>): NET/IB : No device found"),
        (SOCKETS.splitlines()[2], "NCCL sends over sockets"),
        (INFINIBAND, None),
        (OLD, None),
        (PLUGIN, None),
        ("", None),
    ],
)
def test_sockets_are_told_with_the_interface_and_the_reason(text: str, told: str | None) -> None:
    assert process_group.nccl_fallback(text) == told


def test_a_rank_reads_its_own_log_and_warns_where_there_is_infiniband(tmp_path: Path) -> None:
    (tmp_path / f"nccl.{os.getpid()}").write_text(SOCKETS)
    told = {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p"}
    text = process_group.nccl_warning(told) or ""
    assert text.startswith("warning: NCCL sends over sockets ([0]ibp12s0")
    assert "though this host has InfiniBand (mlx5_0:1), so" in text


@pytest.mark.parametrize("change", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_HCA": None}, {"NCCL_DEBUG_FILE": None}])
def test_nothing_is_said_where_sockets_are_meant_or_nothing_is_known(
    tmp_path: Path, change: dict[str, str | None]
) -> None:
    (tmp_path / f"nccl.{os.getpid()}").write_text(SOCKETS)
    told = {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p", **change}
    assert process_group.nccl_warning({name: value for name, value in told.items() if value is not None}) is None


def name_attempts(run_dir: Path, *ids: str) -> None:
    (run_dir / run_folder.ATTEMPT_IDS).write_text(json.dumps({"attempts": ids}))


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: object) -> None:
    """Call ``act`` when ``step`` steps are done."""
    original = Trainer._one_step

    def acting(self: Trainer, *arguments: object) -> None:
        if self.step == step:
            act()  # type: ignore[operator]
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_one_step", acting)


def test_checkpoints_and_lines_carry_the_attempt_and_the_next_one_takes_them_up(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run()
    for number in (1, 2):
        name_attempts(run_dir, *(f"key-{older}" for older in range(1, number + 1)))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"key-{number}")
        run(run_dir / "config.json")
    assert "resumed from step 15" in capsys.readouterr().out
    assert json.loads((run_dir / "checkpoints" / "step-00000015.json").read_text())["attempt"] == "key-1"
    assert [line["attempt"] for line in metrics_lines(run_dir)] == ["key-1"] * 12 + ["key-2"]


def test_nothing_of_a_foreign_attempt_is_taken_up(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that outlived their removed folder have written to the one that was made in its place."""
    run_dir, alone = make_run(), make_run("alone")
    for folder, attempt, seed_of in ((run_dir, "key-orphan", True), (alone, "key-new", False)):
        name_attempts(folder, attempt)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", attempt)
        run(folder / "config.json")
        capsys.readouterr()
        if seed_of:
            (folder / "summary.json").unlink()
    name_attempts(run_dir, "key-new")
    run(run_dir / "config.json")
    out = capsys.readouterr().out
    assert "warning: checkpoint step-00000015.pt is skipped: it was written by attempt key-orphan, which" in out
    assert "resumed" not in out
    assert {line["attempt"] for line in metrics_lines(run_dir)} == {"key-new"}
    assert read_summary(run_dir)["weights_sha256"] == read_summary(alone)["weights_sha256"]


def remove(folder: Path) -> None:
    """While a checkpoint is being written into it: a file that rmtree has just listed may have another name by now."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def test_a_rank_whose_folder_was_removed_ends_and_makes_nothing_anew(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run()
    at_step(monkeypatch, 7, lambda: remove(run_dir))
    with pytest.raises(TrainerError, match=r"the run folder \S+ was removed while the run was going on"):
        run(run_dir / "config.json")
    assert not run_dir.exists()


@pytest.mark.parametrize("step", [1, 7, 14])
def test_a_rank_whose_folder_belongs_to_a_later_attempt_ends(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    run_dir = make_run()
    name_attempts(run_dir, "key-1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "key-1")
    at_step(monkeypatch, step, lambda: name_attempts(run_dir, "key-1", "key-2"))
    with pytest.raises(TrainerError, match="belongs to attempt key-2 by now; attempt key-1 ends"):
        run(run_dir / "config.json")
    assert not (run_dir / "summary.json").exists()
    assert not list((run_dir / "checkpoints").glob(f"step-{5 * (step // 5 + 1):08d}.*")), "written after that"


@pytest.mark.parametrize("text", ["", "\0" * 40, "[]", '{"attempts": 7}'])
def test_a_damaged_list_of_attempts_ends_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    name_attempts(tmp_path, "key-1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "key-1")
    attempt = read_attempt(tmp_path)
    attempt.check()
    (tmp_path / run_folder.ATTEMPT_IDS).write_text(text)
    with pytest.raises(TrainerError, match=f"has no readable {run_folder.ATTEMPT_IDS} any more; attempt key-1 ends"):
        attempt.check()
    (tmp_path / run_folder.ATTEMPT_IDS).unlink()
    with pytest.raises(TrainerError, match=f"has no readable {run_folder.ATTEMPT_IDS} any more; attempt key-1 ends"):
        attempt.check()
