from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.core.places import ROOT
from pipeline.data import request, store
from pipeline.data.datasets.own import OwnDatasetConfig
from pipeline.data.store import fetch, find
from pipeline.keys.import_closure import import_closure
from tests.pipeline.data.data_fixtures import read_pack
from tests.pipeline.data.own_data import squares
from trainers.core.config import ConfigError


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
    assert store.inputs(first).own == ("tests.pipeline.data.own_data",)
    code = import_closure(ROOT, store.inputs(first).own, given=request._GIVEN)
    assert "tests/pipeline/data/own_data.py" in code.digests
    assert "numpy" in code.versions


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("nothing", {}, r"own_data:nothing returned NoneType; wanted: a mapping with images, labels, and where"),
        ("failing", {}, r"dataset.target=tests.pipeline.data.own_data:failing raised KeyError: .*own_data.py:\d+"),
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


def test_a_target_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset.target='squares' must be MODULE:NAME"):
        OwnDatasetConfig(target="squares")
