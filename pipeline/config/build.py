"""The typed configuration of a run (``RunConfig``). ``build`` makes it from a composed configuration, which it checks.

Nothing is written. Of files, only the hostfile, a script and a user's own classes are read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.validation import check_batch
from pipeline.config.cluster import build_cluster
from pipeline.config.program_section import check_script, describes_script, with_script, with_script_facts
from pipeline.config.schema import (
    OPTIONS,
    NotifyConfig,
    RootConfig,
    SearchConfig,
    SweepConfig,
    TrackingConfig,
    refuse_non_finite,
    refuse_unprintable,
    typed,
)
from pipeline.config.step_source import Steps, StepSource, with_step, with_step_named
from pipeline.core import program as programs
from pipeline.core.errors import UsageError
from pipeline.core.files import expanded
from pipeline.core.program import Program
from pipeline.core.redact import HIDDEN, hide, mask_word, placeholders, secret_values, without_secrets
from pipeline.core.specs import Cluster
from pipeline.keys import content_key, rank_environment
from pipeline.keys.content_key import canonical_config, with_sorted_arguments
from pipeline.keys.script_files import ScriptFiles
from trainers.core import config as node
from trainers.script.settings import ScriptConfig

_MAX_NAME, _MAX_PATH = 255, 3000  # bytes; Linux allows paths of 4,096, and the files of runs need the rest


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of one run."""

    train: node.TrainConfig  # what the node half reads; unused for a script
    cluster: Cluster
    tracking: TrackingConfig
    runs_dir: Path
    data_dir: Path
    resolved: Mapping[str, Any]  # the whole configuration as config.json stores it, with placeholders for secrets
    overrides: tuple[str, ...]  # the typed words, with placeholders for secrets
    sweep: SweepConfig  # sweep, search and notify don't count in the key
    search: SearchConfig
    notify: NotifyConfig = dataclasses.field(default_factory=NotifyConfig, repr=False)
    script: ScriptFiles | None = None
    step: StepSource | None = None  # makes the data: train and script have the path of its output, resolved its name
    secrets: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)  # to be masked in messages
    parent: RunConfig | None = None  # the run that init.run names

    def hide(self, text: str) -> str:
        """Mask the run's secrets in a message."""
        return hide(text, self.secrets)

    def shown_words(self, words: Iterable[str]) -> tuple[str, ...]:
        """Mask the run's secrets in words of the command line."""
        return tuple(mask_word(word, self.secrets, self.resolved["cluster"]["secrets"]) for word in words)

    @property
    def canonical(self) -> dict[str, Any]:
        """The configuration part of the content key."""
        return canonical_config(self.resolved)

    @property
    def topology(self) -> dict[str, Any]:
        """The topology part of the content key."""
        return content_key.topology(self.cluster, content_key.shards_of(self.resolved))

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about which paths in a script's arguments are part of the key, to be shown before it starts."""
        return self.script.notes if self.script is not None else ()

    @property
    def program(self) -> Program:
        """The program that torchrun starts."""
        return programs.of(self.resolved)

    @property
    def uses_torchrun(self) -> bool:
        """False for a script that is one process without torchrun (program.torchrun=false)."""
        return bool(self.resolved.get(programs.SECTION, {}).get("torchrun", True))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The modules of the chosen options and of the user's own classes, which the ranks import."""
        if self.script is not None:
            return ()
        options = [OPTIONS[group].target(getattr(self.train, group).name) for group in node.GROUPS]
        own = [target.partition(":")[0] for target in self.train.targets.values()]
        return tuple(dict.fromkeys([*options, *own]))


def build(
    resolved: dict[str, Any],
    overrides: tuple[str, ...],
    *,
    root: Path,
    local_gpus: int,
    shares_batch: bool = True,
    must_exist: bool = True,
    steps: Steps | None = None,
    children: tuple[str, ...] = (),
) -> RunConfig:
    """Check a resolved configuration (plain containers, as ``compose.resolve`` returns them) and give it types.

    Args:
        root: the folder that relative paths start at.
        local_gpus: GPUs of this computer, for ``cluster.nproc_per_node=auto``.
        shares_batch: refuse a global batch that the ranks can't share; False for what doesn't train.
        must_exist: refuse a script or class of the user that doesn't exist; False for verbs that look up runs by
            overrides: their files may have moved, and ``model=own`` without a target means any class.
        steps: finds the step that the data comes from.
        children: the values of ``init.run`` of the runs that start from this one, to find a circle.

    Raises UsageError: a field that no code reads, or a value that can't work.
    """
    _refuse_unread(resolved, overrides)
    # three forms: the trainer reads the path of a step's output, a script replaces the sections of the classifier, and
    # config.json names the step, because its path isn't the same everywhere
    with_data_path, step = with_step(with_script_facts(resolved, root), steps)
    of_program, script = with_script(with_data_path, overrides, root, must_exist=must_exist, has_step=step is not None)
    of_run = with_step_named(of_program, resolved)
    train = train_config(with_data_path if must_exist else _with_any_target(with_data_path))
    cluster = build_cluster(of_run["cluster"], root=root, local_gpus=local_gpus)
    _check_together(of_run, train, cluster, root, shares_batch=shares_batch, checks_targets=must_exist)
    secrets = secret_values(of_run)
    return RunConfig(
        train=train,
        cluster=cluster,
        tracking=tracking_config(of_run["tracking"]),
        runs_dir=_folder(root, "paths.runs", of_run["paths"]["runs"]),
        data_dir=_folder(root, "paths.data", of_run["paths"]["data"]),
        resolved=stored_config(of_run, secrets),
        overrides=stored_overrides(overrides, of_run, secrets),
        sweep=SweepConfig(**of_run["sweep"]),
        search=search_config(of_run),
        notify=NotifyConfig(**(of_run.get("notify") or {})),  # null in a config.json that was edited
        script=script,
        step=step,
        secrets=secrets,
        parent=parent_of(train, overrides, root=root, local_gpus=local_gpus, children=children),
    )


def _with_any_target(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a target where it is empty, which ``train_config`` would refuse; nothing is trained with it."""
    return {
        name: {**section, "target": "any:any"}
        if isinstance(section, Mapping) and section.get("target") == ""
        else section
        for name, section in resolved.items()
    }


def tracking_config(section: Mapping[str, Any]) -> TrackingConfig:
    """Return the section ``tracking`` as the settings of its tracker. Raises UsageError: an unknown one, a bad name."""
    tracker = section.get("tracker")
    settings = TrackingConfig if tracker is None else OPTIONS["tracking"].settings(tracker)
    config: TrackingConfig = settings(**section)
    return config


def parent_of(
    train: node.TrainConfig, words: tuple[str, ...], *, root: Path, local_gpus: int, children: tuple[str, ...] = ()
) -> RunConfig | None:
    """Build the run that ``init.run`` names, or return None. Arguments as for ``build``. Raises UsageError."""
    parent_words = train.init.run
    if parent_words is None:
        return None
    from pipeline.config.compose import compose_parent  # not at the top: it imports Hydra

    try:
        resolved, overrides = compose_parent(parent_words, words, children=children)
        parent = build(resolved, overrides, root=root, local_gpus=local_gpus, children=(*children, parent_words))
    except ValueError as error:  # of shlex
        raise UsageError(f"init.run={parent_words!r} can't be split into words: {error}") from error
    except UsageError as error:
        if children or error.what.startswith("init.run"):  # the message names the field once, for the outermost run
            raise
        raise UsageError(f"init.run={parent_words!r}: {error.what}", hint=error.hint) from error
    if parent.script is not None:
        raise UsageError(f"init.run={parent_words!r} is the run of a script, of whose weights nothing is known")
    return parent


def _check_together(
    resolved: Mapping[str, Any],
    train: node.TrainConfig,
    cluster: Cluster,
    root: Path,
    *,
    shares_batch: bool,
    checks_targets: bool,
) -> None:
    """Raise UsageError for values that are right in their own section, but don't go with another section."""
    refuse_non_finite(resolved)
    if not programs.of(resolved).is_ours:
        check_script(ScriptConfig(**resolved[programs.SECTION]), cluster)
        return
    if checks_targets and (train.targets or train.dataset.name == node.OWN):
        from pipeline.config.own_targets import check_targets  # describes classes and functions of the user's own

        check_targets(train, root, cluster.python_path)
    if train.trainer.sync_batchnorm and cluster.device != "cuda" and cluster.world_size > 1:
        raise UsageError(
            "trainer.sync_batchnorm=true needs GPUs: torch.nn.SyncBatchNorm has no form for processors",
            hint="trainer.sync_batchnorm=false, or cluster.device=cuda",
        )
    if shares_batch:
        refuse_uneven(train.trainer, cluster)


def refuse_uneven(trainer: node.TrainerConfig, cluster: Cluster) -> None:
    """Raise UsageError if ranks can't share the global batch evenly, or trainer.shards can't give equal weights."""
    try:
        trainer.check_ranks(cluster.world_size)
    except node.ConfigError as error:
        raise UsageError(str(error)) from error
    check_batch(trainer.global_batch_size, cluster.world_size, trainer.accumulate_steps, trainer.shards)
    if cluster.settings.min_nodes and not trainer.shards:
        raise UsageError(
            f"cluster.min_nodes={cluster.settings.min_nodes} needs trainer.shards: without it fewer ranks give other "
            "weights, which is another run; cluster.spares=[NAME] keeps their number"
        )
    # different variables (OMP_NUM_THREADS) can give different bits
    first, *others = cluster.hosts
    for other in others if trainer.shards else ():
        for name in sorted(first.env.keys() | other.env.keys()):
            if rank_environment.counts_in_key(name) and first.env.get(name) != other.env.get(name):
                raise UsageError(
                    f"trainer.shards={trainer.shards} promises the same weights on any hosts, and {name} in the env of "
                    f"{first.label} and {other.label} differs; set it for all of them, as cluster.env.{name}"
                )


def train_config(resolved: Mapping[str, Any]) -> node.TrainConfig:
    """Return the part that the node half reads, typed and checked. Raises UsageError."""
    try:
        return node.parse(resolved, lambda group, name: OPTIONS[group].settings(name))
    except (node.ConfigError, TypeError) as error:
        raise UsageError(str(error)) from error


def search_config(resolved: Mapping[str, Any]) -> SearchConfig:
    """Return the section ``search`` as the settings of its sampler. Raises UsageError."""
    section, options = resolved["search"], OPTIONS["search"]
    if section["name"] == SearchConfig().name:  # no search
        return SearchConfig(**section)
    config: SearchConfig = typed(options.settings(section["name"]), section)
    return config


def _refuse_unread(resolved: Mapping[str, Any], words: tuple[str, ...]) -> None:
    """Raise UsageError for sections that no code reads (added by ``+name=…``), and for missing ones (``~name``)."""
    refuse_unprintable(resolved)
    sections = [item.name for item in dataclasses.fields(RootConfig)]
    for key in resolved:
        if key not in sections:
            from pipeline.config.unknown_key import unknown_key  # needed for this error alone

            values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{key}=")]
            others = {name: value for name, value in resolved.items() if name in sections}
            raise unknown_key(str(key), values[-1] if values else None, others)
    for key in sections:
        if key not in resolved:
            raise UsageError(f"{key} is missing: it was deleted; take ~{key} away")


def _folder(root: Path, field: str, value: str) -> Path:
    """Return the absolute path of a folder relative to the project. Raises UsageError: no folder can have this name."""
    if not value.strip():
        raise UsageError(f"{field} is empty; is a shell variable unset?")
    if any(len(part.encode()) > _MAX_NAME for part in Path(value).parts) or len(value.encode()) > _MAX_PATH:
        raise UsageError(f"{field}={value[:40]}… ({len(value)} characters) is too long for a folder's name")
    path = root / expanded(value, f"{field}={value}")
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110  (Path's raises)
    if not os.path.isdir(existing):  # noqa: PTH112
        raise UsageError(f"{field}={value}: {existing} is no folder; name one, or one that isn't there yet")
    return path


# ------------------------------------------------------------------------------- config.json
_NOT_OF_THE_TRAINER = ("cluster", "tracking", "paths", "sweep", "search", "step", "notify")
"""Sections that the ranks don't read."""


def stored_config(resolved: Mapping[str, Any], secrets: frozenset[str]) -> dict[str, Any]:
    """Return a resolved configuration as config.json stores it: without sections about sweeps, and without ``secrets``.

    Raises UsageError: a placeholder in place of a secret, or a secret in a field that the ranks read from config.json.
    """
    _refuse_placeholders(resolved)
    left_out = ["sweep", "search", "notify"]
    left_out += [] if describes_script(resolved) else [programs.SECTION]
    left_out += [] if resolved.get("step") else ["step"]
    shown = without_secrets({name: value for name, value in resolved.items() if name not in left_out}, secrets)
    _refuse_secrets_of_the_trainer(resolved, shown)
    return with_sorted_arguments(shown)


def stored_overrides(words: tuple[str, ...], resolved: Mapping[str, Any], secrets: frozenset[str]) -> tuple[str, ...]:
    """Return the overrides as a run stores them: with placeholders for secrets, without the section ``notify``."""
    kept = [word for word in words if not word.lstrip("+~").startswith("notify")]
    return tuple(mask_word(word, secrets, resolved["cluster"]["secrets"]) for word in kept)


def _refuse_placeholders(resolved: Mapping[str, Any]) -> None:
    """Refuse placeholders copied from a run's words or files: the secret would silently be three asterisks."""
    for name in placeholders(resolved):
        variable = name.rpartition(".")[2]
        reference = f"'${{oc.env:{variable if name.startswith('cluster.') else 'NAME'}}}'"
        word = f"env: {{{variable}: {reference}}} of the host" if ".hosts." in name else f"++{name}={reference}"
        raise UsageError(
            f"{name} holds {HIDDEN}, which stands for a secret that no file keeps; tell it anew",
            hint=f"{word}, with the value in that environment variable",
        )


def _refuse_secrets_of_the_trainer(resolved: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Raise UsageError for secrets in fields that the ranks read from config.json; their environment can have them."""
    for group, section in resolved.items():
        if group in _NOT_OF_THE_TRAINER or group not in shown or not isinstance(section, Mapping):
            continue
        for name, value in section.items():
            # a difference means that a secret was masked; dataset.source is used by the controller alone
            if shown[group][name] != value and (group, name) != ("dataset", "source"):
                field = next(iter(placeholders({group: {name: shown[group][name]}})), f"{group}.{name}")
                reader = "script" if group == programs.SECTION else "trainer"
                raise UsageError(
                    f"{field} is secret by its name or form, and the ranks would read it from config.json, "
                    "where no secret may stand",
                    hint=f"++cluster.env.MY_TOKEN='${{oc.env:MY_TOKEN}}', which the {reader} finds in its environment",
                )
