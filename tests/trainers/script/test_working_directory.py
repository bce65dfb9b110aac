"""What a script writes where it stands comes back, and an attempt finds what the one before has left, or nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.program import SCRIPT
from tests.trainers.script.runs import ROOT, ScriptRun
from tests.unreadable import WITHOUT_RIGHTS
from trainers.script.workdir import files_changed_since, laid_out_stamps, lay_out

pytestmark = pytest.mark.slow

SAVES = """
import os, pathlib
pathlib.Path("logs/version_0").mkdir(parents=True)
pathlib.Path("logs/version_0/epoch=1.ckpt").write_text("weights")
pathlib.Path("data.txt").write_text("altered")
pathlib.Path("model.pt").write_text("asked for")
pathlib.Path(os.environ["UP"], "above.txt").write_text("beside the folder")
"""
KILLED = """
import os, pathlib, signal, sys, paceline
log = open("results.csv", "a")
first = int(pathlib.Path(sys.argv[2]).read_text()) if sys.argv[1:] else 0
for step in range(first + 1, 5):
    paceline.log(step, loss=step)
    print(step, file=log, flush=True)
    pathlib.Path("logs").mkdir(exist_ok=True)
    pathlib.Path(f"logs/step={step}.ckpt").write_text(str(step))
    if step == 2 and not first and not pathlib.Path(os.environ["ONCE"]).exists():
        pathlib.Path(os.environ["ONCE"]).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        sys.exit()
"""


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_a_script_wrote_where_it_stands_comes_back_and_that_is_said(run: ScriptRun) -> None:
    snapshot = {"sub/data.txt": "as given", "sub/other.txt": "read alone"}
    run.write(SAVES, files=snapshot, workdir="sub", outputs=["*.pt"])
    said = run.start(env={"UP": str(run.path / "work/node0/above/above/code")})
    assert files(run.path / "outputs") == [
        "model.pt",
        "workdir/data.txt",
        "workdir/logs/version_0/epoch=1.ckpt",
        "workdir/up/above.txt",
    ]
    assert (
        "paceline: note: wrote in its working directory: data.txt, logs/version_0/epoch=1.ckpt, up/above.txt (31 B); "
        "kept in outputs/workdir\n"
    ) in said
    assert {"outputs/workdir/data.txt"} < run.read("summary.json")["outputs_sha256"].keys()
    assert sorted(run.read("outputs.json")) == ["model.pt"]
    assert not (run.path / "work").exists()


MEET = """
import os, pathlib
run = pathlib.Path(os.environ["PACELINE_RUN_DIR"])
places = {name: run / "outputs" / name for name in ("m.pt", "workdir/x.txt", "workdir/up")}
places |= {f"./{name}": pathlib.Path(name) for name in ("m.pt", "x.txt", "up/y.txt", "../y.txt", "a../y.txt")}
del places[{"file": "./up/y.txt", "folder": "workdir/up"}[os.environ["UP"]]]
for name, path in places.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
"""


@pytest.mark.parametrize(
    ("up", "kept"),
    [
        ("file", {"workdir/up": "workdir/up", "workdir/up-2/y.txt": "./../y.txt"}),
        ("folder", {"workdir/up/y.txt": "./up/y.txt", "workdir/up/y-2.txt": "./../y.txt"}),
    ],
)
def test_files_that_meet_at_one_place_are_all_kept_and_those_with_another_name_are_named(
    run: ScriptRun, up: str, kept: dict[str, str]
) -> None:
    said = run.write(MEET, files={"sub/data.txt": ""}, workdir="sub", outputs=["*.pt"]).start(env={"UP": up})
    outputs = run.path / "outputs"
    assert {name: (outputs / name).read_text() for name in files(outputs)} == {
        "m.pt": "m.pt",
        "m-2.pt": "./m.pt",
        "workdir/x.txt": "workdir/x.txt",
        "workdir/x-2.txt": "./x.txt",
        "workdir/a../y.txt": "./a../y.txt",
        **kept,
    }
    assert sorted(run.read("outputs.json")) == ["m-2.pt", "m.pt"]
    assert (
        "paceline: WARNING: files of the working directory whose place another file of the run has: m.pt is "
        f"outputs/m-2.pt, x.txt is outputs/workdir/x-2.txt, ../y.txt is outputs/{[*kept][1]}\n"
    ) in said


def test_files_above_the_project_are_kept_too_and_stay_for_the_next_attempt(run: ScriptRun) -> None:
    script = "import os, pathlib\n"
    script += "for name in ('../results/m.pt', '../../n.txt'):\n"
    script += "    path = pathlib.Path(name); path.parent.mkdir(exist_ok=True); path.write_text(name)\n"
    script += "os.environ['FAILS'] == '1' and exit(3)"
    said = run.write(script, torchrun=False).start(env={"FAILS": "1"}, code=3)
    assert "wrote in its working directory: ../../n.txt, ../results/m.pt; now in work/node0/above/above/code" in said
    said = run.start(env={"FAILS": "0"})
    assert "wrote in its working directory: up/up/n.txt, up/results/m.pt (26 B); kept in outputs/workdir\n" in said
    kept = ("workdir/up/results/m.pt", "workdir/up/up/n.txt")
    assert [(run.path / "outputs" / name).read_text() for name in kept] == ["../results/m.pt", "../../n.txt"]
    assert not (run.path / "work").exists()


@pytest.mark.parametrize(
    ("place", "what"),
    [("pathlib.Path('mine').mkdir(); run.symlink_to('mine')", "a link"), ("run.write_text('')", "a file")],
)
def test_a_script_that_puts_something_else_in_the_place_of_run_does_not_end_well(
    run: ScriptRun, place: str, what: str
) -> None:
    script = f"import os, pathlib\nrun = pathlib.Path(os.environ['PACELINE_RUN_DIR'], 'outputs')\nrun.rmdir()\n{place}"
    said = run.write(script, torchrun=False).start(code=1)
    assert f"has put {what} in the place of its folder {{run}}, {run.path}/outputs; it is to write there\n" in said


def test_what_another_host_wrote_has_a_folder_of_its_own(run: ScriptRun) -> None:
    run.write("open('results.csv', 'w').write('of node 1')").start(node_rank=1)
    assert files(run.path / "nodes") == ["1/dependencies.json", "1/outputs/workdir/results.csv"]
    (run.path / ".paceline").touch()  # the run folder is this host's own: the controller brings it to nodes/1
    assert "kept in nodes/1/outputs/workdir\n" in run.start(node_rank=1)
    assert files(run.path / "outputs") == ["workdir/results.csv"]


def test_above_the_limit_files_are_named_with_what_keeps_them_and_are_not_deleted(run: ScriptRun) -> None:
    script = "for name, size in {'small.txt': 1, 'large.bin': 2000, 'a.pt': 3000}.items():\n"
    script += "    open(name, 'wb').write(bytes(size))"
    said = run.write(script, outputs=["*.pt"], outputs_limit=1000 / 2**30).start()
    assert files(run.path / "outputs") == ["a.pt", "workdir/small.txt"]
    assert (
        "paceline: WARNING: wrote in its working directory more than program.outputs_limit=9.31323e-07 GiB: large.bin "
        f"(2.0 KiB); they stay on this host in {run.path}/work/node0-left/above/above/code; program.outputs=['GLOB'] "
        "or a higher limit bring such files back\n"
    ) in said
    assert (run.path / "work/node0-left/above/above/code/large.bin").stat().st_size == 2000


@pytest.mark.parametrize("resumes", [True, False])
def test_after_a_kill_a_script_that_resumes_finds_its_files_and_one_that_begins_anew_does_not(
    run: ScriptRun, resumes: bool, tmp_path: Path
) -> None:
    once = {"ONCE": str(tmp_path / "once"), "PACELINE_NODE": "key-abc123-2-ffff:0"}
    run.write(KILLED, args={"resume": "{resume}"} if resumes else None, torchrun=False)
    run.start(code=-signal.SIGKILL, env=once)
    said = run.start(env=once)
    wrote, before = run.path / "outputs/workdir", run.path / "attempts/2/before/workdir"
    assert (wrote / "results.csv").read_text().split() == ["1", "2", "3", "4"]
    assert [step for step, _ in run.rows()] == [1, 2, 3, 4]
    if resumes:
        assert (
            "paceline: note: goes on from a checkpoint: {resume} is work/node0/above/above/code/logs/step=2.ckpt\n"
            in said
        )
        assert files(wrote) == [*(f"logs/step={step}.ckpt" for step in range(1, 5)), "results.csv"]
        assert not before.exists()
    else:
        kept = "workdir/results.csv, workdir/logs/step=1.ckpt, workdir/logs/step=2.ckpt"
        assert f"paceline: note: what earlier attempts left is kept in attempts/2/before: {kept}\n" in said
        assert files(before) == ["logs/step=1.ckpt", "logs/step=2.ckpt", "results.csv"]


def test_a_script_that_fails_on_its_checkpoint_is_told_apart_and_can_start_over(run: ScriptRun) -> None:
    script = (
        "import paceline, sys\nopen('args.yaml', 'w').write('lr: 1')\nif sys.argv[1:]: sys.exit('unreadable')\n"
        "paceline.log(1, loss=1); (paceline.checkpoints() / 'run-a').mkdir(exist_ok=True)\n"
        "(paceline.checkpoints() / 'run-a/last.pth.tar').write_text('w'); sys.exit(3)\n"
    )
    run.write(script, args=["{resume}"])
    assert "ended before it had logged" not in run.start(code=3)
    said = run.start(code=1)
    assert (
        "paceline: WARNING: train.py ended before it had logged or saved anything, and had to go on from "
        "checkpoints/run-a/last.pth.tar; if it can't read that, program.resume_pattern='GLOB' names another "
        "checkpoint, and program.resume_pattern=none starts over (what is there is kept)\n"
    ) in said
    said = run.write(script, args=["{resume}"], resume_pattern="none").start(code=3)
    kept = "workdir/args.yaml, checkpoints/run-a/last.pth.tar"
    assert f"what earlier attempts left is kept in attempts/0/before: {kept}\n" in said


def test_an_attempt_that_is_ended_while_it_lays_out_its_files_leaves_none_that_count_as_written(run: ScriptRun) -> None:
    run.write("", files={"a.txt": "1", "b.txt": "2"})
    work = lay_out(run.path, 0)
    (work / "own.txt").write_text("3")
    (work / "b.txt").write_text("altered")
    os.utime(run.path / "code/a.txt", (1, 1))  # the next command writes the snapshot again
    (work / "a.txt").unlink()
    (run.path / "work/node0/laid").mkdir()
    (run.path / "work/node0/laid/a.txt").write_text("1")
    for _ in range(2):
        assert lay_out(run.path, 0) == work
        assert [path.name for path in files_changed_since(work, run.path, laid_out_stamps(run.path, 0))] == [
            "b.txt",
            "own.txt",
        ]
    assert (work / "b.txt").read_text() == "altered"


ODD = """
import os, socket, paceline
paceline.log(1, loss=1.0)
for name in ("good.txt", "secret.txt"):
    (paceline.run_dir() / name).write_text(name)
    open(name, "w").write(name)
    os.chmod(paceline.run_dir() / name, 0 if name == "secret.txt" else 0o600)
os.mkfifo(paceline.run_dir() / "pipe")
os.mkfifo("pipe")
os.symlink("/etc/hostname", paceline.run_dir() / "away")
os.symlink("/etc/hostname", "away")
os.mkdir("closed")
open("closed/in.txt", "w").close()
os.chmod("closed", 0)
open(os.fsencode(paceline.run_dir()) + b"/two\\nlines \\xff.txt", "w").write("odd")
open(b"two\\nlines \\xff.txt", "w").write("odd")
"""


def test_what_cannot_be_kept_is_named_with_its_reason_and_the_rest_is_kept(run: ScriptRun) -> None:
    run = dataclasses.replace(run.write(ODD, torchrun=False), prefix=tuple(WITHOUT_RIGHTS))
    said = run.start()
    closed = run.path / "work/node0-left/above/above/code/closed"
    closed.chmod(0o700)
    out = "a link that leads out of the run folder"
    summary = run.read("summary.json")
    assert summary["not_kept"] == {
        "work/node0/above/above/code/closed": "Permission denied",
        "work/node0/above/above/code/pipe": "a pipe",
        "outputs/away": out,
        "outputs/pipe": "a pipe",
        "outputs/secret.txt": "Permission denied",
    }
    assert (
        "WARNING: not kept with what the script wrote: work/node0/above/above/code/closed (Permission denied), " in said
    )
    assert f"WARNING: what can't be read stays on this host in {closed.parent}\n" in said
    odd = os.fsdecode(b"two\nlines \xff.txt")
    assert "two\\nlines \\udcff.txt" in said
    names = {*summary["outputs_sha256"]}
    assert names >= {"outputs/good.txt", "outputs/workdir/good.txt", f"outputs/{odd}", f"outputs/workdir/{odd}"}
    assert names.isdisjoint(summary["not_kept"])
    files = SCRIPT.files(run.path)
    assert {"outputs/good.txt", f"outputs/{odd}"} <= {*files}
    assert "outputs/away" not in files, "its content is none of the run's"


def test_a_link_out_of_the_run_is_no_output_that_a_script_had_to_leave(run: ScriptRun) -> None:
    run.write("import os; os.symlink('/etc/hostname', os.environ['PACELINE_OUTPUTS'] + '/m.pt')", outputs=["*.pt"])
    assert "error: train.py ended with exit code 0 without *.pt" in run.start(code=1)


FINDS_LATEST = """
import os, paceline, pickle, sys
start = 0
if os.path.exists("NAME"):
    with open("NAME", "rb") as file:
        start = pickle.load(file)
for epoch in range(start + 1, 7):
    print(f"epoch {epoch}", flush=True)
    paceline.log(epoch, loss=1 / epoch)
    with open("NAME.tmp", "wb") as file:
        pickle.dump(epoch, file)
    os.replace("NAME.tmp", "NAME")
    if epoch % 2 == 0 and epoch < 6:
        sys.exit(3)
"""


def epochs_of(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("epoch ")]


def test_it_finds_what_earlier_attempts_left_however_often_it_is_started(run: ScriptRun) -> None:
    run.write(FINDS_LATEST.replace("NAME", "latest.pkl"))
    attempts = [run.start(code=3), run.start(code=3), run.start()]
    assert [epochs_of(said) for said in attempts] == [[1, 2], [3, 4], [5, 6]]
    assert "goes on from a checkpoint: latest.pkl, which train.py looks for by itself\n" in attempts[1]
    assert "is kept in" not in attempts[2]
    assert pickle.loads((run.path / "outputs/workdir/latest.pkl").read_bytes()) == 6
    assert [step for step, _ in run.rows()] == [1, 2, 3, 4, 5, 6]


FINDS_BY_PATTERN = """
import glob, paceline, pickle, sys
found = sorted(glob.glob("ckpt_*.pt"))
start = pickle.load(open(found[-1], "rb")) if found else 0
for epoch in range(start + 1, 5):
    print(f"epoch {epoch}", flush=True)
    paceline.log(epoch, loss=1 / epoch)
    with open(f"ckpt_{epoch}.pt", "wb") as file:
        pickle.dump(epoch, file)
    if epoch == 2:
        sys.exit(3)
"""
PRUNES = 'import glob, sys\nprint("epoch 1")\nopen("ckpt_1.pt", "wb").write(b"1")\nglob.glob("ckpt_*.pt")\nsys.exit(3)'


def test_it_finds_the_newest_of_a_pattern_that_matched_nothing_at_first(run: ScriptRun) -> None:
    run.write(FINDS_BY_PATTERN)
    attempts = [run.start(code=3), run.start()]
    assert [epochs_of(said) for said in attempts] == [[1, 2], [3, 4]]
    assert "goes on from a checkpoint: ckpt_2.pt, which train.py looks for by itself\n" in attempts[1]


def test_a_pattern_of_files_that_it_has_written_before_is_no_search_for_a_checkpoint(run: ScriptRun) -> None:
    run.write(PRUNES)
    attempts = [run.start(code=3), run.start(code=3)]
    assert "what earlier attempts left is kept in attempts/0/before: workdir/ckpt_1.pt" in attempts[1]


@pytest.mark.parametrize(
    ("name", "program"), [("best.pkl", {}), ("results.csv", {}), ("latest.pkl", {"resume_pattern": "none"})]
)
def test_without_a_checkpoint_it_starts_over_and_what_it_left_is_kept(
    run: ScriptRun, name: str, program: dict[str, Any]
) -> None:
    """A best one and a table are no checkpoints."""
    run.write(FINDS_LATEST.replace("NAME", name), **program).start(code=3)
    said = run.start(code=3)
    assert epochs_of(said) == [1, 2]
    assert f"what earlier attempts left is kept in attempts/0/before: workdir/{name}" in said


def test_one_that_a_library_alone_asks_for_before_it_writes_it_is_not_looked_for(
    run: ScriptRun, tmp_path: Path
) -> None:
    library = tmp_path / "site-packages" / "saving.py"
    library.parent.mkdir()
    library.write_text("import os\ndef save(name):\n    os.path.exists(name)\n    open(name, 'w').close()\n")
    run.write("import saving, sys\nprint('epoch 1')\nsaving.save('last.ckpt')\nsys.exit(3)")
    attempts = [run.start(code=3, env={"PYTHONPATH": f"{ROOT}:{library.parent}"}) for _ in range(2)]
    assert "looks for by itself" not in attempts[1]
    assert "what earlier attempts left is kept in attempts/0/before: workdir/last.ckpt" in attempts[1]


def test_a_checkpoint_that_breaks_off_is_none(run: ScriptRun) -> None:
    run.write(FINDS_LATEST.replace("NAME", "latest.pt"))
    run.start(code=3)
    (run.path / "work/node0/above/above/code/latest.pt").write_bytes(b"PK\x03\x04 torn")
    assert epochs_of(run.start(code=3)) == [1, 2]


def test_on_several_nodes_it_starts_over_as_the_others_have_no_such_file(run: ScriptRun) -> None:
    run.write(FINDS_LATEST.replace("NAME", "latest.pkl"))
    run.start(code=3)
    run.start(code=3, node_rank=1)
    assert epochs_of(run.start(code=3)) == [1, 2]
    assert json.loads((run.path / "work/node0/looked_for.json").read_text()) == ["latest.pkl"]
