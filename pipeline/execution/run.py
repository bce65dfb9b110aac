"""A configured run with its key, folder, code, data and initial weights, and why it has to be made, if it has.

Every verb that makes or looks up a run begins with ``prepare``, which computes the key from files here and reads the
folder of that key. Nothing is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.launchers import settings
from pipeline.cluster.launchers.base import PackSource
from pipeline.config import conf_files
from pipeline.config.build import RunConfig
from pipeline.core import program as programs
from pipeline.core.cache import remember_in
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.redact import without_secrets
from pipeline.core.specs import Cluster
from pipeline.core.tables import first_of
from pipeline.data import store
from pipeline.data.manifest import Pack
from pipeline.execution import stored_report
from pipeline.keys import ABSENT, IMAGE, rank_environment
from pipeline.keys.content_key import ContentKey, content_key, environment
from pipeline.keys.import_closure import Closure, import_closure, missing_module_error
from pipeline.keys.script_files import with_model_inputs
from pipeline.runs import acceptance, contents
from pipeline.runs.acceptance import Acceptance
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder
from trainers.contract.data_pack import Manifest
from trainers.core.config import TrainConfig
from trainers.observation.input_changes import advice_to_add, first_change

if TYPE_CHECKING:
    from pipeline.data.trees import Tree
    from pipeline.execution.initial_weights import InitialWeights, ParentRun

VARIABLES = "variables.json"
"""The file of a run folder with digests of the variables that ranks of cluster=local inherit from the shell."""
_UNKEYED_SHOWN = 3
CodeReader = Callable[[tuple[str, ...], tuple[str, ...]], Closure]
"""(modules of the chosen options, folders of the ranks' PYTHONPATH) → the code of a run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to make or look up: ``code`` is all that it imports, ``pack`` its data; no ``initial_weights``: fresh."""

    config: RunConfig
    key: ContentKey
    code: Closure
    folder: RunFolder
    root: Path
    pack: Pack | Tree
    initial_weights: InitialWeights | None = None

    @property
    def reason(self) -> str | None:
        """Why the run has to be made; None if it is finished and intact. Raises UsageError: by a newer Paceline."""
        self.folder.refuse_newer()
        stale = self.folder.stale_because(self.key.digest)
        if stale is not None and (accepted := self.accepted) is not None:
            return acceptance.stale_because(self.folder, accepted, self.key.digest)
        return stale or self.key_lacks or self.unread_log or stored_report.stale_because(self.folder, self.root)

    @property
    def sealed(self) -> bool:
        """False with program.seal=off: then the run counts as finished even if it read files that its key lacks."""
        return self._program.get("seal") != "off"

    @property
    def metrics_pattern(self) -> str | None:
        """The setting program.metrics_pattern; None without one."""
        return self._program.get("metrics_pattern")

    @property
    def key_lacks(self) -> str | None:
        """What the finished run read although its key lacks it, in words; None if nothing, or without a seal."""
        return key_lacks(self.folder, self.key) if self.sealed else None

    @property
    def variables_not_passed(self) -> str | None:
        """A message about variables of this shell that the finished run's code reads and ranks don't get; or None."""
        names = (self.folder.read_json(run_folder.DEPENDENCIES) or {}).get("own_variables") or ()
        of_hosts = (name for host in self.config.cluster.hosts for name in host.env)
        keyed = {*(self._program.get("env") or {}), *of_hosts}
        return rank_environment.read_but_not_passed(names, keyed, os.environ)

    @property
    def unread_log(self) -> str | None:
        """Why the finished run's log has to be searched for metrics again; None if it hasn't."""
        if self.metrics_pattern is None or self.metrics_pattern == pattern_before(self.folder):
            return None
        return "its log wasn't searched for program.metrics_pattern yet (nothing is trained again)"

    @property
    def accepted(self) -> Acceptance | None:
        """The acceptance of another run's result for this key; None without one, or if this run has a result."""
        if self.folder.result.exists():
            return None
        try:
            return acceptance.read(self.folder)
        except AlteredError:  # a damaged acceptance doesn't count: the run is trained
            return None

    @property
    def _program(self) -> Mapping[str, Any]:
        return self.config.resolved.get(programs.SECTION) or {}

    def details(self, unix_time: float) -> dict[str, Any]:
        """Return the fields of the provenance that aren't about the checkout. ``unix_time``: the command's start."""
        return {
            "overrides": self.config.overrides,
            "hosts": tuple(host.label for host in self.config.cluster.hosts),
            "data_digest": self.pack.digest,
            "unix_time": unix_time,
            "defaults": without_secrets(conf_files.own_merged(), self.config.secrets),
        }

    @property
    def pack_source(self) -> PackSource | None:
        """The data to send to the hosts; None if there are none."""
        if self.pack.path is None:
            return None
        return PackSource(path=self.pack.path.resolve(), digest=self.pack.digest, inside=self.pack.inside)


def prepare(config: RunConfig, root: Path, pack: Pack | Tree, read: CodeReader | None = None) -> Run | None:
    """Return the run with its key; None while its initial weights are unknown: without their digest there is no key.

    ``read``: a ``code_reader`` of several runs. Raises UsageError: the settings don't fit the data; no such weights."""
    if isinstance(pack, Pack):
        refuse_misfits(config.train, pack.manifest)
    initial = initial_weights_of(config, root)
    if initial is not None:
        if initial.sha256 is None:
            return None
        config = initial.with_digest(config)
    remember_in(root, config.runs_dir)
    code = code_of(config, root, read, pack.rank_modules)
    key = content_key(
        canonical=config.canonical,
        code=code.digests,
        data_digest=pack.digest,
        environment=versions(config, code),
        topology=config.topology,
    )
    folder = RunFolder(config.runs_dir / key.short)
    return Run(config=config, key=key, code=code, folder=folder, root=root, pack=pack, initial_weights=initial)


# ----------------------------------------------------------------------------------- is it finished?
def pattern_before(folder: RunFolder) -> str | None:
    """Return the program.metrics_pattern of the run's folder; None without one."""
    return _program(folder).get("metrics_pattern")


def key_lacks(folder: RunFolder, key: ContentKey) -> str | None:
    """Return what the finished run read although its key lacks it, and what of that has changed, in words; or None.
    Returns None too for an altered result, which ``stale_because`` reports."""
    try:
        result = folder.read_result()
    except AlteredError:
        return None
    if result is None:
        return None
    program = _program(folder)
    if program.get("seal") == "off":  # the setting isn't a part of the key: this run has one now
        return "it was made with program.seal=off, so nobody looked for files that its key lacks"
    others = folder.dependencies_of_other_nodes()
    record = {**(folder.read_json(run_folder.DEPENDENCIES) or {}), **({"nodes": others} if others else {})}
    changed = lacking_files(folder) or first_change(record, keyed=key.parts["environment"])
    if changed or not record.get("own_variables"):
        return changed
    return rank_environment.changed_variables(record, folder.read_json(VARIABLES), os.environ)


def lacking_files(folder: RunFolder) -> str | None:
    """Return a message about the files that the finished run read and its key lacks; None if the key is complete."""
    program = _program(folder)
    field = "program.inputs" if program.get("script") or program.get("command") else "model.inputs"
    return unkeyed_text(folder.unkeyed(), field)


def _program(folder: RunFolder) -> Mapping[str, Any]:
    return (folder.read_json(run_folder.CONFIG) or {}).get(programs.SECTION) or {}


def unkeyed_text(kinds: Mapping[str, str], field: str) -> str | None:
    """Return a message about files that a key lacks; None if the key is complete. ``kinds``: path → ``read``, REPLACED,
    or how the program looked for the path. ``field``: the setting to add it to."""
    if not kinds:
        return None
    if replaced := [name for name, how in kinds.items() if how == contents.REPLACED]:
        return (
            f"{_names_were(replaced)} changed while the run went on, and the key has the content from before; a folder "
            "that the script writes to: program.args.NAME={run}/NAME"
        )
    read = [name for name, how in kinds.items() if how == "read"]
    absent = [name for name, how in kinds.items() if how != "read"]
    parts = [f"{_names_were(read)} read"] if read else []
    if absent:
        are = "isn't" if len(absent) == 1 else "aren't"
        parts.append(f"{_names_were(absent)} looked for and {are} in the snapshot")
    return f"its key is not complete: {'; '.join(parts)}; {advice_to_add(field, [*read, *absent])}"


def _names_were(names: list[str]) -> str:
    return f"{first_of(names, _UNKEYED_SHOWN)} {'was' if len(names) == 1 else 'were'}"


# ----------------------------------------------------------------------------------- the code and its versions
def code_reader(root: Path) -> CodeReader:
    """Return a cached reader of import closures: the runs of a sweep read the same files."""

    @cache
    def read(chosen: tuple[str, ...], python_path: tuple[str, ...]) -> Closure:
        return import_closure(root, (programs.CLASSIFIER.entry, programs.TORCHRUN, *chosen), python_path, may_lack=True)

    return read


def code_of(
    config: RunConfig, root: Path, read: CodeReader | None = None, rank_modules: tuple[str, ...] = ()
) -> Closure:
    """Return all that the run imports (``rank_modules``: to read data) and its declared inputs. Raises UsageError."""
    python_path = config.cluster.python_path
    if config.script is not None:
        return config.script.closure(python_path)
    code = (read or code_reader(root))((*config.chosen, *rank_modules), python_path)
    return with_model_inputs(code, root, (config.resolved.get("model") or {}).get("inputs") or ())


def versions(config: RunConfig, code: Closure) -> dict[str, str]:
    """Return the part ``environment`` of the key. Raises HostError, UsageError. With cluster.environment=hosts, the
    hosts are asked for their versions; else those of this computer count, and those that the setting states."""
    cluster, here = config.cluster, environment(code.versions)
    there = _versions_on_hosts(cluster, here) if cluster.asks_environment else overridden(here, cluster.environment)
    if (digest := settings.image_digest_here(cluster)) is not None:
        there[IMAGE] = digest
    for name, place in code.unresolved.items():
        if config.script is not None or there[name] != ABSENT:  # a script may do without the module
            continue
        if cluster.asks_environment:
            hint = f"install it there, or cluster.python=<an interpreter that has {name}>"
            raise UsageError(f"{place} imports {name}, which the hosts don't have", hint=hint)
        raise missing_module_error(name, place, "cluster.environment=hosts")
    return there


def _versions_on_hosts(cluster: Cluster, here: Mapping[str, str]) -> dict[str, str]:
    from pipeline.cluster.preflight import versions_on_hosts  # it imports the launchers, which most runs don't need

    # missing submodules a.b: the cluster states the version of their distribution a instead
    names = {name.partition(".")[0] if version == ABSENT else name: version for name, version in here.items()}
    return versions_on_hosts(cluster, {**names, IMAGE: ""} if cluster.container is not None else names)


def overridden(here: Mapping[str, str], of_cluster: Mapping[str, str]) -> dict[str, str]:
    """Return the controller's versions (``here``), overridden by ``cluster.environment``. Raises UsageError."""
    for name in of_cluster:
        if name not in here:
            raise UsageError(f"cluster.environment.{name}: the run doesn't import that; {suggestion(name, here)}")
    # a.b that is absent here belongs to the distribution a, whose version on the hosts is stated
    stated = {name for name, version in here.items() if version == ABSENT and name.partition(".")[0] in of_cluster}
    return {**{name: version for name, version in here.items() if name not in stated}, **of_cluster}


# ----------------------------------------------------------------------------------- the initial weights
def initial_weights_of(config: RunConfig, root: Path) -> InitialWeights | None:
    """Return the initial weights of a configuration; None for fresh ones. Starts nothing. Raises UsageError."""
    if config.script is not None or not config.train.init.setting:
        return None
    from pipeline.execution import initial_weights  # most runs start from fresh ones

    return initial_weights.find(config, root, partial(_parent, root))


def _parent(root: Path, parent: RunConfig) -> ParentRun:
    """Return the folder of the run that ``init.run`` names, and why it isn't finished."""
    pack = store.find(parent.train.dataset, parent.data_dir)
    run = prepare(parent, root, pack) if pack is not None else None
    if run is None:
        return None, "its run is to be trained first, whose key isn't known yet"
    if (reason := run.reason) is not None:
        return run.folder, f"run {run.key.short} is to be trained first: {reason}"
    _, accepted = acceptance.result_or_accepted(run.folder)
    return run.folder if accepted is None else acceptance.base_of(run.folder, accepted), ""


def refuse_misfits(train: TrainConfig, data: Manifest) -> None:
    """Raise UsageError for settings that don't fit the data."""
    weights = train.trainer.class_weights
    if isinstance(weights, list) and len(weights) != data.num_classes:
        raise UsageError(
            f"trainer.class_weights has {len(weights)} weights, and {data.name} has {data.num_classes} classes",
            hint="a weight for each class, in the order of their numbers; or trainer.class_weights=balanced",
        )
    start, stop = data.splits["train"]
    available = stop - start
    if (size := train.trainer.global_batch_size) > available > 0:
        raise UsageError(
            f"trainer.global_batch_size={size}: the train split of {data.name} has {available} images, fewer than that",
            hint=f"trainer.global_batch_size=N, N at most {available} and a multiple of the number of ranks",
        )
    crop = train.dataset.random_resized_crop
    if crop and data.encoding is None:
        raise UsageError(
            f"dataset.random_resized_crop={crop} is cut from the files, and the pack of {data.name} has pixels alone",
            hint="dataset.decoded_limit=0 keeps the files of dataset=folder, parquet and torchvision; or "
            "dataset.crop_padding=4",
        )
