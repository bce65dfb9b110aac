"""The output of a node's ranks and of torchrun, merged into one log, and what torchrun tells there of ranks."""

from __future__ import annotations

import glob
import os
import re
import time

from ..log_lines import Rules, Tail
from ..node import RANK_OUTPUTS
from ..requests import NodeStart
from .rank_errors import RankExit
from .watches import EarlyExits

_KEPT_LINES = 40  # of torchrun's last ones
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
# printed by trainers.script.start, without torchrun
_SCRIPT_ENDED = re.compile(r"paceline: error: .* ended with exit code (\d+)")


class NodeOutput:
    """Merges the files of this node's ranks into ``log``, a line ``RANK | text`` each; ``- | text`` is torchrun's.

    Attributes:
        last_lines: torchrun's newest lines.
        exits: local rank → how torchrun reported its end.
        script_code: exit code of a script without torchrun, by its parent's last line; 0: it didn't report any.
    """

    def __init__(self, node: NodeStart, rules: Rules, early_exits: EarlyExits) -> None:
        self._node, self._rules, self._early_exits = node, rules, early_exits
        self.torchrun_log = os.path.join(node.state_dir, "torchrun.log")
        self._torchrun_tail = Tail(self.torchrun_log, rules)
        self._rank_tails: dict[str, tuple[int, Tail]] = {}  # output file → rank and its new lines
        self.last_lines: list[str] = []
        self.exits: dict[int, RankExit] = {}
        self.script_code = 0

    def merge(self, own_lines: list[str], *, last: bool = False) -> bool:
        """Append new output and the agent's own lines to the log. Return whether there were any. Raises OSError.

        ``last``: also unfinished lines.
        """
        if len(self._rank_tails) < 2 * self._node.nproc_per_node or last:
            self._find_rank_outputs()
        rows = [f"{rank} | {text}" for rank, tail in self._rank_tails.values() for text in tail.lines(last)]
        rows += [f"- | {text}" for text in own_lines]
        for text in self._torchrun_tail.lines(last):
            rows.append(f"- | {text}")
            self._read_torchrun_line(text)
        if rows:
            with open(os.path.join(self._node.state_dir, "log"), "a", encoding="utf-8") as log:
                log.write("\n".join(rows) + "\n")
        return bool(rows)

    def _read_torchrun_line(self, text: str) -> None:
        self.last_lines = [*self.last_lines, text][-_KEPT_LINES:]
        self._early_exits.read(text)
        if ended := _SCRIPT_ENDED.fullmatch(text):
            self.script_code = int(ended[1])
        if failed := _FAILED.search(text):
            self.exits.setdefault(int(failed[2]), RankExit(code=int(failed[1]), unix_time=time.time()))

    def _find_rank_outputs(self) -> None:
        if not os.path.isdir(os.path.join(self._node.state_dir, "ranks")):  # torchrun creates it after a second
            return
        for path in glob.glob(os.path.join(glob.escape(self._node.state_dir), RANK_OUTPUTS)):
            if path not in self._rank_tails:
                local_rank = int(os.path.basename(os.path.dirname(path)))
                tail = Tail(path, self._rules, shows_bars=local_rank == 0)  # the other ranks' bars say the same
                self._rank_tails[path] = (self._node.first_rank + local_rank, tail)
