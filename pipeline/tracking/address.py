"""MLflow's tracking URI: its absolute form, and how its credentials stay out of messages and process lists."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from pipeline.core.errors import UsageError
from pipeline.core.redact import hide, of_environment

URI_VARIABLE = "MLFLOW_TRACKING_URI"
_USER_VARIABLE = "MLFLOW_TRACKING_USERNAME"
_PASSWORD_VARIABLE = "MLFLOW_TRACKING_PASSWORD"
_SECRET_VARIABLES = (_PASSWORD_VARIABLE, "MLFLOW_TRACKING_TOKEN")
_NAMES_OF_THIS_HOST = ("localhost", "127.0.0.1", "::1")
_NO_PROXY = "no_proxy"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def sqlite_uri(database: Path) -> str:
    """Return the address of a database file in SQLAlchemy's syntax, where ? ends the path and %20 is a space."""
    return f"sqlite:///{_quoted(database)}"


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3F")


def absolute_uri(uri: str | None, root: Path) -> str:
    """Return ``uri`` in a form that means the same store from every working directory; None: mlflow.db in ``root``.
    Raises UsageError: a file store, which MLflow no longer writes, an unknown scheme, or a missing host.
    """
    if not uri:
        return sqlite_uri(root.resolve() / "mlflow.db")
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme.startswith("sqlite"):
        path, mark, query = uri.removeprefix(f"{scheme}://").removeprefix("/").partition("?")
        if path in ("", ":memory:"):
            raise UsageError(f"tracking.uri={uri} names no file", hint="tracking.uri=sqlite:///mlflow.db")
        return f"{scheme}:///{Path(_quoted(root.resolve())) / path}{mark}{query}"
    if scheme in ("http", "https") or scheme.partition("+")[0] in _DATABASES:
        try:
            urlsplit(uri)
        except ValueError:
            why: str | None = "has a host that is none"
        else:  # the address of a database is left to its driver, which may need no host
            why = _fault(uri) if scheme in ("http", "https") else None
        if why is not None:
            raise UsageError(f"tracking.uri={redact(uri)} {why}", hint="tracking.uri=http://HOST:5000")
        return uri
    raise UsageError(
        f"tracking.uri={redact(uri)} is not a store that MLflow can write; valid: sqlite:///FILE, "
        "http://HOST:PORT, https://HOST, postgresql://…, mysql://…, mssql://…",
        hint="tracking.uri=sqlite:///mlflow.db",
    )


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of an absolute sqlite URI; None for other stores."""
    if not uri.startswith("sqlite"):
        return None
    return Path("/" + unquote(uri.partition("://")[2].partition("?")[0]).lstrip("/"))


def redact(text: str) -> str:
    """Return ``text`` without credentials in addresses and without the values of MLFLOW_TRACKING_PASSWORD, _TOKEN
    etc."""
    own = {value for name in _SECRET_VARIABLES if (value := os.environ.get(name))}
    return hide(text, own | of_environment(os.environ))


def shown(uri: str) -> str:
    """Return ``uri`` for files and messages; equal for the same store with and without a login."""
    return redact(recorder_env(uri)[URI_VARIABLE])


def has_credentials(uri: str) -> bool:
    """Return True if ``uri`` must not appear in a process list."""
    return hide(uri) != uri


def recorder_env(uri: str) -> dict[str, str]:
    """Return the recorder's additional environment: address, user and password in MLflow's variables.

    An http address without credentials can't leak them in an error message. A database's address keeps its login, which
    can't be passed otherwise. A server on this host is excepted from proxies.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return {URI_VARIABLE: uri}
    direct = {}
    if is_here(uri):
        hosts = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY.upper(), "")
        direct[_NO_PROXY] = ",".join(filter(None, (hosts, parts.hostname)))
    if "@" not in parts.netloc:
        return {URI_VARIABLE: uri, **direct}
    login, _, host = parts.netloc.rpartition("@")
    user, colon, password = login.partition(":")
    bare = urlunsplit(SplitResult(parts.scheme, host, parts.path, parts.query, parts.fragment))
    credentials = {_PASSWORD_VARIABLE: unquote(password)} if colon else {}  # else the environment's own counts
    return {URI_VARIABLE: bare, _USER_VARIABLE: unquote(user), **credentials, **direct}


def is_here(url: str) -> bool:
    """Return True if the address names this host, where no proxy may be used."""
    return urlsplit(url).hostname in (*_NAMES_OF_THIS_HOST, os.uname().nodename.lower())


def _fault(url: str) -> str | None:
    """Return why no request can go to ``url``, in words without its login; None if one can."""
    if not url.isprintable() or " " in url:
        return "holds a space or another character that no address has"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (asking for it reads it)
    except ValueError:
        return "has a host or port that is none"
    return None if parts.hostname else "names no host"


def database_login(uri: str, environ: Mapping[str, str], home: Path) -> str:
    """Return a PostgreSQL ``uri`` with the password of PGPASSWORD, PGPASSFILE or ~/.pgpass, as libpq would add it.

    The driver is pg8000 unless the address names one. Other addresses are returned unchanged. The result is only for
    the environment of the process that opens the database.
    """
    parts = urlsplit(uri)
    if parts.scheme.partition("+")[0] != "postgresql":
        return uri
    login, at, host = parts.netloc.rpartition("@")
    if at and ":" not in login:
        password = environ.get("PGPASSWORD") or _pgpass(parts, environ.get("PGPASSFILE") or str(home / ".pgpass"))
        login += f":{quote(password, safe='')}" if password else ""
    scheme = "postgresql+pg8000" if parts.scheme == "postgresql" else parts.scheme
    return urlunsplit(SplitResult(scheme, f"{login}{at}{host}", parts.path, parts.query, parts.fragment))


def _pgpass(parts: SplitResult, file: str) -> str:
    """Return the password of the first matching line ``host:port:database:user:password``; '' without one, or if others
    may read the file, as libpq does (PostgreSQL documentation, "The Password File").
    """
    path = Path(file)
    if not path.is_file() or path.stat().st_mode & 0o077:
        return ""
    wanted = (parts.hostname or "", str(parts.port or 5432), parts.path.lstrip("/"), unquote(parts.username or ""))
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = [re.sub(r"\\(.)", r"\1", item) for item in re.split(r"(?<!\\):", line, maxsplit=4)]
        if len(fields) == 5 and all(field in ("*", has) for field, has in zip(fields, wanted, strict=False)):
            return fields[4]
    return ""
