"""Steps of one's own as people type them: the page's example and dodo.py."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.commands import ROOT
from tests.integration.test_own_models import typed
from tests.integration.test_provenance import Checkout, copied

PAGE = (ROOT / "docs/steps.md").read_text()
SMALL = "trainer.max_steps=2 cluster.nproc_per_node=1 ++cluster.env.OMP_NUM_THREADS=1 tracking=none"
WORDS = ("dataset=arrays", "dataset.source=step:clean", "dataset.holdout=40", "model=small_cnn", *SMALL.split())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The example at the head of the page was typed in it."""
    (example,) = re.findall(r"^```bash\n(.*?)^```$", PAGE.partition("\n## ")[0], re.MULTILINE | re.DOTALL)[:1]
    assert example.count("\n") <= 15
    checkout = copied(tmp_path_factory.mktemp("steps") / "project")
    done = typed(checkout, example, SMALL)
    assert done.returncode == 0, done.stdout
    assert "the data comes from step clean, which runs first" in done.stdout
    return checkout


def test_the_example_trains_as_printed_and_a_second_call_starts_nothing(checkout: Checkout) -> None:
    (run,) = checkout.runs().values()
    assert json.loads((run / "config.json").read_text())["dataset"]["source"] == "step:clean"
    again = checkout.doit("train", *WORDS)
    assert "is finished" in again
    assert "step clean" not in again
    assert checkout.launches() == 1
    assert re.search(r"clean +up to date", checkout.doit("step"))


def test_plan_and_why_tell_what_changed_and_what_would_run(checkout: Checkout) -> None:
    assert checkout.answer("why", "step=clean", "seed=1") == "step clean would run:\n  seed: 0 → 1\n"
    steps = {step["name"]: step for step in checkout.why(*WORDS, "seed=1")["steps"]}
    assert (steps["step clean"]["why"], steps["fetch"]["why"]) == ("seed: 0 → 1", "after step clean")
    graph = checkout.answer("plan", *WORDS, "format=mermaid")
    assert "step_clean0 --> fetch0" in graph
    assert "fetch0 --> train0" in graph
    assert ":::todo" not in graph
    (checkout.root / "conf/step/other.yaml").write_text("command: touch $out/x\noutputs: [x]\n")
    assert checkout.answer("plan", *WORDS, "format=mermaid") == graph
    assert re.search(r"other +would run +never made", checkout.doit("step"))
    assert "step clean to do  seed: 0 → 1" in checkout.doit("plan", *WORDS, "seed=1")


@pytest.mark.ci
@pytest.mark.long
def test_a_sweep_over_what_a_step_takes_makes_it_for_each_value(checkout: Checkout) -> None:
    args = "step.clean.command=[python,clean.py,'{out}',5,'{inputs}'],[python,clean.py,'{out}',6,'{inputs}']"
    told = checkout.doit("sweep", *WORDS, args)
    assert "2 of 2 trials finished" in told
    assert len([*(checkout.root / "runs/steps").glob("clean-*/step.json")]) == 3
    assert "step.clean is set, and nothing here needs a step" in checkout.doit(
        "train", "step.clean.outputs=[x]", code=3
    )


@pytest.mark.ci
@pytest.mark.long
def test_a_script_takes_what_a_step_left_as_its_data(checkout: Checkout) -> None:
    script = "import os, sys, paceline\npaceline.log(1, bytes=os.path.getsize(sys.argv[1]))\n"
    (checkout.root / "size.py").write_text(script)
    words = ("program.script=size.py", "program.data=step:clean", "program.args=['{data}']", "program.torchrun=false")
    assert "FINISHED" in checkout.doit("train", *words, "tracking=none")
    (result,) = (run for run in checkout.runs().values() if "size.py" in (run / "config.json").read_text())
    (made,) = {path.stat().st_size for path in (checkout.root / "runs/steps").glob("clean-*/out/images.npz")}
    assert json.loads((result / "result.json").read_text())["metrics"] == {"bytes": made}
    assert "is finished" in checkout.doit("train", *words, "tracking=none")
    assert "step clean to do  seed: " in checkout.doit("plan", *words, "seed=4", "tracking=none")


@pytest.mark.ci
@pytest.mark.long
def test_clean_keeps_what_a_data_pack_was_made_of(checkout: Checkout) -> None:
    checkout.doit("step", "clean", "seed=7")
    told = checkout.doit("clean", "steps=1", "yes=1")
    assert told.count("a data pack was made of it") + told.count("it is up to date") >= 1
    assert len(re.findall("^removed clean-", told, re.MULTILINE)) == 1


@pytest.mark.ci
@pytest.mark.long
def test_a_task_of_ones_own_depends_on_a_step(checkout: Checkout) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    dodo = checkout.root / "dodo.py"
    before = dodo.read_text()
    try:
        dodo.write_text(f"{before}\n{code}")
        assert "400 " in checkout.doit("show")
        assert "step count" not in checkout.doit("show")
    finally:
        dodo.write_text(before)
