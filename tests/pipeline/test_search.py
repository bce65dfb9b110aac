"""The search itself, on Optuna's real storage and a function that costs nothing."""

import math
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.build import search_config
from pipeline.config.overrides.search_space import space
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.sweep.search import SearchStudy, Suggestion, open_study

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

WORDS = ("lr=tag(log,interval(1e-4,1))", "width=int(interval(1,8))", "model=a,b")


def opened(folder: Path, *words: str, **settings: object) -> SearchStudy:
    config = search_config({"search": {"name": "tpe", "n_trials": 12, **settings}})
    found = space(OverridesParser.create().parse_overrides(list(words or WORDS)))
    settings = {name: value for name, value in vars(config).items() if name != "n_trials"}
    return open_study(config, found, folder, {"space": found.described(), "search": settings}, epochs=8)


def score(suggestion: Suggestion) -> float:
    values = dict(word.split("=") for word in suggestion.overrides)
    return -abs(math.log10(float(values["lr"])) + 2) - abs(int(values["width"]) - 4) + (values["model"] == "a")


def finish(search: SearchStudy, count: int = 100) -> list[Suggestion]:
    """Ask and tell, one after the other, to the total or to ``count``."""
    done: list[Suggestion] = []
    while len(done) < count and (suggestion := search.ask()) is not None:
        if suggestion.state is None:
            search.tell(suggestion.number, State.FINISHED, [score(suggestion)])
        done.append(suggestion)
    return done


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(("name", "total"), [("tpe", 12), ("random", 4), pytest.param("cmaes", 9, marks=LONG)])
def test_the_same_seed_and_history_ask_the_same_also_after_a_crash(tmp_path: Path, name: str, total: int) -> None:
    whole = finish(opened(tmp_path / "whole", name=name, n_trials=total))
    assert [item.number for item in whole] == list(range(total))
    assert len({item.overrides for item in whole}) == total

    broken = opened(tmp_path / "broken", name=name, n_trials=total)
    finish(broken, 3)
    under_way = broken.ask()  # and here it was killed
    again = opened(tmp_path / "broken", name=name, n_trials=total)
    replayed = finish(again)
    assert [item.state for item in replayed] == [State.FINISHED] * 3 + [None] * (total - 3)
    assert replayed[3] == under_way
    assert [item.overrides for item in replayed] == [item.overrides for item in whole]
    assert again.ask() is None
    other = finish(opened(tmp_path / "other", name=name, seed=1, n_trials=1))
    assert other[0].overrides != whole[0].overrides


def test_grid_asks_for_every_combination_once_and_lists_ranges(tmp_path: Path) -> None:
    words = ("lr=0.1,0.01", "width=range(1,4)", "model=choice(a)")
    found = [item.overrides for item in finish(opened(tmp_path, *words, name="grid", n_trials=None))]
    assert sorted(found) == sorted(
        (f"lr={lr}", f"width={width}", "model=a") for lr in (0.1, 0.01) for width in (1, 2, 3)
    )


def test_median_prunes_the_one_that_falls_behind_and_keeps_its_number(tmp_path: Path) -> None:
    search = opened(tmp_path, pruner="median", startup_trials=3, warmup_epochs=1)
    for number in range(3):
        search.ask()
        assert not any(search.report(number, epoch, 0.5 + epoch / 10) for epoch in (1, 2, 3))
        search.tell(number, State.FINISHED, [0.8])
    search.ask()
    assert not search.report(3, 1, 0.1)  # the first epoch is left alone
    assert search.report(3, 2, 0.2)
    again = opened(tmp_path, pruner="median", startup_trials=3, warmup_epochs=1)
    assert [again.ask().state for _ in range(4)] == [State.FINISHED] * 3 + [None]  # type: ignore[union-attr]
    assert again.report(3, 2, 0.2)  # told twice, as after a crash
    again.tell(3, State.PRUNED)
    assert finish(opened(tmp_path, pruner="median", startup_trials=3), 4)[3].state is State.PRUNED


@pytest.mark.long
def test_hyperband_prunes_the_same_trials_when_every_one_is_trained_by_another_process(tmp_path: Path) -> None:
    def pruned(folder: Path, *, afresh: bool) -> list[int]:
        found = []
        search = opened(folder, pruner="hyperband", n_trials=14, reduction_factor=2)
        for number in range(14):
            if afresh:
                search = opened(folder, pruner="hyperband", n_trials=14, reduction_factor=2)
                for _ in range(number):
                    search.ask()
            search.ask()
            if any(search.report(number, epoch, -float(number)) for epoch in range(1, 8)):
                search.tell(number, State.PRUNED)
                found.append(number)
            else:
                search.tell(number, State.FINISHED, [-float(number)])
        return found

    whole = pruned(tmp_path / "whole", afresh=False)
    assert 5 < len(whole) < 14
    assert pruned(tmp_path / "afresh", afresh=True) == whole


def test_several_objectives_are_told_together(tmp_path: Path) -> None:
    goals = ["val/accuracy maximize", "train_s minimize"]
    search = opened(tmp_path, objectives=goals, n_trials=12)
    for number in range(12):
        suggestion = search.ask()
        assert suggestion is not None
        assert not search.report(number, 1, 0.5)
        search.tell(number, State.FINISHED, [score(suggestion), float(number)])
    assert search.ask() is None
    assert 0 in search.best()
    assert len(search.best()) < 12


def test_a_failed_trial_that_succeeds_later_counts_once(tmp_path: Path) -> None:
    first = opened(tmp_path, n_trials=3)
    first.ask()
    first.tell(0, State.FAILED)
    for _ in range(2):
        again = opened(tmp_path, n_trials=3)
        suggestion = again.ask()
        assert suggestion is not None
        again.tell(0, State.FINISHED, [1.0])
    assert [item.number for item in finish(opened(tmp_path, n_trials=3))] == [0, 1, 2]
    search = opened(tmp_path, n_trials=3)
    assert sum(trial.values == [1.0] for trial in search._study.trials) == 1


def test_another_space_or_way_is_refused_and_so_is_a_smaller_total(tmp_path: Path) -> None:
    finish(opened(tmp_path, *WORDS), 4)
    with pytest.raises(UsageError) as error:
        opened(tmp_path, "lr=tag(log,interval(1e-3,1))", *WORDS[1:], seed=7)
    assert "lr: log 0.0001 to 1.0 → log 0.001 to 1.0" in str(error.value)
    assert "search.seed: 0 → 7" in str(error.value)
    with pytest.raises(UsageError, match=r"search.n_trials=2, but 4 trials of this search have begun"):
        opened(tmp_path, *WORDS, n_trials=2)
    assert len(finish(opened(tmp_path, *reversed(WORDS), n_trials=6))) == 6  # more trials, another order: the same
