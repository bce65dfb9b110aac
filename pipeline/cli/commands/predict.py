"""`doit predict`: classify image files with the network of a finished run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline.cli import answers, clone
from pipeline.cli.commands.records import finished_classifier, holder
from pipeline.cli.output import note, say, say_folded
from pipeline.cli.session import session
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.places import HOME
from pipeline.core.processes import process
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.specs import LAST
from pipeline.core.tables import aligned, is_count
from pipeline.data.manifest import MANIFEST
from pipeline.runs import index
from pipeline.runs.folder import RunFolder
from pipeline.tracking.mlflow.publishing import Published, exported_file
from trainers.contract import run_folder

_PREDICTOR = HOME / "trainers" / "predicting.py"
_TOP = 3
_TIMEOUT_S = 3600.0


def predict() -> None:
    """Raises UsageError: no finished classifier, or no image is named; PacelineError: an image can't be read."""
    folder, images = _named()
    top = session().invocation.options.get("top", str(_TOP))
    if not is_count(top) or int(top) < 1:
        raise UsageError(f"top={top} must be a whole number from 1 on")
    model = finished_classifier(folder)
    with waiting(note, "exporting the network, once for its weights"):
        network = exported_file(folder)
    answer = _classified(folder, network, images, int(top))
    rows = [{**item, "top": _with_names(item.get("top", []), model)} for item in answer]
    broken = [item for item in answer if "error" in item]
    first = f"{broken[0]['image']} can't be read: {broken[0]['error']}" if broken else ""
    error = PacelineError(f"{first}; {len(broken)} of {len(answer)} images") if broken else None
    if answers.wanted():
        answers.answer({"key": folder.key, "images": rows}, error=error)
    say(aligned([(_typed(row["image"]), _text(row)) for row in rows]))
    if model.synthetic:
        say_folded("SYNTHETIC DATA: the network was trained on noise, so this means nothing")
    if error is not None:
        raise error


def _named() -> tuple[RunFolder, list[Path]]:
    """The run, by ``run=``, the first bare word or the newest; and the image files, from the folder of the command."""
    invocation = session().invocation
    words, runs_dir = [*invocation.paths], session().config.runs_dir
    named = invocation.options.get("run")
    if named is None and words and not _file(words[0]).is_file():
        named = words.pop(0)
    if not words:
        raise UsageError("which images? doit predict takes a run and image files", hint="doit predict last cat.jpg")
    return holder(index.find(runs_dir, named or LAST)), [_file(word) for word in words]


def _typed(path: str) -> str:
    """As it is called from the folder of the command."""
    here = clone.started_in()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _file(word: str) -> Path:
    return clone.started_in() / Path(word).expanduser()


def _classified(folder: RunFolder, network: Path, images: list[Path], top: int) -> list[dict[str, Any]]:
    manifest = folder.read_json(f"{run_folder.DATA}/{MANIFEST}")
    if manifest is None:
        raise PacelineError(f"the data pack of run {folder.key} isn't here, which tells the size of its images")
    dataset = (folder.read_json(run_folder.CONFIG) or {}).get("dataset") or {}
    request = {
        "model": str(network),
        "images": [str(path) for path in images],
        **{name: manifest[name] for name in ("height", "width", "channels")},
        "resize": dataset.get("resize"),
        "top": top,
    }
    code = {**os.environ, "PYTHONPATH": str(HOME), "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-P", str(_PREDICTOR)]
    with waiting(note, "classifying"):
        done = process.run(argv, input=json.dumps(request).encode(), env=code, timeout_s=_TIMEOUT_S)
    if done.code != 0:
        raise PacelineError(f"the network of run {folder.key} can't be used here: {done.why.splitlines()[-1]}")
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def _with_names(top: list[list[float]], model: Published) -> list[dict[str, Any]]:
    names = model.classes
    return [
        {"class": names[int(number)] if int(number) < len(names) else str(int(number)), "probability": value}
        for number, value in top
    ]


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"can't be read: {row['error']}"
    return "  ".join(f"{item['class']} {item['probability']:.3f}" for item in row["top"])
