"""What the benchmark scripts share: interleaved pairs, and a line with n and spread."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
DOIT = (sys.executable, "-m", "doit")

# a job in the background ignores Ctrl-C, and so would the commands that a script starts and ends by it
signal.signal(signal.SIGINT, signal.default_int_handler)


def interleaved(
    first: Callable[[int], float], second: Callable[[int], float], pairs: int
) -> tuple[list[float], list[float]]:
    """Seconds of both, pair by pair, the order turned round each time so that a drift hits both alike."""
    a, b = [], []
    for index in range(pairs):
        if index % 2 == 0:
            a.append(first(index))
            b.append(second(index))
        else:
            b.append(second(index))
            a.append(first(index))
        print(f"  pair {index + 1}/{pairs}: {a[-1]:.3f} s and {b[-1]:.3f} s", flush=True)
    return a, b


def spread(values: Sequence[float], unit: str = "") -> str:
    """``min / median / max`` with the unit and n."""
    shown = " / ".join(f"{value:.3f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{shown}{f' {unit}' if unit else ''} (min / median / max, n={len(values)})"


def verdict(names: tuple[str, str], a: Sequence[float], b: Sequence[float], target: float) -> int:
    """Print both times and the ratios of the pairs; 0 if the median ratio keeps the target, else 1."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    kept = statistics.median(ratios) <= target
    print(f"{names[0]}: {spread(a, 's')}")
    print(f"{names[1]}: {spread(b, 's')}")
    print(f"ratio: {spread(ratios)}; target at most {target}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


def surroundings() -> str:
    """The evidence's other half: versions, commit and machine, in one line."""
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("doit", "hydra-core", "torch", "mlflow"))
    commit = checked(["git", "describe", "--always", "--dirty"], cwd=ROOT).strip()
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return f"commit {commit}; Python {platform.python_version()} {versions}; {machine}"


def checked(argv: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Both outputs of a command that must succeed; ends the benchmark with them where it doesn't."""
    done = subprocess.run(
        list(argv), cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def working(folder: Path, word: str = "") -> list[psutil.Process]:
    """Other processes whose command lines (``info["cmdline"]``) name the folder, and ``word``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())  # None of one that has just ended
        if process.pid != os.getpid() and str(folder) in words and word in words:
            found.append(process)
    return found


def chosen(about: str | None, measured: Mapping[str, Callable[..., bool]]) -> int:
    """Measure what the command line names, with its numbers, in a fresh folder; 0 if the target is kept, else 1."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=measured)
    parser.add_argument("numbers", nargs="*", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        kept = measured[asked.what](Path(name), *asked.numbers)
    print(surroundings())
    return 0 if kept else 1
