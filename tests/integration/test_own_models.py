"""docs/own-models.md as printed, and what a person sees whose network fails on the hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from tests.integration.commands import ROOT
from tests.integration.light import light_python
from tests.integration.test_provenance import Checkout, copied
from tests.waiting import HANG_S

TWO_STEPS = "trainer.max_steps=2 cluster.nproc_per_node=2 ++cluster.env.OMP_NUM_THREADS=1 tracking=none"


def typed(checkout: Checkout, lines: str, words: str = TWO_STEPS) -> subprocess.CompletedProcess[str]:
    """Typed into a shell in the checkout, each command with ``words`` added: a training has two steps only."""
    python = light_python(forks_ranks=True).replace(" ", chr(92) + " ")
    doit = f'doit() {{ {python} -m doit "$@" {words}; }}\n'
    env = {**os.environ, "PYTHONPATH": str(checkout.root)}
    return subprocess.run(
        ["bash", "-c", doit + lines],
        cwd=checkout.root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_the_example_of_the_page_trains_as_printed_and_a_mistake_is_told_once(tmp_path: Path, fetched: Path) -> None:
    (example,) = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs/own-models.md").read_text(), re.MULTILINE | re.DOTALL)
    assert example.count("\n") <= 15
    checkout = copied(tmp_path / "project", fetched)
    done = typed(checkout, example)
    assert done.returncode == 0, done.stdout
    (result,) = (checkout.root / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["steps"] == 2
    code = json.loads((result.parent / "key.json").read_text())["code"]
    assert {"my_package/nets.py", "trainers/models/own.py"} <= set(code)
    assert (result.parent / "code/my_package/nets.py").is_file()

    nets = checkout.root / "my_package/nets.py"
    nets.write_text(nets.read_text().replace("        return self", "        oh(images)\n        return self"))
    done = typed(checkout, example.splitlines()[-1])
    assert done.returncode == 1
    assert len(re.findall(r"name 'oh' is not defined", done.stdout)) == 1, done.stdout
    assert re.findall(r'File "([^"]+)", line (\d+)', done.stdout) == [("my_package/nets.py", "10")], done.stdout

    nets.rename(nets.with_name("net.py"))  # the words are remembered, and what they name is looked for all the same
    done = typed(checkout, example.splitlines()[-1])
    assert done.returncode == 3
    assert "model.target=my_package.nets:MyNet: there is no module my_package.nets under" in done.stdout, done.stdout
    assert "did you mean my_package.net?" in done.stdout
