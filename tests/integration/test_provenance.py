"""Runs that prove themselves: A → B → A, edits, plan, why, reproduce, export; in a checkout of the tests' own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.host.hardware import hardware
from pipeline.core import documents
from pipeline.core.files import sha256_file
from tests.integration import preloaded
from tests.integration.commands import ALONE, ROOT, with_readings
from tests.integration.light import light_python
from tests.waiting import HANG_S

A = ("experiment=quickstart", "trainer.max_steps=2", *ALONE, "tracking=none")
SOURCES = (
    "dodo.py",
    "paceline.py",
    "paceline_huggingface.py",
    "paceline_lightning.py",
    "pyproject.toml",
    "requirements.lock",
    "README.md",
    "pipeline",
    "trainers",
    "hydra_plugins",
    "conf",
)


@dataclass(frozen=True)
class Checkout:
    """A copy of the project in a repository of its own, so that a test may edit it. ``whole``: as for a Project."""

    root: Path
    whole: bool = False

    def doit(self, *words: str, code: int = 0) -> str:
        """Both outputs of a command that must end with ``code``."""
        if not self.whole:
            forked = preloaded.doit(*words, root=self.root)
            assert forked.returncode == code, forked.stdout
            return forked.stdout
        done = self.start(*words)
        output, _ = done.communicate(timeout=HANG_S)
        assert done.returncode == code, output
        return output

    def answer(self, *words: str) -> str:
        """What a command that ends well prints on stdout: a slow one says on stderr what it still does."""
        done = preloaded.doit(*words, root=self.root, apart=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable if self.whole else light_python(forks_ranks=True), "-m", "doit", *words],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def why(self, *words: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.answer("why", *words, "json=1"))["data"]
        return answer

    def git(self, *words: str) -> str:
        named = ["-c", "user.name=t", "-c", "user.email=t@t"]
        done = subprocess.run(["git", "-C", str(self.root), *named, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def runs(self) -> dict[str, Path]:
        return {path.parent.name: path.parent for path in self.root.glob("runs/*/result.json")}

    def launches(self) -> int:
        return sum(path.read_text().count("RUNNING") for path in self.root.glob("runs/*/journal.jsonl"))

    def files(self, *, but: str = ".doit.db") -> dict[str, int]:
        """Every file of the checkout and its repository but doit's own database, with its time stamp.

        That of git's objects is left out: git renews it when it is about to write an object that is there.
        """
        paths = {str(path.relative_to(self.root)): path for path in self.root.rglob("*") if path.is_file()}
        kept = {name: path for name, path in paths.items() if not any(x in name for x in (but, ".doit", "__pycache__"))}
        return {name: 0 if ".git/objects" in name else path.stat().st_mtime_ns for name, path in kept.items()}


def copied(root: Path, data: Path | None = None) -> Checkout:
    """A fresh repository with one commit of the code under test, and a copy of a folder of data.

    Compiled code comes along: compiling it costs each first command a second.
    """
    root.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name)
        else:
            shutil.copy(source, root / name)
    (root / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    if data is not None:
        with_readings(data, root)
    checkout = Checkout(root)
    checkout.git("init", "-q")
    checkout.git("add", "-A")
    checkout.git("commit", "-qm", "one")
    return checkout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, fetched: Path) -> Checkout:
    """A is trained from a dirty tree: an edit in a module that the trainer imports at second hand, a new file."""
    checkout = copied(tmp_path_factory.mktemp("with space") / "project", fetched)
    with (checkout.root / "trainers" / "distributed" / "rank_state.py").open("a") as file:
        file.write("# edited\n")
    (checkout.root / "notes.txt").write_text("not committed\n")
    checkout.doit("train", *A)
    return checkout


def test_edits_that_decide_nothing_rerun_nothing_and_one_at_second_hand_does(trained: Checkout) -> None:
    key = trained.why(*A)["key"]
    comments = {
        "pipeline/evaluation/report.py": "# more\n",
        "pipeline/cluster/plan.py": "# x\n",
        "trainers/distributed/rank_state.py": "# x\n",
    }
    for name, line in {"README.md": "more\n", **comments}.items():
        with (trained.root / name).open("a") as file:
            file.write(line)
    assert "is finished" in trained.doit("train", *A)
    assert trained.launches() == 1
    module = trained.root / "trainers" / "distributed" / "rank_state.py"  # imported at second hand
    before = module.read_text()
    module.write_text(before + "AGAIN = 1\n")
    answer = trained.why(*A)
    module.write_text(before)
    assert answer["key"] != key
    assert [item["field"] for item in answer["differences"]] == ["trainers/distributed/rank_state.py"]


@pytest.mark.ci
@pytest.mark.long
def test_a_run_is_made_again_with_the_persons_defaults_as_they_were(
    trained: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_DEFAULTS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    local = trained.root / "conf" / "local.yaml"
    checked_in = trained.git("status", "--porcelain")
    local.write_text("defaults:\n  - tracking: none\ntrainer: {clip_norm: 0.5}\ncluster: {env: {A_TOKEN: s3cret}}\n")
    assert trained.git("status", "--porcelain") == checked_in
    words = ("experiment=quickstart", "trainer.max_steps=2", *ALONE, "seed=7")
    key = trained.why(*words)["key"]
    trained.doit("train", *words)
    told = json.loads((trained.root / "runs" / key / "provenance.json").read_text())["defaults"]
    choices, fields = [{"override /tracking": "none"}], {"clip_norm": 0.5}
    assert told == {"defaults": choices, "trainer": fields, "cluster": {"env": {"A_TOKEN": "***"}}}
    local.write_text("trainer: {clip_norm: 9}\n")
    assert "to be given again: cluster.env.A_TOKEN=***\n" in trained.doit("reproduce", key, code=1)
    assert f"REPRODUCED {key}: " in trained.doit("reproduce", key, "cluster.env.A_TOKEN=s3cret")
    local.unlink()


@pytest.mark.ci
@pytest.mark.long
def test_a_then_b_then_a_launches_nothing_and_an_edit_during_b_makes_b_stale(trained: Checkout) -> None:
    launches = trained.launches()
    a = trained.why(*A)["key"]
    begun = len([*trained.root.glob("runs/*/attempts")])
    child = trained.start("train", *A, "seed=1")
    while child.poll() is None and len([*trained.root.glob("runs/*/attempts")]) == begun:
        time.sleep(0.02)
    module = trained.root / "trainers" / "training" / "loop.py"
    before = module.read_text()
    module.write_text(before + "EDITED = True  # while B trains\n")
    output, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 0, output
    stale = trained.why(*A, "seed=1")
    assert stale["reason"] == "not finished yet"
    assert [(item["part"], item["field"]) for item in stale["differences"]] == [("code", "trainers/training/loop.py")]
    module.write_text(before)
    assert trained.why(*A, "seed=1")["reason"] is None
    assert f"{a} is finished" in trained.doit("train", *A)
    assert trained.launches() == launches + 1


@pytest.mark.ci
@pytest.mark.long
def test_a_report_by_other_code_is_made_again_without_a_training(trained: Checkout) -> None:
    launches = trained.launches()
    module = trained.root / "pipeline" / "evaluation" / "report.py"
    before = module.read_text()
    module.write_text(before.replace('"share of the true class"', '"share of the class"'))
    answer = trained.why(*A)
    assert answer["reason"] == "the evaluation was made with other means: pipeline/evaluation/report.py changed"
    assert [(step["name"], step["done"]) for step in answer["steps"]][:3] == [
        ("fetch", True),
        ("train", True),
        ("evaluate", False),
    ]
    trained.doit("train", *A)
    assert trained.why(*A)["reason"] is None
    module.write_text(before)
    trained.doit("evaluate", f"run={answer['key']}")
    assert trained.why(*A)["reason"] is None
    assert trained.launches() == launches


def test_plan_names_every_command_and_writes_nothing(trained: Checkout) -> None:
    before = trained.files()
    words = ("experiment=quickstart", "cluster=pssh", "cluster.hosts=[{name: n0}, {name: n1, python: /opt/py}]")
    shown = trained.doit("plan", *words)
    graph = trained.doit("plan", *A, "format=mermaid")
    dot = trained.doit("plan", *A, "format=dot")
    (told,) = json.loads(trained.answer("plan", *words, "json=1"))["data"]
    assert trained.files() == before
    assert "train     to do  not finished yet" in shown
    assert "/code/trainers/torchrun.py' --nproc-per-node=1 --nnodes=2 --node-rank=0" in shown
    assert "/opt/py '~/.cache/paceline/runs/" in shown
    assert [node["node_rank"] for node in told["launch"]["nodes"]] == [0, 1]
    assert graph.startswith("flowchart LR\n")
    assert "train0 --> evaluate0" in graph
    assert "train0 -> evaluate0;" in dot


@pytest.mark.ci
@pytest.mark.long
def test_a_run_that_another_processor_finished_is_finished_and_shown_as_such(trained: Checkout) -> None:
    key = trained.why(*A)["key"]
    path = trained.root / "runs" / key / "result.json"
    before, launches = path.read_bytes(), trained.launches()
    known = documents.read_sealed(path)
    (attempt,) = known["hardware"]["attempts"]
    assert attempt["nodes"][0]["cpu_flags"] == hardware().cpu_flags
    other = {**attempt["nodes"][0], "cpu_model": "Another", "cpu_id": "Vendor 6/143/8", "cpu_flags": "avx512f amx_bf16"}
    told = {"device": "cpu", "attempts": [{"attempt": 1, "nodes": [other]}]}
    assert "arithmetic" not in "".join(trained.doit(*words) for words in (("runs",), ("why", *A), ("train", *A)))
    documents.write_sealed(path, {**known, "hardware": told})
    seen = "other hardware: Another (Vendor 6/143/8, avx512f amx_bf16), here "
    assert "  other hardware" in trained.doit("runs")
    for words in (("why", *A), ("status", f"run={key}"), ("train", *A)):
        assert seen in " ".join(trained.doit(*words).split()), words
    assert trained.why(*A)["other_hardware"].startswith("Another (Vendor 6/143/8")
    path.write_bytes(before)
    assert trained.launches() == launches


@pytest.mark.parametrize("words", [("reproduce", "run=KEY"), pytest.param(("-a", "train", *A), marks=pytest.mark.long)])
def test_reproduce_makes_the_dirty_tree_again_and_leaves_the_checkout_alone(
    trained: Checkout, words: tuple[str, ...]
) -> None:
    """``doit -a`` means again, which of a finished run is just this."""
    key = trained.why(*A)["key"]
    (trained.root / "notes.txt").write_text("changed since\n")
    before = trained.files(but="runs/")
    shown = trained.doit(*(word.replace("KEY", key[:5]) for word in words))
    assert trained.files(but="runs/") == before
    assert f"REPRODUCED {key}: weights_sha256, metrics and steps are equal\nits key is the same" in shown


@pytest.mark.long
def test_what_another_processor_finished_is_made_again_within_the_spread(trained: Checkout) -> None:
    key = trained.why(*A)["key"]
    path = trained.root / "runs" / key / "result.json"
    before = path.read_bytes()
    known = documents.read_sealed(path)
    node = {"cpu_model": "Another", "cpu_id": "Vendor 6/143/8", "cpu_flags": "avx512f"}
    told = {"device": "cpu", "attempts": [{"attempt": 1, "nodes": [node]}]}
    documents.write_sealed(path, {**known, "hardware": told, "weights_sha256": "b" * 64})
    shown = trained.doit("reproduce", f"run={key}")
    path.write_bytes(before)
    promise = shown.index("hardware     Another (Vendor 6/143/8, avx512f), here ")
    assert "equal bits can't be promised, so metrics are compared within their spread" in shown
    assert promise < shown.index("training ") < shown.index(f"WITHIN THE SPREAD {key}: test/accuracy no further apart")
    assert "not judged: weights_sha256" in shown
    verdict = json.loads((trained.root / "runs" / ".reproduced" / key / "verdict.json").read_text())
    assert (verdict["reproduced"], verdict["within_spread"]) == (False, True)


@pytest.mark.long
def test_an_archive_is_made_again_in_another_folder_that_never_saw_the_commit(
    trained: Checkout, tmp_path: Path
) -> None:
    key = trained.why(*A)["key"]
    archives = [tmp_path / "one.tar.gz", tmp_path / "t w'o.tar.gz"]
    for archive in archives:
        said = trained.doit("export", f"run={key}", f"to={archive}", "weights=1")
        assert shlex.split(said.splitlines()[-1])[-1] == str(archive)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    elsewhere = copied(tmp_path / "elsewhere")
    (elsewhere.root / "notes.txt").write_text("another's\n")
    elsewhere.git("add", "-A")
    elsewhere.git("commit", "-qm", "another history")
    shown = elsewhere.doit("reproduce", f"run={archives[0]}", "keep=1")
    assert f"REPRODUCED {key}" in shown
    code = elsewhere.root / "runs" / ".reproduced" / key / "code"
    assert (code / "notes.txt").read_text() == "not committed\n"
    assert (code / "trainers" / "distributed" / "rank_state.py").read_text().endswith("# edited\n")
    assert elsewhere.git("worktree", "list").count("\n") == 1


@pytest.mark.ci
@pytest.mark.long
def test_what_cannot_be_made_again_is_said_before_anything_is_trained(trained: Checkout) -> None:
    key = trained.why(*A)["key"]
    assert "ffff: no such run" in trained.doit("reproduce", "run=ffff", code=3)
    assert "takes no 'seed=1'" in trained.doit("reproduce", f"run={key}", "seed=1", code=3)
    folder = trained.root / "runs" / key
    patch, provenance, result = (folder / name for name in ("changes.patch", "provenance.json", "result.json"))
    before = patch.read_bytes(), provenance.read_text(), result.read_bytes()
    commit = json.loads(before[1])["git_commit"]
    patch.write_bytes(before[0][:-20])
    assert "changes.patch was altered" in trained.doit("reproduce", f"run={key}", code=1)
    patch.write_bytes(before[0])

    def of_commit(other: str) -> str:
        """What is said of a run that was made from another commit."""
        provenance.write_text(before[1].replace(commit, other))
        assert "provenance.json was altered" in trained.doit("reproduce", f"run={key}", code=1)
        known = documents.read_sealed(result)
        origin = {**known["origin_sha256"], "provenance.json": sha256_file(provenance)}
        documents.write_sealed(result, {**known, "origin_sha256": origin})
        said = trained.doit("reproduce", f"run={key}", code=1)
        provenance.write_text(before[1])
        result.write_bytes(before[2])
        return said

    said = of_commit("f" * 40)
    empty = trained.git("commit-tree", "-m", "empty", "4b825dc642cb6eb9a060e54bf8d69288fbee4904").strip()
    unapplied = of_commit(empty)
    assert f"the uncommitted changes of run {key} don't apply to its commit {empty}" in unapplied
    assert "trainers/distributed/rank_state.py: does not exist in index" in unapplied
    assert trained.git("worktree", "list").count("\n") == 1
    assert f"commit {'f' * 40} of run {key} is not in this clone" in said
    assert "try: git fetch" in said


def _without_compositions(stamps: dict[str, int]) -> dict[str, int]:
    """Without the cache beside the run folders in which `doit train` and `doit runs` keep what Hydra composed."""
    return {name: stamp for name, stamp in stamps.items() if name != "runs/.paceline/composed.json"}


@pytest.mark.ci
@pytest.mark.long
def test_a_run_folder_of_a_newer_version_is_refused_and_left_alone(trained: Checkout) -> None:
    key = trained.why(*A)["key"]
    path = trained.root / "runs" / key / "key.json"
    before = path.read_text()
    path.write_text(before.replace('"version": 3', '"version": 4'))
    before_words = _without_compositions(trained.files())
    for words in (("train", *A), ("plan", *A), ("why", *A), ("evaluate", f"run={key}"), ("reproduce", f"run={key}")):
        said = trained.doit(*words, code=3)
        assert f"run {key} was written by a newer Paceline: key.json has version 4" in said
    assert f"{key}  NEWER" in trained.doit("runs")
    assert _without_compositions(trained.files()) == before_words
    path.write_text(before)
