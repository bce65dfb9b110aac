"""Addresses of MLflow's pages that open on what is wanted, and the state that they refer to. Pure.

MLflow's page keeps the state of a shared view in a tag of the experiment, ``mlflow.sharedViewState.<name>``: columns of
the table, order, which charts are shown. An address names it with ``viewStateShareKey`` (read in MLflow 3.17's page).
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import quote, urlencode

from pipeline.core.web_address import opener
from pipeline.tracking.address import recorder_env

_TIMEOUT_S = 30.0  # a server that has just started on a busy computer
_MOST_BYTES, _PART_BYTES = 256 << 20, 1 << 20
_MOST_RUNS = 100  # as MLflow's page itself shows at first; of a thousand the answer takes 4 s of a core and has 11 MB
_API = "/api/2.0/mlflow"
_UNQUOTED = re.compile(r"\W")


class Server:
    """A tracking server at ``url``, asked with the login of ``uri`` or of the environment.

    Every method raises OSError: it doesn't answer, or refuses; ValueError, KeyError, TypeError: in words of its own.
    """

    def __init__(self, url: str, uri: str = "") -> None:
        self.url = url
        told = {**os.environ, **(recorder_env(uri) if uri else {})}
        self._headers = _login(told)

    def experiment_id(self, name: str) -> str:
        answer = self._ask(f"{_API}/experiments/get-by-name?{urlencode({'experiment_name': name})}")
        return str(answer["experiment"]["experiment_id"])

    def runs(self, experiment_id: str, key: str = "") -> list[Shown]:
        """The newest runs whose keys begin with ``key``, up to 100."""
        asked: dict[str, Any] = {"experiment_ids": [experiment_id], "max_results": _MOST_RUNS}
        if key:
            asked["filter"] = f"tags.`paceline.run_key` LIKE '{_UNQUOTED.sub('', key)}%'"
        answer = self._ask(f"{_API}/runs/search", asked)
        return [_shown(run) for run in answer.get("runs", [])]

    def set_view(self, experiment_id: str, name: str, state: str) -> None:
        """Keep a view that addresses can refer to."""
        self._ask(
            f"{_API}/experiments/set-experiment-tag",
            {"experiment_id": experiment_id, "key": VIEW_TAG + name, "value": state},
        )

    def _ask(self, path: str, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if value is None else json.dumps(value).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **self._headers})
        with opener(self.url).open(asked, timeout=_TIMEOUT_S) as answer:  # http(s) only: a checked tracking.uri
            found: dict[str, Any] = json.loads(_whole(answer) or b"{}")
        return found


def _whole(answer: IO[bytes]) -> bytes:
    """Raises TimeoutError for an answer without end."""
    data, until = bytearray(), time.monotonic() + _TIMEOUT_S
    while part := answer.read1(_PART_BYTES):  # type: ignore[attr-defined]
        data += part
        if len(data) > _MOST_BYTES or time.monotonic() > until:
            raise TimeoutError(f"its answer has no end: given up after {len(data):,} bytes")
    return bytes(data)


def _login(told: Mapping[str, str]) -> dict[str, str]:
    token, user = told.get("MLFLOW_TRACKING_TOKEN"), told.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if not user:
        return {}
    login = f"{user}:{told.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
    return {"Authorization": f"Basic {base64.b64encode(login).decode()}"}


def _shown(run: Mapping[str, Any]) -> Shown:
    data = run.get("data", {})
    tags = {tag["key"]: tag.get("value", "") for tag in data.get("tags", [])}
    return Shown(
        run_id=run["info"]["run_id"],
        key=tags.get("paceline.run_key", ""),
        metrics=[metric["key"] for metric in data.get("metrics", [])],
        params={param["key"]: param.get("value", "") for param in data.get("params", [])},
    )


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
