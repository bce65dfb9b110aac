"""The module ``paceline`` where a script runs alone, on other ranks, and with a full disk."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import paceline
from pipeline.reproduction import divergence


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a person's shell starts a script."""
    monkeypatch.chdir(tmp_path)
    for name in (paceline.LOG, paceline.RUN_DIR, paceline.OUTPUTS, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_alone_every_call_is_harmless(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        paceline.log(1, loss=0.5)
        paceline.finish(loss=0.5)
        assert (paceline.run_dir(), paceline.checkpoints()) == (tmp_path, Path("checkpoints"))
        assert not paceline.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert paceline.should_stop()
    finally:
        signal.signal(signal.SIGTERM, before)
        paceline._state.term = paceline._state.caught = False
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])  # the latter alone: of ranks that Lightning started
def test_only_rank_0_writes(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paceline.LOG, str(tmp_path / "log"))
    for rank in ("1", "0"):
        monkeypatch.setenv(variable, rank)
        paceline.log(3, loss=int(rank) if rank == "0" else "no number")
    (line,) = (tmp_path / "log").read_text().splitlines()
    row = json.loads(line)
    assert (row["step"], row["metrics"]) == (3, {"loss": 0.0})


def test_a_tensor_with_a_gradient_is_recorded_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paceline.LOG, str(tmp_path / "log"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paceline.log(1, loss=torch.ones(1, requires_grad=True) * 2, flag=True, text="0.5")
    assert json.loads((tmp_path / "log").read_text())["metrics"] == {"loss": 2.0, "flag": 1.0, "text": 0.5}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "metric bad is no number but a str: could not convert string to float: 'text'"),
        (None, "metric bad is no number but a NoneType: "),
        (torch.ones(2), "metric bad is no number but a torch.Tensor: a Tensor with 2 elements"),
    ],
)
def test_a_metric_that_is_no_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, said: str
) -> None:
    monkeypatch.setenv(paceline.LOG, str(tmp_path / "log"))
    for call in (partial(paceline.log, 1), paceline.finish):
        with pytest.raises(TypeError, match=re.escape(said)):
            call(good=1, bad=value)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("name", ["", " "])
def test_a_metric_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(paceline.LOG, str(tmp_path / "log"))
    for call in (partial(paceline.log, 1), paceline.finish):
        with pytest.raises(ValueError, match=rf"^paceline: '{name}' is no name of a metric$"):
            call(**{"loss": 1, name: 2})
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("step", [1 << 63, -(1 << 63) - 1])
def test_a_step_that_no_tracker_keeps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setenv(paceline.LOG, str(tmp_path / "log"))
    with pytest.raises(ValueError, match=rf"^paceline: step {step} has more than 64 bits$"):
        paceline.log(step, loss=1)
    assert not (tmp_path / "log").exists()


def test_what_can_not_be_written_is_said_and_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(paceline.LOG, "/dev/full")
    paceline.log(3, loss=1)
    assert capsys.readouterr().out.startswith("paceline: {'loss': 1.0} could not be recorded: [Errno 28]")


def test_of_a_line_that_the_disk_has_no_room_for_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    monkeypatch.setenv(paceline.LOG, str(path))
    paceline.log(1, loss=1)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        paceline.log(2, loss=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert "could not be recorded: [Errno 28]" in capsys.readouterr().out


def test_it_needs_nothing_that_is_installed() -> None:
    lines = Path(paceline.__file__).read_text().splitlines()
    names = {line.split()[1] for line in lines if line.startswith(("import", "from"))}
    assert names - {"__future__"} <= sys.stdlib_module_names


def test_digests_tell_the_tensor_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bias in (("one", 0.5), ("other", 0.25)):
        monkeypatch.setenv(paceline.RUN_DIR, str(tmp_path / name))
        (tmp_path / name).mkdir()
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 2)
        model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters())
        for step in (1, 2):
            optimizer.zero_grad()
            images = torch.ones(4, 3) * torch.arange(4)[:, None]
            model(images).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                linear.bias[1] = bias if step == 2 else 1.0
            paceline.digest(step, model, optimizer, images=images)
    one, other = divergence.read(tmp_path / "one"), divergence.read(tmp_path / "other")
    assert {kind for kind, _ in one[1][0]} == {*divergence.KINDS}
    difference, _ = divergence.first_difference(one, other)
    assert difference is not None
    assert divergence.difference_line(difference) == "step 2 (equal at step 1), rank 0: weights (0.bias)"
    monkeypatch.delenv(paceline.RUN_DIR)
    paceline.digest(1, model)  # alone it records nothing
