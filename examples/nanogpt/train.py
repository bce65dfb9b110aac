"""A small GPT on characters, after nanoGPT: it saves, goes on from its checkpoint and stops when asked to."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--block", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()


class Block(nn.Module):
    """Attention to what stands before, then a layer for each place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.places = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.places(self.norms[1](x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Logits of the next character at each place."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, options.width), nn.Embedding(options.block, options.width)
        self.blocks = nn.Sequential(*(Block(options.width, options.heads) for _ in range(options.layers)))
        self.head = nn.Sequential(nn.LayerNorm(options.width), nn.Linear(options.width, characters))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(places)))  # type: ignore[no-any-return]


device = "cuda" if torch.cuda.is_available() else "cpu"
text = options.text.read_text()
alphabet = sorted(set(text))
data = torch.tensor([alphabet.index(character) for character in text], device=device)
split = len(data) * 9 // 10


def mean_loss(part: torch.Tensor, seed: int, rows: int = 16) -> torch.Tensor:
    """The loss of random pieces; a seed for each step makes a resumed run draw what an unbroken one draws."""
    starts = torch.randint(len(part) - options.block, (rows,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([part[start : start + options.block + 1] for start in starts.tolist()])
    return functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


torch.manual_seed(options.seed)
model = GPT(len(alphabet)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
first = 1
if options.resume is not None:
    saved = torch.load(options.resume, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"] + 1
for step in range(first, options.steps + 1):
    loss = mean_loss(data[:split], seed=options.seed + step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    is_last = paceline.should_stop() or step == options.steps
    if step % 20 == 0 or is_last:
        with torch.no_grad():
            paceline.log(step, loss=loss, val_loss=mean_loss(data[split:], seed=0))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, paceline.checkpoints() / f"step-{step}.pt")
    if is_last:
        break
torch.save(model.state_dict(), paceline.run_dir() / "model.pt")
(paceline.run_dir() / "alphabet.json").write_text(json.dumps(alphabet))
