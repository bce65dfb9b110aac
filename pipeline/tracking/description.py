"""The description of a run for trackers, in MLflow's terms: name, parameters, tags, data set and progress."""

from __future__ import annotations

import getpass
import json
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.redact import without_secrets
from pipeline.core.specs import State
from pipeline.core.tables import counted, fenced, first_of
from pipeline.keys.content_key import canonical_config, flat
from pipeline.runs import journal
from pipeline.runs import result as results
from pipeline.runs.acceptance import accepted_for
from pipeline.runs.contents import (
    makes_another_run,
    nodes_of,
    overrides_in,
    ranks_of,
    run_name,
    swept_overrides,
    what_runs,
)
from pipeline.runs.folder import RunFolder
from pipeline.tracking.destinations import redact
from trainers.contract import run_folder

ENDED = (State.FINISHED, State.PRUNED, State.FAILED, State.KILLED)
_DIGEST_DIGITS = 12  # of 64; MLflow accepts 36, and its table shows the first ones
_MAX_SOURCE = 65535
_MAX_ERROR_LINES = 30
_MAX_HOSTS = 16
_MAX_NAME = 250  # characters, MLflow's own limits
_MAX_PARAM = 6000
_MAX_TAG = 8000
_NOT_ALLOWED = re.compile(r"[^\w\-. :]+")
_NOT_IN_KEY = ("cluster", "tracking", "paths")  # sections of the configuration; tags, because parameters are the key's


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """The data set of a run."""

    name: str
    digest: str
    source: str  # JSON in MLflow's format, as ``schema`` and ``profile``
    schema: str
    profile: str
    context: str  # the names of the splits used


@dataclass(frozen=True, kw_only=True)
class Description:
    """One run as MLflow shows it. Times are in unix milliseconds."""

    key: str
    name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    start_ms: int | None
    data: DataInput | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last state in the journal. ``end_ms`` (unix milliseconds) is None until the attempt has ended."""

    state: State | None
    attempt: int
    end_ms: int | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def progress(run_dir: Path) -> Progress:
    """Read the last complete line of journal.jsonl."""
    entries = journal.read(run_dir / run_folder.JOURNAL)
    if not entries:
        return Progress(state=None, attempt=0, end_ms=None)
    last = entries[-1]
    end = int(last.time * 1000) if last.state in ENDED else None
    return Progress(state=last.state, attempt=last.attempt, end_ms=end)


def describe(run_dir: Path, nonfinite: Mapping[str, str] | None = None) -> Description:
    """Describe a run by the files that its folder has so far. ``nonfinite``: see ``points.nonfinite``."""
    run = _Run(run_dir, nonfinite or {})
    name = run_name(run.config, run.words, run.key, swept=swept_overrides(run.sweeps))
    return Description(
        key=run.key,
        name=redact(name) + (" (synthetic data)" if run.synthetic else ""),
        params=_params(run),
        tags=_tags(run),
        start_ms=int(run.entries[0].time * 1000) if run.entries else None,
        data=_data(run),
    )


class _Run:
    """The files of a run folder, parsed; a missing one is empty."""

    def __init__(self, run_dir: Path, nonfinite: Mapping[str, str]) -> None:
        self.run_dir = run_dir
        self.config = without_secrets(documents.read_or_empty(run_dir / run_folder.CONFIG))
        self.provenance = documents.read_or_empty(run_dir / run_folder.PROVENANCE)
        self.key_json = documents.read_or_empty(run_dir / run_folder.KEY)
        self.plan = documents.read_or_empty(run_dir / run_folder.PLAN)
        self.summary = read_summary(run_dir)
        self.manifest = documents.read_or_empty(run_dir / "data/manifest.json")
        self.entries = journal.read(run_dir / run_folder.JOURNAL)
        self.sweeps = RunFolder(run_dir).sweeps()
        self.key = str(self.key_json.get("key") or run_dir.name)
        self.words = overrides_in(self.provenance)
        self.nonfinite = {**results.nonfinite(self.summary), **nonfinite}

    @property
    def hosts(self) -> list[str]:
        hosts = self.provenance.get("hosts") or [node.get("host") for node in nodes_of(self.plan)]
        return [str(host) for host in hosts] if isinstance(hosts, list) else []

    @property
    def error(self) -> str:
        """The error of a failed attempt, or ''."""
        failed = self.entries and self.entries[-1].state in (State.FAILED, State.KILLED)
        return self.entries[-1].detail if failed else ""

    @cached_property
    def synthetic(self) -> bool:
        """True if the data are generated, by the summary, else the pack's manifest, else the data set's name."""
        for document in (self.summary, self.manifest):
            if document.get("synthetic") is not None:
                return bool(document["synthetic"])
        return bool(_dataset(self.config).get("name") == "synthetic")

    @cached_property
    def accepted(self) -> dict[str, list[str]]:
        """Key that this run was accepted for (`doit accept`) → lines: the user's statement, then the differences."""
        return accepted_for(self.run_dir)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read summary.json; empty if its seal doesn't match. Files of older versions have no seal."""
    try:
        return documents.read_sealed(run_dir / run_folder.SUMMARY)
    except documents.UnsealedError:
        return documents.read_or_empty(run_dir / run_folder.SUMMARY)
    except (OSError, documents.DamagedError):
        return {}


# ------------------------------------------------------------------------------------------------ data
def _data(run: _Run) -> DataInput | None:
    """Describe a run's data; None for a script without data, or before their digest is known."""
    digest, section = run.key_json.get("data") or run.provenance.get("data_digest"), _dataset(run.config)
    # a run has a data set, or a script with files of its own
    program = run.config.get("program")
    files = program.get("data") if isinstance(program, Mapping) else None
    name = section.get("name") or ("files of the script" if files else None)
    if not isinstance(digest, str) or not digest or name is None:
        return None
    splits = run.manifest.get("splits")
    sizes = {split: end - begin for split, (begin, end) in splits.items()} if isinstance(splits, Mapping) else {}
    counts = {"images": run.manifest.get("count"), "classes": run.manifest.get("num_classes")}
    profile = {**counts, **sizes, "sha256": digest}
    source = run.manifest.get("source") or section.get("source") or (json.dumps(files) if files else name)
    shape = [-1, *(run.manifest.get(side) for side in ("channels", "height", "width"))]  # -1 stands for any size
    arrays = {"features": ("uint8", shape), "targets": ("int64", [-1])}
    tensors = {
        array: json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": dimensions}}])
        for array, (dtype, dimensions) in arrays.items()
    }
    return DataInput(
        name=str(name),
        digest=digest[:_DIGEST_DIGITS],
        source=redact(json.dumps({"uri": str(source)})[:_MAX_SOURCE]),
        schema=json.dumps({"mlflow_tensorspec": tensors}) if run.manifest.get("height") else "{}",
        profile=json.dumps({name: value for name, value in profile.items() if value is not None}),
        context=", ".join(split for split, size in sizes.items() if size) or "train",
    )


def _dataset(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("dataset")
    return section if isinstance(section, Mapping) else {}


# ----------------------------------------------------------------------------------------- description
def _page_paragraphs(run: _Run) -> Iterator[str]:
    """Yield the paragraphs that MLflow shows on the run's page, in Markdown, the most important first."""
    if run.synthetic:
        yield "**Synthetic data:** the images are generated, so the accuracy of this run means nothing."
    if run.error:
        lines = run.error.strip().splitlines()
        left_out = [f"… ({len(lines) - _MAX_ERROR_LINES} more lines)"] if len(lines) > _MAX_ERROR_LINES else []
        yield f"**{run.entries[-1].state}:**\n\n" + "\n".join(fenced([*lines[:_MAX_ERROR_LINES], *left_out]))
    for name, value in run.nonfinite.items():
        yield f"**Not finite:** {_code(name)} was {value}."
    yield f"{what_runs(run.config)}, {_ranks_and_hosts(run)}"
    introduction = f"The command that repeats it; `doit reproduce {run.key}` takes the code as it was too:"
    # words that name a place of the computer it ran on don't help on another one
    portable_words = [word for word in run.words if not word.lstrip("+").startswith(("paths.", "tracking.uri="))]
    yield "\n".join([introduction, "", *fenced([_command(portable_words)])])
    deciding_words = [word for word in run.words if makes_another_run(word)]
    if deciding_words:
        yield "It differs from the defaults in:\n\n" + "\n".join(f"- {_code(word)}" for word in deciding_words)
    if commit := run.provenance.get("git_commit"):
        is_dirty = bool(run.provenance.get("git_dirty"))
        changed = ", with uncommitted changes: the artifact changes.patch" if is_dirty else ""
        yield f"Commit {_code(str(commit)[:12])}{changed}"
    for key, (statement, *differences) in run.accepted.items():
        decision = statement.partition(":")[0].capitalize()
        yield f"**{decision}** for the key {key} as well ({statement}), which differs in:"
        yield "\n".join(f"- {item}" for item in differences)


def _command(words: Sequence[str]) -> str:
    return shlex.join(["doit", "train", *words])


def _ranks_and_hosts(run: _Run) -> str:
    """Return ``4 ranks on node0 (2 × H200), node1 (2 × H200)``."""
    count, environments = sum(ranks_of(run.key_json, run.plan)), run.provenance.get("environments")
    ranks = counted(count, "rank") if count else "ranks unknown"
    facts_by_host = environments if isinstance(environments, Mapping) else {}
    hosts = [_host(name, facts_by_host.get(name)) for name in run.hosts]
    return f"{ranks} on {first_of(hosts, _MAX_HOSTS)}" if hosts else ranks


def _host(name: str, facts: Any) -> str:
    """Return ``node0 (2 × H200)``: a host with its GPUs, or its processor."""
    if not isinstance(facts, Mapping):
        return name
    gpus = facts.get("gpu_models")
    if isinstance(gpus, list) and gpus:
        return f"{name} ({len(gpus)} × {gpus[0]})"
    model, cpus = facts.get("cpu_model"), facts.get("cpus")
    return f"{name} ({model}, {cpus} cores)" if model and cpus else name


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# ------------------------------------------------------------------------------------ parameters, tags
def mlflow_key(name: str) -> str:
    """Replace characters that MLflow refuses: ``a[0]=b`` becomes ``a_0_b``. Slashes between words stay."""
    words = (_NOT_ALLOWED.sub("_", word).strip("_") for word in name.split("/"))
    kept = "/".join(word for word in words if word not in ("", ".", ".."))
    return (kept or "_")[:_MAX_NAME]


def distinct(key: str, taken: Container[str]) -> str:
    """Append underscores to ``key`` until no other metric or parameter has it."""
    name, ending = key, ""
    while name in taken:
        ending += "_"
        name = key[: _MAX_NAME - len(ending)] + ending
    return name


def _params(run: _Run) -> dict[str, str]:
    """Return what decides the result: the configuration as the run's key counts it, and the topology of ranks."""
    topology = run.key_json.get("topology")
    ranks = {name: value for name, value in topology.items() if name != "env"} if isinstance(topology, dict) else {}
    params: dict[str, str] = {}
    for path, value in _leaves("", {**canonical_config(run.config), **({"topology": ranks} if ranks else {})}):
        params[distinct(mlflow_key(path), params)] = _cut(redact(_text(value)), _MAX_PARAM, run_folder.CONFIG)
    return params


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten ``{"a": {"b": [1, {"c": 2}]}}`` into a.b.0 = 1, a.b.1.c = 2; lists of plain values stay whole."""
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for name, item in value.items():
        yield from _leaves(f"{prefix}.{name}" if prefix else str(name), item)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str, limit: int, file: str) -> str:
    """Truncate a text that MLflow would truncate silently, and say so in it. ``file``: has the whole text."""
    if len(text) <= limit:
        return text
    ending = f"… ({len(text)} characters; the whole is in {file})"
    return text[: limit - len(ending)] + ending


def _tags(run: _Run) -> dict[str, str]:
    provenance, summary = run.provenance, run.summary
    dirty, command = provenance.get("git_dirty"), str(provenance.get("command") or "")
    doit, space, arguments = command.partition(" ")
    user = None
    with suppress(KeyError, OSError):  # a container's user id without a name
        user = getpass.getuser()
    # tags say which sweeps the run belongs to, as MLflow draws no charts of nested runs; sweep.key is the latest sweep
    sweeps: dict[str, Any] = {f"sweep.{item.get('key')}": item.get("trial") for item in run.sweeps}
    if run.sweeps:
        sweeps |= {f"sweep.{name}": run.sweeps[-1].get(name) for name in ("key", "name", "trial")}
        sweeps["sweep.overrides"] = " ".join(swept_overrides(run.sweeps))
    not_in_key = {name: run.config[name] for name in _NOT_IN_KEY if name in run.config}
    not_in_key["dataset"] = {"source": _dataset(run.config).get("source")}
    # MLflow's column Source shows only the text after the last slash, so words with a slash are left out
    source = _command([word for word in run.words if makes_another_run(word) and "/" not in word])
    tags = {
        "mlflow.user": user,
        "mlflow.source.name": source if command else None,
        "mlflow.source.type": "LOCAL" if command else None,
        "mlflow.source.git.commit": provenance.get("git_commit"),
        "mlflow.note.content": "\n\n".join(_page_paragraphs(run)),
        "paceline.run_key": run.key,
        "paceline.attempt": str(max((entry.attempt for entry in run.entries), default=0)),
        "paceline.command": f"{doit.rpartition('/')[2]}{space}{arguments}",
        "paceline.dirty": None if dirty is None else str(bool(dirty)).lower(),
        "paceline.hosts": ", ".join(run.hosts),
        "paceline.overrides": " ".join(run.words),
        "paceline.synthetic": str(run.synthetic).lower(),
        "paceline.weights_sha256": summary.get("weights_sha256"),
        "paceline.dataset_digest": summary.get("dataset_digest"),
        "paceline.world_size": summary.get("world_size"),
        "paceline.nonfinite": "; ".join(f"{name}: {value}" for name, value in run.nonfinite.items()),
        **sweeps,
        **{
            path: _text(value)  # lists stay whole, so that hundreds of hosts are one tag
            for path, value in flat(not_in_key)
            if value not in (None, "", [], {}) and not path.startswith("tracking.server_")
        },
        "paceline.accepted_for": "; ".join(f"{key}: {lines[0]}" for key, lines in run.accepted.items()),
        "paceline.state": run.entries[-1].state if run.entries else None,
    }
    return {
        mlflow_key(name): _cut(redact(str(value)), _MAX_TAG, run_folder.PROVENANCE)
        for name, value in tags.items()
        if value not in (None, "")
    }
