"""What lies between the scheduler and the search: trials with keys, epochs to the pruner, values back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import compose
from pipeline.config.overrides.trials import jobs
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.specs import State
from pipeline.sweep.expand import fetch
from pipeline.sweep.search import SearchSource, open_study
from pipeline.sweep.search_plan import SearchPlan, plan
from pipeline.sweep.trial import Outcome, Trial

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SPACE = ["optimizer.lr=tag(log,interval(1e-3,1))", "trainer.global_batch_size=choice(16,32)"]


@pytest.fixture
def hydra() -> Iterator[None]:
    with compose.hydra_ready():
        yield


def planned(folder: Path, *words: str) -> SearchPlan:
    where = [f"paths.runs={folder}/runs", f"paths.data={folder}/data"]
    small = ["dataset=synthetic", "dataset.size=64", "dataset.val_size=16", "dataset.test_size=16"]
    return plan([*where, *small, "model=small_cnn", *(words or ("search=tpe", *SPACE))], root=ROOT, local_gpus=0)


def source(folder: Path, *words: str) -> tuple[SearchSource, list[Trial]]:
    fetch(planned(folder, *words).representative_trial.config, print)  # as the verb does: a key needs the data
    found, asked = planned(folder, *words), []
    study = open_study(found.config, found.space, folder / "study", found.made_of, epochs=found.epochs)
    return SearchSource(study, found, asked.append, lambda _: None), asked


def epoch(trial: Trial, number: int, value: float) -> None:
    assert trial.run is not None
    trial.run.folder.path.mkdir(parents=True, exist_ok=True)
    with (trial.run.folder.path / "metrics.jsonl").open("a") as file:
        for metrics in ({"train/loss": 1.0}, {"val/accuracy": value}):
            file.write(json.dumps({"t": 0.0, "step": number, "epoch": number, "metrics": metrics}) + "\n")


def result(trial: Trial, **fields: Any) -> None:
    assert trial.run is not None
    trial.run.folder.path.mkdir(parents=True, exist_ok=True)
    told = {"key": trial.run.key.short, "digest": trial.run.key.digest, "state": "FINISHED", **fields}
    documents.write_sealed(trial.run.folder.result, told)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.usefixtures("hydra")
def test_a_trial_has_the_key_of_its_words_and_its_data_is_fetched(tmp_path: Path) -> None:
    words = ("trainer.global_batch_size=32", "dataset.size=64,80", "optimizer.lr=0.1,0.2")
    searching, asked = source(tmp_path, "search=grid", *words)
    trials = [trial for trial in iter(searching.next_trial, None) if trial is not None]
    assert asked == trials
    assert len({trial.key for trial in trials}) == 4
    first = trials[0]
    assert first.overrides[-2:] == first.chosen
    assert not [word for word in first.overrides if word.startswith("search")]
    assert "search" not in first.config.resolved
    again = compose.resolve(compose.compose_now(first.overrides))
    assert again["optimizer"] == first.config.resolved["optimizer"]


@pytest.mark.usefixtures("hydra")
def test_the_wish_to_prune_lands_in_the_run_folder_also_after_an_attempt_has_cleared_it(tmp_path: Path) -> None:
    words = ("search=random", "search.n_trials=3", "search.pruner=median", "search.startup_trials=2", *SPACE)
    searching, _ = source(tmp_path, *words)
    for _ in range(2):
        trial = searching.next_trial()
        assert trial is not None
        for number in (1, 2, 3):
            epoch(trial, number, 0.9)
        result(trial, metrics={"val/accuracy": 0.9})
        searching.tell(trial, Outcome(state=State.FINISHED))  # its epochs are read before
    bad = searching.next_trial()
    assert bad is not None
    assert bad.run is not None
    wish = bad.run.folder.path / "prune"
    epoch(bad, 1, 0.1)
    searching.watch([bad])
    assert not wish.exists()  # warm-up
    epoch(bad, 2, 0.1)
    searching.watch([bad])
    assert wish.exists()
    wish.unlink()
    searching.watch([bad])
    assert wish.exists()
    searching.tell(bad, Outcome(state=State.PRUNED))
    wish.unlink()
    searching.watch([])
    assert not wish.exists()


@pytest.mark.usefixtures("hydra")
def test_a_result_without_the_figure_names_it_and_a_killed_trial_stays_open(tmp_path: Path) -> None:
    searching, _ = source(tmp_path, "search=random", "search.n_trials=2", *SPACE)
    trial = searching.next_trial()
    assert trial is not None
    searching.tell(trial, Outcome(state=State.KILLED))
    result(trial, metrics={"test/accuracy": 0.5})
    with pytest.raises(PacelineError, match=r"has no val/accuracy, which the search looks at"):
        searching.tell(trial, Outcome(state=State.FINISHED))
    again, _ = source(tmp_path, "search=random", "search.n_trials=2", *SPACE)
    same = again.next_trial()
    assert same is not None
    assert (same.number, same.key) == (0, trial.key)


@pytest.mark.usefixtures("hydra")
def test_a_trial_that_has_diverged_has_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    """Its last number may be the best of all."""
    searching, _ = source(tmp_path, "search=random", "search.n_trials=4", *SPACE)
    odd = {"val/accuracy": {"first": "nan", "step": 3, "count": 2}}
    for number, (steps, told) in enumerate([((), odd), ((1, 2), odd), ((2, 4), odd), ((1, 2), {})]):
        trial = searching.next_trial()
        assert trial is not None
        for step in steps:
            epoch(trial, step, 0.5)
        result(trial, metrics={"val/accuracy": 0.9 - number / 10} if steps else {}, nonfinite=told)
        searching.tell(trial, Outcome(state=State.FINISHED))
    assert searching.next_trial() is None
    assert searching._study.best() == (2,)  # numbers came after the one that was none


@pytest.mark.usefixtures("hydra")
def test_a_search_is_another_one_when_what_its_runs_share_is(tmp_path: Path) -> None:
    first = planned(tmp_path)
    assert planned(tmp_path, "search=tpe", "search.n_trials=99", *reversed(SPACE)).key == first.key
    assert planned(tmp_path, "search=tpe", "seed=1", *SPACE).key != first.key
    open_study(first.config, first.space, tmp_path / "study", first.made_of, epochs=first.epochs)
    other = planned(tmp_path, "search=tpe", "seed=1", *SPACE)
    with pytest.raises(UsageError, match=r"key of a trial: \w+ → \w+"):
        open_study(other.config, other.space, tmp_path / "study", other.made_of, epochs=other.epochs)


@pytest.mark.usefixtures("hydra")
def test_where_a_run_goes_can_not_be_searched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tracking is no part of a run"):
        planned(tmp_path, "search=tpe", "tracking=none,mlflow")


def test_what_lists_trials_beforehand_sends_a_search_to_doit_sweep() -> None:
    with pytest.raises(UsageError, match=r"can't be listed beforehand\n  try: doit sweep .* --dry-run"):
        jobs(["search=tpe", SPACE[0]])
