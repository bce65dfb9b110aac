"""Hosts in files of conf/ by their names alone, as a command line takes them."""

from __future__ import annotations

from hydra._internal.config_repository import ConfigRepository
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipeline.config.override_words import ONE_HOST, host_entry

_FIELDS = ("hosts", "spares")
_load = ConfigRepository.load_config


def accept_in_files() -> None:
    """Make the names mappings when Hydra reads a file: it checks the types while it merges, before anybody else sees
    what was read."""
    ConfigRepository.load_config = _load_named  # type: ignore[method-assign, assignment]


def _load_named(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    result = _load(repository, config_path)
    config = result.config if result is not None else None
    if isinstance(config, DictConfig):
        of_a_cluster = [config] if config_path.startswith("cluster/") else []
        for section in (*of_a_cluster, config.get("cluster")):
            if isinstance(section, DictConfig):
                _replace_names(section)
    return result


def _replace_names(section: DictConfig) -> None:
    """What is no name, such as a number or an interpolation, stays: Hydra refuses it with the file."""
    for field in _FIELDS:
        hosts = section.get(field)
        raw = OmegaConf.to_container(hosts, resolve=False) if isinstance(hosts, ListConfig) else []
        found = [host_entry(host) if _is_name(host) else host for host in raw] if isinstance(raw, list) else raw
        if found != raw:
            section[field] = found


def _is_name(host: object) -> bool:
    return isinstance(host, str) and ONE_HOST.fullmatch(host) is not None
