"""The fixture ``s3``: an object store that this process and the commands that it starts take for Amazon's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.object_store_fixture import ObjectStore


BUCKET = "models"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    from s3fs import S3FileSystem

    from tests import object_store_fixture  # moto takes a second to import

    with object_store_fixture.running() as store:
        for name, value in store.env.items():
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # one knows the store of its day
        yield store
