"""gloo's TLS: what is rendered, which files are refused, and who is warned."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.host.checks import certificates
from pipeline.cluster.networks import tls_warnings
from pipeline.cluster.validation import validate_hosts
from pipeline.config.cluster import build_cluster
from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster, NodeFacts
from tests.pipeline.test_plan import cluster, facts, refused, rendered

FILES = {"tls_certificate": "/etc/pki/host.pem", "tls_key": "~/host.key", "tls_ca": "/etc/pki/ca.pem"}
DAY_S = 86400.0


def encrypted(*nproc: int, **change: Any) -> Cluster:
    return cluster(*nproc, **FILES, **change)


def holding(number: int, **days: float) -> NodeFacts:
    told = {name: {"until": 1e9 + count * DAY_S} for name, count in days.items()}
    return facts(number, unix_time=1e9, extra={"certificates": told})


def test_gloo_gets_the_files_and_a_home_that_is_each_hosts_own() -> None:
    env = rendered(encrypted(1, 1), facts(0), facts(1, home="/home/me")).nodes[1].env
    assert {name: value for name, value in env.items() if name.startswith("GLOO_DEVICE")} == {
        "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
        "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT": "/etc/pki/host.pem",
        "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY": "/home/me/host.key",
        "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE": "/etc/pki/ca.pem",
    }


def test_nothing_is_encrypted_within_one_host_or_without_being_asked() -> None:
    plain, alone = rendered(cluster(1, 1), facts(0), facts(1)), rendered(encrypted(2), facts(0))
    assert not any(name.startswith("GLOO_DEVICE") for plan in (plain, alone) for name in plan.nodes[0].env)


def test_a_file_that_is_not_there_or_has_ended_is_refused_with_the_host_and_the_day() -> None:
    absent = facts(1, extra={"certificates": {"tls_key": {"error": "No such file or directory"}}})
    text = refused(encrypted(1, 1), holding(0, tls_certificate=-1), absent)
    assert text.splitlines()[1:] == [
        "  node0: cluster.tls_certificate=/etc/pki/host.pem expired on 2001-09-08; put a new one there",
        "  node1: cluster.tls_key=~/host.key: No such file or directory",
    ]


def test_a_certificate_that_ends_within_90_days_is_a_warning() -> None:
    found = [holding(0, tls_certificate=89.5, tls_ca=91), holding(1, tls_certificate=400)]
    validate_hosts(encrypted(1, 1), found)
    assert tls_warnings(encrypted(1, 1), found) == [
        "WARNING: node0: cluster.tls_certificate=/etc/pki/host.pem expires in 89 days, on 2001-12-07; put a new one "
        "there before"
    ]


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("auto", "cuda")])
def test_nccl_is_refused_for_it_does_not_encrypt(backend: str, device: str) -> None:
    with pytest.raises(UsageError, match=r"is NCCL, which doesn't encrypt\n  try: strategy\.backend=gloo"):
        validate_hosts(encrypted(1, device=device), [facts(0)], backend=backend)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tls_key": None}, r"belong together; cluster\.tls_key is null"),
        ({"tls_ca": "ca.pem"}, r"cluster\.tls_ca=ca\.pem must be an absolute path on the hosts"),
    ],
)
def test_half_a_setting_and_a_relative_path_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    from pipeline.config import compose

    raw = compose.resolve(compose.compose_config(["cluster=two_node"]))["cluster"]
    with pytest.raises(UsageError, match=says):
        build_cluster({**raw, **FILES, **change}, root=tmp_path, local_gpus=0)


def test_the_agent_reads_when_a_certificate_ends_and_whether_a_key_is_one(tmp_path: Path) -> None:
    key, pem, other = tmp_path / "host.key", tmp_path / "host.pem", tmp_path / "other"
    other.write_text("nothing of the kind")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(
        [*new, "-keyout", key, "-out", pem, "-days", "30", "-subj", "/CN=node0"], check=True, capture_output=True
    )
    seen = certificates({"tls_certificate": str(pem), "tls_key": str(key), "tls_ca": str(tmp_path / "absent")})
    in_30_days = datetime.datetime.now(datetime.UTC).timestamp() + 30 * DAY_S
    assert abs(seen["tls_certificate"]["until"] - in_30_days) < DAY_S
    assert (seen["tls_key"], seen["tls_ca"]) == ({}, {"error": "No such file or directory"})
    wrong = certificates({"tls_key": str(other), "tls_certificate": str(other)})
    assert wrong["tls_key"] == {"error": "holds no private key in PEM form"}
    assert wrong["tls_certificate"] == {"error": "holds no certificate in PEM form"}
