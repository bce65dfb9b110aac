"""The GPUs of this computer that ``cluster=local`` may use."""

from __future__ import annotations

from pipeline.cluster.agent.host.processors import count_gpus
from pipeline.keys.installed import version


def usable_gpus() -> int:
    """Count the GPUs that CUDA may see (``CUDA_VISIBLE_DEVICES``); 0 if torch was built without CUDA."""
    count = count_gpus()
    return 0 if count and (version("torch") or "").endswith("+cpu") else count
