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

_LEAST_SIMILARITY = 0.7  # that of "epochs" and "paths", or "lines" and "nodes", is lower
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
_HOST_ALIASES = {"slots": "nproc_per_node", "host": "name", "hostname": "name", "ip": "address"}
"""Names of a host's fields in other tools → their names here."""


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

    def alias_of(self, key: str) -> str | None:
        """Return the name for which other tools use ``key``, or a field of that short name in any group, or None.

        The name may include a value: ``trainer.precision=fp16`` for ``fp16``.
        """
        parts = _parts(key)
        if name := MEANT.get(".".join(parts)) or MEANT.get(parts[-1]):
            return name
        same = (name for name in self.fields if name.rpartition(".")[2] == parts[-1])
        return None if parts[-1] in ("name", "run") else next(same, None)

    def most_similar(self, key: str) -> str | None:
        """Return the name with the spelling most similar to ``key``, or None."""
        parts = _parts(key)
        if len(parts) == 1:
            by_short_name = {
                name.rpartition(".")[2]: name for name in reversed(self.fields) if not name.endswith(".name")
            }
            return _nearest(parts[0], {**by_short_name, **{name: name for name in (*self.groups, *self.options)}})
        in_section = [name for name in self.fields if name.startswith(f"{parts[0]}.")]
        if not in_section:
            return _nearest(".".join(parts), {name: name for name in (*self.fields, *self.groups)})
        return _nearest(parts[-1], {name.rpartition(".")[2]: name for name in in_section})

    def valid(self, key: str) -> str:
        """List the valid names in the place of ``key``: in its section if there is such a one."""
        section = re.split(r"[./]", key)[0]
        in_section = [name[len(section) + 1 :] for name in self.fields if name.startswith(f"{section}.")]
        if section != key and in_section:
            return f"valid in {section}: {', '.join(sorted(in_section))}"
        options = f"; of doit {self.verb}: {', '.join(sorted(self.options))}" if self.options else ""
        return f"valid: {', '.join(sorted(self.groups))}{options}"


class UnknownKeyError(UsageError):
    """A key that nothing reads, as it was typed without ``+``, with the value typed for it; None: ``~key``."""

    def __init__(self, key: str, value: str | None, names: Names) -> None:
        self.key, self._value, self._names = key, value, names
        super().__init__(_text(key, value, names))

    @property
    def meant(self) -> str | None:
        """The word that was probably meant, with its value, quoted for the shell; None if no name is similar."""
        name = self._names.alias_of(self.key) or self._names.most_similar(self.key)
        return _word(self.key, name, self._value) if name else None

    def of_verb(self, verb: str, options: tuple[str, ...], others: Mapping[str, Sequence[str]]) -> UnknownKeyError:
        """Return the same error for a user of ``doit verb``."""
        names = replace(self._names, verb=verb, options=options, other_options=others)
        return UnknownKeyError(self.key, self._value, names)


def unknown_key(key: str, value: str | None, config: Any) -> UnknownKeyError:
    """Return the error for an unknown key. ``config`` is the composition without it, as plain containers."""
    chosen = tuple(field_names(config))
    groups = sorted({*map(str, config), *group_names()})
    of_script = (f"program.{item.name}" for item in fields(PROGRAMS["script"]))
    unchosen = {name: ["program=script"] for name in of_script if name not in chosen}
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
        return f"{start}{GOES_ON}, and init.weights=KEY begins another one with its weights; {names.valid(key)}"
    for name in names.unchosen:
        if key == name or (key == name.rpartition(".")[2] and key not in MEANT):
            if name in NAME_A_SCRIPT:
                return f"{start}did you mean {_word(key, name, value)}? {names.valid(key)}"
            of_every_option = MEANT.get(_parts(key)[-1])
            if of_every_option in names.fields:
                start += f"did you mean {_word(key, of_every_option, value)}? "
            return f"{start}{name} is a field of {', '.join(names.unchosen[name])}; {names.valid(name)}"
    alias = names.alias_of(key)
    if alias is None and (verbs := (names.other_options or {}).get(key)):
        return f"{start}it is an option of doit {', '.join(verbs)}; {names.valid(key)}"
    if meant := alias or names.most_similar(key):
        return f"{start}did you mean {_word(key, meant, value)}? {names.valid(key)}"
    return start + names.valid(key)


def _word(key: str, name: str, value: str | None) -> str:
    """Return the word with this name in place of ``key``, quoted for the shell if necessary."""
    if value is None or "=" in name or is_secret_name(key):
        return name
    if name == "cluster.device" and value in ("gpu", "gpus", "true"):  # as Lightning calls it
        value = "cuda"
    return shlex.quote(f"{name}={hide(value)}")


def _parts(key: str) -> list[str]:
    return re.split(r"[./]", key.lower().replace("-", "_"))


def _nearest(word: str, names: Mapping[str, str]) -> str | None:
    """Return the value of the most similar name, or None."""
    close = nearest(word, names, _LEAST_SIMILARITY)
    return names[close] if close is not None else None


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


def not_of_a_host(field: str, entry: str) -> UsageError:
    """Return the error for an unknown field of a host. ``entry``: that of ``cluster.hosts`` or its spares, in words."""
    alias = _HOST_ALIASES.get(field) or MEANT.get(field, "").removeprefix("cluster.")
    similar_to = alias if alias in HOST_FIELDS else field
    return UsageError(f"{entry}: {field!r} is no field of a host; {suggestion(similar_to, HOST_FIELDS)}")
