"""Which files that a run read aren't in its key, as real processes open them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.trainers.script.runs import ROOT, ScriptRun
from trainers.observation.input_changes import first_change
from trainers.observation.observer import HASHED_BYTES, SKIP
from trainers.observation.processes import zones_of_host
from trainers.observation.unkeyed import Unkeyed, unkeyed_warnings

pytestmark = pytest.mark.slow

READS = """
    import importlib, linecache, os, pathlib, sqlite3, subprocess, sys, threading, multiprocessing
    here = os.environ["PROJECT"]
    def at(name): return os.path.join(here, name)
    def read(name): open(at(name)).close()
    if __name__ == "__main__":
        open(at("by_open.txt")).close()
        pathlib.Path(at("by_path.txt")).read_bytes()
        os.close(os.open(at("by_os.txt").encode(), os.O_RDONLY))
        exec(open(at("by_exec.py")).read())
        linecache.getlines(at("by_linecache.py"))
        sqlite3.connect(at("by_sqlite.db")).close()
        os.chdir(here); open("by_chdir.txt").close(); os.chdir("/")
        open(at("by_link.txt")).close()
        thread = threading.Thread(target=read, args=["by_thread.txt"]); thread.start(); thread.join()
        if os.fork() == 0: read("by_fork.txt"); os._exit(0)
        os.wait()
        subprocess.run([sys.executable, "-c", f"open({at('by_child.txt')!r})"], check=True)
        subprocess.run(["cat", at("by_cat.txt")], check=True)
        worker = multiprocessing.get_context("spawn").Process(target=read, args=["by_spawn.txt"])
        worker.start(); worker.join()
        sys.path.append(here)
        importlib.import_module("by_" + "name")
        assert not pathlib.Path(__file__).with_name("by_exists.txt").exists()
"""
KINDS = [
    "by_cat.txt", "by_chdir.txt", "by_child.txt", "by_exec.py", "by_exists.txt", "by_fork.txt", "by_linecache.py",
    "by_link.txt", "by_name.py", "by_open.txt", "by_os.txt", "by_path.txt", "by_spawn.txt", "by_sqlite.db",
    "by_thread.txt",
]  # fmt: skip


def test_files_of_the_project_are_found_however_they_are_read(run: ScriptRun) -> None:
    run.write(textwrap.dedent(READS))
    for name in KINDS:
        (run.project / name).write_text("")
    (run.project / "by_link.txt").replace(run.project / "target.txt")
    (run.project / "by_link.txt").symlink_to("target.txt")
    run.start(env={"PROJECT": str(run.project)})
    assert run.read("summary.json")["unkeyed"] == {
        name: "looked for" if name == "by_exists.txt" else "read" for name in KINDS
    }


@pytest.mark.parametrize("data", ["data", "data/x.bin"])
def test_what_is_keyed_written_by_the_run_or_elsewhere_is_no_finding(run: ScriptRun, tmp_path: Path, data: str) -> None:
    script = """
        import json, os, pathlib, sys, paceline, keyed, sub.keyed
        project = pathlib.Path(os.environ["PROJECT"])
        (project / "keyed.py").read_text()
        (project / "old.txt").write_text("new"); (project / "old.txt").read_text()
        os.makedirs(project / "data", exist_ok=True)
        (project / "data").joinpath("x.bin").read_bytes(); (project / ".git" / "HEAD").read_text()
        for folder in (paceline.run_dir(), paceline.checkpoints(), pathlib.Path()):
            (folder / "own.txt").write_text("x"); (folder / "own.txt").read_text()
        for path in ("/etc/hosts", os.environ["OUTSIDE"], project):
            try: open(path).close()
            except OSError: pass
        try: open("never.txt")
        except FileNotFoundError: pass
        try: import nowhere
        except ImportError: pass
    """
    run.write(textwrap.dedent(script), files={"keyed.py": "", "sub/keyed.py": "", "sub/__init__.py": ""})
    (tmp_path / "outside.txt").touch()
    for name in ("old.txt", "x.bin", ".git/HEAD", "data/.keep"):
        (run.project / name).parent.mkdir(exist_ok=True)
        (run.project / name).touch()
    if data == "data":
        (run.project / "data/x.bin").touch()
    else:  # as a data pack has one file of this computer
        (run.project / "data/x.bin").symlink_to(run.project / "x.bin")
    words = run.words((sys.executable,), 0)
    words[words.index("--data") + 1] = str(run.project / data)
    env = {"PROJECT": str(run.project), "OUTSIDE": str(tmp_path / "outside.txt"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "key is not complete" in done.stdout) == (0, False), done.stdout + done.stderr
    assert run.read("summary.json")["unkeyed"] == {}


@pytest.mark.ci
@pytest.mark.long
def test_a_script_that_logs_to_mlflow_by_itself_has_a_complete_key(run: ScriptRun, tmp_path: Path) -> None:
    """MLflow looks for .git, a file in a worktree, in all folders above, and reads its telemetry.json in the home."""
    home = tmp_path / "home"
    settings = home / ".config/own/rate.txt"
    for path in (settings, home / ".config/mlflow/telemetry.json"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    run.write(f"import mlflow\nmlflow.log_metric('loss', 1.0)\nopen({str(settings)!r}).close()")
    (run.project / ".git").write_text("gitdir: /nowhere\n")
    said = run.start(env={"HOME": str(home), "XDG_CONFIG_HOME": "", "DO_NOT_TRACK": "", "CI": ""})
    assert "key is not complete" not in said
    record = run.read("dependencies.json")
    assert (run.read("summary.json")["unkeyed"], [*record["files"]]) == ({}, [str(settings)])
    assert str(ROOT) not in record["folders"]


def test_what_the_snapshot_lacks_is_named_although_the_run_failed_for_it(run: ScriptRun) -> None:
    run.write("import importlib\ntry: importlib.import_module('plugin')\nexcept ImportError: open('configs/a.yaml')")
    (run.project / "configs").mkdir()
    for name in ("plugin.py", "configs/a.yaml"):
        (run.project / name).touch()
    said = run.start(code=1)
    wanted = "configs/a.yaml and plugin.py were looked for and aren't in the snapshot; add them to program.inputs"
    typed = "'program.inputs=[configs/a.yaml,plugin.py]'"
    assert f"paceline: WARNING: the key is not complete: {wanted}: {typed}\n" in said
    said = run.start(code=1, env={"PACELINE_PROJECT": "/nowhere"})
    assert "configs/a.yaml was looked for and isn't in the snapshot; add it" in said
    assert ", or all of its folder: 'program.inputs=[configs/*]'\n" in said


LISTS = """
    import glob, importlib, os, pathlib, pkgutil, plugins
    print(glob.glob("configs/*.yaml"), [*pathlib.Path("settings").glob("*.toml")],)
    print([*pkgutil.iter_modules(plugins.__path__)], [*pathlib.Path("plugins").glob("*.json")])
    for name in ("lists", "never"):
        try: os.listdir(name)
        except FileNotFoundError: pass
    for name in ("compiled", "spaces.inner.leaf"):
        try: importlib.import_module(name)
        except ImportError: pass
"""


def test_a_folder_whose_names_decide_is_found_where_the_copy_lacks_some(run: ScriptRun) -> None:
    run.write(textwrap.dedent(LISTS), files={"plugins/__init__.py": "", "plugins/known.py": "", "plugins/a.json": ""})
    extension = f"compiled{EXTENSION_SUFFIXES[0]}"
    hidden = ["configs/a.yaml", "lists/x.txt", "plugins/b.json", "plugins/other.py", "settings/b.toml", extension]
    for name in (*hidden, "spaces/inner/leaf.py", "plugins/no_plugin.txt"):
        (run.project / name).parent.mkdir(exist_ok=True, parents=True)
        (run.project / name).touch()
    run.start()
    named = sorted([*hidden, "lists/", "spaces/"])
    named.remove("lists/x.txt")
    assert sorted(run.read("summary.json")["unkeyed"]) == named


def test_what_a_run_by_hand_has_left_of_its_own_results_is_no_input(run: ScriptRun) -> None:
    """Lightning and others ask whether a file is there before they write it, and list their folder for a version."""
    run.write(
        "import os, pathlib\n"
        "logs = pathlib.Path('logs')\n"
        "try: os.listdir('logs')\n"
        "except FileNotFoundError: logs.mkdir()\n"
        "for name in ('best.ckpt', 'last.ckpt'):\n"
        "    if not (logs / name).exists(): (logs / name).write_text('x')\n"
        "(logs / 'best.ckpt').unlink()\n"
        "for old in logs.glob('epoch*.pt'): old.unlink()\n"
        "list(logs.glob('*.yaml')); (logs / 'epoch3.pt').write_text('x')\n"
        "pathlib.Path('other.txt').exists()"
    )
    (run.project / "logs").mkdir()
    for name in ("logs/best.ckpt", "logs/last.ckpt", "logs/epoch12.pt", "logs/model1.yaml", "other.txt"):
        (run.project / name).write_text("by hand")
    run.start()
    assert run.read("summary.json")["unkeyed"] == {"logs/model1.yaml": "looked for", "other.txt": "looked for"}


def test_a_folder_that_a_script_fails_for_is_named_and_one_of_which_it_only_asks_is_not(run: ScriptRun) -> None:
    """Hydra in the script asks whether its folder of configurations is there, and lists nothing."""
    for text, code in (("", 0), ("\nexit(1)", 1)):
        run.write(f"import os\nassert not os.path.isdir('conf'){text}")
        (run.project / "conf").mkdir(exist_ok=True)
        (run.project / "conf/config.yaml").touch()
        assert ("conf/ was looked for and isn't in the snapshot" in run.start(code=code)) == bool(code)
    run.write("import os\nassert not os.path.isdir('conf')").start()
    assert run.read("summary.json")["unkeyed"] == {}


def test_the_project_is_not_imported_from(run: ScriptRun) -> None:
    """As an editable install would have it, or a .pth file."""
    run.write("import plugin").project.joinpath("plugin.py").touch()
    said = run.start(code=1, env={"PYTHONPATH": f"{ROOT}:{run.project}"})
    assert "No module named 'plugin'" in said


def test_seal_fail_and_off(run: ScriptRun) -> None:
    script = "import os; open(os.environ['PROJECT'] + '/a.yaml')"
    for seal, code in (("fail", 1), ("off", 0)):
        run.write(script, seal=seal)
        (run.project / "a.yaml").touch()
        said = run.start(code=code, env={"PROJECT": str(run.project)})
        assert ("paceline: the key is not complete: a.yaml was read; add it" in said) == (seal == "fail")
        assert (run.path / "summary.json").exists() == (seal == "off")


def test_a_sitecustomize_of_the_installation_still_runs(run: ScriptRun, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['CUSTOMIZED'] = 'yes'")
    run.write("import os, sys\nassert os.environ['CUSTOMIZED'] == 'yes' and 'node0/site' not in str(sys.path)")
    run.start(env={"PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"})


def test_a_long_list_is_cut() -> None:
    (line,) = unkeyed_warnings([Unkeyed(f"{number}.txt", was_read=True) for number in range(12)])
    assert line.endswith("6.txt, 7.txt and 4 more were read; add them to program.inputs")


@pytest.mark.long
def test_the_seal_names_95_of_100_planted_files_and_none_of_an_honest_script() -> None:
    done = subprocess.run([sys.executable, "benchmarks/seal.py", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "false alarms: 0 []" in done.stdout


@pytest.mark.ci
@pytest.mark.long
def test_files_outside_of_the_project_are_said_in_a_line_and_noted(run: ScriptRun, tmp_path: Path) -> None:
    """Data that an argument names was in no key: half of it removed, the run was finished."""
    script = """
        import os, tempfile, torch
        from pathlib import Path
        outside = Path(os.environ["OUTSIDE"])
        (outside / "a.txt").read_text(); (outside / "large.bin").open("rb").close(); os.listdir(outside)
        torch.save({}, outside / "own.pt"); torch.load(outside / "own.pt")
        with tempfile.TemporaryDirectory() as made:
            os.system(f"touch {made}/x"); open(f"{made}/x").close()
        os.environ.get("OUTSIDE"), os.environ.get("NOT_SET")
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("1")
    with (outside / "large.bin").open("wb") as file:
        file.truncate(HASHED_BYTES + 1)
    said = run.write(textwrap.dedent(script)).start(env={"OUTSIDE": str(outside)})
    a, large = outside / "a.txt", outside / "large.bin"
    assert f"{a} and {large} were read outside of the project: no part of the key, but the run is rep" in said
    record = run.read("dependencies.json")
    assert {path: digest for path, (digest, _) in record["files"].items()} == {
        str(a): hashlib.sha256(b"1").hexdigest(),
        str(large): f"{HASHED_BYTES + 1}:{large.stat().st_mtime_ns}",
    }
    assert ("torch" in record["imported"], "os" in record["imported"]) == (True, False)
    assert {"OUTSIDE", "NOT_SET"} <= {*record["variables"]}
    assert (run.read("summary.json")["unkeyed"], first_change(record)) == ({}, None)
    for change, why in (
        (lambda: a.write_text("2"), f"{a}, which it read and its key lacks, changed"),
        (lambda: (outside / "new").touch(), f"the names in the folder {outside}, which it listed, changed"),
        (large.unlink, f"{large}, which it read and its key lacks, is gone"),
    ):
        before = run.write(textwrap.dedent(script)).start(env={"OUTSIDE": str(outside)})
        assert before is not None
        change()
        assert first_change(run.read("dependencies.json")) == why


LOOKS = """
    import os
    try: open(os.environ["OUTSIDE"] + "/opened.txt")
    except FileNotFoundError: pass
    asked = [os.environ["OUTSIDE"] + "/asked.txt", "untracked.txt", os.environ["PROJECT"] + "/absolute.txt"]
    asked += [os.environ["OUTSIDE"] + "/own.txt", "own.txt", "/".join([os.environ["TMPDIR"], "x"])]
    asked += [os.path.expanduser("~/.cache/x"), os.environ["API_TOKEN"], os.environ["OUTSIDE"] + "/__pycache__/x"]
    assert not any(map(os.path.exists, asked))
    for name in ("own.txt", os.environ["OUTSIDE"] + "/own.txt"): open(name, "w").close()
    os.remove(os.environ["OUTSIDE"] + "/own.txt")
"""


def test_a_file_that_a_script_looked_for_in_vain_is_noticed_when_it_appears(run: ScriptRun, tmp_path: Path) -> None:
    outside, temporary = tmp_path / "outside", tmp_path / "temporary"
    for folder in (outside, temporary):
        folder.mkdir()
    env = {"OUTSIDE": str(outside), "PROJECT": str(run.project), "TMPDIR": str(temporary), "HOME": str(tmp_path)}
    run.write(textwrap.dedent(LOOKS)).start(env={**env, "API_TOKEN": "a-secret-text"})
    record = run.read("dependencies.json")
    absent = [
        outside / "asked.txt",
        outside / "opened.txt",
        run.project / "absolute.txt",
        run.project / "untracked.txt",
    ]
    assert record["absent"] == sorted(map(str, absent))
    assert first_change(record) is None
    for path in absent:
        path.touch()
        assert first_change(record) == f"{path}, which it looked for in vain, has appeared since"
        path.unlink()


def test_a_script_that_reads_its_own_text_is_reported_and_a_traceback_is_not(run: ScriptRun) -> None:
    """Comments are no part of the key."""
    text = "import helper, logging\ntry: 1 / 0\nexcept ZeroDivisionError: logging.exception('shown')\nhelper.{call}"
    helper = "import inspect\ndef none(): pass\ndef own(): return open(__file__).read() + inspect.getsource(own)\n"
    for call, found in (("none()", {}), ("own()", {"helper.py": "read"})):
        run.write(text.format(call=call), files={"helper.py": helper}).start()
        assert run.read("summary.json")["unkeyed"] == found
    run.write(text.format(call="own()"), files={"helper.py": helper}, inputs=["helper.py"]).start()
    assert run.read("summary.json")["unkeyed"] == {}


def test_another_node_has_a_record_of_its_own_of_what_its_ranks_read(run: ScriptRun, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.touch()
    run.write("import os\nfor name in ('INSIDE', 'OUTSIDE'): open(os.environ[name]).close()")
    (run.project / "part1.txt").touch()
    run.start(node_rank=1, env={"INSIDE": str(run.project / "part1.txt"), "OUTSIDE": str(outside)})
    record = run.read("nodes/1/dependencies.json")
    assert (record["unkeyed"], [*record["files"]]) == ({"part1.txt": "read"}, [str(outside)])
    assert not (run.path / "dependencies.json").exists()


def test_the_plugins_of_hydra_that_come_with_paceline_are_no_input_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each application of Hydra imports all plug-ins of its environment, wherever they lie."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins = (SKIP, str((tmp_path / "hydra_plugins").resolve()))
    (tmp_path / "hydra_plugins").mkdir()
    assert plugins not in zones_of_host(), "plug-ins of the user's own count"
    (tmp_path / "hydra_plugins" / "paceline_plugins.py").touch()
    assert plugins in zones_of_host()
