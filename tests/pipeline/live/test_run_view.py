"""How a run looks: what stands where, and that nothing leaves the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from pipeline.core.specs import Wait
from pipeline.live.state import HostState, RunState
from pipeline.live.views import run_view
from trainers.contract.beats import Gpu, Phase, Usage, phase_words

USAGE = Usage(
    cpu=0.73, memory_bytes=3_100_000_000, memory_total_bytes=25_000_000_000, received_per_s=1.2e6, sent_per_s=2e6
)
HOST = HostState(ranks=1, step=58, doing="computing gradients", steps_per_s=4.0, usage=USAGE)
STATE = RunState(
    key="cf08486f7c19", title="digits small_cnn sgd", batch=64, world_size=2, hosts={"node0": HOST, "node1": HOST},
    step=57, epoch=3, steps=380, steps_per_epoch=19, metrics={"train/loss": 0.0149, "val/accuracy": 0.9889},
    images_per_s=15321.0, left_s=130.0, saved_step=38, warnings=1, warning="node1: its clock is off",
)  # fmt: skip


def text(view: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=50, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get().splitlines()


def shown(state: RunState, *, width: int = 140, height: int = 40, now: float = 12.0) -> list[str]:
    return text(run_view(state, now, width=width, height=height), width)


def test_a_run_that_trains_shows_bar_figures_checkpoint_and_hosts() -> None:
    lines = shown(STATE)
    assert lines[0].rstrip() == "run cf08486f7c19  digits small_cnn sgd  2 ranks on 2 hosts"
    assert lines[1].startswith("epoch 4/20 ━━━━━━")
    assert lines[1].rstrip().endswith("15%  step 57/380  about 2 min left")
    assert lines[2].split("  ")[:3] == ["loss 0.0149", "val accuracy 0.9889", "15,321 images/s"]
    assert lines[3].rstrip() == "checkpoint of step 38, 12 s ago  1 warning: node1: its clock is off"
    row = lines[5].split()
    assert row[:3] == ["node0", "computing", "gradients"]
    assert row[3:] == ["cpu", "73%", "3.1", "GB", "of", "25", "GB", "1.2", "MB/s", "/", "2.0", "MB/s"]


def test_gpus_take_the_processors_place() -> None:
    gpus = tuple(Gpu(busy=busy, memory_bytes=40 * 10**9, memory_total_bytes=80 * 10**9) for busy in (0.9, 1.0))
    host = replace(HOST, usage=USAGE._replace(gpus=gpus))
    row = shown(replace(STATE, hosts={"node0": host}))[-1]
    assert "gpu 95%" in row
    assert "80.0 GB of 160 GB" in row


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("phase", [*Phase])
def test_whatever_a_rank_does_is_whole_with_its_seconds(phase: Phase, width: int) -> None:
    host = replace(HOST, doing=phase_words(phase.value), for_s=1234.0)
    row = shown(replace(STATE, hosts={"gpu-node-17.cluster.example.org": host}), width=width)[-1]
    assert f"  {phase_words(phase.value).removeprefix('waiting ')} 1234 s" in row


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("step", [0, 380])
def test_what_is_waited_for_is_never_cut(width: int, step: int) -> None:
    what = "starting again from the checkpoint of step 1234; the ranks import torch and read the data"
    waits = replace(STATE, steps=step, step=step, hosts={"node0": HOST}, doing=Wait(what=what, for_s=123.4))
    lines = shown(waits, width=width)
    assert f"{what} (123 s)" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_and_no_view_higher_than_the_terminal(width: int) -> None:
    hosts = {f"node{number}.with.a.very.long.name.example.org": HOST for number in range(32)}
    for height in (3, 10, 24):
        lines = shown(replace(STATE, hosts=hosts, warning="x" * 500), width=width, height=height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= max(height, 7)


def test_where_hosts_have_no_room_those_that_are_lost_or_behind_are_shown() -> None:
    hosts = {f"node{number}": replace(HOST, step=50 + number) for number in range(32)}
    hosts["node20"] = replace(HOST, end="lost")
    lines = shown(replace(STATE, hosts=hosts), height=10)
    assert [line.split()[0] for line in lines[5:-1]] == ["node0", "node1", "node20"]
    assert lines[-1].rstrip() == "and 29 more hosts; the slowest is 24 steps behind"


@pytest.mark.parametrize(
    ("step", "of_rank_0", "shown_as"),
    [
        (58, 57, "computing gradients  "),
        (47, 47, "computing gradients  "),  # 11 steps, which are reported within three seconds
        (44, 44, "14 behind: computing"),
        (44, 57, "computing gradients  "),  # rank 0 has finished what every host has begun
    ],
)
def test_a_host_is_behind_only_where_reports_a_second_apart_do_not_explain_it(
    step: int, of_rank_0: int, shown_as: str
) -> None:
    state = replace(STATE, step=of_rank_0, hosts={"node0": HOST, "node1": replace(HOST, step=step)})
    (line,) = (line for line in shown(state) if line.startswith("node1"))
    assert shown_as in line


def test_names_are_text_and_neither_markup_nor_control_characters() -> None:
    hosts = {"[red]x[/]": HOST, "a\x1b[31m\r\nb": HOST, "\u202egnp": HOST}
    lines = "\n".join(shown(replace(STATE, key="[bold]k", hosts=hosts)))
    for name in ("[bold]k", "[red]x[/]", r"a\x1b[31m\r\nb", r"\u202egnp"):
        assert name in lines
    assert "\x1b" not in lines
