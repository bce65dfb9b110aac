"""The environment of the ranks: built from what is named here, what Paceline sets and ``cluster.env``, not inherited.

A variable that changes arithmetic or the choice of code (``FAMILIES``) reaches the ranks through ``cluster.env`` alone,
where it counts in the run's key. Names are patterns as ``fnmatch`` takes them. Standard library only; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_text
from pipeline.core.printable import hydra_value, shell_word
from pipeline.core.redact import in_forms, is_secret_name
from trainers.core import dependencies

_OF_PROGRAMS = ("PATH", "SHELL", "*LIBRARY_PATH", "NIX_LD")  # where they lie differs from shell to shell


def variable_digests(environ: Mapping[str, str], keyed: Iterable[str] = ()) -> dict[str, str | None]:
    """sha256 of each variable that a program gets from this environment and that isn't compared otherwise.

    Args:
        keyed: those that the configuration sets in their place: None, as their values are part of the key.
    """

    hashed = {
        name: sha256_text(value)
        for name, value in environ.items()
        if matches(name, NEEDED)
        and not matches(name, _OF_PROGRAMS)
        and not is_secret_name(name)
        and not any(in_forms(value))
    }
    return {**hashed, **dict.fromkeys(keyed)}


def changed_variables(
    record: Mapping[str, Any], known: Mapping[str, str | None] | None, environ: Mapping[str, str]
) -> str | None:
    """The first variable that the program's own code read and that has another value now, in words.

    Args:
        record: what the program took in (``trainers.core.dependencies``).
        known: ``digests`` of the environment that it got; None: that isn't known, or was another computer's.
    """
    names = record.get("own_variables")
    if not names or known is None or record.get("host") != dependencies.host():
        return None
    now = variable_digests(environ)
    for name in names:
        if known.get(name, "") not in (None, now.get(name, "")):
            return f"the variable {name}, which it read and its key lacks, changed"
    return None


NEEDED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "LOCALE_ARCHIVE", "TZ"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "NIX_LD", "NIX_LD_LIBRARY_PATH"),
    *("CONDA_PREFIX", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH", "TORCH_HOME"),
)
"""What a program needs to run: taken from the host as it is there."""

WHERE = (
    *("TMPDIR", "TMP", "TEMP", "XDG_*", "KRB5CCNAME", "KRB5_CONFIG", "MPLCONFIGDIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"),
    *("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER", "PYTHONSTARTUP", "PYTHONUNBUFFERED"),
)
"""What only says where (which GPUs, cores, network, folders) or what is logged: taken from the host too, and no part of
the key when ``cluster.env`` sets it."""

PASSED = (*NEEDED, *WHERE)
"""Everything that a rank may have from its host."""

ALWAYS = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
"""What every torchrun has besides; without the first, sets of texts had another order in every process."""

FAMILIES = (
    *("ATEN_*", "TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "TRITON_*", "NPY_*"),
    *("DNNL_*", "ONEDNN_*", "MKLDNN_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "VECLIB_*"),
    *("OMP_*", "KMP_*", "GOMP_*", "MALLOC_*", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES"),
    *("NVIDIA_TF32_*", "CUBLAS_*", "CUBLASLT_*", "CUDNN_*", "CUDA_*", "NCCL_*", "GLOO_*", "UCX_*"),
    *("HIP_*", "HSA_*", "ROCBLAS_*", "MIOPEN_*", "PYTHON*"),
)
"""What changes arithmetic or the choice of code. One that a shell or login script sets is left behind; that is said."""

_DESCRIBES = ("*_VERSION", "*_SHA256", "*_URL", "*_ROOT", "*_HOME", "*_modshare")
"""Names under which container images and module systems tell what is installed: nothing reads them, nothing is said."""

_LONGEST_SHOWN = 120  # characters of a value


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a variable's name is among the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def decides(name: str) -> bool:
    """Whether a variable of ``cluster.env`` can change a result, and so counts in the key."""
    return not matches(name, WHERE)


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process that makes results may have of the environment it is started from."""
    return {name: value for name, value in environ.items() if matches(name, PASSED)}


def of_report(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment of a process that evaluates by the code under ``root``."""
    return {**passed(environ), "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}


def left_behind(dropped: Mapping[str, Mapping[str, str]], *, whose: str) -> list[str]:
    """One line for all hosts whose environment sets the same variables that don't reach the ranks.

    Args:
        dropped: host → the variables of FAMILIES that its probe saw and that are not passed.
        whose: whose they are, for the text: ``this shell`` or ``the login shell there``.
    """
    hosts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host, variables in dropped.items():
        kept = tuple((name, value) for name, value in sorted(variables.items()) if not matches(name, _DESCRIBES))
        if kept:
            hosts.setdefault(kept, []).append(host)
    return [f"{', '.join(names)}: {_sentence(variables, whose)}" for variables, names in hosts.items()]


def _sentence(variables: Sequence[tuple[str, str]], whose: str) -> str:
    # here: the key asks this module about names, and a finished run has no use for these

    open_ = [(name, "…" if is_secret_name(name) else value) for name, value in variables]
    seen = ", ".join(f"{name}={_shown(value)}" for name, value in open_)
    words = " ".join(shell_word(f"cluster.env.{name}={hydra_value(value)}") for name, value in open_)
    one = len(variables) == 1
    return (
        f"{seen} of {whose} {'is' if one else 'are'}n't passed to the ranks; {words} "
        f"{'takes it' if one else 'takes them'} along, as a part of the run's key"
    )


def _shown(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "…"
