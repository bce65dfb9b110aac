"""An interpreter with which a small run costs half of the processor time: tests/stand_ins says what it leaves out."""

from __future__ import annotations

import atexit
import os
import subprocess
import sysconfig
import tempfile
import venv
from functools import cache
from pathlib import Path

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"


@cache
def light_python(*, forks_ranks: bool = False) -> str:
    """Its path. It has all that this interpreter has; made once a test process, in the tests' temporary folder.

    ``forks_ranks``: another one, whose torchrun has ranks forked by a process that ends with this one.
    """
    folder = Path(tempfile.mkdtemp(prefix="light python "))
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    layer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    Path(site, "light.pth").write_text(f"{layer}\n{STAND_INS}\nimport light_start\n")
    python = str(folder / "bin" / "python")
    if forks_ranks:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        argv = [python, "-Iu", str(STAND_INS / "forked_ranks.py")]
        server = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE)
        atexit.register(server.communicate)
    return python
