"""The fields in which two keys differ, and the nearest run."""

from __future__ import annotations

from typing import Any

from pipeline.keys.content_key import differences, nearest

OLD: dict[str, Any] = {
    "config": {"optimizer": {"lr": 0.1, "name": "sgd"}, "seed": 0},
    "code": {"trainers/training/loop.py": "a", "trainers/old.py": "b"},
    "data": "0" * 64,
    "environment": {"torch": "2.14.0"},
    "topology": {"nnodes": 1, "nproc_per_node": [2]},
}


def changed(**parts: Any) -> dict[str, Any]:
    return {**OLD, **parts}


def test_each_part_is_told_in_its_own_words() -> None:
    new = changed(
        config={"optimizer": {"lr": 0.2, "name": "sgd"}, "seed": 0, "note": "x"},
        code={"trainers/training/loop.py": "c", "trainers/new.py": "d"},
        data="f" * 64,
        environment={"torch": "2.15.0"},
        topology={"nnodes": 2, "nproc_per_node": [1, 1]},
    )
    assert [str(item) for item in differences(OLD, new)] == [
        "note: (absent) → x",
        "optimizer.lr: 0.1 → 0.2",
        "trainers/new.py added",
        "trainers/old.py removed",
        "trainers/training/loop.py changed",
        "data: 000000000000 → ffffffffffff",
        "torch 2.14.0 → 2.15.0",
        "nnodes: 1 → 2",
        "nproc_per_node: [2] → [1, 1]",
    ]


def test_the_nearest_run_has_the_fewest_differences_and_then_the_smaller_key() -> None:
    far = changed(data="1" * 64, environment={"torch": "1"})
    found = nearest({"c": far, "b": changed(data="1" * 64), "a": changed(data="2" * 64)}, OLD)
    assert found is not None
    assert found[0] == "a"
    assert nearest({}, OLD) is None


def test_of_runs_with_as_many_differences_the_one_whose_number_is_closer_is_the_nearest() -> None:
    runs = {"a": changed(config={"lr": 0.01}), "b": changed(config={"lr": 0.1})}
    found = nearest(runs, changed(config={"lr": 0.2}))
    assert found is not None
    assert found[0] == "b"


def test_a_key_of_another_version_says_so_instead_of_naming_every_file() -> None:
    old = changed(version=1, environment={"torch": "2.13.0"})
    assert [
        str(item) for item in differences(old, {**OLD, "version": 2, "code": {"trainers/training/loop.py": "z"}})
    ] == ["key version 1 → 2: another Paceline's digests of code can't be compared", "torch 2.13.0 → 2.14.0"]


def test_another_order_of_the_arguments_in_common_is_named_and_makes_a_run_farther() -> None:
    def run(*names: str) -> dict[str, Any]:
        order = {} if [*names] == sorted(names) else {"order": {"program.args": [*names]}}
        return changed(config={"program": {"args": dict.fromkeys(names, 1)}, **order})

    new = run("lr", "epochs")
    found = nearest({"a": run("epochs", "lr", "seed"), "b": run("epochs", "lr")}, new)
    assert found is not None
    assert found[0] == "b"
    assert [str(item) for item in differences(run("seed", "lr", "epochs"), run("epochs", "lr"))] == [
        "order of program.args: lr, epochs → epochs, lr", "program.args.seed: 1 → (absent)",
    ]  # fmt: skip
    assert [str(item) for item in differences(run("seed", "lr"), run("lr"))] == ["program.args.seed: 1 → (absent)"]
    moved = changed(code={"order.py": "a"}), changed(code={"order.py": "b"})
    assert [str(item) for item in differences(*moved)] == ["order.py changed"]
