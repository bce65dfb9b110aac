"""Names of the environment variables that the controller or the agent sets and a node's processes read."""

from __future__ import annotations

# Set by the plan, for every rank.
PROJECT = "PACELINE_PROJECT"  # the folder in which the run's words were typed
DEVICE = "PACELINE_DEVICE"  # cpu or cuda
COLLECTIVE_TIMEOUT_S = "PACELINE_COLLECTIVE_TIMEOUT_S"

# Set by `doit diff`.
OPERATORS = "PACELINE_OPERATORS"  # FIRST-LAST: record each operator of these steps (from 1), and end (`doit diff`)

# Set by the agent.
NODE = "PACELINE_NODE"  # RUN_ID:NODE_RANK, the mark by which a node's processes are ended
RESERVE = "PACELINE_RESERVE"  # a file that a rank removes on a full disk, to make room for its last message
RANKS = "PACELINE_RANKS"  # name of the warm parent (a process that has imported torch) of which ranks are forks

# Linux shows a fork with its parent's environment, without the mark. So forks hold a memory file with the mark as name.
MARK_FILE = "paceline-node="

# Set for a script. paceline.py repeats these names, because scripts import it without this package.
LOG = "PACELINE_LOG"  # where paceline.log writes
RUN_DIR = "PACELINE_RUN_DIR"
OUTPUTS = "PACELINE_OUTPUTS"  # the folder for results
