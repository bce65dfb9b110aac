"""`doit train …` composes what a ``@hydra.main`` application composes, and refuses what can't work in one line."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from pipeline.config import compose, composition_errors
from pipeline.config.compose import CONF_DIRS, compose_config, register, resolve
from pipeline.core.errors import UsageError
from pipeline.core.printable import printable
from tests.quick_composition import quickly

pytestmark = pytest.mark.slow

GROUPS = {
    "dataset": ["cifar10", "mnist", "digits", "arrays", "synthetic"],
    "model": ["small_cnn", "whitened_cnn", "resnet18", "resnet50", "torchvision"],
    "optimizer": ["sgd", "adam", "muon", "airbench_muon", "torch"],
    "schedule": ["constant", "step", "one_cycle", "triangle"],
    "cluster": ["kubernetes", "local", "pssh", "slurm", "two_node"],
    "tracking": ["mlflow", "none", "wandb"],
    "experiment": ["quickstart"],
}
FIELDS = [
    "optimizer.lr=0.2",
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0",
    "seed=7",
    "++seed=8",
    "trainer.epochs=3",
    "++trainer.max_steps=5",
    "trainer.max_steps=null",
    "tracking.uri='http://h:5000/a b'",
    'tracking.uri="sqlite:///x,y.db"',
    "tracking.experiment='it''s'",
    r"tracking.experiment=it\'s",
    "cluster.env={A: '1', B: 'two words'}",
    "+cluster.env.NCCL_DEBUG=INFO",
    "++cluster.env.X='a=b'",
    "cluster.hosts=[{name: a}, {name: b, port: 2222}]",
    "cluster.hosts=[]",
    "cluster.nproc_per_node=4",
    "paths.runs='/tmp/with space'",
    "paths.runs=${paths.data}/runs",
    "dataset.source=null",
    "dataset.source=s3://bucket/key",
    "dataset.flip=true",
    "+note=[1,2,{a: b}]",
    "++note.deep.er=x",
    "~seed",
    "~tracking",
    "~paths.data",
    "~experiment",
    "optimizer@spare=adam",
    "+optimizer@spare=adam",
    "+dataset@eval_data=mnist",
    "optimizer.nope=1",
    "seed=[1,",
    "trainer.epochs=many",
    "seed=1,2",
]


def _hydra_main(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> DictConfig | None:
    """What a real ``@hydra.main`` function is given, or None where Hydra refuses."""
    given: list[DictConfig] = []

    @hydra.main(config_path=str(CONF_DIRS[0]), config_name="config", version_base="1.3")
    def application(config: DictConfig) -> None:
        given.append(config)

    register()
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["application", *overrides])
    try:
        application()
    except SystemExit:
        return None
    return given[0]


def _ours(overrides: list[str]) -> DictConfig | None:
    try:
        return compose_config(overrides)
    except UsageError:
        return None


def _dealt(rng: random.Random, most: int) -> Iterator[list[str]]:
    """Command lines that hold each field's word once, at most ``most`` in one, each with up to three groups."""
    words = rng.sample(FIELDS, k=len(FIELDS))
    choices = [(group, f"{group}={name}") for group, names in GROUPS.items() for name in names]
    rng.shuffle(choices)
    pool = cycle(choices)
    while words:
        size = rng.randint(1, most)
        line = [*dict(islice(pool, rng.randint(0, 3))).values(), *words[:size]]
        del words[:size]
        yield rng.sample(line, k=len(line))


@pytest.mark.parametrize(("most", "count"), [pytest.param(3, 99, marks=pytest.mark.long), (3, 4)])
def test_composes_what_hydra_main_composes(
    most: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    # the wording has tests of its own
    monkeypatch.setattr(composition_errors, "explain", lambda *_: UsageError("refused"))
    monkeypatch.setattr(compose, "compose", hydra.compose)
    refused = 0
    lines = list(_dealt(random.Random(most), most))[:count]
    for overrides in lines:
        theirs = _hydra_main(overrides, monkeypatch)
        ours = _ours(overrides)
        assert (ours is None) == (theirs is None), overrides
        refused += ours is None
        if ours is not None and theirs is not None:
            assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(theirs), overrides
            with monkeypatch.context() as patch:
                patch.setattr(compose, "compose", quickly)  # what the other tests compose
                assert _ours(overrides) == ours, overrides
    assert 0 < refused < 0.8 * len(lines)  # both outcomes were compared


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lrr=1", ["unknown key 'optimizer.lrr'", "did you mean optimizer.lr=1?",
         "valid in optimizer: decay_bias_and_norm, lr, "]),
        ("optimizer.bias_lr=1",
         ["unknown key 'optimizer.bias_lr'; optimizer.bias_lr is a field of optimizer=airbench_muon;"]),
        ("model=resnet", ["model=resnet", "did you mean resnet",
         "valid: own, resnet18, resnet50, small_cnn, torchvision, whitened_cnn"]),
        ("optimizer.lr=abc", ["optimizer.lr=abc: 'abc' is no number"]),
        ("seed=", ["seed=: '' is no whole number"]),
        ("cluster.env={A: '1'}", ["cluster.env is there", "to add entries write ++cluster.env={A: '1'}"]),
        ("model=[a,b]", ["model=[a,b]: model takes one option; to train with each of them: doit sweep model=a,b"]),
        ("+seed=1", ["seed is there", "to change it write seed=1"]),
        ("~model=resnet50", ["~model=resnet50: Could not delete", "No match in the defaults list"]),
        ("seed=1,2",
         ["seed=1,2", "several values are a sweep, doit sweep trainer.epochs=2 seed=1,2; for one value write"]),
        ("hosts=gpu1,gpu2", ["hosts are a list, 'cluster.hosts=[gpu1,gpu2]'"]),
        ("tracking.experiment=a,b",
         ["tracking.experiment=a,b", "\"tracking.experiment='a,b'\" for a text with a comma"]),
        ("cluster.sbatch=[--signal=TERM@120,-x]",
         ["as a list of texts it is \"cluster.sbatch=['--signal=TERM@120','-x']\""]),
        ("trainer.freeze='[a=b]'", ["a list is wanted there; write \"trainer.freeze=['a=b']\""]),
        ("seed=[1", ["seed=[1 can't be read as a list", "if all of it is a text, it needs quotes: \"seed='[1'\""]),
        (
            "++cluster.env={'A-B': 1}",
            ["cluster.env={'A-B': 1} can't be read as a list [a,b], a mapping"],
        ),  # ++ was put there
        ("trainer.freeze=x", ["trainer.freeze=x: a list is wanted there; write 'trainer.freeze=[x]'"]),
        ("cluster.hosts=[{name: a, addres: x}]",
         ["cluster.hosts: 'addres' is no field of a host; did you mean address? valid: address, env, "]),
        ("++cluster.spares=[{name: a, slots: 4}]", ["cluster.spares: 'slots' is no", "did you mean nproc_per_node?"]),
        ("cluster.hosts=node1",
         ["cluster.hosts=node1: that is no list of hosts; write 'cluster.hosts=[node1]'; else "]),
        ("cluster.hosts=[{name:a,name:b}]",
         ["{name:a,name:b}]: name stands twice in one {…}; each host has braces of"]),
        ("cluster.env={A: 1, B: '}', A: 2}", ["A stands twice in one {…}; keep one of the two"]),
        ("cluster.hosts=[null]",
         ["cluster.hosts=[null]: null is no name of a host; where one is called so, write {na"]),
        ("~cluster.hosts",
         ["~cluster.hosts: cluster.hosts always has a value and can't be deleted; write cluster.hosts="]),
        ("tracking.experiment=a=b",
         ["a text with blanks or signs needs quotes of its own, ", "\"tracking.experiment='a=b'\""]),
        ("program.metrics_pattern=(", ["program.metrics_pattern: '(' is no regular expression: missing ), "]),
        ("tracking.experiment=$x 'y'", ["quotes: \"tracking.experiment='\\$x \\'y\\''\""]),
        ("cluster.hostfile=~/hosts", ["begins with ~ needs quotes: \"cluster.hostfile='~/hosts'\""]),
        ("=3", ["=3 can't be read: write NAME=VALUE, where a name has no blanks"]),
        ("program.script==3", ["needs quotes of its own", "\"program.script='=3'\""]),
        ("program.args.=3", ["program.args.=3 can't be read: write NAME=VALUE"]),
        ("++cluster.env.A=[1,2]", ["A=[1,2] must be one text, and this is a list; ", "\"cluster.env.A='[1,2]'\""]),
    ],
)  # fmt: skip
def test_a_refused_override_is_one_line_with_the_way_on(override: str, said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        compose_config(["trainer.epochs=2", override])
    text = str(caught.value)
    assert "\n" not in text
    for part in said:
        assert part in text


def test_the_word_of_the_field_at_fault_is_named_though_a_later_one_gave_the_field_its_type() -> None:
    with pytest.raises(UsageError, match=r"^program\.env\.A=\[1\] must be one text, and this is a list; "):
        compose_config(["program.env.A=[1]", "program.script=a.py"])


@pytest.mark.parametrize(
    "text",
    [
        *("a=b", "~/x", "sh -c 'echo \"$X\"'", "back\\slash' `w` !", "back\\slash' `w`", "it's", 'a; "b" \\\\n \\',
         "é"),
        *(r"loss: (?P<loss>\d+)", r"step=(?P<step>\d+),loss=(?P<loss>\S+)", "[a-z]+ (?P<loss>\\d+)$", "a\\$b (c)",
         "a\nb c"),
    ],
)  # fmt: skip
def test_the_quotes_that_are_named_for_a_text_are_those_that_a_shell_and_hydra_take(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        compose_config([f"tracking.experiment={text}"])
    assert str(caught.value).startswith(f"tracking.experiment={printable(text)} can't be read")
    said = str(caught.value).partition(" quotes: ")[2]
    word = subprocess.run(["bash", "-c", f"printf %s {said}"], stdout=subprocess.PIPE, check=True).stdout.decode()
    assert compose_config([word]).tracking.experiment == text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("~model", "model is missing"),
        ("trainer.epochs='???'", "trainer.epochs is missing: it was deleted or set to ???; choose an option with trai"),
        ("trainer.epochs=${seeed}", "trainer.epochs: ${seeed} names no field; did you mean ${seed}?"),
        ("seed=${zzz}", "seed: ${zzz} names no field; doit config shows all fields"),
        ("seed=${oc.env:PACELINE_UNSET}", "PACELINE_UNSET"),
    ],
)
def test_a_value_that_leads_nowhere_names_its_field(override: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(compose_config([override]))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_digits_is_the_quickstart() -> None:
    assert compose_config(["experiment=digits"]) == compose_config(["experiment=quickstart"])


HEAD = "# @package _global_\n"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/, which is composed from and named in messages."""
    shutil.copytree(CONF_DIRS[0], tmp_path / "conf")
    monkeypatch.setattr(compose, "CONF_DIRS", (tmp_path / "conf",))
    monkeypatch.setattr("pipeline.config.composition_errors.ROOT", tmp_path)
    return tmp_path / "conf"


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (b"lr: 0.3\n", ", line {}: the key 'lr' stands there twice\n  try: keep one of the two lines"),
        (b"\tx: 1\n", ", line {}: a tab stands there, and YAML indents by blanks\n  try: two blanks instead"),
        (b"a: b: c\n", ", line {}: mapping values are not allowed here"),
        (b"\0\n", ": unacceptable character #x0000: special characters are not allowed"),
        (b"\xff\n", " is not UTF-8 text (byte {})"),
    ],
)
def test_a_configuration_file_that_cannot_be_read_is_named_with_its_line(conf: Path, added: bytes, said: str) -> None:
    path = conf / "optimizer" / "sgd.yaml"
    before = path.read_bytes()
    path.write_bytes(before + added)
    place = len(before) if added == b"\xff\n" else before.count(b"\n") + 1
    with pytest.raises(UsageError) as caught:
        compose.compose_config(["experiment=quickstart", "seed=1"])
    assert str(caught.value) == "conf/optimizer/sgd.yaml" + said.format(place)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("dataset=imagenet", "dataset=folder dataset.source=FOLDER for images in one folder a class, "),
        ("model=vit_b_16", "model=torchvision model.arch=NAME for one of torchvision's, "),
    ],
)
def test_a_name_that_is_like_no_option_comes_with_the_ways_to_others(word: str, hint: str) -> None:
    with pytest.raises(UsageError, match=r"has no option '[a-z0-9_]+'; valid: ") as refused:
        compose_config([word])
    assert (refused.value.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("experiment/x", HEAD + "trainer:\n  epochss: 3\n",
         ", line 3: unknown key 'trainer.epochss'; did you mean trainer.epochs? valid in trainer: accumulate_steps, "),
        ("model/x", "defaults:\n  - own\n\nwidht: 3\n",
         ", line 4: unknown key 'model.widht'; valid in model: args, inputs, name, target"),
        ("experiment/x", HEAD + "trainer:\n  epochs: many\n",
         ", line 3: trainer.epochs: 'many' is no whole number"),
        ("experiment/x", HEAD + "dataset: digits\ntrainer:\n  epochs: 2\n",
         ", line 2: dataset has fields, and 'digits' is none\n"
         "  try: - override /dataset: digits in the defaults list chooses an option"),
        ("experiment/x", HEAD + "trainer:\n  epochs:2\n",
         ", line 2: trainer has fields, and 'epochs:2' is none\n  try: a blank behind each colon"),
        ("experiment/x", HEAD + "trainer.epochs: 2\n",
         ", line 2: 'trainer.epochs' is one name with a dot\n  try: trainer: and below it, indented, epochs:"),
        ("experiment/x", "\ufeff" + HEAD + "seed: 2\n", ", line 1: a byte-order mark hides it; save the file as UTF-8"),
        ("experiment/x", "# @package _global\ndefaults:\n  - override /dataset: digits\n",
         ", line 1: without '# @package _global_' all that it sets would be fields of experiment"),
        ("experiment/x", HEAD + "defaults:\n  - x\n", ": its defaults list leads back to itself"),
        ("experiment/x", "trainer:\n  epochs: 3\n",
         ", line 1: without '# @package _global_' all that it sets would be fields of experiment, which has none\n"
         "  try: # @package _global_ as the first line of the file"),
        ("experiment/x", HEAD + "defaults:\n  - dataset: digits\n",
         ", line 3: '- dataset: digits' would look into conf/experiment/dataset, as a name without / is inside of the "
         "file's own group\n  try: - override /dataset: digits"),
        ("experiment/x", HEAD + "defaults:\n  - /dataset: digits\n",
         ", line 3: '- /dataset: digits' would choose dataset a second time, beside conf/config.yaml's\n"
         "  try: - override /dataset: digits"),
        ("experiment/x", HEAD + "defaults:\n  - override /datset: digits\n",
         ", line 3: there is no group 'datset' to override; did you mean dataset? valid: cluster, dataset, "),
        ("experiment/x", HEAD + "program: {script: a.py, argz: {lr: 1}}\n",
         ", line 2: program.script is a field of program=script, which nothing chooses\n"
         "  try: - override /program: script, in the defaults list of the file"),
        ("experiment/x", HEAD + "- a\n- b\n", ", line 2: a list stands there, and a file of conf/ has fields, as in "),
        ("dataset/x", "abc\n", ", line 1: a single value stands there, "),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_file_line_key_and_mend(conf: Path, name: str, text: str, said: str) -> None:
    (conf / f"{name}.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        resolve(compose.compose_config(["seed=1", name.replace("/", "="), "tracking=none"]))
    assert str(caught.value).startswith(f"conf/{name}.yaml{said}"), caught.value


def test_hosts_by_their_names_alone_in_a_file_are_told_how_a_file_has_them(conf: Path) -> None:
    own = f"{HEAD}cluster:\n  hosts: [c]\n"
    (conf / "experiment/own.yaml").write_text(own)
    with pytest.raises(UsageError, match=r"that is no list of hosts; .* a file takes .* hosts: \[{name: node1}, "):
        compose_config(["cluster=pssh", "experiment=own"])
    (conf / "experiment/own.yaml").write_text(own.replace("[c]", "[{name: c}]"))
    assert resolve(compose_config(["cluster=pssh", "experiment=own"]))["cluster"]["hosts"][0]["name"] == "c"
