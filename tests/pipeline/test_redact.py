"""What is secret by name, form or reference; the placeholder in its place; how it is told anew."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from pipeline.config.build import RunConfig, build, stored_config
from pipeline.config.compose import compose_config, resolve
from pipeline.core import masking, redact
from pipeline.core.errors import UsageError
from pipeline.core.redact import hide, is_secret_name, mask_word, without_secrets
from pipeline.keys.content_key import topology

GITHUB = "ghp_" + "a1B2" * 9  # of the form alone
JWT = ".".join(("eyJhbGciOiJI", "eyJzdWIiOiIx", "c2lnbmF0dXJl"))


def built(*words: str) -> RunConfig:
    resolved = resolve(compose_config(["experiment=quickstart", *words]))
    return build(resolved, words, root=Path("/p"), local_gpus=0)


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


@pytest.mark.parametrize(
    "name",
    ["API_TOKEN", "HF_TOKEN", "dbPassword", "PGPASSWORD", "MYSQL_PWD", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY",
     "AUTH", "X_AUTH", "PRIVATE_KEY", "GOOGLE_CREDENTIALS", "SESSION_COOKIE", "APIKEY", "client-secret", "DB_PASS"],
)  # fmt: skip
def test_a_name_says_that_its_value_is_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["MAX_TOKENS", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "SSH_AUTH_SOCK", "PASSWORD_FILE", "PWD", "KEYBOARD",
     "COMPASS", "NCCL_DEBUG", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "optimizer.lr",
     "eos-token", "padToken", "program.args.mask_token"],
)  # fmt: skip
def test_other_names_say_nothing(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://bob:p%40ss@host/x failed", "GET https://***@host/x failed"),
        ("https://host/x?a=1&X-Amz-Signature=ab12&b=2", "https://host/x?a=1&X-Amz-Signature=***&b=2"),
        (f"with {GITHUB}, and so on", "with ***, and so on"),
        (f"jwt={JWT}", "jwt=***"),
        ("key AKIA" + "A1B2" * 4 + ".", "key ***."),
        ('{"k": "-----BEGIN RSA PRIVATE KEY-----\\nMIIE\\n-----END RSA PRIVATE KEY-----"}', '{"k": "***"}'),
        ("authorization: Bearer abc.def", "authorization: Bearer ***"),
        ("ssh://git@host/x, a task-of-more-than-twenty-letters, 3/4 epochs", None),
    ],
)
def test_a_form_says_it_too(text: str, shown: str | None) -> None:
    assert hide(text) == (shown or text.replace("git@", "***@"))


def test_a_known_value_is_found_however_it_is_spelled_and_a_short_one_as_a_word_alone() -> None:
    value = "a/b c'd\"é&12"
    written = (repr(value)[1:-1], repr(value.encode())[2:-1], "a/b c'd\\\"\\u00e9&12", "a%2Fb%20c%27d%22%C3%A9%2612")
    for spelled in (value, *written):
        assert hide(f"<{spelled}>", [value]) == "<***>"
    assert hide("pin 7391, step 17391, x=7391.", ["7391"]) == "pin ***, step 17391, x=***."
    assert hide("<caf\\xe9-8>", ["caf\udce9-8"]) == "<***>"  # bytes of the environment that are no text
    assert hide("line two-of-it", ["line one-of-it\nline two-of-it"]) == "***"
    assert hide("abc", ["abc"]) == "abc"  # three letters stand in half of all lines


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("tracking.uri=postgresql://me:pw@db/x?sslmode=on", "tracking.uri=postgresql://***@db/x?sslmode=on"),
        ("dataset.source=https://host/x.zip?sig=abc", "dataset.source=https://host/x.zip"),
        ("optimizer.lr=0.1", "optimizer.lr=0.1"),
        ("++cluster.env.API_TOKEN='a b'", "++cluster.env.API_TOKEN=***"),
        ("++cluster.env.API_TOKEN=${oc.env:API_TOKEN}", "++cluster.env.API_TOKEN=${oc.env:API_TOKEN}"),
        ("++cluster.env.API_TOKEN=${oc.env:API_TOKEN,abc}", "++cluster.env.API_TOKEN=***"),
        ("++cluster.env={A: 1, API_TOKEN: 'x, y', B: 2}", "++cluster.env={A: 1, API_TOKEN: ***, B: 2}"),
        ("cluster.env.USE_AUTH=none", "cluster.env.USE_AUTH=none"),
        ("cluster.env.CODE=known-value", "cluster.env.CODE=***"),
    ],
)
def test_words_of_a_command_line_are_shown_alike(word: str, shown: str) -> None:
    assert mask_word(word, ["known-value"]) == shown


def test_ranks_get_the_values_and_everything_else_the_placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "from-outside")
    config = built(
        "++cluster.env.API_TOKEN=by-name-1",
        "++cluster.env.HTTPS_PROXY=http://bob:by-form@proxy:1",
        "++cluster.env.PLAIN='x ${oc.env:SOME_PASSWORD}'",
        "++cluster.env.CODE=by-list",
        "++cluster.env.DEBUG=INFO",
        "cluster.secrets=[CODE]",
    )
    (host,) = config.cluster.hosts
    assert host.secrets == {
        "API_TOKEN": "by-name-1",
        "HTTPS_PROXY": "http://bob:by-form@proxy:1",
        "PLAIN": "x from-outside",
        "CODE": "by-list",
    }
    shown = {"API_TOKEN": "***", "HTTPS_PROXY": "http://***@proxy:1", "PLAIN": "***", "CODE": "***", "DEBUG": "INFO"}
    assert host.env == config.resolved["cluster"]["env"] == shown
    (keyed,) = topology(config.cluster)["env"]
    assert keyed.items() <= shown.items()
    assert keyed["API_TOKEN"] == keyed["CODE"] == "***"
    for value in ("by-name-1", "by-form", "from-outside", "by-list"):
        assert value not in repr(config)
        assert config.hide(f"<{value}>") == "<***>"


def test_two_tokens_are_one_run_and_no_token_is_another() -> None:
    keys = [
        topology(built(*words).cluster)
        for words in (["++cluster.env.API_TOKEN=one-12345"], ["++cluster.env.API_TOKEN=two-12345"], [])
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["++cluster.env.API_TOKEN='***'"], r"cluster\.env\.API_TOKEN holds \*\*\*, which stands for a secret"),
        (["tracking.uri=https://***@host"], r"tracking\.uri holds \*\*\*"),
        (["cluster.secrets=[TYPO]", "++cluster.env.TYPE=x"], "cluster.secrets names 'TYPO', .* did you mean TYPE"),
    ],
)
def test_a_placeholder_is_no_value_and_a_misspelled_name_hides_nothing(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        built(*words)


def test_what_ranks_read_from_a_file_may_hold_no_secret() -> None:
    resolved = resolve(compose_config(["experiment=quickstart"]))
    resolved["model"] = {**resolved["model"], "hub_token": "abcdefgh"}
    with pytest.raises(UsageError, match=r"model\.hub_token is secret by its name or form"):
        stored_config(resolved, redact.secret_values(resolved))


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ("{password: 87654321}", "program.args.password"),
        ("[--password,87654321,--x,1]", "program.args.password"),
        ("{api_token: 12345678}", "program.args.api_token"),
    ],
)
def test_a_secret_of_digits_alone_is_one(args: str, field: str) -> None:
    resolved = resolve(compose_config(["program=script", "program.script=train.py", f"program.args={args}"]))
    with pytest.raises(UsageError, match=f"{field} is secret"):
        stored_config(resolved, redact.secret_values(resolved))


@pytest.mark.parametrize("words", ["{n_token: 32768}", "{bos_token_id: 50256}", "{pass_k: 10000}", "[--n-token,32768]"])
def test_a_number_that_counts_tokens_is_a_setting(words: str) -> None:
    typed = ["program=script", "program.script=train.py", f"program.args={words}"]
    resolved = resolve(compose_config(typed))
    assert stored_config(resolved, redact.secret_values(resolved))["program"]["args"] == resolved["program"]["args"]
    assert [redact.mask_word(word) for word in typed] == typed


def test_the_option_of_a_script_that_holds_a_secret_is_named() -> None:
    resolved = resolve(
        compose_config(["program=script", "program.script=train.py", "program.args=[--api-key,abcdefgh]"])
    )
    with pytest.raises(UsageError, match=r"program\.args\.api-key is secret .*") as error:
        stored_config(resolved, redact.secret_values(resolved))
    assert "which the script finds" in str(error.value.hint)


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["a", "--token", "value123", "b"], ["a", "--token", "***", "b"]),
        (["--token=value123", "x"], ["--token=***", "x"]),
        (["--api_key=value123", "token=value123"], ["--api_key=***", "token=***"]),
        (["--token", "--lr", "0.1", "--tokens=12"], ["--token", "--lr", "0.1", "--tokens=12"]),
    ],
)
def test_a_secret_among_words_of_a_command_line_is_known_by_its_option(args: list[str], shown: list[str]) -> None:
    config = {"program": {"args": args}}
    assert redact.without_secrets(config) == {"program": {"args": shown}}
    assert redact.secret_values(config) == ({"value123"} if "***" in str(shown) else set())


def test_stored_words_are_told_anew_and_reach_a_child_through_its_environment() -> None:
    values = {"API_TOKEN": "'${oc.env:API_TOKEN}'"}
    assert redact.restore_secrets("cluster.env.API_TOKEN=***", values) == "cluster.env.API_TOKEN='${oc.env:API_TOKEN}'"
    assert redact.restore_secrets("++cluster.env={A: 1, API_TOKEN: ***}", values) == (
        "++cluster.env={A: 1, API_TOKEN: '${oc.env:API_TOKEN}'}"
    )
    assert redact.restore_secrets("cluster.env.OTHER=***", values) == "cluster.env.OTHER=***"
    told = ["seed=1", "cluster.env.API_TOKEN='a b'", "x={A_TOKEN: abcd, B: 2}"]
    words, environment = redact.move_to_environment(told)
    assert words == [
        "seed=1",
        "cluster.env.API_TOKEN='${oc.env:PACELINE_TOLD_0}'",
        "x={A_TOKEN: '${oc.env:PACELINE_TOLD_1}', B: 2}",
    ]
    assert environment == {"PACELINE_TOLD_0": "a b", "PACELINE_TOLD_1": "abcd"}


def test_what_a_persons_code_closes_takes_what_is_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(taken))
    monkeypatch.setattr(masking, "_secrets", set())
    masking.begin()
    sys.stdout.close()
    print("more", flush=True)
    assert taken.getvalue() == b"more\n"
