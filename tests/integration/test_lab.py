"""The lab: hosts that are apart from each other as real ones are, and that leave nothing behind."""

from __future__ import annotations

import os
import subprocess

import pytest

from pipeline import lab as labs
from pipeline.core.errors import HostError
from pipeline.lab import Lab
from tests.lab_fixture import on
from tests.waiting import HANG_S

pytestmark = pytest.mark.lab


# -- hosts that are apart


def test_scratch_home_and_temporary_folders_are_not_shared(lab: Lab) -> None:
    write = "mkdir -p ~/.cache/paceline && touch ~/.cache/paceline/w /tmp/t /var/tmp/v /dev/shm/s /run/r"
    assert on(lab, "node0", write).returncode == 0
    look = "ls ~/.cache/paceline/w /tmp/t /var/tmp/v /dev/shm/s /run/r 2>/dev/null | wc -l"
    assert on(lab, "node1", look).stdout.strip() == "0"
    assert (lab.hosts[0].home / ".cache/paceline/w").exists()
    assert lab.hosts[0].scratch != lab.hosts[1].scratch


def test_the_project_folder_is_hidden_from_the_hosts(lab: Lab) -> None:
    (lab.root / "secret").touch()
    assert on(lab, "node0", f"ls '{lab.root}'").stdout == ""


def test_hosts_see_only_their_own_processes(lab: Lab) -> None:
    script = "import os; print(sum(e.isdigit() for e in os.listdir('/proc')))"
    assert int(on(lab, "node0", f'python3 -c "{script}"').stdout) < 20


def test_hosts_share_the_cores_of_the_machine(lab: Lab) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // len(lab.hosts))
    assert on(lab, "node1", "nproc").stdout == f"{share}\n"


# -- links


def test_a_cut_host_is_silent_until_it_is_mended(lab: Lab) -> None:
    labs.cut(lab, "node1")
    try:
        assert not labs.answers(lab.hosts[1])
        assert labs.answers(lab.hosts[0], timeout_s=HANG_S)
    finally:
        labs.restore(lab, "node1")
    labs.wait_ready(lab)


def test_a_limit_holds_both_ways_and_mend_lifts_it(lab: Lab) -> None:
    def rates() -> list[bool]:
        shown = [
            subprocess.run(["tc", "-n", *end], capture_output=True, text=True, check=True).stdout
            for end in (
                (lab.switch, "qdisc", "show", "dev", "node0"),
                (lab.hosts[0].namespace, "qdisc", "show", "dev", "eth0"),
            )
        ]
        return ["tbf" in text and "rate 100Mbit" in text for text in shown]

    labs.limit(lab, "node0", 100)
    try:
        assert rates() == [True, True]
        assert labs.answers(lab.hosts[0])
    finally:
        labs.restore(lab, "node0")
    assert rates() == [False, False]


def test_a_host_that_is_not_there_is_named_with_the_valid_ones(lab: Lab) -> None:
    with pytest.raises(HostError, match=r"no host 'node7'; .*valid: node0, node1"):
        labs.cut(lab, "node7")
