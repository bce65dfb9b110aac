"""A real cluster on one machine: hosts in network namespaces, each with its own OpenSSH server.

``up`` raises the lab of a project folder, ``status`` looks at it, ``down`` removes what ``up`` made and
nothing else. ``cut``, ``restore`` and ``limit`` make the link faults that tests and benchmarks need.
docs/lab.md shows the layout.
"""

from pipeline.lab.lifecycle import down, status, up
from pipeline.lab.network import cut, limit, restore
from pipeline.lab.requirements import missing
from pipeline.lab.state import Lab, LabHost

__all__ = ["Lab", "LabHost", "cut", "down", "limit", "missing", "restore", "status", "up"]
