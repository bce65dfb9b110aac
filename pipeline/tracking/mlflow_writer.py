"""The writer of MLflow's record: sends what MLflow doesn't have of a run folder yet, in passes of the recorder.

tracking.json says how far the record is. It is written after each answer, so that after a kill nothing is sent that
MLflow would show twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import program as programs
from pipeline.runs import metrics_file
from pipeline.tracking.description import Description, Progress, describe
from pipeline.tracking.destinations import TrackingState, input_stamps, stamp_of
from pipeline.tracking.points import Chunk, Mark, Point, ReadPosition, final_points, mark_of, nonfinite, read_points
from pipeline.tracking.sent_files import files_at_end, files_at_start, redacted
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.tracking.mlflow_store import Store, StoredRun


class MlflowWriter:
    """Brings one MLflow run up to date, and keeps ``state`` (tracking.json) consistent with it.

    ``succeeded`` is called after every answer of the store, and may raise to end the pass.
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
        self._params: Mapping[str, str] = {}  # these and the tags are sent with the next points
        self._tags: Mapping[str, str] = {}

    def write(self, progress: Progress) -> None:
        """Make one pass. Raises StoreError."""
        inputs = input_stamps(self.run_dir)  # taken first, so that changes during the pass cause another one
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
        """Find or create the run in the store, and read from it which points it has."""
        description = describe(self.run_dir, self.state.nonfinite)
        experiment_id = store.experiment_id(self.state.experiment)
        # If this process dies before the second write of tracking.json, the run is found again by its tag. A creation
        # without an answer may have left a duplicate, for which `_complete` looks.
        was_unsure, self.state.unsure = self.state.unsure, True
        self.state.save(self._run_dir_fd)
        run = store.open_run(
            experiment_id, description.key, self.state.token, self.state.run_id, description.name, description.start_ms
        )
        self.state.unsure = was_unsure
        # the store has lost the run that tracking.json describes, so all is sent again
        if run.run_id != self.state.run_id:
            self._position, self.state.marks, self.state.artifacts = ReadPosition(), {}, {}
            self.state.system_offset_bytes, self.state.nonfinite = 0, {}
        if progress.attempt != self.state.attempt or not self.state.marks:
            # The store may have taken points without its answer having arrived. MLflow ignores equal points, but a new
            # attempt repeats steps at other times. So ask the store for its last points, unless they are as known here.
            for key, step in run.last_steps.items():
                mark = _mark(self.state.marks.get(key))
                if mark != (0, step) and not key.startswith(metrics_file.PREFIX):
                    stored_mark = mark_of(store.steps(run.run_id, key))
                    self.state.marks[key] = list(stored_mark if mark is None else max(stored_mark, mark))
                    self._succeeded()
        self.state.run_id, self.state.experiment_id, self.state.attempt = run.run_id, experiment_id, progress.attempt
        self._succeeded()  # before the write: another run may have replaced the folder meanwhile
        self.state.save(self._run_dir_fd)
        self._send_description(store, run, description, progress)

    def _send_description(self, store: Store, run: StoredRun, description: Description, progress: Progress) -> None:
        """Send data and status now; parameters and tags follow with the first points."""
        differing = {name: value for name, value in description.params.items() if run.params.get(name, value) != value}
        self._params = {name: value for name, value in description.params.items() if name not in run.params}
        self._tags = {} if progress.ended else dict(description.tags)  # after the end the last points bring them
        # MLflow refuses to change a parameter, so a tag shows the new value
        if differing:
            changed = "; ".join(f"{name}: {run.params[name]} → {value}" for name, value in differing.items())
            self._tags = {**self._tags, "paceline.changed_params": changed[:8000]}  # MLflow takes no more
        if description.data is not None and (description.data.name, description.data.digest) not in run.data:
            store.log_data(run.run_id, description.data)
        self._name = run.name
        if not progress.ended and (run.status, run.name) != ("RUNNING", description.name):
            store.set_name(run.run_id, description.name, status="RUNNING")
            self._name = description.name
        self._succeeded()

    def _log(self, store: Store, progress: Progress) -> None:
        """Send new points. While the run goes on, only the first request of a pass may be less than full."""
        # the built-in trainer tests once; in a script test/ may be a curve
        path, tests_once = self.run_dir / run_folder.METRICS, programs.of_run(self.run_dir).is_ours
        for number in itertools.count():
            free_items = max(1, store.items_per_call - len(self._params) - len(self._tags))
            chunk = read_points(path, self._position, free_items, tests_once=tests_once)
            if number and chunk.is_last and not progress.ended:  # the rest waits for the next pass
                return
            self._send(store, chunk, ends=chunk.is_last and progress.ended)
            if chunk.is_last:
                return

    def _send(self, store: Store, chunk: Chunk, *, ends: bool) -> None:
        """Send one request, then update tracking.json. ``ends``: it is the run's last, with final figures and tags."""
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
        """Drop points that the store has, because an attempt repeats the steps after its checkpoint."""
        marks = {key: _mark(mark) for key, mark in self.state.marks.items()}
        return [point for point in points if (mark := marks.get(point.key)) is None or point.mark > mark]

    def _complete(self, store: Store, progress: Progress) -> None:
        """Upload the files and set the final name and status, after the run's last point was sent."""
        description = describe(self.run_dir, self.state.nonfinite)
        self._upload(store, files_at_start(self.run_dir) + files_at_end(self.run_dir, progress.attempt))
        if self.state.unsure:
            store.remove_duplicates(str(self.state.experiment_id), description.key, self.state.token, self._run_id)
            self.state.unsure = False
        if description.name != self._name:
            store.set_name(self._run_id, description.name)
            self._name = description.name
        store.set_ended(self._run_id, str(progress.state), progress.end_ms)
        self._succeeded()

    def _upload(self, store: Store, paths: Iterable[Path]) -> None:
        for path in paths:
            name, current = path.relative_to(self.run_dir), stamp_of(path)
            if self.state.artifacts.get(str(name)) != current:
                folder = "logs" if path.suffix == ".log" else str(name.parent)
                with redacted(path) as file:
                    store.log_file(self._run_id, file, None if folder == "." else folder)
                self.state.artifacts[str(name)] = current
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
