"""Collecting outputs through a real agent, here on this machine: verified, whole, or an error."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import socket
import stat
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import launchers
from pipeline.cluster.agent.files import folders, results
from pipeline.cluster.agent.node import identity, newest_write_ms
from pipeline.cluster.attempt.running import of_step
from pipeline.cluster.launchers import agent_launcher
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.cluster.launchers.transport import downloads
from pipeline.cluster.launchers.transport.downloads import Received, Source, receive
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.cluster.launchers.transport.streams import Connection
from pipeline.core.errors import TrainingError
from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.specs import SCRIPT_OUTPUTS, Cluster, Host, Outputs
from pipeline.runs.checkpoints import cut_to_newest_checkpoint
from tests.agent_records import HERE, node_start
from tests.pipeline.hostile_tars import hostile, of, raw
from tests.pipeline.test_launch_first_error import PLAN
from tests.small_disk import mounted
from tests.unreadable import WITHOUT_RIGHTS, unreadable
from tests.waiting import promised_s

AGENT = [sys.executable, "-c", BOOTSTRAP]


def node_folder(folder: Path) -> Path:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("step-00000002", "final"):
        (checkpoints / f"{name}.pt").write_bytes(name.encode())
        seal(checkpoints / f"{name}.pt")
    for name in ("metrics.jsonl", "predictions.json", "summary.json"):
        (folder / name).write_text(name)
    return folder


def seal(path: Path, metrics: str = "", **more: object) -> None:
    """The .json beside a checkpoint, as the trainer writes it."""
    side = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "metrics": metrics, **more}
    path.with_suffix(".json").write_text(json.dumps({**side, "digest": sha256_text(canonical_json(side))}))


def collect(node: Path, run_dir: Path, *, final: bool = True) -> None:
    receive(source(node), make(run_dir), final=final)


def source(
    node: Path, argv: list[str] = AGENT, again: Callable[[], list[str]] | None = None, *, node_rank: int = 0
) -> Source:
    start = node_start(identity=identity(HERE), run_dir=str(node), node_rank=node_rank)
    return Source(connection=Connection(host="node0", argv=argv, again=again), node=start, access=HERE)


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_everything_comes_and_what_the_node_dropped_goes(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000001.pt").touch()
    collect(node, run_dir)
    came = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert came == {str(path.relative_to(node)) for path in node.rglob("*") if path.is_file()}


@pytest.mark.parametrize("final", [True, False])
def test_the_summary_of_the_first_host_comes_when_all_of_the_others_is_here(
    final: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed in between, the same command must not take the run for finished."""
    came: list[int] = []

    def receive_own(source: Source, *_: object, **options: object) -> Received:
        came.append(source.node.node_rank)
        return Received(is_complete=True)

    monkeypatch.setattr(downloads, "receive", receive_own)
    monkeypatch.setattr(agent_launcher, "receive", receive_own)
    hosts = (Host(name="node0"), Host(name="node1"))
    launcher = launchers.create(Cluster(launcher="pssh", hosts=hosts, settings=PsshConfig()))
    with closing(launcher):
        launcher.collect(replace(PLAN, outputs=SCRIPT_OUTPUTS), tmp_path, final=final)
    assert came == ([1, 0] if final else [0, 1])


def test_altered_weights_are_refused_and_nothing_is_left_in_place(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    (node / "checkpoints" / "final.pt").write_bytes(b"altered")
    with pytest.raises(TrainingError, match=r"node0 ended well, .* damaged on the way: final\.pt"):
        collect(node, run_dir)
    assert list(run_dir.iterdir()) == []


def test_missing_summary_is_named(tmp_path: Path) -> None:
    node = node_folder(tmp_path / "node")
    (node / "summary.json").unlink()
    with pytest.raises(TrainingError, match=r"ended well, but .* missing: summary\.json$"):
        collect(node, tmp_path / "run")


def test_after_a_failure_only_what_can_be_resumed_from_comes(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    collect(node, run_dir, final=False)
    assert not (run_dir / "summary.json").exists()
    assert (run_dir / "checkpoints" / "step-00000002.pt").exists()


def test_a_scripts_checkpoints_come_during_the_run_but_for_one_that_it_may_be_writing(tmp_path: Path) -> None:
    now = time.time()
    folder = tmp_path / "node/checkpoints"
    (folder / "checkpoint-2").mkdir(parents=True)
    for name, age_s in {"checkpoint-2/model.bin": 5, "last.pt": 4}.items():
        (folder / name).write_text(name)
        os.utime(folder / name, (now - age_s, now - age_s))
    saved = newest_write_ms(str(tmp_path / "node"))
    assert saved == pytest.approx((now - 4) * 1000, abs=2)
    plan = replace(PLAN, outputs=SCRIPT_OUTPUTS)

    def fetch() -> list[str]:
        outputs = of_step(plan, saved).outputs
        assert receive(source(tmp_path / "node"), make(tmp_path / "run"), final=False, outputs=outputs).is_complete
        return sorted(path.read_text() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file())

    assert fetch() == ["checkpoint-2/model.bin", "last.pt"]
    (folder / "last.pt").write_text("half")
    (folder / "checkpoint-4").mkdir()
    (folder / "checkpoint-4/model.bin").write_text("half")
    assert newest_write_ms(str(tmp_path / "node")) == 0
    assert fetch() == ["checkpoint-2/model.bin", "last.pt"]


def test_a_full_disk_here_is_no_trouble_of_the_host(tmp_path: Path) -> None:
    node = node_folder(tmp_path / "node")
    (node / "checkpoints" / "step-00000001.pt").write_bytes(bytes(3_000_000))
    with mounted(tmp_path / "small") as run_dir:
        with pytest.raises(OSError, match="No space left on device"):
            collect(node, run_dir, final=False)
        full = (
            r"^node0 ended well, but its outputs can't be written here yet: No space left on device \(.*-00000001\.pt\)"
        )
        with pytest.raises(TrainingError, match=full) as caught:
            collect(node, run_dir)
        assert caught.value.cause == "outputs"  # it is tried again, and no attempt repeats the training
        assert f"make room on the disk of {run_dir}, of which " in str(caught.value.hint)
        assert [*run_dir.iterdir()] == []


def test_a_host_that_answers_nothing_is_an_error_only_at_the_end(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; sys.exit('gone')"]
    receive(source(tmp_path, argv), tmp_path, final=False)
    with pytest.raises(TrainingError, match="node0 ended well, but its outputs could not be collected yet: gone"):
        receive(source(tmp_path, argv), tmp_path, final=True)


SAYS_TAR = """
import json, sys, time, zlib
sent = sys.stdin.buffer
sent.read(int(next(line for line in iter(sent.readline, b"") if line.strip().isdigit())))
token = json.loads(zlib.decompress(sent.read(int(sent.readline()))))["token"]
print("@paceline " + token + ' {"tar": {}}', flush=True)
time.sleep(600)
"""
STUCK = [sys.executable, "-c", SAYS_TAR]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_a_connection_that_brings_nothing_is_given_up_and_another_one_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "SILENT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(
        TrainingError, match="node0 ended well, but its outputs could not be collected yet: nothing came for 1 s"
    ):
        receive(source(tmp_path, STUCK), make(tmp_path / "run"), final=True)
    assert not receive(source(tmp_path, STUCK), tmp_path / "run", final=False).is_complete
    assert time.monotonic() - began < promised_s(10)
    monkeypatch.setattr(downloads, "SILENT_S", 5.0)  # what the second connection may take to begin
    run_dir = make(tmp_path / "again")
    node = node_folder(tmp_path / "node")
    assert receive(source(node, STUCK, lambda: AGENT), run_dir, final=True).is_complete
    assert (run_dir / "summary.json").read_bytes() == (node / "summary.json").read_bytes()
    assert sorted(path.name for path in run_dir.iterdir() if path.name.startswith(".")) == []


ROWS = [json.dumps({"t": 1.0, "step": step, "epoch": 1, "metrics": {}}) + "\n" for step in (1, 2, 3)]


def run_with_checkpoints(folder: Path, metrics: bytes) -> Path:
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "checkpoints").mkdir()
    for step in (1, 2):
        path = folder / "checkpoints" / f"step-0000000{step}.pt"
        path.write_bytes(b"weights")
        seal(path, "".join(ROWS[:step]))
    return folder


def test_metrics_after_the_last_checkpoint_are_cut_off(tmp_path: Path) -> None:
    run_with_checkpoints(tmp_path, "".join(ROWS).encode() + b'{"step": 4')
    assert list(cut_to_newest_checkpoint(tmp_path)) == []
    assert (tmp_path / "metrics.jsonl").read_text() == ROWS[0] + ROWS[1]


@pytest.mark.parametrize("line", [b"\0" * 40, b"\xff\xfe", b"[1, 2]", b"null", b'{"step": 2}', b"[" * 100_000])
def test_a_damaged_line_of_metrics_is_named_and_the_checkpoint_has_it(tmp_path: Path, line: bytes) -> None:
    run_with_checkpoints(tmp_path, ROWS[0].encode() + line + b"\n" + ROWS[2].encode())
    (warning,) = cut_to_newest_checkpoint(tmp_path)
    assert warning == "metrics.jsonl: line 2 was damaged; all that the checkpoint knows is there again"
    assert (tmp_path / "metrics.jsonl").read_text() == ROWS[0] + ROWS[1]


@pytest.mark.parametrize("damage", ["weights", "no .json", ".json"])
def test_a_damaged_newest_checkpoint_is_set_aside_before_anything_is_sent(tmp_path: Path, damage: str) -> None:
    run_with_checkpoints(tmp_path, "".join(ROWS).encode())
    newest = tmp_path / "checkpoints" / "step-00000002.pt"
    side = newest.with_suffix(".json")
    if damage == "weights":
        newest.write_bytes(b"weighty")
    elif damage == "no .json":
        side.unlink()
    else:
        side.write_text(side.read_text().replace('\\"step\\": 2', '\\"step\\": 5'))
    (warning,) = cut_to_newest_checkpoint(tmp_path)
    assert warning.startswith("checkpoint step-00000002.pt is skipped: ")
    assert (tmp_path / "metrics.jsonl").read_text() == ROWS[0]
    assert [path.name for path in newest.parent.glob("*.pt")] == ["step-00000001.pt"]
    assert list(cut_to_newest_checkpoint(tmp_path)) == []  # said once


def test_without_a_checkpoint_the_metrics_begin_anew(tmp_path: Path) -> None:
    assert list(cut_to_newest_checkpoint(tmp_path)) == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_good_checkpoint_stays_when_no_newer_one_came_whole(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    collect(node, run_dir, final=False)
    (node / "checkpoints" / "best.pt").write_bytes(b"best")
    seal(node / "checkpoints" / "best.pt")
    (node / "checkpoints" / "step-00000002.pt").rename(node / "checkpoints" / "step-00000004.pt")
    (node / "checkpoints" / "step-00000004.json").write_text('{"sha')
    collect(node, run_dir, final=False)
    names = {path.name for path in (run_dir / "checkpoints").glob("*.pt")}
    assert names == {"best.pt", "step-00000002.pt"}


ANSWERS = SAYS_TAR.replace("time.sleep(600)", "sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())")
NOT_ASKED_FOR = (
    "data/train_images.npy", "attempts/1/start-aa.json", "config.json", "plan.json", "code/trainers/classifier.py",
    "checkpoints/evil.sh", "checkpoints/step-1.pt/x", "outputs/x", "slurm/x/request", ".agents/x.json",
    "metrics.jsonl.x",
)  # fmt: skip


def trees(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("case", [*hostile("checkpoints/step-1.pt"), *NOT_ASKED_FOR])
def test_of_a_hostile_answer_nothing_is_taken_and_the_host_is_named(case: str, tmp_path: Path) -> None:
    sent, why = hostile("checkpoints/step-1.pt").get(
        case, (raw(of("metrics.jsonl"), of(case)), f"it sent {case!r}, which it was not asked for")
    )
    (tmp_path / "answer").write_bytes(sent)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train_images.npy").write_text("the shared pack")
    run_dir = make(tmp_path / "run")
    (run_dir / "data").symlink_to(tmp_path / "pack")
    before = trees(tmp_path)
    argv = [sys.executable, "-c", ANSWERS, str(tmp_path / "answer")]
    with pytest.raises(TrainingError, match=f"node0: its outputs could not be collected: .*{re.escape(why)}"):
        receive(source(tmp_path, argv), run_dir, final=True)
    assert not receive(source(tmp_path, argv), run_dir, final=False).is_complete
    assert trees(tmp_path) == before
    assert not Path("/tmp/evil-absolute").exists()


def test_names_with_a_backslash_or_a_colon_come_as_any_other(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), make(tmp_path / "run")
    names = ["a\\b.txt", "C:x", "C:\\Windows\\x", "new\nline", "\\"]
    for name in names:
        (make(node / "outputs") / name).write_text(name)
    receive(source(node), run_dir, final=True, outputs=SCRIPT_OUTPUTS)
    assert {path.name: path.read_text() for path in (run_dir / "outputs").iterdir()} == {name: name for name in names}


def test_a_path_that_is_too_long_here_stays_on_the_host_and_the_rest_comes(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), make(tmp_path / ("r" * 200))
    deep = node / "outputs"
    while len(str(deep)) < 3900:
        deep /= "d" * 99
    deep.mkdir(parents=True)
    for path in (deep / "long.txt", node / "outputs" / "z.txt"):
        path.write_text(path.name)
    said = receive(source(node), run_dir, final=True, outputs=SCRIPT_OUTPUTS).notes
    assert [path.name for path in (run_dir / "outputs").rglob("*") if path.is_file()] == ["z.txt"]
    assert said[0].startswith(f"node0: can't be written here, so it stays in {node} there: 'outputs/dddd")
    assert said[0].endswith("(File name too long)")


@pytest.mark.parametrize("linked", ["checkpoints", "outputs"])
def test_outputs_are_not_written_through_a_link_of_the_run_folder(linked: str, tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), make(tmp_path / "run")
    (node / linked).mkdir(exist_ok=True)
    (node / linked / "new").write_text("new")
    precious = make(tmp_path / "precious")
    (precious / "thesis.tex").write_text("years")
    (run_dir / linked).symlink_to(precious)
    why = f"{run_dir / linked} is a link, and outputs are written into the run folder alone"
    with pytest.raises(TrainingError, match=re.escape(why)):
        receive(source(node), run_dir, final=True, outputs=SCRIPT_OUTPUTS)
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


def test_what_comes_can_not_be_executed_and_a_link_to_a_file_comes_as_its_content(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    (node / "outputs" / "deep").mkdir(parents=True)
    (node / "outputs" / "deep" / "w.sh").write_text("#!/bin/sh\n")
    (node / "outputs" / "deep" / "w.sh").chmod(0o6777)
    (node / "outputs" / "last").symlink_to("deep/w.sh")
    os.link(node / "outputs" / "deep" / "w.sh", node / "outputs" / "other")
    (node / "outputs" / "loop").symlink_to(".")
    (node / "outputs" / "gone").symlink_to("nowhere")
    os.utime(node / "outputs" / "deep" / "w.sh", (1e9, 1e9))
    receive(source(node), make(run_dir), final=True, outputs=SCRIPT_OUTPUTS)
    came = {path.name: path for path in (run_dir / "outputs").rglob("*") if not path.is_dir()}
    assert sorted(came) == ["last", "other", "w.sh"]
    for path in came.values():
        assert stat.S_ISREG(path.lstat().st_mode)
        assert path.lstat().st_mode & 0o7111 == 0
        assert path.read_text() == "#!/bin/sh\n"
        assert path.lstat().st_mtime == 1e9


def test_of_another_host_only_what_it_wrote_itself_comes_and_what_is_too_much_stays_and_is_named(
    tmp_path: Path,
) -> None:
    node, run_dir, now = tmp_path / "node", make(tmp_path / "run"), time.time()
    for name, age_s in {
        "checkpoints/c-2/model.bin": 60.0,  # the first host's, which was sent there
        "checkpoints/c-2/rng_1.pth": 60.0,
        "checkpoints/c-4/rng_1.pth": 0.0,
        "work/node1/above/above/code/train.py": 60.0,
        "work/node1/above/above/code/states.csv": 60.0,
    }.items():
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        (node / name).write_text(name)
        os.utime(node / name, (now - age_s, now - age_s))
    (node / "work/node1/above/above/code/link.txt").symlink_to("/etc/passwd")
    stamps = {
        name: (node / name).stat() for name in ("checkpoints/c-2/model.bin", "work/node1/above/above/code/train.py")
    }
    given = {name: [stamp.st_size, stamp.st_mtime_ns] for name, stamp in stamps.items()}
    (node / "work/node1/given.json").write_text(json.dumps(given))
    said: list[str] = []

    def fetch(outputs: Outputs) -> list[str]:
        received = receive(source(node, node_rank=1), run_dir, final=False, outputs=outputs)
        assert received.is_complete
        said.extend(received.notes)
        return sorted(path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file())

    others = replace(SCRIPT_OUTPUTS, resume=SCRIPT_OUTPUTS.others, needed=())
    during = of_step(replace(PLAN, outputs=SCRIPT_OUTPUTS), 1).outputs
    assert fetch(replace(during, needed=())) == ["nodes/1/checkpoints/c-2/rng_1.pth"]  # the other one isn't settled
    assert fetch(replace(others, limit_bytes=10)) == [
        "nodes/1/checkpoints/c-2/rng_1.pth",
        "nodes/1/checkpoints/c-4/rng_1.pth",
    ]
    assert said == [
        "node0: what the script wrote in its working directory (38 B) is more than program.outputs_limit=9.31323e-09 "
        f"GiB and stays there in {node}/work/node1/above; a higher limit brings such files back"
    ]
    folders.remove_ours([str(node)])
    assert (node / "work/node1/above/above/code/states.csv").exists()
    assert fetch(others)[2:] == ["nodes/1/work/node1/above/above/code/states.csv"]  # nor what a link leads to


def test_what_a_host_cannot_read_is_named_and_the_rest_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, run_dir = tmp_path / "node", tmp_path / "run"
    folder = node / "outputs"
    (folder / "closed").mkdir(parents=True)
    (node / "work/node0/above/above/code").mkdir(parents=True)
    (node / "summary.json").write_text("{}")
    for name in ("good.txt", "secret.txt", "closed/in.txt"):
        (folder / name).write_text(name)
    (folder / os.fsdecode(b"two\nlines \xff.txt")).write_text("odd")
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    (folder / "away").symlink_to("/etc/passwd")
    (folder / "etc").symlink_to("/etc")
    (folder / "gone").symlink_to("nowhere")
    (folder / "near").symlink_to("good.txt")
    with unreadable(folder / "secret.txt", folder / "closed"):
        without_rights = source(node, [*WITHOUT_RIGHTS, *AGENT])
        received = receive(without_rights, make(run_dir), final=True, outputs=SCRIPT_OUTPUTS)
    assert received.is_complete
    came = {path.name for path in (run_dir / "outputs").iterdir()}
    assert came == {"good.txt", "near", os.fsdecode(b"two\nlines \xff.txt")}
    out = "a link that leads out of the run folder"
    assert [*received.notes] == [
        f"node0: not brought from there: outputs/away ({out}), outputs/closed (Permission denied), "
        f"outputs/etc ({out}), outputs/pipe (a pipe), outputs/secret.txt (Permission denied), outputs/socket (a socket)"
    ]
    assert folders.holds_unfetched(str(node)), "what can't be read isn't removed with the host's folder"


def test_a_file_that_is_removed_while_others_are_sent_is_named() -> None:
    archive = results.RunArchive("/nowhere", None, {})
    with tarfile.open(fileobj=io.BytesIO(), mode="w|") as tar:
        archive._add_file(tar, "outputs/a.pt")
    assert [*archive._below("outputs/b.pt")] == []
    assert archive.unsent == dict.fromkeys(("outputs/a.pt", "outputs/b.pt"), "it was removed meanwhile")


def test_an_answer_that_breaks_off_behind_the_tar_is_asked_for_again(tmp_path: Path) -> None:
    node = node_folder(tmp_path / "node")
    cut = "import sys; all = sys.stdin.buffer.read(); sys.stdout.buffer.write(all[: all.rindex(b'@paceline')])"
    words = ["sh", "-c", f"{shlex.join(AGENT)} | {shlex.join([sys.executable, '-c', cut])}"]
    with pytest.raises(TrainingError, match="its answer broke off behind the tar"):
        receive(source(node, words), make(tmp_path / "run"), final=True)
    assert receive(source(node, words, lambda: AGENT), make(tmp_path / "run"), final=True).is_complete
    assert (tmp_path / "run/summary.json").exists()
