"""Jobs that trials side by side submit within a moment, as one array of Slurm's: one entry in its queue."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.cluster.launchers.job_folder import OUTPUT
from pipeline.cluster.launchers.slurm_queue import Queue, RefusedError
from pipeline.cluster.launchers.slurm_script import NAME_PREFIX, Job, array_script, script
from pipeline.core import cache
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.files import write_atomic

ELEMENT = "array"
"""The file in a job's folder that says which element of which array it is: ``NAME NUMBER``."""
_QUIET_S = 0.5  # nobody else has submitted anything for so long
_LONGEST_S = 3.0


@dataclass
class _Batch:
    """Jobs that wait to be submitted together."""

    secrets: Mapping[str, str]
    jobs: list[Job] = field(default_factory=list)
    newest: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    ends: list[str | PacelineError] = field(default_factory=list)  # each job's id, or why it has none

    def takes(self, job: Job, told: Mapping[str, str]) -> bool:
        """Whether the elements would be alike: an array has one script and one environment."""
        first = self.jobs[0]
        return told == self.secrets and replace(job, name=first.name, folder=first.folder) == first


class Arrays:
    """Submits jobs, those of several threads together. Safe to use from threads.

    Args:
        side_by_side: how many trials run at a time; 1: nobody is waited for.
    """

    def __init__(self, queue: Queue, side_by_side: int = 1) -> None:
        self.queue, self._most = queue, side_by_side
        self._lock = threading.Lock()
        self._batch: _Batch | None = None

    def submit(self, job: Job, told: Mapping[str, str]) -> str:
        """The job's id, ``ARRAY_NUMBER`` for an element. Raises HostError: Slurm refuses it.

        Args:
            told: variables of the job's environment.
        """
        if self._most == 1:
            return self._alone(job, told)
        with self._lock:
            if self._batch is None or not self._batch.takes(job, told):
                self._batch = _Batch(secrets=told)
            batch = self._batch
            batch.jobs.append(job)
            batch.newest = time.monotonic()
            number = len(batch.jobs) - 1
        if number == 0:
            self._lead(batch)
        batch.done.wait()
        end = batch.ends[number]
        if isinstance(end, PacelineError):
            raise HostError(end.what, hint=end.hint)
        return end

    def _lead(self, batch: _Batch) -> None:
        began = time.monotonic()
        try:
            while len(batch.jobs) < self._most and time.monotonic() - began < _LONGEST_S:
                if time.monotonic() - batch.newest >= _QUIET_S:
                    break
                time.sleep(0.02)
            with self._lock:
                if self._batch is batch:
                    self._batch = None
            batch.ends = self._submitted(batch)
        except PacelineError as error:
            batch.ends = [error] * len(batch.jobs)
        except BaseException as error:
            batch.ends = [HostError(f"the job could not be submitted: {error}")] * len(batch.jobs)
            raise
        finally:
            batch.done.set()

    def _submitted(self, batch: _Batch) -> list[str | PacelineError]:
        if len(batch.jobs) > 1:
            try:
                return [*self._together(batch)]
            except RefusedError:  # a site may allow no array, or fewer jobs than this one has elements
                for job in batch.jobs:
                    (Path(job.folder) / ELEMENT).unlink(missing_ok=True)
        return [self._alone_or_why(job, batch.secrets) for job in batch.jobs]

    def _alone_or_why(self, job: Job, told: Mapping[str, str]) -> str | PacelineError:
        try:
            return self._alone(job, told)
        except PacelineError as error:
            return error

    def _alone(self, job: Job, told: Mapping[str, str]) -> str:
        folder = Path(job.folder)
        output = str(folder / OUTPUT).replace("%", "%%")
        return self.queue.submit(script(job), folder=str(folder.parents[1]), output=output, secrets=told)

    def _together(self, batch: _Batch) -> list[str]:
        name = f"{NAME_PREFIX}array-{secrets.token_hex(4)}"
        runs = Path(batch.jobs[0].folder).parents[2]
        outputs = runs / cache.FOLDER / "arrays" / name
        _forget_gone(outputs.parent)
        outputs.mkdir(parents=True)  # sbatch takes one pattern for the outputs of all elements
        for number, job in enumerate(batch.jobs):
            (outputs / str(number)).symlink_to(Path(job.folder) / OUTPUT)
            write_atomic(Path(job.folder) / ELEMENT, f"{name} {number}")
        pattern = f"{outputs}/".replace("%", "%%") + "%a"
        text = array_script(batch.jobs, name)
        array = self.queue.submit(text, folder=str(runs), output=pattern, secrets=batch.secrets)
        return [f"{array}_{number}" for number in range(len(batch.jobs))]


def _forget_gone(arrays: Path) -> None:
    """Remove what leads to outputs of runs that are all removed."""
    for folder in arrays.glob("*/"):
        with suppress(OSError):  # another command removes it, too
            if not any(link.exists() for link in folder.iterdir()):
                shutil.rmtree(folder)
