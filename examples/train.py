"""A training that runs under torchrun: `doit torchrun --nproc-per-node 2 examples/train.py --lr 0.1`."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank draws its own samples; the weights are rank 0's
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
for step in range(1, options.steps + 1):
    inputs = torch.randn(32, 8)
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        paceline.log(step, loss=loss.item())
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), paceline.run_dir() / "model.pt")
dist.destroy_process_group()
