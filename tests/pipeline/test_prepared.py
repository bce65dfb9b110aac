"""A torchrun that is begun ahead becomes what a plain one would have been, or goes when nobody needs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent import prepared, torchrun
from pipeline.cluster.agent.commands import START
from pipeline.cluster.agent.prepared import Prepared
from pipeline.cluster.agent.processes import start_time
from pipeline.cluster.launchers.payload import BOOTSTRAP, opening, prepare
from pipeline.core.places import HOME
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is prepared elsewhere")
MARK = "key-attempt:0"
SHOW = """
import json, os, sys
file = open("/proc/self/environ", "rb")
shown = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "site": "sitecustomize" in sys.modules}
shown["path"] = list(dict.fromkeys(sys.path))[:2]
shown |= {"mark": b"PACELINE_NODE=%b" in file.read().split(bytes(1)), "ahead": "graphlib" in sys.modules}
print(json.dumps(shown | {"pid": os.getpid(), "name": __name__, "stdin": sys.stdin.read()}))
sys.exit(3)
""".replace("%b", MARK)

PASSES_ON = """
import os, sys; from pathlib import Path; from trainers.script.prepared import PreparedTorchrun
child = PreparedTorchrun.found(); env = {**os.environ, "PYTHONPATH": sys.argv[1]}
assert child.become([sys.executable, sys.argv[1] + "/show.py"], cwd=Path.cwd(), env=env)
sys.exit(10 + child.wait(60.0))
"""

DECLINES = PASSES_ON.replace("assert child", "assert not child").replace(
    "sys.exit(10 + child.wait(60.0))", "child.close(); sys.exit(7)"
)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program lies that is prepared in torchrun's place: torch takes seconds to import."""
    text = prepared.program().decode().replace(f'FILE = "{torchrun.FILE}"', 'FILE = "show.py"')
    text = text.replace(f'IMPORTS = ("{torchrun.IMPORTS[0]}", "{torchrun.IMPORTS[1]}")', 'IMPORTS = ("graphlib",)')
    monkeypatch.setattr(prepared, "program", text.encode)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "show.py").write_text(SHOW)
    (tmp_path / "code" / "sitecustomize.py").touch()
    return tmp_path


def environment(run_dir: Path, **more: str) -> dict[str, str]:
    given = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(run_dir / "code"), torchrun.MARK: MARK}
    return {**given, "OMP_NUM_THREADS": "3", **more}


def asked(*, script: bool) -> dict[str, Any]:
    return {"script": script, "env_passed": [], "env": {"PYTHONHASHSEED": "0"}}


def become(run_dir: Path, child: Prepared, argv: list[str], env: dict[str, str]) -> dict[str, Any]:
    """What the program shows of itself."""
    with (run_dir / "log").open("wb") as output:
        assert child.become(argv, env, str(run_dir), output)
    wait_until(lambda: child.poll() is not None)
    shown: dict[str, Any] = json.loads((run_dir / "log").read_text())
    return shown


def test_it_becomes_torchrun_as_a_plain_start_would_have_made_it_and_keeps_its_id(run_dir: Path) -> None:
    more = {"PACELINE_DEVICE": "cpu", "API_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "1"}
    child, env = Prepared(asked(script=False)), environment(run_dir, **more)
    shown = become(run_dir, child, [sys.executable, f"{run_dir}/code/show.py", "--nnodes=1"], env)
    plain = subprocess.run(
        [sys.executable, f"{run_dir}/code/show.py", "--nnodes=1"], env=env, cwd=run_dir, stdout=subprocess.PIPE
    )
    assert shown == {**json.loads(plain.stdout), "pid": child.pid, "ahead": True}
    assert (shown["env"]["OMP_NUM_THREADS"], shown["site"], shown["mark"]) == ("3", True, True)
    assert child.returncode == plain.returncode == 3


@pytest.mark.parametrize("script", [False, True])
def test_what_the_imports_say_when_they_crash_is_in_the_log(run_dir: Path, script: bool) -> None:
    (run_dir / "graphlib.py").write_text(
        "import os, select; os.write(2, b'FATAL: no AVX-512\\n'); select.select([0], [], []); os.abort()"
    )
    (run_dir / "script.py").write_text(PASSES_ON)
    child = Prepared({**asked(script=script), "env": {"PYTHONPATH": str(run_dir)}})
    argv = [sys.executable, str(run_dir / "script.py"), str(run_dir / "code")]
    with (run_dir / "log").open("wb") as output:
        argv = argv if script else [sys.executable, f"{run_dir}/code/show.py"]
        assert child.become(argv, environment(run_dir, PYTHONPATH=str(HOME)), str(run_dir), output)
    wait_until(lambda: child.poll() is not None)
    assert ((run_dir / "log").read_text(), child.returncode) == ("FATAL: no AVX-512\n", 4 if script else -6)


def test_what_the_imports_warn_of_is_in_the_log_once(run_dir: Path) -> None:
    (run_dir / "lib").mkdir()
    (run_dir / "lib" / "graphlib.py").write_text("import os; os.write(2, b'an old driver\\n')")
    child = Prepared({**asked(script=False), "env": {"PYTHONPATH": str(run_dir / "lib"), "PYTHONHASHSEED": "0"}})
    with (run_dir / "log").open("wb") as output:
        assert child.become([sys.executable, f"{run_dir}/code/show.py"], environment(run_dir), str(run_dir), output)
    wait_until(lambda: child.poll() is not None)
    said, shown = (run_dir / "log").read_text().splitlines()
    assert (said, json.loads(shown)["ahead"]) == ("an old driver", True)


@pytest.mark.parametrize("what", ["variable", "module", "program"])
def test_what_was_not_foreseen_is_started_plainly_by_the_same_process(run_dir: Path, what: str) -> None:
    child, argv = Prepared(asked(script=False)), [sys.executable, f"{run_dir}/code/show.py"]
    env = environment(run_dir, **({"TORCH_SHOW_CPP_STACKTRACES": "1"} if what == "variable" else {}))
    if what == "module":
        (run_dir / "code" / "graphlib.py").touch()
    if what == "program":
        (run_dir / "code" / "other.py").write_text(SHOW)
        argv = [sys.executable, f"{run_dir}/code/other.py"]
    shown = become(run_dir, child, argv, env)
    assert (shown["ahead"], shown["mark"], shown["pid"], shown["stdin"]) == (False, True, child.pid, "")


def test_another_interpreter_is_not_what_was_prepared(run_dir: Path) -> None:
    child = Prepared(asked(script=False))
    with (run_dir / "log").open("wb") as output:
        assert not child.become(["/usr/bin/env", "true"], environment(run_dir), str(run_dir), output)
    assert child.returncode == -9


@pytest.mark.parametrize("script", [False, True])
def test_one_that_somebody_has_stopped_is_not_waited_for(run_dir: Path, script: bool) -> None:
    child = Prepared(asked(script=script))
    wait_until(lambda: waits(child.pid, script=script))
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().split()[2] == "T")
    with (run_dir / "log").open("wb") as output:
        assert not child.become([sys.executable, f"{run_dir}/code/show.py"], environment(run_dir), str(run_dir), output)
    assert child.returncode == -9


def test_a_script_whose_torchrun_was_stopped_starts_another(run_dir: Path) -> None:
    (run_dir / "script.py").write_text(DECLINES)
    child, code = Prepared(asked(script=True)), str(run_dir / "code")
    wait_until(lambda: waits(child.pid, script=True))
    (below,) = map(int, Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())
    os.kill(below, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{below}/stat").read_text().split()[2] == "T")
    with (run_dir / "log").open("wb") as output:
        argv, env = [sys.executable, str(run_dir / "script.py"), code], environment(run_dir, PYTHONPATH=str(HOME))
        assert child.become(argv, env, str(run_dir), output)
    wait_until(lambda: child.poll() is not None)
    assert ((run_dir / "log").read_text(), child.returncode) == ("", 7)


def test_a_script_has_its_own_process_between_and_that_one_gets_the_prepared_torchrun(run_dir: Path) -> None:
    (run_dir / "script.py").write_text(PASSES_ON)
    child, code = Prepared(asked(script=True)), str(run_dir / "code")
    env = environment(run_dir, PYTHONPATH=str(HOME))
    shown = become(run_dir, child, [sys.executable, str(run_dir / "script.py"), code], env)
    assert (shown["ahead"], shown["mark"], shown["site"], child.returncode) == (True, True, True, 13)
    assert shown["pid"] != child.pid
    assert "PACELINE_TORCHRUN" not in shown["env"]


def waits(pid: int, *, script: bool) -> bool:
    """For its order: its imports are over (it has a second name for the socket), or what imports is below it.

    That has begun its program by then: until it has, whoever forked it waits, however often it is stopped.
    """
    if script:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return bool(below) and "/dev/fd/" in Path(f"/proc/{below[0]}/cmdline").read_text()
    streams = [stream.readlink() for stream in Path(f"/proc/{pid}/fd").iterdir()]
    return streams.count(Path(f"/proc/{pid}/fd/0").readlink()) > 1


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("system", ["kills it", "lets it go on"])
def test_no_order_is_followed_once_the_supervisor_is_dead(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, script: bool, system: str
) -> None:
    if system == "lets it go on":  # as where prctl is forbidden
        text = prepared.program().replace(b"_PDEATHSIG = 1", b"_PDEATHSIG = -1")
        monkeypatch.setattr(prepared, "program", lambda: text)
        monkeypatch.setattr(torchrun, "_PR_SET_PDEATHSIG", -1)
    monkeypatch.setattr(Prepared, "_stopped", lambda _: False)
    told, tell = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        try:
            child = Prepared(asked(script=script))
            wait_until(lambda: waits(child.pid, script=script))
            os.kill(child.pid, signal.SIGSTOP)  # it imports for as long as anybody likes
            with (run_dir / "log").open("wb") as output:
                child.become([sys.executable, f"{run_dir}/code/show.py"], environment(run_dir), str(run_dir), output)
            os.write(tell, str(child.pid).encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(supervisor, 0)
    child_pid = int(os.read(told, 20))
    if system == "lets it go on":
        os.kill(child_pid, signal.SIGCONT)
    wait_until(lambda: start_time(child_pid) is None)
    os.close(told)
    os.close(tell)
    assert (run_dir / "log").read_bytes() == b""


def test_a_mark_that_finds_no_room_is_started_plainly(run_dir: Path) -> None:
    child = Prepared(asked(script=False))
    with (run_dir / "log").open("wb") as output:
        long = environment(run_dir, **{torchrun.MARK: "key-" * 100})
        assert not child.become([sys.executable, f"{run_dir}/code/show.py"], long, str(run_dir), output)
    assert child.returncode == -9


@pytest.mark.parametrize("of_script", [False, True])
def test_all_that_was_prepared_ends_with_the_controller(of_script: bool) -> None:
    mine = {"PACELINE_TEST": uuid.uuid4().hex}

    def alive() -> list[int]:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                found += [int(environ.parent.name)] if mine["PACELINE_TEST"].encode() in environ.read_bytes() else []
            except OSError:  # it has just ended
                continue
        return found

    agent = subprocess.Popen([sys.executable, "-E", "-c", BOOTSTRAP], stdin=subprocess.PIPE)
    assert agent.stdin is not None
    agent.stdin.write(opening(START) + prepare(mine, of_script=of_script))
    agent.stdin.flush()
    if len(os.sched_getaffinity(0)) > 1:
        wait_until(lambda: bool(alive()))
    agent.stdin.close()
    assert agent.wait() == 0
    wait_until(lambda: not alive())
