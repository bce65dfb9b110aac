"""The run folder: where everything that is known of a run stands, and whether it is finished and intact."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UsageError
from pipeline.files import sha256_file, write_atomic, write_json
from pipeline.key import KEY_VERSION, ContentKey

TRAINED = ("checkpoints/final.pt", "metrics.jsonl", "predictions.json")
"""What the node half leaves behind."""
EVALUATED = ("evaluation/report.json", "evaluation/confusion_matrix.png")
"""What the evaluation leaves behind."""
TARGETS = (*TRAINED, *EVALUATED)
"""The files that result.json vouches for."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. The folder's name is the run key."""

    path: Path

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def lock(self) -> Path:
        return self.path.parent / f".{self.key}.lock"

    def refuse_newer(self) -> None:
        """Raises UsageError for a folder that a newer Paceline wrote: nothing here may guess at it or write to it."""
        known = self.read_json("key.json") or {}
        if is_newer(known):
            raise UsageError(
                f"run {self.key} was written by a newer Paceline: key.json has version {known['version']}, "
                f"this one knows up to {KEY_VERSION}",
                try_="update this checkout, or paths.runs=<another folder>",
            )

    def prepare(
        self,
        *,
        sources: Mapping[str, Path],
        key: ContentKey,
        config: Mapping[str, Any],
        config_yaml: str,
        pack_path: Path,
    ) -> None:
        """Lay the folder out before a launch: key.json, the configuration, the code snapshot and the data link.

        The snapshot holds exactly the files that were hashed (``sources`` by their paths in it): what is not in the
        key cannot be imported.
        """
        write_json(self.path / "key.json", {"key": key.short, "digest": key.digest, **key.parts})
        write_json(self.path / "config.json", config)
        write_atomic(self.path / "config.yaml", config_yaml)
        shutil.rmtree(self.code, ignore_errors=True)
        for name, source in sources.items():
            write_atomic(self.code / name, source.read_bytes())
        link = self.path / "data"
        if link.is_symlink():
            link.unlink()
        link.symlink_to(pack_path.resolve(), target_is_directory=True)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the folder, or None where it is missing or torn."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def write_result(
        self,
        *,
        key: ContentKey,
        summary: Mapping[str, Any],
        hosts: list[str],
        attempts: int,
        duration_s: float,
        mlflow_run_id: str | None,
    ) -> None:
        """result.json, last and atomically, with a fingerprint of each target and what a list of runs shows."""
        from pipeline.types import State

        write_json(
            self.result,
            {
                **summary,
                "state": State.FINISHED,
                "key": key.short,
                "digest": key.digest,
                "what": what(self.read_json("config.json") or {}),
                "nproc_per_node": topology_of(self.read_json("key.json") or {}),
                "hosts": hosts,
                "attempts": attempts,
                "unix_time": round(time.time(), 3),
                "duration_s": round(duration_s, 3),
                "mlflow_run_id": mlflow_run_id,
                "files": self._fingerprints(),
            },
        )

    def vouch_again(self) -> None:
        """Fingerprint the targets anew after the evaluation was repeated; a run without a result has none."""
        result = self.read_json("result.json")
        if result is not None:
            write_json(self.result, {**result, "files": self._fingerprints()})

    def _fingerprints(self) -> dict[str, Any]:
        return {name: _fingerprint(self.path / name) for name in TARGETS if (self.path / name).exists()}

    def training_done(self, key: ContentKey) -> bool:
        """Whether the node half has ended well under this very key and its outputs are as it left them.

        True without a result when the controller died after the training; what is left is quickly done then.
        """
        known, summary = self.read_json("key.json"), self.read_json("summary.json")
        if not known or not summary or known.get("digest") != key.digest:
            return False
        vouched = (self.read_json("result.json") or {}).get("files") or {}
        for name in TRAINED:
            if name in vouched and changed(self.path / name, vouched[name]):
                return False
        weights = self.path / TRAINED[0]
        sidecar = self.read_json("checkpoints/final.json") or {}
        return all((self.path / name).is_file() for name in TRAINED) and sha256_file(weights) == sidecar.get("sha256")

    def stale_because(self, key: ContentKey) -> str | None:
        """None when the run is finished and intact; otherwise the reason in a few words."""
        result = self.read_json("result.json")
        if result is None:
            return "not finished yet"
        if result.get("digest") != key.digest:
            return "result.json belongs to another key"
        files = result.get("files")
        if not isinstance(files, dict):
            return "result.json names no files"
        for name, expected in files.items():
            reason = changed(self.path / name, expected)
            if reason:
                return f"{name} {reason}"
        return None


def is_newer(key: Mapping[str, Any]) -> bool:
    """Whether key.json has a version that this code can't know."""
    version = key.get("version", KEY_VERSION)
    return not isinstance(version, int) or version > KEY_VERSION


def what(config: Mapping[str, Any]) -> str:
    """``digits small_cnn sgd``: a run in three words."""
    return " ".join(str(config.get(group, {}).get("name", "?")) for group in ("dataset", "model", "optimizer"))


def topology_of(key: Mapping[str, Any]) -> list[int]:
    """Ranks of each node, from what key.json holds."""
    found = key.get("topology", {}).get("nproc_per_node", [])
    return list(found)


def _fingerprint(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"sha256": sha256_file(path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def changed(path: Path, expected: Mapping[str, Any]) -> str | None:
    """What happened to a target since its fingerprint was taken, or None.

    Size first, then the bytes unless the time stamp is the recorded one (hashing 90 MB on every call is dear).
    """
    try:
        stat = path.stat()
    except OSError:
        return "is missing"
    if stat.st_size != expected["bytes"]:
        return f"has {stat.st_size} bytes, {expected['bytes']} were written"
    if stat.st_mtime_ns != expected["mtime_ns"] and sha256_file(path) != expected["sha256"]:
        return "was altered"
    return None
