"""GPUs of this computer, as ``cluster=local`` may use them."""

from __future__ import annotations

from pipeline.cluster.agent.host.processors import count_gpus
from pipeline.keys.installed import version


def usable_gpus() -> int:
    """How many CUDA may see (``CUDA_VISIBLE_DEVICES``), and none where torch was built for the CPU alone."""
    count = count_gpus()
    return 0 if count and (version("torch") or "").endswith("+cpu") else count
