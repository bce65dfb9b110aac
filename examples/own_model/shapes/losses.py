"""A loss: trainer.loss names it."""

from torch import Tensor
from torch.nn import functional


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross-entropy that counts less where the network is sure already (Lin et al. 2017)."""
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** gamma * losses).mean()
