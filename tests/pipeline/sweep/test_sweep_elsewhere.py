"""A trial that another command brings to its end while this sweep waits for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipeline.cli.commands import sweep as sweeping
from pipeline.cli.commands import trials
from pipeline.core.files import write_json
from pipeline.core.locks import held
from pipeline.core.specs import State
from pipeline.data import store
from pipeline.evaluation import report_key
from pipeline.runs.folder import EVALUATED, RunFolder
from pipeline.sweep.conduct import Sweep, conduct
from pipeline.sweep.expand import Grid, expand
from pipeline.sweep.folder import SweepFolder
from tests.pipeline.finished_folder import finished
from tests.waiting import HANG_S

CLONE = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_a_trial_that_another_command_ran_is_not_told_as_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=quickstart", "tracking=none", f"paths.runs='{tmp_path}/runs'", f"paths.data='{tmp_path}/data'"]
    wanted = expand(words, root=CLONE, local_gpus=0).trials[0].config
    store.fetch(wanted.train.dataset, wanted.data_dir)
    space = expand(words, root=CLONE, local_gpus=0)
    (trial,) = space.trials
    assert trial.run is not None
    run, taken, awaited = trial.run, threading.Event(), threading.Event()

    def other() -> None:
        with held(RunFolder(run.folder.path).lock):
            taken.set()
            awaited.wait(HANG_S)
            made = finished(run.folder.path.parent, run.key)
            write_json(made.path / EVALUATED[0], {"made_of": report_key.made_of_run(made, CLONE)})
            made.refresh_fingerprints()

    def hear(text: str) -> None:
        if f"another command is training {run.key.short}; waiting for it" in text:
            awaited.set()

    command = threading.Thread(target=other)
    command.start()
    assert taken.wait(HANG_S)
    folder = SweepFolder(wanted.runs_dir / "sweeps" / "second")
    (ended,) = conduct(
        Sweep(
            source=Grid(space.trials),
            folder=folder,
            key=space.key,
            slots=space.slots,
            retries=0,
            retry_failed=False,
            root=CLONE,
            argv=["doit"],
            say=hear,
        )
    )
    command.join()
    assert (ended.outcome.state, ended.outcome.elsewhere) == (State.FINISHED, True)
    sweeping.conclude(folder, [trials.result_of(ended)], [ended])
    assert "1 finished, 0 failed; 0 run just now, 1 by another command meanwhile" in capsys.readouterr().out
