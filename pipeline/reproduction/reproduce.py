"""The repetition of a finished run (`doit reproduce`): the run's code is checked out from its provenance, trained as a
command of its own there, and the results are compared."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.host.hardware import hardware
from pipeline.cluster.validation import usable_gpus
from pipeline.config import compose, conf_files
from pipeline.config.build import train_config
from pipeline.config.cluster import HOSTS, build_cluster
from pipeline.config.program_section import with_script_facts
from pipeline.core import redact
from pipeline.core.errors import DataError, PacelineError, TrainingError, UsageError, os_reason
from pipeline.core.files import expanded, write_json
from pipeline.core.locks import held
from pipeline.core.places import ROOT
from pipeline.core.printable import hydra_quoted
from pipeline.core.processes import git, process
from pipeline.core.processes.signals import Interruptible
from pipeline.core.processes.threads import waiting
from pipeline.data import store
from pipeline.execution import initial_weights
from pipeline.keys import ABSENT, content_key
from pipeline.keys.content_key import Difference, differences
from pipeline.keys.installed import version
from pipeline.reproduction.compare import Verdict, compare, reach_of_seeds
from pipeline.reproduction.recipe import Recipe, checkout, read
from pipeline.runs import recorded_hardware
from pipeline.runs.folder import RunFolder
from pipeline.steps import making as steps
from trainers.contract import run_folder

IGNORED = "program.ignore_metrics"
_PATTERN = "program.metrics_pattern"
CHANGEABLE = ("cluster", "paths", "tracking", "dataset.source", IGNORED)
"""The settings that a reproduction may change. Of these only the topology of ranks counts in the key."""
DEFAULTS = "defaults.yaml"
"""The file below ``work`` with the defaults of the user who trained the run."""
_FILES_OF_CLUSTER = ("ssh_config", "hostfile")  # fields of the cluster group that name files relative to the project
_MIRROR = "cluster.checkpoint_mirror"

Say = Callable[[str], None]
Train = Callable[..., int]


def reproduce(
    folder: RunFolder,
    *,
    root: Path,
    work: Path,
    data_dir: Path,
    overrides: Sequence[str],
    keep: bool,
    say: Say,
    train: Train | None = None,
) -> Verdict:
    """Repeat the run below ``work``, compare, and write verdict.json there.

    Args:
        root: the project, whose repository has the run's commit, unless the folder is of an archive that has it.
        overrides: new values for fields of CHANGEABLE; each replaces the run's override of the same field or group.
        keep: leave the checkout of the run's code in ``work``.
        train: what runs the training and returns its exit code; None: ``train_again``.

    Raises:
        PacelineError: the run can't be repeated, or the training failed; the text says what is missing.
    """
    recipe = read(folder, root)
    for item in _environment_changes(recipe):
        say(f"  environment  {item}")
    for name in recipe.provenance.get("left_out", ()):
        say(f"  not kept     {name}")
    _refuse_missing_secrets(recipe, overrides)
    # the hardware of other hosts is known only after the training
    has_cluster = any(_name(word) == "cluster" for word in overrides)
    other = None if has_cluster else recorded_hardware.other_than_here(recipe.result, hardware())
    if other:
        say(f"  hardware     {other}: equal bits can't be promised, so metrics are compared within their spread")
    runs_dir = work / "runs"
    with ExitStack() as stack:
        work.mkdir(parents=True, exist_ok=True)
        with waiting(say, "waiting for another command that makes this run again"):
            stack.enter_context(held(work.parent / f"{work.name}.lock"))
        with waiting(say, "checking out the run's code"):
            project = stack.enter_context(
                checkout(recipe, root=root, checkout_dir=work / run_folder.CODE, keep=keep, say=say)
            )
        # the defaults of the user who trained the run, without the sections that this call replaces
        replaced = {"paths", "tracking", *(_name(word) for word in overrides)}
        recorded = recipe.provenance.get("defaults") or {}
        defaults = {name: section for name, section in recorded.items() if name not in replaced}
        if chosen := defaults.get("defaults"):
            defaults["defaults"] = [entry for entry in chosen if not {*map(conf_files.group_of, entry)} & replaced]
        stack.enter_context(conf_files.own_replaced(defaults))
        write_json(work / DEFAULTS, defaults)
        # train with the run's own code, data and overrides, in folders below ``work``
        shutil.rmtree(runs_dir, ignore_errors=True)  # from an earlier reproduction; this one must train again
        source = _source(recipe, overrides, (root, project))
        _prepare_inputs(recipe, source, data_dir, say)
        words = _overrides(recipe, overrides, root=root, project=project, source=source)
        for item in _topology_changes(recipe, words, root):
            say(f"  topology     {item}; other ranks, other weights")
        where = [f"paths.runs={hydra_quoted(str(runs_dir))}", f"paths.data={hydra_quoted(str(data_dir.absolute()))}"]
        words, secrets = redact.move_to_environment(words)
        origin = "the run's own copy of its code, which is not from a commit"
        if recipe.commit is not None:
            origin = f"{recipe.commit[:10]}{' with its patch' if recipe.patch else ''}"
        elif (ROOT / "conf").is_dir():
            origin += ", with the project's conf/ as it is now"
        say(f"training {origin}: {' '.join(words)}")
        variables = {**secrets, conf_files.OWN_VARIABLE: str((work / DEFAULTS).absolute())}
        code = (train or train_again)([*words, *where], variables, project=project, database=work / "doit.db")
    # compare, without the metrics that the run or this call ignores
    reach = reach_of_seeds(recipe, work.parents[1])
    ignored = (recipe.config.get("program") or {}).get("ignore_metrics") or ()
    if typed := [word.partition("=")[2] for word in overrides if _name(word) == IGNORED]:
        ignored = [name.strip(" '\"") for name in typed[-1].strip("[]").split(",")]
    verdict = compare(recipe, _made(recipe, code, work), ignored, hardware=other, reach=reach)
    derived = {"reproduced": verdict.reproduced, "within_spread": verdict.within_spread}
    write_json(work / "verdict.json", {**asdict(verdict), **derived})
    return verdict


def train_again(
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    project: Path,
    database: Path,
    meanwhile: Callable[[int], None] | None = None,
) -> int:
    """Run `doit train` with the run's own code; return the exit code. ``meanwhile`` gets the pid ten times a second."""
    # --db-file first, because doit treats a bare a=b as a variable
    command = [sys.executable, "-m", "doit", f"--db-file={database}", "train"]
    environment = {**git.environment(), **variables, "PYTHONPATH": str(project)}
    with Interruptible():
        return process.attached([*command, *words, "tracking=none"], cwd=project, env=environment, meanwhile=meanwhile)


def _made(recipe: Recipe, code: int, work: Path) -> RunFolder:
    """Return the run that the training left below ``work``. Raises TrainingError: there is none."""
    made = [RunFolder(path.parent) for path in (work / "runs").glob("*/result.json")]
    if code != 0 or len(made) != 1:
        raise TrainingError(
            f"run {recipe.folder.key} could not be made again: its training ended with exit code {code}, for the "
            "reason above",
            hint=f"fix that, then the same command; --keep leaves the run's code in {work / 'code'}",
        )
    return made[0]


# ------------------------------------------------------------------------------- overrides and data
def _overrides(
    recipe: Recipe, overrides: Sequence[str], *, root: Path, project: Path, source: str | None
) -> list[str]:  # fmt: skip
    """Return the overrides of the repetition: the run's own, with what this call replaces. ``source`` is the data's
    source here. Files of the project that the commit lacks are named by absolute paths."""
    overridden = {_name(word) for word in overrides}
    words = _own_words(recipe, overridden)
    words += [word for word in overrides if _is_of(word, ("cluster",))]
    if source is not None:
        words.append(f"dataset.source={hydra_quoted(source)}")
    # a later command than the one in provenance.json may have chosen the pattern; the digest keeps the same weights
    pattern = (recipe.config.get("program") or {}).get("metrics_pattern")
    sha256 = (recipe.config.get("init") or {}).get("sha256")
    for name, value in (("init.sha256", sha256), (_PATTERN, pattern and hydra_quoted(pattern))):
        if value:
            words = [*(word for word in words if not _is_of(word, (name,))), f"{name}={value}"]
    cluster = recipe.config.get("cluster") or {}
    if cluster.get("checkpoint_mirror") or ("checkpoint_mirror" in cluster and overridden & {"cluster", _MIRROR}):
        words.append(f"{_MIRROR}=null")  # a reproduction must not resume from a checkpoint
    if overridden & {"cluster", *(f"cluster.{name}" for name in _FILES_OF_CLUSTER)}:
        cluster = (_composed(words) or {}).get("cluster", {})
    for name in _FILES_OF_CLUSTER:
        file = cluster.get(name)
        if file and not (project / Path(file).expanduser()).exists():  # such files aren't in the commit
            words.append(f"cluster.{name}={hydra_quoted(str(root / file))}")
    return words


def _own_words(recipe: Recipe, overridden: Collection[str]) -> list[str]:
    """Return the run's overrides without those of the fields and groups in ``overridden``.

    The first ones are the secrets in the defaults of the user who trained the run. A secret is masked in the record; it
    becomes a reference to the environment variable of the same name, if that is set."""
    replaced = ("paths", "tracking", "dataset.source", *overridden)
    values = {name: f"'${{oc.env:{name}}}'" for name in os.environ if re.fullmatch(r"\w+", name)}
    values |= {name.rpartition(".")[2]: "''" for name in overridden if name.startswith("cluster.env.")}
    hidden = [word for word in conf_files.own_words(recipe.provenance.get("defaults") or {}) if redact.HIDDEN in word]
    words = [*hidden, *recipe.provenance["overrides"]]
    return [redact.restore_secrets(word, values) for word in words if not _is_of(word, replaced)]


def _refuse_missing_secrets(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Raise PacelineError if a secret of the run, which no file stores, is neither typed again nor a set variable."""
    overridden = {_name(word) for word in overrides}
    words = _own_words(recipe, overridden)
    if "dataset.source" not in overridden:
        words.append(f"dataset.source={(recipe.config.get('dataset') or {}).get('source')}")
    hidden = [word for word in words if redact.HIDDEN in word]
    if hidden:
        word = hidden[0].partition("=")[0]
        name = word.rpartition(".")[2] if word.lstrip("+").startswith("cluster.env.") else "NAME"
        raise PacelineError(
            f"run {recipe.folder.key} got secrets, which no file keeps; to be given again: {' '.join(hidden)}",
            hint=f"doit reproduce {recipe.folder.key} {word}='${{oc.env:{name}}}', with the value in the "
            f"environment variable {name} (a variable of the same name in your environment is taken as it is)",
        )


def _name(word: str) -> str:
    """Return the field of an override: ``cluster.env`` for ``+cluster.env=…``, ``cluster`` for ``~cluster``."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _is_of(word: str, names: Sequence[str]) -> bool:
    """Return True if the override sets one of ``names`` or a field inside it, as ``cluster.hosts`` in ``cluster``."""
    return any(f"{_name(word)}.".startswith(f"{name}.") for name in names)


def _source(recipe: Recipe, overrides: Sequence[str], roots: Sequence[Path]) -> str | None:
    """Return the source of the data: from this call, else from the run's configuration. A relative path becomes one in
    the first of ``roots`` that has it: the run's patch may contain the file."""
    sources = [word.partition("=")[2] for word in overrides if _name(word) == "dataset.source"]
    source = sources[-1].strip("'\"") if sources else (recipe.config.get("dataset") or {}).get("source")
    if source is None or "://" in source:
        return source
    if not source.startswith("step:"):
        paths = [root / expanded(source, f"dataset.source={source}") for root in roots]
        return str(next((path for path in paths if path.exists()), paths[0]))
    words = _own_words(recipe, ())
    where = f"paths.runs={hydra_quoted(str(recipe.folder.path.parent))}"
    step = steps.data_step(source, compose.resolve(compose.compose_config([*words, where])), roots[0])
    if step.path is None:
        shown = " ".join([f"doit step {step.name}", *words])
        raise PacelineError(
            f"the data of run {recipe.folder.key} came from {source}, which isn't made as it was",
            hint=f"{shown}, with its inputs and code as they were; or dataset.source=<where the data is now>",
        )
    return str(step.path)


def _prepare_inputs(recipe: Recipe, source: str | None, data_dir: Path, say: Say) -> None:
    """Find or fetch the run's data and initial weights. Raises PacelineError: they are missing or different."""
    _keep_initial_weights(recipe, data_dir)
    recorded = str(recipe.parts["data"])
    try:
        dataset = train_config({**recipe.config, "dataset": {**recipe.config["dataset"], "source": source}}).dataset
    except (UsageError, KeyError):
        return  # fields of another version: the run's own code finds the data
    lost = f"the data of run {recipe.folder.key} (digest {recorded[:12]}) is gone"
    hint = "dataset.source=<where it is now>, or paths.data=<a folder that has its pack>"
    try:
        with waiting(say, "looking for the run's data"):
            pack = store.find(dataset, data_dir)
        pack = pack or store.fetch(dataset, data_dir)
    except DataError as error:
        raise PacelineError(f"{lost}: {error.what}", hint=hint) from error
    if pack.digest != recorded:
        item = Difference(part="data", field="digest", old=recorded, new=pack.digest)
        raise PacelineError(f"{lost}; what is found in its place is other data\n  {item}", hint=hint)


def _keep_initial_weights(recipe: Recipe, data_dir: Path) -> None:
    """Store the initial weights where the repeated run looks first. Raises PacelineError: altered, or missing."""
    sha256 = (recipe.config.get("init") or {}).get("sha256")  # None: a fresh initialization
    if not sha256 or initial_weights.stored_copy(sha256, data_dir) is not None:
        return
    path = recipe.folder.path / run_folder.INITIAL_WEIGHTS
    try:
        initial_weights.store(path, sha256, data_dir)
    except (DataError, OSError) as error:
        why = os_reason(error) if isinstance(error, OSError) else "it isn't what the run started from"
        raise PacelineError(
            f"run {recipe.folder.key} started from weights of sha256 {sha256[:12]}…, and {path} can't give them: {why}",
            hint=f"another copy of the run folder, or the file as {data_dir / 'weights' / sha256}.pt",
        ) from error


def _environment_changes(recipe: Recipe) -> list[Difference]:
    """Compare the versions in the run's key with those here."""
    old = dict(recipe.parts.get("environment") or {})
    # versions on the hosts override the controller's
    host_versions = (recipe.config.get("cluster") or {}).get("environment") or {}
    if host_versions == HOSTS:  # they are asked when the run is made again
        return []
    here = content_key.environment({name: version(name) or ABSENT for name in old if name != "python"})
    return differences({"environment": old}, {"environment": {**here, **host_versions}})


def _topology_changes(recipe: Recipe, words: Sequence[str], root: Path) -> list[Difference]:
    """Compare the topology that ``words`` give with the run's, so that users know before hours of training."""
    if (resolved := _composed(words)) is None:
        return []
    try:
        resolved = with_script_facts(resolved, root)
        cluster = build_cluster(resolved["cluster"], root=root, local_gpus=usable_gpus())
    except PacelineError:
        return []
    now = content_key.topology(cluster, resolved["trainer"].get("shards", 0))
    return differences({"topology": recipe.parts.get("topology")}, {"topology": now})


def _composed(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the configuration that ``words`` give in this version; None: only the run's own code understands them."""
    try:
        return compose.resolve(compose.compose_config(words))
    except PacelineError:
        return None
