"""What benchmarks/mutations.py changes: each change says what it is, and does it to a project's copy."""

from __future__ import annotations

import ast
import io
import os
import random
import shutil
import subprocess
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mutated_source import mutated


@dataclass
class Setting:
    """What a command is typed in: the project's folder, words, environment."""

    root: Path
    words: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """``apply`` changes files, or returns another setting. ``weights``: it changes the weights."""

    name: str
    kind: str
    weights: bool
    apply: Callable[[Setting], Setting]


def in_file(path: str, edit: Callable[[str], str]) -> Callable[[Setting], Setting]:
    def apply(setting: Setting) -> Setting:
        file = setting.root / path
        before = file.read_text(encoding="utf-8")
        after = edit(before)
        if after == before:
            raise ValueError(f"{path} stays as it is")
        file.write_text(after, encoding="utf-8", newline="")
        return setting

    return apply


def with_words(*words: str) -> Callable[[Setting], Setting]:
    return lambda setting: Setting(setting.root, [*setting.words, *words], setting.env)


def with_env(**env: str) -> Callable[[Setting], Setting]:
    return lambda setting: Setting(setting.root, setting.words, {**setting.env, **env})


def code_changes(root: Path, files: Sequence[str], count: int, chance: random.Random) -> Iterator[Change]:
    """``count`` mutations over the files, each file as often as the others."""
    made = 0
    while made < count:
        for name in files:
            source = (root / name).read_text(encoding="utf-8")
            text, what = mutated(source, chance)
            if what and ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)):
                yield Change(f"{name}: {what}", "code", True, in_file(name, lambda _, text=text: text))
                made += 1
            if made == count:
                return


# ------------------------------------------------------------------------------------- configuration
OTHER_WORDS = {
    "dataset.crop_border": ["reflect"], "optimizer.lr_scaling": ["linear", "sqrt"], "trainer.precision": ["fp32"],
    "trainer.tta": ["mirror"], "strategy.compression": ["fp16", "bf16"], "model.name": [], "optimizer.name": [],
}  # fmt: skip
NO_WEIGHTS = ("dataset.source",)


def config_changes(resolved: Mapping[str, Any]) -> Iterator[Change]:
    """Other values for every field of the run, and other options of its groups."""
    for group in ("dataset", "model", "optimizer", "schedule", "trainer", "strategy"):
        for name, value in resolved[group].items():
            key = f"{group}.{name}"
            if key in NO_WEIGHTS:
                continue
            for other in others(key, value):
                yield Change(f"{key}={other}", "configuration", True, with_words(f"{key}={other}"))
    for word in ("seed=1", "seed=2", "seed=12345"):
        yield Change(word, "configuration", True, with_words(word))
    for word in (
        "model=resnet18", "model=resnet50", "model=whitened_cnn", "optimizer=adam", "optimizer=airbench_muon",
        "schedule=step", "schedule=constant", "schedule=triangle", "strategy=fsdp",
    ):  # fmt: skip
        yield Change(word, "configuration", True, with_words(word))


def others(key: str, value: Any) -> list[str]:
    if key in OTHER_WORDS:
        return OTHER_WORDS[key]
    if isinstance(value, bool):
        return [str(not value).lower()]
    if isinstance(value, int):
        return [str(value + 1), str(value + 2), str(value * 2 + 4)]
    if isinstance(value, float):
        return [repr(value * 0.5 or 0.125), repr(value * 0.9 or 0.25), repr(value + 1e-9)]
    return ["7", "3"] if value is None else []


# ---------------------------------------------------------------------------------------------- data
def arrays(path: Path, seed: int = 0) -> dict[str, Any]:
    """A small set of images in an .npz, uncompressed, so that one changed number keeps its size."""
    chance = np.random.default_rng(seed)
    content = {
        "images": chance.integers(0, 256, (256, 8, 8, 1), dtype=np.uint8),
        "labels": np.arange(256, dtype=np.int64) % 4,
        "test_images": chance.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8),
        "test_labels": np.arange(64, dtype=np.int64) % 4,
    }
    np.savez(path, **content)
    return content


def data_changes(source: Path, count: int, chance: random.Random) -> Iterator[Change]:
    """One pixel or one label is another; often with the old time stamp, in the old file or in a new one."""
    for number in range(count):
        array = chance.choice(["images", "labels", "test_images", "test_labels"])
        at, keep, anew = chance.random(), chance.random() < 0.7, chance.random() < 0.5

        def apply(
            setting: Setting, array: str = array, at: float = at, keep: bool = keep, anew: bool = anew
        ) -> Setting:
            with np.load(source) as file:
                content = {name: file[name].copy() for name in file.files}
            flat = content[array].reshape(-1)
            index = int(at * flat.size)
            flat[index] = (int(flat[index]) + 1) % (256 if flat.dtype == np.uint8 else 4)
            stat = source.stat()
            buffer = io.BytesIO()
            np.savez(buffer, **content)
            if anew:
                other = source.with_suffix(".new")
                other.write_bytes(buffer.getvalue())
                os.replace(other, source)  # noqa: PTH105
            else:
                source.write_bytes(buffer.getvalue())
            if keep:
                os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            return setting

        how = ("same time, " if keep else "") + ("new inode" if anew else "same inode")
        yield Change(f"{array} at {at:.2f} ({how}) {number}", "data", True, apply)


# ------------------------------------------------------------------------------------ environment
def version_changes(versions: Mapping[str, str], place: Path) -> Iterator[Change]:
    """Another version of each distribution in the key, as an installation before all others would bring."""
    for name in versions:
        if name == "python":
            continue
        for version in ("0.0.1", "99.1"):
            overlay = place / f"{name}-{version}"
            info = overlay / f"{name.replace('-', '_')}-{version}.dist-info"

            def apply(setting: Setting, info: Path = info, name: str = name, version: str = version) -> Setting:
                info.mkdir(parents=True, exist_ok=True)
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n")
                (info / "RECORD").write_text("")
                return with_env(PYTHONPATH=f"{info.parent}{os.pathsep}{setting.root}")(setting)

            yield Change(f"{name} {version}", "versions", True, apply)


def topology_changes() -> Iterator[Change]:
    for count in (1, 4, 8):
        yield Change(f"{count} ranks", "topology", True, with_words(f"cluster.nproc_per_node={count}"))
    for hosts in (1, 2, 4):
        listed = ",".join(f"{{name: host{number}}}" for number in range(hosts))
        for ranks in (1, 4):
            words = ("cluster=pssh", f"cluster.hosts=[{listed}]", f"cluster.nproc_per_node={ranks}")
            if hosts * ranks != 2:
                yield Change(f"{hosts} hosts with {ranks} ranks", "topology", True, with_words(*words))
    for name, value in {
        "ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3", "NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Tree",
        "NCCL_PROTO": "LL", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "MKL_CBWR": "AVX2", "KMP_BLOCKTIME": "0",
        "PYTHONHASHSEED": "7", "MY_OWN_SWITCH": "1", "GOMP_SPINCOUNT": "0", "OMP_SCHEDULE": "dynamic",
    }.items():  # fmt: skip
        word = f"cluster.env.{name}='{value}'"
        yield Change(word, "environment", True, with_words(f"+{word}"))


# ---------------------------------------------------------------------------------------- harmless
ADDED = (
    "trainers/extra.py", "trainers/models/another.py", "mylib/unused.py", "trainers/data/notes.txt",
    "pipeline/extra.py", "tests/test_extra.py", "docs/extra.md", "extra.py", "conf/experiment/extra.yaml",
)  # fmt: skip
LENGTHENED = (
    "README.md", "docs/training.md", "dodo.py", "pipeline/core/errors.py", "pipeline/cli/main.py", "Makefile",
    "tests/conftest.py", "conf/model/resnet50.yaml", "conf/experiment/mnist_cnn.yaml",
)  # fmt: skip
SURROUNDINGS = {
    "HOME": "PLACE", "USER": "somebody", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "TZ": "Asia/Tokyo", "TMPDIR": "PLACE",
    "PYTHONHASHSEED": "3", "COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb", "ATEN_CPU_CAPABILITY": "default",
    "OMP_NUM_THREADS": "7", "NVIDIA_TF32_OVERRIDE": "0", "DNNL_MAX_CPU_ISA": "AVX2", "PYTHONDONTWRITEBYTECODE": "1",
    "LC_NUMERIC": "de_DE.UTF-8", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MKL_NUM_THREADS": "1", "PYTHONUTF8": "0",
    "XDG_CACHE_HOME": "PLACE", "MLFLOW_TRACKING_URI": "http://nowhere.invalid", "PYTHONOPTIMIZE": "1",
}  # fmt: skip


def _commented(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    ends = [
        token.end[0] for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NEWLINE
    ]
    at = chance.choice(ends) if ends else 0
    return "".join([*lines[:at], "# a remark\n", *lines[at:]])


def harmless_in(root: Path, files: Sequence[str], chance: random.Random) -> Iterator[Change]:
    """What an editor or a formatter does to a file."""
    edits: dict[str, Callable[[str], str]] = {
        "a comment": lambda text: _commented(text, chance),
        "formatted anew": lambda text: ast.unparse(ast.parse(text)) + "\n",
        "blank lines at its end": lambda text: text + "\n\n\n",
        "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    }
    for name in files:
        before = (root / name).read_text(encoding="utf-8")
        for what, edit in edits.items():
            after = edit(before)
            if after != before:
                yield Change(f"{name}: {what}", "editing", False, in_file(name, lambda _, after=after: after))


def harmless_around(root: Path, place: Path) -> Iterator[Change]:
    """Additions, other folders, users, locales, clones, words."""

    def added(path: str, text: str) -> Callable[[Setting], Setting]:
        def apply(setting: Setting) -> Setting:
            file = setting.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return setting

        return apply

    for path in ADDED:
        yield Change(f"{path} is added", "additions", False, added(path, "# new\n"))
    for path in LENGTHENED:
        yield Change(f"{path}: another line", "additions", False, in_file(path, lambda text: text + "\n# new\n"))
    for name, value in SURROUNDINGS.items():
        there = str(place) if value == "PLACE" else value
        yield Change(f"{name}={there}", "surroundings", False, with_env(**{name: there}))
    for words in (
        ["tracking=mlflow"], ["tracking.experiment=other"], ["cluster.lease_s=99"], ["cluster.max_restarts=3"],
        ["cluster.connect_timeout_s=9"], ["sweep.name=x"], ["tracking.uri=sqlite:////nowhere/m.db"],
        ["cluster.workdir=/somewhere"], ["trainer.epochs=20"], ["trainer.global_batch_size=64"], ["optimizer.lr=1e-1"],
        ["optimizer.lr=0.10"], ["seed=0"], ["++seed=0"], ["dataset=digits"], ["model=small_cnn", "dataset=digits"],
        ["cluster=local"], ["cluster.nproc_per_node=2"],
        ["+cluster.env.KMP_AFFINITY=compact"], ["+cluster.env.NCCL_DEBUG=INFO"],
        ["strategy=ddp"], ["schedule=one_cycle"],
    ):  # fmt: skip
        yield Change(" ".join(words), "words", False, with_words(*words))
    for folder in ("a folder", "größe", "deep/er/still", "-dash", "it's"):
        yield Change(f"a clone in {folder!r}", "clones", False, _moved(place / "clones" / folder))
    yield Change("other time stamps", "surroundings", False, _touched)
    yield Change("other file modes", "surroundings", False, _moded)
    yield Change("what was remembered is gone", "surroundings", False, _forgotten)
    yield Change("another commit", "clones", False, _committed)


def _moved(folder: Path) -> Callable[[Setting], Setting]:
    def apply(setting: Setting) -> Setting:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(setting.root, folder, symlinks=True)
        return Setting(folder, setting.words, setting.env)

    return apply


def _touched(setting: Setting) -> Setting:
    for path in setting.root.glob("trainers/**/*.py"):
        os.utime(path)
    return setting


def _moded(setting: Setting) -> Setting:
    for path in setting.root.glob("trainers/**/*.py"):
        path.chmod(0o755)
    return setting


def _forgotten(setting: Setting) -> Setting:
    shutil.rmtree(setting.root / ".paceline", ignore_errors=True)
    return setting


def _committed(setting: Setting) -> Setting:
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], cwd=setting.root, check=True)
    return setting
