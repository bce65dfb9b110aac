"""What is written beside the code stays in step with it: the two READMEs, the workflow, the site's pages."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(markdown: str) -> list[list[str]]:
    """The lines of each code block, without the words after ``#``: comments are translated."""
    found = re.findall(r"^```(?:\w+)?\n(.*?)^```$", markdown, flags=re.MULTILINE | re.DOTALL)
    return [[re.sub(r"\s+# .*", "", line) for line in block.splitlines()] for block in found]


def words(markdown: str) -> set[str]:
    """What is set in code outside of the blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)))


def links(markdown: str) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", markdown)) - {"README.md", "README.zh-CN.md"}


def test_the_chinese_readme_has_the_commands_words_and_links_of_the_english_one() -> None:
    english, chinese = text("README.md"), text("README.zh-CN.md")
    assert len(blocks(english)) > 5
    assert english.count("\n") <= 130  # a page that is read at once; docs/tour.md has the rest
    for what in (blocks, words, links):
        assert what(chinese) == what(english), "README.zh-CN.md has to be changed as README.md was"
    assert english.count("\n## ") == chinese.count("\n## ")


def test_links_of_the_papers_lead_somewhere() -> None:
    for paper in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "SECURITY.md"):
        missing = [
            link for link in links(text(paper)) if "://" not in link and not (ROOT / link.partition("#")[0]).exists()
        ]
        assert missing == [], paper


def test_modules_named_in_papers_and_templates_are_there() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md", "*.toml", "*.txt", "*.y*ml"], cwd=ROOT, capture_output=True)
    papers = [ROOT / name for name in os.fsdecode(tracked.stdout).split() if "CHANGELOG" not in name]
    assert ROOT / "pipeline/template/pyproject.toml.txt" in papers
    named = r"\b((?:pipeline|trainers)(?:\.[a-z_0-9]+)+)(?::([A-Za-z]\w*))?"
    for paper in papers:
        for module, name in set(re.findall(named, paper.read_text(encoding="utf-8"))):
            assert_there(module, name, paper)


def assert_there(module: str, name: str, paper: Path) -> None:
    """``module`` is one, or an attribute of one; ``name``, where it isn't empty, is defined in it."""
    above, _, last = module.rpartition(".")
    file = ROOT / (module.replace(".", "/") + ".py")
    if file.exists() or (ROOT / module.replace(".", "/")).is_dir():
        assert not name or re.search(rf"^(class|def) {name}\b|^{name}\b", file.read_text(), flags=re.M), (paper, name)
    else:
        assert re.search(rf"\b{last}\b", (ROOT / (above.replace(".", "/") + ".py")).read_text()), (paper, module)


def test_the_workflow_runs_what_there_is() -> None:
    jobs = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = [target for run in runs for target in re.findall(r"make ([\w-]+)", run)]
    assert {"docs", "test-fast", "check"} <= set(targets)
    assert [target for target in targets if f"\n{target}:" not in text("Makefile")] == []
    assert any(run.endswith(".ci/run") for run in runs)
    scripts = [ROOT / script for run in runs for script in re.findall(r"\.ci/\w+", run)]
    assert [script for script in scripts if not os.access(script, os.X_OK)] == []
    oldest = tomllib.loads(text("pyproject.toml"))["project"]["requires-python"].removeprefix(">=")
    assert jobs["linux"]["strategy"]["matrix"]["python"][0] == oldest


def test_every_test_is_run_by_make_test_which_each_change_passes_or_by_make_test_long_which_runs_weekly() -> None:
    recipes = dict(re.findall(r"^(test|test-long): .*\n\t.* -m pytest (.*)$", text("Makefile"), flags=re.MULTILINE))
    workers = "--dist worksteal"
    assert recipes == {"test": f'-n 6 {workers} -m "not long"', "test-long": f"-n 4 {workers} -m long"}
    assert re.findall(r"^make (test\S*)", text(".ci/run"), flags=re.MULTILINE) == ["test"]
    workflow = yaml.safe_load(text(".github/workflows/ci.yml"))
    assert "schedule" in workflow[True]  # YAML 1.1 reads the key "on" so
    assert any("make test-long" in step.get("run", "") for step in workflow["jobs"]["long"]["steps"])
    assert "-m" not in tomllib.loads(text("pyproject.toml"))["tool"]["pytest"]["ini_options"]["addopts"].split()


def test_the_version_is_that_of_the_changelog_and_of_the_citation() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert f"\n## {version} " in text("CHANGELOG.md")
    assert yaml.safe_load(text("CITATION.cff"))["version"] == version


def test_a_version_in_the_changelog_is_one_page() -> None:
    for version in text("CHANGELOG.md").split("\n## ")[1:]:
        assert version.count("\n") <= 110, (
            "put the change into the line that it belongs to; where a rebase has brought old lines back: "
            "git checkout main -- CHANGELOG.md, and add yours again"
        )


def test_the_image_for_nodes_copies_a_lock_that_is_there() -> None:
    (lock,) = re.findall(r"^ARG LOCK=(\S+)$", text("Dockerfile"), flags=re.MULTILINE)
    assert (ROOT / lock).is_file()
    assert "!*.lock" in text(".dockerignore").split()


def test_the_requirements_carry_hashes_and_name_no_index() -> None:
    for name in ("requirements.lock", "requirements-nodes.lock", "requirements-docs.lock"):
        lock = text(name)
        assert re.search(r"^-|://", lock, flags=re.MULTILINE) is None, name
        pins = re.findall(r"^[\w.-]+==.*?(?=^\S|\Z)", lock, flags=re.MULTILINE | re.DOTALL)
        assert pins
        assert [pin.split()[0] for pin in pins if "--hash=sha256:" not in pin] == [], name
