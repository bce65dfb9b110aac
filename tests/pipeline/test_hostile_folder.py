"""A run folder that somebody else wrote: each JSON file of it filled with hostile values, and the verbs run on it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import accept, clean, compare, explain, hosts, reproduce, runs, status, train
from pipeline.cluster import starts
from pipeline.core import documents
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_json
from pipeline.runs import journal
from pipeline.runs.folder import RunFolder
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import CONFIG, finished
from tests.pipeline.test_launch_first_error import PLAN

KEYED = (
    status.status, status.logs, train.attach, hosts.stop, explain.why, reproduce.export, compare.compare,
    accept.accept,
)  # fmt: skip
OF_ALL = (runs.runs, clean.clean)
FILES = (
    "accepted.json", "attempts.json", "attempts/1/localhost.exit.json", "attempts/1/ranks.json",
    "attempts/1/start-aa.json", "checkpoints/final.json", "config.json", "evaluation/report.json", "journal.jsonl",
    "key.json", "metrics.jsonl", "plan.json", "predictions.json", "provenance.json", "result.json", "summary.json",
    "tracking.json",
)  # fmt: skip


def hostile(evil: Path, precious: Path) -> dict[str, Any]:
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    return {
        "a program": str(evil), "a folder of others": str(precious), "upwards": f"../../../..{precious}/x",
        "an option": f"--upload-pack={evil}", "a shell": f"$({evil})`{evil}`;{evil}\n{evil}", "huge": 10**40,
        "below nothing": -1, "none": None, "a list": [], "a mapping": {"launcher": "local", "python": str(evil)},
        "a switch": True, "long": "a" * 20_000, "deep": deep, "no number": float("nan"), "endless": float("inf"),
        "control": "\x1b]0;x\x07\x1b[2J\r\0", "half a character": "\ud800",
    }  # fmt: skip


def filled(item: Any, value: Any) -> Any:
    """The item with each of its fields replaced."""
    if isinstance(item, dict):
        return dict.fromkeys(item, value)
    return [value for _ in item] if isinstance(item, list) else value


def write(path: Path, text: str, value: Any) -> None:
    """Sealed anew where it was: a seal is no signature."""
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(value) + "\n" + text)
    elif isinstance(value, dict) and '"sha256": "' in text[-100:]:
        path.write_text(documents.sealed({name: item for name, item in value.items() if name != "sha256"} or {"a": 1}))
    else:
        path.write_text(json.dumps(value))


def folder_of(runs_dir: Path, evil: Path) -> RunFolder:
    """That of a finished run, which also says that hosts are reached by a program of its own."""
    way = {"launcher": "local", "python": str(evil), "ssh_config": str(evil), "hosts": [], "env": {}}
    config = {**CONFIG, "cluster": way, "notify": {"command": str(evil)}}
    folder = finished(runs_dir, config=config, provenance={"overrides": ["experiment=quickstart"]})
    run_id = journal.new_attempt_id(folder.key, folder.path, 1, "aa")
    nodes = tuple(
        {**asdict(node), "run_dir": f"/w/runs/{run_id}/node{n}", "state_dir": f"/w/runs/{run_id}/node{n}/agent"}
        for n, node in enumerate(PLAN.nodes)
    )
    plan = {**asdict(PLAN), "run_key": folder.key, "run_id": run_id, "nodes": nodes}
    write_json(folder.path / "plan.json", plan)
    write_json(folder.path / "attempts/1/start-aa.json", {"plan": plan, **plan, "cluster": {**way, "settings": {}}})
    assert len(starts.open_starts(folder.path)) == 1
    return folder


def fill(path: Path, text: str, value: Any) -> None:
    """Of a file with lines the first one, before those that it has."""
    try:
        old = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    except (ValueError, IndexError):
        old = dict.fromkeys(("state", "attempt", "time", "detail", "t", "step", "metrics", "run", "digest"))
    write(path, text, filled(old, value))


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_nothing_runs_nothing_is_written_elsewhere_and_the_error_is_one_of_ours(
    name: str, tmp_path: Path, printed: Printed
) -> None:
    """Another value for each file; what would be started is named in every folder."""
    evil, precious = tmp_path / "evil.sh", tmp_path / "precious"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    evil.chmod(0o755)
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    runs_dir = tmp_path / "runs"
    folder = folder_of(runs_dir, evil)
    path = folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    fill(path, text, [*hostile(evil, precious).values()][FILES.index(name)])
    for verb in (*KEYED, *OF_ALL):
        words = [f"run={folder.key}"] if verb in KEYED else []
        words = [folder.key] if verb is compare.compare else words
        words += [f"to={tmp_path}/out.tar.gz"] if verb is reproduce.export else []
        with suppress(PacelineError):  # any other error is a traceback
            printed(verb, runs_dir, *words)
    assert not (tmp_path / "ran").exists()
    assert [(item.name, item.read_text()) for item in precious.iterdir()] == [("thesis.tex", "years")]


def test_a_copied_folder_that_names_a_program_has_none_run_by_stop(tmp_path: Path, printed: Printed) -> None:
    """What it took was `launcher: local` with a `python`, in config.json or in a start that nobody saw the end of."""
    evil = tmp_path / "evil.sh"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    evil.chmod(0o755)
    folder = folder_of(tmp_path / "runs", evil)
    with pytest.raises(
        PacelineError, match=r"was started by cluster\.launcher=pssh, and these words reach hosts by local"
    ):
        printed(hosts.stop, tmp_path / "runs", f"run={folder.key}")
    for start in folder.path.glob("attempts/1/start-*.json"):
        start.unlink()
    (folder.path / "plan.json").unlink()
    assert f"nothing of {folder.key} runs on localhost" in printed(hosts.stop, tmp_path / "runs", f"run={folder.key}")
    assert not (tmp_path / "ran").exists()
