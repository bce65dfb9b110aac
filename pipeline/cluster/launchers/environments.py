"""The environment that each host has of a lock file (``cluster.environment_from``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import HostError, UsageError
from pipeline.core.files import expanded, sha256_text
from pipeline.core.places import ROOT

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher

_OF_THEROOT = "lock"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The lock file, and the folder of wheels here that it is installed from (None: hosts have a network)."""

    lock: Path
    wheelhouse: Path | None

    @property
    def request(self) -> dict[str, Any]:
        """What names the environment on a host, beside the host's own Python and platform. Raises UsageError."""
        return {"lock_sha256": sha256_text(self.text)}

    @property
    def text(self) -> str:
        """Raises UsageError."""
        try:
            return self.lock.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cluster.environment_from: {self.lock} can't be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``python`` is its interpreter, None where it isn't there; ``place`` is where it belongs."""

    host: str
    place: str
    python: str | None
    python_version: str


def wanted(environment_from: str | None, wheelhouse: str | None) -> Wanted | None:
    """Of the settings; None where hosts have environments of their own. Raises UsageError: no such file or folder."""
    if environment_from is None:
        if wheelhouse is not None:
            raise UsageError("cluster.wheelhouse is for cluster.environment_from=lock, which isn't set")
        return None
    name = "requirements.lock" if environment_from == _OF_THEROOT else environment_from
    lock = ROOT / expanded(name, f"cluster.environment_from={name}")
    wheels = ROOT / expanded(wheelhouse, f"cluster.wheelhouse={wheelhouse}") if wheelhouse is not None else None
    if not lock.is_file():
        raise UsageError(
            f"cluster.environment_from={environment_from}: there is no file {lock}",
            hint="cluster.environment_from=lock takes the project's requirements.lock",
        )
    if wheels is not None and not wheels.is_dir():
        raise UsageError(
            f"cluster.wheelhouse={wheelhouse}: there is no folder {wheels}",
            hint=f"python -m pip download --no-deps --require-hashes -r {lock} -d {wheelhouse}",
        )
    return Wanted(lock=lock, wheelhouse=wheels)


def find(launcher: AgentLauncher, what: Wanted) -> list[Environment]:
    """What each host has, in their order; asked of the interpreters that the configuration names. Raises HostError."""
    request = {"do": "find_environment", "workdir": launcher.workdir, **what.request}
    values = launcher.demand("looking for the environment", launcher.ask(request))
    return [Environment(host=host.label, **values[host.label]) for host in launcher.cluster.hosts]


def interpreters(launcher: AgentLauncher, what: Wanted) -> dict[str, str]:
    """Host label → the interpreter of its environment. Raises HostError that names those which have none."""
    found = find(launcher, what)
    lacking = [one.host for one in found if one.python is None]
    if lacking:
        raise HostError(
            f"{', '.join(lacking)}: there is no environment of {what.lock.name} (cluster.environment_from)",
            hint="doit sync with the same words makes it",
            hosts=lacking,
        )
    return {one.host: one.python for one in found if one.python is not None}
