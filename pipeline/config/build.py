"""From a resolved configuration to the typed objects that the pipeline works with. Pure, but for reading a hostfile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers import LAUNCHERS
from pipeline.cluster.plan import check_batch, visible_gpus
from pipeline.config.basis import Basis
from pipeline.config.schema import OPTIONS, RootConfig, SearchConfig, SweepConfig, TrackingConfig
from pipeline.core.cluster import Cluster, Host
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.redact import (
    HIDDEN,
    hide,
    in_word,
    is_secret_name,
    placeholders,
    secret_values,
    split,
    without_secrets,
)
from pipeline.data import store
from trainers.core import config as node

_NOT_OF_THE_TRAINER = ("cluster", "tracking", "paths", "sweep", "search")
RENDEZVOUS = ("static", "c10d", "file")
_LONGEST_NAME, _LONGEST_PATH = 255, 3000  # bytes; the system takes 4,096 with what lies inside
DEVICES = ("auto", "cpu", "cuda")
CPU_RANKS = 2  # `auto` without a GPU: the same number everywhere, so that a run has one key on every laptop


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run as configured: typed for the pipeline, ``resolved`` for config.json.

    ``sweep`` says how a sweep over such runs goes, ``search`` how it chooses them; they are no part of the run, so
    ``resolved`` lacks them. ``resolved`` and ``overrides`` have placeholders for what is secret; ``secrets`` are
    the texts behind these, for what else may hold them (a message, the patch).
    """

    train: node.TrainConfig
    cluster: Cluster
    tracking: TrackingConfig
    runs_dir: Path
    data_dir: Path
    resolved: Mapping[str, Any]
    overrides: tuple[str, ...]
    sweep: SweepConfig
    search: SearchConfig
    secrets: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)

    def hide(self, text: str) -> str:
        """A message about the run without what is secret."""
        return hide(text, self.secrets)

    def shown_words(self, words: Iterable[str]) -> tuple[str, ...]:
        """Words of the command line without what is secret."""
        return tuple(in_word(word, self.secrets, self.resolved["cluster"]["secrets"]) for word in words)

    @property
    def basis(self) -> Basis:
        """What decides the key and the folder."""
        return Basis(
            resolved=self.resolved,
            chosen=self.chosen,
            cluster=dataclasses.replace(self.cluster, settings=None),
            inputs=store.inputs_or_none(self.train.dataset),
            runs_dir=self.runs_dir,
            data_dir=self.data_dir,
        )

    @property
    def chosen(self) -> tuple[str, ...]:
        """The modules of the chosen options: the only ones of their kind that the node half of this run imports."""
        return tuple(OPTIONS[group].target(getattr(self.train, group).name) for group in node.GROUPS)


def build(
    resolved: dict[str, Any],
    overrides: tuple[str, ...],
    *,
    root: Path,
    local_gpus: int,
    shares_batch: bool = True,
) -> RunConfig:
    """Type and check a resolved configuration.

    Args:
        resolved: plain containers, as ``compose.resolve`` returns them.
        root: what relative paths are relative to.
        local_gpus: GPUs of this computer, for ``cluster.nproc_per_node=auto``.
        shares_batch: refuse a global batch that the ranks can't share (what doesn't train has none).

    Raises:
        UsageError: a field that no code reads, or a value that cannot work.
    """
    _refuse_unknown(resolved, overrides)
    refuse_unprintable(resolved)
    train = train_config(resolved)
    cluster = build_cluster(resolved["cluster"], root=root, local_gpus=local_gpus)
    _refuse_endless(resolved)
    if shares_batch:
        check_batch(train.trainer.global_batch_size, cluster.world_size, train.trainer.accumulate_steps)
    paths = resolved["paths"]
    return RunConfig(
        train=train,
        cluster=cluster,
        tracking=TrackingConfig(**resolved["tracking"]),
        runs_dir=_folder(root, "paths.runs", paths["runs"]),
        data_dir=_folder(root, "paths.data", paths["data"]),
        resolved=of_the_run(resolved),
        overrides=words_of_the_run(overrides, resolved),
        sweep=SweepConfig(**resolved["sweep"]),
        search=search_config(resolved),
        secrets=secret_values(resolved),
    )


def train_config(resolved: Mapping[str, Any]) -> node.TrainConfig:
    """What the node half will read of it, typed and checked. Raises UsageError."""
    try:
        return node.parse(resolved, lambda group, name: OPTIONS[group].settings(name))
    except (node.ConfigError, TypeError) as error:
        raise UsageError(str(error)) from error


def search_config(resolved: Mapping[str, Any]) -> SearchConfig:
    """The section ``search`` as the settings of its sampler. Raises UsageError."""
    section, options = resolved["search"], OPTIONS["search"]
    if section["name"] == SearchConfig().name:  # no search
        return SearchConfig(**section)
    found: SearchConfig = _typed(options.settings(section["name"]), section)
    return found


def of_the_run(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without what only says how a sweep goes, and without secrets.

    Raises:
        UsageError: a placeholder in place of a secret, or a secret in what the ranks read from config.json.
    """
    _refuse_placeholders(resolved)
    shown = without_secrets({name: value for name, value in resolved.items() if name not in ("sweep", "search")})
    _refuse_secrets_of_the_trainer(resolved, shown)
    return shown


def words_of_the_run(words: tuple[str, ...], resolved: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides with placeholders for what is secret in them."""
    values, names = secret_values(resolved), resolved["cluster"]["secrets"]
    return tuple(in_word(word, values, names) for word in words)


def _refuse_placeholders(resolved: Mapping[str, Any]) -> None:
    """What was copied from a run's words or files: the secret would silently be three asterisks."""
    for name in placeholders(resolved):
        variable = name.rpartition(".")[2]
        reference = f"'${{oc.env:{variable if name.startswith('cluster.') else 'NAME'}}}'"
        word = f"env: {{{variable}: {reference}}} of the host" if ".hosts." in name else f"++{name}={reference}"
        raise UsageError(
            f"{name} holds {HIDDEN}, which stands for a secret that no file keeps; tell it anew",
            hint=f"{word}, with the value in that environment variable",
        )


def _refuse_secrets_of_the_trainer(resolved: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Ranks read the training part from config.json, where no secret may stand; their environment may hold it."""
    for group, section in resolved.items():
        if group in _NOT_OF_THE_TRAINER or not isinstance(section, Mapping):
            continue
        for name, value in section.items():
            if shown[group][name] != value and (group, name) != ("dataset", "source"):
                raise UsageError(
                    f"{group}.{name} is secret by its name or form, and the ranks would read it from config.json, "
                    "where no secret may stand",
                    hint="++cluster.env.MY_TOKEN='${oc.env:MY_TOKEN}', which the trainer finds in its environment",
                )


def build_cluster(raw: dict[str, Any], *, root: Path, local_gpus: int) -> Cluster:
    """Hosts and launch numbers from the ``cluster`` group. Raises UsageError."""
    launcher = str(raw["launcher"])
    settings = LAUNCHERS.settings(launcher)
    _check_rendezvous(raw["rendezvous"], raw["rendezvous_dir"])
    _check_numbers(raw)
    here = settings.capabilities.is_this_computer
    device = _device(raw.get("device", "auto"), here, raw["env"], local_gpus)
    nproc = _nproc(raw["nproc_per_node"], here, local_gpus if device == "cuda" else 0)
    secrets = secret_values({"cluster": raw})
    entries = _this_computer(raw) if here else _entries(raw, root, nproc)
    hosts = tuple(_host(entry, raw, nproc, secrets) for entry in entries)
    _refuse_unset(raw.get("secrets") or [], hosts)
    _refuse_duplicates(hosts)
    ssh_config = raw["ssh_config"]
    return Cluster(
        launcher=launcher,
        hosts=hosts,
        ssh_config=str(root / Path(ssh_config).expanduser()) if ssh_config else None,
        workdir=raw["workdir"],
        connect_timeout_s=raw["connect_timeout_s"],
        lease_s=raw["lease_s"],
        collective_timeout_s=raw["collective_timeout_s"],
        max_restarts=raw["max_restarts"],
        rendezvous=raw["rendezvous"],
        rendezvous_dir=raw["rendezvous_dir"],
        environment={str(name): str(version) for name, version in (raw.get("environment") or {}).items()},
        device=device,
        settings=_typed(settings, without_secrets({"cluster": raw})["cluster"]),
    )


def _typed(settings: type[Any], raw: Mapping[str, Any]) -> Any:
    """The settings with what the section has of their fields: ``cluster.launcher=`` may name a launcher that has more.

    Raises:
        UsageError: a value that cannot work.
    """
    known = {item.name for item in dataclasses.fields(settings)}
    try:
        return settings(**{name: value for name, value in raw.items() if name in known})
    except node.ConfigError as error:
        raise UsageError(str(error)) from error


def _check_numbers(raw: Mapping[str, Any]) -> None:
    """NaN is less than nothing, and an endless lease would keep a lost host busy for ever. Raises UsageError."""
    for name, least in (
        ("connect_timeout_s", 0.1),
        ("lease_s", 5.0),
        ("collective_timeout_s", 1.0),
        ("max_restarts", 0),
    ):
        if not least <= raw[name] < math.inf:
            raise UsageError(f"cluster.{name}={raw[name]:g} must be a finite number from {least:g}")


def _check_rendezvous(kind: str, folder: str | None) -> None:
    if kind not in RENDEZVOUS:
        raise UsageError(f"cluster.rendezvous={kind!r} is not an option; {suggestion(kind, RENDEZVOUS)}")
    if kind == "file" and (folder is None or not folder.startswith("/")):
        raise UsageError(
            f"cluster.rendezvous=file meets in cluster.rendezvous_dir, which is {folder}; "
            "set it to the absolute path of a folder that all hosts share"
        )
    if kind != "file" and folder is not None:
        raise UsageError(f"cluster.rendezvous_dir={folder} is for cluster.rendezvous=file, and this is {kind}")


def _refuse_unknown(resolved: Mapping[str, Any], words: tuple[str, ...]) -> None:
    """``+key=value`` can add anything to a Hydra configuration; a key that nothing reads is a mistake."""
    known = [item.name for item in dataclasses.fields(RootConfig)]
    for key in resolved:
        if key not in known:
            from pipeline.config.explain import unknown_key  # it imports Hydra

            typed = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{key}=")]
            rest = {name: value for name, value in resolved.items() if name in known}
            raise unknown_key(str(key), typed[-1] if typed else None, rest)
    for key in known:
        if key not in resolved:
            raise UsageError(f"{key} is missing: it was deleted; take ~{key} away")


def _folder(root: Path, field: str, value: str) -> Path:
    """Relative to the project. Raises UsageError: a name that no folder can have."""
    if not value.strip():
        raise UsageError(f"{field} is empty; is a shell variable unset?")
    if any(len(part.encode()) > _LONGEST_NAME for part in Path(value).parts) or len(value.encode()) > _LONGEST_PATH:
        raise UsageError(f"{field}={value[:40]}… ({len(value)} characters) is too long for a folder's name")
    return root / value


def refuse_unprintable(resolved: Mapping[str, Any]) -> None:
    """No file name, address or name can hold a NUL, a line break or an escape; values of ``env`` are checked apart."""
    for field, value in _values(resolved, ""):
        if not isinstance(value, str):
            continue
        if any(mark < " " or mark == "\x7f" for mark in value):
            raise UsageError(f"{field}={hide(repr(value))} holds a control character; take it out")
        _encodable(field, value)


def _refuse_endless(resolved: Mapping[str, Any]) -> None:
    """A key can't be taken of inf or NaN, and nothing can be trained by them. Raises UsageError."""
    for field, value in _values(resolved, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{field}={value} must be a finite number")


def _values(value: Any, field: str) -> Iterator[tuple[str, Any]]:
    """What is no list and no mapping, with its place. Without ``env``."""
    if isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _values(inner, f"{field}[{at}]")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "env":
                yield from _values(inner, f"{field}.{name}" if field else str(name))
    else:
        yield field, value


def _encodable(field: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{field} is not text: it holds bytes that are not UTF-8") from error


def _environment(raw: Mapping[str, Any], field: str) -> dict[str, str]:
    """Variables for the ranks. YAML's numbers and booleans have become Python's text by now: ``true`` is "True"."""
    for name, value in raw.items():
        if not name or any(mark in name for mark in "=\0") or not name.isprintable():
            raise UsageError(f"{field}: {name!r} can't be the name of a variable: it is empty, or holds '=' or NUL")
        if not isinstance(value, str):
            shown = HIDDEN if is_secret_name(name) else hide(repr(value))
            raise UsageError(f"{field}.{name}={shown} must be one text, number or boolean; write a list in quotes")
        if "\0" in value:
            raise UsageError(f"{field}.{name} holds a NUL character, which no variable can; take it out")
        _encodable(f"{field}.{name}", value)
    return dict(raw)


def _device(value: str, here: bool, env: Mapping[str, str], local_gpus: int) -> str:
    """The kind of device that the ranks will compute on, as it counts in the key; auto where no host was asked."""
    if value not in DEVICES:
        raise UsageError(f"cluster.device={value!r} is not an option; {suggestion(value, DEVICES)}")
    if value != "auto" or not here:
        return value
    return "cuda" if visible_gpus(local_gpus, env) else "cpu"


def _nproc(value: Any, here: bool, local_gpus: int) -> int:
    if value == "auto" and here:
        return local_gpus or CPU_RANKS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = " or auto" if here else " (auto only for cluster=local: a run's key is taken before any host is asked)"
        raise UsageError(f"cluster.nproc_per_node={value!r} must be a whole number from 1{also}")
    return value


def _this_computer(raw: dict[str, Any]) -> list[dict[str, Any]]:
    if raw["hosts"] or raw["hostfile"]:
        raise UsageError(
            "cluster.hosts and cluster.hostfile need a launcher that reaches other hosts; use cluster=pssh"
        )
    return [{"name": "localhost"}]


def _entries(raw: dict[str, Any], root: Path, nproc: int) -> list[dict[str, Any]]:
    """The host entries of `hosts` or of the hostfile."""
    if raw["hostfile"] is not None:
        from pipeline.cluster import hostfile

        path = root / Path(raw["hostfile"]).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cluster.hostfile={raw['hostfile']}: {error}") from error
        parsed = hostfile.parse(text, str(raw["hostfile"]), default_slots=nproc)
        return [dataclasses.asdict(host) for host in parsed]
    if not raw["hosts"]:
        raise UsageError(
            "cluster.hosts is empty; name your hosts: cluster.hostfile=FILE or cluster.hosts=[{name: HOST}, …]"
        )
    return list(raw["hosts"])


def _host(entry: dict[str, Any], raw: dict[str, Any], nproc: int, secrets: frozenset[str]) -> Host:
    """One Host: what the entry leaves open comes from the cluster."""
    own = entry.get("nproc_per_node")
    if own is not None and own < 1:
        raise UsageError(f"cluster.hosts {entry['name']}: nproc_per_node={own} must be at least 1")
    env = {
        **_environment(raw["env"], "cluster.env"),
        **_environment(entry.get("env") or {}, f"cluster.hosts {entry['name']}: env"),
    }
    shown, secret = split(env, secrets, raw.get("secrets") or ())
    return Host(
        name=entry["name"],
        nproc_per_node=own or nproc,
        port=entry.get("port"),
        user=entry.get("user"),
        address=entry.get("address"),
        interface=entry.get("interface") or raw["interface"],
        python=entry.get("python") or raw["python"],
        env=shown,
        secrets=secret,
    )


def _refuse_unset(names: list[str], hosts: tuple[Host, ...]) -> None:
    """A misspelled name would let the value be seen."""
    known = {name for host in hosts for name in host.env}
    for name in names:
        if name not in known:
            raise UsageError(
                f"cluster.secrets names {name!r}, which cluster.env doesn't set; {suggestion(name, known)}"
            )


def _refuse_duplicates(hosts: tuple[Host, ...]) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.label in seen:
            raise UsageError(
                f"cluster.hosts names {host.label} twice; each node takes part once (more ranks: nproc_per_node)"
            )
        seen.add(host.label)
