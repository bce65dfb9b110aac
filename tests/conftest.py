"""Fixtures that several test folders share."""

pytest_plugins = ["tests.lab_fixture"]
