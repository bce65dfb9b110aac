"""Addresses of MLflow's pages that open on what is wanted, and the state that they refer to. Pure.

MLflow's page keeps the state of a shared view in a tag of the experiment, ``mlflow.sharedViewState.<name>``: columns of
the table, order, which charts are shown. An address names it with ``viewStateShareKey`` (read in MLflow 3.17's page).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

VIEW_TAG = "mlflow.sharedViewState."
_FIRST_METRICS = ("val/accuracy", "test/accuracy", "val/loss", "images_per_s")
_MAX_METRICS, _MAX_PARAMS = 5, 8
_ATTRIBUTES = ("Dataset", "Duration")
_TRAINING = {"workflowType": "machine_learning"}  # else the page may take runs for evaluations of an agent


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One recorded run, as far as a table's columns depend on it."""

    run_id: str
    key: str
    metrics: Sequence[str]
    params: Mapping[str, str] = field(default_factory=dict)


def view(runs: Sequence[Shown], charts: Sequence[str] = (), *, only: bool = False) -> str:
    """The shared view of ``runs`` as JSON: columns of the metrics that matter and of the parameters that differ.

    ``charts``: show these metrics' charts alone. ``only``: list these runs alone; the page takes no filter from an
    address that names a view.
    """
    metrics = dict.fromkeys(name for run in runs for name in sorted(run.metrics))
    first = [name for name in (*charts, *_FIRST_METRICS) if name in metrics]
    if not first:
        first = [name for name in metrics if not name.startswith("system/")]
    names = list(dict.fromkeys(first))[:_MAX_METRICS]
    state: dict[str, Any] = {
        "selectedColumns": [
            *(f"attributes.`{name}`" for name in _ATTRIBUTES),
            *(f"metrics.`{name}`" for name in names),
            *(f"params.`{name}`" for name in differing(runs)[:_MAX_PARAMS]),
        ]
    }
    if charts:
        state["chartsSearchFilter"] = "|".join(charts)
    if only:
        state["searchFilter"] = f"attributes.run_id IN ({', '.join(repr(run.run_id) for run in runs)})"
    return json.dumps(state, sort_keys=True)


def differing(runs: Sequence[Shown]) -> list[str]:
    """Parameters that two of the runs have different values of."""
    names = dict.fromkeys(name for run in runs for name in run.params)
    return [name for name in names if len({run.params.get(name) for run in runs}) > 1]


def runs_page(url: str, experiment_id: str, view_name: str, *, charts: bool = True) -> str:
    """The experiment's page with the charts, or the table, of a view ('': none)."""
    told = {**_TRAINING, **({"viewStateShareKey": view_name} if view_name else {})}
    if charts:
        told["compareRunsMode"] = "CHART"
    return f"{url}/#/experiments/{experiment_id}/runs?{urlencode(told, quote_via=quote)}"


def run_page(url: str, experiment_id: str, run_id: str) -> str:
    """The page of one run."""
    return f"{url}/#/experiments/{experiment_id}/runs/{run_id}?{urlencode(_TRAINING)}"


def compare_page(url: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """The page that shows parameters and metrics of runs side by side."""
    told = {"runs": json.dumps(list(run_ids)), "experiments": json.dumps([experiment_id]), **_TRAINING}
    return f"{url}/#/compare-runs?{urlencode(told, quote_via=quote)}"
