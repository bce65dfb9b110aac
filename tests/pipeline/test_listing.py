"""`doit runs`: which runs are listed, in which order, and with which fields."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import runs
from pipeline.cli.commands.runs import ListedRun, RunFilter, age, differences, table
from pipeline.comparing.groups import read
from pipeline.config import compose
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.core.tables import ENDLESS, cut
from pipeline.runs import index, journal
from pipeline.runs.index import RunRow
from pipeline.runs.status import status
from tests.pipeline.comparing_folders import trained
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import finished

RUNS = {  # key → words, state
    "a" * 12: (("model=resnet18", "optimizer.lr=0.1"), State.FAILED),
    "b" * 12: (("model=resnet18", "optimizer.lr=0.2", "seed=1"), State.KILLED),
    "c" * 12: (("model=small_cnn", "cluster.nproc_per_node=1"), State.FAILED),
}
DETAIL = "CUDA out of memory\n  try: a smaller batch"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders as an attempt that ended badly leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    for at, (key, (words, state)) in enumerate(RUNS.items()):
        (folder / key).mkdir()
        (folder / key / "key.json").write_text('{"version": 2, "topology": {"nproc_per_node": [1]}}')
        (folder / key / "config.json").write_text(json.dumps(compose.resolve(compose.compose_config(words))))
        ended = journal.Entry(state=state, attempt=1, time=1e9 - at, detail=DETAIL if state is State.FAILED else "")
        journal.append(folder / key / "journal.jsonl", ended)
    return folder


@pytest.fixture
def listed(printed: Printed) -> Printed:
    """What `doit runs` of a folder says, without the heads of its table."""

    def said(*words: Any) -> str:
        before, _, table = (text := printed(runs.runs, *words)).partition("\nkey ")
        return table.partition("\n")[2] if before and table else text.partition("\n")[2] if text[:4] == "key " else text

    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ((), "cba"),
        (("sort=key",), "abc"),
        (("state=failed",), "ca"),
        (("model=resnet18", "trainer=default"), "ba"),
        (("seed=1", "tracking=mlflow"), "b"),
    ],
)
def test_words_choose_runs_by_their_values(runs_dir: Path, listed: Printed, words: tuple[str, ...], keys: str) -> None:
    assert [line[0] for line in listed(runs_dir, *words).splitlines()] == [*keys]


@pytest.mark.slow
def test_a_line_has_the_fields_in_which_the_listed_runs_differ(runs_dir: Path, listed: Printed) -> None:
    (second, first) = listed(runs_dir, "model=resnet18").splitlines()
    assert first == f"{'a' * 12}  FAILED  2001-09-09  resnet18 cifar10  CUDA out of memory"
    assert second.endswith("  lr=0.2  seed=1")
    (second, first) = listed(runs_dir, "model=resnet18", "wide=1").splitlines()
    assert re.search(
        r"resnet18 cifar10  cifar10 resnet18 sgd  [\d.]+ kB  1 rank  CUDA out of memory  optimizer.lr=0.1  seed=0$",
        first,
    )
    read = json.loads(listed(runs_dir, "model=resnet18", "json=1"))["data"]
    assert [(row["state"], row["differs"]["seed"]) for row in read] == [("KILLED", 1), ("FAILED", 0)]


def test_a_run_that_goes_while_runs_are_listed_is_left_out(
    runs_dir: Path, listed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_keys", lambda _: iter([*RUNS, "d" * 12]))  # as its name was read
    assert [line[0] for line in listed(runs_dir).splitlines()] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("state=FALED", "state=FALED is no state of a run; did you mean FAILED[?] valid: ACCEPTED, "),
        ("sort=best", "sort=best is not known; valid: accuracy, key, size, state, time, train_s"),
    ],
)
def test_a_word_that_chooses_nothing_is_refused(runs_dir: Path, listed: Printed, word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        listed(runs_dir, word)


@pytest.mark.slow
def test_a_group_of_ones_own_lists_all_its_runs_without_a_target(tmp_path: Path, listed: Printed) -> None:
    of_mine = compose.resolve(compose.compose_config(["model=own", "model.target=my.nets:Net"]))
    finished(tmp_path, config=of_mine)
    finished(tmp_path)
    assert len(listed(tmp_path, "model=own").splitlines()) == 1


def test_an_experiment_lists_what_was_started_with_that_word(tmp_path: Path, listed: Printed) -> None:
    quick, other = trained(tmp_path, 0), trained(tmp_path, 1, provenance={"overrides": ["seed=1"]})
    assert [line.split()[0] for line in listed(tmp_path, "experiment=quickstart").splitlines()] == [quick.key]
    assert "matches these values" in listed(tmp_path, "experiment=quickstart", "seed=1")
    assert {line.split()[0] for line in listed(tmp_path).splitlines()} == {quick.key, other.key}


def test_a_run_whose_result_is_gone_is_not_finished(tmp_path: Path, listed: Printed) -> None:
    """It is written last: its journal says FINISHED before, and is all that is left where somebody removed it."""
    run = trained(tmp_path)
    assert "FINISHED" in listed(tmp_path)
    run.result.unlink()
    said = listed(tmp_path)
    assert "RUNNING" in said
    assert "trained, without its result.json: the command that started it completes it" in said
    assert "FINISHED since" in (told := status(run))
    assert "trained, without its result.json" in told
    assert not read(run).counts


def test_a_line_has_hosts_time_and_size(tmp_path: Path, listed: Printed) -> None:
    few = finished(tmp_path, summary={"train_s": 754.2})
    (few.path / "checkpoints" / "step-00000001.pt").write_bytes(bytes(2_000_000))
    (few.path / "requirements.lock").write_bytes(bytes(5_000_000))
    (tmp_path / "the same file").hardlink_to(few.path / "requirements.lock")
    many = ("0" * 12, ["computer-of-some-length-0", "computer-of-some-length-1"])
    (tmp_path / many[0]).mkdir()
    (tmp_path / many[0] / "key.json").write_text('{"version": 2, "topology": {"nproc_per_node": [1, 1]}}')
    (tmp_path / many[0] / "plan.json").write_text(json.dumps({"nodes": [{"host": name} for name in many[1]]}))

    (last, first) = listed(tmp_path, "sort=size").splitlines()[::-1]
    assert re.search(r"  0\.5000 +12 min 34 s  2\.0 MB  2 ranks +a$", last)
    assert re.search(r"  \d+ B +1 \+ 1 ranks  2 hosts$", first)
    rows = json.loads(listed(tmp_path, "json=1", "sort=train_s"))["data"]
    assert [(row["hosts"], row["train_s"]) for row in rows] == [(many[1], None), (["a"], 754.2)]
    assert 2_000_000 < rows[1]["bytes"] < 2_010_000


def test_a_line_of_a_script_has_its_first_metrics_and_no_accuracy_alone(tmp_path: Path, listed: Printed) -> None:
    told = {"program": "script", "metrics": {"perplexity": 2.0, "test/accuracy": 0.5, "bleu": 1 / 3, "loss": 0.25}}
    folder = finished(tmp_path, summary=told)
    assert "  test/accuracy 0.5, bleu 0.333333, 2 more metrics" in listed(tmp_path)
    (row,) = json.loads(listed(tmp_path, "json=1"))["data"]
    assert (row["key"], row["metrics"]) == (folder.key, told["metrics"])


def test_the_sizes_of_many_runs_are_told_when_they_are_asked_for(
    runs_dir: Path, listed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_MAX_MEASURED", 2)
    for words, shown in (((), False), (("wide=1",), False), (("wide=1", "seed=0"), True), (("sort=size",), True)):
        assert (" kB" in listed(runs_dir, *words)) == shown


_SCRIPT = {"name": "script", "script": "a.py", "command": [], "data": None, "seal": "warn"}


@pytest.mark.parametrize(
    ("configs", "shown"),
    [
        (  # where runs ran is none; a damaged configuration has no fields
            [{"cluster": {"lease_s": 1}, "seed": 1}, {"cluster": {"lease_s": 2}, "seed": 2}, {}],
            [{"seed": 1}, {"seed": 2}, {}],
        ),
        (  # variables of the ranks are, also from a run without them
            [{"cluster": {"env": env}} for env in ({}, {"A": "1"}, {"A": "1", "B": "x"})],
            [{}, {"cluster.env.A": "1"}, {"cluster.env.A": "1", "cluster.env.B": "x"}],
        ),
        (  # a script is compared with scripts, by its arguments and data
            [
                {"program": {**_SCRIPT, "args": {"lr": 1}}},
                {"program": {**_SCRIPT, "script": "b.py", "args": {"lr": 2}, "data": "x"}},
                {"optimizer": {"lr": 0.1}},
            ],
            [{"program.args.lr": 1}, {"program.args.lr": 2, "program.data": "x"}, {}],
        ),
    ],
)
def test_differences_between_runs_are_in_what_they_compute(
    configs: list[dict[str, Any]], shown: list[dict[str, Any]]
) -> None:
    assert differences(dict(zip("abc", configs, strict=True))) == dict(zip("abc", shown, strict=True))


def test_the_table_leaves_out_what_follows_from_another_option() -> None:
    digits: dict[str, Any] = {"name": "digits", "holdout": 9, "flip": True}
    mnist: dict[str, Any] = {"name": "mnist", "holdout": None, "flip": True}
    datasets = {"a": digits, "b": {**digits, "flip": False}, "c": mnist}
    configs = {key: {"dataset": dataset} for key, dataset in datasets.items()}
    flips = {key: {"dataset.flip": dataset["flip"]} for key, dataset in datasets.items()}
    assert differences(configs, shortened=True) == flips
    assert differences(configs)["c"] == {"dataset.flip": True, "dataset.holdout": None}


def test_a_damaged_configuration_matches_nothing() -> None:
    chosen = RunFilter({"seed": 2}, frozenset())
    assert [chosen.matches(config) for config in ({"seed": 1}, {"seed": 2}, {})] == [False, True, False]


@pytest.mark.parametrize(
    ("width", "left_out"), [(30, ["time", "age"]), (60, ["time", "age"]), (80, ["time", "age"]), (100, []), (160, [])]
)
def test_the_table_says_once_what_the_runs_share_and_fits_the_width(width: int, left_out: list[str]) -> None:
    row = partial(
        RunRow, state="FINISHED", what="digits small_cnn sgd", nodes="1 + 1 ranks", hosts=("node0", "node1"),
        train_s=754.2, accuracy=0.9944, synthetic=True, unix_time=1e9, note="unproven",
    )  # fmt: skip
    differing = {"optimizer.lr": 0.1, "trainer.epochs": 20, "trainer.max_steps": 100}
    listed = [ListedRun(row=row(key=key * 12), name="lr=0.1 seed=2", differing=differing) for key in "ab"]
    shown = table(listed, width=width, now=1e9 + 300)
    assert shown[0][0] == cut("2 runs: digits small_cnn sgd, 1 + 1 ranks, node0, node1", width)
    assert max(map(len, shown[0])) <= width
    assert len(shown[0]) == 4
    assert shown[1] == left_out
    if width >= 80:
        assert "  0.9944 " in shown[0][2]
        assert "  SYNTHETIC DATA  unproven" in shown[0][3], "a mark isn't cut"
    if width == 160:
        assert shown[0][2].endswith("5 min  lr=0.1 seed=2  0.9944    12 min 34 s  SYNTHETIC DATA  unproven  "
                                       "epochs=20  max_steps=100")  # fmt: skip


def test_a_long_error_stays_one_short_line_where_no_terminal_limits_it() -> None:
    row = RunRow(
        key="a" * 12, state="FAILED", what="script a.py", nodes="", hosts=(), train_s=None, accuracy=None,
        synthetic=False, unix_time=0, error="RuntimeError: " + "x" * 900,
    )  # fmt: skip
    last = table([ListedRun(row=row)], width=ENDLESS, now=0)[0][-1]
    assert last.endswith("x…")
    assert len(last) < 220


def test_what_neither_the_name_nor_the_heading_says_stands_in_the_last_column() -> None:
    row = partial(
        RunRow, state="FINISHED", nodes="", hosts=(), train_s=None, accuracy=None, synthetic=False, unix_time=0
    )
    rows = [row(key=key * 12, what=f"digits {model} sgd") for key, model in (("a", "mlp"), ("b", "resnet18"))]
    scripts = [row(key=key * 12, what=f"script {path}") for key, path in (("c", "x/train.py"), ("d", "y/train.py"))]
    named = [
        ListedRun(row=one, name=name) for one, name in zip([*rows, *scripts], ["lr=1", "lr=1", "", "b"], strict=True)
    ]
    lines = table(named, width=200, now=0)[0][2:]
    beside_script = table(named[:1] + named[2:3], width=200, now=0)[0]
    assert beside_script[2].endswith("  lr=1")
    ends = ("  mlp", "  resnet18", "  script x/train.py", "b                  y/train.py")
    assert [line.endswith(end) for line, end in zip(lines, ends, strict=True)] == [True] * 4, lines


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-1, "0 s"), (59, "59 s"), (3599, "59 min"), (172_799, "47 h"), (8_553_600, "99 d")]
)
def test_an_age_has_one_unit(seconds: float, shown: str) -> None:
    assert age(seconds, 1e9) == shown
    assert age(1e7, 1e9) == "2001-09-09"
