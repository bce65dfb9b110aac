"""Write to MLflow what it doesn't have of a run folder yet: points, parameters, tags, data and files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import program as programs
from pipeline.runs import metrics_file
from pipeline.tracking.description import Description, Progress, describe
from pipeline.tracking.destinations import TrackingState, fingerprint, fingerprints
from pipeline.tracking.points import Chunk, Mark, Point, ReadPosition, final_points, mark_of, nonfinite, read_points
from pipeline.tracking.sent_files import files_at_end, files_at_start, redacted
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.tracking.mlflow_store import Store, StoredRun


class MlflowWriter:
    """Brings one MLflow run up to date, and keeps ``state`` (tracking.json) consistent with it.

    ``run_dir_fd``: a descriptor of ``run_dir``. ``succeeded``: called after every answer of the store; may raise to end
    the pass.
    """

    def __init__(
        self, run_dir: Path, run_dir_fd: int, uri: str, state: TrackingState, succeeded: Callable[[], None]
    ) -> None:
        self.run_dir = run_dir
        self._run_dir_fd = run_dir_fd
        self.uri = uri
        self.state = state
        self._succeeded = succeeded
        self._store: Store | None = None
        self._position = ReadPosition()  # in metrics.jsonl, which each process reads from its beginning
        self._opened: int | None = None  # the attempt that was opened in the store
        self._name = ""  # the run's name in the store
        self._params: Mapping[str, str] = {}  # to be sent with the next points, as ``_tags``
        self._tags: Mapping[str, str] = {}

    def write(self, progress: Progress) -> None:
        """Make one pass. Raises StoreError."""
        inputs = fingerprints(self.run_dir)  # taken first, so that changes during the pass cause another one
        if self._store is None:
            from pipeline.tracking.mlflow_store import Store  # late import: mlflow takes seconds

            self._store = Store(self.uri)
            self._succeeded()
        store, is_new = self._store, self._opened != progress.attempt
        if is_new:
            self._open(store, progress)
        self._log_system_metrics(store)
        self._log(store, progress)
        if is_new:
            self._upload(store, files_at_start(self.run_dir))
            self._opened = progress.attempt
        if progress.ended:
            self._complete(store, progress)
            self.state.finish(inputs, self._run_dir_fd)

    def _open(self, store: Store, progress: Progress) -> None:
        """Find or create the run. After a crash between the two writes of tracking.json it is found by its tag."""
        about = describe(self.run_dir, self.state.nonfinite)
        experiment_id = store.experiment_id(self.state.experiment)
        unsure, self.state.unsure = self.state.unsure, True
        self.state.save(self._run_dir_fd)
        run = store.open_run(experiment_id, about.key, self.state.token, self.state.run_id, about.name, about.start_ms)
        self.state.unsure = unsure
        if run.run_id != self.state.run_id:
            self._position, self.state.marks, self.state.artifacts = ReadPosition(), {}, {}
            self.state.system_offset_bytes, self.state.nonfinite = 0, {}
        if progress.attempt != self.state.attempt or not self.state.marks:
            # Read the last points from the store, which may have taken some without an answer. MLflow ignores equal
            # points, but those of an attempt that repeats steps have other times.
            for key, step in run.last_steps.items():
                known = _mark(self.state.marks.get(key))
                if known != (0, step) and not key.startswith(metrics_file.PREFIX):
                    held = mark_of(store.steps(run.run_id, key))
                    self.state.marks[key] = list(held if known is None else max(held, known))
                    self._succeeded()
        self.state.run_id, self.state.experiment_id, self.state.attempt = run.run_id, experiment_id, progress.attempt
        self._succeeded()  # before the write: another run may have replaced the folder meanwhile
        self.state.save(self._run_dir_fd)
        self._send_description(store, run, about, progress)

    def _send_description(self, store: Store, run: StoredRun, about: Description, progress: Progress) -> None:
        """Send data and status now; parameters and tags follow with the first points."""
        differ = {name: value for name, value in about.params.items() if run.params.get(name, value) != value}
        self._params = {name: value for name, value in about.params.items() if name not in run.params}
        self._tags = {} if progress.ended else dict(about.tags)  # after the end they are sent with the last points
        if differ:
            changed = "; ".join(f"{name}: {run.params[name]} → {value}" for name, value in differ.items())
            self._tags = {**self._tags, "paceline.changed_params": changed[:8000]}
        if about.data is not None and (about.data.name, about.data.digest) not in run.data:
            store.log_data(run.run_id, about.data)
        self._name = run.name
        if not progress.ended and (run.status, run.name) != ("RUNNING", about.name):
            store.set_name(run.run_id, about.name, status="RUNNING")
            self._name = about.name
        self._succeeded()

    def _log(self, store: Store, progress: Progress) -> None:
        """Send new points in full requests, of which the first may be partial; the rest waits for the next pass."""
        path, is_ours = self.run_dir / run_folder.METRICS, programs.of_run(self.run_dir).is_ours
        for number in itertools.count():
            room = max(1, store.items_per_call - len(self._params) - len(self._tags))
            chunk = read_points(path, self._position, room, tests_once=is_ours)  # in a script test/ may be a curve
            if number and chunk.is_last and not progress.ended:
                return
            self._send(store, chunk, ends=chunk.is_last and progress.ended)
            if chunk.is_last:
                return

    def _send(self, store: Store, chunk: Chunk, *, ends: bool) -> None:
        """Send one request, with final figures and tags if the run ``ends``; then update tracking.json."""
        tags, nonfinite_values = self._tags, {**nonfinite(chunk.points), **self.state.nonfinite}
        new = self._unrecorded(chunk.points)
        if ends:
            new += self._unrecorded(final_points(self.run_dir, chunk.position))
            tags = {**tags, **describe(self.run_dir, nonfinite_values).tags}
        if new or self._params or tags:
            store.log(self._run_id, new, self._params, tags)
        self.state.marks |= {point.key: list(point.mark) for point in new}
        self._position, self.state.nonfinite = chunk.position, nonfinite_values
        self._params, self._tags = {}, {}
        self._succeeded()
        if new:
            self.state.save(self._run_dir_fd)

    def _log_system_metrics(self, store: Store) -> None:
        """Send system metrics. No attempt repeats them, and after a lost answer MLflow ignores equal points."""
        path, most = self.run_dir / run_folder.SYSTEM_METRICS, store.items_per_call
        while (chunk := read_points(path, ReadPosition(end_bytes=self.state.system_offset_bytes), most)).points:
            store.log(self._run_id, chunk.points, {}, {})
            self.state.system_offset_bytes = chunk.position.end_bytes
            self._succeeded()
            self.state.save(self._run_dir_fd)
            if chunk.is_last:
                return

    def _unrecorded(self, points: Iterable[Point]) -> list[Point]:
        """Drop points that the store has; an attempt repeats the steps after its checkpoint."""
        known = {key: _mark(mark) for key, mark in self.state.marks.items()}
        return [point for point in points if (mark := known.get(point.key)) is None or point.mark > mark]

    def _complete(self, store: Store, progress: Progress) -> None:
        about = describe(self.run_dir, self.state.nonfinite)
        self._upload(store, files_at_start(self.run_dir) + files_at_end(self.run_dir, progress.attempt))
        if self.state.unsure:
            store.remove_duplicates(str(self.state.experiment_id), about.key, self.state.token, self._run_id)
            self.state.unsure = False
        if about.name != self._name:
            store.set_name(self._run_id, about.name)
            self._name = about.name
        store.set_ended(self._run_id, str(progress.state), progress.end_ms)
        self._succeeded()

    def _upload(self, store: Store, paths: Iterable[Path]) -> None:
        for path in paths:
            name, known = path.relative_to(self.run_dir), fingerprint(path)
            if self.state.artifacts.get(str(name)) != known:
                folder = "logs" if path.suffix == ".log" else str(name.parent)
                with redacted(path) as file:
                    store.log_file(self._run_id, file, None if folder == "." else folder)
                self.state.artifacts[str(name)] = known
                self._succeeded()

    @property
    def _run_id(self) -> str:
        return str(self.state.run_id)


def _mark(raw: Any) -> Mark | None:
    """Parse a mark of tracking.json; None if missing or damaged."""
    match raw:
        case [int(lap), int(step)]:
            return lap, step
    return None
