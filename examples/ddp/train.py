"""DistributedDataParallel on scikit-learn's digits, as under torchrun anywhere: two lines are Paceline's."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
torch.manual_seed(options.seed)

pixels, labels = load_digits(return_X_y=True)
images, classes = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
training = TensorDataset(images[:1500], classes[:1500])
sampler = DistributedSampler[object](training, seed=options.seed)
loader = DataLoader(training, batch_size=32, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
step = 0
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    with torch.no_grad():
        correct = model.module(images[1500:].to(device)).argmax(1) == classes[1500:].to(device)
    paceline.log(step, loss=loss, accuracy=correct.float().mean())
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), paceline.run_dir() / "model.pt")
dist.destroy_process_group()
