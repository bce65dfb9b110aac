"""What the agent can be asked."""

from __future__ import annotations

COMMANDS = {
    "probe": "probe",
    "examine": "checks",
    "shared": "checks",
    "reach": "reach",
    "start": "starting",
    "job": "job",
    "follow": "follow",
    "stop": "registry",
    "standing": "registry",
    "collect": "staging",
    "clean": "staging",
    "clear": "left",
    "put_pack": "staging",
    "find_environment": "environments",
    "make_environment": "environments",
    "compare_trees": "trees",
    "make_places": "trees",
    "mesh_offer": "mesh",
    "mesh_accept": "mesh",
    "mesh_try": "logins",
    "mesh_undo": "mesh",
}
"""Command → the module with the function of that name: what a command doesn't use isn't sent for it."""
SCHEDULERS = ("slurm_node", "kubernetes_pod")
"""Modules of which ``job`` takes the one that its request names."""
