"""Rank 0's outputs from its node into the controller's run folder: one tar, verified, then renamed."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from pipeline import leftovers, shell, threads
from pipeline.checkpoints import DAMAGE, read_verified
from pipeline.errors import PacelineError, TrainingError
from pipeline.launchers.agent_launcher import message
from pipeline.launchers.answers import parse
from pipeline.types import TRAINED, Outputs

_RESUME_LIMIT_S = 20.0


def receive(
    argv: list[str], request: dict[str, Any], run_dir: Path, *, host: str, final: bool, outputs: Outputs = TRAINED
) -> None:
    """Ask the agent behind ``argv`` for files and put them into ``run_dir``.

    Raises:
        TrainingError: when ``final``: nothing came, a digest differs, or a needed file is missing.
    """
    request = {**request, "do": "collect", "patterns": outputs.final if final else outputs.resume}
    temporary = Path(tempfile.mkdtemp(prefix=leftovers.prefix(".collect"), dir=run_dir))
    try:
        _extract(argv, request, temporary, None if final else _RESUME_LIMIT_S)
        damaged = _drop_damaged(temporary)
        pruned = outputs.pruned is not None and (temporary / outputs.pruned).exists()
        needed = (outputs.pruned,) if outputs.pruned and pruned else outputs.needed
        missing = [name for name in needed if not (temporary / name).exists()]
        if final and (damaged or missing):
            what = f"damaged on the way: {', '.join(damaged)}" if damaged else f"missing: {', '.join(missing)}"
            raise TrainingError(f"{host} ended well, but its outputs could not be collected; {what}")
        _settle(temporary, run_dir, needed[-1])
    except (OSError, PacelineError, ValueError, tarfile.TarError, EOFError) as error:
        if final:
            raise TrainingError(f"{host}: its outputs could not be collected: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract(argv: list[str], request: dict[str, Any], folder: Path, limit_s: float | None) -> None:
    child = shell.stream(argv)
    timer = threads.after(limit_s, child.kill, name="collect limit") if limit_s else None
    try:
        with child:
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("a stream has pipes")
            with contextlib.suppress(BrokenPipeError):  # why it ended shows below
                child.stdin.write(message(request))
                child.stdin.close()
            answers = (value for line in child.stdout if (value := parse(line)) is not None)
            answer = next((value for value in answers if "tar" in value or "error" in value), None)
            if answer is None:
                raise PacelineError(_last_words(child.stderr))
            if "error" in answer:
                raise PacelineError(str(answer["error"]))
            with tarfile.open(fileobj=child.stdout, mode="r|") as archive:
                archive.extractall(folder, filter="data")
    finally:
        if timer is not None:
            timer.cancel()


def _last_words(stderr: Any) -> str:
    text: str = stderr.read().decode(errors="replace").strip() if stderr else ""
    return text[-400:] or "no answer"


def _drop_damaged(folder: Path) -> list[str]:
    """Remove checkpoints whose digests aren't those of the .json beside them (or that have none); their names."""
    damaged = []
    for path in sorted((folder / "checkpoints").glob("*.pt")):
        try:
            read_verified(path)
        except DAMAGE:
            damaged.append(path.name)
            path.unlink()
            path.with_suffix(".json").unlink(missing_ok=True)
    return damaged


def _settle(temporary: Path, run_dir: Path, last: str) -> None:
    """Rename every file into place, ``last`` as the last. Older checkpoints that the node dropped go, once a newer
    one has come."""
    came = sorted(path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file())
    for name in sorted(came, key=lambda name: str(name) == last):
        target = run_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).replace(target)
    if any(name.match("checkpoints/step-*.pt") for name in came):
        checkpoints = run_dir / "checkpoints"
        for old in [*checkpoints.glob("step-*"), *checkpoints.glob("shards-*/*")]:
            if old.relative_to(run_dir) not in came:
                old.unlink()
        for folder in checkpoints.glob("shards-*"):
            with contextlib.suppress(OSError):  # it isn't empty
                folder.rmdir()
