"""MLflow's web page for one person (`doit ui`), and its server for a team (`doit server`)."""

from __future__ import annotations

from pipeline import tracking
from pipeline.cli.loader import leave_if_interrupted
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, session
from pipeline.core.errors import UsageError
from pipeline.core.files import expanded
from pipeline.core.tables import is_count
from pipeline.tracking import server as team
from pipeline.tracking import ui as page


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
