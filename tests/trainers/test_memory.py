import resource
import sys

import pytest
import torch

from trainers.distributed.malloc import keep_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_a_large_block_that_was_freed_is_taken_again_without_page_faults() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    for _ in range(3):
        torch.ones(1 << 23)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 23)  # 32 MiB are 8192 pages
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 8192
