"""Command lines of torchrun's and python's as overrides, and a script that starts with the same arguments."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.verbs import VERBS
from pipeline.config.overrides import script_line, torchrun_line
from pipeline.config.overrides.script_line import ScriptLine, line_of, overrides_of
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT
from tests.pipeline.composed import composed
from trainers.script.settings import filled, words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit" / "model.py").touch()
    (tmp_path / "small.json").write_text("{}")
    (tmp_path / "large.bin").write_bytes(bytes(2 << 20))
    return tmp_path


@pytest.fixture
def parsed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's parser in this process, as starting one that imports torch takes seconds; one test starts it."""
    from trainers.torchrun_options import answer  # imports torch

    monkeypatch.setattr(torchrun_line, "python_answer", lambda _, words, **__: answer(words))


def translated(line: str, folder: Path) -> list[str]:
    return torchrun_line.translated(line.split(), folder, ROOT, VERBS)[0]


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("run train.py", ["program.script=train.py", "program.torchrun=false"]),
        ("run train.py --lr 0.1", ["program.args.lr=0.1"]),
        ("run train.py --lr 1e-3 --debug -b 2 --layers 3 4", [
            "program.args.lr='1e-3'", "program.args.debug=true", "program.args.b=2", "program.args.layers=[3,4]",
        ]),
        ("run train.py --on true --zip 007", ["program.args.on='true'", "program.args.zip='007'"]),
        ("run train.py fit --lr 1 --seed=0 model=x", [
            "program.args._1=fit", "program.args.lr=1", "program.args._2='--seed=0'", "program.args._3='model=x'",
        ]),
        ("run train.py --in 1 --in 2", ["program.args.in=1", "program.args._1='--in'", "program.args._2=2"]),
        ("run train.py --lr 0.1 --z 1", ["program.args.lr=0.1", "program.args._1='--z'", "program.args._2=1"]),
        ("run train.py --resume {resume} --name {x}", ["program.args.resume='{resume}'", "program.args.name='{{x}}'"]),
        ("run train.py --lr 1 {resume}", ["program.args.lr=1", "program.args._1='{resume}'"]),
        ("run train.py --resume {resume} 100", ["program.args.resume='{resume}'", "program.args._1=100"]),
        ("run tracking=none train.py tracking=none", ["program.args._1='tracking=none'", "tracking=none"]),
        ("run -m package.train --lr 0.1", ["program.module=package.train", "program.args.lr=0.1"]),
        ("run --cluster two_node train.py", ["cluster=two_node"]),
    ],
)  # fmt: skip
def test_a_line_becomes_the_overrides_that_start_the_same_words(line: str, overrides: list[str], folder: Path) -> None:
    found = translated(line, folder)
    assert found[0] == "train"
    assert [word for word in overrides if word not in found] == []


def test_a_swept_flag_is_there_or_not(folder: Path) -> None:
    found = translated("run --sweep debug=true,false --sweep lr=1,2 train.py 3", folder)
    assert found[-3:] == ["program.args._1=3", "program.args.debug=true,false", "program.args.lr=1,2"]


@pytest.mark.parametrize("args", ["", " fit", " x.y=1 --z.z 2"])
def test_a_swept_name_with_a_dot_is_asked_for_in_the_scripts_form(args: str, folder: Path) -> None:
    with pytest.raises(
        UsageError, match=r"whether the script takes model\.lr=VALUE or --model\.lr VALUE can't be seen"
    ):
        translated(f"run --sweep model.lr=1,2 train.py{args}", folder)


def test_an_expression_of_an_option_that_has_its_value_in_its_word_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"the values are written one by one: --seed=0,1,2"):
        translated("run --sweep seed=range(3) train.py --seed=0", folder)


def test_a_swept_option_with_several_words_behind_it_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"of 0\.3 digits behind --lr not all may be its values"):
        translated("run --sweep lr=0.1,0.2 train.py --lr 0.3 digits", folder)


@pytest.mark.parametrize(
    ("typed", "replaced"),
    [
        ("--lr 0.3 --epochs 1", ["--lr 0.3"]),
        ("--lr=0.3", ["--lr=0.3"]),
        ("--epochs 1", []),
        ("--lr --epochs 1", []),
        ("--tag lr=0.3", []),
    ],
)
def test_a_value_that_a_sweep_replaces_is_named(typed: str, replaced: list[str], folder: Path) -> None:
    line = f"run --sweep lr=0.1,0.2 train.py {typed}"
    notes = torchrun_line.translated(line.split(), folder, ROOT, VERBS)[1]
    assert notes == [f"--sweep lr=0.1,0.2 replaces {word}" for word in replaced]


@pytest.mark.parametrize(
    "line", ["--lr 0.1 --debug", "fit --lr=0.1", "-- --x", "--neg -1", "-v -v", "--ab c d -e", "--_1 x", "--a 1 --bc 2"]
)
def test_the_arguments_are_passed_on_as_they_are(line: str) -> None:
    assert words(script_line._arguments_by_name(line.split())) == line.split()


@pytest.mark.parametrize(
    ("line", "trials"),
    [
        ("run --sweep lr=0.1,0.01 train.py --lr 1 --epochs 3", "program.args.lr=0.1,0.01"),
        ("run --sweep lr=0.1,0.01 train.py", "program.args.lr=0.1,0.01"),
        ("run --sweep lr=0.1,0.01 train.py fit --lr 1", "program.args.lr=0.1,0.01"),
        ("run --sweep lr=0.1,0.01 train.py fit --lr=1", "program.args._2='--lr=0.1','--lr=0.01'"),
        ("sweep run train.py --lr 0.1,0.01", "program.args.lr=0.1,0.01"),
        ("run --sweep lr=1e-3,0.1,1.50 train.py", "program.args.lr='1e-3',0.1,'1.50'"),
        ("run --sweep optim.lr=1,2 train.py model.size=3", "program.args._2='optim.lr=1','optim.lr=2'"),
        (
            "run --sweep model.lr=1,2 train.py fit --a.b 3",
            "program.args._5=1,2",
        ),  # as Lightning's command line has them
        ("run --sweep model.lr=1,2 train.py --model.lr 3", "program.args._2=1,2"),
        ("run --sweep z=true,false train.py --z true", "program.args._2='true','false'"),
        ("run --sweep z=1,2 train.py --z 0", "program.args._2=1,2"),
        ("run --sweep lr=1e-3,x train.py fit --lr 1", "program.args.lr='1e-3',x"),
        ("run --sweep seed=range(3) train.py", "program.args.seed=range(3)"),
        ("run --sweep lr='1e-3',2 train.py", "program.args.lr='1e-3',2"),
    ],
)
def test_every_flag_can_be_swept(line: str, trials: str, folder: Path) -> None:
    found = translated(line, folder)
    assert found[0] == "sweep"
    assert trials in found


@pytest.mark.parametrize(
    ("line", "override"),
    [
        ("run train.py --data images", "program.args.data={folder}/images"),
        ("run train.py --data ./large.bin", "program.args.data={folder}/large.bin"),
        ("run train.py images", "program.args._1={folder}/images"),
        ("run train.py fit", "program.args._1=fit"),  # may be a subcommand
        ("run train.py --dir .", "program.args.dir=."),  # the folder that it is started in
        ("run train.py --config small.json", "program.args.config=small.json"),
        ("run train.py --output-dir images", "program.args.output-dir=images"),
    ],
)
def test_a_path_in_an_argument_is_data_or_a_file_of_the_snapshot(line: str, override: str, folder: Path) -> None:
    found = translated(line, folder)
    assert override.format(folder=folder) in [word.replace("'", "") for word in found]
    assert any(word.startswith("program.inputs=[") for word in found) == ("small.json" in line)


def test_typed_inputs_come_beside_the_files_of_the_arguments(folder: Path) -> None:
    found = translated("run program.inputs=[a.txt,b.txt] train.py --config small.json", folder)
    (inputs,) = [word for word in found if word.startswith("program.inputs")]
    assert inputs.endswith("small.json',a.txt,b.txt]")
    assert "program.inputs=[a.txt]" in translated("run program.inputs=[a.txt] train.py", folder)


@pytest.mark.parametrize(
    "word", ["{{y}}", "{y}", "${seed}", "{{ x }}", "{{}}", "x" * 3_000, "\\${x}", "a\\b${c}", "${d}"]
)
def test_a_word_reaches_the_script_as_it_is(word: str, folder: Path) -> None:
    line = torchrun_line.translated(["run", "train.py", "--text", word], folder, ROOT, VERBS)[0]
    (text,) = [found.partition("=")[2] for found in line if found.startswith("program.args.text=")]
    value = composed([f"program.args.text={text}", "program.script=train.py"])["program"]["args"]["text"]
    assert filled(value, {"seed": "0"}) == word


def test_a_script_of_the_project_by_its_whole_path_starts_where_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    typed = ["run", f"{tmp_path}/sub/train.py"]
    assert "program.script=train.py" in torchrun_line.translated(typed, tmp_path / "sub", tmp_path, VERBS)[0]


@pytest.mark.parametrize("flag", ["-o", "--exp_dir", "--snapshot-dir", "--model-dir", "--workspace", "--project"])
def test_a_folder_behind_the_name_of_an_output_is_no_data(flag: str, folder: Path) -> None:
    (folder / "images" / "old.txt").touch()
    assert f"program.args.{flag.lstrip('-')}=images" in translated(f"run train.py {flag} images", folder)


@pytest.mark.parametrize(
    "line",
    ["run train.py --lr 0.1 --resume {resume} --flag", "run tracking=none train.py -e 3 --name 'a b'", "run train.py"],
)
def test_the_overrides_of_a_line_are_shown_as_the_line(line: str, folder: Path) -> None:
    words = shlex.split(line)
    assert line_of(torchrun_line.translated(words, folder, folder)[0][1:]) == words


def test_overrides_that_no_line_gives_are_left(folder: Path) -> None:
    assert line_of(["model=resnet18"]) is None
    assert line_of(["program.script=train.py", "program.args=[--lr,'0.1']"]) is None
    assert line_of(["program.script=train.py"]) is None, "torchrun train.py would be one rank"
    assert line_of(["program.script=train.py", "cluster=two_node"]) == ["torchrun", "cluster=two_node", "train.py"]
    ranks = ["cluster.nproc_per_node=2", "program.script=train.py", "program.args.lr=0.1"]
    assert line_of(ranks) == ["torchrun", "--nproc-per-node=2", "train.py", "--lr", "0.1"]


def test_doits_own_run_and_help_are_left_alone(folder: Path) -> None:
    for line in (
        "run train",
        "help run",
        "help torchrun",
        "torchrun --help",
        "train experiment=quickstart",
        "-v 0 run",
    ):
        assert translated(line, folder) == line.split()


@pytest.mark.usefixtures("parsed_here")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("torchrun --nproc_per_node=2 --max-restarts 3 cluster=x train.py --lr 0.1", ["cluster.nproc_per_node=2",
         "cluster.max_restarts=3", "program.script=train.py", "program.args.lr=0.1", "cluster=x"]),
        ("torchrun --nnodes=2 --cluster two_node -m a.b",
         ["cluster=two_node", "cluster.nnodes=2", "program.module=a.b"]),
        ("torchrun --nproc-per-node gpu --no-python ./go",
         ["cluster.nproc_per_node=auto", "cluster.device=cuda", "program.command=['./go']"]),
    ],
)  # fmt: skip
def test_torchs_own_parser_reads_its_options(line: str, overrides: list[str], tmp_path: Path) -> None:
    found, notes = torchrun_line.translated(line.split(), tmp_path, tmp_path)
    assert sorted(found) == sorted(["train", *overrides])
    assert notes == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --cluster x python train.py", "run starts Python by itself\n  try: doit run --cluster x train.py"),
        ("run train.py --a 1 program.args.lr=0.1", "before the script\n  try: doit run train.py --a 1 --lr 0.1"),
    ],
)  # fmt: skip
def test_a_line_that_starts_no_script_is_answered_with_the_one_that_does(line: str, said: str, folder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        translated(line, folder)
    assert said in str(refused.value)


@pytest.mark.usefixtures("parsed_here")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nproc-per-node 2 --lr 0.1 train.py --b 3", "unrecognized arguments: --lr\n  try: doit "
         "torchrun --nproc-per-node 2 train.py --lr 0.1: the script's own options stand behind it"),
        ("torchrun --hostfile hosts train.py", "try: doit torchrun cluster=pssh cluster.hostfile=FILE …"),
        ("torchrun --zzz", "try: doit torchrun --nproc-per-node 2 train.py --lr 0.1"),
    ],
)  # fmt: skip
def test_options_of_the_script_stand_behind_it(line: str, said: str, folder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        translated(line, folder)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --lr 0.1 train.py --b 3", "run has no option --lr; it has -m, --cluster NAME, "),
        ("run", "run needs a script\n  try: doit run train.py --lr 0.1"),
        (
            "run fit/model --lr 1",
            "fit/model is no script; did you mean fit/model.py?\n  try: doit run fit/model.py --lr 1",
        ),
        ("run -n 2 train.py", "run has no option -n; it has -m, --cluster NAME, "),
        ("run --sweep lr=[0.1,0.2] train.py", "is one value, so nothing varies\n  try: --sweep lr=0.1,0.2"),
        ("run --sweep --lr 0.1,0.2 train.py", "a name and its values are missing\n  try: --sweep lr=0.1,0.01"),
        ("run dodo.py --lr 1", "there is no dodo.py in "),
        ("run ./fit", "./fit is a folder, and run needs a script\n  try: doit run fit/model.py"),
        ("run train.py --help", "train.py --help trains nothing\n  try: python train.py --help"),
    ],
)
def test_words_in_front_of_the_script_are_answered_with_the_line_that_was_meant(
    line: str, said: str, folder: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        translated(line, folder)
    assert said in str(refused.value)


def test_paceline_s_own_flags_stand_before_the_script(folder: Path) -> None:
    assert translated("run --json --dry-run train.py --json", folder)[:3] == ["train", "--json", "--dry-run"]
    assert translated("run --budget 8s train.py --budget 1", folder)[:3] == ["train", "--budget", "8s"]
    assert translated("run --budget=8s train.py", folder)[:2] == ["train", "--budget=8s"]
    assert translated("run --sweep a=1,2 -n 2 --retry-failed train.py", folder)[:4] == [
        "sweep", "-n", "2", "--retry-failed",
    ]  # fmt: skip
    assert "program.args.json=true" in translated("run train.py --json", folder)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_what_a_run_does_not_need_is_noted(tmp_path: Path) -> None:
    line = ["torchrun", "--rdzv-backend", "c10d", "--node-rank=1", "--tee", "3", "train.py"]
    notes = torchrun_line.translated(line, tmp_path, tmp_path)[1]
    assert notes == [
        "--rdzv-backend, --node-rank: not needed, as Paceline starts every node and chooses the rendezvous",
        "--tee: not needed, as the output of every rank is kept in runs/KEY/attempts",
    ]


@pytest.mark.usefixtures("parsed_here")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--start-method=fork", "--start-method of torchrun has no counterpart here\n  try: leave it out"),
        ("--bogus", "torchrun: unrecognized arguments: --bogus"),
    ],
)
def test_what_a_run_cannot_have_is_refused(option: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        torchrun_line.translated(["torchrun", option, "train.py"], tmp_path, tmp_path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"nnodes": "1:3"},
            "--nnodes=1:3: the number of nodes is part of a run's key, so it is fixed\n  try: --nnodes=3",
        ),
        ({"nproc_per_node": "cpu"}, "--nproc-per-node=cpu: the number of ranks is part of a run's key, so it is typed"),
        ({"sweep": ["lr"]}, "--sweep lr: a name and its values are missing\n  try: --sweep lr=0.1,0.01"),
    ],
)
def test_a_number_that_the_key_cannot_hold_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    line = ScriptLine(script="train.py", args=[], **options)
    with pytest.raises(UsageError) as error:
        list(overrides_of(line, tmp_path, tmp_path, splits=False))
    assert said in str(error.value)


def test_torchrun_alone_starts_one_rank_and_a_named_cluster_its_own_number(tmp_path: Path) -> None:
    for cluster, ranks in ((None, ["cluster.nproc_per_node=1"]), ("two_node", [])):
        line = ScriptLine(script="train.py", args=[], cluster=cluster)
        assert list(script_line._rank_overrides(line)) == ranks


@pytest.mark.parametrize("line", ["--x ???", "--x ??? y", "a ???", "--a ??? ??? --b"])
def test_an_argument_that_is_omegaconfs_mark_of_a_missing_value_is_passed_on(line: str, folder: Path) -> None:
    found = [word for word in translated(f"run train.py {line}", folder) if word.startswith("program.args")]
    assert words(composed(["program=script", "program.script=train.py", *found])["program"]["args"]) == line.split()
