"""The fixture ``image``: an image of podman whose programs, Python and packages are this host's, so it has 12 kB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cluster.agent.host.container import this_login

_HYBRID = Path("/sys/fs/cgroup/unified")
_WITHOUT_HYBRID = f'#!/bin/sh\nexec unshare --mount sh -c \'umount {_HYBRID}; exec "$0" "$@"\' %s "$@"\n'
"""crun refuses hosts that have both versions of control groups; so each command of podman gets a view without one."""


_PARTS = tuple({str(Path(path).resolve()): None for path in ("/usr", sys.prefix, sys.base_prefix)})


@dataclass(frozen=True)
class Image:
    """Its name, the folders of the host that it needs, and its id. Its file /etc/in-image is on no host."""

    name: str
    digest: str
    mounts: tuple[str, ...] = _PARTS

    @property
    def words(self) -> tuple[str, ...]:
        """Overrides of a run in it."""
        return f"cluster.container={self.name}", f"cluster.container_mounts=[{','.join(self.mounts)}]"

    def left(self, key: str) -> list[str]:
        """Names of the containers of a run that podman still has; other workers of pytest have their own."""
        listed = podman("ps", "--all", "--format", "{{.Names}}").stdout.split()
        return [name for name in listed if name.startswith(f"paceline-{key}-")]


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *words], capture_output=True, text=True, check=False)


@contextmanager
def made(name: str = "localhost/paceline-test") -> Iterator[Image]:
    """The image, removed at the end. Raises RuntimeError: podman makes none here."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if _HYBRID.is_dir():
            (programs := Path(folder, "bin")).mkdir()
            (programs / "podman").write_text(_WITHOUT_HYBRID % shutil.which("podman"))
            (programs / "podman").chmod(0o755)
            patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        with tarfile.open(f"{folder}/image.tar", "w") as archive:
            for path in ("bin", "lib", "lib64", "sbin"):
                link = tarfile.TarInfo(path)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{path}"
                archive.addfile(link)
            for path in ("etc", "tmp"):
                place = tarfile.TarInfo(path)
                place.type, place.mode = tarfile.DIRTYPE, 0o1777
                archive.addfile(place)
            archive.addfile(tarfile.TarInfo("etc/in-image"))
        path = f"{sys.prefix}/bin:/usr/bin"
        done = podman("import", "--quiet", "--change", f"ENV PATH={path}", f"{folder}/image.tar", name)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        try:
            yield Image(name, f"sha256:{podman('image', 'inspect', '--format', '{{.Id}}', name).stdout.strip()}")
        finally:
            podman("rmi", "--force", name)


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    """The image, of this worker; the tests are skipped on a kernel on which podman starts nothing."""
    if shutil.which("podman") is None:
        pytest.skip("needs podman: apt-get install podman crun")
    with made(f"localhost/paceline-test-{os.getpid()}") as image:
        mounts = [f"--volume={path}:{path}:ro" for path in image.mounts]
        limits = [f"--ulimit={name}={value}" for name, value in this_login().ulimits.items()]
        done = podman("run", "--rm", "--network=host", "--pid=host", *limits, *mounts, image.name, "/usr/bin/true")
        if done.returncode != 0:
            pytest.skip(f"podman can start nothing here: {done.stderr.strip()}")
        yield image
