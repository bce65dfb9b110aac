"""A loop with accelerate on scikit-learn's digits: `accelerate launch` and torchrun start it alike."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

set_seed(options.seed)
accelerator = Accelerator(cpu=not torch.cuda.is_available())  # else ranks on processors train apart from each other
pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, batch_size=32, shuffle=True))

step = 0
for _ in range(3):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            paceline.log(step, loss=loss)
accelerator.save_model(model, paceline.run_dir() / "model")
accelerator.end_training()
