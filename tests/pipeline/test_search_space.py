"""Hydra's sweep words as a search space, and what can't be one."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.build import search_config
from pipeline.config.overrides.search_space import Choice, Number, SearchSpace, space
from pipeline.config.schema import SearchConfig
from pipeline.core.errors import UsageError
from pipeline.sweep.search_plan import check, objectives

WITH_VAL = {"dataset": {"val_size": 180}}


def parsed(*words: str) -> SearchSpace:
    return space(OverridesParser.create().parse_overrides(list(words)))


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("a=small_cnn,resnet18", Choice(values=("small_cnn", "resnet18"))),
        ("a=choice(0.1,[1,2],'x y')", Choice(values=("0.1", "[1,2]", r"x\ y"))),
        ("a=shuffle(3,1,2)", Choice(values=("3", "1", "2"))),
        ("a=range(1,8,3)", Number(low=1, high=7, step=3, log=False, whole=True)),
        ("a=range(8,1,-3)", Number(low=2, high=8, step=3, log=False, whole=True)),
        ("a=range(0,1,0.25)", Number(low=0, high=0.75, step=0.25, log=False, whole=False)),
        ("a=interval(0,1)", Number(low=0, high=1, step=None, log=False, whole=False)),
        ("a=int(interval(1,8))", Number(low=1, high=8, step=1, log=False, whole=True)),
        ("a=tag(log,interval(1e-4,1e-1))", Number(low=1e-4, high=0.1, step=None, log=True, whole=False)),
        ("a=tag(log,int(interval(1,64)))", Number(low=1, high=64, step=1, log=True, whole=True)),
    ],
)
def test_each_kind_of_word_is_a_dimension(word: str, wanted: object) -> None:
    found = parsed("b=1", word, "~c")
    assert found.dimensions == {"a": wanted}
    assert found.fixed == ("b=1", "~c")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("a=tag(lgo,interval(1,2))", "the tag 'lgo' means nothing here; the one there is: log"),
        ("a=interval(2,1)", "interval(a,b) needs a < b"),
        ("a=tag(log,interval(0,1))", "a log scale begins above 0, not at 0"),
        ("a=tag(log,choice(1,2))", "a log scale needs numbers in between"),
        ("a=tag(log,range(1,9,2))", "a log scale has no steps"),
        ("a=range(3,3)", "has no value in it"),
        ("a=choice(x,y),range(3)", "stand alone, not in a list with other values"),
    ],
)
def test_what_can_not_be_a_dimension_is_refused_with_the_word_in_it(word: str, text: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(word)
    assert str(error.value).startswith(word)
    assert text in str(error.value)


def test_values_are_written_as_a_grid_writes_them() -> None:
    number = parsed("a=range(0.1,0.5,0.1)").dimensions["a"]
    assert isinstance(number, Number)
    assert number.values == (0.1, 0.2, 0.3, 0.4)
    assert [number.text(0.1 + 0.1 + 0.1), number.text(0.1)] == ["0.3", "0.1"]
    whole = parsed("a=int(interval(1,8))").dimensions["a"]
    assert whole.text(5.0) == "5"


@pytest.mark.parametrize(
    ("settings", "words", "text"),
    [
        ({"name": "tpe"}, ["seed=1"], "search=tpe has nothing to vary; give it optimizer.lr="),
        ({"name": "grid"}, ["a=interval(0,1)"], "search=grid can't list a: an interval has no end of values"),
        ({"name": "cmaes"}, ["a=interval(0,1)", "b=1,2"], "search=cmaes needs two numbers to vary"),
        ({"name": "tpe", "n_trials": None}, ["a=1,2"], "search.n_trials=null"),
        ({"name": "tpe", "n_trials": 0}, ["a=1,2"], "search.n_trials=0 must be at least 1"),
        ({"name": "tpe", "pruner": "median"}, ["a=1,2"], "search.pruner=mean"),
        ({"name": "tpe", "pruner": "hyperband", "min_epochs": 9}, ["trainer.epochs=2,8"],
         "search.min_epochs=9 must not be above the 8 epochs of a trial"),
        ({"name": "tpe", "pruner": "hyperband"}, ["trainer.epochs=interval(1,5)"],
         "trainer.epochs takes whole numbers\n  try: trainer.epochs='int(interval(1,5))'"),
        ({"name": "tpe", "metric": "val/acuracy"}, ["a=1,2"], "did you mean val/accuracy?"),
        ({"name": "tpe", "objectives": ["val/loss less"]}, ["a=1,2"], "'val/loss less' is no objective"),
        ({"name": "tpe", "pruner": "median", "objectives": ["val/loss minimize", "train_s minimize"]}, ["a=1,2"],
         "search.pruner=median needs a single objective"),
        ({"name": "tpe", "pruner": "median", "metric": "test/accuracy"}, ["a=1,2"], "that a run has every epoch"),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused_before_the_first_trial(
    settings: dict[str, object], words: list[str], text: str
) -> None:
    config = search_config({"search": {"n_trials": 4, **settings}})
    if text == "search.pruner=mean":
        config.pruner = "mean"
    with pytest.raises(UsageError) as error:
        check(config, parsed(*words), WITH_VAL)
    assert text in str(error.value)


def test_without_val_images_the_field_to_set_is_named() -> None:
    config, words = SearchConfig(name="tpe", n_trials=4), parsed("optimizer.lr=interval(0,1)")
    with pytest.raises(UsageError, match=r"no val/accuracy \(dataset.val_size=0\); set dataset.val_size"):
        check(config, words, {"dataset": {"val_size": 0}})
    check(config, words, WITH_VAL)


def test_a_search_may_aim_at_a_metric_of_ones_own() -> None:
    words, own = parsed("optimizer.lr=interval(0,1)"), {**WITH_VAL, "trainer": {"metrics": {"top5": "my_package:top5"}}}
    config = SearchConfig(name="tpe", n_trials=4, metric="val/top5", pruner="median")
    check(config, words, own)
    with pytest.raises(UsageError, match="no run has a metric 'val/top5'; did you mean"):
        check(config, words, WITH_VAL)


def test_an_objective_is_a_figure_of_result_json() -> None:
    first, second = objectives(SearchConfig(objectives=["val/accuracy maximize", "train_s minimize"]))
    result = {"metrics": {"val/accuracy": 0.9}, "train_s": 3}
    assert (first.value(result), second.value(result), first.value({})) == (0.9, 3.0, None)


def test_a_search_may_aim_at_any_metric_of_a_script_and_prune_by_its_steps() -> None:
    words, script = parsed("program.args.lr=interval(0,1)"), {"program": {"name": "script"}, **WITH_VAL}
    config = SearchConfig(name="tpe", n_trials=4, metric="loss", direction="minimize")
    check(config, words, script)
    with pytest.raises(UsageError, match="no run has a metric 'loss'"):
        check(config, words, WITH_VAL)
    config.pruner = "median"
    check(config, words, script)
    config.pruner = "hyperband"
    with pytest.raises(UsageError, match=r"hyperband divides the epochs of a trial, and a script has none;"):
        check(config, words, script)
