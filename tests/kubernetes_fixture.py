"""The fixture ``kubernetes``: a server with the API's paths, in front of the cluster of tests/kubernetes_cluster.py."""

from __future__ import annotations

import json
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.kubernetes_cluster import KINDS, NAMESPACE, FakeCluster, RefusedError
from tests.kubernetes_operators import Object


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: the test's output is its own."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(lambda parts, query: self._post(parts, query, body))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(self._delete)

    def _answer(self, act: Any) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(address.query).items()}
        code, kind = 200, "application/json"
        try:
            with self.cluster.lock:
                value = act(address.path.strip("/").split("/"), query)
                text = value if isinstance(value, str) else json.dumps(value)
        except RefusedError as error:
            code, text = error.code, json.dumps(error.status)
        text = self.cluster.page or text
        if not text.startswith(("{", "[")):
            kind = "text/plain"
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if code == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "3600")
        self.end_headers()
        self.wfile.write(data)

    def _get(self, parts: list[str], query: dict[str, str]) -> Any:
        if self.cluster.busy:
            self.cluster.busy -= 1
            raise RefusedError(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        match parts:
            case ["api", "v1", "namespaces", _, "pods", name, "log"]:
                return "\n".join(self.cluster.log(name)) + "\n"
            case ["api", "v1", "namespaces", _, "pods"]:
                return self._list(self.cluster.pods.values(), query)
            case ["api", "v1", "namespaces", _, "events"]:
                assert query["fieldSelector"] == "type=Warning"
                return {"items": self.cluster.events}
            case ["api", "v1", "namespaces", _, "persistentvolumeclaims", name] if name in self.cluster.claims:
                return self.cluster.claims[name]
            case ["apis", group, version, "namespaces", _, plural]:
                self._refuse_unknown(group, version)
                mine = [job for job in self.cluster.jobs.values() if job["kind"] == KINDS[plural]]
                return self._list(mine, query)
            case ["apis", group, version, "namespaces", _, plural, name]:
                self._refuse_unknown(group, version)
                return self._named(plural, name)
        raise RefusedError(404, "NotFound", "the server could not find the requested resource")

    def _post(self, parts: list[str], query: dict[str, str], body: Object) -> Any:
        _, group, version, _, namespace, plural = parts
        self._refuse_unknown(group, version)
        if namespace != NAMESPACE:
            raise RefusedError(
                404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces"
            )
        assert query["fieldValidation"] == "Strict", "else a field that an older operator doesn't know is dropped"
        return self.cluster.create(plural, body, keep="dryRun" not in query)

    def _delete(self, parts: list[str], query: dict[str, str]) -> Any:
        _, group, version, _, _, plural, name = parts
        self._refuse_unknown(group, version)
        self._named(plural, name)
        assert query["propagationPolicy"] == "Background", "else the pods of a Job would be left"
        return self.cluster.delete(name)

    def _named(self, plural: str, name: str) -> Object:
        if name not in self.cluster.jobs:
            raise RefusedError(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
        return self.cluster.jobs[name]

    def _refuse_unknown(self, group: str, version: str) -> None:
        if f"{group}/{version}" not in self.cluster.groups:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")

    def _list(self, objects: Any, query: dict[str, str]) -> Object:
        name, _, value = query["labelSelector"].partition("=")
        return {"items": [item for item in objects if item["metadata"].get("labels", {}).get(name) == value]}


@pytest.fixture
def kubernetes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster that this process's commands speak to. No pod of the test is left."""
    pytest.importorskip("kubernetes")
    with tempfile.TemporaryDirectory(prefix="paceline-kubernetes-") as folder:
        cluster = FakeCluster(Path(folder))
        handler = type("Handler", (_Handler,), {"cluster": cluster})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            path = Path(folder) / "config"
            path.write_text(kubeconfig(f"http://127.0.0.1:{server.server_port}"))
            monkeypatch.setenv("KUBECONFIG", str(path))
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            try:
                yield cluster
            finally:
                cluster.end_all()
                server.shutdown()


def kubeconfig(server: str, user: Object | None = None) -> str:
    """kubectl's configuration with one context."""
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": user or {"token": "t"}}],
        "contexts": [{"name": "test", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}}],
    }
    text: str = yaml.safe_dump(value)
    return text
