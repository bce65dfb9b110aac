"""A project with a script that lies elsewhere, and that script."""

from __future__ import annotations

from pathlib import Path

from tests.integration.commands import Project

SCRIPT = """
import argparse, os, sys
import paceline
from step import update
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float)
p.add_argument("--out")
p.add_argument("--resume")
a = p.parse_args()
w = float(open(a.resume).read()) if a.resume else 8.0
for step in range(1, 4):
    w = update(w, a.lr)
    paceline.log(step, loss=w * w)
    if os.environ["RANK"] == "0":
        path = os.path.join(paceline.checkpoints(), "w.bin")
        with open(path + ".tmp", "w") as file:  # the other rank may still be reading the earlier one
            file.write(str(w))
        os.replace(path + ".tmp", path)
        if a.lr == 0.5 and not a.resume:
            sys.exit(3)
if os.environ["RANK"] == "0":
    open(os.path.join(a.out, "w.txt"), "w").write(str(w))
"""


def script_project(tmp_path: Path) -> Project:
    """A project of the test's own with a script elsewhere; ``words`` name it."""
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "step.py").write_text("def update(w, lr):\n    return w - lr * w\n")
    words = [f"program.script='{folder}/train.py'", "program.args.out={run}", "cluster.nproc_per_node=2"]
    apart = "cluster.env.PACELINE_PROJECT=/nowhere"  # or the stand-in of torchrun would count as the project's
    return Project(tmp_path, words=[*words, apart, "tracking=none"])


def without_arguments(project: Project) -> None:
    """Leave out the script's arguments and its number of ranks, for a test that gives others."""
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]


def use_script(project: Project, text: str) -> None:
    """Put another script in the place of the project's, without its arguments and its number of ranks."""
    (project.folder / "my scripts/train.py").write_text(text)
    without_arguments(project)
