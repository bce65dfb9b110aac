"""What reaches the ranks of a host's own environment, and what is said of the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline.cluster import hosts
from pipeline.cluster.launchers.transport.agent_client import ENV_NAMES
from pipeline.config.compose import compose_config, resolve
from pipeline.core import places
from pipeline.keys.rank_environment import (
    DECIDING,
    PASSED,
    counts_in_key,
    dropped_lines,
    for_evaluation,
    inheritable,
    matches,
    read_but_not_passed,
)

SHELL = "this shell"


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "https_proxy", "XDG_RUNTIME_DIR"],
)
def test_what_a_program_needs_and_what_says_where_reaches_the_ranks(name: str) -> None:
    assert inheritable({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    [
        "ATEN_CPU_CAPABILITY",
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_MAX_CPU_ISA",
        "MKL_NUM_THREADS",
        "MKL_CBWR",
        "OMP_NUM_THREADS",
        "KMP_BLOCKTIME",
        "GOMP_SPINCOUNT",
        "OPENBLAS_NUM_THREADS",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TRITON_PTXAS_PATH",
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDNN_DETERMINISTIC",
        "CUDA_LAUNCH_BLOCKING",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "GLOO_DEVICE_TRANSPORT",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONOPTIMIZE",
        "LD_PRELOAD",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
    ],
)
def test_what_changes_arithmetic_stays_behind_is_named_and_counts_in_the_key(name: str) -> None:
    assert inheritable({name: "1"}) == {}
    assert matches(name, DECIDING)
    assert counts_in_key(name)
    assert name in dropped_lines({"node0": {name: "1"}}, whose=SHELL)[0]


def test_a_variable_that_nobody_knows_stays_behind() -> None:
    assert inheritable({"OF_MY_MODEL": "1", "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "PET_NNODES": "2"}) == {}


def test_the_text_names_host_and_value_and_the_word_that_takes_it_along() -> None:
    told = {"node0": {"OMP_NUM_THREADS": "1"}, "node1": {}, "node2": {"OMP_NUM_THREADS": "1"}}
    assert dropped_lines(told, whose="the login shell there") == [
        "node0, node2: OMP_NUM_THREADS=1 of the login shell there isn't passed to the ranks; "
        "cluster.env.OMP_NUM_THREADS=1 takes it along, as a part of the run's key"
    ]


def test_a_value_that_may_be_a_secret_is_not_shown() -> None:
    (text,) = dropped_lines({"node0": {"TORCH_HUB_TOKEN": "hidden"}}, whose=SHELL)
    assert "TORCH_HUB_TOKEN=…" in text
    assert "hidden" not in text


def test_what_an_image_tells_of_itself_is_not_mentioned() -> None:
    assert (
        dropped_lines({"node0": {"CUDA_VERSION": "12.8", "PYTHON_SHA256": "ab", "NCCL_HOME": "/x"}}, whose=SHELL) == []
    )


@pytest.mark.parametrize(
    "value",
    [
        *("1", "01", "1e5", "true", "null", "", "a b", "/a/b.so:/c", "a'b\\c", "4,2", "${x}", "\\", "\\'", "[1]",
         "$HOME"),
        *("9.0a", "a$b", 'one "two"', "it's", "new\nline", "`id`", "a!b\\"),
    ],
)  # fmt: skip
def test_the_word_works_when_it_is_typed(value: str) -> None:
    text = dropped_lines({"node0": {"OMP_X": value}}, whose=SHELL)[0]
    shown = text.partition("; ")[2].rpartition(" takes it")[0]
    word = subprocess.run(["bash", "-c", f"printf %s {shown}"], stdout=subprocess.PIPE, check=True).stdout.decode()
    assert resolve(compose_config((word,)))["cluster"]["env"] == {"OMP_X": value}


def test_a_report_is_made_by_the_projects_code_in_an_environment_of_its_own() -> None:
    made = for_evaluation({"PATH": "/bin", "PYTHONPATH": "/elsewhere", "OMP_NUM_THREADS": "3"}, Path("/project"))
    assert made == {"PATH": "/bin", "PYTHONPATH": "/project", "PYTHONHASHSEED": "0"}


def test_a_pattern_that_is_sent_to_hosts_is_a_name_or_the_beginning_of_names() -> None:
    """The agent looks no further than at a star at the end (pipeline/cluster/agent/host/probe.py)."""
    patterns = [*PASSED, *DECIDING, *ENV_NAMES]
    assert [one for one in patterns if {*one.removesuffix("*")} & {*"*?[]!"}] == []


def test_the_pythonpath_of_the_project_itself_is_nothing_to_take_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "ROOT", tmp_path)
    for folder in (tmp_path, places.HOME):
        assert hosts._without_own_paths({"PYTHONPATH": str(folder), "NCCL_ALGO": "Tree"}) == {"NCCL_ALGO": "Tree"}
    assert hosts._without_own_paths({"PYTHONPATH": "/else"}) == {"PYTHONPATH": "/else"}


def test_variables_of_this_shell_that_the_code_reads_and_does_not_get_are_named_with_the_way_to_pass_them() -> None:
    environ = {"LR": "0.2", "A_TOKEN": "hidden", "USER": "me", "RANK": "3", "OMP_X": "1", "UNREAD": "1", "SET": "1"}
    text = read_but_not_passed(["A_TOKEN", "LR", "OMP_X", "RANK", "SET", "UNSET", "USER"], ["SET"], environ)
    assert text is not None
    assert text.startswith("A_TOKEN=…, LR=0.2 of this shell, read by the code, aren't passed to the ranks; ")
    assert r"""cluster.env.A_TOKEN='\${oc.env:A_TOKEN}'" "cluster.env.LR='0.2'" takes them along""" in text
    assert read_but_not_passed(["USER"], [], environ) is None
    text = read_but_not_passed(["URL"], [], {"URL": "postgres://me:secret99@host/db"})
    assert "secret99" not in str(text)
    assert r"cluster.env.URL='\${oc.env:URL}'" in str(text)
