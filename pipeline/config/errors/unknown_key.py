"""Suggest a name for an unknown key of the command line.

Keys are compared with the verb's options, the groups, the full and short names of all fields, and the names that other
tools use for them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config.overrides.words import NAME_A_SCRIPT
from pipeline.config.schema import OPTIONS, PROGRAMS
from pipeline.core.errors import UsageError, nearest, suggestion
from pipeline.core.places import ROOT, conf_dirs
from pipeline.core.redact import hide, is_secret_name

_LEAST = 0.7  # similarity; that of "epochs" and "paths", or "lines" and "nodes", is lower
_ELSEWHERE = {
    "trainer.global_batch_size": "batch batch_size bs global_batch train_batch_size per_device_train_batch_size",
    "trainer.epochs": "epoch max_epochs num_epochs n_epochs num_train_epochs",
    "trainer.max_steps": "steps num_steps total_steps iterations max_iters",
    "trainer.accumulate_steps": "accumulate_grad_batches gradient_accumulation_steps grad_accum",
    "trainer.precision": "dtype mixed_precision",
    "trainer.precision=auto": "amp",
    "trainer.precision=fp16": "fp16",
    "trainer.precision=bf16": "bf16",
    "trainer.log_every_steps": "log_interval log_every_n_steps logging_steps",
    "trainer.checkpoint_every_steps": "save_every save_steps",
    "optimizer.lr": "learning_rate base_lr",
    "optimizer.weight_decay": "wd decay",
    "cluster.nproc_per_node": "gpus ngpus num_gpus devices nproc num_processes ranks world_size",
    "cluster.device": "accelerator",
    "cluster=pssh cluster.hosts='[HOST1,HOST2]'": "nodes num_nodes nnodes",
    "model": "arch net network backbone",
    "optimizer": "optim opt",
    "schedule": "scheduler lr_scheduler sched",
    "dataset": "data ds",
    "experiment": "exp config recipe preset",
    "dataset.source": "dataset.path dataset.root dataset.dir dataset.folder dataset.data_dir",
    "cluster.hosts='[USER@HOST]'": "cluster.user cluster.username",
    "seed": "random_seed manual_seed",
    "paths.data": "data_dir data_path data_root",
    "paths.runs": "output_dir out_dir log_dir save_dir",
    "tracking.uri": "tracking_uri mlflow_uri",
}
MEANT = {word: name for name, words in _ELSEWHERE.items() for word in words.split()}
"""Names in torchrun, Lightning, Accelerate, transformers and beginners' scripts → names here."""
RESUMES = ("resume", "resume_from", "resume_from_checkpoint", "ckpt_path", "checkpoint", "auto_resume", "restore")
"""What asks other tools to continue a run."""
GOES_ON = "the same command goes on where its run was"
HOST_FIELDS = tuple(item.name for item in fields(HostConfig))
_OF_HOSTS = {"slots": "nproc_per_node", "host": "name", "hostname": "name", "ip": "address"}  # as others call them


@dataclass(frozen=True, kw_only=True)
class Names:
    """The valid names: ``fields`` in full, such as ``trainer.epochs``, ``options`` of the verb.

    ``unchosen`` are fields that only other options of a group have, with these options (``optimizer.momentum`` →
    ``optimizer=sgd``), ``other_options`` those of other verbs, with these verbs.
    """

    groups: tuple[str, ...]
    fields: tuple[str, ...]
    unchosen: Mapping[str, Sequence[str]]
    verb: str = ""
    options: tuple[str, ...] = ()
    other_options: Mapping[str, Sequence[str]] | None = None


class UnknownKeyError(UsageError):
    """A key that nothing reads, as it was typed without ``+``, with the value typed for it; None: ``~key``."""

    def __init__(self, key: str, value: str | None, names: Names) -> None:
        self.key, self._value, self._names = key, value, names
        super().__init__(_text(key, value, names))

    @property
    def meant(self) -> str | None:
        """The word that was probably meant, with its value, quoted for the shell; None if no name is similar."""
        match = known_as(self.key, self._names) or like(self.key, self._names)
        return _word(self.key, match, self._value) if match else None

    def of_verb(self, verb: str, options: tuple[str, ...], others: Mapping[str, Sequence[str]]) -> UnknownKeyError:
        """Return the same error for a user of ``doit verb``."""
        names = replace(self._names, verb=verb, options=options, other_options=others)
        return UnknownKeyError(self.key, self._value, names)


def unknown_key(key: str, value: str | None, config: Any) -> UnknownKeyError:
    """Return the error for an unknown key. ``config`` is the composition without it, as plain containers."""
    chosen = tuple(field_names(config))
    groups = sorted({*map(str, config), *group_names()})
    script = (f"program.{item.name}" for item in fields(PROGRAMS["script"]))
    unchosen = {name: ["program=script"] for name in script if name not in chosen}
    for group, options in OPTIONS.items():
        for option in options.names():
            with suppress(UsageError):  # an option that can't be read doesn't matter unless it is chosen
                for item in fields(options.settings(option)):
                    if (name := f"{group}.{item.name}") not in chosen:
                        unchosen.setdefault(name, []).append(f"{group}={option}")
    return UnknownKeyError(key, value, Names(groups=tuple(groups), fields=chosen, unchosen=unchosen))


def group_names() -> list[str]:
    """List the groups of conf/, sorted."""
    return sorted({path.name for folder in conf_dirs(ROOT) for path in folder.iterdir() if path.is_dir()})


def _text(key: str, value: str | None, names: Names) -> str:
    start = f"unknown key {key!r}; "
    if _parts(key)[-1] in RESUMES:
        return f"{start}{GOES_ON}, and init.weights=KEY begins another one with its weights; {_valid(key, names)}"
    for name in names.unchosen:
        if key == name or (key == name.rpartition(".")[2] and key not in MEANT):
            if name in NAME_A_SCRIPT:
                return f"{start}did you mean {_word(key, name, value)}? {_valid(key, names)}"
            everywhere = MEANT.get(_parts(key)[-1])
            if everywhere in names.fields:
                start += f"did you mean {_word(key, everywhere, value)}? "
            return f"{start}{name} is a field of {', '.join(names.unchosen[name])}; {_valid(name, names)}"
    match = known_as(key, names)
    if match is None and (verbs := (names.other_options or {}).get(key)):
        return f"{start}it is an option of doit {', '.join(verbs)}; {_valid(key, names)}"
    if match := match or like(key, names):
        return f"{start}did you mean {_word(key, match, value)}? {_valid(key, names)}"
    return start + _valid(key, names)


def _word(key: str, match: str, value: str | None) -> str:
    """Return the corrected word, quoted for the shell if necessary."""
    if value is None or "=" in match or is_secret_name(key):
        return match
    if match == "cluster.device" and value in ("gpu", "gpus", "true"):  # as Lightning calls it
        value = "cuda"
    return shlex.quote(f"{match}={hide(value)}")


def known_as(key: str, names: Names) -> str | None:
    """Return the name for which other tools use ``key``, or a field of that short name in any group, or None.

    The name may include a value: ``trainer.precision=fp16`` for ``fp16``.
    """
    short = _parts(key)[-1]
    if name := MEANT.get(".".join(_parts(key))) or MEANT.get(short):
        return name
    return next(
        (name for name in names.fields if short not in ("name", "run") and name.rpartition(".")[2] == short), None
    )


def like(key: str, names: Names) -> str | None:
    """Return the name with the spelling most similar to ``key``, or None."""
    parts = _parts(key)
    short = parts[-1]
    inside = [name for name in names.fields if len(parts) > 1 and name.startswith(f"{parts[0]}.")]
    if match := _nearest(short, {name.rpartition(".")[2]: name for name in inside}):
        return match
    if len(parts) > 1:
        return None if inside else _nearest(".".join(parts), {name: name for name in (*names.fields, *names.groups)})
    known = {name.rpartition(".")[2]: name for name in reversed(names.fields) if not name.endswith(".name")}
    return _nearest(short, {**known, **{name: name for name in (*names.groups, *names.options)}})


def _parts(key: str) -> list[str]:
    return re.split(r"[./]", key.lower().replace("-", "_"))


def _nearest(word: str, known: Mapping[str, str]) -> str | None:
    close = nearest(word, known, _LEAST)
    return known[close] if close is not None else None


def _valid(key: str, names: Names) -> str:
    """List the valid names in the place of ``key``."""
    parent = re.split(r"[./]", key)[0]
    inside = [name[len(parent) + 1 :] for name in names.fields if name.startswith(f"{parent}.")]
    if parent != key and inside:
        return f"valid in {parent}: {', '.join(sorted(inside))}"
    own = f"; of doit {names.verb}: {', '.join(sorted(names.options))}" if names.options else ""
    return f"valid: {', '.join(sorted(names.groups))}{own}"


def field_names(config: Mapping[Any, object]) -> Iterator[str]:
    """Yield the full names of all fields of a composed configuration: ``trainer.epochs``, …, ``seed``."""
    for group in config:
        section = config[group]
        if isinstance(section, Mapping):
            yield from (f"{group}.{name}" for name in section)
        else:
            yield str(group)


def within(parent: str, key: str, names: Sequence[str]) -> str:
    """Return ``suggestion`` for a key of the section ``parent``, whose name stands before the match."""
    close = nearest(key, names)
    start = f"did you mean {parent}.{close}? " if close else ""
    return f"{start}valid in {parent}: {', '.join(sorted(names))}"


def not_of_a_host(word: str, where: str) -> UsageError:
    """Return the error for an unknown field of a host, in the entry ``where`` of ``cluster.hosts`` or its spares."""
    likely = _OF_HOSTS.get(word) or MEANT.get(word, "").removeprefix("cluster.")
    meant = likely if likely in HOST_FIELDS else word
    return UsageError(f"{where}: {word!r} is no field of a host; {suggestion(meant, HOST_FIELDS)}")
