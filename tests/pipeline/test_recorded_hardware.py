"""A finished run that another processor or GPU computed is known as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.host.hardware import hardware
from pipeline.runs import recorded_hardware
from trainers.contract.host_facts import Hardware
from trainers.contract.records import as_json

MILAN = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse4_2 fma avx f16c avx2 smep vaes

processor\t: 1
model name\t: AMD EPYC
"""
GENOA = MILAN.replace("model\t\t: 1", "model\t\t: 17").replace("vaes", "vaes avx512f avx512_bf16")


def of(tmp_path: Path, text: str) -> Hardware:
    (tmp_path / "cpuinfo").write_text(text)
    return hardware(str(tmp_path / "cpuinfo"))._replace(gpu_models=(), gpu_driver=None)


def result(
    *attempts: Hardware | dict[str, Any], hosts: tuple[str, ...] = ("localhost",), device: str = "cpu"
) -> dict[str, Any]:
    told = [{"attempt": number, "nodes": [as_json(node)]} for number, node in enumerate(attempts, 1)]
    return {"hosts": [*hosts], "hardware": {"device": device, "attempts": told}}


def test_a_processor_is_known_by_family_model_stepping_and_instructions(tmp_path: Path) -> None:
    assert of(tmp_path, MILAN) == Hardware("AMD EPYC", "AuthenticAMD 25/1/1", "avx avx2 f16c fma sse4_2")
    arm = "processor : 0\nFeatures : fp asimd bf16\nCPU implementer : 0x41\nCPU variant : 0x0\nCPU part : 0xd49\n"
    assert of(tmp_path, arm).cpu_id == "0x41 0xd49/0x0"
    assert of(tmp_path, arm).cpu_flags == "asimd bf16"
    assert of(tmp_path, "") == Hardware()


def test_two_processors_of_one_name_are_told_apart(tmp_path: Path) -> None:
    milan, genoa = of(tmp_path, MILAN), of(tmp_path, GENOA)
    assert recorded_hardware.other_than_here(result(milan), milan) is None
    seen = "AMD EPYC (AuthenticAMD 25/17/1, avx512f avx512_bf16), here AMD EPYC (AuthenticAMD 25/1/1, avx2)"
    assert recorded_hardware.other_than_here(result(genoa), milan) == seen
    masked = of(tmp_path, GENOA.replace(" f16c", " avx_vnni"))  # as a hypervisor does it
    seen = recorded_hardware.other_than_here(result(genoa), masked) or ""
    assert seen.endswith(", here AMD EPYC (AuthenticAMD 25/17/1, avx512f avx512_bf16 +avx_vnni -f16c)")
    assert recorded_hardware.difference(result(genoa), result(milan)) == (
        "AMD EPYC (AuthenticAMD 25/17/1, avx512f avx512_bf16), now AMD EPYC (AuthenticAMD 25/1/1, avx2)"
    )


def test_each_attempt_counts_and_one_that_says_nothing_says_no_difference(tmp_path: Path) -> None:
    milan, genoa = of(tmp_path, MILAN), of(tmp_path, GENOA)
    assert (recorded_hardware.other_than_here(result(genoa, milan), milan) or "").startswith(
        "AMD EPYC (AuthenticAMD 25/17/1"
    )
    for unknown in ({}, result({}), {"hosts": ["localhost"], "hardware": "x"}):
        assert recorded_hardware.other_than_here(unknown, milan) is None
    elsewhere = result(genoa, milan, hosts=("node0",))
    assert (recorded_hardware.other_than_here(elsewhere, milan) or "").startswith(
        "attempt 1 by AMD EPYC (AuthenticAMD 25/17"
    )
    assert (
        recorded_hardware.other_than_here(result(genoa, genoa, hosts=("node0",)), milan) is None
    )  # who knows what it is now


def test_of_a_run_on_gpus_their_models_count(tmp_path: Path) -> None:
    here = of(tmp_path, MILAN)._replace(gpu_models=("NVIDIA H100",))
    two = of(tmp_path, GENOA)._replace(gpu_models=("NVIDIA A100", "NVIDIA A100"))
    assert recorded_hardware.other_than_here(result(two, device="cuda"), here) == "2× NVIDIA A100, here 1× NVIDIA H100"
    same = two._replace(gpu_models=("NVIDIA H100",))
    assert recorded_hardware.other_than_here(result(same, device="cuda"), here) is None
    assert recorded_hardware.other_than_here(result({"gpu_models": 5}, device="cuda"), here) is None, "damaged"


@pytest.mark.parametrize("damage", ["{", "[]", '{"nodes": 3}'])
def test_what_was_noted_of_each_attempt_is_read_in_their_order(tmp_path: Path, damage: str) -> None:
    for attempt in (10, 2):
        recorded_hardware.record(tmp_path, attempt, [Hardware(cpu_model=str(attempt))])
    (tmp_path / "attempts" / "3").mkdir()
    (tmp_path / "attempts" / "3" / recorded_hardware.FILE).write_text(damage)
    assert recorded_hardware.of_attempts(tmp_path, "cpu") == {
        "device": "cpu",
        "attempts": [{"attempt": number, "nodes": [as_json(Hardware(cpu_model=str(number)))]} for number in (2, 10)],
    }
