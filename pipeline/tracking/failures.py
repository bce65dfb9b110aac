"""Failures of a tracking store; where a person has to act, in words that say how. Pure."""

from __future__ import annotations

import re

_SCHEMA = re.compile(r"out-of-date database schema \(found version (\w+), but expected (\w+)\)")
_LOGIN = re.compile(r"'C': '28\w+', 'M': ['\"]([^'\"]+(?:\"[^\"]*\")?)")  # class 28 of PostgreSQL's error codes

_TOO_MANY = re.compile(r"too many (\d{3}) error responses")
_WRAPPED = ("(Caused by ", "('Connection aborted.'")  # requests around urllib3 around http.client
_INNERMOST = re.compile(r"\((?:-?\d+, )?'([^']+?)(?: \(_ssl\.c:\d+\))?'\)+$")


class StoreError(Exception):
    """The store did not do it. ``rejected``: it answered that what was sent is invalid. ``final``: nor will it soon."""

    def __init__(self, reason: str, *, rejected: bool = False, final: bool = False) -> None:
        self.rejected = rejected
        self.final = final
        super().__init__(reason)


def plain(text: str) -> str:
    """The text of a failed request without the names of classes around what went wrong."""
    many = _TOO_MANY.search(text)
    if many:
        from http import HTTPStatus  # each `doit train` loads this module

        return f"it answers {many[1]} ({HTTPStatus(int(many[1])).phrase})"
    if "database is locked" in text or "database table is locked" in text:
        return "another program holds its database locked (sqlite lets one write at a time): end that one, or wait"
    inner = _INNERMOST.search(text) if any(mark in text for mark in _WRAPPED) else None
    if inner and "BadStatusLine(" in text:
        return f"it speaks no HTTP: {inner[1].strip()}"
    return inner[1] if inner else text


def explained(text: str) -> str | None:
    """What to do about it; None for a failure that says enough, or that may pass by itself."""
    if "Invalid Host header" in text:
        return (
            "the server doesn't answer to the name that tracking.uri has for it (Invalid Host header): start it with "
            "that name, as doit server tracking.server_allowed_hosts=[NAME], or mlflow server --allowed-hosts "
            "NAME,NAME:*"
        )
    if "/mlflow-artifacts/" in text and re.search(r"too many 50\d error responses|\b50\d Server Error", text):
        return "the server could not keep a file: its folder of artifacts may be full or read-only, its log says which"
    if re.search(r"error code 401\b|\b401 Client Error", text):
        return (
            "the server refuses the login: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (in ASCII: MLflow "
            "sends other characters wrongly with files), or MLFLOW_TRACKING_TOKEN, to what it knows"
        )
    if "mlflow-artifacts URI was supplied" in text:
        return (
            "the files of this experiment are kept by a tracking server (doit server): set tracking.uri to its "
            "address, or tracking.experiment to another one"
        )
    return _of_database(text)


def _of_database(text: str) -> str | None:
    login = _LOGIN.search(text)
    if login:
        return (
            f"its database refuses the login ({login[1]}): is PGPASSWORD set, or does ~/.pgpass (mode 600) have a line?"
        )
    schema = _SCHEMA.search(text)
    if schema:
        return (
            f"its database is of another MLflow (schema {schema[1]}, this one has {schema[2]}): make a copy of it, "
            "then mlflow db upgrade ADDRESS, with the address as tracking.uri has it"
        )
    if "file is not a database" in text or "database disk image is malformed" in text:
        return "its database is damaged: move the file away (a new one is made) or bring a copy of it back"
    if "unable to open database file" in text:
        return "its database can't be opened: a file is meant, and one that this account may write to"
    if "Can't locate revision" in text:
        return "its database is of a newer MLflow than this one: install that one"
    if re.search(r"No module named '?(?:pg8000|psycopg2?|boto3|pymysql)", text):
        if "boto3" in text:
            return "boto3 is missing: pip install 'paceline[s3]'"
        return "pg8000 is missing: pip install 'paceline[server]'"
    return None
