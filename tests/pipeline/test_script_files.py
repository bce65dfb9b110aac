"""Which files of a script are in its key and its snapshot, and what is refused before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.build import RunConfig, build
from pipeline.core.errors import DataError, UsageError
from pipeline.core.places import ROOT
from pipeline.data import trees
from pipeline.execution.run import prepare
from pipeline.keys import script_files
from pipeline.keys.content_key import names_seed
from pipeline.keys.script_files import DataPath, ScriptFiles
from tests.pipeline.composed import composed
from tests.pipeline.git_folders import git
from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig, names

TRAIN = "import torch\nfrom nets.own import Net\nimport wandb_that_nobody_has\nfrom utils import helper\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with a package, a module beside it and a file that it reads."""
    files = {
        "train.py": TRAIN,
        "nets/__init__.py": "",
        "nets/own.py": "from .layers import Layer\n",
        "nets/layers.py": "class Layer: ...\n",
        "nets/unused.py": "",
        "utils.py": "import torch\ndef helper(): ...\n",
        "configs/a.yaml": "lr: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def found(root: Path, script: str | None, **told: Any) -> ScriptFiles:
    return script_files.find(ScriptConfig(script=script, **told), root=root)


def with_trainers(project: Path) -> None:
    """Give a project the code that starts scripts, as a clone has it."""
    for name in ("trainers", "paceline.py"):
        (project / name).symlink_to(ROOT / name)


def named(path: Path) -> tuple[DataPath]:
    return (DataPath("program.data", path),)


def configured(*words: str) -> RunConfig:
    words = ("tracking=none", *words)
    return build(composed(words), words, root=ROOT, local_gpus=0)


def own(files: ScriptFiles) -> list[str]:
    return [name for name in files.closure().sources if name.startswith("_script/")]


def test_a_script_outside_of_the_project_is_in_the_key_with_all_that_it_imports_and_reads(folder: Path) -> None:
    files = found(ROOT, str(folder / "train.py"), inputs=["configs/*.yaml"])
    modules = ["nets/__init__.py", "nets/layers.py", "nets/own.py", "train.py", "utils.py"]
    closure = files.closure()
    assert own(files) == [f"_script/{name}" for name in ("configs/a.yaml", *modules)]
    assert (files.path, files.workdir) == ("_script/train.py", "_script")
    assert closure.versions["wandb_that_nobody_has"] == "absent"
    assert closure.unresolved == {"wandb_that_nobody_has": "_script/train.py:3"}
    assert closure.versions["torch"] != "absent"
    assert {"trainers/script/start.py", "paceline.py"} <= {*closure.sources}
    of_the_trainer = ("trainers/models", "trainers/distributed", "trainers/core/config.py", "pipeline/")
    assert not [name for name in closure.sources if name.startswith(of_the_trainer)]
    (folder / "nets/layers.py").write_text("class Layer: 'altered'\nx = 1\n")
    assert files.closure().digests != closure.digests


def test_a_callback_for_a_library_is_in_the_key_of_scripts_that_import_it_alone(folder: Path) -> None:
    without = found(ROOT, str(folder / "train.py")).closure()
    (folder / "train.py").write_text("from paceline_huggingface import PacelineCallback\n")
    with_it = found(ROOT, str(folder / "train.py")).closure()
    assert "paceline_huggingface.py" in with_it.digests
    assert with_it.sources["paceline_huggingface.py"] == ROOT / "paceline_huggingface.py"
    assert not [name for name in (*without.digests, *with_it.digests) if name == "paceline_lightning.py"]
    assert "paceline_huggingface.py" not in without.digests


def test_an_input_counts_byte_for_byte_also_where_it_is_imported(folder: Path) -> None:
    def digests(*inputs: str, comment: str) -> tuple[str, str]:
        (folder / "utils.py").write_text(f"# lr: {comment}\nimport torch\n")
        known = found(ROOT, str(folder / "train.py"), inputs=inputs).closure().digests
        return known["_script/utils.py"], known["_script/train.py"]

    read, script = digests("utils.py", comment="0.1")
    assert read != digests("utils.py", comment="0.5")[0]
    assert digests(comment="0.1") == digests(comment="0.5") == (digests(comment="")[0], script)


def test_a_script_in_the_project_keeps_its_path_and_sees_its_folder_before_the_project(folder: Path) -> None:
    with_trainers(folder)
    (folder / "examples").mkdir()
    (folder / "examples/utils.py").write_text("def helper(): ...\n")
    (folder / "train.py").rename(folder / "examples/train.py")
    files = found(folder, "examples/train.py", inputs=["configs"])
    names = {name for name in files.closure().sources if not name.startswith(("trainers/", "paceline"))}
    nets = {"nets/__init__.py", "nets/own.py", "nets/layers.py"}
    assert names == {"examples/train.py", "examples/utils.py", "configs/a.yaml", *nets}
    assert (files.path, files.workdir) == ("examples/train.py", "")


def test_a_program_that_is_not_python_counts_by_its_bytes(folder: Path) -> None:
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    files = found(ROOT, None, command=[str(folder / "run.sh"), "--x"])
    assert own(files) == ["_script/run.sh"]
    assert files.path == ""


@pytest.mark.slow
def test_the_key_holds_what_a_script_is_told_and_not_where_it_lies(folder: Path, tmp_path: Path) -> None:
    def key(*words: str, script: Path = folder / "train.py") -> str:
        made = prepare(configured(f"program.script='{script}'", *words), ROOT, trees.NO_DATA)
        assert made is not None
        return made.key.digest

    moved = tmp_path / "moved" / "train.py"
    (moved.parent / "nets").mkdir(parents=True)
    for name in ("train.py", "utils.py", "nets/__init__.py", "nets/own.py", "nets/layers.py"):
        (moved.parent / name).write_text((folder / name).read_text())
    same = key("program.args.lr=0.1")
    assert same == key("program.args.lr=0.1", script=moved) == key("program.args.lr=0.1", "program.seal=off")
    others = ["program.args.lr=0.2", "program.args.x=1", "program.env.A=b", "cluster.nproc_per_node=3"]
    assert len({same, *(key("program.args.lr=0.1", word) for word in others)}) == 5


def test_one_value_in_a_list_of_arguments_has_a_name_of_its_own(folder: Path) -> None:
    config = configured(
        f"program.script='{folder}/train.py'", 'program.args=[x.py,"--lr=${program.env.LR}"]', "program.env.LR=0.1"
    )
    assert config.resolved["program"]["args"] == ["x.py", "--lr=0.1"]


@pytest.mark.parametrize(
    ("words", "same", "other"),
    [
        ("program.args.lr=0.1", "program.args.lr='0.1'", "program.args.lr='0.10'"),
        ("program.args.x=false", "program.args={}", "program.args.lr=0.2"),
        ("program.args=[]", "", "program.args.lr=0.2"),
        ("program.args.lr=0.1 program.args.x=false", "program.args.lr=0.1 program.args.x=null", "program.args.lr=0.2"),
        ("program.args.x=true", "program.args.x=true program.args.y=null", "program.args.x='true'"),
        ("program.args=[--x,true,1]", "program.args=[--x,'true','1']", "program.args=[--x,true,'1.0']"),
        ("program.args.x=[1,a]", "program.args.x=['1',a]", "program.args.x=[1,b]"),
        ("program.args.b=1 program.args.a=2", "program.args={b:1,a:2}", "program.args.a=2 program.args.b=1"),
        ("program.env.B=1 program.env.A=2", "program.env.A=2 program.env.B=1", "program.env.A=1 program.env.B=1"),
    ],
)
def test_the_same_command_line_has_one_key(folder: Path, words: str, same: str, other: str) -> None:
    def key(words: str) -> str:
        made = prepare(configured(f"program.script='{folder}/train.py'", *words.split()), ROOT, trees.NO_DATA)
        assert made is not None
        return made.key.digest

    assert key(words) == key(same) != key(other)


@pytest.mark.slow
def test_config_json_of_a_script_has_no_section_of_the_classifier(folder: Path) -> None:
    config = configured(f"program.script='{folder}/train.py'")
    assert [*config.resolved] == ["seed", "program", "cluster", "tracking", "paths"]
    assert "program" not in configured().resolved


def test_packs_beside_a_script_s_data_are_none_of_it(tmp_path: Path) -> None:
    """paths.data=data, the default, is where many people have their own."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_text("a")
    one = trees.tree(named(tmp_path), tmp_path)
    pack = tmp_path / f"script-{one.digest[:12]}"
    pack.mkdir()
    (pack / "manifest.json").write_text("{}")
    (pack / "content").symlink_to(tmp_path)
    assert (tmp_path / ".fingerprints.json").exists()
    assert trees.tree(named(tmp_path), tmp_path).digest == one.digest
    (tmp_path / "step-0123456789ab").mkdir()  # no pack
    assert trees.tree(named(tmp_path), tmp_path).digest != one.digest


def test_the_data_of_a_script_counts_by_names_and_contents(tmp_path: Path) -> None:
    data = tmp_path / "texts"
    data.mkdir()
    with pytest.raises(DataError, match="holds no file"):
        trees.tree(named(data), tmp_path / "packs")
    (data / "a.txt").write_text("a")
    one = trees.tree(named(data), tmp_path / "packs")
    one.create()
    assert one.path is not None
    assert (one.path / one.inside[0] / "a.txt").read_text() == "a"
    (data / "a.txt").write_text("b")
    (data / "c.txt").write_text("c")
    other = trees.tree(named(data), tmp_path / "packs")
    assert other.digest != one.digest
    changed = ["texts/a.txt changed", "texts/c.txt added"]
    assert trees.changed_files(other, one.digest, tmp_path / "packs") == changed
    assert trees.changed_files(other, "0" * 64, tmp_path / "packs") == []
    alone = trees.tree(named(data / "a.txt"), tmp_path / "packs")
    assert (alone.inside, [*alone.stamps]) == (("content/a.txt",), ["content/a.txt"])


def test_a_link_to_data_that_is_changed_leads_no_run_elsewhere(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    current = tmp_path / "current"
    current.symlink_to("v1")
    one = trees.tree(named(current), tmp_path / "packs")
    one.create()
    current.unlink()
    current.symlink_to("v2")
    assert one.path is not None
    assert (one.path / one.inside[0] / "a.txt").read_text() == "v1"


def test_data_that_changed_while_a_run_went_on_is_named_and_data_that_was_only_touched_is_not(tmp_path: Path) -> None:
    data = tmp_path / "texts"
    data.mkdir()
    for name in ("same.txt", "touched.txt", "replaced.txt", "removed.txt"):
        (data / name).write_text("a")
    before = trees.tree(named(data), tmp_path / "packs")._replace(path=tmp_path / "packs")
    status = (data / "replaced.txt").stat()
    (data / "replaced.txt").write_text("b")
    os.utime(data / "replaced.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    (data / "touched.txt").write_text("a")
    (data / "removed.txt").unlink()
    (data / "added.txt").write_text("a")
    replaced = before.replaced_meanwhile(named(data), tmp_path / "packs")
    assert replaced == ("texts/removed.txt", "texts/replaced.txt")


def test_a_folder_and_its_only_file_are_two_data_and_laying_down_either_leaves_the_file(tmp_path: Path) -> None:
    file = tmp_path / "texts" / "a.txt"
    file.parent.mkdir()
    file.write_text("a")
    folder, alone = (trees.tree(named(source), tmp_path / "packs") for source in (file.parent, file))
    assert folder.digest != alone.digest
    for one in (folder, alone, alone._replace(path=folder.path)):  # the last: where both once had one digest
        one.create()
    assert (file.is_symlink(), file.read_text()) == (False, "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["program.script=nope.py"], "program.script=nope.py: there is no "),
        (["program.script=examples/tran.py"], "examples/tran.py; did you mean train.py?"),
        (["program.script=README.md"], "is no Python file (.py)"),
        (["program.script=dodo.py", "optimizer.lr=0.1"], "program.args.lr=…"),
        (["program.script=dodo.py", "program.inputs=[/etc/*]"], "'/etc/*' leads out of its folder"),
        (["program.script=dodo.py", "program.outputs=[../x]"], "'../x' leads out of its folder"),
        (["program.script=dodo.py", "program.outputs=['a**']"], "program.outputs: 'a**': ** stands for folders"),
        (["program.script=dodo.py", "program.args.x='{nope}'"], "program.args.x={nope}: {nope} is no placeholder"),
        (["program.script=dodo.py", "program.data=nope"], "program.data=nope: there is no "),
        (["program.script=dodo.py", "cluster.env.PYTHONPATH=pub/nope"],
         "cluster.env.PYTHONPATH names pub/nope, and there is no folder"),
        (["program.script=dodo.py", "cluster.min_nodes=1"], "cluster.min_nodes=1: a script may come to other weights"),
        (["program.script=dodo.py", "program.args.commit=12e4567"],
         "program.args.commit=inf: what was typed there (12e4567, inf) is read as a number, and no finite one; in "
         "quotes it reaches the script as it is typed"),
        (["program.script=dodo.py", "cluster.checkpoint_mirror=s3://x"],
         "cluster.checkpoint_mirror keeps copies of what a script goes on from, and no argument of it has {resume}"),
        (["program.script=dodo.py", "program.torchrun=false", "cluster.nproc_per_node=2"],
         "program.torchrun=false starts one process, and the cluster has 2 ranks"),
        (["program.command=[./README.md]"], "program.command: ./README.md is not executable"),
        (["program.args.lr=0.1"], "program.args says something of a script, and none is named"),
        (["program.script=dodo.py", "program.name=x"], "program.name=x: that name says which kind of program runs, "),
        (["program.script=setup.py", "program.env.PYTHONPATH=/x"], "take cluster.env.PYTHONPATH, whose"),
        (["program.script=setup.py", "program.env.RANK=3"], "program.env.RANK is set by what starts the ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused_with_its_name(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        configured(*words)


def test_a_list_for_a_variable_is_refused_which_hydra_takes_from_a_file() -> None:
    with pytest.raises(ConfigError, match=r"program\.env\.A must be one text, number or boolean; write a list"):
        ScriptConfig(script="a.py", env={"A": [1]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "told", "message"),
    [
        ("def f(:\n", {}, "_script/train.py:1 can't be parsed"),
        ("", {"inputs": ["*.nope"]}, "program.inputs: '*.nope' matches no file in"),
        ("", {"workdir": "sub"}, "program.workdir=_script/sub is no folder of the snapshot"),
    ],
)
def test_what_is_wrong_with_its_files_is_told_before_the_start(
    folder: Path, text: str, told: dict[str, Any], message: str
) -> None:
    (folder / "train.py").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        found(ROOT, str(folder / "train.py"), **told).closure()


def test_a_link_to_a_script_stands_for_the_file_beside_its_modules(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere/link.py"
    link.symlink_to(folder / "train.py")
    assert found(ROOT, str(link)) == found(ROOT, str(folder / "train.py"))


def test_empty_folders_of_data_count_and_links_to_folders_or_to_nothing_are_refused(tmp_path: Path) -> None:
    data, packs = tmp_path / "data", tmp_path / "packs"
    (data / "sub").mkdir(parents=True)
    (data / "sub/a.txt").write_text("a")
    one = trees.tree(named(data), packs).digest
    (data / "sub/none").mkdir()
    assert trees.tree(named(data), packs).digest != one
    (data / "sub/none").rmdir()
    assert trees.tree(named(data), packs).digest == one
    (data / "link").symlink_to(data / "sub")
    with pytest.raises(DataError, match="link is a link to a folder, which is not sent"):
        trees.tree(named(data), packs)
    (data / "link").unlink()
    (data / "link").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"link is a link to gone\.txt, which isn't there"):
        trees.tree(named(data), packs)


def test_a_script_without_torchrun_is_one_rank_where_nobody_says_how_many() -> None:
    config = configured("program.script=dodo.py", "program.torchrun=false")
    assert config.cluster.world_size == 1
    assert config.resolved["cluster"]["nproc_per_node"] == 1


@pytest.mark.parametrize(
    ("text", "words", "ranks"),
    [
        ("# torch.distributed and RANK\n", "", 1),
        ("", "cluster.nproc_per_node=3", 3),
        ("", "program.args.strategy=ddp", 2),
        ("import utils\n", "", 2),
        ("import os; print(os.environ['LOCAL_RANK'])\n", "", 2),
        ("from transformers import (\n    AutoModel,\n    Trainer,\n)\n", "", 2),
        ("from transformers import AutoModel\n", "", 1),
        ("import lightning as L\n", "", 2),
    ],
)
def test_a_script_is_one_process_unless_its_words_or_code_ask_for_more(
    folder: Path, text: str, words: str, ranks: int
) -> None:
    (folder / "utils.py").write_text("from torch import distributed as dist\n")
    (folder / "train.py").write_text(text)
    assert configured(f"program.script='{folder}/train.py'", *words.split()).cluster.world_size == ranks


def test_a_path_in_an_argument_is_data_as_if_program_data_named_it(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "sets/x"
    data.mkdir(parents=True)
    (data / "a.txt").write_text("1\n2\n")

    def key(*words: str) -> str:
        config = configured(f"program.script='{folder}/train.py'", f"paths.data={tmp_path}/packs", *words)
        assert config.script is not None
        made = prepare(config, ROOT, trees.tree(config.script.data, config.data_dir))
        assert made is not None
        return made.key.digest

    named = key(f"program.args.data='{data}'")
    assert named == key(f"program.data='{data}'", "program.args.data='{data}'")
    (data / "a.txt").write_text("1\n")
    assert key(f"program.args.data='{data}'") != named
    untracked = f"program.untracked=['{data}']"
    before = key(f"program.args.data='{data}'", untracked)
    (data / "a.txt").write_text("2\n")
    assert key(f"program.args.data='{data}'", untracked) == before


def test_each_path_in_the_arguments_has_a_placeholder_and_a_line(folder: Path, tmp_path: Path) -> None:
    for name in ("sets/x/a.txt", "sets/y/b.txt", "written/log.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    paths = {"train": "sets/x", "val": "sets/y", "one": "sets/x/a.txt", "output_dir": "written", "far": "nowhere"}
    words = [f"program.args.{name}='{tmp_path}/{path}'" for name, path in paths.items()]
    config = configured(f"program.script='{folder}/train.py'", f"paths.data={tmp_path}/packs", *words)
    assert config.script is not None
    args = config.resolved["program"]["args"]
    assert (args["train"], args["val"], args["one"]) == ("{data}", "{data2}", "{data}/a.txt")
    assert (args["output_dir"], args["far"]) == (f"{tmp_path}/written", f"{tmp_path}/nowhere")
    told = {line.partition("=")[0].rpartition(".")[2]: line for line in config.notes}
    assert "is data: its contents are part of the key, and it is sent to the hosts" in told["train"]
    assert "is not in the key: by its name the script writes there" in told["output_dir"]
    assert "isn't here: the key has its name and not its contents" in told["far"]
    pack = trees.tree(config.script.data, config.data_dir)
    assert (pack.inside, sorted(pack.stamps)) == (("content", "content2"), ["content/a.txt", "content2/b.txt"])
    pack.create()
    assert pack.path is not None
    assert (pack.path / "content2/b.txt").read_text() == "sets/y/b.txt"


@pytest.mark.slow
def test_a_seed_that_no_argument_takes_is_refused_and_is_in_no_key(folder: Path) -> None:
    script = f"program.script='{folder}/train.py'"
    with pytest.raises(UsageError, match=r"seed=1: the script never sees it.*\n.*program\.args\.seed='\{seed\}'"):
        configured(script, "seed=1")
    with pytest.raises(UsageError, match="seed=0,1: several values are a sweep"):
        configured(script, "seed=0,1", "program.env.SEED='{seed}'")
    assert "seed" not in configured(script).canonical
    assert configured(script, "seed=1", "program.env.SEED='{seed}'").canonical["seed"] == 1


@pytest.mark.parametrize(
    ("word", "is_seen"),
    [
        *(("program.args.seed='{seed}'", True), ("program.args=[train,'--seed={seed}']", True)),
        *(("program.args.seed='a{seed}b {run}'", True), ("program.args.s=['{seed}']", True)),
        *(("program.env.S='{seed}'", True), ("program.args.seed='{{seed}}'", False)),
        *(("program.args.seed=${seed}", True), ("program.args=[train,'--seed=${seed}']", True)),
        *(("program.env.S='${seed}'", True), ("cluster.env.S='${seed}'", True), ("program.env.S=seed", False)),
    ],
)
def test_every_way_in_which_a_script_is_given_the_seed_makes_another_key(
    folder: Path, word: str, is_seen: bool
) -> None:
    script = f"program.script='{folder}/train.py'"
    if not is_seen:
        with pytest.raises(UsageError, match="seed=41: the script never sees it"):
            configured(script, word, "seed=41")
        return
    one, other = (configured(script, word, f"seed={seed}") for seed in (41, 42))
    parts = [(config.canonical, config.topology) for config in (one, other)]
    assert parts[0] != parts[1]
    texts = [text for _, text in ScriptConfig(**one.resolved["program"]).texts()]
    assert names_seed(one.resolved["program"]) == any("seed" in names(text) for text in texts)


def test_a_relative_folder_of_pythonpath_is_of_the_project_and_its_modules_are_in_the_snapshot(folder: Path) -> None:
    with_trainers(folder)
    (folder / "pub/mingpt").mkdir(parents=True)
    (folder / "pub/mingpt/gpt.py").write_text("")
    (folder / "train.py").write_text("import gpt\n")
    closure = found(folder, "train.py").closure(["pub/mingpt"])
    assert "gpt.py" in closure.sources
    assert closure.unresolved == {}
    assert found(folder, "train.py").closure().unresolved == {"gpt": "train.py:1"}


def test_all_files_that_a_script_names_and_its_copy_lacks_are_named_at_once(folder: Path) -> None:
    (folder / "train.py").write_text("open('configs/a.yaml'); open('b.txt'); open('c.csv'); exec('nope.txt')\n")
    for name in ("b.txt", "c.csv", "d.json"):
        (folder / name).touch()
    files = found(ROOT, str(folder / "train.py"), inputs=["c.csv"], outputs=["b.*"])
    args = {"from": "d.json", "x": "e.json"}
    assert script_files.unsnapshotted_files(files, files.closure(), args) == ["configs/a.yaml", "d.json"]


READS = """
from os.path import join
from pathlib import Path
open("configs/a.yaml"), Path("configs") / "b.txt", join("configs", "sub", "c.csv"), "d.json", "e.bin", "../f.txt"
"""


def test_files_that_a_script_reads_by_name_and_git_does_not_ignore_are_in_its_key(repository: Path) -> None:
    for name in ("configs/a.yaml", "configs/b.txt", "configs/sub/c.csv", "d.json", "exp/d.json", "e.bin", "f.txt"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("1")
    (repository / "e.bin").write_bytes(bytes(2 << 20))  # too large to be taken along unasked
    with_trainers(repository)
    reads, writes = "open('new.txt'), open('old.txt')", "open('log.txt', 'w'), frame.to_csv('out.csv')"
    (repository / "exp" / "train.py").write_text(f"{READS}{reads}, {writes}")
    (repository / ".gitignore").write_text("old.txt\n")
    git(repository, "add", "-A")
    for name in ("new.txt", "old.txt", "log.txt", "out.csv"):  # git would add the first, and the last two are results
        (repository / "exp" / name).touch()

    def files(**settings: Any) -> dict[str, str]:
        digests = found(repository, "exp/train.py", workdir="exp", **settings).closure().digests
        return {name: digest for name, digest in digests.items() if not name.endswith(".py")}

    before = files()
    assert [*before] == ["configs/a.yaml", "configs/b.txt", "configs/sub/c.csv", "exp/d.json", "exp/new.txt"]
    assert "exp/d.json" not in files(outputs=["d.json"])
    (repository / "configs/b.txt").write_text("2")
    assert {name for name, digest in files().items() if digest != before[name]} == {"configs/b.txt"}


def test_a_file_that_only_the_code_of_paceline_names_is_not_in_the_key_of_a_command(repository: Path) -> None:
    with_trainers(repository)
    for name in ("metrics.jsonl", "config.json"):  # trainers.script.start reads such names in a run folder
        (repository / name).write_text("1")
    git(repository, "add", "-A")
    closure = found(repository, None, command=["sh", "-c", "true"]).closure()
    assert [name for name in closure.sources if not name.endswith(".py")] == []


def test_a_folder_that_git_keeps_empty_is_there_for_the_script_that_writes_into_it(repository: Path) -> None:
    (repository / "exp/results").mkdir(parents=True)
    (repository / "exp/results/.gitignore").write_text("*\n!.gitignore\n")
    with_trainers(repository)
    (repository / "exp/train.py").write_text("save_image(images, 'results/sample_' + str(1) + '.png')\n")
    git(repository, "add", "-A")
    (repository / "exp/results/sample_0.png").touch()  # of another start
    own_files = found(repository, "exp/train.py", workdir="exp", outputs=["results/*"]).closure().digests
    assert [name for name in own_files if not name.endswith(".py")] == ["exp/results/.gitignore"]
