"""What a controller makes of the lines of a live stream: whole answers, and everything that is none."""

from __future__ import annotations

import pytest

from pipeline.cluster.launchers.transport.answers import Lines, log_line, parse_answer, parse_stream, received_bytes
from pipeline.core.specs import LogLine, NodeExit, NodeLost
from trainers.contract.beats import NodeBeat

TOKEN = "f00d"


def parsed(line: bytes) -> object:
    return parse_stream(line, TOKEN, "node0", 1000.0)


def test_answers_of_a_stream() -> None:
    log = parsed(b'@paceline f00d {"log": ["0 | a", "- | b"], "from": 3, "at": 15}\n')
    assert log == Lines(of="log", texts=("0 | a", "- | b"), start_bytes=3, end_bytes=15)
    assert parsed(b'@paceline f00d {"beat": 7.5}\n') == NodeBeat(host="node0")
    assert parsed(b'@paceline f00d {"error": "full"}\n') == NodeLost(host="node0", reason="full", answers=True)
    ended = parsed(
        b'@paceline f00d {"exit": {"code": 1, "reason": "r", "tail": ["t"], "errors": [{"rank": 1, "unix_time": 5, '
        b'"message": "m", "traceback": "x"}]}, "now": 990}\n'
    )
    assert isinstance(ended, NodeExit)
    assert (ended.code, ended.reason, ended.errors[0].unix_time) == (1, "r\nt", 15.0)
    lost = parsed(b'@paceline f00d {"exit": {"lost": true, "reason": "frozen"}, "now": 990}\n')
    assert lost == NodeLost(host="node0", reason="frozen", answers=True)


@pytest.mark.parametrize(
    "line",
    [
        b"Welcome to node0\n",
        b"@paceline f00d \n",
        b"@paceline f00d is installed here\n",
        b"@paceline f00d 7\n",
        b'@paceline f00d ["log"]\n',
        b'@paceline f00d {"hello": 1}\n',
        b'@paceline f00d {"log": ["0 | cut',
        b'@paceline f00d {"beat": 1}',  # not whole: its end may be missing
        b'@paceline f00d {"log": ["\xc3\n',
        b'@paceline f00d {"log": "0 | a", "from": 0, "at": 5}\n',
        b'@paceline f00d {"log": [1], "from": 0, "at": 5}\n',
        b'@paceline f00d {"log": ["a"], "at": 5}\n',
        b'@paceline f00d {"log": ["a"], "from": 9, "at": 5}\n',
        b'@paceline f00d {"log": ["a"], "from": -1, "at": 5}\n',
        b'@paceline f00d {"log": ["a"], "from": "0", "at": true}\n',
        b'@paceline f00d {"exit": {"code": 0}, "now": 1}\n',
        b'@paceline f00d {"exit": null, "now": 1}\n',
        b'@paceline f00d {"exit": {"code": 1, "reason": "", "tail": [], "errors": [{}]}, "now": 1}\n',
        b'@paceline f00d {"exit": {"code": 0, "reason": "", "tail": [], "errors": []}, "now": null}\n',
    ],
)
def test_everything_else_is_no_answer(line: bytes) -> None:
    assert parsed(line) is None


@pytest.mark.parametrize(
    ("text", "rank", "rest"),
    [
        ("3 | epoch 1 | x", 3, "epoch 1 | x"),
        ("- | torchrun", None, "torchrun"),
        ("", None, ""),
        (" | a", None, " | a"),
        ("² | a", None, "² | a"),
        ("och 1", None, "och 1"),
    ],
)
def test_a_log_line_without_a_rank_is_kept_as_it_is(text: str, rank: int | None, rest: str) -> None:
    assert log_line("node0", text) == LogLine(host="node0", rank=rank, text=rest)


def test_how_much_has_come_is_no_answer() -> None:
    stdout = b'hello\n@paceline f00d {"received": 1048576}\n@paceline f00d {"received": 3145728}\n@paceline f00d {"rec'
    assert (received_bytes(stdout, TOKEN), parse_answer(stdout, TOKEN)) == (3145728, None)
    assert parse_answer(stdout + b'eived": 9}\n@paceline f00d {"pack_path": "/d"}\n', TOKEN) == {"pack_path": "/d"}
    assert received_bytes(b'\n@paceline f00d {"received": "many"}', TOKEN) == 0


def test_a_short_answer_is_the_last_one_that_is_whole() -> None:
    stdout = b'@paceline f00d motd\n@paceline f00d {"stopped": []}\n@paceline f00d and goodbye\nbye'
    assert parse_answer(stdout, TOKEN) == {"stopped": []}
    assert parse_answer(b"@paceline f00d {", TOKEN) is None


def test_a_title_without_an_end_of_line_hides_no_answer_and_nothing_without_the_token_is_one() -> None:
    forged = b'@paceline {"left": ["1"]}\n@paceline f00e {"left": ["2"]}\n@paceline {"evil"\n'
    stdout = forged + b'\x1b]0;title\x07@paceline f00d {"left": []}\n' + forged + b"@paceline f00d " + b"[" * 100_000
    assert parse_answer(stdout, TOKEN) == {"left": []}
    assert parsed(b'title@paceline f00d {"beat": 7.5}\n') == NodeBeat(host="node0")
    assert parsed(b'@paceline {"exit": {"code": 0, "reason": "", "tail": [], "errors": []}, "now": 1}\n') is None
