"""The program that writes a finished run's network as one file of torch.export, for `doit export`:
``python -P trainers/exporting.py RUN_DIR FILE``. The network takes uint8 images and returns logits. PYTHONPATH begins
with the run's code snapshot, so ``trainers`` below is the code that trained the run, maybe an older version; only this
file is the current one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainers import models
from trainers.contract import run_folder
from trainers.core.config import ConfigError, TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.files import sha256_file
from trainers.core.options import load
from trainers.data.augment import Normaliser, normaliser
from trainers.data.pack import open_pack, prepare_for
from trainers.training.evaluation import views

if TYPE_CHECKING:  # the code of an older run has it elsewhere
    from trainers.contract.data_pack import Manifest

_CHECKED_IMAGES = 100  # of the test split: the exported network must classify them as the run's evaluation did
_MUST_AGREE = 0.9  # share of them: on other hardware, or in fp32 after bf16, a few may get another class
_CPU = torch.device("cpu")


class ExportedNetwork(nn.Module):
    """The evaluation of a run as a module: normalise images, compute the logits of their views, average them."""

    def __init__(self, network: nn.Module, normalise: Normaliser, tta: str) -> None:
        super().__init__()
        self.network = network
        self.tta = tta
        self.register_buffer("scale", normalise.scale)
        self.register_buffer("shift", normalise.shift)

    def forward(self, images: Tensor) -> Tensor:
        """Convert uint8 [n, C, H, W] to float32 logits [n, classes]."""
        normalise = Normaliser(scale=self.scale, shift=self.shift)  # type: ignore[arg-type]  # nn.Module's buffers
        logits = torch.zeros((), device=images.device)
        for weight, view in views(images, self.tta):
            logits = logits + weight * self.network(normalise(view)).float()
        return logits


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or 1 with the reason on stderr."""
    run_dir, path = map(Path, argv)
    try:
        export(run_dir, path)
    except (ConfigError, TrainerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def export(run_dir: Path, path: Path) -> None:
    """Write the run's network to ``path``, and check it by the run's evaluation. Raises ConfigError, TrainerError."""
    config = load(run_dir / run_folder.CONFIG)
    pack = prepare_for(open_pack(run_dir / "data"), _CPU)
    try:
        network = _trained(config, pack.manifest, run_dir)
        start, stop = pack.manifest.splits["test"]
        images, _ = pack.rows(torch.arange(start, min(stop, start + _CHECKED_IMAGES)), _CPU)
    finally:
        if pack.row_reader is not None:
            pack.row_reader.close()
    _save(network, images, path, config.model.name)
    _check(path, images, run_dir)


def _trained(config: TrainConfig, manifest: Manifest, run_dir: Path) -> ExportedNetwork:
    shape = models.ImageShape(
        channels=manifest.channels, height=manifest.height, width=manifest.width, num_classes=manifest.num_classes
    )
    network = models.build(config.model, shape)
    path = run_dir / run_folder.FINAL_WEIGHTS
    summary = json.loads((run_dir / run_folder.SUMMARY).read_text(encoding="utf-8"))
    if sha256_file(path) != summary["outputs_sha256"][run_folder.FINAL_WEIGHTS]:
        raise TrainerError(f"{path} isn't as the run left it: its sha256 differs from that in {run_folder.SUMMARY}")
    network.load_state_dict(torch.load(path, map_location=_CPU, weights_only=True))
    normalise = normaliser(manifest, normalise=config.dataset.normalise, device=_CPU)
    network = network.to(memory_format=torch.channels_last)
    return ExportedNetwork(network, normalise, config.trainer.tta).eval()


def _save(network: ExportedNetwork, images: Tensor, path: Path, name: str) -> None:
    # two images: torch.export would take a batch of one for a constant size
    example = images[:2] if len(images) > 1 else images.expand(2, -1, -1, -1)
    try:
        with torch.no_grad():
            batch = {0: torch.export.Dim("batch")}
            exported = torch.export.export(network, (example.contiguous(),), dynamic_shapes=(batch,))
        torch.export.save(exported, path)
    except Exception as error:  # torch has many classes of errors, and a user's network may raise any
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainerError(f"torch.export can't take model={name}: {type(error).__name__}: {reason}") from error


def _check(path: Path, images: Tensor, run_dir: Path) -> None:
    """Compare the classes that the saved model predicts with those of the run's evaluation. Raises TrainerError."""
    evaluated = json.loads((run_dir / run_folder.PREDICTIONS).read_text(encoding="utf-8"))["predictions"][: len(images)]
    with torch.no_grad():
        predicted = torch.export.load(path).module()(images).argmax(1).tolist()
    agreed = sum(map(int.__eq__, predicted, evaluated))
    if agreed < _MUST_AGREE * len(images):
        raise TrainerError(
            f"the exported model says of {agreed} of {len(images)} test images what the run's evaluation did: it isn't "
            "the network that was evaluated"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
