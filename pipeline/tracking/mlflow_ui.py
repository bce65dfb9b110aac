"""MLflow's web UI for `doit ui`: starts its server, and makes addresses of pages that open on selected runs.

Which columns and charts a page shows is stored as a shared view, a tag of the experiment. The parameter
``viewStateShareKey`` of an address refers to it (as of MLflow 3.17).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from pipeline.core.errors import PacelineError
from pipeline.core.files import temporary_prefix
from pipeline.core.processes import process
from pipeline.core.processes.threads import waiting
from pipeline.tracking.destinations import (
    database_login,
    has_credentials,
    is_here,
    prepare_command,
    public_uri,
    recorder_env,
    redact,
    sqlite_path,
)

_START_TIMEOUT_S = 600.0
_PREPARE_TIMEOUT_S = 600.0  # on a busy host a new database's tables take minutes
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_USUAL_PORT = 5000
_HOST = "127.0.0.1"
_LOG_LINES = 15
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # reduces the start to a third of the time
}


@dataclass(frozen=True, kw_only=True)
class PageSelection:
    """What a page shows: the runs of these keys, and charts of these metrics (empty: all)."""

    keys: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()


def serve(
    uri: str,
    experiment: str,
    *,
    port: int | None = None,
    selection: PageSelection | None = None,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Run a server for this computer until Ctrl-C or SIGTERM; for a tracking server, only print addresses of its pages.

    ``say`` receives the addresses of the runs' pages, ``note`` progress. Raises PacelineError: the store can't be
    opened; the server ends, doesn't answer, or has no run of a key.
    """
    if uri.startswith(("http://", "https://")):
        url = public_uri(uri)
        links = addresses(url, experiment, selection, uri)
        say("\n  ".join([f"the tracking server shows the runs itself: {url}", *links]))
        return
    argv, env, url = server_command(uri, port)
    prepare(uri, note)
    run_server(argv, env, url, lambda: addresses(url, experiment, selection), say=say, note=note)


# -------------------------------------------------------------------------------------- server process
def server_command(uri: str, port: int | None) -> tuple[list[str], dict[str, str], str]:
    """Return the argv of a server for this computer, its additional environment, and its URL.

    A database's login is only passed in the environment. Raises PacelineError: the port is taken.
    """
    chosen = _free_port(port)
    argv = [sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(chosen), "--workers", "1"]
    env = dict(_SETTINGS)
    if database := sqlite_path(uri):
        argv += ["--artifacts-destination", str(database.parent / "mlartifacts")]
    address = database_login(uri, os.environ, Path.home())
    if has_credentials(address):
        env["MLFLOW_BACKEND_STORE_URI"] = address
    else:
        argv += ["--backend-store-uri", address]
    return argv, env, f"http://{_HOST}:{chosen}"


def _free_port(port: int | None) -> int:
    """Return ``port``; if None, MLflow's default one if it is free, else any free one. Raises PacelineError."""
    for candidate in (_USUAL_PORT, 0) if port is None else (port,):
        try:
            with socket.create_server((_HOST, candidate)) as probe:
                return int(probe.getsockname()[1])
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]  # create_server adds the address
    raise PacelineError(f"the MLflow UI can't listen on {_HOST}, port {port}: {reason}", hint="doit ui port=5001")


def prepare(uri: str, note: Callable[[str], None]) -> None:
    """Create the schema before the server's processes open the store. Raises PacelineError."""
    env = process.child_environment(recorder_env(uri))
    with waiting(note, f"opening {public_uri(uri)}"):
        ended = process.run(prepare_command(uri), timeout_s=_PREPARE_TIMEOUT_S, env=env)
    if ended.code != 0:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.code}"]  # the last one follows a traceback
        raise PacelineError(f"the store {public_uri(uri)} cannot be opened: {lines[-1]}")


def run_server(
    argv: list[str],
    env: dict[str, str],
    url: str,
    links: Callable[[], list[str]],
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Run a server until Ctrl-C or SIGTERM; say ``links`` once it answers. Raises PacelineError."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server must not outlive the command
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-ui")) as folder:
        log = Path(folder) / "server.log"
        server = process.guarded(argv, env={**os.environ, **env}, log=log)  # ends even if this process is killed
        assert server.stdin is not None
        try:
            note("starting the MLflow UI; Ctrl-C ends it")
            with waiting(note, "starting the MLflow UI"):
                _wait_until_up(url, lambda: server.poll() is None, log)
            if server.poll() is None:
                say("\n  ".join([f"ready: {url}", *links()]))
            server.wait()
            raise PacelineError(f"the MLflow server ended with exit code {server.returncode}:\n{_tail(log)}")
        except KeyboardInterrupt:
            note("the MLflow UI has ended")
        finally:
            server.stdin.close()  # then the guard process ends the server and its workers
            server.wait()


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    """Return the answer to a request. A proxy of the environment (``http_proxy``) is used, but not for this host."""
    handlers = [urllib.request.ProxyHandler({})] if is_here(request.full_url) else []
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)


def _wait_until_up(url: str, is_alive: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while is_alive():
        with contextlib.suppress(OSError):
            _open(urllib.request.Request(f"{url}/health"), _ANSWER_TIMEOUT_S).close()
            return
        if time.monotonic() > until:
            raise PacelineError(f"{url} did not answer within {_START_TIMEOUT_S:g} s:\n{_tail(log)}")
        time.sleep(_POLL_S)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return redact("\n".join(lines[-_LOG_LINES:]))


# ------------------------------------------------------------------------------------------- addresses
def addresses(url: str, experiment: str, selection: PageSelection | None = None, uri: str = "") -> list[str]:
    """Return lines with the addresses of charts, table and comparison of the selected runs.

    Empty if nothing is recorded. Raises PacelineError: the server has no run of a key.
    """
    selection, server = selection or PageSelection(), Server(url, uri)
    try:
        experiment_id = server.experiment_id(experiment)
        runs_by_id = {run.run_id: run for key in selection.keys or ("",) for run in server.runs(experiment_id, key)}
    except (OSError, ValueError, KeyError, TypeError):  # no experiment yet, or the server requires a login
        return []
    # compare the keys again, because the server's LIKE may match others too
    chosen = [run for run in runs_by_id.values() if run.key.startswith(selection.keys or "")]
    for key in selection.keys:
        if not any(run.key.startswith(key) for run in chosen):
            is_port = key.isdecimal() and len(key) in (4, 5)
            hint = f"doit ui --port {key}" if is_port else f"doit record {key}"
            raise PacelineError(f"no run {key} in the MLflow experiment {experiment!r}", hint=hint)
    view = shared_view(chosen, selection.charts, only=bool(selection.keys))
    name = f"paceline-{hashlib.sha256(view.encode()).hexdigest()[:12]}"
    try:
        server.set_view(experiment_id, name, view)
    except (OSError, ValueError):  # the login may only read: the pages open without the view
        name = ""
    return pages(url, experiment_id, name, [run.run_id for run in chosen] if selection.keys else [])


def pages(url: str, experiment_id: str, view_name: str, run_ids: Sequence[str]) -> list[str]:
    """Return lines with the addresses of charts and table in a shared view ('': none), and of the page of the runs."""
    runs_page = f"{url}/#/experiments/{experiment_id}/runs"
    shared = {"viewStateShareKey": view_name} if view_name else {}
    lines = [f"charts: {_page(runs_page, **shared, compareRunsMode='CHART')}", f"table: {_page(runs_page, **shared)}"]
    if len(run_ids) == 1:
        lines.append(f"run: {_page(f'{runs_page}/{run_ids[0]}')}")
    if len(run_ids) > 1:
        compared = {"runs": json.dumps([*run_ids]), "experiments": json.dumps([experiment_id])}
        lines.append(f"side by side: {_page(f'{url}/#/compare-runs', **compared)}")
    return lines


_TIMEOUT_S = 30.0  # generous, for a server that has just started on a busy host
_MOST_RUNS = 100  # as on MLflow's page; an answer with a thousand takes 4 s of CPU time and 11 MB
_API = "/api/2.0/mlflow"
_UNQUOTED = re.compile(r"\W")


class Server:
    """A tracking server at ``url``, accessed with the login of ``uri`` or of the environment.

    Every method raises OSError: no answer, or a refusal; ValueError, KeyError, TypeError: an unexpected answer.
    """

    def __init__(self, url: str, uri: str = "") -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        environment = {**os.environ, **(recorder_env(uri) if uri else {})}
        if token := environment.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        elif user := environment.get("MLFLOW_TRACKING_USERNAME"):
            login = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"

    def experiment_id(self, name: str) -> str:
        answer = self._ask(f"experiments/get-by-name?{urlencode({'experiment_name': name})}")
        return str(answer["experiment"]["experiment_id"])

    def runs(self, experiment_id: str, key: str = "") -> list[RecordedRun]:
        """Return the newest runs whose keys begin with ``key``, up to 100."""
        query: dict[str, Any] = {"experiment_ids": [experiment_id], "max_results": _MOST_RUNS}
        if key:
            query["filter"] = f"tags.`paceline.run_key` LIKE '{_UNQUOTED.sub('', key)}%'"
        return [_recorded_run(run) for run in self._ask("runs/search", query).get("runs", [])]

    def set_view(self, experiment_id: str, name: str, view: str) -> None:
        """Store a shared view, to which addresses refer by its name."""
        tag = {"experiment_id": experiment_id, "key": _VIEW_TAG + name, "value": view}
        self._ask("experiments/set-experiment-tag", tag)

    def _ask(self, path: str, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(f"{self.url}{_API}/{path}", data, self._headers)
        with _open(request, _TIMEOUT_S) as answer:  # http(s) only: a checked tracking.uri
            content: dict[str, Any] = json.loads(answer.read() or b"{}")
        return content


def _recorded_run(run: Mapping[str, Any]) -> RecordedRun:
    """Parse a run in an answer of MLflow's API."""
    data = run.get("data", {})
    tags = {tag["key"]: tag.get("value", "") for tag in data.get("tags", [])}
    datasets = [item["dataset"] for item in run.get("inputs", {}).get("dataset_inputs", [])]
    return RecordedRun(
        run_id=run["info"]["run_id"],
        key=tags.get("paceline.run_key", ""),
        name=run["info"].get("run_name", ""),
        metrics=[metric["key"] for metric in data.get("metrics", [])],
        params={param["key"]: param.get("value", "") for param in data.get("params", [])},
        data=[f"{item.get('name')} {item.get('digest')}" for item in datasets],
    )


# ------------------------------------------------------------------------------------------------ view
_VIEW_TAG = "mlflow.sharedViewState."
_FIRST_METRICS = ("val/accuracy", "test/accuracy", "val/loss")
_MAX_METRICS, _MAX_PARAMS = 5, 8
_USUAL_WIDTH, _WIDEST = 100, 300  # pixels of a column of the table
_FIRST_CHARTS = ("val/accuracy", "train/loss", "val/loss")
_FIRST_SECTION = "curves"  # of the page with charts; MLflow appends the others, by name
_TRAINING = {"workflowType": "machine_learning"}  # otherwise the page may show runs as agent evaluations


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run in MLflow's store, with what decides the columns of the table."""

    run_id: str
    key: str
    metrics: Sequence[str]
    params: Mapping[str, str] = field(default_factory=dict)
    data: Sequence[str] = ()  # name and digest of each data set
    name: str = ""


def shared_view(runs: Sequence[RecordedRun], charts: Sequence[str] = (), *, only: bool = False) -> str:
    """Return a view of ``runs`` as JSON: columns for metrics and for what differs, and the important charts first.

    ``charts``: show only the charts of these metrics. ``only``: the view has a filter that lists no other runs.
    """
    metrics = list(dict.fromkeys(name for run in runs for name in sorted(run.metrics)))
    important = [name for name in (*charts, *_FIRST_METRICS) if name in metrics]
    if not important:
        important = [name for name in metrics if not name.startswith("system/")]
    columns = {f"metrics.`{name}`": name for name in list(dict.fromkeys(important))[:_MAX_METRICS]}
    # of parameters and data sets, show what distinguishes the runs
    attributes = ["Dataset"] if len({tuple(run.data) for run in runs}) > 1 else []
    params = dict.fromkeys(name for run in runs for name in run.params)
    differing = [name for name in params if len({run.params.get(name) for run in runs}) > 1][:_MAX_PARAMS]
    columns |= {f"params.`{name}`": name for name in differing}
    # columns are as wide as their heads (7 pixels a letter), the names of runs as the longest of them
    letters = {column: len(name) for column, name in columns.items()}
    letters["attributes.`Run Name`"] = max((len(run.name) for run in runs), default=0) + 4  # the coloured dot before it
    widths = {column: min(_WIDEST, max(_USUAL_WIDTH, 7 * count + 32)) for column, count in letters.items()}
    state: dict[str, Any] = {
        **_charts(metrics),
        "selectedColumns": [*(f"attributes.`{name}`" for name in (*attributes, "Duration")), *columns],
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    if charts:
        state["chartsSearchFilter"] = "|".join(charts)
    if only:
        state["searchFilter"] = f"attributes.run_id IN ({', '.join(repr(run.run_id) for run in runs)})"
    return json.dumps(state, sort_keys=True)


def _charts(metrics: Sequence[str]) -> dict[str, Any]:
    """Return a first section with the important charts: by itself the page begins with metrics of the network."""
    important = [name for name in _FIRST_CHARTS if name in metrics]
    if not important:
        return {}
    return {
        "compareRunCharts": [
            {"uuid": name, "metricKey": name, "metricSectionId": _FIRST_SECTION, "type": "BAR", "isGenerated": True}
            for name in important  # of type BAR: the page draws a line if a metric has several steps
        ],
        "compareRunSections": [{"uuid": _FIRST_SECTION, "name": _FIRST_SECTION, "display": True, "isReordered": True}],
        "isAccordionReordered": True,
    }


def _page(path: str, **query: str) -> str:
    # `query` first: the page that compares runs finds their ids only in the first parameter (MLflow 3.17)
    return f"{path}?{urlencode({**query, **_TRAINING}, quote_via=quote)}"
