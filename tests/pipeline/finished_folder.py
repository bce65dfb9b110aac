"""A finished run folder as a training leaves it, made without one in a few milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.documents import write_sealed
from pipeline.core.files import canonical_json, sha256_bytes, sha256_file, sha256_text, write_json
from pipeline.keys.content_key import KEY_VERSION, ContentKey, canonical_config
from pipeline.runs.folder import DESCRIBED, EVALUATED, TRAINED, RunFolder

TARGETS = (*TRAINED, *EVALUATED, *DESCRIBED)
CODE = b"SCALE = 1.0\n"
PATCH = b"diff --git a/x b/x\n"
CONFIG: dict[str, Any] = {
    "seed": 0,
    "dataset": {"name": "digits", "source": None},
    "model": {"name": "small_cnn"},
    "optimizer": {"name": "sgd"},
    "cluster": {"launcher": "local"},
}


def key_of(
    config: Mapping[str, Any] = CONFIG, *, code: bytes = CODE, torch: str = "2.14.0", data: str = "d" * 64
) -> ContentKey:
    """A key whose parts give its digest."""
    parts = {
        "version": KEY_VERSION,
        "config": canonical_config(config),
        "code": {"trainers/x.py": sha256_bytes(code)},
        "data": data,
        "environment": {"python": "3.12.1", "torch": torch},
        "topology": {"nnodes": 1, "nproc_per_node": [2], "env": [{}]},
    }
    return ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)


def finished(
    runs_dir: Path,
    key: ContentKey | None = None,
    *,
    config: Mapping[str, Any] = CONFIG,
    summary: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    code: bytes = CODE,
    result: bool = True,
) -> RunFolder:
    """The folder of a run that ended well; ``summary`` and ``provenance`` add to what is told or replace it."""
    key = key or key_of(config)
    folder = RunFolder(runs_dir / key.short)
    for name in TARGETS:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text("some bytes")
    write_json(folder.path / "key.json", {"key": key.short, "digest": key.digest, **key.parts})
    write_json(folder.path / "config.json", config)
    (folder.path / "code" / "trainers").mkdir(parents=True)
    (folder.path / "code" / "trainers" / "x.py").write_bytes(code)
    (folder.path / "changes.patch").write_bytes(PATCH)
    origin = {"git_commit": "c" * 40, "patch_sha256": sha256_bytes(PATCH), "overrides": ["experiment=x"]}
    write_json(folder.path / "provenance.json", {**origin, "hosts": ["a"], **(provenance or {})})
    outputs = {name: sha256_file(folder.path / name) for name in TRAINED}
    told = {"state": "FINISHED", "metrics": {"test/accuracy": 0.5}, "outputs_sha256": outputs, **(summary or {})}
    write_sealed(folder.summary, told)
    if result:
        folder.write_result(key=key, summary=told, hosts=["a"], attempts=1, duration_s=1.0, mlflow_run_id=None)
    return folder
