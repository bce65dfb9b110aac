"""An S3 server (moto's) in the test's own process, as long as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
import requests
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.s3_fixture import BUCKET
from tests.waiting import HANG_S


@dataclass
class ObjectStore:
    """``env``: what a process needs to reach it. It can refuse to give files with a certain end (``refused_end``)."""

    url: str
    env: dict[str, str]
    refused_end: str | None = None

    def refuse_all(self) -> None:
        """As if no login were right."""
        _demand_logins(self.url, wanted=True)

    def buckets(self) -> list[str]:
        return [bucket["Name"] for bucket in _client(self.url).list_buckets()["Buckets"]]

    def files(self) -> dict[str, bytes]:
        """Name → content of all that it holds."""
        client = _client(self.url)
        names = [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())]
        return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


@contextmanager
def running() -> Iterator[ObjectStore]:
    """With an empty bucket."""
    answers = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        store = found[0]
        if (
            store.refused_end
            and environ["REQUEST_METHOD"] == "GET"
            and environ["PATH_INFO"].endswith(store.refused_end)
        ):
            start_response("403 Forbidden", [])
            return []
        return answers(environ, start_response)

    found: list[ObjectStore] = []
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    url = f"http://127.0.0.1:{server.server_port}"
    login = {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-secret-key", "AWS_DEFAULT_REGION": "us-east-1"}
    found.append(ObjectStore(url, {**login, "MLFLOW_S3_ENDPOINT_URL": url, "AWS_ENDPOINT_URL": url}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        _client(url).create_bucket(Bucket=BUCKET)
        yield found[0]
    finally:
        _demand_logins(url, wanted=False)  # moto keeps this, and all files, for every server of a process
        requests.post(f"{url}/moto-api/reset", timeout=HANG_S).raise_for_status()
        server.shutdown()
        thread.join()
        server.server_close()


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Stay quiet."""


def _demand_logins(url: str, *, wanted: bool) -> None:
    requests.post(f"{url}/moto-api/reset-auth", data="0" if wanted else "inf", timeout=HANG_S).raise_for_status()


def _client(url: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
