"""Lightning on scikit-learn's digits. torchrun may start its ranks, or Lightning itself (`doit run`)."""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline_lightning import PacelineLogger


class Digits(LightningModule):
    """Two layers."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("accuracy", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--resume", help="a checkpoint to go on from")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

seed_everything(options.seed)
pixels, labels = load_digits(return_X_y=True)
images, classes = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
loaders = [
    DataLoader(TensorDataset(images[part], classes[part]), batch_size=32, shuffle=not at)
    for at, part in enumerate((slice(1500), slice(1500, None)))
]
own = PacelineLogger()
trainer = Trainer(
    max_epochs=options.epochs,
    devices=options.devices,
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # how many hosts torchrun runs on
    strategy="ddp" if options.devices > 1 or "RANK" in os.environ else "auto",
    log_every_n_steps=10,
    logger=own,
    callbacks=[own, ModelCheckpoint(save_last=True)],
    enable_progress_bar=False,
)
trainer.fit(Digits(options.lr), *loaders, ckpt_path=options.resume)
