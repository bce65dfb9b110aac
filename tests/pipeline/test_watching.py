"""When a run counts as stalled, and that nothing else does."""

from __future__ import annotations

import pytest

from pipeline.cluster.agent.requests import ExamineOrder
from pipeline.cluster.attempt.stall_watch import StallWatch
from pipeline.cluster.events import Verdict
from trainers.contract.beats import NodeBeat, NodeExamination, Phase, RankBeat, RankExamination, Socket

STARTING, LOADING, COMPUTING, WAITING, UPDATING, EVALUATING, SAVING, ENDING, SCRIPT = Phase


class Attempt:
    """Two ranks on two hosts; node1's rank can be held."""

    def __init__(self, stall_s: float = 30.0, collective_timeout_s: float = 600.0) -> None:
        hosts = {"10.0.0.1": "node0", "10.0.0.2": "node1"}
        self.watch = StallWatch(hosts=hosts, stall_s=stall_s, collective_timeout_s=collective_timeout_s)
        self.now, self.asked = 1000.0, 0
        self.moves = [0, 0]
        self.answering, self.state = ["node0", "node1"], "T"
        self.own_s = 0.0
        self.sockets: tuple[tuple[Socket, ...], ...] = ((), ())

    def second(self, *, moves: bool, step: int = 5, phases: tuple[int, int] = (WAITING, COMPUTING)) -> Verdict | None:
        self.now += 1.0
        for number, phase in enumerate(phases):
            self.moves[number] += moves
            self.watch.take_beat(NodeBeat(host=f"node{number}", ranks=(self.beat(number, step, phase),)))
        return self.check()

    def check(self) -> Verdict | None:
        result = self.watch.check(self.now)
        if isinstance(result, ExamineOrder):
            self.ask()
            result = self.watch.check(self.now)
        assert not isinstance(result, ExamineOrder), "once"
        return result

    def check_network(self) -> Verdict | None:
        result = self.watch.check_network(self.now)
        if isinstance(result, ExamineOrder):
            self.ask()
            return None
        return result

    def beat(self, number: int, step: int, phase: int) -> RankBeat:
        place = {"rank": number, "pid": 7, "step": step, "phase": phase, "moves": self.moves[number]}
        return RankBeat(**place, for_s=1.0, collectives=5, own_s=self.own_s)

    def ask(self) -> None:
        self.asked += 1
        for number, host in enumerate(self.answering):
            phase = WAITING if self.state == "T" else SCRIPT
            look = RankExamination(beat=self.beat(number, 5, phase), host=host, state=self.state if number else "S")
            look = look._replace(sockets=self.sockets[number])
            self.watch.take_examination(NodeExamination(host=host, ranks=(look,)))

    def held(self, at_most: int, **how: object) -> tuple[int, Verdict | None]:
        """Seconds until somebody is named."""
        for second in range(1, at_most + 1):
            verdict = self.second(moves=False, **how)  # type: ignore[arg-type]
            if verdict is not None:
                return second, verdict
        return at_most, None


def test_a_rank_that_stops_is_named_after_stall_s_and_asked_for_once() -> None:
    attempt = Attempt()
    for _ in range(5):
        assert attempt.second(moves=True) is None
    seconds, verdict = attempt.held(60)
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.kind, attempt.asked) == (1, "node1", "stopped", 1)
    assert 30 <= seconds <= 32


def test_a_host_that_does_not_answer_the_look_delays_it_by_a_few_seconds() -> None:
    attempt = Attempt()
    attempt.second(moves=True)
    attempt.answering = ["node0"]
    seconds, verdict = attempt.held(60)
    assert verdict is not None
    assert verdict.kind == "collective"
    assert 38 <= seconds <= 40


@pytest.mark.parametrize(
    ("how", "patience_s"),
    [
        ({"phases": (SAVING, SAVING)}, 120),
        ({"phases": (SAVING, WAITING)}, 90),
        ({"step": 0, "phases": (WAITING, STARTING)}, 90),
    ],
    ids=["saving", "saving, and another waits", "starting, and another waits"],
)
def test_what_may_take_longer_has_more_time_but_names_come_before_a_collective_gives_up(
    how: dict[str, object], patience_s: int
) -> None:
    attempt = Attempt(collective_timeout_s=100.0)
    seconds, verdict = attempt.held(200, **how)
    assert verdict is not None
    assert patience_s <= seconds <= patience_s + 2


def test_before_the_first_step_nobody_is_named_while_nobody_waits() -> None:
    assert Attempt().held(5000, step=0, phases=(STARTING, STARTING)) == (5000, None)


def test_long_steps_make_it_wait_for_ten_of_them_and_one_mishap_does_not() -> None:
    attempt = Attempt()
    attempt.second(moves=True)
    attempt.held(25)
    attempt.second(moves=True)
    assert attempt.held(60)[0] <= 32, "a single pause may have been anything"
    attempt = Attempt()
    attempt.second(moves=True)
    for _ in range(2):
        attempt.held(20)
        attempt.second(moves=True)
    seconds, verdict = attempt.held(400)
    assert verdict is not None
    assert 200 <= seconds <= 215


def test_a_controller_that_slept_and_ranks_that_have_ended_are_no_stall() -> None:
    attempt = Attempt()
    attempt.second(moves=True)
    attempt.now += 7200.0
    assert attempt.second(moves=False) is None
    assert attempt.held(20)[1] is None
    attempt.watch.remove("node0")
    attempt.watch.remove("node1")
    attempt.now += 1.0
    assert all(attempt.watch.check(attempt.now + second) is None for second in range(200))


def test_a_connection_that_ranks_mostly_wait_for_is_named_once_and_nothing_is_ended() -> None:
    attempt = Attempt()
    stuck = (Socket(peer="10.0.0.1", unsent_bytes=70_000, sent_again=0),)

    attempt.sockets = (stuck[:0], stuck)
    verdicts = []
    for second in range(1, 101):
        assert attempt.second(moves=True, step=second // 2 + 1) is None
        verdicts.append(attempt.check_network())
    (verdict,) = filter(None, verdicts)
    assert (verdict.kind, verdict.host, attempt.asked) == ("slow link", "node1", 1)
    assert verdict.text == (
        "steps take 2 s, 100% of it waiting in collectives, and the connection from node1 to node0 is too slow: "
        "70,000 bytes are not sent yet, or not received"
    )


def test_a_connection_that_was_cut_and_came_back_is_not_too_slow() -> None:
    """Healthy steps keep the ranks busy for a third of their time, and without the pause the whole window would."""
    attempt, step = Attempt(), 0
    for second in range(1, 101):
        is_cut = 27 <= second <= 39
        if not is_cut:
            step += 12
            attempt.own_s += 0.33
        assert attempt.second(moves=not is_cut, step=step) is None
        assert attempt.check_network() is None
    assert attempt.asked == 0


def test_steps_that_all_are_long_are_no_pause() -> None:
    attempt = Attempt()
    for second in range(1, 41):
        attempt.second(moves=second % 6 == 0, step=second // 6 + 1)
        attempt.check_network()
    assert attempt.asked == 1


def test_looks_at_a_stall_are_not_judged_as_those_at_a_slow_network() -> None:
    """The question about the network gets no answer before ranks stop, and they go on before they are named."""
    attempt = Attempt()
    for second in range(1, 27):
        attempt.second(moves=True, step=second)
        attempt.watch.check_network(attempt.now)
    attempt.answering = []
    assert attempt.held(35, step=26) == (35, None)
    assert attempt.asked == 1
    stuck = (Socket(peer="10.0.0.1", unsent_bytes=70_000, sent_again=0),)
    for number in range(2):
        look = RankExamination(beat=attempt.beat(number, 26, WAITING), host=f"node{number}", sockets=stuck[:number])
        attempt.watch.take_examination(NodeExamination(host=f"node{number}", ranks=(look,)))
    attempt.second(moves=True, step=27)
    assert attempt.watch.check_network(attempt.now) is None


def test_ranks_that_work_most_of_the_time_are_not_looked_at() -> None:
    attempt = Attempt()
    for second in range(1, 101):
        attempt.own_s = 0.5 * second
        assert attempt.second(moves=True, step=second) is None
        assert attempt.check_network() is None
    assert attempt.asked == 0


def test_a_script_is_judged_after_stall_s_and_looked_at_again_where_nobody_waits() -> None:
    attempt = Attempt()
    scripts: dict[str, object] = {"step": 0, "phases": (SCRIPT, SCRIPT)}
    for _ in range(5):
        assert attempt.second(moves=True, **scripts) is None  # type: ignore[arg-type]
    seconds, verdict = attempt.held(60, **scripts)
    assert verdict is not None
    assert (verdict.host, 30 <= seconds <= 32) == ("node1", True)
    waiting = Attempt()
    waiting.state = "S"
    assert waiting.held(100, **scripts)[1] is None
    assert waiting.asked == 3
