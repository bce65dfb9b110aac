"""Hydra's door to Paceline's sweeps: the launcher that `python -m pipeline --multirun` hands its jobs to.

Hydra finds launchers only under the package of this name, and every application of this environment imports it. So the
imports of Paceline stand in the function: a script of one's own must not load them, and with them its project.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PacelineLauncher(Launcher):
    """All jobs of a multirun as one sweep: the same trials, keys and folder as `doit sweep` with these words."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """The words as they were typed, for the sweep's own record."""
        self._typed = list(config.hydra.overrides.task)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Results lie in the run folders; a failed trial ends the command with code 1, wrong words with 3."""
        from pipeline.cli.commands.sweep import run_jobs
        from pipeline.cli.loader import leave
        from pipeline.cli.output import outlive_reader
        from pipeline.core import masking

        masking.outlive(outlive_reader)
        try:
            run_jobs([tuple(job) for job in job_overrides], self._typed)
        except (Exception, SystemExit) as error:  # Hydra would print a traceback, or end well: sys.exit(0)
            leave(error)
        return []
