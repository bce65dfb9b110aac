"""Hydra's plug-ins: the launcher of `python -m pipeline --multirun`, and the way to Paceline's own configurations.

Every application of this environment imports them, so nothing of Paceline is imported here, and with it the project.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PacelineLauncher(Launcher):
    """All jobs of a multirun as one sweep: the same trials, keys and folder as `doit sweep` with these words."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """The words as they were typed, for the sweep's own record, and the application that trains the jobs."""
        self._typed = list(config.hydra.overrides.task)
        self._application: Any = sys.modules[task_function.__module__]  # pipeline/__main__.py

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Results lie in the run folders; a failed trial ends the command with code 1, wrong words with 3."""
        self._application.train_jobs([tuple(job) for job in job_overrides], self._typed)
        return []


class PacelineSearchPath(SearchPathPlugin):
    """Paceline's configurations behind a project's own conf/.

    It does nothing for other applications: they haven't imported what composes here.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """The first folder is the application's own (``initialize_config_dir``), or --config-path is in its place."""
        compose = sys.modules.get("pipeline.config.compose")  # of an older commit, perhaps, which is made again
        for folder in getattr(compose, "CONF_DIRS", ())[1:]:
            search_path.append("paceline", f"file://{folder}")
