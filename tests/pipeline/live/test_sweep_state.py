"""What is known of a sweep while it goes on, and how it looks."""

from __future__ import annotations

import io

from rich.console import Console

from pipeline.cluster.events import LogLine
from pipeline.core.specs import State, Wait
from pipeline.live.sweep_state import SweepState, after_run_event, after_trial_event, estimate_left_s
from pipeline.live.views import sweep_view
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.trial import TrialBegan, TrialEnded, TrialLines, words_of_trial

FIRST = SweepState(name="5bb24236b1de", total=40, at_once=4, metric="val/accuracy")


def began(number: int) -> TrialBegan:
    return TrialBegan(number=number, key=f"key{number}", chosen=(f"optimizer.lr=0.{number}", "seed=2"))


def ended(number: int, state: State = State.FINISHED, *, again: bool = False, accuracy: float = 0.0) -> TrialEnded:
    chosen = (f"optimizer.lr=0.{number}", "seed=2")
    return TrialEnded(number=number, chosen=chosen, state=state, metrics={"val/accuracy": accuracy}, again=again)


def going_on() -> SweepState:
    """12 of 40 ended, each after 60 s; four are half way, two of them silent."""
    state = FIRST
    for number in range(12):
        state = after_trial_event(state, began(number), 0.0)
        what = State.FAILED if number == 3 else State.FINISHED
        state = after_trial_event(state, ended(number, what, accuracy=0.5 + number / 100), 60.0)
    for number in range(12, 16):
        state = after_trial_event(state, began(number), 60.0)
        for event in (
            LogLine(host="n", rank=0, text="10 steps an epoch, 100 steps"),
            MetricsRow(time_s=0.5, step=20, epoch=2, metrics={"val/accuracy": 0.77}),
            MetricsRow(time_s=0.8, step=40, epoch=4, metrics={"val/accuracy": 0.7}),
            MetricsRow(time_s=1.0, step=50, epoch=5, metrics={"train/loss": 0.25, "train/images_per_s": 1500.0}),
        ):
            state = after_run_event(state, number, event, 90.0)
    return state


def text(state: SweepState, now: float, *, width: int = 120, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=50, color_system=None)
    with console.capture() as captured:
        console.print(sweep_view(state, now, width=width, height=height))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_trials_are_named_by_what_sets_them_apart() -> None:
    assert words_of_trial(("optimizer.lr=0.1", "seed=2")) == "lr=0.1 seed=2"
    assert words_of_trial(("model.width=8", "+program.args.width=4")) == "model.width=8 args.width=4"
    assert words_of_trial(("optimizer.lr=0.010604499373000004",)) == "lr=0.0106"
    assert words_of_trial(("cluster.nproc_per_node=2",)) == "cluster.nproc_per_node=2"
    assert words_of_trial(()) == ""


def test_the_time_left_is_that_of_trials_to_come_at_the_pace_of_those_before() -> None:
    state = going_on()
    assert state.took_s == (60.0,) * 11  # how long one took that failed says nothing
    assert estimate_left_s(state, 90.0) == (4 * 30.0 + 24 * 60.0) / 4
    assert estimate_left_s(FIRST, 0.0) is None


def test_the_view_counts_and_names_the_best_and_each_trial_under_way() -> None:
    lines = text(going_on(), 90.0)
    assert lines[0] == "sweep 5bb24236b1de: ━━━━━───────────  12 of 40 done, 4 running, about 6 min left, 1 failed"
    assert lines[1] == "best so far val accuracy 0.6100: lr=0.11 seed=2"
    assert lines[2] == "trial  state     differs in      epoch    best val accuracy"
    assert lines[3] == "    0  finished  lr=0.0 seed=2            0.5000"
    assert lines[6].startswith("    3  failed    lr=0.3 seed=2 ")
    assert lines[15].startswith(
        "   12  running   lr=0.12 seed=2  6/10     0.7700             ━━━━━━━━────────  50%  loss 0.2500"
    )
    assert len(lines) == 3 + 16


def test_the_view_stays_within_the_terminal() -> None:
    for width, height in ((20, 3), (60, 5), (200, 24)):
        lines = text(going_on(), 90.0, width=width, height=height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= max(height, 5)
    assert text(going_on(), 90.0, height=6)[-1] == "and 15 more trials"
    low = text(going_on(), 90.0, height=12)
    assert [line.split()[0] for line in low[2:]] == ["trial", "10", "11", "12", "13", "14", "15", "and"]
    assert low[-1] == "and 10 more trials"
    assert text(going_on(), 90.0, width=80)[15].endswith("6/10     0.7700    50%  loss 0.2500")
    assert text(going_on(), 90.0, width=60)[15].endswith("6/10     0.7700    50%")  # no half of a figure


def test_after_its_last_step_a_trial_says_what_it_waits_for() -> None:
    state = going_on()
    for event in (MetricsRow(time_s=2.0, step=100, epoch=10, metrics={}), Wait(what="making the evaluation report")):
        state = after_run_event(state, 12, event, 95.0)
    assert text(state, 95.0)[15].endswith("10/10    0.7700             making the evaluation report")
    lines = text(state, 95.0, width=80)  # in short above the best value, so that this is whole
    assert lines[2] == "trial  state     differs in      epoch    best"
    assert lines[15].endswith("10/10    0.7700  making the evaluation report")


def test_a_trial_that_is_tried_again_has_not_ended_and_what_a_dead_one_tells_changes_nothing() -> None:
    state = after_trial_event(after_trial_event(FIRST, began(0), 0.0), ended(0, State.FAILED, again=True), 5.0)
    assert (state.done, dict(state.running)) == (0, {})
    assert after_run_event(state, 0, LogLine(host="n", rank=0, text="x"), 6.0) is state


def test_a_search_that_minimises_has_its_lowest_value_for_the_best() -> None:
    state = SweepState(name="s", total=3, at_once=1, metric="val/accuracy", maximize=False)
    for number, value in enumerate((0.5, 0.2, float("nan"))):
        state = after_trial_event(state, ended(number, accuracy=value), 1.0)
    assert state.best is not None
    assert (state.best.value, state.best.words) == (0.2, "lr=0.1 seed=2")


def test_a_log_has_a_line_when_a_trial_has_ended_well() -> None:
    lines = TrialLines(40, "val/accuracy")
    said = [
        lines.line(event, now) for event, now in ((began(3), 1.0), (ended(3, accuracy=0.5), 13.5), (ended(4), 14.0))
    ]
    assert said == [
        None,
        "✓  1/40  lr=0.3 seed=2  val/accuracy 0.5000  12.5 s  (key3)",
        None,  # it was finished before
    ]
