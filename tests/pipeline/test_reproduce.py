"""What a reproduction is told, what it compares, and what it says of data that is gone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doit.doit_cmd import DoitMain

from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import PacelineError
from pipeline.core.files import sha256_bytes, write_atomic, write_json
from pipeline.keys.content_key import KEY_VERSION, ContentKey
from pipeline.reproduction import recipe as recipes
from pipeline.reproduction import reproduce
from pipeline.reproduction.compare import compare, is_time, reach_of_seeds, text
from pipeline.reproduction.recipe import Recipe, checkout, read
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from tests.pipeline.finished_folder import PATCH, finished, key_of

CONFIG = resolve(compose_config(["dataset=arrays", "dataset.source=gone.npz"]))
KEY = key_of(CONFIG)
RESULT = {"weights_sha256": "a" * 64, "steps": 2, "epochs": 1, "metrics": {"test/accuracy": 0.5, "val/loss": 1.0}}


def run_folder(path: Path, result: dict[str, Any] = RESULT, key: ContentKey = KEY, **told: Any) -> RunFolder:
    told = {"overrides": [], "patch_sha256": sha256_bytes(PATCH), **told}
    return finished(path, key, config=CONFIG, summary=result, provenance=told)


def recipe(tmp_path: Path, **told: Any) -> Recipe:
    return read(run_folder(tmp_path, **told), tmp_path)


def test_equal_weights_and_metrics_are_reproduced(tmp_path: Path) -> None:
    verdict = compare(recipe(tmp_path), run_folder(tmp_path / "again"))
    assert verdict.reproduced
    assert text(verdict).splitlines() == [
        f"REPRODUCED {KEY.short}: weights_sha256, metrics and steps are equal",
        "its key is the same",
    ]


HERE = "AMD EPYC (AuthenticAMD 25/17/1, avx512f), now AMD EPYC (AuthenticAMD 25/1/1, avx2)"


def test_on_other_hardware_metrics_are_compared_within_their_spread(tmp_path: Path) -> None:
    first = recipe(tmp_path)
    other = {**RESULT, "weights_sha256": "b" * 64, "metrics": {"test/accuracy": 0.53, "val/loss": 1.5}}
    folder = run_folder(tmp_path / "again", other)
    near = compare(first, folder, hardware=HERE, reach={"test/accuracy": 0.04})
    assert (near.reproduced, near.within_spread) == (False, True)
    assert text(near).splitlines()[:3] == [
        f"WITHIN THE SPREAD {KEY.short}: test/accuracy no further apart than chance allows; bits can't be compared, "
        f"computed by {HERE}",
        "  test/accuracy: 0.5 → 0.53 (at most 0.04 apart)",
        "not judged: val/loss, weights_sha256",
    ]
    far = compare(first, folder, hardware=HERE, reach={"test/accuracy": 0.02})
    assert not far.within_spread
    assert f"computed by {HERE}: other bits were to be expected; test/accuracy differ more than that" in text(far)
    unknown = compare(first, folder, hardware=HERE, reach={"train/loss": 9.0})
    assert not unknown.within_spread
    assert "finished runs of two more seeds tell by how much" in text(unknown)
    assert not compare(first, folder, reach={"test/accuracy": 1.0, "val/loss": 1.0}).within_spread  # the same hardware
    fewer = run_folder(tmp_path / "fewer", {**other, "steps": 1})
    assert not compare(first, fewer, hardware=HERE, reach={"test/accuracy": 1.0}).within_spread
    assert compare(first, run_folder(tmp_path / "equal"), hardware=HERE).reproduced


def test_the_spread_of_a_metric_is_that_of_other_seeds_or_of_the_test_images(tmp_path: Path) -> None:
    def seed(number: int, accuracy: float, **more: object) -> RunFolder:
        config = {"seed": number, "cluster": {}, **more}
        summary = {**RESULT, "metrics": {"test/accuracy": accuracy}}
        return finished(tmp_path, key_of(config), config=config, summary=summary)

    first = read(seed(0, 0.5), tmp_path)
    write_json(first.folder.path / "predictions.json", {"targets": [0] * 400})
    assert reach_of_seeds(first, tmp_path) == {"test/accuracy": pytest.approx(2 * 2**0.5 * 0.5 / 20, rel=1e-3)}
    seed(1, 0.52)
    seed(2, 0.48)
    seed(0, 0.9, trainer={"epochs": 9})
    assert reach_of_seeds(first, tmp_path) == {"test/accuracy": pytest.approx(2 * 2**0.5 * 0.02)}


def script_run(path: Path, metrics: dict[str, float], **outputs: str) -> RunFolder:
    config = {"program": {"name": "script", "script": "a.py"}}
    key = ContentKey(digest="f" * 64, parts={"version": KEY_VERSION, "config": config})
    folder = RunFolder(path / key.short)
    files = {f"outputs/{name.replace('_json', '.json')}": text for name, text in outputs.items()}
    for name, content in {**files, "metrics.jsonl": "x", "outputs.json": "x", "config.yaml": "x"}.items():
        write_atomic(folder.path / name, content.replace("HERE", str(folder.path.resolve())))
    for name, value in (("config.json", config), ("key.json", {"key": key.short}), ("summary.json", {})):
        write_json(folder.path / name, value)
    folder.write_result(
        key=key, summary={"metrics": metrics}, hosts=["a"], attempts=1, duration_s=1.0, mlflow_run_id=None
    )
    return folder


def script_recipe(folder: RunFolder) -> Recipe:
    result = folder.read_result()
    assert result is not None
    return Recipe(folder=folder, result=result.fields, parts={}, config={}, provenance={}, patch=b"")


@pytest.mark.parametrize(
    ("names", "are_times"),
    [
        ("_timestamp seconds ms ms_per_step dt wall sec/epoch iter/sec total_time_min mfu SPS eval/runtime", True),
        ("loss_s timesteps min val_min test_min batch_min ms_ssim time_step_loss", False),
    ],
)
def test_the_names_of_times_and_rates_are_known(names: str, are_times: bool) -> None:
    assert [name for name in names.split() if is_time(name) != are_times] == []


def test_times_and_rates_of_a_script_and_what_the_user_names_are_not_compared(tmp_path: Path) -> None:
    same = {"eval/loss": 0.5, "timestep": 3.0, "loss_s": 1.0}
    times = ("eval/runtime", "eval/samples_per_second", "epoch_time", "duration", "images_per_s", "train_s")
    state = '{"loss": 1, "at": "HERE/outputs", "log": [{"eval_runtime": %s}]}'
    table = "epoch, epoch_time,loss,images_per_s\n1,%s,0.5,%s\n"
    first, second = (
        script_run(
            tmp_path / name,
            {**same, **dict.fromkeys(times, at), "gpu/mb": at},
            **{"state_json": state % at, "log.csv": table % (at, at), "times.csv": f"duration\n{at}\n"},
        )
        for name, at in (("first", 1.5), ("second", 2.5))
    )
    assert [item.field for item in compare(script_recipe(first), second).outcome] == ["gpu/mb"]
    verdict = compare(script_recipe(first), second, ["gpu/*"])
    assert verdict.reproduced
    assert "not compared: duration, epoch_time, eval/runtime, eval/samples_per_second, gpu/mb" in text(verdict)
    outputs = {"state_json": '{"loss": 2}', "log.csv": table.replace("0.5", "0.6"), "times.csv": ""}
    other = script_run(tmp_path / "other", {**same, "timestep": 4.0}, **outputs)
    differing = [item.field for item in compare(script_recipe(first), other, ["gpu/*"]).outcome]
    assert differing == ["outputs/log.csv", "outputs/state.json", "outputs/times.csv", "timestep"]


def test_a_script_that_left_only_logs_and_times_has_nothing_to_compare(tmp_path: Path) -> None:
    first, second = (script_run(tmp_path / name, {"time": 1.0}, **{"a.log": name}) for name in ("first", "second"))
    verdict = compare(script_recipe(first), second)
    assert not verdict.reproduced
    assert text(verdict).startswith(f"NOTHING TO COMPARE {first.key}: the script left neither a metric (times aside)")


def test_files_of_the_working_directory_are_compared_and_those_that_differ_named_without_a_refutation(
    tmp_path: Path,
) -> None:
    def compared(number: int, metrics: dict[str, float], **second: str) -> Any:
        first = {"workdir/r.csv": "loss 1", "workdir/x.log": "at 1", "workdir/s_json": '{"time": 1, "loss": 2}'}
        folders = [
            script_run(tmp_path / f"{number}/{place}", metrics, **dict(made))
            for place, made in (
                ("first", first.items()),
                ("second", {**first, "workdir/x.log": "at 2", **second}.items()),
            )
        ]
        verdict = compare(script_recipe(folders[0]), folders[1])
        return verdict, text(verdict).splitlines()

    other = {"workdir/s_json": '{"time": 9, "loss": 2}'}
    verdict, lines = compared(1, {"loss": 1.0}, **other)
    assert verdict.reproduced
    assert lines[:2] == [
        "REPRODUCED ffffffffffff: outputs, metrics and steps are equal",
        "2 files of its working directory, checkpoints and other hosts: equal",
    ]
    verdict, lines = compared(2, {"loss": 1.0}, **{"workdir/r.csv": "loss 2", "workdir/new.txt": ""})
    assert verdict.reproduced
    assert lines[1] == (
        "3 files of its working directory, checkpoints and other hosts: outputs/workdir/new.txt, outputs/workdir/r.csv "
        "differ, not compared to the bit"
    )
    verdict, lines = compared(3, {}, **other)
    assert verdict.reproduced
    assert lines[0] == "REPRODUCED ffffffffffff: files, metrics and steps are equal"
    verdict, lines = compared(4, {}, **{"workdir/r.csv": "loss 2"})
    assert (verdict.nothing, verdict.reproduced) == (True, False)
    assert lines[0].endswith("it stays unproven (program.outputs=['GLOB'] says which files are results)")
    assert "outputs/workdir/r.csv differs, not compared to the bit" in lines[1]


@pytest.mark.slow
def test_a_script_that_is_started_without_torchrun_has_the_one_rank_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cluster.validation.usable_gpus", lambda: 0)
    words = ["program.script=a.py", "program.torchrun=false"]
    alone = {"topology": {**KEY.parts["topology"], "nproc_per_node": [1]}}
    made = replace(recipe(tmp_path), parts={**KEY.parts, **alone})
    fields = [item.field for item in reproduce._topology_changes(made, words, tmp_path)]
    assert "nproc_per_node" not in fields


def test_a_project_whose_path_holds_an_equals_sign_is_trained_again_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("pipeline.core.processes.process.attached", lambda argv, **_: given.append(argv) or 0)
    reproduce.train_again(["seed=1"], {}, project=tmp_path, database=tmp_path / "a=b" / "db")
    words = DoitMain().process_args(given[0][3:])  # without what doit takes for variables
    assert words == [f"--db-file={tmp_path}/a=b/db", "train"]


def test_what_differs_is_named_field_by_field_with_the_reason_in_the_key(tmp_path: Path) -> None:
    other = {**RESULT, "weights_sha256": "b" * 64, "metrics": {"test/accuracy": 0.25, "val/loss": 1.0}}
    key = key_of(CONFIG, torch="2.15.0")
    old, new = {"torch": "2.14.0", "packages": {"x": "1"}}, {"torch": "2.15.0", "packages": {"x": "1"}}
    verdict = compare(
        recipe(tmp_path, environments={"a": old}), run_folder(tmp_path / "again", other, key, environments={"b": new})
    )
    assert not verdict.reproduced
    assert text(verdict).splitlines() == [
        f"NOT REPRODUCED {KEY.short}: 2 values differ",
        "  test/accuracy: 0.5 → 0.25",
        f"  weights_sha256: {'a' * 64} → {'b' * 64}",
        f"its key is {key.short} here, because of:",
        "  torch 2.14.0 → 2.15.0",
        "hosts and lock differ in:",
        "  node0.torch: 2.14.0 → 2.15.0",
    ]


def test_data_that_is_gone_is_named_with_its_digest_and_the_mend(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as caught:
        reproduce._prepare_inputs(recipe(tmp_path), str(tmp_path / "gone.npz"), tmp_path / "data", print)
    assert f"the data of run {KEY.short} (digest dddddddddddd) is gone: dataset.source={tmp_path}/gone.npz" in str(
        caught.value
    )
    assert "try: dataset.source=<where it is now>" in str(caught.value)


@pytest.mark.slow
def test_the_runs_words_are_kept_but_for_what_says_where(tmp_path: Path) -> None:
    made = recipe(
        tmp_path, overrides=["experiment=x", "paths.runs=/old", "tracking.uri=x", "cluster=two_node", "seed=1"]
    )

    def words_of(run: Recipe, *overrides: str, source: str | None = None) -> list[str]:
        return reproduce._overrides(run, overrides, root=tmp_path / "it's here", project=tmp_path, source=source)

    assert words_of(made) == ["experiment=x", "cluster=two_node", "seed=1"]
    others = ["cluster=pssh", "cluster.checkpoint_mirror=null"]
    assert words_of(made, "cluster=pssh", "paths.data=/d") == ["experiment=x", "seed=1", *others]
    assert words_of(made, "cluster.ssh_config=/s") == [*words_of(made), "cluster.ssh_config=/s"]
    mirrored = replace(made, config={"cluster": {"checkpoint_mirror": "s3://bucket/x"}})
    assert words_of(mirrored)[-1] == "cluster.checkpoint_mirror=null"
    pattern = r"(?P<loss>\d+\.\d)${x} 'a'\\"
    later = replace(made, config={"program": {"metrics_pattern": pattern}})
    words = ["program=script", "program.script=a.py", words_of(later)[-1]]
    assert resolve(compose_config(words))["program"]["metrics_pattern"] == pattern
    lab = replace(made, config={"cluster": {"ssh_config": ".lab/ssh_config"}})
    source, ssh_config = words_of(lab, source="/data/a,b.npz")[-2:]
    assert source == "dataset.source='/data/a,b.npz'"
    composed = resolve(compose_config(["cluster=two_node", ssh_config]))
    at_home = f"{tmp_path}/it's here/.lab/ssh_config"
    assert composed["cluster"]["ssh_config"] == at_home
    bare = replace(made, provenance={**made.provenance, "overrides": []})
    typed = resolve(compose_config(words_of(bare, "cluster=two_node")))
    assert typed["cluster"]["ssh_config"] == at_home, "as `train --force` passes its own words on"


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("result.json", "it isn't finished"),
        ("key.json", "key.json is missing"),
        ("changes.patch", "changes.patch is missing"),
    ],
)
def test_a_run_that_lacks_a_part_is_refused_by_name(tmp_path: Path, lost: str, said: str) -> None:
    folder = run_folder(tmp_path)
    (folder.path / lost).unlink()
    with pytest.raises(PacelineError, match=said):
        read(folder, tmp_path)


def test_a_run_that_was_made_outside_of_a_repository_has_the_copy_of_its_code_and_the_projects_settings(
    tmp_path: Path,
) -> None:
    project = tmp_path / "project"
    kept = {"conf/a.yaml": "1", "trainers/x.py": "edited since", "trainers/__init__.py": "", "pipeline/__init__.py": ""}
    left = {
        ".git/x": "",
        "env/pyvenv.cfg": "",
        "env/x.py": "",
        "large.bin": "0" * (recipes._LARGEST_COPIED + 1),
        "runs/0/x": "",
    }
    for name, content in {**kept, **left, "data/x": ""}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    made = recipe(tmp_path, git_commit=None)
    paths = {"runs": "runs", "data": str(project / "data")}
    made = replace(made, config={**made.config, "paths": paths}, patch=b"")
    said: list[str] = []
    with checkout(
        made, root=project, checkout_dir=project / "runs/.reproduced/0/code", keep=False, say=said.append
    ) as place:
        there = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
        assert there == {*kept}
        assert (place / "trainers/x.py").read_bytes() == (made.folder.code / "trainers/x.py").read_bytes()
    assert said == [
        "  snapshot     trainers/x.py is the run's own copy: a copy of the project's code has another, or none"
    ]
    assert (project / "trainers/x.py").read_text() == "edited since"


def test_a_run_without_a_commit_and_without_its_code_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, git_commit=None)
    shutil.rmtree(folder.code)
    with pytest.raises(PacelineError, match=r"was not made from a commit, and .*/code, the copy of its code, is missi"):
        read(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("result.json", "0.5", "0.9", "result.json was altered: it doesn't agree with the sha256 of its own text"),
        ("key.json", '"torch": "2.14', '"torch": "2.15', "key.json was altered: it doesn't agree with its own digest"),
        ("config.json", '"lr": ', '"lr": 1', r"that the key was taken of: optimizer\.lr: [\d.]+ → 1[\d.]+\n"),
        ("code/trainers/x.py", "1.0", "7.0", "code was altered: it isn't the code that the key was taken of"),
        ("provenance.json", "cccc", "dddd", "provenance.json was altered: it isn't what it was when"),
        ("changes.patch", "a/x", "a/y", "changes.patch was altered: it isn't what it was when"),
    ],
)
def test_a_part_that_does_not_agree_with_the_key_is_refused_by_name(
    tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    folder = run_folder(tmp_path)
    read(folder, tmp_path)
    path = folder.path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(AlteredError, match=said):
        read(folder, tmp_path)


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    renamed = RunFolder(folder.path.rename(tmp_path / "0123456789ab"))
    with pytest.raises(AlteredError, match=r"result.json was altered: it is that of run"):
        read(renamed, tmp_path)


def test_secrets_are_told_anew_by_the_environment_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["seed=1", "++cluster.env.API_TOKEN=***", "++cluster.env={PROXY: 'http://***@h:1', A: 1}"]
    made = recipe(tmp_path, overrides=words)
    monkeypatch.delenv("API_TOKEN", raising=False)
    monkeypatch.setenv("PROXY", "http://bob:pw@h:1")
    with pytest.raises(PacelineError, match=r"to be given again: \+\+cluster\.env\.API_TOKEN=\*\*\*\n") as caught:
        reproduce._refuse_missing_secrets(made, [])
    assert "++cluster.env.API_TOKEN='${oc.env:API_TOKEN}', with the value in" in str(caught.value)
    reproduce._refuse_missing_secrets(made, ["++cluster.env.API_TOKEN=abc"])
    monkeypatch.setenv("API_TOKEN", "abc")
    reproduce._refuse_missing_secrets(made, [])
    told: dict[str, Any] = {"root": tmp_path, "project": tmp_path, "source": None}
    assert reproduce._overrides(made, [], **told) == [
        "seed=1",
        "++cluster.env.API_TOKEN='${oc.env:API_TOKEN}'",
        "++cluster.env={PROXY: '${oc.env:PROXY}', A: 1}",
    ]
