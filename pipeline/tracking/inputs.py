"""The data of a run as an input in MLflow's sense: what its column "Dataset" shows and filters by. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DIGEST_DIGITS = 12  # of the 64; MLflow takes 36, and its table shows the first ones
_MAX_SOURCE = 65535


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """One data set. ``source``, ``schema`` and ``profile`` are JSON texts, as MLflow keeps them; ``context`` says what
    it was used for."""

    name: str
    digest: str
    source: str
    schema: str
    profile: str
    context: str


def of_pack(config: Mapping[str, Any], manifest: Mapping[str, Any], digest: str) -> DataInput | None:
    """The data that a run reads; None where its digest isn't known, or there is none (a script without data).

    Args:
        config: what config.json holds.
        manifest: that of the data pack; empty for a script's files.
        digest: of the data, as the run's key counts it.
    """
    section = config.get("dataset")
    name = section.get("name") if isinstance(section, Mapping) else None
    if not digest or (name is None and not _files_of_script(config)):
        return None
    splits = manifest.get("splits")
    sizes = {part: span[1] - span[0] for part, span in splits.items()} if isinstance(splits, Mapping) else {}
    profile = {"images": manifest.get("count"), "classes": manifest.get("num_classes"), **sizes, "sha256": digest}
    source = manifest.get("source") or (section.get("source") if isinstance(section, Mapping) else None)
    return DataInput(
        name=str(name or "files of the script"),
        digest=digest[:_DIGEST_DIGITS],
        source=json.dumps({"uri": str(source or _files_of_script(config) or name)})[:_MAX_SOURCE],
        schema=json.dumps({"mlflow_tensorspec": _tensors(manifest)}) if manifest.get("height") else "{}",
        profile=json.dumps({name: value for name, value in profile.items() if value is not None}),
        context=", ".join(part for part, size in sizes.items() if size) or "train",
    )


def _files_of_script(config: Mapping[str, Any]) -> str:
    section = config.get("program")
    data = section.get("data") if isinstance(section, Mapping) else None
    return json.dumps(data) if data else ""


def _tensors(manifest: Mapping[str, Any]) -> dict[str, Any]:
    shape = [-1, manifest.get("channels"), manifest.get("height"), manifest.get("width")]
    tensor = {"type": "tensor", "tensor-spec": {"dtype": "uint8", "shape": shape}}
    label = {"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1]}}
    return {"features": json.dumps([tensor]), "targets": json.dumps([label])}
