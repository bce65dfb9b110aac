"""`doit publish`: a finished run's final weights as a registered model of MLflow."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline import tracking
from pipeline.cli.commands import holder
from pipeline.cli.loader import leave_if_interrupted
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, Session, session
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import expanded
from pipeline.core.processes import process
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.tables import is_count
from pipeline.tracking import server as team
from pipeline.tracking import ui as page
from pipeline.tracking.publishing import Published, refuse_names
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder


def ui() -> None:
    asked = session().asked
    port = asked.options.get("port")
    if port is not None and not (is_count(port) and int(port) < 65536):
        raise UsageError(f"port={port} must be a whole number from 1 to 65535")
    config = session().config
    uri = tracking.absolute_uri(config.tracking.uri, ROOT)
    charts = tuple(name for name in asked.options.get("charts", "").split(",") if name)
    wanted = page.Wanted(keys=asked.paths, charts=charts)
    page.serve(uri, config.tracking.experiment, port=int(port) if port else None, wanted=wanted, say=say, note=note)
    leave_if_interrupted()


def server() -> None:
    told = session().config.tracking
    artifacts = told.server_artifacts
    if artifacts is not None and "://" not in artifacts:
        artifacts = str(ROOT / expanded(artifacts, "tracking.server_artifacts"))
    settings = team.Settings(
        store=tracking.absolute_uri(told.server_store, ROOT),
        artifacts=artifacts or _beside(told.server_store),
        host=told.server_host,
        port=told.server_port,
        allowed_hosts=tuple(told.server_allowed_hosts),
        auth=told.server_auth,
    )
    team.serve(settings, told.experiment, say=say, note=note)
    leave_if_interrupted()


def _beside(store: str | None) -> str:
    database = tracking.sqlite_path(tracking.absolute_uri(store, ROOT))
    return str((database.parent if database is not None else ROOT) / "mlartifacts")


_NOTICE = re.compile(r"\d{4}/\d\d/\d\d [\d:]{8} (INFO|WARNING) ")  # what MLflow prints besides


def publish() -> None:
    """Raises UsageError: the run is none to publish; PacelineError: the store didn't take it."""
    current = session()
    name, alias = current.asked.options.get("name"), current.asked.options.get("alias")
    refuse_names(name, alias)
    folder = holder(current.folder())
    model = _finished(folder)
    if model.synthetic:
        note("SYNTHETIC DATA: the accuracy of this model means nothing; its tags and description say so")
    run_id = _recorded(current, folder)
    uri = tracking.absolute_uri(current.config.tracking.uri, ROOT)
    asked = {"model": asdict(model), "name": name, "alias": alias, "run_id": run_id, "pythonpath": _python_path(folder)}
    with waiting(note, "publishing the model"):
        done = process.run(
            tracking.publish_command(folder.path, uri),
            input=json.dumps(asked).encode(),
            env=process.of_this_clone(tracking.recorder_env(uri)),
        )
    if done.code != 0:
        lines = [line for line in done.stderr.strip().splitlines() if not _NOTICE.match(line)]
        why = "\n".join(lines) or f"exit code {done.code}"
        raise PacelineError(f"{folder.key} is not published: {why}", hint="the same command again, once that is fixed")
    _tell(json.loads(done.stdout.splitlines()[-1]), str(name), alias, model)


def _finished(folder: RunFolder) -> Published:
    """The run as a model. Raises UsageError: it isn't finished, or no classifier's; PacelineError: it was altered."""
    from pipeline.runs.agreement import check_parts

    if not folder.program.is_ours:
        raise UsageError(
            f"run {folder.key} is that of a script, whose network nobody here knows: doit publish takes the runs of "
            "Paceline's own trainer",
            hint=f"its files lie in {folder.path / 'outputs'}; mlflow.pytorch.log_model takes a network of your own",
        )
    key, result = folder.read_key(), folder.read_result()
    if key is None or result is None:
        raise UsageError(
            f"run {folder.key} isn't finished, so it has no final weights", hint=f"doit status run={folder.key}"
        )
    check_parts(folder, key, result, ROOT)
    if (stale := folder.stale_because(key.digest)) is not None:
        raise folder.altered(run_folder.RESULT, f"no longer says what its files are ({stale})")
    config, manifest = folder.read_json(run_folder.CONFIG) or {}, folder.read_json("data/manifest.json") or {}
    return Published(
        key=folder.key,
        weights_sha256=str(result.fields.get("weights_sha256")),
        dataset_digest=str(result.fields.get("dataset_digest")),
        network=str((config.get("model") or {}).get("name")),
        dataset=str((config.get("dataset") or {}).get("name")),
        accuracy=result.metrics["test/accuracy"],
        step=int(result.fields.get("steps") or 0),
        classes=tuple(map(str, manifest.get("classes") or ())),
        synthetic=result.synthetic,
        standing=_standing(folder),
    )


def _standing(folder: RunFolder) -> str:
    from pipeline.comparing.reading import read

    verdict = read(folder).verdict
    if verdict is None:
        return "not made again yet"
    if verdict.get("within_spread"):
        return "made again on other hardware, within the spread of its metrics"
    return "reproduced" if verdict.get("reproduced") else "made again, and came out otherwise"


def _recorded(current: Session, folder: RunFolder) -> str:
    """The run's id in MLflow, where it is recorded first if it isn't yet. Raises PacelineError."""
    from pipeline.tracking.client import Recorder

    recorder = Recorder(folder.path, current.config, ROOT, enabled=True)
    with waiting(note, "recording in MLflow"):
        run_id = recorder.finish(lambda _: None)
    if run_id is None:
        raise PacelineError(
            f"{folder.key} is not published: it isn't recorded in MLflow ({recorder.why()})", hint=recorder.hint()
        )
    return run_id


def _python_path(folder: RunFolder) -> str:
    """What its ranks had on PYTHONPATH behind their code."""
    cluster: Any = (folder.read_json(run_folder.CONFIG) or {}).get("cluster")
    return str(((cluster or {}).get("env") or {}).get("PYTHONPATH") or "")


def _tell(found: dict[str, Any], name: str, alias: str | None, model: Published) -> None:
    what = "registered" if found["is_new"] else "was there already, registered"
    say(f"{model.key} {what} as {name} version {found['version']} ({model.standing})")
    if found["checked"]:
        say(f"  checked  {found['agreed']} of {found['checked']} test images come out as in the run's evaluation")
    if 0 < found["agreed"] < found["checked"]:
        note("WARNING: the others change sides: the run computed on other hardware, or in another precision")
    if found["alias_before"] is not None:
        say(f"  alias    {alias} meant version {found['alias_before']} until now")
    address = f"models:/{name}@{alias}" if alias else f"models:/{name}/{found['version']}"
    say(f"  load     mlflow.pytorch.load_model({address!r})")
