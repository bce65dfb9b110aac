"""`doit evaluate`, `record`, `ui` and `predict`: a finished run's report, its MLflow record, its network on images."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import tracking
from pipeline.cli import invocation
from pipeline.cli.loader import exit_if_interrupted
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.places import HOME
from pipeline.core.processes import process
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import LAST, UNDER_WAY
from pipeline.core.tables import aligned
from pipeline.execution import stored_report
from pipeline.execution.exported import exported_file
from pipeline.runs import acceptance, index, journal
from pipeline.runs.folder import RunFolder, check_parts
from pipeline.runs.result import Result
from pipeline.tracking import mlflow_ui as web_ui
from pipeline.tracking.client import Recorder
from trainers.contract import run_folder
from trainers.contract.run_folder import MANIFEST

_PREDICTOR = HOME / "trainers" / "predicting.py"
_TOP = 3  # classes that are shown of each image by default
_LAST_PORT = 65535
_TIMEOUT_S = 3600.0


def evaluate(current: Session) -> None:
    """Recreate the report and the confusion matrix, and show them."""
    folder = with_results(current.folder())
    with waiting(note, "making the evaluation report"):
        stored_report.renew(folder, ROOT, note)
    report = folder.read_json(run_folder.REPORT)
    if report is None:
        raise PacelineError(f"{folder.path / run_folder.REPORT} is not readable")
    if wants_json():
        about = {"key": folder.key, "report": report, "folder": str(folder.path)}
        answer({**about, "most_confused": stored_report.most_confused(report)})
        return
    say(stored_report.format_report(report))
    say(f"  picture  {relative(folder.path / run_folder.CONFUSION_MATRIX)}")


def record(current: Session) -> None:
    """Send to the trackers what they lack of a run."""
    folder = with_results(current.folder())
    folder.read_summary(), folder.read_result(), folder.refuse_altered_config()  # each refuses altered files
    config = current.config
    # `doit record` is typed to record, so MLflow is used even if the configuration switches all trackers off
    has_no_destination = not tracking.destinations(vars(config.tracking), ROOT)
    recorder = Recorder(folder.path, config, ROOT, enabled=True if has_no_destination else None)
    with waiting(note, f"recording in {recorder.titles()}"):
        recorded = recorder.replay()
    if not recorded:
        states = [entry.state for entry in journal.read(folder.journal)]
        if states and states[-1] in UNDER_WAY:
            raise PacelineError(
                f"{folder.key} has not ended, its journal says {states[-1]}; it is recorded up to where it is",
                hint="the command that started it, which goes on with it; it records by itself",
            )
        raise PacelineError(
            f"{folder.key} is not recorded in {recorder.titles()} yet: {recorder.why()}", hint=recorder.hint()
        )
    say(f"{folder.key} is recorded as {recorder.titles()}")


def with_results(folder: RunFolder) -> RunFolder:
    """Return the folder with the results; an accepted run has them in the folder of the run that was accepted."""
    _, accepted = acceptance.result_or_accepted(folder)
    if accepted is None:
        return folder
    note(f"{folder.key} is {accepted}")
    return acceptance.base_of(folder, accepted)


def ui(current: Session) -> None:
    """Serve MLflow's pages until Ctrl-C."""
    invocation = current.invocation
    port = invocation.numbers("port").get("port")
    if port is not None and port > _LAST_PORT:
        raise UsageError(f"port={port} must be a whole number from 1 to {_LAST_PORT}")
    config = current.config
    uri = tracking.absolute_uri(config.tracking.uri, ROOT)
    charts = tuple(name for name in invocation.options.get("charts", "").split(",") if name)
    selection = web_ui.PageSelection(keys=invocation.arguments, charts=charts)
    web_ui.serve(uri, config.tracking.experiment, port=port, selection=selection, say=say, note=note)
    exit_if_interrupted()


def finished_classifier(folder: RunFolder) -> Result:
    """Return a finished run's result. Raises UsageError: not finished, or no classifier; PacelineError: altered."""
    if not folder.program.is_ours:
        raise UsageError(
            f"run {folder.key} is that of a script, whose network nobody here knows: doit predict takes the runs of "
            "Paceline's own trainer",
            hint=f"its files lie in {folder.path / 'outputs'}",
        )
    key, result = folder.read_key(), folder.read_result()
    if key is None or result is None:
        raise UsageError(
            f"run {folder.key} isn't finished, so it has no final weights", hint=f"doit status {folder.key}"
        )
    check_parts(folder, key, result, ROOT)
    if (stale := folder.stale_because(key.digest)) is not None:
        raise folder.altered_error(run_folder.RESULT, f"no longer says what its files are ({stale})")
    return result


# ------------------------------------------------------------------------------------------- predictions
class ClassifiedImage(NamedTuple):
    """An image's most probable classes with their probabilities, best first; ``error``: why it can't be read, or ''."""

    path: Path
    classes: Sequence[tuple[str, float]]
    error: str

    def as_json(self) -> dict[str, Any]:
        classes = [{"class": name, "probability": probability} for name, probability in self.classes]
        return {"image": str(self.path), **({"error": self.error} if self.error else {}), "top": classes}

    def as_row(self, folder: Path) -> tuple[str, str]:
        """Return the cells of a table; paths in ``folder`` are shown relative to it."""
        classes = "  ".join(f"{name} {probability:.3f}" for name, probability in self.classes)
        shown_path = self.path.relative_to(folder) if self.path.is_relative_to(folder) else self.path
        return str(shown_path), f"can't be read: {self.error}" if self.error else classes


def predict(current: Session) -> None:
    """Classify images. Raises UsageError: no finished classifier, or no image; PacelineError: an unreadable image."""
    folder, paths = _named_images(current)
    result = finished_classifier(folder)
    with waiting(note, "exporting the network, once for its weights"):
        network = exported_file(folder)
    images = _classify(folder, network, paths, current.invocation.numbers("top").get("top", _TOP))
    unreadable, error = [image for image in images if image.error], None
    if unreadable:
        first, count = unreadable[0], f"{len(unreadable)} of {len(images)} images"
        error = PacelineError(f"{first.path} can't be read: {first.error}; {count}")
    if wants_json():
        answer({"key": folder.key, "images": [image.as_json() for image in images]}, error=error)
    say(aligned([image.as_row(invocation.typed_in()) for image in images]))
    if result.synthetic:
        say("SYNTHETIC DATA: the network was trained on noise, so this means nothing", folds=True)
    if error is not None:
        raise error


def _named_images(current: Session) -> tuple[RunFolder, list[Path]]:
    """Return the run (``run=``, the first bare word, or the newest) and the image files."""
    typed = current.invocation
    words, runs_dir = [*typed.arguments], current.config.runs_dir
    key = typed.options.get("run")
    if key is None and words and not _image_path(words[0]).is_file():
        key = words.pop(0)
    if not words:
        raise UsageError("which images? doit predict takes a run and image files", hint="doit predict last cat.jpg")
    folder, images = with_results(index.find(runs_dir, key or LAST)), [_image_path(word) for word in words]
    if not any(image.is_file() for image in images):  # checked now, because the export of the network takes long
        if images[0].is_dir():
            hint = f"doit predict {key or LAST} {shlex.quote(words[0].rstrip('/'))}/*"
            raise UsageError(f"{words[0]} is a folder; doit predict takes image files", hint=hint)
        raise UsageError(f"{words[0]}: there is no such image in {invocation.typed_in()}")
    return folder, images


def _image_path(word: str) -> Path:
    return invocation.typed_in() / Path(word).expanduser()


def _classify(folder: RunFolder, network: Path, images: Sequence[Path], top: int) -> list[ClassifiedImage]:
    """Classify images with an exported network, in a process of its own that imports torch."""
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
    env = {**os.environ, "PYTHONPATH": str(HOME), "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-P", str(_PREDICTOR)]
    with waiting(note, "classifying"):
        done = process.run(argv, input=json.dumps(request).encode(), env=env, timeout_s=_TIMEOUT_S)
    if done.code != 0:
        raise PacelineError(f"the network of run {folder.key} can't be used here: {done.why.splitlines()[-1]}")
    names = dict(enumerate(map(str, manifest.get("classes") or ())))  # some data sets have no names of classes
    return [
        ClassifiedImage(
            path=Path(item["image"]),
            classes=[(names.get(number, str(number)), probability) for number, probability in item.get("top", [])],
            error=item.get("error", ""),
        )
        for item in json.loads(done.stdout)
    ]
