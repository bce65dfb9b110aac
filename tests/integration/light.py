"""An interpreter with which a small run costs half of the processor time: tests/stand_ins says what it leaves out."""

from __future__ import annotations

import sysconfig
import tempfile
import venv
from functools import cache
from pathlib import Path

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"


@cache
def light_python() -> str:
    """Its path. It has all that this interpreter has; made once a test process, in the tests' temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="light python "))
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    layer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    Path(site, "light.pth").write_text(f"{layer}\n{STAND_INS}\nimport light_start\n")
    return str(folder / "bin" / "python")
