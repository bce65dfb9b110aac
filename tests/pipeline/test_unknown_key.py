"""A word that names nothing: what it was meant to be, with its value."""

from __future__ import annotations

import pytest

from pipeline.cli.loader import with_options_of
from pipeline.config.compose import compose_config
from pipeline.config.unknown_key import ALIASES
from pipeline.core.errors import UsageError


def _said(word: str, verb: str = "train") -> str:
    with pytest.raises(UsageError) as caught:
        compose_config([word])
    return str(with_options_of(caught.value, verb))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("epochs=3", "trainer.epochs=3"),
        ("modle=resnet18", "model=resnet18"),
        ("gpus=4", "cluster.nproc_per_node=4"),
        ("fp16=true", "trainer.precision=fp16"),
        ("cluster.host=[a]", "'cluster.hosts=[a]'"),
        ("~epochs", "trainer.epochs"),
        ("cluster.user=me", "cluster.hosts='[USER@HOST]'"),
        ("trainer.accelerator=gpu", "cluster.device=cuda"),
        ("script=train.py", "program.script=train.py"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one_and_its_value(word: str, meant: str) -> None:
    assert f"; did you mean {meant}? valid" in _said(word)


@pytest.mark.slow
def test_the_options_of_the_verb_are_among_the_words() -> None:
    assert "did you mean json=1? valid: cluster, dataset, experiment," in _said("jsn=1", "plan")
    assert _said("jsn=1", "plan").endswith("; of doit plan: format, json")
    assert "unknown key 'undo'; it is an option of doit accept; valid: " in _said("undo=1", "train")


@pytest.mark.slow
def test_a_field_of_another_option_names_the_one_that_every_option_has() -> None:
    assert "did you mean cluster.nproc_per_node=2? cluster.gpus is a field of cluster=kubernetes; " in _said(
        "cluster.gpus=2"
    )


@pytest.mark.slow
def test_words_that_resume_elsewhere_are_answered_with_the_command_that_does_here() -> None:
    for word in ("resume=true", "trainer.resume_from_checkpoint=last"):
        assert "; the same command goes on where its run was, and init.weights=KEY begins another" in _said(word)


@pytest.mark.slow
def test_an_option_of_other_verbs_is_not_taken_for_a_field_that_is_written_alike() -> None:
    assert _said("run=2d9f31", "plan").startswith("doit plan takes the words of the run, as doit train got them")
    assert _said("run=2d9f31", "train").endswith("try: doit train experiment=…")
    assert "it is an option of doit why, accept, attach, evaluate, record, " in (said := _said("run=2d9f31", "clean"))
    assert "paths.runs" not in said
    assert "did you mean" not in (said := _said("lines=3", "logs"))
    assert said.endswith("; of doit logs: follow, host, json, run, step")


@pytest.mark.slow
def test_what_is_like_nothing_is_answered_with_what_there_is() -> None:
    assert _said("optimizer.rho=2").startswith("unknown key 'optimizer.rho'; valid in optimizer: ")
    assert _said("zzzz=1").startswith("unknown key 'zzzz'; valid: cluster, dataset, experiment, init, model, ")


@pytest.mark.slow
def test_the_value_of_a_secret_is_not_repeated() -> None:
    assert "hunter22" not in _said("cluster.token=hunter22") + _said("experiment.password=hunter22")


def test_every_word_of_other_tools_leads_to_something_that_exists() -> None:
    config = compose_config([])
    for name in {word.partition("=")[0] for meant in ALIASES.values() for word in meant.split()[:1]} - {"experiment"}:
        group, _, field = name.partition(".")
        assert group in config
        assert not field or field in config[group]
