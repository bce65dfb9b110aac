"""A clone that can't be written to, with its results elsewhere: every verb works, or says in one line what can't."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_provenance import A, Checkout, copied
from tests.lab_fixture import require_lab
from tests.read_only import mounted
from tests.waiting import busy

RUN = A[:-1]  # with tracking as it is by default


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    folder = tmp_path_factory.mktemp("read only")
    with mounted(copied(folder / "writable").root, folder / "clone") as root:
        yield Checkout(root)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, fetched: Path) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("results")
    shutil.copytree(fetched, folder / "data")
    return f"paths.runs='{folder}/runs'", f"paths.data='{folder}/data'"


@pytest.mark.ci
@pytest.mark.long  # a store that takes no records: tests/pipeline; what the clone refuses: below
def test_a_run_of_a_read_only_clone_is_trained_and_found_again(clone: Checkout, where: tuple[str, str]) -> None:
    trained = clone.doit("train", *RUN, *where)
    assert "FINISHED" in trained
    why = f"MLflow at sqlite:///{clone.root}/mlflow.db took no (more) records: Read-only file system"
    assert why in trained or (busy() > 1 and "not recorded in MLflow yet: " in trained)  # its recorder had no turn
    (key,) = {line.split()[1].rstrip(":") for line in trained.splitlines() if line.startswith("FINISHED")}
    assert f"  try: doit record {key} tracking.uri=sqlite:///<a file that you can write to>" in trained
    assert f"{key} is finished" in clone.doit("train", *RUN, *where)
    runs = Path(where[0].partition("=")[2].strip("'"))
    assert {"composed.json", "imports.json"} <= {path.name for path in (runs / ".paceline").iterdir()}
    for verb in ("why", "export"):
        assert "Traceback" not in clone.doit(verb, *RUN, *where)
    assert key in clone.doit("runs", *where)


@pytest.mark.long
def test_a_run_of_a_read_only_clone_is_made_again(clone: Checkout, where: tuple[str, str]) -> None:
    clone.doit("train", *A, *where)
    assert "REPRODUCED" in clone.doit("reproduce", f"run={clone.why(*A, *where)['key']}", *where)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("lab", "hosts=2"), 1, "lab: its hosts' files can't lie in this project: Read-only file system"),
        (("train", *A), 1, "Read-only file system"),
        (("fetch", "experiment=quickstart"), 1, "  try: paths.data=<a folder that you can write to>"),
    ],
)
def test_what_would_lie_in_the_read_only_clone_itself_is_refused(
    clone: Checkout, words: tuple[str, ...], code: int, said: str
) -> None:
    if words[0] == "lab":
        require_lab()  # without its programs these are named first
    output = clone.doit(*words, code=code)
    assert said in output
    assert "Traceback" not in output
