"""What a user is told to do about a failure of the code that ranks run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import TrainingError
from pipeline.core.specs import Cluster, Host
from pipeline.execution import failure_hints as hints
from trainers.contract import run_folder

HERE = Cluster(launcher="local", hosts=(Host(name="localhost", nproc_per_node=1),))


def run_of_script(root: Path, inputs: Sequence[str] = ()) -> Any:
    """The run of study/train.py."""
    script = SimpleNamespace(workdir="study", inputs=inputs)
    return SimpleNamespace(config=SimpleNamespace(script=script, cluster=HERE), root=root)


def missing_file(path: str) -> str:
    return f"rank 0: FileNotFoundError: [Errno 2] No such file or directory: '{path}'"


def test_a_module_that_the_ranks_lack_is_named_with_the_python_that_wants_it() -> None:
    failure = "training failed on a, rank 0: ModuleNotFoundError: No module named 'timm'"
    assert (hints.pip_hint(failure, HERE) or "").startswith(f"{sys.executable} -m pip install timm (or uv ")
    there = replace(HERE, launcher="pssh", hosts=(Host(name="a", nproc_per_node=1, python="/opt/py"),))
    hint = hints.pip_hint(failure, there) or ""
    assert hint.startswith(
        "on each host /opt/py -m pip install timm (or uv pip install --python /opt/py timm); where it"
    )
    assert hints.pip_hint("rank 0: KeyError: 'timm'", HERE) is None


@pytest.mark.parametrize(
    ("module", "taken"), [("study/models/a.py", "study/models/*"), ("util.py", "util.py"), ("lib/util.py", "lib/*")]
)
def test_a_module_of_the_project_that_only_a_script_can_name_is_taken_along(
    module: str, taken: str, tmp_path: Path
) -> None:
    run = run_of_script(tmp_path)
    name = Path(module).stem if Path(module).stem == "util" else "models"
    failure = f"rank 0: ModuleNotFoundError: No module named '{name}'"
    assert hints.module_hint(failure, run) is None
    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).touch()
    assert (hints.module_hint(failure, run) or "").startswith(
        f"'program.inputs=[{taken}]' in front of the script takes"
    )


def test_a_host_that_was_lost_is_named_with_the_command_that_asks_it() -> None:
    hosts = (Host(name="a", nproc_per_node=1), Host(name="b", nproc_per_node=1, port=2222))
    there = replace(HERE, launcher="pssh", hosts=hosts, ssh_config="/lab/ssh_config")
    hint = hints.lost_host_hint(TrainingError("b no longer answers", gone=("b:2222",)), there)
    assert hint == (
        "ssh -F /lab/ssh_config -p 2222 b true; the same command goes on once it answers; cluster.max_restarts=1 with "
        "cluster.spares=[HOST] goes on without it"
    )
    assert hints.lost_host_hint(TrainingError("rank 0: KeyError"), there) is None


@pytest.mark.parametrize("path", ["/w/runs/0123/code/tables/a.npy", "tables/a.npy", "./tables/a.npy"])
def test_a_file_of_the_project_that_a_rank_lacks_is_named_with_the_word_that_takes_it_along(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "tables").mkdir()
    run: Any = SimpleNamespace(config=SimpleNamespace(script=None), code=SimpleNamespace(sources={}), root=tmp_path)
    assert hints.file_hint(missing_file(path), run) is None
    (tmp_path / "tables/a.npy").touch()
    assert (hints.file_hint(missing_file(path), run) or "").startswith("model.inputs=[tables/a.npy] takes it along")
    run.code.sources["tables/a.npy"] = tmp_path / "tables/a.npy"
    assert "open it by a path made of __file__" in (hints.file_hint(missing_file(path), run) or "")


def test_a_file_above_the_project_of_a_script_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "project/study").mkdir(parents=True)
    run, failure = run_of_script(tmp_path / "project"), missing_file("../../data/X.npy")
    assert hints.file_hint(failure, run) is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data/X.npy").touch()
    hint = hints.file_hint(failure, run) or ""
    assert hint.startswith(f"{tmp_path}/data/X.npy lies above the project, and the script runs in a copy of it")
    assert hints.file_hint("rank 0: FileNotFoundError: ../../data/X.npy not found.", run) == hint, "as numpy says it"
    assert hints.file_hint(missing_file("../../data"), run) is not None, "a folder is data as well"


def test_the_folder_of_a_scripts_own_hydra_configuration_is_named_as_an_input(tmp_path: Path) -> None:
    (tmp_path / "study/conf").mkdir(parents=True)
    copy = f"{tmp_path}/runs/k/work/a/{run_folder.WORK_COPY}"
    failure = f"rank 0:\nCheck that the config directory '{copy}/study/conf' exists and readable"
    hint = hints.file_hint(failure, run_of_script(tmp_path, ["a.txt"]))
    assert hint == "'program.inputs=[a.txt,study/conf/]' in front of the script takes the folder along"


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        ("RuntimeError: Error downloading train-images-idx3-ubyte.gz",
         "pass the folder of its data on this computer as an argument of the script, which takes it along as data; if "
         "the script has a fixed path in the project, put program.inputs=[data/*] in front of the script"),
        ("EOFError: EOF when reading a line", "a run has no keyboard: let the script take the answer as an argument"),
        ("rank 0: bdb.BdbQuit",
         "a run has no keyboard, so a debugger ends it: take breakpoint() and pdb out of the code"),
        ("rank 0: ImportError: attempted relative import with no known parent package",
         "Python runs a script outside its package: from utils import x instead of from .utils import x, or start it "
         "as a module, from the folder above its package: doit run -m PACKAGE.MODULE"),
        ("RuntimeError: DataLoader worker (pid(s) 30300) exited unexpectedly",
         "doit logs last shows what the workers printed; workers that are spawned import the script once more, which "
         "therefore needs if __name__ == '__main__': before whatever it starts"),
        ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
         "expected, but not set", "torchrun starts the ranks of this script: doit torchrun --nproc-per-node N SCRIPT"),
        ("train.py: error: unrecognized arguments: --nproc-per-node 2",
         "--nproc-per-node is an option of torchrun, whose options stand in front of the script: doit torchrun "
         "--nproc-per-node N SCRIPT"),
        ("train.py: error: argument --lr: invalid float value: '0.1,0.01'",
         "0.1,0.01 are values of a sweep: doit sweep in front of the same words trains once with each"),
        ("KeyError: 'MY_TOKEN'\n  File \"a.py\", line 2, in <module>\n    print(os.environ['MY_TOKEN'])",
         "cluster.env.MY_TOKEN='${oc.env:MY_TOKEN}' in front of the script passes this shell's variable on: the "
         "ranks get only those that are named"),
        ("train.py: error: unrecognized arguments: --sweep lr=0.1,0.2",
         "--sweep is an option of this command, whose options stand in front of the script: "
         "doit run --sweep … SCRIPT"),
        ("train.py: error: unrecognized arguments: lr=0.1", "an argument of this script is written --lr 0.1"),
        ("RuntimeError: CUDA out of memory. Tried", "a smaller batch or model, or fewer workers of the loader"),
        ("KeyError: 'LABEL'\n  row['LABEL']", None),
        ("train.py: error: argument --lr: invalid float value: 'abc'", None),
        ("train.py: error: unrecognized arguments: --lrr 2", None),
    ],
)  # fmt: skip
def test_errors_of_a_script_that_was_started_with_other_words_than_it_takes(failure: str, hint: str | None) -> None:
    assert hints.script_hint(failure) == hint


def test_a_hint_that_an_error_has_already_stays() -> None:
    run, error = run_of_script(Path()), TrainingError("rank 0: EOFError: EOF when reading a line")
    hinted = hints.add_known_hint(error, run)
    assert (hinted.what, str(hinted.hint)[:21]) == (error.what, "a run has no keyboard")
    assert hints.add_known_hint(other := TrainingError("EOF when reading a line", hint="this"), run) is other


def test_a_file_of_the_project_that_no_input_names_is_named_with_its_neighbours_and_the_inputs_that_are_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "study/data").mkdir(parents=True)
    run, failure = run_of_script(tmp_path, ["config.yaml"]), missing_file("data/x.npy")
    assert hints.file_hint(failure, run) is None
    (tmp_path / "study/data/x.npy").touch()
    assert hints.file_hint(failure, run) == (
        "'program.inputs=[config.yaml,study/data/*]' in front of the script takes study/data/x.npy along with all that "
        "lies beside it"
    )
