from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.source import file_name, local_path, shown


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (None, None),
        ("https://host/x.tar.gz", None),
        ("s3://bucket/x", None),
        ("file:///data/my%20set", Path("/data/my set")),
        ("/data/a/../b/", Path("/data/b")),
        ("sub/x.npz", Path.cwd() / "sub" / "x.npz"),
        ("~/x.npz", Path.home() / "x.npz"),
    ],
)
def test_which_sources_are_local(source: str | None, path: Path | None) -> None:
    assert local_path(source) == path


def test_secrets_of_an_address_are_not_shown() -> None:
    assert shown("https://me:word@host:8/a/b.npz?sig=x#y") == "https://host:8/a/b.npz"


def test_a_file_name_never_holds_a_slash() -> None:
    assert file_name("https://host/a/%2e%2e%2Fb%20c.npz?sig=x/y") == "b c.npz"
    assert file_name("https://host/a/") == ""
