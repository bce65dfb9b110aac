"""`doit publish` over HTTP: a real `mlflow server` that keeps its files on a real S3 server."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil
import pytest

from tests import object_store_fixture
from tests.integration.commands import Project
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_server import served
from tests.waiting import HANG_S


@pytest.mark.ci
@pytest.mark.long  # on a database and a folder: test_publish.py
def test_a_model_whose_upload_was_killed_is_made_whole_by_the_same_command_with_its_files_on_s3(
    finished: Project, tmp_path: Path
) -> None:
    with object_store_fixture.running() as s3, contextlib.ExitStack() as stack:
        place = f"s3://{object_store_fixture.BUCKET}/team"
        server = served(tmp_path, store=f"sqlite:///{tmp_path}/mlflow.db", artifacts=place, env=s3.env)
        url, _ = stack.enter_context(server)
        run = finished.only_run()
        words = ("publish", f"run={run.name}", "name=digits", "alias=champion", f"tracking.uri={url}")
        s3.hold("/model.pt2")
        child = finished.start(*words)
        assert s3.reached.wait(HANG_S)
        kill(child.pid)
        child.communicate()
        s3.release()
        again = finished.doit(*words)
        assert again.returncode == 0, again.stdout
        assert f"{run.name} registered as digits version 1" in again.stdout

        client = store.client(url)
        (version,) = client.search_model_versions("name='digits'")
        assert client.get_model_version_by_alias("digits", "champion").version == version.version
        (experiment,) = [item.experiment_id for item in client.search_experiments() if item.name == store.EXPERIMENT]
        (model,) = client.search_logged_models([experiment])
        assert (str(model.status), version.source) == ("READY", f"models:/{model.model_id}")
        files = s3.files()
        whole = {name.partition("/artifacts/")[2]: content for name, content in files.items() if model.model_id in name}
        assert {"MLmodel", "data/model.pt2", "input_example.json", "requirements.txt"} <= whole.keys()
        assert json.loads(whole["MLmodel"])["model_id"] == model.model_id
        final = (run / "checkpoints/final.pt").read_bytes()
        assert [content for name, content in files.items() if name.endswith("/checkpoints/final.pt")] == [final]
        fetched = client.download_artifacts(version.run_id, "checkpoints/final.pt", str(tmp_path))
        assert Path(fetched).read_bytes() == final


def kill(pid: int) -> None:
    """A process and all below it, at once: as when the computer goes down."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        process.kill()
