"""The few calls of MLflow that publishing a model is made of: its LoggedModel, and the registry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException

from pipeline.tracking.failures import StoreError
from pipeline.tracking.inputs import DataInput
from pipeline.tracking.store import Store, calls

_SOURCE = "models:/"
_NO_REGISTRY = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED")


class Version(NamedTuple):
    """A registered version, and the LoggedModel that it is of."""

    number: str
    model_id: str


class ModelStore(Store):
    """A store's models. Every method raises StoreError."""

    def experiment_of(self, run_id: str) -> str:
        """That of an MLflow run, which must be there."""
        with calls():
            return str(self._client.get_run(run_id).info.experiment_id)

    def version(self, name: str, identity: Mapping[str, str]) -> Version | None:
        """The version of the registered model ``name`` that has these tags."""
        with calls():
            for found in self._client.search_model_versions(f"name='{name}'"):
                if identity.items() <= (found.tags or {}).items():
                    # a database keeps the model's id in its source alone
                    return Version(str(found.version), str(found.source).removeprefix(_SOURCE))
        return None

    def model(self, experiment_id: str, run_id: str, identity: Mapping[str, str]) -> str | None:
        """The LoggedModel of the run with these tags; one whose upload was cut short is removed."""
        ready = None
        wanted = " AND ".join(f"tags.`{tag}` = '{value}'" for tag, value in identity.items())
        with calls():
            for found in self._client.search_logged_models([experiment_id], filter_string=wanted):
                if found.source_run_id != run_id:
                    continue
                if found.status == LoggedModelStatus.READY:
                    ready = str(found.model_id)
                else:
                    self._client.delete_logged_model(found.model_id)
        return ready

    def begin_model(self, experiment_id: str, run_id: str, name: str, tags: Mapping[str, str]) -> str:
        """A LoggedModel without files yet; its id."""
        with calls():
            made = self._client.create_logged_model(
                experiment_id, name=name, source_run_id=run_id, tags=dict(tags), model_type="classifier"
            )
        return str(made.model_id)

    def complete_model(self, model_id: str, folder: Path) -> None:
        """Send its files; from then on it is READY."""
        with calls():
            self._client.log_model_artifacts(model_id, str(folder))
            self._client.finalize_logged_model(model_id, "READY")

    def link_output(self, model_id: str, run_id: str, step: int) -> None:
        """It is the run's outcome after ``step`` steps; again is nothing new."""
        with calls():
            outputs = self._client.get_run(run_id).outputs
            if all(model_id != known.model_id for known in (outputs.model_outputs if outputs else ())):
                self._client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])

    def link_metric(self, model_id: str, run_id: str, name: str, data: DataInput | None) -> None:
        """The run's last value of a metric is the model's too: the same point, so the run's curve stays."""
        with calls():
            for point in self._client.get_metric_history(run_id, name)[-1:]:
                self._client.log_metric(
                    run_id, name, point.value, point.timestamp, point.step, model_id=model_id,
                    dataset_name=data.name if data else None, dataset_digest=data.digest if data else None,
                )  # fmt: skip

    def register(self, name: str, model_id: str, run_id: str, tags: Mapping[str, str], description: str) -> str:
        """A new version of the registered model ``name``, which is made where it is missing; the version's number."""
        with calls():
            self._refuse_without_registry(name)
            made = self._client.create_model_version(
                name, f"{_SOURCE}{model_id}", run_id, tags=dict(tags), description=description, model_id=model_id
            )
        return str(made.version)

    def _refuse_without_registry(self, name: str) -> None:
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code in _NO_REGISTRY:
                raise StoreError("it has no model registry", final=True) from error
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def set_alias(self, name: str, alias: str, version: str) -> str | None:
        """Let ``alias`` mean this version; the version that it meant before, if another."""
        with calls():
            before = self._client.get_registered_model(name).aliases.get(alias)
            if str(before) != version:
                self._client.set_registered_model_alias(name, alias, version)
        return str(before) if before is not None and str(before) != version else None
