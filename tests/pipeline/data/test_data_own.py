from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.core.locks import held
from pipeline.data import own_process, request, store
from pipeline.data.datasets.own import OwnDatasetConfig
from pipeline.data.manifest import Pack
from pipeline.data.store import fetch, find
from tests.pipeline.data.data_fixtures import read_pack
from tests.pipeline.data.own_data import squares
from trainers.core.config import ConfigError

pytestmark = pytest.mark.slow

PLACE = r"\(tests/pipeline/data/own_data\.py:\d+\)$"


def config(name: str = "squares", **settings: Any) -> OwnDatasetConfig:
    return OwnDatasetConfig(target=f"tests.pipeline.data.own_data:{name}", **{"holdout": 4, **settings})


def test_what_the_function_returns_is_packed_with_its_names_of_classes(tmp_path: Path) -> None:
    pack = fetch(config(args={"count": 20}), tmp_path)
    assert (pack.manifest.classes, pack.manifest.num_classes) == (("small", "large"), 2)
    images, labels = read_pack(pack.path, (1, 8, 8))
    made = squares(20)
    found = {(image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}
    assert found == {(image.tobytes(), int(label)) for image, label in zip(made["images"], made["labels"], strict=True)}


def test_its_module_its_arguments_and_its_files_decide_the_pack(tmp_path: Path) -> None:
    (tmp_path / "value").write_text("1")
    first = config(args={"count": 20}, source=str(tmp_path / "value"))
    fetch(first, tmp_path / "data")
    assert find(first, tmp_path / "data") is not None
    assert find(config(args={"count": 21}, source=str(tmp_path / "value")), tmp_path / "data") is None
    (tmp_path / "value").write_text("2")
    assert find(first, tmp_path / "data") is None
    assert "tests/pipeline/data/own_data.py" in request.request(first, tmp_path / "data").code


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("nothing", {}, r"own_data:nothing returned NoneType; wanted: a mapping with images, labels, and where"),
        ("failing", {}, rf"dataset.target=tests.pipeline.data.own_data:failing raised JSONDecodeError: .* {PLACE}"),
        ("leaving", {}, rf"dataset.target=tests.pipeline.data.own_data:leaving raised SystemExit: 3 {PLACE}"),
        ("absent", {}, r"raised AttributeError: module 'tests.pipeline.data.own_data' has no attribute 'absent'"),
        ("renamed", {"args": {"names": ["a"]}}, "returned 1 names of classes; its labels have 2"),
        ("renamed", {"args": {"names": ["a", "a"]}}, "own_data:renamed: classes 0 and 1 have one name, 'a'"),
        ("renamed", {"args": {"names": ["a", " "]}}, "own_data:renamed: class 1 has no name"),
        ("renamed", {"args": {"names": "ab"}}, "own_data:renamed returned classes='ab'; wanted: a list of names"),
        ("more", {}, "own_data:more returned picture too; wanted: images, labels"),
        ("squares", {"source": "https://example.org/x"}, "is an address, and dataset=own reads files that are here"),
    ],
)
def test_what_can_t_be_taken_is_told(tmp_path: Path, name: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        fetch(config(name, **settings), tmp_path)
    assert not list(tmp_path.glob("own-*"))


def test_a_function_that_closes_stdout_closes_it_for_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.dup(1)
    try:
        streams = sys.stdout, sys.stderr
        fetch(config("closing"), tmp_path)
        assert (sys.stdout, sys.stderr) == streams
        os.write(1, b"packed")
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert capfd.readouterr().out == "packed"


def test_a_target_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset.target='squares' must be MODULE:NAME"):
        OwnDatasetConfig(target="squares")


CODE = """
import pathlib
import numpy as np

def make(count=20):
    value = int((pathlib.Path(__file__).parent / ("value" + ".txt")).read_text()) + 1
    return {"images": np.full((count, 8, 8), value, np.uint8), "labels": np.arange(count) % 2}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a function of its own: ``own_made.py`` and ``value.txt``."""
    for module in (store, request, own_process):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "own_made.py").write_text(CODE)
    (tmp_path / "value.txt").write_text("1")
    yield tmp_path
    sys.modules.pop("own_made", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def values(pack: Pack) -> set[int]:
    return {int(value) for value in read_pack(pack.path, (1, 8, 8))[0].ravel()}


def test_what_the_function_reads_besides_its_source_is_told_and_a_change_of_it_makes_the_pack_anew(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = OwnDatasetConfig(target="own_made:make", holdout=4)
    assert values(fetch(settings, project / "data")) == {2}
    told = "WARNING: own_made:make read value.txt, no part of dataset.source; the data is made anew when it changes\n"
    assert capfd.readouterr().err.endswith(told)
    found = find(settings, project / "data")
    assert found == fetch(settings, project / "data")
    (project / "value.txt").write_text("6")
    assert find(settings, project / "data") is None
    assert values(fetch(settings, project / "data")) == {7}
    (project / "value.txt").unlink()
    with pytest.raises(DataError, match=r"raised FileNotFoundError: .*value\.txt"):
        fetch(settings, project / "data")


def test_a_source_is_nothing_besides(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = OwnDatasetConfig(target="own_made:make", holdout=4, source=str(project / "value.txt"))
    fetch(settings, project / "data")
    assert "WARNING" not in capfd.readouterr().err


def test_code_that_was_edited_while_another_command_held_the_lock_is_packed_under_its_own_name(project: Path) -> None:
    settings = OwnDatasetConfig(target="own_made:make", holdout=4)
    (project / "data").mkdir()
    waited = threading.Event()
    with ThreadPoolExecutor() as other:
        with held(project / "data" / ".own.lock"):
            waiting = other.submit(fetch, settings, project / "data", on_progress=lambda *_: waited.set())
            assert waited.wait(10.0)
            (project / "own_made.py").write_text(CODE.replace("+ 1", "+ 10"))
        assert values(waiting.result()) == {11}
    (project / "own_made.py").write_text(CODE)  # in the same process, as a search's next trial
    assert find(settings, project / "data") is None
    assert values(fetch(settings, project / "data")) == {2}


def test_a_copy_of_the_process_that_the_function_forks_makes_no_pack(project: Path) -> None:
    forking = CODE.replace("value =", "copy = os.fork(); copy and os.waitpid(copy, 0); value =")
    (project / "own_made.py").write_text(f"import os\n{forking}")
    settings = OwnDatasetConfig(target="own_made:make", holdout=4, source=str(project / "value.txt"))
    assert values(fetch(settings, project / "data")) == {2}


def test_os_exit_in_the_function_and_a_keyboard_interrupt_of_its_own_are_told(project: Path) -> None:
    for line, text in (
        ("import os; os._exit(0)", r"own_made:make: its process left no whole pack"),
        ("import os; os._exit(3)", r"own_made:make: its process ended with exit code 3 before the data was packed"),
        ("raise KeyboardInterrupt", r"raised KeyboardInterrupt \(own_made.py:2\)"),
    ):
        (project / "own_made.py").write_text(f"def make():\n    {line}\n")
        with pytest.raises(DataError, match=text):
            fetch(OwnDatasetConfig(target="own_made:make"), project / "data")


@pytest.mark.ci
@pytest.mark.long
def test_a_function_runs_as_its_modules_are_and_in_a_built_environment(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module edited within the same second ran its old byte code, and a variable of the shell decided unseen."""
    monkeypatch.setenv("SCALE", "9")
    code = CODE.replace("value =", "import os, own_value; value = own_value.VALUE + int(os.environ.get('SCALE', 0)) #")
    (project / "own_made.py").write_text(code)
    settings = OwnDatasetConfig(target="own_made:make", holdout=4)
    for value in range(3):
        (project / "own_value.py").write_text(f"VALUE = {value}\n")
        os.utime(project / "own_value.py", (1.7e9, 1.7e9))
        assert values(fetch(settings, project / "data")) == {value}
    said = (
        "WARNING: own_made:make read SCALE, which this shell sets and it doesn't get; an argument passes its value, as "
        "a part of the data's name: dataset.args.NAME='${oc.env:SCALE}'"
    )
    assert said in capfd.readouterr().err


@pytest.mark.ci
@pytest.mark.long
def test_a_set_whose_order_decides_the_images_makes_the_same_pack_whatever_the_shells_hash_seed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import numpy as np

def make(count=20):
    order = [int(name) for name in {str(number) for number in range(count)}]
    images = np.repeat(np.array(order, np.uint8), 64).reshape(count, 8, 8)
    return {"images": images, "labels": np.arange(count) % 2}
"""
    (project / "own_made.py").write_text(code)
    settings = OwnDatasetConfig(target="own_made:make", holdout=4)
    digests = set()
    for seed in ("1", "2", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        digests.add(fetch(settings, project / f"data-{seed}").digest)
    assert len(digests) == 1


def test_a_variable_of_the_shell_that_the_function_gets_and_reads_makes_the_pack_anew_with_another_value(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "own_made.py").write_text(CODE.replace("value =", "import os; value = len(os.environ['TZ']) #"))
    settings = OwnDatasetConfig(target="own_made:make", holdout=4)
    for value in ("UTC", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", value)
        assert find(settings, project / "data") is None
        assert values(fetch(settings, project / "data")) == {len(value)}
        assert find(settings, project / "data") is not None
