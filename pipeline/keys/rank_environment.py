"""The environment variables that reach the ranks, as ``fnmatch`` patterns, and messages about those that don't.

A rank gets ``ALWAYS``, ``cluster.env``, and of its host's variables those in ``PASSED``. Variables that can change
results (``DECIDING``) reach a rank by ``cluster.env`` alone, where they count in the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_text
from pipeline.core.printable import hydra_value, printable, shell_word
from pipeline.core.redact import is_secret_name, secrets_by_form
from trainers.observation.input_changes import host_identity

_OF_USER = ("USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ")
NEEDED = (
    *("PATH", "HOME", "SHELL", "HOSTNAME", "LOCALE_ARCHIVE", *_OF_USER),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "NIX_LD", "NIX_LD_LIBRARY_PATH"),
    *("CONDA_PREFIX", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH", "TORCH_HOME"),
)
"""Variables that a program needs to run; they keep the host's values."""

_OF_RESOURCES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"),
    *("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
)
WHERE = (
    *_OF_RESOURCES,
    *("TMPDIR", "TMP", "TEMP", "XDG_*", "KRB5CCNAME", "KRB5_CONFIG", "MPLCONFIGDIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER", "PYTHONSTARTUP", "PYTHONUNBUFFERED"),
)
"""Variables that select resources (GPUs, cores, network, folders) or logging.

They keep the host's values too, and don't count in the key when ``cluster.env`` sets them.
"""

PASSED = (*NEEDED, *WHERE)
"""All variables that a rank may inherit from its host."""

IN_CONTAINER = (*_OF_USER, *_OF_RESOURCES)
"""The same for a rank in a container, where the host's folders and programs are other ones, or none."""

ALWAYS = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
"""Variables that every torchrun gets in addition. PYTHONHASHSEED fixes the order of sets of strings."""

DECIDING = (
    *("ATEN_*", "TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "TRITON_*", "NPY_*"),
    *("DNNL_*", "ONEDNN_*", "MKLDNN_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "VECLIB_*"),
    *("OMP_*", "KMP_*", "GOMP_*", "MALLOC_*", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES"),
    *("NVIDIA_TF32_*", "CUBLAS_*", "CUBLASLT_*", "CUDNN_*", "CUDA_*", "NCCL_*", "GLOO_*", "UCX_*"),
    *("HIP_*", "HSA_*", "ROCBLAS_*", "MIOPEN_*", "PYTHON*"),
)
"""Variables that change arithmetic or the choice of code. A message names those of a shell, which ranks don't get."""

_OF_LAUNCHERS = (
    *("*RANK", "*WORLD_SIZE", "MASTER_*", "TORCHELASTIC_*", "PACELINE_*"),
    *("SLURM_*", "PBS_*", "LSB_*", "OMPI_*", "PMI_*", "KUBERNETES_*"),
    *("PWD", "OLDPWD", "SHLVL", "DISPLAY", "WAYLAND_DISPLAY", "TERM", "COLORTERM", "COLUMNS", "LINES", "SSH_*"),
)
"""Variables of torchrun, of jobs and of terminals, which say where a process runs."""

_DESCRIBES = ("*_VERSION", "*_SHA256", "*_URL", "*_ROOT", "*_HOME", "*_modshare")
"""Variables by which container images and module systems describe installed software; dropped without a message."""

_DIFFER_BETWEEN_SHELLS = ("PATH", "SHELL", "*LIBRARY_PATH", "NIX_LD")  # another value in each terminal means nothing
_LONGEST_SHOWN = 120  # characters of a value


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a variable's name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def counts_in_key(name: str) -> bool:
    """Return True if a variable of ``cluster.env`` can change a result and so counts in the key."""
    return not matches(name, WHERE)


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that a process which produces results may inherit."""
    return {name: value for name, value in environ.items() if matches(name, PASSED)}


def for_evaluation(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return the environment of a process that makes a report with the code under ``root``."""
    return {**inheritable(environ), "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}


def variable_digests(environ: Mapping[str, str], keyed: Iterable[str] = ()) -> dict[str, str | None]:
    """Return variable → digest for what a program inherits; None for variables whose values the key has (``keyed``).
    Secrets have no digest: it could be used to guess them."""
    hashed = {
        name: sha256_text(value)
        for name, value in environ.items()
        if matches(name, NEEDED)
        and not matches(name, _DIFFER_BETWEEN_SHELLS)
        and not is_secret_name(name)
        and not any(secrets_by_form(value))
    }
    return {**hashed, **dict.fromkeys(keyed)}


def changed_variables(
    record: Mapping[str, Any], old: Mapping[str, str | None] | None, environ: Mapping[str, str]
) -> str | None:
    """Describe the first variable that the program's own code read and whose value has changed since; None: none has.
    ``record`` names these variables and the host. ``old``: ``variable_digests`` at that time; None if unknown."""
    names = record.get("own_variables")
    if not names or old is None or record.get("host") != host_identity():
        return None
    new = variable_digests(environ)
    for name in names:
        if old.get(name, "") not in (None, new.get(name, "")):
            return f"the variable {name}, which it read and its key lacks, changed"
    return None


def dropped_lines(dropped: Mapping[str, Mapping[str, str]], *, whose: str) -> list[str]:
    """Return a line for each group of hosts that set the same variables which don't reach the ranks. ``dropped``: host
    → its DECIDING variables; ``whose``: ``this shell`` or ``the login shell there``."""
    hosts_by_variables: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host, variables in dropped.items():
        shown = tuple((name, value) for name, value in sorted(variables.items()) if not matches(name, _DESCRIBES))
        if shown:
            hosts_by_variables.setdefault(shown, []).append(host)
    return [f"{', '.join(hosts)}: {_sentence(variables, whose)}" for variables, hosts in hosts_by_variables.items()]


def read_but_not_passed(names: Iterable[str], keyed: Iterable[str], environ: Mapping[str, str]) -> str | None:
    """Describe the variables of this shell that a program's own code reads (``names``) and that its ranks don't get;
    or None. ``keyed``: variables that the configuration sets. DECIDING ones are reported at the start."""
    expected = (*PASSED, *ALWAYS, *DECIDING, *_OF_LAUNCHERS, *keyed)
    missed = [(name, environ[name]) for name in names if name in environ and not matches(name, expected)]
    return _sentence(missed, "this shell, read by the code,") if missed else None


def _sentence(variables: Sequence[tuple[str, str]], whose: str) -> str:
    """Return the message that these (name, value) don't reach the ranks, with the overrides that pass them on."""
    hidden = {name for name, value in variables if is_secret_name(name) or any(secrets_by_form(value))}
    assignments = ", ".join(f"{name}={'…' if name in hidden else _shown(value)}" for name, value in variables)
    values = {name: hydra_value(value) for name, value in variables}
    values |= {name: f"'${{oc.env:{name}}}'" for name in hidden}  # Hydra reads the variable: no secret is typed
    overrides = " ".join(shell_word(f"cluster.env.{name}={value}") for name, value in values.items())
    one = len(variables) == 1
    return (
        f"{assignments} of {whose} {'is' if one else 'are'}n't passed to the ranks; {overrides} "
        f"{'takes it' if one else 'takes them'} along, as a part of the run's key"
    )


def _shown(value: str) -> str:
    return printable(value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "…")
