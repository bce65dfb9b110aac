"""A script that goes on from its checkpoint to the bit: weights, optimizer, random state and place in the epoch."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--resume", help="a checkpoint to go on from")
parser.add_argument("--epochs", type=int, default=8)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # dropout of its own in each rank

pixels, labels = load_digits(return_X_y=True)
images, classes = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
model = DistributedDataParallel(network)  # rank 0's first weights count
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

first = 0
if options.resume:
    state = torch.load(options.resume, weights_only=True)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"][rank])
    first = state["step"]

steps_an_epoch = len(images) // 64
for step in range(first, options.epochs * steps_an_epoch):
    epoch, place = divmod(step, steps_an_epoch)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))  # of the epoch alone
    mine = order[place * 64 : (place + 1) * 64][rank::ranks]
    loss = nn.functional.cross_entropy(model(images[mine]), classes[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    paceline.log(step + 1, loss=loss)
    if (step + 1) % 20 == 0:
        random: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * ranks
        dist.all_gather_object(random, torch.get_rng_state())
        if rank == 0:
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "random": random}
            new = paceline.checkpoints() / "last.pt.tmp"
            torch.save({**state, "step": step + 1}, new)
            new.replace(paceline.checkpoints() / "last.pt")
if rank == 0:
    torch.save(network.state_dict(), paceline.run_dir() / "model.pt")
dist.destroy_process_group()
