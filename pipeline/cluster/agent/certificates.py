"""What this host has of the files with which ranks encrypt what they send each other."""

# Requests carry paths as text: os.path all the way.
# ruff: noqa: PTH111, PTH123
from __future__ import annotations

import os

from .wire import Json


def certificates(files: dict[str, str]) -> Json:
    """Setting → what is wrong with its file (``error``), or until when the certificate holds (``until``, unix seconds).

    Args:
        files: setting → path; a key has no end.
    """
    return {name: look(os.path.expanduser(path), is_key=name.endswith("_key")) for name, path in files.items()}


def look(path: str, *, is_key: bool) -> Json:
    import ssl

    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        if is_key:
            return {} if "PRIVATE KEY-----" in text else {"error": "holds no private key in PEM form"}
        decoded = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]  # the one reader that Python has
        return {"until": ssl.cert_time_to_seconds(decoded["notAfter"])}
    except ssl.SSLError:
        return {"error": "holds no certificate in PEM form"}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    except (UnicodeDecodeError, KeyError, ValueError) as error:
        return {"error": f"can't be read: {error}"}
