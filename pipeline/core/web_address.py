"""Check addresses of web services, and bypass proxies for services on this host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this host in addresses that only it can reach."""
_NO_PROXY = "no_proxy"


def is_here(url: str) -> bool:
    """Return True if the address names this host, where no proxy may be used."""
    return urlsplit(url).hostname in (*LOOPBACK, os.uname().nodename.lower())


def opener(url: str, *handlers: type) -> OpenerDirector:
    """Return an opener for ``url`` that uses the environment's proxy (``http_proxy``), except for this host."""
    from urllib.request import ProxyHandler, build_opener  # each `doit train` loads this module

    return build_opener(*handlers, *([ProxyHandler({})] if is_here(url) else []))


def past_proxies(url: str) -> dict[str, str]:
    """Return the variables that make another process bypass proxies for ``url`` in the same way."""
    known = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY.upper(), "")
    return {_NO_PROXY: ",".join(filter(None, (known, urlsplit(url).hostname)))} if is_here(url) else {}


def fault(url: str) -> str | None:
    """Explain why no request can go to ``url``, without repeating it, because it may hold a login; None if one can."""
    if not url.isprintable() or " " in url:
        return "holds a space or another character that no address has"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (asking for it reads it)
    except ValueError:
        return "has a host or port that is none"
    return None if parts.hostname else "names no host"
