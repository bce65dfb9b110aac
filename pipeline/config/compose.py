"""Hydra composition without Hydra's command line: overrides → DictConfig → plain containers, with errors in one line.

``register`` tells Hydra about Paceline's settings classes; ``read_flags`` parses Hydra's own command line.
"""

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
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.cluster.launchers.settings import MISSING, ClusterConfig
from pipeline.config import conf_files
from pipeline.config.conf_files import choice_of
from pipeline.config.overrides.words import for_hydra, quoted_run
from pipeline.config.schema import (
    OPTIONS,
    PROGRAMS,
    RootConfig,
    SearchConfig,
    TrackingConfig,
    installed_programs,
    leaves,
)
from pipeline.config.step_source import named_step
from pipeline.core import redact
from pipeline.core.errors import UsageError
from pipeline.core.options import Options
from pipeline.core.places import HOME, ROOT, conf_dirs
from trainers.core import config as node

CONF_DIRS = conf_dirs(ROOT)
"""The folders in which Hydra looks, in this order: the project's conf/, then Paceline's if that is another one."""

CONFIG_NAME = "config"
HYDRA_VERSION_BASE = "1.3"
_LITERAL_FIELDS = ("program.args", "program.env")  # in these, ``???`` is text, and not OmegaConf's mark of no value
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
    """Compose like ``compose_config``, inside of ``hydra_ready()``; ``with_hydra`` keeps Hydra's own section."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides), return_hydra_config=with_hydra)
    except Exception as error:  # Hydra raises a dozen unrelated types, ValueError and AssertionError among them
        from pipeline.config.composition_errors import explain  # needed for errors alone

        raise explain(error, list(overrides), _composed_or_none) from error


def _composed_or_none(overrides: Sequence[str]) -> DictConfig | None:
    """Compose for ``explain``, which tries which words are at fault; return None if Hydra refuses them."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides))
    except Exception:  # as in compose_now
        return None


def as_yaml(resolved: Mapping[str, Any]) -> str:
    """Return a resolved configuration as the text of config.yaml, with every ``${`` escaped: it is resolved already."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dict(resolved))))


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    is_text = isinstance(value, str) and "${" in value
    return _INTERPOLATION.sub(lambda match: f"{match[1] * 2}\\${{", value) if is_text else value


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return plain containers with every interpolation resolved; secrets from environment variables are ``Secret``s.

    Raises UsageError: an interpolation that names nothing, or a group that was deleted.
    """
    try:
        container = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        from pipeline.config.composition_errors import explain_interpolation  # needed for errors alone

        raise explain_interpolation(error, config) from error
    for field, value in leaves(container):
        if value == MISSING and not field.startswith(_LITERAL_FIELDS):
            from pipeline.config.composition_errors import no_value  # needed for errors alone

            raise no_value(field)
    assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
    # after resolving, the value of ${oc.env:TOKEN} is plain text; its occurrences are marked, so that it gets masked
    names = redact.referenced_secrets(OmegaConf.to_container(config, resolve=False))
    values = [value for name in names if (value := os.environ.get(name)) and redact.needs_masking(name, value)]
    marked = redact.mark_secrets(container, values) if values else container
    return {str(key): value for key, value in marked.items()}


def compose_parent(
    run: str, words: Sequence[str], *, children: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compose the parent run that ``init.run`` names, on the cluster of its child unless ``run`` names another.

    Args:
        run: the overrides of the parent run, as a shell would split them.
        words: the overrides of the child; those of cluster, paths and tracking are used for the parent too.
        children: the values of ``init.run`` that led here from the first child, in this order.

    Returns the resolved configuration, and the overrides that it was composed from. Raises UsageError: an override that
    can't work, or a run that would start from itself; ValueError: from shlex.
    """
    if run in children:
        raise UsageError(f"init.run leads back to itself: {' → '.join((*children, run))}")
    parent_words = [quoted_run(word) for word in shlex.split(run)]
    names_cluster = any(word.startswith("cluster=") for word in parent_words)
    shared = [(word, match["group"]) for word in words if (match := _SHARED.match(word))]
    overrides = (*(word for word, group in shared if not (names_cluster and group == "cluster")), *parent_words)
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
    # the user's own defaults, which are merged over conf/ (conf_files.py)
    own = store.repo.setdefault(conf_files.OWN_GROUP, {})
    for name in ("user", "project"):
        content = functools.partial(_own_defaults, name)
        own[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", conf_files.OWN_GROUP, "_global_", content)
    for name, settings in PROGRAMS.items():
        store.store(group="schema/program", name=name, node=settings)
    # options of other installed packages have no file in conf/: such a file is imitated here
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
            if _has_file(group, name):  # Hydra refuses a file and a stored option of one name, in every command
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
    """A node of Hydra's store whose content is read when Hydra asks for it.

    The schemas of all thirty settings classes would take 0.1 s. The user's own defaults may change meanwhile. And an
    option that can't be read must fail only the commands that use it.
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


# ------------------------------------------------------------------------------- Hydra's own command line
class HydraFlags(NamedTuple):
    """A parsed command line of Hydra."""

    words: tuple[str, ...]  # the overrides
    multirun: bool  # they describe the trials of a sweep
    composes: bool  # runs are composed from this project's conf/: no flag asks for help or for another conf/


def read_flags(argv: Sequence[str]) -> HydraFlags:
    """Parse the words after ``python -m pipeline``. Raises UsageError: what Hydra would answer with a traceback."""

    def refuse(message: str) -> NoReturn:
        """Replace argparse's ``error``. A flag without its value takes the next word for it, even an override."""
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
    is_folder = args.config_path is not None and "://" not in args.config_path  # pkg://… names a package
    # Hydra takes a relative path from the folder of the module that calls it
    folders = [HOME / "pipeline" / args.config_path] if is_folder else [*CONF_DIRS]
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
