"""cluster.environment_from on a real host: made of a small lock from a folder of wheels, found and used later."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.cluster import hosts, launchers
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.lab_fixture import on

pytestmark = pytest.mark.lab

WORKDIR = "an 'environment'"


def wheel(folder: Path, name: str) -> str:
    """Write a wheel with one module; its sha256."""
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{name}.py": "VALUE = 1\n", f"{name}-1.0.dist-info/METADATA": about, f"{name}-1.0.dist-info/WHEEL": tag}
    files[f"{name}-1.0.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels $(touch x)"
    folder.mkdir()
    lines = [f"{name}==1.0 --hash=sha256:{wheel(folder, name)}\n" for name in ("tiny_one", "tiny_two")]
    (tmp_path / "a lock").write_text("".join(lines))
    return folder


@pytest.fixture
def cluster(lab: Lab, wheels: Path) -> Iterator[Cluster]:
    lock = str(wheels.parent / "a lock")
    settings = PsshConfig(environment_from=lock, wheelhouse=str(wheels), workdir=f"~/{WORKDIR}")
    yield Cluster(
        launcher="pssh",
        hosts=(Host(name="node1"),),
        ssh_config=str(lab.ssh_config),
        settings=settings,
    )
    on(lab, "node1", f'rm -rf "$HOME/{WORKDIR}"')


def test_runs_use_the_environment_that_sync_made_and_refuse_a_host_without_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = WaitReports(lambda _: None)
    with closing(hosts.remote_launcher(cluster)) as launcher:
        assert launcher.lock_file is not None
        with pytest.raises(HostError, match=r"node1: there is no environment of a lock") as caught:
            launcher.probe(None)
        assert "try: doit sync with the same words makes it" in str(caught.value)
        (made,) = hosts.ensure_environments(launcher, launcher.lock_file, reports)
        assert made.python == f"{made.place}/bin/python"
        assert made.place.startswith(f"/root/{WORKDIR}/environments/")
        (fact,) = launcher.probe(None)
        assert fact.python == made.python
        assert {name: fact.packages.get(name) for name in ("tiny-one", "tiny-two", "torch")} == {
            "tiny-one": "1.0",
            "tiny-two": "1.0",
            "torch": None,
        }
        monkeypatch.setattr(hosts, "PutWheelsRequest", None)  # the wheels are brought once
        assert [hosts.ensure_environments(launcher, launcher.lock_file, reports)] == [[made]]
    with closing(launchers.create(cluster)) as another:
        assert another.probe(None)[0].python == made.python


@pytest.mark.ci
@pytest.mark.long
def test_a_failure_leaves_nothing_and_names_host_last_lines_and_the_command(
    cluster: Cluster, lab: Lab, wheels: Path
) -> None:
    lock = wheels.parent / "a lock"
    lock.write_text(f"tiny_one==1.0 --hash=sha256:{'0' * 64}\n")
    with closing(hosts.remote_launcher(cluster)) as launcher:
        assert launcher.lock_file is not None
        with pytest.raises(HostError) as caught:
            hosts.ensure_environments(launcher, launcher.lock_file, WaitReports(lambda _: None))
    text = str(caught.value)
    assert "the environment could not be made on 1 of 1 hosts\n  node1: python ended with code 1 while" in text
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in text
    hint = text.rpartition("try: ")[2]
    assert hint.startswith(f"ssh -F '{lab.ssh_config}' node1 '")
    assert "--require-hashes --no-deps --no-index --find-links" in hint
    folder = lab.host("node1").home / WORKDIR / "environments"
    assert sorted({path.suffix for path in folder.iterdir()}) == [".lock", ".txt"]


def test_a_lock_or_wheelhouse_that_is_not_there_is_refused_before_a_host_is_asked(cluster: Cluster) -> None:
    for settings, why in (
        (PsshConfig(environment_from="nope.lock"), "environment_from=nope.lock: there is no file"),
        (PsshConfig(environment_from="lock", wheelhouse="nope"), "wheelhouse=nope: there is no folder"),
        (PsshConfig(wheelhouse="nope"), "is for cluster.environment_from=lock"),
    ):
        with pytest.raises(UsageError, match=why):
            launchers.create(Cluster(launcher="pssh", hosts=cluster.hosts, settings=settings))
