"""Whether a text can be an address at all, and whether it is one of this computer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""What this computer is called in an address that nobody else reaches."""
_NO_PROXY = "no_proxy"


def is_here(url: str) -> bool:
    """Whether its host is this computer, by name: no proxy can reach what answers there."""
    return urlsplit(url).hostname in (*LOOPBACK, os.uname().nodename.lower())


def opener(url: str, *handlers: type) -> OpenerDirector:
    """For requests to ``url``: by the proxy of the environment (``http_proxy``), but not to this computer."""
    from urllib.request import ProxyHandler, build_opener  # each `doit train` loads this module

    return build_opener(*handlers, *([ProxyHandler({})] if is_here(url) else []))


def past_proxies(url: str) -> dict[str, str]:
    """What a process that asks ``url`` gets in its environment for the same."""
    known = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY.upper(), "")
    return {_NO_PROXY: ",".join(filter(None, (known, urlsplit(url).hostname)))} if is_here(url) else {}


def fault(url: str) -> str | None:
    """Why no request can go to ``url``, without repeating it: it may hold a login; None: one can."""
    if not url.isprintable() or " " in url:
        return "holds a space or another character that no address has"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (asking for it reads it)
    except ValueError:
        return "has a host or port that is none"
    return None if parts.hostname else "names no host"
