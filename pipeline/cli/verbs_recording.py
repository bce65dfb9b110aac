"""The verbs that bring runs into MLflow."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import Option, Verb

_RUN = Option("KEY", "the run, by its key or the beginning of it; without it the overrides say which")

RECORDING: Mapping[str, Verb] = {
    "record": Verb(
        summary="replay a run into MLflow (exactly once)",
        options={"run": _RUN},
        examples=("record run=cf0848", "record run=cf0848 tracking.uri=http://mlflow:5000"),
        shows_groups=False,
    ),
    "publish": Verb(
        module="pipeline.cli.publishing",
        summary="a finished run's final weights as a registered model of MLflow, loadable without this code",
        details="The network is built by the run's own code, exported with torch.export and checked against the run's "
        "evaluation. The same run under the same name is one version, however often. docs/tracking.md shows how to "
        "load it.",
        options={
            "run": _RUN,
            "name": Option("NAME", "the registered model; it is made where there is none"),
            "alias": Option("ALIAS", "what the version is called from now on: champion"),
        },
        examples=("publish run=cf0848 name=digits alias=champion",),
        shows_groups=False,
    ),
}
