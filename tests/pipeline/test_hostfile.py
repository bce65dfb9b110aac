"""Hostfiles as people write them, and what is refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config.cluster import build_cluster, parse_ssh
from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import UsageError
from pipeline.core.specs import Host, unfit_name


def test_lines_comments_and_blank_lines() -> None:
    text = "# my lab\n\nnode0 slots=4\nme@node1:2222   slots=2  # the old one\n[fd00::7]:22\nfe@[fd00::8%eth0]\n"
    assert parse_ssh(text, "hosts") == [
        HostConfig(name="node0", nproc_per_node=4),
        HostConfig(name="node1", user="me", port=2222, nproc_per_node=2),
        HostConfig(name="fd00::7", port=22),
        HostConfig(name="fd00::8%eth0", user="fe"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a:0", "hosts:1: port='0' must be a whole number from 1 to 65535"),
        ("a:65536", "hosts:1: port='65536' must be a whole number from 1 to 65535"),
        ("a:ssh", "hosts:1: port='ssh' must be"),
        ("a:", "hosts:1: 'a:' is YAML, and a hostfile has one host in each line"),
        ("hosts: [node0, node1]", "hosts:1: 'hosts: [node0, node1]' is YAML, and a hostfile has one host in each line"),
        ("  - node0", "hosts:1: '- node0' is YAML"),
        ("node0,node1", "hosts:1: 'node0,node1' is not a host name that ssh can be given: it holds ','; a line is"),
        ("a slots=0", "hosts:1: slots='0' must be a whole number from 1"),
        ("a slots=two", "hosts:1: slots='two' must be"),
        ("a slots=²", "hosts:1: slots='²' must be"),
        ("a gpus=2", "hosts:1: 'gpus=2' is not understood"),
        ("a b", "hosts:1: 'b' is not understood"),
        ("a slots=1 slots=2", "hosts:1: slots is given twice, 1 and 2; keep one of the two"),
        ("a\0b", "hosts:1: 'a\\x00b' is not a host name that ssh can be given: it holds '\\x00'"),
        ("a\x1cb", "hosts:1: 'b' is not understood"),
        ("no\u200bde0", "hosts:1: 'no\\u200bde0' is not a host name that ssh can be given: it holds '\\u200b'"),
        ("fd00::7", "hosts:1: 'fd00::7' is not a host"),
        ("[gpu]",
         "hosts:1: '[gpu]' is not a host; a line is [user@]host[:port] [slots=N], an IPv6 address is written in"),
        ("@a", "hosts:1: '@a' is not a host"),
        ("-oProxyCommand=x", "hosts:1: '-oProxyCommand=x' is not a host"),
        ("a;b", "hosts:1: 'a;b' is not a host name that ssh can be given: it holds ';'"),
        ("h" * 300,
         f"hosts:1: '{'h' * 300}' is not a host name that ssh can be given: it has 300 characters, of at most 253"),
        ("$(id)@a", "hosts:1: '$(id)@a' is not a user name that ssh can be given: it holds '('"),
        ("", "hosts names no host"),
    ],
)  # fmt: skip
def test_bad_lines_are_refused_with_file_line_and_value(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ssh(line + "\n", "hosts")
    assert caught.value.what.startswith(message)


def test_marks_of_windows_are_no_part_of_names_and_lines_without_slots_take_the_clusters(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode0 max_slots=4\r\nnode1\tslots=1\r\n")
    words = ("cluster=pssh", "cluster.hostfile=hosts", "cluster.nproc_per_node=8")
    hosts = build_cluster(resolve(compose_config(words))["cluster"], root=tmp_path, local_gpus=0).hosts
    assert [(host.name, host.nproc_per_node) for host in hosts] == [("node0", 8), ("node1", 1)]


def test_a_name_in_the_configuration_holds_nothing_that_nobody_sees() -> None:
    assert unfit_name(Host(name="node0\u200b")) == "is not a host name that ssh can be given: it holds '\\u200b'"
    assert unfit_name(Host(name="knoten-ä0")) is None
