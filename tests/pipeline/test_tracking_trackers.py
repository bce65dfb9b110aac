"""Other trackers behind the recorder: one of an installed package, whose faults cost nothing, and Weights & Biases."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from pipeline import tracking
from pipeline.config.build import tracking_config
from pipeline.config.compose import compose_config, register
from pipeline.config.schema import OPTIONS, TrackingConfig
from pipeline.core.errors import UsageError
from pipeline.sweep.folder import SweepFolder
from pipeline.sweep.shared import Shared
from pipeline.tracking import recorder
from pipeline.tracking.client import Recorder
from pipeline.tracking.destinations import DONE, PENDING, Destination, TrackingState, trackers_of
from pipeline.tracking.trackers.wandb import Wandb, WandbConfig
from tests.pipeline import tracking_folder as folder
from tests.waiting import HANG_S
from trainers.core import config as node

SOURCE = """
import json
from dataclasses import dataclass

from pipeline.config.schema import TrackingConfig
from pipeline.tracking.trackers.base import Tracker, TrackerError


@dataclass(kw_only=True)
class LinesConfig(TrackingConfig):
    enabled: bool = False
    tracker: str = "lines"
    place: str = "lines.txt"


class Lines(Tracker):
    def begin(self, run):
        self.file = (self.run_dir / self.settings.place).open("a+")
        self.file.seek(0)
        return {key: (lap, step) for key, lap, step in map(json.loads, self.file)}

    def log(self, points):
        if (self.run_dir / "faults").exists():
            fault = (self.run_dir / "faults").read_text()
            if fault == "lost answer":
                self.keep(points)
                (self.run_dir / "faults").unlink()
                raise OSError("no answer")
            raise {"down": OSError, "refused": TrackerError}[fault](fault)
        self.keep(points)

    def keep(self, points):
        self.file.writelines(json.dumps([point.key, *point.mark]) + "\\n" for point in points)
        self.file.flush()

    def end(self, run, state, end_ms):
        self.file.close()

    def close(self):
        self.file.close()
"""


TAKEN = {"trackers": "mlflow", "models": "resnet18", "launchers": "two_node", "programs": "script"}


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a tracker that another package brings."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/acme_lines.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = EntryPoints([EntryPoint("lines", "acme_lines", "paceline.trackers")])
    monkeypatch.setattr(node, "_entry_points", lambda: found)
    monkeypatch.delitem(sys.modules, "acme_lines", raising=False)
    monkeypatch.setattr(OPTIONS["tracking"], "_classes", {})
    return "lines"


def record(run: Path, tracker: str, *, settings: str = "{}", **more: Any) -> TrackingState:
    return recorder.record(run, tracker, "paceline", tracker=tracker, settings=settings, **more)


def run_of(tmp_path: Path) -> Path:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 2501))
    folder.end(run, steps=2500)
    return run


def change_source(tmp_path: Path, **by_method: str) -> None:
    """Put lines at the begin of methods of the tracker."""
    text = SOURCE
    for method, lines in by_method.items():
        head = next(line for line in SOURCE.splitlines() if line.startswith(f"    def {method}("))
        text = text.replace(head, "\n        ".join([head, *lines.splitlines()]))
    (tmp_path / "site/acme_lines.py").write_text(text)


def kept(run: Path, name: str = "lines.txt") -> list[int]:
    """The steps of the loss."""
    points = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [step for key, _, step in points if key == "train/loss"]


def test_a_tracker_of_another_package_gets_each_point_once_with_its_own_settings(tmp_path: Path, lines: str) -> None:
    run = run_of(tmp_path)
    assert record(run, lines, settings='{"place": "here.txt"}').state == DONE
    assert record(run, lines, settings='{"place": "here.txt"}', check=True).state == DONE
    assert kept(run, "here.txt") == list(range(1, 2501))
    assert not (run / "tracking.json").exists()


@pytest.mark.slow
def test_points_whose_answer_was_lost_are_there_once(tmp_path: Path, lines: str) -> None:
    run = run_of(tmp_path)
    (run / "faults").write_text("lost answer")
    assert record(run, lines).state == DONE
    assert kept(run) == list(range(1, 2501))


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        ("return {'loss': '3'}", "its begin() returned {'loss': '3'}, not point.mark of each metric's last point"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_tracker_that_begins_wrongly_is_one_that_fails(tmp_path: Path, lines: str, begin: str, said: str) -> None:
    change_source(tmp_path, begin=begin)
    recorded = record(run_of(tmp_path), lines, give_up_s=0.1)
    assert (recorded.state, recorded.message) == (PENDING, f"lines took no (more) records: {said}")


def test_an_option_of_conf_goes_before_one_of_another_package(lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [EntryPoint(name, "acme_lines", f"paceline.{group}") for group, name in TAKEN.items()]
    monkeypatch.setattr(node, "_entry_points", lambda: EntryPoints(taken))
    register()
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))  # it is all tests'
    register.__wrapped__()
    composed = compose_config([])
    assert composed.tracking.tracker is None
    assert composed.model.name == "resnet18"


@pytest.mark.parametrize("name", ["", " ", ".", "..", "x" * 501])
def test_an_experiment_that_can_have_no_folder_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"tracking\.experiment='.*' is no name of an experiment: it is also that of a fo"
    ):
        tracking_config({"experiment": name})
    assert tracking_config({"experiment": "../a b"}).experiment == "../a b"


@pytest.mark.slow
def test_a_secret_of_a_tracker_stands_in_no_file_of_the_run_and_another_one_makes_no_other_record(
    tmp_path: Path, lines: str
) -> None:
    run = run_of(tmp_path)
    change_source(tmp_path, begin="if 'sekret' in self.settings.api_token: raise TrackerError(self.settings.api_token)")
    source = tmp_path / "site/acme_lines.py"
    source.write_text(source.read_text().replace("    place: str", "    api_token: str = ''\n    place: str"))
    recorded = record(run, lines, settings='{"api_token": "sekretvalue99"}')
    assert recorded.message == "lines took no (more) records: ***"
    assert not [path for path in run.rglob("*") if path.is_file() and b"sekretvalue" in path.read_bytes()]
    assert record(run, lines, settings='{"api_token": "another-value"}').state == DONE
    to = Destination(uri=lines, experiment="paceline", tracker=lines, settings='{"api_token": "third-value"}')
    assert to.is_recorded(run)
    assert not replace(to, settings='{"place": "x"}').is_recorded(run)


def test_a_trackers_name_may_have_a_dot(tmp_path: Path) -> None:
    (tmp_path / "tracking.acme.lines.json").write_text("{}")
    assert trackers_of(tmp_path) == ["acme.lines"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "most_s"), [("down", 0.3), ("refused", 60)])
def test_a_tracker_that_fails_is_given_up_and_asked_again_later(
    tmp_path: Path, lines: str, fault: str, most_s: float
) -> None:
    run = run_of(tmp_path)
    (run / "faults").write_text(fault)
    recorded = record(run, lines, give_up_s=most_s)
    assert recorded.state == PENDING
    assert recorded.message.startswith("lines took no (more) records: ")
    (run / "faults").unlink()
    assert record(run, lines).state == DONE
    assert kept(run) == list(range(1, 2501))


def test_a_tracker_is_chosen_by_its_name_with_its_fields_and_without_mlflow(tmp_path: Path, lines: str) -> None:
    told = tracking_config({"tracker": "lines", "enabled": False, "place": "x", "tensorboard": True})
    found = tracking.destinations(vars(told), tmp_path)
    assert [(to.tracker, to.settings) for to in found] == [("lines", '{"place": "x"}'), ("tensorboard", "{}")]
    with pytest.raises(UsageError, match=r"tracking\.tracker='line' is not an option; did you mean lines\?"):
        tracking_config({"tracker": "line"})


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("in_a_sweep", [False, True])
def test_each_destination_gets_a_process_beside_the_run_and_one_that_fails_costs_the_others_nothing(
    tmp_path: Path, in_a_sweep: bool
) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 21))
    blocked = TrackingConfig(uri=f"sqlite:///{run}/config.json", tensorboard=True)  # no database
    config: Any = SimpleNamespace(tracking=blocked)
    trial: Any = SimpleNamespace(folder=SimpleNamespace(path=run), config=config, root=tmp_path)
    said: list[str] = []
    with closing(Shared(SweepFolder(tmp_path), (), tmp_path, lambda _: None)) as shared:
        recorder = shared.recorder(trial) if in_a_sweep else Recorder(run, config, tmp_path)
        recorder.start()
        folder.end(run)
        assert recorder.finish(said.append) is None
    (warning,) = said
    assert warning.startswith("WARNING: not recorded in MLflow yet: ")
    assert Destination(uri="tensorboard", experiment=blocked.experiment, tracker="tensorboard").is_recorded(run)
    assert len(list(run.glob("tensorboard/*/*"))) == 1


class _Endless(socketserver.StreamRequestHandler):
    """Answers as fast as it is read (``pause_s`` 0) or a byte now and then, until it is hung up on."""

    pause_s: float

    def handle(self) -> None:
        part, until = b" " if self.pause_s else bytes(1 << 20), time.monotonic() + HANG_S
        with contextlib.suppress(OSError):
            while time.monotonic() < until:
                self.wfile.write(part)
                time.sleep(self.pause_s)


@pytest.mark.slow
@pytest.mark.parametrize(("pause_s", "limit"), [(0.0, "32 MiB"), (0.1, "1 s")])
def test_a_tracker_whose_server_answers_without_end_is_given_up(
    tmp_path: Path, lines: str, monkeypatch: pytest.MonkeyPatch, pause_s: float, limit: str
) -> None:
    monkeypatch.setattr(recorder, "_CALL_S", 1.0)
    monkeypatch.setattr(recorder, "_GROWTH_BYTES", 32 << 20)
    run = run_of(tmp_path)
    handler = type("Handler", (_Endless,), {"pause_s": pause_s})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        change_source(
            tmp_path, log=f"import socket\nsocket.create_connection({server.server_address}).makefile('rb').read()"
        )
        recorded = record(run, lines, give_up_s=0.1)
        server.shutdown()
    wanted = f"lines took no (more) records: its answer has no end: given up after {limit}"
    assert (recorded.state, recorded.message) == (PENDING, wanted)
    change_source(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_lines")
    importlib.invalidate_caches()
    assert record(run, lines).state == DONE
    assert kept(run) == list(range(1, 2501))


def test_a_tracker_may_use_in_one_call_what_it_opened_in_another_however_bound_to_its_thread(
    tmp_path: Path, lines: str
) -> None:
    run = run_of(tmp_path)
    opens = "import sqlite3\nself.base = sqlite3.connect(':memory:')"
    change_source(tmp_path, begin=opens, keep="self.base.commit()")
    assert record(run, lines).state == DONE
    assert kept(run) == list(range(1, 2501))


def test_a_run_in_weights_and_biases_is_one_offline_record_however_often_it_was_begun(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="an extra that is not in requirements.lock: pip install wandb")
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 2501))
    folder.metrics(run, range(3), at=folder.T0 + 2500)  # a curve whose steps begin anew
    folder.end(run, steps=2500)
    (run / "wandb/.making/wandb/offline-run-cut-short").mkdir(parents=True)
    for _ in range(2):
        assert record(run, "wandb", check=True).state == DONE
    (made,) = (run / "wandb").iterdir()
    rows, about = _read(made)
    assert about.run_id == folder.KEY
    assert about.project == "paceline"
    assert [int(row["paceline/step"]) for row in rows if "train/loss" in row] == [*range(1, 2501), 0, 1, 2]
    assert [float(row["train/loss"]) for row in rows if "train/loss" in row][-3:] == [1, 1 / 2, 1 / 3]
    assert float(rows[0]["_timestamp"]) == folder.T0 + 1
    assert float(rows[-1]["test/accuracy"]) == 0.9


def test_a_record_of_weights_and_biases_that_has_ended_keeps_its_exit_code_when_it_is_closed(tmp_path: Path) -> None:
    codes: list[int] = []
    begun: Any = SimpleNamespace(config={}, finish=lambda exit_code: codes.append(exit_code))
    description: Any = SimpleNamespace(tags={})
    for ends in (True, False):
        (tmp_path / "wandb/.making/wandb/offline-run-1").mkdir(parents=True)
        record = Wandb(WandbConfig(), tmp_path)
        record._run = begun
        if ends:
            record.end(description, "FINISHED", None)
        record.close()
    assert codes == [0, 1]


def _read(made: Path) -> tuple[list[dict[str, str]], Any]:
    """The history of a record and what it says of the run, by wandb's own messages."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows, about = [], None
    for data in _messages((made / f"run-{folder.KEY}.wandb").read_bytes()):
        found = records.Record.FromString(data)
        if found.WhichOneof("record_type") == "run":
            about = found.run
        if found.WhichOneof("record_type") == "history":
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in found.history.item})
    return rows, about


def _messages(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format behind a head of seven bytes: in blocks of 32 KiB, whose end no head crosses."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
