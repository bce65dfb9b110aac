"""What one pass of the recorder writes: everything that the run folder holds and MLflow doesn't yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core import program as programs
from pipeline.runs import system_metrics
from pipeline.tracking import artifacts, state
from pipeline.tracking.description import Description, Progress, describe
from pipeline.tracking.points import Point, final_points, nonfinite, one_off, read_points
from pipeline.tracking.state import TrackingState, fingerprint, fingerprints

if TYPE_CHECKING:
    from pipeline.tracking.store import Store

_POINTS_PER_READ = 1000


class Writer:
    """Brings one MLflow run up to date and keeps ``state`` (tracking.json) in step.

    ``folder`` is a descriptor of ``run_dir``. ``succeeded`` is called after every answer of the store and may raise to
    end the pass.
    """

    def __init__(
        self, run_dir: Path, folder: int, uri: str, state: TrackingState, succeeded: Callable[[], None]
    ) -> None:
        self.run_dir = run_dir
        self._folder = folder
        self.uri = uri
        self.state = state
        self._succeeded = succeeded
        self._store: Store | None = None
        self._opened: int | None = None  # the attempt that the store knows of

    def write(self, now: Progress) -> None:
        inputs = fingerprints(self.run_dir)  # taken first: what changes during the pass makes another one
        store = self._connected()
        if self._opened != now.attempt:
            self._open(store, now)
        self._log_metrics(store)
        self._log_system_metrics(store)
        if now.ended:
            self._complete(store, now)
            self.state.inputs = inputs
            self.state.state = state.DONE
            self.state.message = ""
            self.state.save(self._folder)

    def _connected(self) -> Store:
        if self._store is None:
            from pipeline.tracking.store import Store

            self._store = Store(self.uri)
            self._succeeded()
        return self._store

    def _open(self, store: Store, now: Progress) -> None:
        """Find or make the run. A crash between the two writes of tracking.json finds it again by its tag."""
        self.state.save(self._folder)
        about = self._describe()
        experiment_id = store.experiment_id(self.state.experiment)
        run_id = store.open_run(
            experiment_id, about.key, self.state.token, self.state.run_id, about.name, about.start_ms
        )
        if run_id != self.state.run_id:
            self.state.metrics_offset_bytes, self.state.last_steps, self.state.artifacts = 0, {}, {}
            self.state.system_offset_bytes, self.state.nonfinite = 0, {}
        if now.attempt != self.state.attempt:  # the new attempt may have cut metrics.jsonl back to its checkpoint
            self.state.metrics_offset_bytes = 0
        self.state.run_id, self.state.experiment_id, self.state.attempt = run_id, experiment_id, now.attempt
        self._succeeded()  # before it writes: while the store worked, another run may have taken the folder's place
        self.state.save(self._folder)
        self._log_description(store, run_id, about)
        if not now.ended:
            store.set_running(run_id, about.name)
        self._upload(store, run_id, artifacts.early(self.run_dir))
        self._opened = now.attempt

    def _log_description(self, store: Store, run_id: str, about: Description) -> None:
        refused, differ = store.log_params(run_id, about.params)
        tags = dict(about.tags)
        if differ:
            changed = "; ".join(f"{name}: {values}" for name, values in differ.items())
            tags["paceline.changed_params"] = changed[:8000]
        refused += store.set_tags(run_id, tags)
        if about.data is not None:
            refused += store.log_data(run_id, about.data)
        self._note(f"MLflow refused {name}" for name in refused)
        self._succeeded()

    def _log_metrics(self, store: Store) -> None:
        path = self.run_dir / "metrics.jsonl"
        while True:
            chunk = read_points(path, self.state.metrics_offset_bytes, _POINTS_PER_READ)
            if chunk.end_bytes == self.state.metrics_offset_bytes:
                return
            self._log_points(store, one_off(chunk.points) if self._tests_once else chunk.points)
            if chunk.bad_lines:
                self._note([f"{chunk.bad_lines} lines of metrics.jsonl before byte {chunk.end_bytes} make no sense"])
            self.state.metrics_offset_bytes = chunk.end_bytes
            self._succeeded()
            self.state.save(self._folder)

    def _log_system_metrics(self, store: Store) -> None:
        """No attempt takes any of them back."""
        path = self.run_dir / system_metrics.FILE
        while (chunk := read_points(path, self.state.system_offset_bytes, _POINTS_PER_READ)).points:
            self._log_points(store, chunk.points)
            self.state.system_offset_bytes = chunk.end_bytes
            self._succeeded()
            self.state.save(self._folder)

    def _log_points(self, store: Store, points: Iterable[Point]) -> None:
        new = [point for point in points if point.step > self.state.last_steps.get(point.key, -1)]
        if new:
            self._note(f"MLflow refused {name}" for name in store.log_points(self._run_id, new))
        self.state.nonfinite = {**nonfinite(new), **self.state.nonfinite}
        for point in new:
            self.state.last_steps[point.key] = max(point.step, self.state.last_steps.get(point.key, -1))

    def _complete(self, store: Store, now: Progress) -> None:
        self._log_points(store, final_points(self.run_dir, self._curves()))
        about = self._describe()
        self._note(f"MLflow refused {name}" for name in store.set_tags(self._run_id, about.tags))
        self._succeeded()
        self._upload(store, self._run_id, artifacts.early(self.run_dir) + artifacts.late(self.run_dir, now.attempt))
        store.remove_duplicates(str(self.state.experiment_id), about.key, self.state.token, self._run_id)
        store.set_ended(self._run_id, about.name, str(now.state), now.end_ms)
        self._succeeded()

    def _upload(self, store: Store, run_id: str, paths: Iterable[Path]) -> None:
        for path in paths:
            name = path.relative_to(self.run_dir)
            print_of_file = fingerprint(path)
            if self.state.artifacts.get(str(name)) == print_of_file:
                continue
            folder = "logs" if path.suffix == ".log" else str(name.parent)
            with artifacts.sendable(path) as file:
                store.log_file(run_id, file, None if folder == "." else folder)
            self.state.artifacts[str(name)] = print_of_file
            self._succeeded()

    def _describe(self) -> Description:
        return describe(self.run_dir, self.state.nonfinite)

    def _curves(self) -> set[str]:
        """Metrics that were logged while the run went on; what stands at step 0 already is a one-off figure."""
        return {name for name, step in self.state.last_steps.items() if step > 0}

    @property
    def _tests_once(self) -> bool:
        """Whether the run's test/ metrics are measured once, after the training; a script's may be a curve."""
        return programs.of_run(self.run_dir).is_ours

    @property
    def _run_id(self) -> str:
        return str(self.state.run_id)

    def _note(self, notes: Iterable[str]) -> None:
        self.state.notes += [note for note in notes if note not in self.state.notes]
