"""What a rank does with memory that is free again."""

import gc
import subprocess
import sys

import pytest

from trainers.distributed.resources import resume_garbage_collection

_TAKEN_AGAIN = """
import resource, sys
from trainers.distributed.resources import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit("no mallopt")
for again in range(13):
    if again == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"1") * (1 << 25)  # 32 MiB are 8192 pages
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _TAKEN_AGAIN, how], capture_output=True, text=True, check=False)
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_a_large_block_that_was_freed_is_taken_again_without_page_faults() -> None:
    assert _page_faults("kept") < 100
    assert _page_faults("as usual") > 100


def test_what_a_start_has_made_is_never_looked_through() -> None:
    gc.unfreeze()  # what these tests themselves have frozen
    gc.enable()
    resume_garbage_collection()  # nobody paused
    before = gc.get_freeze_count()  # some versions of Python begin with a few hundred
    try:
        gc.disable()  # as trainers.entry does
        resume_garbage_collection()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before + 1000
    finally:
        gc.unfreeze()
        gc.enable()
