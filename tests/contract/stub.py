"""A run folder with a tiny trainer in it, so that a launch costs torchrun's own seconds and no more."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cluster.launchers.base import AttemptSpec, PackSource
from pipeline.core.program import SCRIPT, TORCHRUN_FILE
from pipeline.core.specs import SCRIPT_OUTPUTS

TRAINER = '''
import argparse, hashlib, json, os, pathlib, signal, subprocess, sys, time

def work(config):
    rank = int(os.environ["RANK"])
    run = pathlib.Path.cwd()
    print("hello from", rank, "of", os.environ["WORLD_SIZE"], flush=True)
    (run / f"seen-{rank}").write_text(os.environ.get("PACELINE_NODE", ""))
    print("HOSTILE=" + json.dumps(os.environ.get("HOSTILE", "")), flush=True)
    exec(config["program"])

def seal(path, metrics=""):
    """The .json beside a checkpoint."""
    side = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "step": 1, "metrics": metrics}
    canonical = json.dumps(side, sort_keys=True, separators=(",", ":"))
    side["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(side))

def finish(rank, run):
    """What a trainer leaves behind, of stub size."""
    if rank != 0:
        return
    (run / "metrics.jsonl").write_text('{"t": 1.0, "step": 1, "epoch": 0, "metrics": {"train/loss": 2.5}}\\n')
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    for name in ("step-00000001", "final"):
        (checkpoints / f"{name}.pt").write_bytes(b"weights of " + name.encode())
        seal(checkpoints / f"{name}.pt")
    (run / "predictions.json").write_text('{"split": "test", "targets": [1], "predictions": [1]}')
    seen = (run / "data" / "labels.bin").stat().st_size
    (run / "summary.json").write_text(json.dumps({"state": "FINISHED", "labels_bytes": seen}))

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    config = json.loads(pathlib.Path(parser.parse_args().config).read_text())
    if config["record"]:  # importing torch costs three seconds of CPU a rank
        from torch.distributed.elastic.multiprocessing.errors import record
        record(work)(config)
    else:
        work(config)

if __name__ == "__main__":
    main()
'''

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "stand_ins" / "torchrun" / "torch"

RUN_TO_END = "finish(rank, run)"
SLEEP = "print('up', flush=True); time.sleep(600)"


@dataclass(frozen=True, kw_only=True)
class Stub:
    """A run that is ready to launch."""

    run_dir: Path
    pack_dir: Path
    digest: str

    def spec(self, attempt: int = 1) -> AttemptSpec:
        """What an attempt of it runs."""
        return AttemptSpec(
            run_dir=self.run_dir,
            run_key=self.digest[:12],
            attempt=attempt,
            trainer="trainers.classifier",
            pack=PackSource(path=self.pack_dir, digest=self.digest),
        )


def make(folder: Path, program: str, *, record: bool = False, stand_in: bool = False) -> Stub:
    """Lay out ``folder/run`` with ``program`` (Python, run in every rank) and a pack of four 2×2 images.

    ``record``: wrap it in torch's @record, as the real trainer does, so that torch's error files are written.
    ``stand_in``: for tests of what is around torchrun, start the ranks without its two seconds of imports a node.
    """
    run_dir, pack_dir = folder / "run", folder / "pack"
    trainers = run_dir / "code" / "trainers"
    trainers.mkdir(parents=True)
    (trainers / "__init__.py").write_text("")
    (trainers / "classifier.py").write_text(TRAINER)
    shutil.copy(ROOT / TORCHRUN_FILE, trainers)
    shutil.copytree(ROOT / "trainers" / "contract", trainers / "contract")
    if stand_in:  # the run's code comes first on the path, and nothing else of torch is imported
        shutil.copytree(STAND_IN, run_dir / "code" / "torch", ignore=shutil.ignore_patterns("__pycache__"))
    config = {
        "program": program,
        "record": record,
        "trainer": {"global_batch_size": 8},
        "strategy": {"backend": "gloo"},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    pack_dir.mkdir(exist_ok=True)
    (pack_dir / "images.bin").write_bytes(bytes(16))
    (pack_dir / "labels.bin").write_bytes(bytes(32))
    digest = hashlib.sha256(str(folder).encode()).hexdigest()
    manifest = {"digest": digest, "count": 4, "channels": 1, "height": 2, "width": 2}
    (pack_dir / "manifest.json").write_text(json.dumps(manifest))
    return Stub(run_dir=run_dir, pack_dir=pack_dir, digest=digest)


@dataclass(frozen=True, kw_only=True)
class ScriptStub(Stub):
    """The run of a script, ready to launch; {data} is a file of its pack."""

    def spec(self, attempt: int = 1) -> AttemptSpec:
        """What an attempt of it runs."""
        return replace(
            super().spec(attempt),
            trainer=SCRIPT.entry,
            script="train.py",
            pack=PackSource(path=self.pack_dir, digest=self.digest, inside=("labels.bin",)),
            outputs=SCRIPT_OUTPUTS,
            project="/nowhere",
        )


def make_script(folder: Path, text: str, args: Sequence[str]) -> ScriptStub:
    """The same with a script of anybody's own, started by what starts all of them."""
    stub = make(folder, "", stand_in=True)
    code = stub.run_dir / "code"
    core = ("__init__", "errors", "files")
    for name in (*(f"core/{module}.py" for module in core), "observation", "script"):
        source, target = ROOT / "trainers" / name, code / "trainers" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    shutil.copy(ROOT / "paceline.py", code)
    (code / "train.py").write_text(text)
    program = {"name": "script", "script": "train.py", "args": [*args], "outputs": ["*.txt"], "data": "labels.bin"}
    (stub.run_dir / "config.json").write_text(json.dumps({"seed": 7, "program": program}))
    return ScriptStub(**vars(stub))
