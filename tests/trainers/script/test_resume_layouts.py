"""What {resume} stands for in the folders that training libraries leave; small stand-ins of each."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from trainers.core.config import ConfigError
from trainers.script.resume import newest_checkpoint
from trainers.script.settings import ScriptConfig, names


def laid(folder: Path, *paths: str) -> Path:
    """One file after the other, each written a second later; ``name=text`` holds that text."""
    for at, name in enumerate(paths):
        path, _, text = name.partition("|")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text or "x")
        os.utime(folder / path, (at + 10, at + 10))
    return folder


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        # transformers: the final weights lie beside, and the newest folder was not finished
        (["checkpoint-8/model.safetensors", "checkpoint-8/trainer_state.json", "model.safetensors"], "checkpoint-8"),
        (["c-2/checkpoint-8/a.bin", "c-2/checkpoint-8/trainer_state.json", "c-2/checkpoint-16/training_args.bin"],
         "c-2/checkpoint-8"),
        (["checkpoint-8/config.json", "checkpoint-8/rng_state_1.pth"], None),  # rank 1 was first
        # accelerate's save_state, named by itself or by the script
        (["checkpoints/checkpoint_0/model.safetensors", "checkpoints/checkpoint_1/model.safetensors"],
         "checkpoints/checkpoint_1"),
        (["state/model.safetensors", "state/optimizer.bin", "state/random_states_0.pkl"], "state"),
        # torch.distributed.checkpoint: .metadata comes last
        (["dcp/10/__0_0.distcp", "dcp/10/.metadata", "dcp/20/__0_0.distcp"], "dcp/10"),
        # Lightning
        (["lightning_logs/version_0/checkpoints/epoch=1-step=32.ckpt", "lightning_logs/version_0/hparams.yaml"],
         "lightning_logs/version_0/checkpoints/epoch=1-step=32.ckpt"),
        (["v/checkpoints/epoch=2.ckpt", "v/checkpoints/last.ckpt", "v/checkpoints/best.ckpt"],
         "v/checkpoints/last.ckpt"),
        # timm
        (["20261124-resnet10t/checkpoint-0.pth.tar", "20261124-resnet10t/last.pth.tar", "20261124-resnet10t/args.yaml"],
         "20261124-resnet10t/last.pth.tar"),
        (["d/last.pth.tar", "d/recovery-1-200.pth.tar", "d/model_best.pth.tar"], "d/recovery-1-200.pth.tar"),
        # DeepSpeed, Megatron: told the folder
        (["global_step2/a.pt", "global_step4/a.pt", "latest|global_step4"], "."),
        (["run/iter_0000004/a.pt", "run/latest_checkpointed_iteration.txt|4"], "run"),
        # by name, else the newest
        (["latest.pt", "epoch_3.pt", "model_best.pth"], "latest.pt"),
        (["step-2/model.bin", "step-4/model.bin", "step-6/model.bin.tmp"], "step-4"),
        (["w.bin", "notes.txt", "model_best.pth"], "w.bin"),
        (["runs/events.out.tfevents.1", "empty.json", ".hidden.pt"], None),
    ],
)  # fmt: skip
def test_each_layout_gives_what_its_library_reads(tmp_path: Path, paths: list[str], chosen: str | None) -> None:
    found = newest_checkpoint(laid(tmp_path, *paths))
    assert found == (None if chosen is None else tmp_path / chosen)


def test_a_file_of_safetensors_that_breaks_off_is_passed_over(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'
    whole = len(header).to_bytes(8, "little") + header + b"abcd"
    for name, content in (("step-1", whole), ("step-2", whole[:-1]), ("step-3", whole[:20])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_of_two_names_of_one_file_the_last_one_is_taken(tmp_path: Path) -> None:
    laid(tmp_path, "checkpoint-3.pth.tar")
    for name in ("last.pth.tar", "model_best.pth.tar"):
        (tmp_path / name).hardlink_to(tmp_path / "checkpoint-3.pth.tar")
    assert newest_checkpoint(tmp_path) == tmp_path / "last.pth.tar"


def test_a_pattern_names_it_and_a_torn_match_is_passed_over(tmp_path: Path) -> None:
    laid(tmp_path, "a/model_1.pt", "a/model_2.pt", "last.pt")
    assert newest_checkpoint(tmp_path, "a/model_*.pt") == tmp_path / "a/model_2.pt"
    with zipfile.ZipFile(tmp_path / "a/model_3.pt", "w") as file:
        file.writestr("data", "x" * 1000)
    os.truncate(tmp_path / "a/model_3.pt", 500)
    assert newest_checkpoint(tmp_path, "a/model_*.pt") == tmp_path / "a/model_2.pt"
    assert newest_checkpoint(tmp_path, "none") is None


def test_among_other_files_only_weights_that_count_are_taken(tmp_path: Path) -> None:
    laid(tmp_path, "pretrained.pt", "ckpt/step-1.pt", "results.dat")
    chosen = newest_checkpoint(tmp_path, is_output=lambda path: path.name != "pretrained.pt")
    assert chosen == tmp_path / "ckpt/step-1.pt"
    assert newest_checkpoint(tmp_path, is_output=lambda path: path.name == "results.dat") is None


def test_a_placeholder_may_name_the_files_and_other_braces_stay_as_they_are() -> None:
    assert names("{resume:**/last.ckpt} {loss:.4f} {{run}} {run}") == ["resume:**/last.ckpt", "run"]
    assert ScriptConfig(script="t.py", args=["{resume:a*}", "{resume}"]).resume_names == ["resume:a*", "resume"]
    for pattern in ("/a", "../a", "a**/b", ""):
        with pytest.raises(ConfigError, match="is no pattern of names in a folder; write it relative"):
            ScriptConfig(script="t.py", resume_pattern=pattern)


@pytest.mark.parametrize("name", ["checkpoint.th", "checkpoint.pt", "checkpoint.pth.tar", "net.model"])
def test_a_checkpoint_among_what_a_script_leaves_where_it_stands_is_known_by_its_ending(
    tmp_path: Path, name: str
) -> None:
    folder = laid(tmp_path, f"save_temp/{name}", "save_temp/predictions.dat")
    assert newest_checkpoint(folder, is_output=lambda _: True) == tmp_path / "save_temp" / name
