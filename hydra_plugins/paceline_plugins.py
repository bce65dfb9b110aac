"""Two plug-ins for Hydra: the launcher of `python -m pipeline --multirun`, and the search path to Paceline's conf/.

Hydra imports this module in every Hydra application of this Python environment. So it imports nothing of Paceline.
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
    """Trains all jobs of a multirun as one sweep: the same trials, keys and folder as `doit sweep` with these words."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the typed words, for the record of the sweep, and the application that will train the jobs."""
        self._typed = list(config.hydra.overrides.task)
        self._application: Any = sys.modules[task_function.__module__]  # pipeline/__main__.py

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Train the jobs; exit with 1 if a trial fails, with 3 for wrong words. Results are in the run folders."""
        self._application.train_jobs([tuple(job) for job in job_overrides], self._typed)
        return []


class PacelineSearchPath(SearchPathPlugin):
    """Lets Hydra search Paceline's conf/ after the project's own, and does nothing in other applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append all configuration folders but the first, which Hydra has already."""
        # an application that isn't Paceline's has not imported this module; the code of a run that `doit reproduce`
        # repeats may be older, without CONF_DIRS
        compose = sys.modules.get("pipeline.config.compose")
        for folder in getattr(compose, "CONF_DIRS", ())[1:]:
            search_path.append("paceline", f"file://{folder}")
