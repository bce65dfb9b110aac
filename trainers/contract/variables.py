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
RESERVE = "PACELINE_RESERVE"  # a file that is removed on a full disk, to make room for a last message
RANKS = "PACELINE_RANKS"  # name of the warm parent that this process is, or is a fork of

MARK_FILE = "paceline-node="  # name of a memory file that forks of a warm parent hold, followed by the mark

# Set for a script; paceline.py repeats them, because it is used without this package.
LOG = "PACELINE_LOG"  # where paceline.log writes
RUN_DIR = "PACELINE_RUN_DIR"
OUTPUTS = "PACELINE_OUTPUTS"  # the folder for results
