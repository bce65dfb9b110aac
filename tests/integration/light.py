"""An interpreter with which a small run costs half of the processor time: tests/stand_ins says what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from functools import cache
from pathlib import Path

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
_asking: list[int] = []  # open as long as this process lives


@cache
def light_python(*, forks_ranks: bool = False) -> str:
    """Its path. It has all that this interpreter has; made once a call of pytest, in a folder that all workers share.

    ``forks_ranks``: another one, whose torchrun has ranks forked by a process that ends with the workers.
    """
    if forks_ranks:
        return forking_python("torch.distributed.elastic.multiprocessing.errors", "torch._dynamo", "torchvision")
    return _made("light python")


@cache
def forking_python(*imported: str) -> str:
    """The path of an interpreter of its own for a process that has these modules imported and forks, for all workers
    of this call of pytest: ``forked_ranks.address`` of its prefix is where. It may not be there yet."""
    from pipeline.core.locks import held  # here: not for those who only ask for the path

    python = _made(f"light python that forks {len(imported)}")
    workers = Path(python).parents[1] / "workers"
    with held(Path(f"{workers}.lock")):
        if not workers.exists():
            os.mkfifo(workers)
        try:
            _asking.append(os.open(workers, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads there: it has not been started
            reader = os.open(workers, os.O_RDONLY | os.O_NONBLOCK)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            argv = [python, "-Iu", str(STAND_INS / "forked_ranks.py"), *imported]
            subprocess.Popen(argv, env=environment, stdin=reader)
            _asking.append(os.open(workers, os.O_WRONLY))
            os.close(reader)
    return python


def _made(name: str) -> str:
    from tests.shared_fixture import made_once, shared_folder  # imports pytest

    return str(made_once(shared_folder() / name, _lay_out) / "bin" / "python")


def _lay_out(folder: Path) -> None:
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    layer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    Path(site, "light.pth").write_text(f"{layer}\n{STAND_INS}\nimport light_start\n")
