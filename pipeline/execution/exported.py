"""A finished run's network as one file of torch.export, for `doit predict`.

trainers/exporting.py builds it from the run's own code, in a child process: the controller never imports torch."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pipeline.core.errors import PacelineError
from pipeline.core.places import HOME
from pipeline.core.processes import process
from pipeline.runs.contents import python_path
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_EXPORTER = HOME / "trainers" / "exporting.py"
_EXPORTED = ".exported"
_EXPORT_S = 1800.0  # a large network on a busy host


def exported_file(folder: RunFolder) -> Path:
    """Return the run's network as a file of torch.export, made once (runs/.exported). Raises PacelineError."""
    result = folder.read_result()
    if result is None:
        raise PacelineError(f"run {folder.key} has no result")
    weights = str(result.fields["weights_sha256"])
    target = folder.path.parent / _EXPORTED / f"{folder.key}-{weights[:12]}.pt2"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    configured = python_path(folder.read_json(run_folder.CONFIG) or {})
    code = os.pathsep.join(filter(None, (str(folder.path / run_folder.CODE), configured)))
    # written elsewhere and renamed, so that a killed export leaves no half file under the final name
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        path = Path(temporary, target.name)
        done = process.run(
            [sys.executable, "-P", str(_EXPORTER), str(folder.path), str(path)],
            env={**os.environ, "PYTHONPATH": code, "CUDA_VISIBLE_DEVICES": ""},
            timeout_s=_EXPORT_S,
        )
        if done.code != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.code}"]
            raise PacelineError(f"the network of run {folder.key} can't be exported: {last[0]}")
        path.replace(target)
    return target
