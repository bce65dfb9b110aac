"""What a run folder says about its run, in MLflow's terms: name, parameters, tags, progress. Reads only."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.core import documents
from pipeline.core import program as programs
from pipeline.core.redact import without_secrets
from pipeline.core.specs import State
from pipeline.runs import journal
from pipeline.runs.acceptance import accepted_for
from pipeline.tracking.address import redact

_MAX_NAME = 250  # characters, MLflow's own limits
_MAX_PARAM = 6000
_MAX_TAG = 8000
_NOT_ALLOWED = re.compile(r"[^\w\-. :]+")
_SYNTHETIC_NOTE = "**Synthetic data:** the images are generated, so the accuracy of this run means nothing."
ENDED = (State.FINISHED, State.PRUNED, State.FAILED, State.KILLED)


@dataclass(frozen=True, kw_only=True)
class Description:
    """One run as MLflow shows it. Times are unix milliseconds."""

    key: str
    name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    start_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the journal stands. ``end_ms`` (unix milliseconds) is None until the attempt has ended."""

    state: State | None
    attempt: int
    end_ms: int | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def progress(run_dir: Path) -> Progress:
    """The last whole line of journal.jsonl."""
    entries = journal.read(run_dir / "journal.jsonl")
    if not entries:
        return Progress(state=None, attempt=0, end_ms=None)
    last = entries[-1]
    end = int(last.time * 1000) if last.state in ENDED else None
    return Progress(state=last.state, attempt=last.attempt, end_ms=end)


def describe(run_dir: Path) -> Description:
    """Put config, key, provenance, plan and summary together; what is missing is left out."""
    config = without_secrets(read_object(run_dir / "config.json"))
    provenance = read_object(run_dir / "provenance.json")
    summary = read_summary(run_dir)
    key = str(read_object(run_dir / "key.json").get("key") or run_dir.name)
    synthetic = is_synthetic(run_dir)
    entries = journal.read(run_dir / "journal.jsonl")
    return Description(
        key=key,
        name=_name(config, provenance, key) + (" (synthetic data)" if synthetic else ""),
        params=_params(config),
        tags={
            **_tags(run_dir, key, provenance, summary, synthetic, max((e.attempt for e in entries), default=0)),
            **({"paceline.state": str(entries[-1].state)} if entries else {}),
        },
        start_ms=int(entries[0].time * 1000) if entries else None,
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing or damaged."""
    return documents.read_or_none(path) or {}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The same of summary.json, whose seal must agree with it (what older versions wrote has none)."""
    try:
        return documents.read_sealed(run_dir / "summary.json")
    except documents.UnsealedError:
        return read_object(run_dir / "summary.json")
    except (OSError, documents.DamagedError):
        return {}


def is_synthetic(run_dir: Path) -> bool:
    """What the summary says, else the data pack's manifest, else the name of the data set."""
    for told in (read_summary(run_dir), read_object(run_dir / "data/manifest.json")):
        if told.get("synthetic") is not None:
            return bool(told["synthetic"])
    return _option(read_object(run_dir / "config.json"), "dataset") == "synthetic"


def mlflow_key(name: str) -> str:
    """``name`` with what MLflow refuses replaced: ``a[0]=b`` → ``a_0_b``. Slashes between words stay."""
    words = (_NOT_ALLOWED.sub("_", word).strip("_") for word in name.split("/"))
    kept = "/".join(word for word in words if word not in ("", ".", ".."))
    return (kept or "_")[:_MAX_NAME]


def _name(config: Mapping[str, Any], provenance: Mapping[str, Any], key: str) -> str:
    experiment = next((word.split("=", 1)[1] for word in _overrides(provenance) if word.startswith("experiment=")), "")
    if not experiment and not programs.of(config).is_ours:
        experiment = PurePosixPath(programs.script_of(config)).stem
    return f"{experiment or _option(config, 'model') + '-' + _option(config, 'dataset')}-{key}"


def _option(config: Mapping[str, Any], group: str) -> str:
    section = config.get(group)
    return str(section.get("name", group)) if isinstance(section, dict) else group


def _overrides(provenance: Mapping[str, Any]) -> list[str]:
    overrides = provenance.get("overrides")
    return [str(word) for word in overrides] if isinstance(overrides, list) else []


def _params(config: Mapping[str, Any]) -> dict[str, str]:
    params: dict[str, str] = {}
    for path, value in _leaves("", config):
        key = mlflow_key(path)
        while key in params:  # two names that differ only in refused characters
            key = key[: _MAX_NAME - 1] + "_"
        params[key] = _cut(redact(_text(value)), _MAX_PARAM, "config.json")
    return params


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``{"a": {"b": [1, {"c": 2}]}}`` → a.b.0 = 1, a.b.1.c = 2; lists of plain values stay whole."""
    if isinstance(value, dict) and value:
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        yield prefix, value
        return
    for name, item in items:
        yield from _leaves(f"{prefix}.{name}" if prefix else name, item)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str, limit: int, whole: str) -> str:
    """Said in the value itself, where MLflow would cut in silence."""
    if len(text) <= limit:
        return text
    ending = f"… ({len(text)} characters; the whole is in {whole})"
    return text[: limit - len(ending)] + ending


def _tags(
    run_dir: Path,
    key: str,
    provenance: Mapping[str, Any],
    summary: Mapping[str, Any],
    synthetic: bool,
    attempt: int,
) -> dict[str, str]:
    dirty, accepted = provenance.get("git_dirty"), accepted_for(run_dir)
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": provenance.get("command"),
        "mlflow.source.type": "LOCAL" if provenance.get("command") else None,
        "mlflow.source.git.commit": provenance.get("git_commit"),
        "mlflow.note.content": "\n\n".join(_notes(synthetic, accepted)),
        "paceline.run_key": key,
        "paceline.attempt": str(attempt),
        "paceline.dirty": None if dirty is None else str(bool(dirty)).lower(),
        "paceline.hosts": ", ".join(_hosts(run_dir, provenance)),
        "paceline.overrides": " ".join(_overrides(provenance)),
        "paceline.synthetic": str(synthetic).lower(),
        "paceline.weights_sha256": summary.get("weights_sha256"),
        "paceline.dataset_digest": summary.get("dataset_digest"),
        "paceline.world_size": summary.get("world_size"),
        **_sweep_tags(run_dir),
        "paceline.accepted_for": "; ".join(f"{key}: {lines[0]}" for key, lines in accepted.items()),
    }
    return {
        name: _cut(redact(str(value)), _MAX_TAG, "provenance.json")
        for name, value in tags.items()
        if value not in (None, "")
    }


def _notes(synthetic: bool, accepted: Mapping[str, list[str]]) -> Iterator[str]:
    """What whoever opens the run has to know."""
    if synthetic:
        yield _SYNTHETIC_NOTE
    for key, (said, *differences) in accepted.items():
        yield f"**{said.partition(':')[0].capitalize()}** for the key {key} as well ({said}), which differs in:"
        yield "\n".join(f"- {item}" for item in differences)


def _sweep_tags(run_dir: Path) -> dict[str, Any]:
    """Which sweeps the run belongs to, flat: MLflow shows no charts of nested runs. The latest in ``sweep.key``."""
    sweeps = _objects(read_object(run_dir / "sweeps.json").get("sweeps"))
    tags = {f"sweep.{item.get('key')}": item.get("trial") for item in sweeps}
    if sweeps:
        last = sweeps[-1]
        tags |= {f"sweep.{name}": last.get(name) for name in ("key", "name", "trial")}
        tags["sweep.overrides"] = " ".join(map(str, last.get("overrides") or ()))
    return tags


def _hosts(run_dir: Path, provenance: Mapping[str, Any]) -> list[str]:
    hosts = provenance.get("hosts")
    if not hosts:
        hosts = [node.get("host") for node in _objects(read_object(run_dir / "plan.json").get("nodes"))]
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return None
