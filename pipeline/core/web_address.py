"""Whether a text can be an address at all. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit


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
