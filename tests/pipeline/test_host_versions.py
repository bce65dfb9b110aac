"""A host that has other versions than the run's key says is refused, with one word that runs as the hosts are."""

from __future__ import annotations

import shlex

import pytest

from pipeline.config.compose import compose_config, resolve
from pipeline.errors import HostError
from pipeline.host_versions import check, differing
from pipeline.types import NodeFacts
from tests.pipeline.test_plan import facts

KEY = {"python": "3.12.1", "torch": "2.15.0+cpu"}


def refused(*found: NodeFacts, told: dict[str, str] | None = None) -> str:
    with pytest.raises(HostError) as caught:
        check(found, KEY, told or {})
    return str(caught.value)


def test_hosts_as_the_key_says_pass() -> None:
    check([facts(0), facts(1)], KEY, {})


def test_all_differences_stand_in_one_message_whose_word_works_when_it_is_typed() -> None:
    other = {"python_version": "3.11.9", "torch_version": "2.9.1"}
    text = refused(facts(0, **other), facts(1, **other))
    assert "  node0, node1: python 3.11.9 (the key says 3.12.1), torch 2.9.1 (the key says 2.15.0+cpu)" in text
    (word,) = shlex.split(text.partition("try: ")[2].partition(", which")[0])
    assert resolve(compose_config((word,)))["cluster"]["environment"] == {"python": "3.11.9", "torch": "2.9.1"}


def test_another_build_of_one_release_is_another_version() -> None:
    assert "torch 2.15.0+cu128 (the key says 2.15.0+cpu)" in refused(facts(0, torch_version="2.15.0+cu128"))


def test_hosts_that_differ_among_themselves_get_no_word_that_could_not_help() -> None:
    text = refused(facts(0), facts(1, torch_version="2.9.1"))
    assert "node0" not in text
    assert "cluster.environment" not in text
    assert "hosts of one run need the same versions: install the key's versions there, or cluster.python=" in text


def test_the_word_keeps_what_was_told_already() -> None:
    text = refused(facts(0, torch_version="2.9.1"), told={"python": "3.12.1"})
    assert "cluster.environment='{python: 3.12.1, torch: 2.9.1}'" in text


def test_what_the_probe_cannot_tell_is_no_difference_and_names_are_compared_as_pip_does() -> None:
    fact = facts(0, extra={"packages": {"scikit-learn": "1.8"}})
    assert differing(fact, {"unseen": "1", "Scikit_Learn": "1.9"}) == {"Scikit_Learn": "1.8"}


def test_the_metadata_of_torch_counts_as_it_does_in_the_key() -> None:
    fact = facts(0, torch_version="2.15.0+cu128", extra={"packages": {"torch": "2.15.0"}})
    assert differing(fact, {"torch": "2.15.0"}) == {}
