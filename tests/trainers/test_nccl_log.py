"""The transport that NCCL took, from lines that it has printed on clusters of other people (versions 2.4 to 2.19)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainers.distributed import process_group

INFINIBAND = """\
testgpu2:3255:3262 [1] NCCL INFO NCCL_IB_HCA set to mlx5_0
testgpu2:3255:3262 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ibs65:10.10.10.101<0>
testgpu2:3255:3262 [1] NCCL INFO Using non-device net plugin version 0
testgpu2:3255:3262 [1] NCCL INFO Using network IB
"""
SOCKETS = """\
node1:924:1152 [5] NCCL INFO NET/IB : No device found.
node1:924:1152 [5] NCCL INFO NET/Socket : Using [0]ibp12s0:10.149.0.32<0>
node1:924:1152 [5] NCCL INFO Using network Socket
"""
OLD = """\
master_node:20:289 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>
master_node:20:289 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
"""
PLUGIN = "qh100-gpu19:49355:49414 [1] NCCL INFO Using network IBext\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SOCKETS, "NCCL sends over sockets ([0]ibp12s0:10.149.0.32<0>): NET/IB : No device found"),
        (SOCKETS.splitlines()[2], "NCCL sends over sockets"),
        (INFINIBAND, None),
        (OLD, None),
        (PLUGIN, None),
        ("", None),
    ],
)
def test_sockets_are_told_with_the_interface_and_the_reason(text: str, told: str | None) -> None:
    assert process_group.nccl_fallback(text) == told


def test_a_rank_reads_its_own_log_and_warns_where_there_is_infiniband(tmp_path: Path) -> None:
    (tmp_path / f"nccl.{os.getpid()}").write_text(SOCKETS)
    told = {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p"}
    text = process_group.nccl_warning(told) or ""
    assert text.startswith("warning: NCCL sends over sockets ([0]ibp12s0")
    assert "though this host has InfiniBand (mlx5_0:1), so" in text


@pytest.mark.parametrize("change", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_HCA": None}, {"NCCL_DEBUG_FILE": None}])
def test_nothing_is_said_where_sockets_are_meant_or_nothing_is_known(
    tmp_path: Path, change: dict[str, str | None]
) -> None:
    (tmp_path / f"nccl.{os.getpid()}").write_text(SOCKETS)
    told = {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p", **change}
    assert process_group.nccl_warning({name: value for name, value in told.items() if value is not None}) is None
