"""When a file's stamp (size, times, inode) tells that nobody wrote to it since."""

from __future__ import annotations

import math
import time

_TICK_NS = 20_000_000  # a file system's clock moves on in steps of up to 10 ms,
_SECONDS_NS = 2_500_000_000  # or in whole seconds (HFS+, ext3, many a network's)


def settles_in(changed_ns: int) -> float:
    """For how many seconds from now a second writing may still leave the same stamp; 0: none can.

    Args:
        changed_ns: the file's change time (unix time in ns). One that is still to come is of another clock, of which
            nobody knows how late it is: infinite.
    """
    age_ns = time.time_ns() - changed_ns
    if age_ns < 0:
        return math.inf
    return max(0, (_TICK_NS if changed_ns % 1_000_000 else _SECONDS_NS) - age_ns) / 1e9
