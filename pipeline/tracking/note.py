"""The description of a run on its page in MLflow (Markdown): what was run, how to do it again, where, why it failed.
Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.runs.naming import decides

_MAX_ERROR_LINES = 30
_MAX_HOSTS = 16
_SYNTHETIC = "**Synthetic data:** the images are generated, so the accuracy of this run means nothing."


@dataclass(frozen=True, kw_only=True)
class Story:
    """What the description is made of. ``error`` is that of an attempt that failed ('' otherwise), ``accepted`` maps
    keys to what a person said of them and what differs, ``nonfinite`` a metric to what it was and at which step."""

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
    """Paragraphs, what matters most first."""
    return "\n\n".join(_paragraphs(story))


def _paragraphs(story: Story) -> Iterator[str]:
    if story.synthetic:
        yield _SYNTHETIC
    if story.error:
        lines = story.error.strip().splitlines()
        left_out = [f"… ({len(lines) - _MAX_ERROR_LINES} more lines)"] if len(lines) > _MAX_ERROR_LINES else []
        yield f"**{story.state}:**\n\n" + _block([*lines[:_MAX_ERROR_LINES], *left_out])
    for name, what in story.nonfinite.items():
        yield f"**Not finite:** {_code(name)} was {what}."
    yield f"{story.what}, {_ranks(story)}"
    again = f"The command that repeats it; `doit reproduce run={story.key}` takes the code as it was too:"
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
    """Whether it says where runs, data and records lie: another place is as good to who repeats the run."""
    return word.lstrip("+").startswith(("paths.", "tracking.uri="))


def command(words: Sequence[str]) -> str:
    """What a person types to have the run."""
    return shlex.join(["doit", "train", *words])


def _ranks(story: Story) -> str:
    ranks = f"{story.ranks} rank{'s' if story.ranks > 1 else ''}" if story.ranks else "ranks unknown"
    shown = [_host(name, story.environments.get(name)) for name in story.hosts[:_MAX_HOSTS]]
    more = [f"and {len(story.hosts) - _MAX_HOSTS} more"] if len(story.hosts) > _MAX_HOSTS else []
    return f"{ranks} on {', '.join([*shown, *more])}" if shown else ranks


def _host(name: str, known: Any) -> str:
    """``node0 (2 × H200)``: with its GPUs, or its processor."""
    if not isinstance(known, Mapping):
        return name
    gpus = known.get("gpu_models")
    if isinstance(gpus, list) and gpus:
        return f"{name} ({len(gpus)} × {gpus[0]})"
    model, cpus = known.get("cpu_model"), known.get("cpus")
    return f"{name} ({model}, {cpus} cores)" if model and cpus else name


def _code(text: str) -> str:
    """As code, whatever quotes it holds."""
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(lines: Sequence[str]) -> str:
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return "\n".join([fence, *lines, fence])
