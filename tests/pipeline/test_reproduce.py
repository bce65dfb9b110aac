"""What a reproduction is told, what it compares, and what it says of data that is gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import reproduce
from pipeline.config.compose import compose_config, resolve
from pipeline.errors import PacelineError
from pipeline.files import write_json
from pipeline.recipe import Recipe, read
from pipeline.runfolder import RunFolder
from pipeline.verdict import compare, text

KEY = "0123456789ab"
PARTS: dict[str, Any] = {"config": {"seed": 0}, "code": {}, "data": "d" * 64, "environment": {"torch": "2.14.0"}}
RESULT = {"weights_sha256": "a" * 64, "steps": 2, "epochs": 1, "metrics": {"test/accuracy": 0.5, "val/loss": 1.0}}


def run_folder(path: Path, result: dict[str, Any] = RESULT, parts: dict[str, Any] = PARTS, **told: Any) -> RunFolder:
    write_json(path / "result.json", result)
    write_json(path / "key.json", parts)
    write_json(path / "config.json", resolve(compose_config(["dataset=arrays", "dataset.source=gone.npz"])))
    write_json(path / "provenance.json", {"git_commit": "c" * 40, "overrides": [], **told})
    return RunFolder(path)


def recipe(tmp_path: Path, **told: Any) -> Recipe:
    return read(run_folder(tmp_path / KEY, **told))


def test_equal_weights_and_metrics_are_reproduced(tmp_path: Path) -> None:
    verdict = compare(recipe(tmp_path), run_folder(tmp_path / "again" / KEY))
    assert verdict.reproduced
    assert text(verdict).splitlines() == [
        f"REPRODUCED {KEY}: weights_sha256, metrics and steps are equal",
        "its key is the same",
    ]


def test_what_differs_is_named_field_by_field_with_the_reason_in_the_key(tmp_path: Path) -> None:
    other = {**RESULT, "weights_sha256": "b" * 64, "metrics": {"test/accuracy": 0.25, "val/loss": 1.0}}
    parts = {**PARTS, "environment": {"torch": "2.15.0"}}
    old, new = {"torch": "2.14.0", "packages": {"x": "1"}}, {"torch": "2.15.0", "packages": {"x": "1"}}
    verdict = compare(
        recipe(tmp_path, environments={"a": old}),
        run_folder(tmp_path / "again" / "ba9876543210", other, parts, environments={"b": new}),
    )
    assert not verdict.reproduced
    assert text(verdict).splitlines() == [
        f"NOT REPRODUCED {KEY}: 2 field(s) differ",
        "  test/accuracy: 0.5 → 0.25",
        f"  weights_sha256: {'a' * 64} → {'b' * 64}",
        "its key is ba9876543210 here, because of:",
        "  torch 2.14.0 → 2.15.0",
        "hosts and lock differ in:",
        "  node0.torch: 2.14.0 → 2.15.0",
    ]


def test_data_that_is_gone_is_named_with_its_digest_and_the_mend(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as caught:
        reproduce._check_data(recipe(tmp_path), str(tmp_path / "gone.npz"), tmp_path / "data")
    assert f"the data of run {KEY} (digest dddddddddddd) is gone: dataset.source={tmp_path}/gone.npz" in str(
        caught.value
    )
    assert "try: dataset.source=<where it is now>" in str(caught.value)


def test_the_runs_words_are_kept_but_for_what_says_where(tmp_path: Path) -> None:
    made = recipe(
        tmp_path, overrides=["experiment=x", "paths.runs=/old", "tracking.uri=x", "cluster=two_node", "seed=1"]
    )
    told = {"root": tmp_path / "it's here", "project": tmp_path, "source": None}
    assert reproduce._overrides(made, [], **told) == ["experiment=x", "cluster=two_node", "seed=1"]
    assert reproduce._overrides(made, ["cluster=pssh", "paths.data=/d"], **told) == [
        "experiment=x",
        "seed=1",
        "cluster=pssh",
    ]
    assert reproduce._overrides(made, ["cluster.ssh_config=/s"], **told) == [
        "experiment=x",
        "cluster=two_node",
        "seed=1",
        "cluster.ssh_config=/s",
    ]
    lab = replace(made, config={"cluster": {"ssh_config": ".lab/ssh_config"}})
    words = reproduce._overrides(lab, [], **{**told, "source": "/data/a,b.npz"})
    assert words[-2:] == [
        "dataset.source='/data/a,b.npz'",
        f"cluster.ssh_config='{tmp_path}/it\\'s here/.lab/ssh_config'",
    ]
    assert resolve(compose_config(["cluster=two_node", words[-1]]))["cluster"]["ssh_config"].endswith(
        "it's here/.lab/ssh_config"
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"result.json": None}, "it isn't finished"),
        ({"provenance.json": {"git_commit": None}}, "was not made from a git repository"),
        ({"provenance.json": {"git_commit": "c", "patch_sha256": "0"}}, "changes.patch is missing"),
    ],
)
def test_a_run_that_lacks_a_part_is_refused_by_name(tmp_path: Path, damage: dict[str, Any], said: str) -> None:
    folder = run_folder(tmp_path / KEY)
    for name, content in damage.items():
        (folder.path / name).unlink()
        if content is not None:
            write_json(folder.path / name, content)
    with pytest.raises(PacelineError, match=said):
        read(folder)
