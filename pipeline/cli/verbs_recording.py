"""The verbs that bring runs into MLflow."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import Option, Verb

_RUN = Option("KEY", "the run, by its key or the first digits of it; default: the run of the overrides")

RECORDING: Mapping[str, Verb] = {
    "record": Verb(
        summary="replay a run into MLflow (exactly once)",
        options={"run": _RUN},
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
            "run": _RUN,
            "name": Option("NAME", "the registered model; created if it doesn't exist"),
            "alias": Option("ALIAS", "an alias of this version, such as champion"),
        },
        examples=("publish run=cf0848 name=digits alias=champion",),
        shows_groups=False,
    ),
}
