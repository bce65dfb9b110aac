"""Hydra's way to Paceline's configurations from a project that isn't Paceline's clone: they come behind its own conf/.

Hydra finds plug-ins only under the package of this name, and has every application of this environment ask them.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class PacelineSearchPath(SearchPathPlugin):
    """Does nothing for other applications: they haven't imported what composes here."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """The first folder is the application's own (``initialize_config_dir``), or --config-path is in its place."""
        compose = sys.modules.get("pipeline.config.compose")  # of an older commit, perhaps, which is made again
        for folder in getattr(compose, "CONF_DIRS", ())[1:]:
            search_path.append("paceline", f"file://{folder}")
