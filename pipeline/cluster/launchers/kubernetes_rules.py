"""What the values of ``cluster=kubernetes`` may look like, so that a wrong one is told before anything starts. Pure.

The rules are those of the API ("Object Names and IDs", "Labels and Selectors" in its documentation) and, for an image,
the grammar of the package ``reference`` of github.com/distribution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pipeline.core.errors import suggestion

if TYPE_CHECKING:
    from pipeline.cluster.launchers.kubernetes import KubernetesConfig

_KINDS = ("job", "trainjob")
_LARGEST_ID = 2**31 - 1
_SHOWN = 60  # characters of a wrong value


class _Form(NamedTuple):
    """Which texts fit a field, and the words for it."""

    pattern: re.Pattern[str]
    longest: int
    words: str

    def fits(self, value: str) -> bool:
        return len(value) <= self.longest and self.pattern.fullmatch(value) is not None


_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_WORD = "[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_NAMESPACE = _Form(re.compile(_LABEL), 63, "a name of at most 63 letters a-z, digits and -")
_NAME = _Form(re.compile(rf"{_LABEL}(\.{_LABEL})*"), 253, "a name of letters a-z, digits, - and .")
_KEY = _Form(re.compile(rf"({_LABEL}(\.{_LABEL})*/)?{_WORD}"), 317, "NAME or DOMAIN/NAME, such as nvidia.com/gpu")
_VALUE = _Form(re.compile(f"({_WORD})?"), 63, "a label's value: at most 63 letters, digits, -, _ and .")
_QUANTITY = _Form(
    re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE])?"), 40, "a quantity of Kubernetes, such as 8, 500m or 64Gi"
)
_IMAGE = _Form(
    re.compile(
        rf"([A-Za-z0-9.-]+(:\d+)?/|\[[0-9A-Fa-f:]+\](:\d+)?/)?{_PATH}(/{_PATH})*(:\w[\w.-]{{0,127}})?"
        r"(@[A-Za-z][\w+.-]*:[0-9a-fA-F]{32,})?",
        re.ASCII,
    ),
    500,
    "an image's name: [host[:port]/]name[:tag][@digest], the name in lower case",
)
_SECRET = _Form(
    re.compile(rf"{_LABEL}(\.{_LABEL})*/[A-Za-z_]\w*", re.ASCII),
    500,
    "SECRET/NAME, the name of a Secret and that of its key, which becomes the variable's",
)
_FIELDS = {
    "namespace": _NAMESPACE,
    "image": _IMAGE,
    "pvc": _NAME,
    "service_account": _NAME,
    "runtime": _NAME,
    "gpu_resource": _KEY,
    "cpu": _QUANTITY,
    "memory": _QUANTITY,
    "shm_size": _QUANTITY,
}
_LISTS = {"env_from": _SECRET, "registry_logins": _NAME}
_LABELS = ("node_selector", "labels")
_NEEDED = {
    "image": "a container image with Python and torch",
    "pvc": "the claim of the volume that holds paths.runs",
    "mount_path": "where that volume is mounted, here and in the pods",
}


def problems(settings: KubernetesConfig) -> list[str]:
    """Everything that no manifest can be made of: a line each, with the field, the value seen and what it must be."""
    return [*_of_texts(settings), *_of_lists(settings), *_of_numbers(settings)]


def _of_texts(settings: KubernetesConfig) -> Iterator[str]:
    if settings.kind not in _KINDS:
        yield f"cluster.kind={settings.kind!r} is not an option; {suggestion(settings.kind, _KINDS)}"
    for name, what in _NEEDED.items():
        if not getattr(settings, name):
            yield f"cluster.{name} is not set, and pods need it: {what}"
    for name, form in _FIELDS.items():
        value = getattr(settings, name)
        if value is not None and not (name in _NEEDED and not value) and not form.fits(value):
            shown = repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN] + '…'!r} ({len(value)} characters)"
            yield f"cluster.{name}={shown} must be {form.words}"
    path = settings.mount_path
    if path and (not path.startswith("/") or ":" in path or not path.isprintable()):
        yield f"cluster.mount_path={path!r} must be an absolute path without a colon"
    elif path and not {".", ".."}.isdisjoint(path.split("/")):
        yield f"cluster.mount_path={path!r} must be a path without . and .., such as /shared"


def _of_lists(settings: KubernetesConfig) -> Iterator[str]:
    for name, form in _LISTS.items():
        for value in getattr(settings, name):
            if not form.fits(value):
                yield f"cluster.{name}: {value!r} must be {form.words}"
    for name in _LABELS:
        for key, value in getattr(settings, name).items():
            if not _KEY.fits(key):
                yield f"cluster.{name}: {key!r} must be {_KEY.words}"
            if not _VALUE.fits(value):
                yield f"cluster.{name}.{key}={value!r} must be {_VALUE.words}"


def _of_numbers(settings: KubernetesConfig) -> Iterator[str]:
    if settings.gpus is not None and settings.gpus < 0:
        yield f"cluster.gpus={settings.gpus} must be at least 0"
    if settings.run_as_user is not None and not 0 <= settings.run_as_user <= _LARGEST_ID:
        yield f"cluster.run_as_user={settings.run_as_user} must be a user's id from 0 to {_LARGEST_ID}"
