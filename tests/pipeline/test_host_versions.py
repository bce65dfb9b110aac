"""A host that has other versions than the run's key says is refused, with one word that runs as the hosts are."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.agent.host import software
from pipeline.cluster.preflight.versions import common_versions, differing, refuse_different
from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from pipeline.keys.installed import version as of_key
from tests.pipeline.test_plan import facts
from trainers.contract.host_facts import HostFacts

KEY = {"python": "3.12.1", "torch": "2.15.0+cpu"}


def refused(*found: HostFacts, told: dict[str, str] | None = None, key: dict[str, str] = KEY) -> str:
    with pytest.raises(HostError) as caught:
        refuse_different(found, key, told or {})
    return str(caught.value)


def word_of(text: str) -> dict[str, str]:
    """What cluster.environment becomes when the word of a message is typed."""
    (word,) = shlex.split(text.partition("try: ")[2].partition(", which")[0])
    environment: dict[str, str] = resolve(compose_config((word,)))["cluster"]["environment"]
    return environment


def test_hosts_as_the_key_says_pass() -> None:
    refuse_different([facts(0), facts(1)], KEY, {})


def test_all_differences_stand_in_one_message_whose_word_works_when_it_is_typed() -> None:
    other = {"python_version": "3.11.9", "torch_version": "2.9.1"}
    text = refused(facts(0, **other), facts(1, **other))
    assert "  node0, node1: python 3.11.9 (the key says 3.12.1), torch 2.9.1 (the key says 2.15.0+cpu)" in text
    assert word_of(text) == {"python": "3.11.9", "torch": "2.9.1"}


def test_another_build_of_one_release_is_another_version() -> None:
    assert "torch 2.15.0+cu128 (the key says 2.15.0+cpu)" in refused(facts(0, torch_version="2.15.0+cu128"))


def test_hosts_that_differ_among_themselves_get_no_word_that_could_not_help() -> None:
    text = refused(facts(0), facts(1, torch_version="2.9.1"))
    assert "node0" not in text
    assert "cluster.environment" not in text
    assert "hosts of one run need the same versions: install the key's versions there, or cluster.python=" in text


def test_the_versions_of_hosts_that_agree_replace_those_of_the_key_and_what_they_cannot_tell_stays() -> None:
    key = {**KEY, "unseen": "1"}
    other = {"python_version": "3.11.9", "torch_version": "2.9.1"}
    assert common_versions([facts(0, **other), facts(1, **other)], key) == {
        "python": "3.11.9",
        "torch": "2.9.1",
        "unseen": "1",
    }
    with pytest.raises(HostError, match=r"one key:\n  node1: torch 2\.9\.1 \(node0 has 2\.15\.0\+cpu\)"):
        common_versions([facts(0), facts(1, torch_version="2.9.1")], KEY)


def test_the_word_keeps_what_was_told_already() -> None:
    text = refused(facts(0, torch_version="2.9.1"), told={"python": "3.12.1"})
    assert "cluster.environment='{python: 3.12.1, torch: 2.9.1}'" in text


def test_what_the_probe_cannot_tell_is_no_difference_and_names_are_compared_as_pip_does() -> None:
    fact = facts(0, packages={"scikit-learn": "1.8"})
    assert differing(fact, {"unseen": "1", "Scikit_Learn": "1.9"}) == {"Scikit_Learn": "1.8"}


def test_the_metadata_of_torch_counts_as_it_does_in_the_key() -> None:
    fact = facts(0, torch_version="2.15.0+cu128", packages={"torch": "2.15.0"})
    assert differing(fact, {"torch": "2.15.0"}) == {}


def installed(site: Path, name: str, number: str, *files: str) -> None:
    """A distribution as pip leaves it."""
    (site / f"{name}-{number}.dist-info").mkdir(parents=True)
    (site / f"{name}-{number}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {number}\n")
    (site / f"{name}-{number}.dist-info" / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("raise SystemExit('imported')\n")


def test_an_import_that_the_key_calls_absent_is_found_on_a_host_with_the_version_of_what_has_it(tmp_path: Path) -> None:
    installed(tmp_path, "opencv_python", "4.10", "cv2/__init__.py")
    installed(tmp_path, "google_cloud_storage", "2.18.0", "google/cloud/storage/__init__.py")
    (tmp_path / "bare.py").write_text("")
    names = ["cv2", "cv2.gapi", "google.cloud.storage", "google.cloud.spanner", "flash_attn", "bare"]
    found = software.modules(names, [str(tmp_path)])
    assert found == {"cv2": "4.10", "google.cloud.storage": "2.18.0", "bare": "unknown"}
    key = {**KEY, **dict.fromkeys(names, "absent")}
    assert "hosts of one run need the same versions" in refused(facts(0), facts(1, modules=found), key=key)
    text = refused(*(facts(number, modules=found) for number in range(2)), key=key)
    assert "  node0, node1: cv2 4.10 (the key says absent), google.cloud.storage 2.18.0 (the key says absent)" in text
    told = word_of(text)
    assert told == {"cv2": "4.10", "google.cloud.storage": "2.18.0", "bare": "unknown"}
    refuse_different([facts(0, modules=found)], {**key, **told}, told)


def test_what_the_key_has_and_a_host_lacks_is_refused(tmp_path: Path) -> None:
    key = {**KEY, "flash-attn": "2.8.3"}
    lacking = facts(0, packages={}, modules={})
    text = refused(lacking, key=key)
    assert "  node0: flash-attn absent (the key says 2.8.3)" in text
    assert "which is the key of a run on such hosts (whose code can do without flash-attn)" in text
    refuse_different([lacking], {**key, **word_of(text)}, {})
    refuse_different([facts(0, packages={}, modules={"flash-attn": "unknown"})], key, {})


@pytest.mark.slow
def test_a_real_host_is_asked_for_what_the_key_calls_absent() -> None:
    here = Cluster(launcher="local", hosts=(Host(name="localhost"),))
    found = preflight.examine(here).facts[0]
    key = {"python": found.python_version, "torch": version("torch"), "no_such_module": "absent"}
    preflight.examine(here, key_versions=key).raise_if_failed()
    with pytest.raises(HostError, match=rf"localhost: yaml {version('PyYAML')} \(the key says absent\)"):
        preflight.examine(here, key_versions={**key, "yaml": "absent"}).raise_if_failed()


def test_what_no_index_gave_is_compared_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "mine", "1.0", "mine/__init__.py", "mine/x.py")
    (tmp_path / "mine-1.0.dist-info" / "direct_url.json").write_text('{"url": "file:///mine", "dir_info": {}}')
    monkeypatch.syspath_prepend(str(tmp_path))
    key = {"mine": str(of_key("mine", [str(tmp_path)]))}
    assert key["mine"].startswith("1.0 (content ")
    refuse_different([facts(0, packages=software.packages(["mine"]))], key, {})
    (tmp_path / "mine-1.0.dist-info" / "RECORD").write_text("mine/__init__.py,sha256=other,1\n")
    other = facts(0, packages=software.packages(["mine"]))
    assert f"(the key says {key['mine']})" in refused(other, key=key)
    refuse_different([other], {**key, **word_of(refused(other, key=key))}, {})


def test_packages_of_debian_count() -> None:
    assert software.distribution_of("PyYAML-6.0.egg-info") == ("PyYAML", "6.0")
    assert software.distribution_of("six-1.16.0-py3.11.egg-info") == ("six", "1.16.0")
    assert software.distribution_of("flash_attn-2.8.3.dist-info") == ("flash_attn", "2.8.3")
    assert software.distribution_of("project.egg-info") == software.distribution_of("README.md") == ("", "")
