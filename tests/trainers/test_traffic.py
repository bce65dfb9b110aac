"""Bytes over the network, from the host's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.distributed.traffic import Places, Traffic

TABLE = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 9999999    100    0    0    0    0     0     0  9999999   100    0    0    0     0    0     0
  eth0: {received} 100    0    0    0    0     0     0  {sent}    100    0    0    0     0    0     0
 eth00: 77         100    0    0    0    0     0     0  77        100    0    0    0     0    0     0
"""


class TwoHosts(RankContext):
    """Both hosts count the same."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor * 2


def places(folder: Path, *, received: int = 0, sent: int = 0, words: tuple[int, int] | None = None) -> Places:
    (folder / "dev").write_text(TABLE.format(received=received, sent=sent))
    if words is not None:
        counters = folder / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
        counters.mkdir(parents=True, exist_ok=True)
        for way, count in zip(("rcv", "xmit"), words, strict=True):
            (counters / f"port_{way}_data").write_text(f"{count}\n")
    return Places(interfaces=folder / "dev", devices=folder)


def traffic(folder: Path, where: Places, *, nnodes: int = 2, interface: str = "eth0") -> Traffic:
    context = TwoHosts(ranks=Ranks(world_size=nnodes, nnodes=nnodes), device=torch.device("cpu"), backend="gloo")
    return Traffic(context, {"GLOO_SOCKET_IFNAME": interface}, where)


def test_the_bytes_of_the_runs_interface_since_the_last_look(tmp_path: Path) -> None:
    counted = traffic(tmp_path, places(tmp_path, received=1000, sent=50))
    places(tmp_path, received=1600, sent=150)
    assert counted.since_last_look() == {"network/sent_bytes": 200.0, "network/received_bytes": 1200.0}
    assert counted.since_last_look() == {"network/sent_bytes": 0.0, "network/received_bytes": 0.0}


def test_infiniband_counts_words_of_four_bytes_and_its_own_interface_not_twice(tmp_path: Path) -> None:
    (tmp_path / "net" / "eth0").mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "type").write_text("32\n")
    counted = traffic(tmp_path, places(tmp_path, words=(0, 0)))
    places(tmp_path, received=600, sent=100, words=(10, 1000))
    assert counted.since_last_look() == {"network/sent_bytes": 8000.0, "network/received_bytes": 80.0}


def test_an_ethernet_interface_counts_beside_the_rdma_ports_whose_traffic_it_does_not_see(tmp_path: Path) -> None:
    counted = traffic(tmp_path, places(tmp_path, words=(0, 0)))
    places(tmp_path, received=1, sent=1, words=(1, 1))
    assert counted.since_last_look()["network/sent_bytes"] == 10.0


@pytest.mark.parametrize(("interface", "nnodes"), [("eth0", 1), ("eth9", 2), ("", 2)])
def test_one_host_has_no_traffic_and_nothing_is_made_up_where_there_is_no_counter(
    tmp_path: Path, interface: str, nnodes: int
) -> None:
    counted = traffic(tmp_path, places(tmp_path), nnodes=nnodes, interface=interface)
    assert counted.since_last_look() == {}


def test_counters_that_were_reset_tell_nothing_rather_than_less_than_nothing(tmp_path: Path) -> None:
    counted = traffic(tmp_path, places(tmp_path, received=1000, sent=1000))
    places(tmp_path, received=5, sent=1500)
    assert counted.since_last_look() == {"network/sent_bytes": 1000.0, "network/received_bytes": 0.0}
