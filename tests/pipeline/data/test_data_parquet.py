from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError
from pipeline.data.datasets.parquet import ParquetConfig
from pipeline.data.store import fetch, find
from tests.pipeline.data.data_fixtures import make_parquet, png, random_images, read_pack


def config(source: Path, **settings: Any) -> ParquetConfig:
    return ParquetConfig(source=str(source), **settings)


IMAGES, _ = random_images(12, (6, 7, 3), 0)
ROWS = [{"bytes": png(image), "path": None} for image in IMAGES]
LABELS = [0, 1] * 6


@pytest.mark.ci
@pytest.mark.long
def test_a_hub_s_layout_has_its_splits_names_and_images(tmp_path: Path) -> None:
    pack = fetch(config(make_parquet(tmp_path / "hub", train=12, validation=6, test=6)), tmp_path / "data")
    made = pack.manifest
    assert made.splits == {"train": (0, 12), "val": (12, 18), "test": (18, 24)}
    assert made.classes == ("red", "green", "blue")
    images, labels = read_pack(pack.path, (3, 6, 7))
    np.testing.assert_array_equal(images[:12], IMAGES.transpose(0, 3, 1, 2))
    assert labels[:12].tolist() == [0, 1, 2] * 4


def test_one_file_of_plain_bytes_with_names_for_labels(tmp_path: Path) -> None:
    names = ["dog", "cat"] * 6
    pq.write_table(pa.table({"img": [row["bytes"] for row in ROWS], "label": names}), tmp_path / "all.parquet")
    pack = fetch(config(tmp_path / "all.parquet", holdout=2), tmp_path / "data")
    assert (pack.manifest.classes, pack.manifest.count) == (("cat", "dog"), 12)


def test_a_file_and_a_folder_behind_an_address(tmp_path: Path) -> None:
    hub, store = make_parquet(tmp_path / "hub", train=12, test=6), fsspec.filesystem("memory")
    store.put(f"{hub}/", "/hub/", recursive=True)
    shard = next((hub / "data").glob("train-00000*"))
    try:
        for source, address in ((hub, "memory://hub"), (shard, f"memory://hub/data/{shard.name}")):
            wanted = fetch(config(source, holdout=2), tmp_path / "data")
            got = fetch(ParquetConfig(source=address, holdout=2), tmp_path / "other")
            assert got.digest == wanted.digest
    finally:
        store.rm("/hub", recursive=True)


def test_an_image_in_another_shard_s_split_is_another_pack(tmp_path: Path) -> None:
    hub = make_parquet(tmp_path / "hub", train=12, test=6)
    for number in range(2):
        (hub / f"data/train-0000{number}-of-00002.parquet").rename(hub / f"data/train-{number}.parquet")
    first = fetch(config(hub), tmp_path / "data")
    (hub / "data/train-1.parquet").rename(hub / "data/test-9.parquet")
    assert find(config(hub), tmp_path / "data") is None
    assert fetch(config(hub), tmp_path / "data").manifest.splits != first.manifest.splits


def test_columns_can_be_named(tmp_path: Path) -> None:
    table = pa.table({"img": ROWS, "fine_label": LABELS, "coarse_label": [0] * 6 + [1] * 6})
    pq.write_table(table, tmp_path / "all.parquet")
    with pytest.raises(
        DataError, match=r"which column has the labels .*it has: img \(struct.*\n  try: dataset.label_column=fine_l"
    ):
        fetch(config(tmp_path / "all.parquet", holdout=2), tmp_path / "data")
    pack = fetch(config(tmp_path / "all.parquet", holdout=2, label_column="coarse_label"), tmp_path / "data")
    assert pack.manifest.num_classes == 2
    with pytest.raises(DataError, match=r"dataset.image_column=picture is no column of encoded images"):
        fetch(config(tmp_path / "all.parquet", holdout=2, image_column="picture"), tmp_path / "data")


def rows(**columns: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table({"image": ROWS, "label": LABELS, **columns}), path)


def cut(path: Path) -> None:
    rows()(path)
    path.write_bytes(path.read_bytes()[:-100])


def damaged(path: Path) -> None:
    rows()(path)
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (cut, "all.parquet is not a parquet file, or it is cut off"),
        (rows(image=[{"bytes": None, "path": "x.png"}, *ROWS[1:]]), "row 0 has no bytes of an image"),
        (rows(image=[*ROWS[:-1], {"bytes": b"abc", "path": None}]), r"all.parquet\[11\]: its 3 bytes are no JPEG"),
        (rows(label=[-1] * 12), "label has -1 to -1; wanted: 0 … K−1"),
        (rows(label=[0, 2] * 6), r"label has no row of, or no name for, 1\n  try: number the classes 0 … K−1"),
        (rows(label=[0] * 12), "has one class, '0'; wanted: two classes at least"),
        (rows(label=[*LABELS[:-1], None]), "all.parquet: row 11 has no label"),
        (rows(label=["a\nb", "c"] * 6), r"all.parquet: the class 'a\\nb' has a control character in its name"),
        (rows(label=[0.5] * 12), "it isn't clear which column has the labels"),
        (damaged, "all.parquet"),
    ],
)  # fmt: skip
def test_files_that_can_t_be_taken(tmp_path: Path, write: Callable[[Path], None], text: str) -> None:
    write(tmp_path / "all.parquet")
    with pytest.raises(DataError, match=text):
        fetch(config(tmp_path / "all.parquet", holdout=2), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*parquet-*"))


def test_splits_that_can_t_be_told(tmp_path: Path) -> None:
    hub = make_parquet(tmp_path / "hub", train=12, test=6)
    rows(label=[-1] * 12)(hub / "data" / "test-more.parquet")
    with pytest.raises(DataError, match="labels of the test rows that no training row has: they have none: -1"):
        fetch(config(hub), tmp_path / "data")
    (hub / "data" / "test-more.parquet").rename(hub / "data" / "more.parquet")
    with pytest.raises(DataError, match=r"more.parquet: neither train, validation nor test"):
        fetch(config(hub), tmp_path / "data")
    with pytest.raises(DataError, match=r"holds no .parquet file"):
        fetch(config(make_parquet(tmp_path / "none")), tmp_path / "data")


def test_shards_that_lack_or_were_written_otherwise_are_refused(tmp_path: Path) -> None:
    hub = make_parquet(tmp_path / "hub", train=12, test=6)
    (hub / "data/train-00001-of-00002.parquet").rename(hub / "train-more.parquet")
    with pytest.raises(DataError, match=r"/hub lacks train-00001-of-00002\.parquet\n  try: fetch the rest"):
        fetch(config(hub), tmp_path / "data")
    (hub / "data/train-00000-of-00002.parquet").rename(hub / "train-first.parquet")
    made = pq.read_table(hub / "train-first.parquet")
    metadata = made.schema.metadata[b"huggingface"].replace(b'"red", "green"', b'"green", "red"')
    text = "it calls the classes green, red, blue; test-00000-of-00002.parquet: red, green, blue"
    for other, told in (
        (made.set_column(1, "label", pa.array(["red"] * 6)), "label is string, and int64 in"),
        (made.set_column(0, "image", pa.array([b""] * 6)), "image is binary, and another kind of column in"),
        (made.replace_schema_metadata({"huggingface": metadata}), text),
    ):
        pq.write_table(other, hub / "train-more.parquet")
        with pytest.raises(DataError, match=rf"train-more\.parquet: {told}"):
            fetch(config(hub), tmp_path / "data")


def test_categories_as_pandas_writes_them_are_names(tmp_path: Path) -> None:
    rows(label=pa.array(["b", "a"] * 6).dictionary_encode())(tmp_path / "all.parquet")
    assert fetch(config(tmp_path / "all.parquet", holdout=2), tmp_path / "data").manifest.classes == ("a", "b")
