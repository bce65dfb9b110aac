"""Describe a run folder in MLflow's terms: name, parameters, tags, data, progress. Read-only."""

from __future__ import annotations

import getpass
import json
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.redact import without_secrets
from pipeline.core.specs import State
from pipeline.keys.canonical import canonical_config
from pipeline.runs import journal
from pipeline.runs import result as results
from pipeline.runs.acceptance import accepted_for
from pipeline.runs.contents import chosen_in, decides, overrides_in, ranks_of, run_name, what
from pipeline.runs.folder import RunFolder
from pipeline.tracking.address import redact
from trainers.contract import run_folder

_DIGEST_DIGITS = 12  # of 64; MLflow accepts 36, and its table shows the first ones
_MAX_SOURCE = 65535


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """One data set.

    ``source``, ``schema`` and ``profile`` are JSON texts in MLflow's format; ``context`` names the splits used.
    """

    name: str
    digest: str
    source: str
    schema: str
    profile: str
    context: str


def of_pack(config: Mapping[str, Any], manifest: Mapping[str, Any], digest: str) -> DataInput | None:
    """Describe a run's data; None if its digest is unknown, or there is none (a script without data).

    Args:
        config: the content of config.json.
        manifest: of the data pack; empty for a script's files.
        digest: the data's digest in the run's key.
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


_MAX_ERROR_LINES = 30
_MAX_HOSTS = 16
_SYNTHETIC = "**Synthetic data:** the images are generated, so the accuracy of this run means nothing."


@dataclass(frozen=True, kw_only=True)
class Story:
    """The facts for the description of a run.

    ``error`` is that of a failed attempt, else ''. ``accepted`` maps keys to the user's statement and the differences.
    ``nonfinite`` maps a metric to its non-finite value and step.
    """

    key: str
    what: str
    state: str
    words: Sequence[str]
    environments: Mapping[str, Any]
    hosts: Sequence[str]
    ranks: int
    commit: str | None
    dirty: bool
    error: str
    synthetic: bool
    accepted: Mapping[str, list[str]]
    nonfinite: Mapping[str, str]


def note(story: Story) -> str:
    """Write the description in paragraphs, the most important first."""
    return "\n\n".join(_paragraphs(story))


def _paragraphs(story: Story) -> Iterator[str]:
    if story.synthetic:
        yield _SYNTHETIC
    if story.error:
        lines = story.error.strip().splitlines()
        left_out = [f"… ({len(lines) - _MAX_ERROR_LINES} more lines)"] if len(lines) > _MAX_ERROR_LINES else []
        yield f"**{story.state}:**\n\n" + _block([*lines[:_MAX_ERROR_LINES], *left_out])
    for name, value in story.nonfinite.items():
        yield f"**Not finite:** {_code(name)} was {value}."
    yield f"{story.what}, {_ranks(story)}"
    again = f"The command that repeats it; `doit reproduce {story.key}` takes the code as it was too:"
    yield again + "\n\n" + _block([command([word for word in story.words if not _is_of_files(word)])])
    differs = [word for word in story.words if decides(word)]
    if differs:
        yield "It differs from the defaults in:\n\n" + "\n".join(f"- {_code(word)}" for word in differs)
    if story.commit:
        changed = ", with uncommitted changes: the artifact changes.patch" if story.dirty else ""
        yield f"Commit {_code(story.commit[:12])}{changed}"
    for key, (said, *differences) in story.accepted.items():
        yield f"**{said.partition(':')[0].capitalize()}** for the key {key} as well ({said}), which differs in:"
        yield "\n".join(f"- {item}" for item in differences)


def _is_of_files(word: str) -> bool:
    """Return True if an override only names folders or the tracking store, which may differ in a repetition."""
    return word.lstrip("+").startswith(("paths.", "tracking.uri="))


def command(words: Sequence[str]) -> str:
    """Return the command line that a user types for the run."""
    return shlex.join(["doit", "train", *words])


def _ranks(story: Story) -> str:
    ranks = f"{story.ranks} rank{'s' if story.ranks > 1 else ''}" if story.ranks else "ranks unknown"
    shown = [_host(name, story.environments.get(name)) for name in story.hosts[:_MAX_HOSTS]]
    more = [f"and {len(story.hosts) - _MAX_HOSTS} more"] if len(story.hosts) > _MAX_HOSTS else []
    return f"{ranks} on {', '.join([*shown, *more])}" if shown else ranks


def _host(name: str, known: Any) -> str:
    """Return ``node0 (2 × H200)``: a host with its GPUs, or its processor."""
    if not isinstance(known, Mapping):
        return name
    gpus = known.get("gpu_models")
    if isinstance(gpus, list) and gpus:
        return f"{name} ({len(gpus)} × {gpus[0]})"
    model, cpus = known.get("cpu_model"), known.get("cpus")
    return f"{name} ({model}, {cpus} cores)" if model and cpus else name


def _code(text: str) -> str:
    """Format as inline code, with any backticks inside."""
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(lines: Sequence[str]) -> str:
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return "\n".join([fence, *lines, fence])


_MAX_NAME = 250  # characters, MLflow's own limits
_MAX_PARAM = 6000
_MAX_TAG = 8000
_NOT_ALLOWED = re.compile(r"[^\w\-. :]+")
_WHERE = ("cluster", "tracking", "paths")
ENDED = (State.FINISHED, State.PRUNED, State.FAILED, State.KILLED)


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
    """Combine config, key, provenance, plan and summary; missing parts are left out.

    ``nonfinite``: metric → its first non-finite value and step.
    """
    files = _RunFiles.read(run_dir)
    synthetic = is_synthetic(run_dir)
    entries = journal.read(run_dir / run_folder.JOURNAL)
    name = run_name(files.config, files.words, files.key, swept=chosen_in(files.sweeps))
    story = _story(run_dir, files, entries, synthetic, {**results.nonfinite(files.summary), **(nonfinite or {})})
    return Description(
        key=files.key,
        name=redact(name) + (" (synthetic data)" if synthetic else ""),
        params=_params(files.config, files.known),
        tags={
            **_tags(run_dir, files, story, max((e.attempt for e in entries), default=0)),
            **({"paceline.state": str(entries[-1].state)} if entries else {}),
        },
        start_ms=int(entries[0].time * 1000) if entries else None,
        data=_data(run_dir, files),
    )


@dataclass(frozen=True, kw_only=True)
class _RunFiles:
    """The files of a run folder that describe the run. ``known`` is key.json."""

    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    known: Mapping[str, Any]
    plan: Mapping[str, Any]
    summary: Mapping[str, Any]
    sweeps: list[dict[str, Any]]
    key: str

    @classmethod
    def read(cls, run_dir: Path) -> _RunFiles:
        known = read_object(run_dir / run_folder.KEY)
        return cls(
            config=without_secrets(read_object(run_dir / run_folder.CONFIG)),
            provenance=read_object(run_dir / run_folder.PROVENANCE),
            known=known,
            plan=read_object(run_dir / run_folder.PLAN),
            summary=read_summary(run_dir),
            sweeps=RunFolder(run_dir).sweeps(),
            key=str(known.get("key") or run_dir.name),
        )

    @property
    def words(self) -> list[str]:
        return overrides_in(self.provenance)

    @property
    def hosts(self) -> list[str]:
        hosts = self.provenance.get("hosts") or [node.get("host") for node in _objects(self.plan.get("nodes"))]
        return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _story(
    run_dir: Path, files: _RunFiles, entries: list[journal.Entry], synthetic: bool, nonfinite: Mapping[str, str]
) -> Story:
    environments = files.provenance.get("environments")
    failed = bool(entries) and entries[-1].state in (State.FAILED, State.KILLED)
    commit = files.provenance.get("git_commit")
    return Story(
        key=files.key,
        what=what(files.config),
        state=str(entries[-1].state) if entries else "",
        words=files.words,
        environments=environments if isinstance(environments, dict) else {},
        hosts=files.hosts,
        ranks=sum(ranks_of(files.known, files.plan)),
        commit=str(commit) if commit else None,
        dirty=bool(files.provenance.get("git_dirty")),
        error=entries[-1].detail if failed else "",
        synthetic=synthetic,
        accepted=accepted_for(run_dir),
        nonfinite=nonfinite,
    )


def _data(run_dir: Path, files: _RunFiles) -> DataInput | None:
    digest = files.known.get("data") or files.provenance.get("data_digest")
    data = of_pack(files.config, read_object(run_dir / "data/manifest.json"), digest if isinstance(digest, str) else "")
    return None if data is None else replace(data, source=redact(data.source))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or damaged."""
    return documents.read_or_none(path) or {}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read summary.json, whose seal must match (files of older versions have none)."""
    try:
        return documents.read_sealed(run_dir / run_folder.SUMMARY)
    except documents.UnsealedError:
        return read_object(run_dir / run_folder.SUMMARY)
    except (OSError, documents.DamagedError):
        return {}


def is_synthetic(run_dir: Path) -> bool:
    """Return True for generated data: from the summary, else the pack's manifest, else the data set's name."""
    for described in (read_summary(run_dir), read_object(run_dir / "data/manifest.json")):
        if described.get("synthetic") is not None:
            return bool(described["synthetic"])
    return _option(read_object(run_dir / run_folder.CONFIG), "dataset") == "synthetic"


def mlflow_key(name: str) -> str:
    """Replace characters that MLflow refuses: ``a[0]=b`` → ``a_0_b``. Slashes between words stay."""
    words = (_NOT_ALLOWED.sub("_", word).strip("_") for word in name.split("/"))
    kept = "/".join(word for word in words if word not in ("", ".", ".."))
    return (kept or "_")[:_MAX_NAME]


def distinct(key: str, taken: Container[str]) -> str:
    """Append underscores to ``key`` until it is free: two names may differ only in refused characters."""
    name, ending = key, ""
    while name in taken:
        ending += "_"
        name = key[: _MAX_NAME - len(ending)] + ending
    return name


def _option(config: Mapping[str, Any], group: str) -> str:
    section = config.get(group)
    return str(section.get("name", group)) if isinstance(section, dict) else group


def _params(config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that decide the result: the key's configuration, and the topology of ranks."""
    topology = known.get("topology")
    ranks = {name: value for name, value in topology.items() if name != "env"} if isinstance(topology, dict) else {}
    params: dict[str, str] = {}
    for path, value in _leaves("", {**canonical_config(config), **({"topology": ranks} if ranks else {})}):
        params[distinct(mlflow_key(path), params)] = _cut(redact(_text(value)), _MAX_PARAM, run_folder.CONFIG)
    return params


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten ``{"a": {"b": [1, {"c": 2}]}}`` into a.b.0 = 1, a.b.1.c = 2; lists of plain values stay whole."""
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
    """Truncate with a note in the value, because MLflow truncates silently."""
    if len(text) <= limit:
        return text
    ending = f"… ({len(text)} characters; the whole is in {whole})"
    return text[: limit - len(ending)] + ending


def _tags(run_dir: Path, files: _RunFiles, story: Story, attempt: int) -> dict[str, str]:
    provenance, summary = files.provenance, files.summary
    dirty = provenance.get("git_dirty")
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": _source(files.words) if provenance.get("command") else None,
        "mlflow.source.type": "LOCAL" if provenance.get("command") else None,
        "mlflow.source.git.commit": provenance.get("git_commit"),
        "mlflow.note.content": note(story),
        "paceline.run_key": files.key,
        "paceline.attempt": str(attempt),
        "paceline.command": _typed(provenance.get("command")),
        "paceline.dirty": None if dirty is None else str(bool(dirty)).lower(),
        "paceline.hosts": ", ".join(files.hosts),
        "paceline.overrides": " ".join(files.words),
        "paceline.synthetic": str(story.synthetic).lower(),
        "paceline.weights_sha256": summary.get("weights_sha256"),
        "paceline.dataset_digest": summary.get("dataset_digest"),
        "paceline.world_size": summary.get("world_size"),
        "paceline.nonfinite": "; ".join(f"{name}: {said}" for name, said in story.nonfinite.items()),
        **_sweep_tags(files.sweeps),
        **_where_tags(files.config),
        "paceline.accepted_for": "; ".join(f"{key}: {lines[0]}" for key, lines in story.accepted.items()),
    }
    return {
        mlflow_key(name): _cut(redact(str(value)), _MAX_TAG, run_folder.PROVENANCE)
        for name, value in tags.items()
        if value not in (None, "")
    }


def _typed(command: object) -> str | None:
    """Return the command without doit's folder."""
    if not isinstance(command, str) or not command:
        return None
    first, space, rest = command.partition(" ")
    return f"{first.rpartition('/')[2]}{space}{rest}"


def _source(words: list[str]) -> str:
    """Return the command for a column of MLflow's table, which only shows the text after the last slash."""
    return command([word for word in words if decides(word) and "/" not in word])


def _sweep_tags(sweeps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run's sweeps as flat tags, because MLflow shows no charts of nested runs.

    ``sweep.key`` is the latest.
    """
    tags = {f"sweep.{item.get('key')}": item.get("trial") for item in sweeps}
    if sweeps:
        last = sweeps[-1]
        tags |= {f"sweep.{name}": last.get(name) for name in ("key", "name", "trial")}
        tags["sweep.overrides"] = " ".join(chosen_in(sweeps))
    return tags


def _where_tags(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of cluster, tracking and paths as tags such as ``cluster.launcher``; unset ones are left
    out."""
    where: dict[str, Any] = {name: config[name] for name in _WHERE if name in config}
    if isinstance(dataset := config.get("dataset"), dict):
        where["dataset"] = {"source": dataset.get("source")}
    tags: dict[str, str] = {}
    for name in where:
        for path, value in _fields(name, where[name]):
            if value not in (None, "", [], {}) and not path.startswith("tracking.server_"):
                tags[path] = _text(value)
    return tags


def _fields(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten like ``_leaves``, but keep lists whole, so that hundreds of hosts are one tag."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _fields(f"{prefix}.{name}", item)
    else:
        yield prefix, value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return None
