"""The few questions that a page's address needs, asked of a tracking server over HTTP: without mlflow, which takes
seconds to import."""

from __future__ import annotations

import base64
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import urlencode

from pipeline.core.web_address import opener
from pipeline.tracking.address import recorder_env
from pipeline.tracking.pages import VIEW_TAG, Shown

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
