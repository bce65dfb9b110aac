"""What may not be seen in a run folder, and is not."""

from pipeline.redact import in_word, without_secrets


def test_logins_and_signatures_leave_the_configuration_and_nothing_else_does() -> None:
    config = {
        "tracking": {"uri": "https://bob:pa@ss@host:1/x", "experiment": "a@b"},
        "dataset": {"source": "s3://key:secret@bucket/x?X-Signature=abc", "name": "mnist"},
        "cluster": {"hosts": [{"name": "me@gpu1"}]},
    }
    assert without_secrets(config) == {
        "tracking": {"uri": "https://***@host:1/x", "experiment": "a@b"},
        "dataset": {"source": "s3://***@bucket/x", "name": "mnist"},
        "cluster": {"hosts": [{"name": "me@gpu1"}]},
    }


def test_words_of_a_command_line_are_shown_alike() -> None:
    assert in_word("tracking.uri=postgresql://me:pw@db/x?sslmode=on") == "tracking.uri=postgresql://***@db/x?sslmode=on"
    assert in_word("dataset.source=https://host/x.zip?sig=abc") == "dataset.source=https://host/x.zip"
    assert in_word("optimizer.lr=0.1") == "optimizer.lr=0.1"
