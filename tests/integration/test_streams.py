"""Where a command's words go and how it ends, the same for every verb: results on stdout, progress and errors on
stderr, 130 after Ctrl-C."""

from __future__ import annotations

import json
import subprocess

import pytest

from pipeline.cli.verbs import VERBS
from tests.integration import preloaded
from tests.integration.commands import ALONE, ROOT, Project
from tests.integration.light import light_python
from tests.waiting import HANG_S

WORDS = ("experiment=quickstart", "tracking=none")
INTERRUPTED = """
import importlib, json, os, signal, sys
import doit.__main__
from doit.doit_cmd import DoitMain
from pipeline.cli import finished
from pipeline.cli.verbs import VERBS
from pipeline.config import compose
from pipeline.core.processes.signals import Interruptible
from tests.quick_composition import quickly
compose.compose = quickly
compose.compose_config([])
for name in ("cli.commands.train", "config.build", "config.memo", "execution.dry_run"):
    importlib.import_module(f"pipeline.{name}")

def work(_):
    with Interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        list(range(100_000))

def answer(_):
    os.kill(os.getpid(), signal.SIGINT)
    list(range(100_000))

codes = {}
for number, (name, verb) in enumerate(VERBS.items()):
    if name == "torchrun":
        continue  # its words become those of another verb
    for kind in (work, answer) if name in ("train", "runs") else ((work, answer)[number % 2],):
        pid = os.fork()
        if pid == 0:
            setattr(importlib.import_module(f"pipeline.cli.commands.{verb.module}"), name, kind)
            for other in (one for one in VERBS.values() if one.is_done):
                setattr(finished, other.is_done, lambda _, done=other is not verb: done)
            sys.argv = [doit.__main__.__file__, name, *(sys.argv[1:] if verb.overrides else [])]
            sys.argv += ["experiment=digits"] if name == "attach" else []  # without such a word it looks for a run
            sys.exit(DoitMain().run(sys.argv[1:]))
        codes[f"{name} {kind.__name__}"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""


@pytest.mark.ci
@pytest.mark.long
def test_ctrl_c_ends_every_verb_with_130(project: Project) -> None:
    """In the midst of what tidies up after itself, and of what only looks something up. A process that dies by the
    signal itself counts as 130 in every shell."""
    where = [f"paths.runs='{project.folder}/runs'", f"paths.data='{project.folder}/data'"]
    argv = [light_python(forks_ranks=True), "-c", INTERRUPTED, *where]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    codes = json.loads(done.stdout)
    assert len(codes) == len(VERBS) + 1
    assert {name: code for name, code in codes.items() if code not in (130, -2)} == {}, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("verb", ["train", "torchrun", "runs"])
def test_an_error_goes_to_stderr_alone_and_is_an_answer_in_json(verb: str) -> None:
    done = preloaded.doit(verb, "nonsense.of.mine=1", apart=True)
    assert (done.returncode, done.stdout) == (3, "")
    said = [line for line in done.stderr.splitlines() if not line.startswith("still ")]  # of a command that waits
    assert said[0].startswith("ERROR: "), done.stderr
    if "json" not in VERBS[verb].options:
        return
    done = preloaded.doit(verb, "nonsense.of.mine=1", "json=1", apart=True)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["schema"], answer["ok"]) == (3, f"paceline.{verb}/1", False)
    assert answer["error"]["code"] == "usage"
    assert f"ERROR: {answer['error']['message'].splitlines()[0]}" in done.stderr


def test_what_a_verb_finds_out_too_late_is_an_error_on_stderr(project: Project) -> None:
    """One that doit's reporter tells, not the check of the words."""
    done = preloaded.doit("reproduce", str(project.folder / "nothing.tar.gz"), apart=True)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "ERROR: " in done.stderr


@pytest.mark.ci
@pytest.mark.long
def test_a_training_tells_its_result_on_stdout_and_how_it_gets_there_on_stderr(project: Project) -> None:
    words = ("train", *project.overrides, *WORDS, *ALONE, "trainer.max_steps=2")
    first, second = (preloaded.doit(*words, apart=True) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    key = project.only_run().name
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["FINISHED", "results", "compare", "repeat"]
    assert f"train {key}\nrun {key}: 1 node, 1 rank, local\n" in first.stderr
    assert "\nepoch 1/1  step 2/2  loss " in first.stderr
    assert second.stdout.startswith(f"{key} is finished: test/accuracy ")
    assert second.stderr.endswith(f"train {key}: done already\n")
    listed = preloaded.doit("runs", "json=1", *project.overrides[:1], apart=True)
    assert [row["key"] for row in json.loads(listed.stdout)["data"]] == [key]


@pytest.mark.ci
@pytest.mark.long
def test_verbs_that_answer_do_it_in_json_on_stdout_alone(project: Project) -> None:
    words = (*project.overrides, *WORDS, *ALONE, "trainer.max_steps=2")
    trained = preloaded.doit("train", *words, "json=1", apart=True)
    events, _, answer = trained.stdout.partition("{\n")
    assert {json.loads(line)["schema"] for line in events.splitlines()} == {"paceline.event/1"}
    result = json.loads("{" + answer)["data"]
    assert (result["key"], result["state"]) == (project.only_run().name, "FINISHED")
    assert {"val/accuracy", "test/accuracy"} <= result["metrics"].keys()
    key, runs = result["key"], project.overrides[0]
    verbs: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("train", "plan", "why", "config", "fetch"), words),
        **dict.fromkeys(("status", "logs", "compare", "report"), (key, runs)),
        "runs": (runs,),
        "step": (runs,),
    }
    for verb, typed in verbs.items():
        done = preloaded.doit(verb, *typed, "json=1", apart=True)
        value = json.loads(done.stdout)
        assert (done.returncode, value["schema"], value["ok"]) == (0, f"paceline.{verb}/1", True), done.stderr
        assert value["data"] is not None
