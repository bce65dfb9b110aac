"""What a run was made of, brought back from MLflow to a machine that has no run folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import sha256_bytes
from pipeline.core.processes import process
from pipeline.reproduction import recipe
from pipeline.tracking import recorder
from pipeline.tracking.__main__ import main
from tests.pipeline import finished_folder
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_store import EXPERIMENT

pytestmark = pytest.mark.slow

PATCH = b"diff --git a/x b/x\n\xff not utf-8\n"


def recorded_run(place: Path, uri: str, *, patch: bytes = PATCH, ended: bool = True) -> str:
    """The id of a run that was recorded and whose folder is gone."""
    run = folder.started(place)
    config = json.loads((run / "config.json").read_text())
    key = finished_folder.key_of(config)
    folder.write(run / "key.json", {"key": key.short, "digest": key.digest, **key.parts})
    run = run.rename(run.with_name(key.short))
    known = json.loads((run / "provenance.json").read_text())
    folder.write(run / "provenance.json", {**known, "patch_sha256": sha256_bytes(patch)})
    (run / "changes.patch").write_bytes(patch)
    if ended:
        folder.end(run)
    run_id = recorder.record(run, uri, f"{EXPERIMENT}-{place.name}").run_id
    run.rename(place / "elsewhere")
    assert run_id is not None
    return run_id


def in_this_process(argv: Sequence[str], *, env: Mapping[str, str], **_: object) -> process.Completed:
    """Stands for ``process.run``: the command that fetches a record, without the import of mlflow."""
    stderr = io.StringIO()
    import_module("pipeline.tracking.mlflow_store")  # sets variables that this process's later tests need
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("pipeline.tracking.__main__._NOT_NEEDED", ()))
        stack.enter_context(patch("pipeline.core.processes.unexpected.install"))
        stack.enter_context(patch.dict(os.environ, env))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        code = main([*argv[3:]])
    return process.Completed(argv=tuple(argv), code=code, stdout="", stderr=stderr.getvalue())


@pytest.mark.ci
@pytest.mark.long
def test_a_recipe_comes_back_from_the_record_and_what_lacks_is_said(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(database, tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    runs = tmp_path / "runs"

    run_id = recorded_run(tmp_path / "good", uri)
    back = recipe.from_mlflow(run_id, uri, tmp_path / "good", runs_dir=runs)
    assert re.fullmatch(f"{tmp_path}/good/[0-9a-f]{{12}}", str(back.path))
    made_of = recipe.read(back, tmp_path)
    assert (made_of.patch, made_of.commit) == (PATCH, "c0ffee" * 6 + "abcd")
    assert (made_of.result["weights_sha256"], made_of.result["mlflow_run_id"]) == ("ab" * 32, run_id)

    children = SimpleNamespace(run=in_this_process, child_environment=process.child_environment)
    monkeypatch.setattr(recipe, "process", children)
    secret = recorded_run(tmp_path / "secret", uri, patch=b"+ https://me:hunter2@host/x\n")
    back = recipe.from_mlflow(secret, uri, tmp_path / "secret", runs_dir=runs)
    with pytest.raises(PacelineError, match=r"missing: the uncommitted[^!]*MLflow keeps no patch that has a login"):
        recipe.read(back, tmp_path)

    running = recorded_run(tmp_path / "running", uri, ended=False)
    with pytest.raises(PacelineError, match="no result to compare with: as far as its record goes, it has not ended"):
        recipe.from_mlflow(running, uri, tmp_path / "running", runs_dir=runs)

    foreign = store.client(uri).create_run("0").info.run_id
    with pytest.raises(UsageError, match="is none of Paceline's"):
        recipe.from_mlflow(foreign, uri, tmp_path / "foreign", runs_dir=runs)

    with pytest.raises(UsageError, match=f"no such run under {runs}, and MLflow at sqlite:.* knows none either"):
        recipe.from_mlflow("f" * 32, uri, tmp_path / "nothing", runs_dir=runs)


@pytest.mark.ci
@pytest.mark.long
def test_a_store_that_is_down_or_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = SimpleNamespace(run=in_this_process, child_environment=process.child_environment)
    monkeypatch.setattr(recipe, "process", children)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(PacelineError, match=f"MLflow at http://127.0.0.1:{port} can't tell: Connection refused"):
        recipe.from_mlflow("f" * 32, f"http://me:pw@127.0.0.1:{port}", tmp_path, runs_dir=tmp_path)
    with pytest.raises(UsageError, match=r"there is no .*/none\.db to ask"):
        recipe.from_mlflow("f" * 32, f"sqlite:///{tmp_path}/none.db", tmp_path, runs_dir=tmp_path)
    assert not (tmp_path / "none.db").exists()
