"""The node half on a real GPU; skipped where there is none. Two ranks on one GPU are two hosts for NCCL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.ranks import free_ports
from tests.trainers.test_fake_cuda import names
from tests.trainers.test_resume import die_and_go_on, without_clock
from tests.trainers.test_torchrun import wait_for_step
from tests.trainers.tiny_runs import ROOT, MakeRun, read_summary
from tests.waiting import HANG_S
from trainers.core.errors import TrainerError
from trainers.data import pack
from trainers.distributed import process_group
from trainers.training.session import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL_CNN = {"name": "small_cnn", "width": 4, "hidden": 16, "dropout": 0.2}
RESNET: dict[str, Any] = {"model": {"name": "resnet18"}, "trainer__precision": "bf16", "trainer__accumulate_steps": 2}
SPEEDRUN: dict[str, Any] = {
    "model": {"name": "whitened_cnn", "width": 2},
    "optimizer": {"name": "airbench_muon"},
    "schedule": {"name": "triangle"},
    "trainer__tta": "multicrop",
    "trainer__precision": "bf16",
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"model": SMALL_CNN}, id="fp32"),
        pytest.param({"model": SMALL_CNN, "trainer__precision": "fp16", "optimizer": {"name": "adam"}}, id="fp16"),
        pytest.param({"model": SMALL_CNN, "trainer__skip_nonfinite": True}, id="guarded"),
        pytest.param(RESNET, id="resnet18 in bf16"),
        pytest.param(SPEEDRUN, id="speedrun"),
        pytest.param({**SPEEDRUN, "trainer__compile": True}, id="compiled"),
        pytest.param({"model": SMALL_CNN, "trainer__shards": 4}, id="shards"),
    ],
)
def test_dying_at_a_step_changes_no_bit(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    settings = {"trainer__checkpoint_every_steps": 3, **settings}
    whole, again, broken = (make_run(name, **settings) for name in ("whole", "again", "broken"))
    run(whole / "config.json")
    run(again / "config.json")
    die_and_go_on(broken, monkeypatch)
    wanted = read_summary(whole)["weights_sha256"]
    assert read_summary(again)["weights_sha256"] == wanted
    assert read_summary(broken)["weights_sha256"] == wanted
    assert without_clock(broken) == without_clock(whole)


@pytest.mark.parametrize("optimizer", names("optimizer"))
@pytest.mark.parametrize("model", names("model"))
def test_every_model_trains_with_every_optimizer(make_run: MakeRun, model: str, optimizer: str) -> None:
    small = {"width": 2} if model == "whitened_cnn" else {}
    run_dir = make_run(model={"name": model, **small}, optimizer={"name": optimizer}, trainer__precision="bf16")
    run(run_dir / "config.json")  # a loss that is not finite ends it
    assert read_summary(run_dir)["device"] == "cuda"
    weights = torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True)
    assert all(item.isfinite().all() for item in weights.values())


def test_data_that_do_not_fit_give_the_same_bits(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    resident, gathered = make_run("resident"), make_run("gathered")
    run(resident / "config.json")
    monkeypatch.setattr(pack, "_FREE_SHARE", 0.0)
    run(gathered / "config.json")
    assert read_summary(gathered)["weights_sha256"] == read_summary(resident)["weights_sha256"]


@pytest.mark.parametrize(
    ("model", "room", "said"),
    [
        ("resnet50", 300e6,
         r"GPU memory is full on rank 0 with 60 images at once .*accumulate_steps=2 takes 30 at once"),
        ("resnet50", 42e6,
         r"the network has [\d,]+ parameters \(\d+ MB\), for which the GPU of rank 0 on .* has no room: "),
    ],
)  # fmt: skip
def test_a_full_memory_names_what_would_fit(make_run: MakeRun, model: str, room: float, said: str) -> None:
    run_dir = make_run(model={"name": model}, trainer__global_batch_size=60)
    try:
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
        with pytest.raises(TrainerError, match=said):
            run(run_dir / "config.json")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def start_ranks(run_dir: Path, count: int, **environment: str) -> list[subprocess.Popen[str]]:
    """Ranks of one node each, all on the GPU 0: NCCL refuses a GPU twice on one host, so each is told another."""
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(count)}
    together["TORCHELASTIC_RUN_ID"] = "one"  # by which they tell their notes from those of earlier attempts
    together |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainers.classifier", "--config", str(run_dir / "config.json")],
            cwd=run_dir,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                **together,
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "NCCL_HOSTID": f"host{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]


def outputs_of(ranks: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [rank.communicate(timeout=HANG_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def train_on(run_dir: Path, count: int, **environment: str) -> list[str]:
    ranks = start_ranks(run_dir, count, **environment)
    printed = outputs_of(ranks)
    print(*printed, sep="\n")  # the whole of it, if this fails
    assert [rank.returncode for rank in ranks] == [0] * count
    return printed


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_shards_give_one_set_of_weights_on_one_and_two_ranks(make_run: MakeRun, backend: str) -> None:
    settings: dict[str, Any] = {"model": {"name": "resnet18"}, "trainer__precision": "bf16", "trainer__shards": 4}
    settings["strategy"] = {"name": "ddp", "backend": backend}
    one, two = make_run("one", **settings), make_run("two", **settings)
    run(one / "config.json")
    assert f"2 ranks on 2 nodes: cuda, {backend}, bf16" in train_on(two, 2)[0]
    assert read_summary(two)["weights_sha256"] == read_summary(one)["weights_sha256"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_over_nccl_go_on_where_sigterm_ended_them(make_run: MakeRun, tmp_path: Path, strategy: str) -> None:
    settings = {"trainer__epochs": 60, "trainer__checkpoint_every_epochs": 60, "strategy": {"name": strategy}}
    whole, broken = make_run("whole", **settings), make_run("broken", **settings)
    log = tmp_path / "nccl.log"
    train_on(whole, 2, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=f"{log}.%p")
    told = [process_group.nccl_fallback(path.read_text()) or "" for path in tmp_path.glob("nccl.log.*")]
    assert [text.startswith("NCCL sends over sockets ([0]lo:127.0.0.1") for text in told] == [True, True], told
    ranks = start_ranks(broken, 2)
    wait_for_step(broken, 12)
    ranks[1].send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM after step" in outputs_of(ranks)[0]
    assert "resumed from step" in train_on(broken, 2)[0]
    assert read_summary(broken)["weights_sha256"] == read_summary(whole)["weights_sha256"]


WARM = """
import sys
from trainers import ranks, torchrun
for module in ranks.IMPORTS:
    ranks.importlib.import_module(module)
sys.argv[:] = [torchrun.__file__, "--nproc-per-node=1", "--master-port=0", "--master-addr=127.0.0.1", *sys.argv[1:]]
torchrun.main(show_as=lambda words: print("a fork has begun", flush=True))
"""


def test_a_fork_of_a_warm_parent_trains_on_the_gpu(make_run: MakeRun) -> None:
    cold, warm = make_run("cold"), make_run("warm")
    run(cold / "config.json")
    rank = ["-m", "trainers.classifier", "--config", str(warm / "config.json")]
    launched = subprocess.run(
        [sys.executable, "-c", WARM, *rank], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert launched.returncode == 0, launched.stderr
    assert "a fork has begun" in launched.stdout
    assert read_summary(warm)["device"] == "cuda"
    assert read_summary(warm)["weights_sha256"] == read_summary(cold)["weights_sha256"]


def test_a_rank_that_raises_ends_before_the_others_have_noticed(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__epochs=1000)
    (run_dir / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from trainers.training import loop\n"
        "    whole = loop.Trainer._one_step\n"
        "    def raising(self, *arguments):\n"
        "        if self.step == 40:\n"
        "            raise RuntimeError('a model that can not go on')\n"
        "        whole(self, *arguments)\n"
        "    loop.Trainer._one_step = raising\n"
    )
    ranks = start_ranks(run_dir, 2, PYTHONPATH=os.pathsep.join([str(run_dir), str(ROOT)]))
    try:
        assert "a model that can not go on" in ranks[1].communicate(timeout=HANG_S)[0]
        assert ranks[1].returncode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
