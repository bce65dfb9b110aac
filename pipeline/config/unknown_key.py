"""The error about an unknown key of the configuration, with the name that was probably meant.

Names are looked for among fields, groups and the verb's options, and by the names that other tools use for them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from pipeline.cluster.launchers.settings import HOST_FIELDS
from pipeline.config.overrides.words import SCRIPT_FIELDS
from pipeline.config.schema import OPTIONS, PROGRAMS
from pipeline.core.errors import UsageError, nearest, suggestion
from pipeline.core.places import ROOT, conf_dirs
from pipeline.core.redact import hide, is_secret_name

_MIN_SIMILARITY = 0.7  # with less, "paths" is suggested for "epochs", and "nodes" for "lines"
_FOREIGN_NAMES = {  # name or override here → names in other tools
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
ALIASES = {word: name for name, words in _FOREIGN_NAMES.items() for word in words.split()}
"""Names in torchrun, Lightning, Accelerate, transformers and beginners' scripts → names here."""
RESUME_NAMES = ("resume", "resume_from", "resume_from_checkpoint", "ckpt_path", "checkpoint", "auto_resume", "restore")
"""Options by which other tools continue a run; here the same command continues it."""
RESUME_HINT = "the same command goes on where its run was"
_HOST_ALIASES = {"slots": "nproc_per_node", "host": "name", "hostname": "name", "ip": "address"}
"""Names of a host's fields in other tools → their names here."""


class UnknownKeyError(UsageError):
    """A key of the configuration that no code reads.

    Args:
        key: as it was typed, without ``+``.
        value: the text behind ``=``; None for ``~key``.
        groups: the groups of the configuration.
        chosen: the full names of the fields that the composed configuration has.
        unchosen: field of an option that isn't chosen → such options (``optimizer.momentum`` → ``optimizer=sgd``).
        verb, options: the typed verb, and its options.
        other_options: option of other verbs → these verbs.
    """

    def __init__(
        self,
        key: str,
        value: str | None,
        *,
        groups: Sequence[str],
        chosen: Sequence[str],
        unchosen: Mapping[str, Sequence[str]],
        verb: str = "",
        options: Sequence[str] = (),
        other_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.key, self._value, self._verb, self._options = key, value, verb, options
        self._groups, self._chosen, self._unchosen = groups, chosen, unchosen
        super().__init__(f"unknown key {key!r}; {self._advice(other_options)}")

    @property
    def meant(self) -> str | None:
        """The override that was probably meant, quoted for the shell; None if no name is similar."""
        name = self._alias() or self._most_similar()
        return self._word(name) if name else None

    def of_verb(self, verb: str, options: Sequence[str], others: Mapping[str, Sequence[str]]) -> UnknownKeyError:
        """Return the same error with suggestions for `doit VERB`."""
        return UnknownKeyError(
            self.key, self._value, groups=self._groups, chosen=self._chosen, unchosen=self._unchosen,
            verb=verb, options=options, other_options=others,
        )  # fmt: skip

    def _advice(self, other_options: Mapping[str, Sequence[str]]) -> str:
        """Return what to type instead, by the first of these that applies, and the valid names."""
        key, start = self.key, ""
        if _parts(key)[-1] in RESUME_NAMES:
            return f"{RESUME_HINT}, and init.weights=KEY begins another one with its weights; {self._valid(key)}"
        # a field that exists, but only with another option of its group
        for name, options in self._unchosen.items():
            # the key may be the whole name, or the field alone: optimizer.momentum, momentum
            if key == name or (key == name.rpartition(".")[2] and key not in ALIASES):
                if name in SCRIPT_FIELDS:  # script=train.py → program.script=train.py
                    return f"did you mean {self._word(name)}? {self._valid(key)}"
                # cluster.gpus, a field of cluster=kubernetes → cluster.nproc_per_node, which the chosen option has
                if (chosen_field := ALIASES.get(_parts(key)[-1])) in self._chosen:
                    start = f"did you mean {self._word(str(chosen_field))}? "
                # optimizer.momentum → optimizer.momentum is a field of optimizer=sgd
                return f"{start}{name} is a field of {', '.join(options)}; {self._valid(name)}"
        if self._alias() is None and key in other_options:
            return f"it is an option of doit {', '.join(other_options[key])}; {self._valid(key)}"
        return (f"did you mean {self.meant}? " if self.meant else "") + self._valid(key)

    def _alias(self) -> str | None:
        """Return Paceline's name for a name of other tools, or with a value: ``trainer.precision=fp16`` for ``fp16``.

        Otherwise return a field of any group whose last part is the key's: ``optimizer.lr`` for ``lr``.
        """
        parts = _parts(self.key)
        if name := ALIASES.get(".".join(parts)) or ALIASES.get(parts[-1]):
            return name
        same = (name for name in self._chosen if name.rpartition(".")[2] == parts[-1])
        return None if parts[-1] in ("name", "run") else next(same, None)  # too common to mean one certain field

    def _most_similar(self) -> str | None:
        """Return the most similar name: in the key's section if there is such a section, else among all names."""
        parts, by_short_name = _parts(self.key), {name.rpartition(".")[2]: name for name in reversed(self._chosen)}
        word, names = parts[-1], {name.rpartition(".")[2]: name for name in self._chosen if _is_in(parts[0], name)}
        if len(parts) == 1:
            by_short_name.pop("name", None)
            names = {**by_short_name, **{name: name for name in (*self._groups, *self._options)}}
        elif not names:
            word, names = ".".join(parts), {name: name for name in (*self._chosen, *self._groups)}
        return names.get(nearest(word, names, _MIN_SIMILARITY) or "")

    def _valid(self, key: str) -> str:
        """List the valid names: in the section of ``key``, or if there is no such section, the groups and options."""
        section = re.split(r"[./]", key)[0]
        in_section = [name[len(section) + 1 :] for name in self._chosen if _is_in(section, name)]
        if section != key and in_section:
            return f"valid in {section}: {', '.join(sorted(in_section))}"
        options = f"; of doit {self._verb}: {', '.join(sorted(self._options))}" if self._options else ""
        return f"valid: {', '.join(sorted(self._groups))}{options}"

    def _word(self, name: str) -> str:
        """Return the typed override with ``name`` in place of the key, quoted for the shell if necessary."""
        value = self._value
        if value is None or "=" in name or is_secret_name(self.key):
            return name
        if name == "cluster.device" and value in ("gpu", "gpus", "true"):  # as Lightning calls it
            value = "cuda"
        return shlex.quote(f"{name}={hide(value)}")


def unknown_key(key: str, value: str | None, config: Mapping[Any, object]) -> UnknownKeyError:
    """Return the error for an unknown key. ``config``: the configuration composed without it, as plain containers."""
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
    return UnknownKeyError(key, value, groups=groups, chosen=chosen, unchosen=unchosen)


def group_names() -> list[str]:
    """List the groups of conf/, sorted."""
    return sorted({path.name for folder in conf_dirs(ROOT) for path in folder.iterdir() if path.is_dir()})


def field_names(config: Mapping[Any, object]) -> Iterator[str]:
    """Yield the full names of all fields of a composed configuration: ``trainer.epochs``, …, ``seed``."""
    for group, section in config.items():
        yield from (f"{group}.{name}" for name in section) if isinstance(section, Mapping) else (str(group),)


def within(parent: str, key: str, names: Sequence[str]) -> str:
    """Return a suggestion for an unknown ``key`` of the section ``parent``, which has these ``names``."""
    close = nearest(key, names)
    start = f"did you mean {parent}.{close}? " if close else ""
    return f"{start}valid in {parent}: {', '.join(sorted(names))}"


def not_of_a_host(field: str, entry: str) -> UsageError:
    """Return the error for an unknown field of a host. ``entry``: the words that set it, for the message."""
    alias = _HOST_ALIASES.get(field) or ALIASES.get(field, "").removeprefix("cluster.")
    similar_to = alias if alias in HOST_FIELDS else field
    return UsageError(f"{entry}: {field!r} is no field of a host; {suggestion(similar_to, HOST_FIELDS)}")


def _parts(key: str) -> list[str]:
    return re.split(r"[./]", key.lower().replace("-", "_"))


def _is_in(section: str, name: str) -> bool:
    return name.startswith(f"{section}.")
