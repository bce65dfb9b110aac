"""The verbs that bring runs into MLflow and show them there."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import RUN, Option, Verb

RECORDING: Mapping[str, Verb] = {
    "record": Verb(
        summary="replay a run into MLflow (exactly once)",
        options={"run": RUN},
        examples=("record run=cf0848", "record run=cf0848 tracking.uri=http://mlflow:5000"),
        shows_groups=False,
    ),
    "publish": Verb(
        module="pipeline.cli.publishing",
        summary="register the final weights of a run as a model in MLflow",
        details="The model loads without this code. The network is built by the run's own code, exported with "
        "torch.export and checked against the run's evaluation. Publishing the same run under the same name"
        " again adds no version. docs/tracking.md shows how to load it.",
        options={
            "run": RUN,
            "name": Option("NAME", "the registered model; created if it doesn't exist"),
            "alias": Option("ALIAS", "an alias of this version, such as champion"),
        },
        examples=("publish run=cf0848 name=digits alias=champion",),
        shows_groups=False,
    ),
    "ui": Verb(
        module="pipeline.cli.pages",
        takes_paths=True,
        bare="KEY",
        summary="open MLflow to compare the runs",
        details="KEY … are keys of runs or their first digits: the page then opens with only these runs.",
        options={
            "port": Option("N", "the port to listen on; default: 5000, or a free one"),
            "charts": Option("METRIC,…", "only the charts of these metrics"),
        },
        examples=("ui", "ui cf0848 495e1d charts=val/accuracy", "ui port=5001 tracking.uri=sqlite:////data/mlflow.db"),
        shows_groups=False,
    ),
    "server": Verb(
        module="pipeline.cli.pages",
        summary="run a tracking server for a team, until Ctrl-C",
        details="Set its address and storage by the fields tracking.server_*, best in conf/tracking. Passwords come"
        " only from the environment: PGPASSWORD or ~/.pgpass for PostgreSQL, MLFLOW_AUTH_ADMIN_PASSWORD for"
        " the first login. See docs/tracking.md.",
        examples=(
            "server",
            "server tracking.server_host=0.0.0.0 tracking.server_allowed_hosts=[node0]",
            "server tracking.server_store=postgresql://team@db/mlflow tracking.server_artifacts=/data/mlartifacts",
        ),
        shows_groups=False,
    ),
}
