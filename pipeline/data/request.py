"""The name of a pack's folder: a digest of everything that decides its content, known before it is made."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pipeline.data import manifest
from pipeline.data.base import DatasetModule
from pipeline.data.source import local_path
from pipeline.files import canonical_json, sha256_file, sha256_text, write_json
from pipeline.redact import hide
from trainers.config import DatasetConfig

# applied by the nodes; any other field counts
_TRAINING_ONLY = ("crop_padding", "crop_border", "flip", "alternate_flip", "cutout", "normalise")
_FINGERPRINTS = ".fingerprints.json"


def folder_name(config: DatasetConfig, module: DatasetModule, data_dir: Path) -> str:
    """``<name>-<12 hex>``. Local source files count by content, an address by its text, login aside.
    Raises DataError where a local source is missing, OSError where it can't be read."""
    wanted = {name: value for name, value in asdict(config).items() if name not in _TRAINING_ONLY}
    path = local_path(config.source)
    wanted["source"] = hide(config.source or "") or None if path is None else str(path)
    wanted["inputs"] = _fingerprints(module.local_inputs(config), data_dir)
    wanted["version"] = manifest.VERSION
    return f"{config.name}-{sha256_text(canonical_json(wanted))[:12]}"


def _fingerprints(paths: list[Path], data_dir: Path) -> dict[str, str]:
    """File name → sha256. A file is hashed again only when its size or mtime has changed; the notes lie
    in ``data_dir`` and may be lost at no harm (two writers at once: the last one's stay)."""
    cache = _read_cache(data_dir / _FINGERPRINTS)
    fresh: dict[str, list[int | str]] = {}
    found = {}
    for path in paths:
        now = list(manifest.stamp(path))
        if cache.get(str(path), [])[:2] != now:
            fresh[str(path)] = [*now, sha256_file(path)]
        found[path.name] = str({**cache, **fresh}[str(path)][2])
    if fresh and data_dir.is_dir():
        with suppress(OSError):  # a read-only folder of packs is still good to read from
            write_json(data_dir / _FINGERPRINTS, {**cache, **fresh})
    return found


def _read_cache(path: Path) -> dict[str, list[int | str]]:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
