"""Where the store of a run listens: at the run's address, whatever else the host has."""

from __future__ import annotations

import socket

import pytest

from trainers import torchrun

NOT_HERE = "192.0.2.77"  # of RFC 5737


def test_the_store_listens_at_the_address_of_the_run_alone() -> None:
    store = torchrun.listen("127.0.0.1", 0)
    assert store is not None
    with socket.create_server(("127.0.0.2", store.port)), pytest.raises(OSError, match="Address already in use"):
        torchrun.listen("127.0.0.1", store.port)


def test_an_address_that_no_interface_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchrun.listen(NOT_HERE, 0) is None
    assert f"can't listen at {NOT_HERE} alone (Cannot assign requested address)" in capsys.readouterr().err
