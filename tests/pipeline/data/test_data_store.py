from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.files import sha256_file
from pipeline.data import datasets, manifest
from pipeline.data.datasets.synthetic import SyntheticConfig
from pipeline.data.manifest import Pack
from pipeline.data.request import request
from pipeline.data.store import fetch, find
from tests.pipeline.data.data_fixtures import make_mnist, random_images
from tests.pipeline.data.data_server import Server
from tests.waiting import HANG_S, wait_until
from trainers.core.config import DatasetConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CONFIG = SyntheticConfig(size=200, test_size=50, image_size=8, val_size=20)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return fetch(CONFIG, tmp_path / "data")


def left_overs(data_dir: Path) -> list[str]:
    return [path.name for path in data_dir.iterdir() if path.name.startswith(".building")]


def run(code: str) -> subprocess.Popen[str]:
    """Python in another process, in the project, its output readable."""
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def child_fetch(config: str, data_dir: Path) -> str:
    return (
        "from pathlib import Path\nfrom trainers.core.config import DatasetConfig\n"
        "from pipeline.data.datasets.synthetic import SyntheticConfig\n"
        "from pipeline.data.store import fetch\n"
        f"print(fetch({config}, Path({str(data_dir)!r}), on_progress=lambda *line: None).digest)\n"
    )


def test_find_needs_neither_numpy_nor_the_network(pack: Pack) -> None:
    code = child_fetch(repr(CONFIG), pack.path.parent)
    process = run(f"{code}import sys\nprint({{'numpy', 'requests', 'pooch', 'rich', 'sklearn'}} & set(sys.modules))")
    assert process.communicate()[0].split("\n")[:2] == [pack.digest, "set()"]


def test_an_unknown_data_set_shows_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dataset='cifar' is not an option; did you mean cifar10\? valid: arrays, "):
        fetch(DatasetConfig(name="cifar"), tmp_path)


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def edit_count(path: Path) -> None:
    path.write_text(path.read_text().replace('"num_classes": 10', '"num_classes": 11'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("images.bin", alter),
        ("labels.bin", truncate),
        ("labels.bin", Path.unlink),
        ("manifest.json", truncate),
        ("manifest.json", edit_count),
        ("manifest.json", lambda path: path.write_text("[]")),
    ],
)
def test_a_damaged_pack_is_not_found_and_made_again(pack: Pack, name: str, damage: object) -> None:
    data_dir = pack.path.parent
    damage(pack.path / name)  # type: ignore[operator]
    assert find(CONFIG, data_dir) is None
    assert fetch(CONFIG, data_dir) == pack
    assert find(CONFIG, data_dir) == pack
    assert left_overs(data_dir) == []


def test_an_untouched_pack_is_not_hashed_and_a_touched_one_once(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(manifest, "sha256_file", lambda path: hashed.append(path.name) or sha256_file(path))
    assert find(CONFIG, pack.path.parent) == pack
    assert hashed == []
    os.utime(pack.path / "images.bin", (1, 1))
    time.sleep(0.03)  # a file system's clock has gone on
    for _ in range(2):
        assert find(CONFIG, pack.path.parent) == pack
    assert hashed == ["images.bin"]


def test_a_copied_pack_works_without_its_side_file(pack: Pack, tmp_path: Path) -> None:
    copy = shutil.copytree(pack.path, tmp_path / "copy" / pack.path.name)
    (copy / manifest.STAMPS).unlink()
    assert find(CONFIG, tmp_path / "copy") == Pack(copy, pack.manifest)


def test_a_source_that_is_gone_is_not_found_and_fetch_says_so(tmp_path: Path) -> None:
    images, labels = random_images(30, (4, 4), 1)
    np.savez(tmp_path / "mine.npz", images=images, labels=labels)
    config = DatasetConfig(name="arrays", source=str(tmp_path / "mine.npz"), holdout=5)
    fetch(config, tmp_path / "data")
    (tmp_path / "mine.npz").unlink()
    assert find(config, tmp_path / "data") is None
    with pytest.raises(DataError, match=r"mine.npz does not exist"):
        fetch(config, tmp_path / "data")


def test_an_unchanged_source_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_mnist(tmp_path / "source", monkeypatch)
    config = DatasetConfig(name="mnist", source=str(made.folder))
    pack = fetch(config, tmp_path / "data")
    monkeypatch.setattr("pipeline.core.files.sha256_file", lambda path: pytest.fail(f"hashed {path}"))
    assert find(config, tmp_path / "data") == pack


def save_npz(path: Path, seed: int) -> DatasetConfig:
    images, labels = random_images(3000, (16, 16, 3), seed)
    np.savez(path, images=images, labels=labels)
    return DatasetConfig(name="arrays", source=str(path), holdout=5)


def test_a_source_replaced_by_one_of_equal_size_and_time_is_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    config = save_npz(path, 1)
    first, before = fetch(config, tmp_path / "data"), path.stat()
    save_npz(tmp_path / "other.npz", 2)
    os.utime(tmp_path / "other.npz", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "other.npz").replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert find(config, tmp_path / "data") is None
    second = fetch(config, tmp_path / "data")
    assert second.digest != first.digest
    save_npz(path, 1)  # in place: the inode stays
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find(config, tmp_path / "data") == first


def test_a_pack_file_replaced_by_one_of_equal_size_and_time_is_not_found(pack: Pack) -> None:
    path = pack.path / "images.bin"
    before = path.stat()
    alter(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find(CONFIG, pack.path.parent) is None


@pytest.mark.parametrize("way", ["replaced", "rewritten", "gone"])
def test_a_source_that_changes_while_it_is_packed_makes_no_pack(tmp_path: Path, way: str) -> None:
    path = tmp_path / "mine.npz"
    config = save_npz(path, 1)
    save_npz(tmp_path / "other.npz", 2)

    def change(what: str, done: int, total: int | None) -> None:
        if what == "packing arrays" and (tmp_path / "other.npz").exists():
            if way == "replaced":
                (tmp_path / "other.npz").replace(path)
            elif way == "rewritten":
                path.write_bytes((tmp_path / "other.npz").read_bytes())
                (tmp_path / "other.npz").unlink()
            else:
                path.unlink(missing_ok=True)

    with pytest.raises(DataError, match=r"mine\.npz(?s:.*)was changed while|No such file or directory \(.*mine\.npz"):
        fetch(config, tmp_path / "data", on_progress=change)
    assert list((tmp_path / "data").glob("arrays-*")) == left_overs(tmp_path / "data") == []


def test_neither_name_nor_folder_of_a_source_counts(tmp_path: Path) -> None:
    config = save_npz(tmp_path / "mine.npz", 1)
    pack = fetch(config, tmp_path / "data")
    (tmp_path / "there").mkdir()
    (tmp_path / "mine.npz").rename(tmp_path / "there" / "renamed.npz")
    renamed = replace(config, source=str(tmp_path / "there" / "renamed.npz"))
    assert find(renamed, tmp_path / "data") == pack
    assert fetch(renamed, tmp_path / "elsewhere").digest == pack.digest


def test_damaged_notes_cost_a_digest_and_no_more(tmp_path: Path) -> None:
    config = save_npz(tmp_path / "mine.npz", 1)
    pack = fetch(config, tmp_path / "data")
    for notes in ([], {str(config.source): 7}, {str(config.source): [1, 2]}, {str(config.source): [None] * 5}):
        (tmp_path / "data" / ".fingerprints.json").write_text(json.dumps(notes))
        assert find(config, tmp_path / "data") == pack


def test_processes_that_ask_at_once_make_one_pack(tmp_path: Path) -> None:
    config = replace(CONFIG, size=20_000, image_size=32)
    processes = [run(child_fetch(repr(config), tmp_path)) for _ in range(4)]
    digests = {process.communicate()[0] for process in processes}
    assert len(digests) == 1
    assert digests.pop().strip() == fetch(config, tmp_path).digest
    made = json.loads((fetch(config, tmp_path).path / manifest.STAMPS).read_text())
    assert made["images.bin"][1] == (fetch(config, tmp_path).path / "images.bin").stat().st_mtime_ns
    assert len(list(tmp_path.glob("synthetic-*"))) == 1
    assert left_overs(tmp_path) == []


def wait_for(pattern: str, folder: Path) -> None:
    wait_until(lambda: list(folder.glob(pattern)), every_s=0.01)


def test_a_kill_while_packing_leaves_nothing_that_is_found(tmp_path: Path) -> None:
    config = replace(CONFIG, size=100_000, image_size=32, channels=3)
    process = run(child_fetch(repr(config), tmp_path))
    wait_for(".building-*/pack/images.bin", tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(left_overs(tmp_path)) == 1
    assert find(config, tmp_path) is None
    fetch(CONFIG, tmp_path)
    assert left_overs(tmp_path) == []


def test_a_kill_while_downloading_leaves_nothing_that_is_found(tmp_path: Path, server: Server) -> None:
    images, labels = random_images(400, (32, 32, 3), 1)
    np.savez(tmp_path / "mine.npz", images=images, labels=labels)
    server.script.files["mine.npz"] = (tmp_path / "mine.npz").read_bytes()
    server.script.stall = threading.Event()
    config = DatasetConfig(name="arrays", source=f"{server.url}mine.npz", holdout=40)
    process = run(child_fetch(repr(config), tmp_path / "data"))
    assert server.script.stalled.wait(HANG_S)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.script.stall.set()
    assert find(config, tmp_path / "data") is None
    assert fetch(config, tmp_path / "data").manifest.count == 400
    assert left_overs(tmp_path / "data") == []


def test_the_code_of_a_data_set_counts_for_its_packs_and_a_comment_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "clone"
    for name in ("pipeline", "trainers"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("pipeline.data.request.ROOT", root)
    module = root / "pipeline/data/datasets/synthetic.py"

    def edit(path: Path, old: str, new: str) -> str:
        path.write_text(path.read_text().replace(old, new))
        return name_of("synthetic")

    def name_of(name: str) -> str:
        return request(datasets.DATASETS.settings(name)(), tmp_path).name

    first, other = name_of("synthetic"), name_of("mnist")
    line = "from trainers.core.config import"
    assert edit(module, line, f"# a comment\n{line}") == first
    assert edit(root / "pipeline/core/errors.py", "class DataError", "FINE = 1\n\n\nclass DataError") == first
    (root / "mylib.py").write_text("SCALE = 1.0\n")
    second = edit(module, line, f"from mylib import SCALE\n{line}")
    third = edit(root / "mylib.py", "1.0", "7.0")
    fourth = edit(root / "pipeline/data/packing.py", "def assign", "SALT = 1\n\n\ndef assign")
    assert len({first, second, third, fourth}) == 4
    edit(root / "pipeline/data/packing.py", "SALT = 1\n\n\n", "")
    assert name_of("mnist") == other
