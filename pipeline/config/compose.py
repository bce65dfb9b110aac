"""Hydra composition on the controller: the result of a ``@hydra.main`` application, with errors in one line."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.cluster.launchers.settings import MISSING, ClusterConfig
from pipeline.config import conf_files
from pipeline.config.composition_errors import explain, explain_interpolation, no_value
from pipeline.config.conf_files import choice_of
from pipeline.config.overrides.search_space import refuse_grid_size
from pipeline.config.overrides.words import SCRIPT_FIELDS, for_hydra, quoted_run
from pipeline.config.schema import OPTIONS, PROGRAMS, RootConfig, SearchConfig, TrackingConfig, installed_programs
from pipeline.config.step_source import named_step
from pipeline.config.values import leaves, texts
from pipeline.core import redact
from pipeline.core.errors import UsageError
from pipeline.core.options import Options
from pipeline.core.places import HOME, ROOT, conf_dirs
from trainers.core import config as node

CONF_DIRS = conf_dirs(ROOT)
"""Hydra looks in the first folder, then in the others (hydra_plugins/paceline_plugins.py)."""

CONFIG_NAME = "config"
HYDRA_VERSION_BASE = "1.3"
_LITERAL_FIELDS = ("program.args", "program.env")  # OmegaConf's ``???`` (no value) is ordinary text in them
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_SHARED = re.compile(r"[+~]*(?P<group>cluster|paths|tracking)\b")


@contextmanager
def hydra_ready() -> Iterator[None]:
    """Set up Hydra's global state for compositions, and restore it afterwards."""
    register()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIRS[0]), version_base=HYDRA_VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose ``conf/config.yaml`` with Hydra overrides, in the order given.

    Raises UsageError: an override that Hydra refuses; the text names it, the nearest match and the valid options.
    """
    with hydra_ready():
        return compose_now(overrides)


def compose_now(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose like ``compose_config``, inside ``hydra_ready()``; ``with_hydra`` keeps Hydra's own section."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides), return_hydra_config=with_hydra)
    except Exception as error:  # Hydra raises a dozen unrelated types, ValueError and AssertionError among them
        raise explain(error, list(overrides), _composed_or_none) from error


def _composed_or_none(overrides: Sequence[str]) -> DictConfig | None:
    """Compose while an error is explained; return None if Hydra refuses the overrides."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides))
    except Exception:  # the same dozen types
        return None


def as_yaml(resolved: Mapping[str, Any]) -> str:
    """Return the text of config.yaml for a resolved configuration, with every ``${`` escaped."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dict(resolved))))


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    is_text = isinstance(value, str) and "${" in value
    return _INTERPOLATION.sub(lambda match: f"{match[1] * 2}\\${{", value) if is_text else value


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return plain containers with every interpolation resolved.

    Values of environment variables with a secret name become ``Secret`` texts.

    Raises UsageError: an interpolation that names nothing, or a group that was deleted.
    """
    try:
        container = OmegaConf.to_container(config, resolve=True)
        for field, value in leaves(container):
            if value == MISSING and not field.startswith(_LITERAL_FIELDS):
                raise no_value(field)
    except OmegaConfBaseException as error:
        raise explain_interpolation(error, config) from error
    assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
    names = redact.referenced(OmegaConf.to_container(config, resolve=False))
    values = [value for name in names if (value := os.environ.get(name)) and redact.needs_masking(name, value)]
    whole = redact.marked(container, values) if values else container
    return {str(key): value for key, value in whole.items()}


def compose_parent(
    run: str, words: Sequence[str], *, children: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compose the parent run that ``init.run`` names, on the cluster of its child unless ``run`` names another.

    Args:
        run: the overrides of the parent run, as a shell would split them.
        words: the overrides of the child; those of cluster, paths and tracking hold for both.
        children: the values of ``init.run`` that led here from the first child, in this order.

    Returns the resolved configuration, and the overrides that it was composed from.

    Raises UsageError: an override that can't work, or a run that would start from itself; ValueError: ``run`` can't be
    split.
    """
    if run in children:
        raise UsageError(f"init.run leads back to itself: {' → '.join((*children, run))}")
    own = [quoted_run(word) for word in shlex.split(run)]
    names_cluster = any(word.startswith("cluster=") for word in own)
    shared = [(word, match["group"]) for word in words if (match := _SHARED.match(word))]
    overrides = (*(word for word, group in shared if not (names_cluster and group == "cluster")), *own)
    resolved = resolve(compose_config(overrides))
    if named_step(resolved) is not None:
        hint = f"doit train {run}, then init.weights=<its key>"
        raise UsageError("the run that init.run names has its data from a step", hint=hint)
    return resolved, overrides


# ------------------------------------------------------------------------------- schemas in Hydra's store
@functools.cache  # a sweep composes each trial
def register() -> None:
    """Put all schemas into Hydra's store; a second call does nothing."""
    store: Any = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    launcher = {"_target_": "hydra_plugins.paceline_plugins.PacelineLauncher"}
    store.store(group="hydra/launcher", name="paceline", node=launcher)
    store.store(group="schema", name="cluster", node=ClusterConfig)
    store.store(group="schema", name="tracking", node=TrackingConfig)
    store.store(group="schema", name="search", node=SearchConfig)
    store.store(group="schema/trainer", name="default", node=node.TrainerConfig)
    own = store.repo.setdefault(conf_files.OWN_GROUP, {})
    for name in ("user", "project"):
        content = functools.partial(_own_defaults, name)
        own[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", conf_files.OWN_GROUP, "_global_", content)
    for name, settings in PROGRAMS.items():
        store.store(group="schema/program", name=name, node=settings)
    for name, file in installed_programs().items():
        if _has_file("program", name):
            continue
        script = {"defaults": [{"/schema/program@_here_": "script"}, "_self_"], "name": "script", "script": file}
        store.store(group="program", name=name, node=script)
    for group, options in OPTIONS.items():
        schemas = store.repo["schema"].setdefault(group, {})
        for name in options.names():
            schema = functools.partial(_schema, options, name)
            schemas[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", f"schema/{group}", None, schema)
        for name in options.installed():
            if _has_file(group, name):  # otherwise every command fails: Hydra refuses a file and a schema of one name
                continue
            defaults = [{f"/schema/{group}@_here_": name}, "_self_"]
            store.store(group=group, name=name, node={"defaults": defaults, choice_of(group): name})


def _has_file(group: str, name: str) -> bool:
    """True if conf/ has an option of that name, which takes precedence over an installed package's."""
    return any((folder / group / f"{name}.yaml").is_file() for folder in conf_dirs(ROOT))


def _schema(options: Options, name: str) -> DictConfig:
    schema: DictConfig = OmegaConf.structured(options.settings(name))
    return schema


def _own_defaults(name: str) -> DictConfig:
    return OmegaConf.create(conf_files.own_content(name))


class _LazyNode(ConfigNode):
    """A node of Hydra's store that is read when Hydra asks for it.

    All thirty settings classes together take 0.1 s, and the user's own defaults may change. An option that can't be
    read raises its error only in commands that use it.
    """

    def __init__(self, name: str, group: str, package: str | None, read: Callable[[], DictConfig]) -> None:
        self._read = read
        self._copy: DictConfig | None = None
        self.name, self.group, self.package, self.provider = name, group, package, None

    @property
    def node(self) -> DictConfig:
        """The content. Hydra loads a copy of this node and sets the content of the copy."""
        return self._copy if self._copy is not None else self._read()

    @node.setter
    def node(self, value: DictConfig) -> None:
        self._copy = value


# ------------------------------------------------------------------------------- the trials of a sweep
Overrides = tuple[str, ...]

_ABSENT = object()


def jobs(words: Sequence[str]) -> list[Overrides]:
    """List every combination of the sweep values in Hydra's order: the last word varies fastest. Keep duplicates.

    The sweep values of a named grid, ``sweep=NAME`` (hydra.sweeper.params in conf/sweep/NAME.yaml), come first.
    A word of the command line replaces the grid's value of the same key.

    Raises UsageError: a word that is no override or has no value, an interval without a search, or too many trials.
    """
    with hydra_ready():
        overrides = parsed_words(words)
        interval = next((one for one in overrides if one.value_type is ValueType.INTERVAL_SWEEP), None)
        if interval is not None:
            raise _interval_in_grid(interval, has_search=any(word.startswith("search=") for word in words))
        refuse_grid_size(overrides)
        # Hydra escapes every colon and bracket of a value; a value that doesn't vary stays as it was typed
        word_by_escaped = {
            f"{override.get_key_element()}={override.get_value_element_as_str()}": str(override.input_line)
            for override in overrides
            if not override.is_delete() and not override.is_sweep_override()
        }
        combinations = BasicSweeper.split_arguments(overrides, None)[0]
        return [tuple(word_by_escaped.get(word, word) for word in combination) for combination in combinations]


def _interval_in_grid(interval: Override, *, has_search: bool) -> UsageError:
    if has_search:
        return UsageError(
            f"{interval.input_line}: what a search will choose can't be listed beforehand",
            hint="doit sweep with the same words and --dry-run, which shows its space and trials so far",
        )
    key = interval.get_key_element()
    return UsageError(
        f"{interval.input_line}: an interval has no end of values, so only a search can draw from it; "
        f"add search=tpe, or write {key}=0.01,0.1 or {key}='range(1,5)' for a grid"
    )


def parsed_words(words: Sequence[str]) -> list[Override]:
    """Parse the words, a named grid's first. Needs ``hydra_ready()``. Raises UsageError."""
    grid = [word for word in words if word.startswith("sweep=")]
    params = compose_now(grid, with_hydra=True).hydra.sweeper.params if grid else None
    return _parsed([*(f"{key}={value}" for key, value in (params or {}).items()), *words])


def _parsed(words: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        return parser.parse_overrides(list(words))
    except Exception as error:  # Hydra's and the lexer's
        raise explain(error, list(words), lambda _: None) from error


class TrialComposer:
    """``resolve`` for the many trials of one sweep. Use it within ``hydra_ready()``."""

    def __init__(self) -> None:
        self._overrides: dict[str, Override] = {}
        self._compositions: dict[tuple[Overrides, tuple[str, ...]], DictConfig] = {}

    def resolve(self, words: Overrides) -> dict[str, Any]:
        """Return or raise what composing the words of this one trial by themselves would."""
        plain = self._plain_overrides(words)
        config = self._composition(
            words=tuple(word for word in words if word not in plain),
            fields=tuple(override.key_or_group for override in plain.values()),
        )
        if all(_try_to_set(config, override) for override in plain.values()):
            return resolve(config)
        return resolve(compose_now(words))

    def _composition(self, words: Overrides, fields: tuple[str, ...]) -> DictConfig:
        """Compose ``words`` once; trials with these ``fields`` share the result, as each sets all of them again."""
        if (words, fields) not in self._compositions:
            self._compositions[words, fields] = compose_now(words)
        return self._compositions[words, fields]

    def _plain_overrides(self, words: Overrides) -> dict[str, Override]:
        """Return the words whose value can be set in a composition: plain ones that share no key with another word."""
        for word in words:
            if word not in self._overrides:
                self._overrides[word] = _parsed(for_hydra([word]))[-1]
        # options aside: Hydra chooses them before it sets fields, whatever the order of the words
        fields = {word: self._overrides[word] for word in words if not _chooses_an_option(self._overrides[word])}
        keys = [override.key_or_group for override in fields.values()]
        return {
            word: override
            for word, override in fields.items()
            if _is_plain(override) and sum(_contains(override.key_or_group, key) for key in keys) == 1
        }


def _chooses_an_option(override: Override) -> bool:
    """Return True if the override chooses an option of a group. A word that names a script implies program=script."""
    group = override.key_or_group
    if group in SCRIPT_FIELDS:
        return True
    chooses = override.type is OverrideType.CHANGE and override.package is None and isinstance(override.value(), str)
    return chooses and any((folder / group).is_dir() for folder in CONF_DIRS)


def _is_plain(override: Override) -> bool:
    """Return True for ``key=value`` with a simple value or a list, and without an interpolation."""
    if override.type is not OverrideType.CHANGE or override.package is not None:
        return False
    value = override.value()
    is_simple = value is None or (isinstance(value, str | int | float | bool | list) and value != MISSING)
    return is_simple and not any("${" in text for text in texts(value))


def _try_to_set(config: DictConfig, override: Override) -> bool:
    """Set the field to the value in its type; return False if it can't be set, so that the trial must be composed."""
    key, value = override.key_or_group, override.value()
    try:
        before = OmegaConf.select(config, key, default=_ABSENT)
        if before is _ABSENT or OmegaConf.is_dict(before) or OmegaConf.is_list(before) != isinstance(value, list):
            return False
        OmegaConf.update(config, key, value, merge=True)
    except Exception:  # composing reports what is wrong with it
        return False
    return True


def _contains(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


# ------------------------------------------------------------------------------- Hydra's own command line
class HydraFlags(NamedTuple):
    """A parsed command line of Hydra: the overrides, and whether they stand for the trials of a sweep.

    ``composes``: a run, or each trial, is composed from this project's own conf/.
    """

    words: tuple[str, ...]
    multirun: bool
    composes: bool


def read_flags(argv: Sequence[str]) -> HydraFlags:
    """Parse the words after ``python -m pipeline``. Raises UsageError: what Hydra would answer with a traceback."""

    def refuse(message: str) -> NoReturn:
        """Take the place of argparse's ``error``. A flag without its value takes the next word, even an override."""
        raise UsageError(message, hint="--cfg job, --info or --info defaults, behind the overrides")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args(list(argv))
    if args.experimental_rerun is not None:
        raise UsageError("--experimental-rerun: a run is not made again from a pickle", hint="doit reproduce KEY")
    if args.shell_completion and not any(word.startswith(("install=", "uninstall=", "query=")) for word in argv):
        raise UsageError(
            "--shell-completion needs install=SHELL or uninstall=SHELL",
            hint='eval "$(python -m pipeline --shell-completion install=bash)"',
        )
    own_path = args.config_path is not None and "://" not in args.config_path  # otherwise a package
    # Hydra takes a relative path from the folder of the module that calls it
    folders = [HOME / "pipeline" / args.config_path] if own_path else [*CONF_DIRS]
    folders += [Path(args.config_dir)] if args.config_dir is not None else []
    if absent := next((folder for folder in folders if not folder.is_dir()), None):
        raise UsageError(f"there is no folder {absent}", hint="an absolute path")
    name = str(args.config_name or CONFIG_NAME).removesuffix(".yaml")
    if not any((folder / f"{name}.yaml").is_file() for folder in folders):
        raise UsageError(
            f"--config-name {name}: there is no {name}.yaml in {' or '.join(map(str, folders))}",
            hint=f"experiment={name}",
        )
    answers = args.help or args.hydra_help or args.info or args.shell_completion
    elsewhere = args.config_path or args.config_name or args.config_dir
    return HydraFlags(words=tuple(args.overrides), multirun=bool(args.multirun), composes=not (answers or elsewhere))
