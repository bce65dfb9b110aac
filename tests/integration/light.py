"""An interpreter with which a small run costs half of the processor time: tests/stand_ins says what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from functools import cache
from pathlib import Path

from tests.stand_ins import forked_recorders

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "stand_ins"
_asking: list[int] = []  # open as long as this process lives


@cache
def light_python(*, forks_ranks: bool = False) -> str:
    """Its path. It has all that this interpreter has; made once a call of pytest, in a folder that all workers share.

    Its recorders are forked by a process that ends with the workers. ``forks_ranks``: another one, whose torchrun has
    ranks forked, too.
    """
    from tests.shared_fixture import shared_folder  # imports pytest

    python = _made("light python")
    recorders = STAND_INS / "forked_recorders.py"
    _with_workers("recorders", [python, "-Iu", str(recorders), str(ROOT), forked_recorders.address(shared_folder())])
    if forks_ranks:
        return forking_python("torch.distributed.elastic.multiprocessing.errors", "torch._dynamo", "torchvision")
    return python


@cache
def forking_python(*imported: str) -> str:
    """The path of an interpreter of its own for a process that has these modules imported and forks, for all workers
    of this call of pytest: ``forked_ranks.address`` of its prefix is where. It may not be there yet."""
    name = f"light python that forks {len(imported)}"
    python = _made(name)
    _with_workers(name, [python, "-Iu", str(STAND_INS / "forked_ranks.py"), *imported])
    return python


def _with_workers(name: str, argv: list[str]) -> None:
    """Have one such process as long as any worker of this call of pytest lives: then its stdin ends."""
    from pipeline.core.locks import held  # here: not for those who only ask for the path
    from tests.shared_fixture import shared_folder

    workers = shared_folder() / f"workers of {name}"
    with held(Path(f"{workers}.lock")):
        if not workers.exists():
            os.mkfifo(workers)
        try:
            _asking.append(os.open(workers, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads there: it has not been started
            reader = os.open(workers, os.O_RDONLY | os.O_NONBLOCK)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            subprocess.Popen(argv, env=environment, stdin=reader)
            _asking.append(os.open(workers, os.O_WRONLY))
            os.close(reader)


def _made(name: str) -> str:
    from tests.shared_fixture import made_once, shared_folder  # imports pytest

    return str(made_once(shared_folder() / name, _lay_out) / "bin" / "python")


def _lay_out(folder: Path) -> None:
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    layer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    Path(site, "light.pth").write_text(f"{layer}\n{STAND_INS}\nimport light_start\n")
