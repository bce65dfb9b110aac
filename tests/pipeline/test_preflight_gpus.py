"""The judgements of preflight on GPUs: answers as nvidia-smi's manual describes them (csv,noheader,nounits)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.cluster.preflight import State, hardware
from pipeline.core.specs import Host
from tests.pipeline.test_preflight_checks import CUDA, ONE, found, told
from trainers.contract.host_facts import NvidiaSmi

A100 = NvidiaSmi(
    devices="0, GPU-5d9b3a54-30f1-3a6b-9f43-9c9a0a5d9b3a, NVIDIA A100-SXM4-80GB, 81920, 0\n"
    "1, GPU-8f6b1c22-8a0e-7c2d-1b1d-2f0c0b7e4f11, NVIDIA A100-SXM4-80GB, 81920, 2\n",
    throttling="0, 0x0000000000000001\n1, 0x0000000000000060\n"
    'Field "clocks_event_reasons.active" is not a valid field to query.\n\n',
    processes="GPU-8f6b1c22-8a0e-7c2d-1b1d-2f0c0b7e4f11, 4242, 61230, /opt/venv/bin/python, -u\n",
)
GEFORCE = NvidiaSmi(
    devices="0, GPU-00000000-1111-2222-3333-444444444444, NVIDIA GeForce RTX 4090, 24564, [N/A]\n",
    throttling='Field "clocks_throttle_reasons.active" is not a valid field to query.\n\n0, 0x0000000000000004\n',
)


def test_the_answers_of_nvidia_smi_are_read_whole() -> None:
    first, second = hardware.parse_gpus(A100)
    assert (first.index, first.name, first.memory_mib) == (0, "NVIDIA A100-SXM4-80GB", 81920)
    assert (first.uncorrected_errors, first.slowed_by, first.processes) == (0, (), ())
    assert second.slowed_by == ("heat (software)", "heat (hardware)")
    assert second.processes == (hardware.Process(pid=4242, memory_mib=61230, program="/opt/venv/bin/python, -u"),)
    (other,) = hardware.parse_gpus(GEFORCE)
    assert (other.uncorrected_errors, other.slowed_by) == (None, ())  # no ECC; a power cap is somebody's wish


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate"]
)
def test_a_driver_without_an_answer_has_no_gpus(text: str) -> None:
    assert hardware.parse_gpus(NvidiaSmi(text, text, text)) == []


def test_errors_heat_and_foreign_processes_of_a_gpu_are_named() -> None:
    what = replace(CUDA, hosts=(Host(name="node0"), Host(name="node1")))
    assert found(what, told(0, nvidia_smi=A100), told(1)) == [
        "failed node0: GPU errors: GPU 1: 2 uncorrectable memory errors since its driver was loaded (wanted: 0); sudo "
        "nvidia-smi --gpu-reset -i 1 there, or other GPUs by CUDA_VISIBLE_DEVICES in cluster.hosts[].env",
        "warning node0: GPU clocks: GPU 1 is slowed down by heat (software) and heat (hardware); "
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i 1 there",
        "warning node0: GPU processes: GPU 1 is used by /opt/venv/bin/python, -u (pid 4242, 61230 MiB); "
        "ps -fp 4242 there shows whose",
    ]


@pytest.mark.parametrize("chosen", ["0", "GPU-5d9b3a54"])
def test_gpus_that_the_configuration_hides_are_not_judged(chosen: str) -> None:
    hosts = (Host(name="node0", env={"CUDA_VISIBLE_DEVICES": chosen}), Host(name="node1"))
    assert found(replace(CUDA, hosts=hosts), told(0, nvidia_smi=A100), told(1)) == []


def test_hosts_with_other_gpus_are_shown() -> None:
    healthy = NvidiaSmi(devices=(A100.devices or "").replace(", 2\n", ", 0\n"))
    said = found(CUDA, told(0, nvidia_smi=healthy), told(1, nvidia_smi=GEFORCE))
    assert said == [
        "warning node1: GPU model: 1 × NVIDIA GeForce RTX 4090 (wanted: 2 × NVIDIA A100-SXM4-80GB, as node0 has it); "
        "the slowest GPU sets the pace of all",
        "warning node1: GPU memory: 24564 MiB (wanted: 81920 MiB, as node0 has it); "
        "the smallest memory limits the batch of all",
    ]


def test_nvidia_smi_that_is_missing_silent_or_fails_is_a_warning_of_the_deep_form() -> None:
    outputs = [None, NvidiaSmi(), NvidiaSmi(devices="No devices were found\n"), A100]
    hosts = [told(number, host=host, nvidia_smi=outputs[number]) for number, host in enumerate("abcd")]
    checks = list(hardware.unanswered(CUDA, hosts, 5.0))
    assert [(check.host, check.state, check.seen) for check in checks] == [
        ("a", State.WARNING, "nvidia-smi isn't on the login's PATH"),
        ("b", State.WARNING, "nvidia-smi gave no answer within 5 s"),
        ("c", State.WARNING, "nvidia-smi says 'No devices were found\\n'"),
    ]
    assert list(hardware.unanswered(ONE, hosts, 5.0)) == []
