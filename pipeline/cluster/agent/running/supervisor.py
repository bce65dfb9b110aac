"""The supervisor: the process on a node that starts torchrun, and stays until all ranks of the node have ended.

It runs detached from the controller, and talks by files in the node's state folder. It writes ``log`` (the ranks'
output), ``beat`` (it lives) and ``exit.json`` (how the start ended). ``lease`` shows that a controller follows the run.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import signal
import socket
import sys
import time
from types import FrameType

from trainers.contract import variables
from trainers.contract.host_facts import Container

from ..host import container as engine
from ..host.reach import encoded_name
from ..node import from_environment, peers_of
from ..requests import NodeEnd, NodeStart, RankFailure, RegistryEntry, StartRequest
from ..wire import (
    FULL,
    REMOVED,
    Silence,
    free_bytes,
    full_disk,
    in_thread,
    no_inodes,
    reason,
    room_in,
    touch,
    write_json,
)
from . import warm
from .output import NodeOutput, Rules
from .processes import (
    POLL_S,
    TERM_GRACE_S,
    Orphans,
    children_of,
    commands_of,
    end_tree,
    find_processes,
    ip_address,
    remove_container,
    start_time,
    tcp_table,
)
from .rank_ends import EarlyExits, OutOfMemory, RankExit, describe, has_only_exit_code, masked_and_cut, rank_failures
from .registry import Registry, in_words

CHECK_S = 0.5  # between two checks for reasons to end
BEAT_STALE_S = 3.0  # without a heartbeat of the controller, which sends one each second
PEER_TRY_S = 1.0
PEER_RETRY_S = 0.2  # if no node answered
LEFT_S = 5.0  # after the end of the first node's torchrun, for the others to end by themselves
SIBLING_GRACE_S = 2.0  # after a rank's error, for torchrun to end the other ranks by itself
REPORT_GRACE_S = 8.0  # the same if only torchrun knows how the rank ended: it reports after it has ended the others
UNATTENDED_S = 20.0  # limit until the controller that started this node must follow it
RESERVE_BYTES = 64 << 10  # room on a full disk for exit.json, and as much for the last output of ranks
RESERVES = ("reserve", "reserve-of-ranks")  # files of that size, removed when the room is needed
_TAIL_LINES = 12  # of torchrun, in exit.json
RENDEZVOUS_LOOK_S = 0.5
ESTABLISHED, CLOSE_WAIT, LISTEN = "01", "08", "0A"  # states in /proc/net/tcp
_OUTLIVED = "paceline: WARNING: went on after the script's end, and was ended: "


class Supervisor:
    """Owns one torchrun: merges the ranks' output, watches the lease, ends all processes, and writes exit.json.

    Call ``begin``. If it started torchrun, call ``run``, which returns after the end of every process.
    """

    def __init__(self, request: StartRequest, node: NodeStart) -> None:
        self.request, self.node = request, node
        self.mark = f"{request.run_id}:{node.node_rank}"
        self.container: Container | None = None
        if node.container is not None:
            self.container = engine.of_run(node.container, self.mark)
        self.child: warm.Child | None = None
        self.root: int | None = None  # process id of torchrun, or of a script's parent
        self.reason, self.was_terminated = "", False  # why the agent ended the start; whether by SIGTERM
        self.end_at: float | None = None  # monotonic: when TERM is sent next; None: there is no reason to end
        self.kill_at: float | None = None  # monotonic: when KILL follows; None: nothing was signalled yet
        self.signalled_pids: set[int] = set()  # get no (further) TERM from this process
        self.outlived = ""  # processes that went on after a script's end
        self.lines_before_end: list[str] | None = None  # torchrun's last lines before the agent ended its children
        self.rules = Rules(request.masking_rules)
        self.early_exits = EarlyExits(node.state_dir)
        self.early_before: dict[int, int] = {}  # local ranks that had ended early at the last check → exit code
        self.output = NodeOutput(node, self.rules, self.early_exits)
        self.lease = Silence(self.path("lease"))
        self.rendezvous = Rendezvous(request.rendezvous, first=node.node_rank == 0)
        self.memory = OutOfMemory()

    def path(self, name: str) -> str:
        return os.path.join(self.node.state_dir, name)

    @property
    def is_script(self) -> bool:
        """Return whether the start runs a script; then its parent is ``trainers.script.start … -- COMMAND…``."""
        return "--" in self.node.argv

    @property
    def has_torchrun(self) -> bool:
        """Return whether the command starts torchrun; behind ``--`` a script without it has only its interpreter."""
        return not self.is_script or self.node.argv.index("--") < len(self.node.argv) - 2

    # ------------------------------------------------------------------------------------------------------- the start
    def begin(self) -> str:
        """Register and start torchrun, which may end at once. Return why it could not be started, or ''."""
        signal.signal(signal.SIGTERM, self.on_term)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        registry = Registry(self.request.registry, self.request.access)
        try:
            self.register(registry)
            # only after registration: a `stop` writes the tombstone first, and then looks for registered supervisors
            if os.path.exists(registry.tombstone_path(self.request.run_id)):
                raise SystemExit("it was stopped meanwhile")
            self.child = self.spawn()
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
                error.filename = self.path("agent.json")  # errors of ``write`` don't name their file
            why = f"cannot start {self.node.argv[0]}: {reason(error)}"
            self.end_everything(code=1)
            return why
        return ""

    def register(self, registry: Registry) -> None:
        entry = RegistryEntry(
            identity=self.node.identity,
            run_key=self.request.run_key,
            run_id=self.request.run_id,
            mark=self.mark,
            pid=os.getpid(),
            born=start_time(os.getpid()),
            state_dir=self.node.state_dir,
            run_dir=self.node.run_dir,
            remove=self.node.own_folders,
            container=self.container,
        )
        os.makedirs(registry.folder, exist_ok=True)
        write_json(registry.entry_path(self.request.run_id, self.node.node_rank), entry)
        write_json(self.path("agent.json"), entry)  # for agents that know only this folder
        for name in RESERVES:
            with open(self.path(name), "wb") as reserve:
                reserve.write(bytes(RESERVE_BYTES))

    def spawn(self) -> warm.Child:
        env = {**from_environment(self.request.env_passed), **self.node.env}
        env[variables.NODE] = self.mark
        env[variables.RESERVE] = self.path(RESERVES[1])
        with open(self.output.torchrun_log, "ab") as output:
            if self.container is not None:
                return engine.begin(self.container, self.node, env, output.fileno())
            begin = warm.launch if self.request.uses_warm_parent else warm.begin
            return begin(list(self.node.argv), env, self.node.run_dir, output.fileno())

    # --------------------------------------------------------------------------------------------------------- the run
    def run(self) -> None:
        """Stay until every process of the start has ended, also after an error in this process; write exit.json."""
        code = 1
        try:
            in_thread(self.watch_peers, on_error=lambda why: self.end(f"the node agent could not go on: {why}"))
            code = self.wait()
            self.note_end_of_torchrun(code)
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            self.end(f"the node agent could not go on: {reason(error)}")
        finally:
            is_gone = self.end_everything(code)
        self.conclude(code, is_gone)

    def wait(self) -> int:
        """Wait until torchrun has ended. Return its exit code (negative: the signal that ended it)."""
        child, checked_at = self.child, time.monotonic()
        assert child is not None
        while child.poll() is None:
            now = time.monotonic()
            if self.container is None:
                self.root = child.pid  # it changes when a warm parent has forked
            try:
                self.merge_output()
                if now - checked_at > CHECK_S:
                    checked_at = now
                    Orphans.reap(child.pid)
                    self.check()
            except OSError as error:
                folder = self.node.run_dir
                was_removed = not os.path.exists(self.path("agent.json"))
                self.end(REMOVED % folder if was_removed else f"cannot write to {folder}: {reason(error)}")
            if self.end_at is not None and now >= self.end_at:
                self.signal_all(child, now)
            time.sleep(POLL_S)
        code = int(child.returncode or 0)
        return code if self.container is None else engine.exit_code(code)

    def merge_output(self, *, last: bool = False) -> bool:
        return self.output.merge(self.rendezvous.news(), last=last)

    def check(self) -> None:
        """End the start if its controller is gone or a rank has failed. Raises OSError: the folder was removed."""
        os.stat(self.path("agent.json"))
        if self.container is not None and self.root is None:
            self.root = engine.first_process(self.mark)
        touch(self.path("beat"))
        # until a controller follows this node the lease is shorter: it may have died between start and follow
        lease_s = self.request.lease_s
        if not os.path.exists(self.path("attached")):
            lease_s = min(lease_s, UNATTENDED_S + self.request.slow_s)
        silent_s = self.lease.look()
        if silent_s > lease_s:
            self.end(f"the controller has not been heard of for {lease_s:g} s")
        elif silent_s > BEAT_STALE_S and self.rendezvous.left_s() > LEFT_S:
            self.end("torchrun of the first node has ended, and the controller is not there to end this one")
        # a rank failed: torchrun ends the others unless it hangs itself
        if glob.glob(os.path.join(glob.escape(self.node.state_dir), "ranks/*/attempt_*/*/error.json")):
            self.end("a rank failed", SIBLING_GRACE_S)
        # a rank ended without an error file; seen twice, so that torchrun had time to notice it first
        early = self.early_exits.ranks()
        if early and early.keys() == self.early_before.keys():
            torchrun_reports = self.early_exits.torchrun_ends_others
            self.end("a rank ended before the run was over", REPORT_GRACE_S if torchrun_reports else SIBLING_GRACE_S)
        self.early_before = early

    def watch_peers(self) -> None:
        """End the run, as its ranks can't go on, if no heartbeats come and no other node answers any more."""
        until = time.monotonic() + BEAT_STALE_S
        while not os.path.exists(self.path("attached")) and time.monotonic() < until:  # other nodes are being started
            time.sleep(POLL_S)
        peers, beats = peers_of(self.node, self.request.nodes), Silence(self.path("lease"))
        was_reached, misses = False, 0
        while peers:
            is_stale = beats.look() > BEAT_STALE_S
            # a first connection proves that other nodes can be reached at all: a firewall may block their ssh ports
            if is_stale or not was_reached:
                alive = next((peer for peer in peers if accepts_connection(*peer)), None)
                if alive is not None:
                    was_reached, peers = True, [alive, *(peer for peer in peers if peer != alive)]
                misses = misses + 1 if is_stale and was_reached and alive is None else 0
                if misses >= 2:
                    self.end("isolated: neither the controller nor any other node can be reached")
            time.sleep(PEER_RETRY_S if misses else PEER_TRY_S)

    # --------------------------------------------------------------------------------------------------------- the end
    def on_term(self, number: int, frame: FrameType | None) -> None:
        self.was_terminated = True
        self.end("stopped")

    def end(self, reason: str, grace_s: float = 0.0) -> None:
        """Let ``wait`` end the start in ``grace_s``. Of several calls, the first reason and the earliest time count."""
        self.reason = self.reason or reason
        if self.kill_at is not None:  # the ranks have got TERM already
            return
        at = time.monotonic() + grace_s
        self.end_at = at if self.end_at is None else min(self.end_at, at)

    def signal_all(self, child: warm.Child, now: float) -> None:
        """End all processes of the start, in a thread: TERM, then KILL. Called again if ``child`` lives on."""
        self.early_exits.about_to_end_all()
        if isinstance(child, warm.Launch):
            child.give_up()
        if self.kill_at is None:
            self.signalled_pids |= self.signalled_by_others(self.root or child.pid)
            self.kill_at = now + TERM_GRACE_S
        in_thread(lambda: end_tree(self.mark, TERM_GRACE_S, signalled=self.signalled_pids), on_error=lambda _: None)
        self.end_at = now + TERM_GRACE_S + 3  # the next try, if torchrun still lives then

    def signalled_by_others(self, root: int) -> set[int]:
        """Return the processes that get TERM from a script's parent (torchrun, the script) or from torchrun (ranks)."""
        if not self.is_script:
            return set()
        below = children_of(root)
        return below.union(*map(children_of, below)) if self.has_torchrun else below

    def note_end_of_torchrun(self, code: int) -> None:
        """Note what must be known before the agent ends the rest of the processes."""
        if isinstance(self.child, warm.Launch) and self.child.parent_ended:
            self.reason = self.reason or "the warm parent of the ranks (trainers/ranks.py) ended while they ran"
        self.early_exits.torchrun_ended(code)
        # a signal ended torchrun: keep its lines from now, as its children will complain about being ended next
        if code < 0:
            with contextlib.suppress(OSError):
                self.merge_output()
            self.lines_before_end = self.output.last_lines
        if code == 0 and self.kill_at is None and self.is_script:  # nobody waits for what a good script leaves running
            commands = in_words(commands_of(find_processes(self.mark)), longest=400)
            self.outlived = f"{self.rules.hide(commands)}; not waited for" if commands else ""

    def end_everything(self, code: int) -> bool:
        """End what lives on, and take the start from the registry; return whether all has ended."""
        self.early_exits.about_to_end_all()
        # processes that got TERM before keep their full time until KILL; for others half a second is enough
        grace_s = 0.5 if self.kill_at is None else max(0.5, self.kill_at - time.monotonic())
        is_gone = end_tree(self.mark, grace_s, signalled=self.signalled_pids)
        if self.container is not None and code != 0:  # else the engine has removed it
            remove_container(self.container.engine, self.container.name)
        if is_gone:
            registry = Registry(self.request.registry, self.request.access)
            with contextlib.suppress(OSError):
                os.unlink(registry.entry_path(self.request.run_id, self.node.node_rank))
        return is_gone

    def conclude(self, code: int, is_gone: bool) -> None:
        """Write the last lines of the log and exit.json, unless the folder was removed."""
        if not os.path.isdir(self.node.state_dir):
            return
        try:
            self.output.merge([_OUTLIVED + self.outlived] if self.outlived else [], last=True)
            while self.merge_output(last=True):  # each call reads a bounded amount of each file
                pass
        except OSError as error:
            self.reason = self.reason or f"its log could not be written: {reason(error)}"
        # a rank that ended too early makes the start fail, even if torchrun saw only exit codes of 0
        code = code or int(bool(self.early_exits.ranks()))
        failures = self.failures() if code != 0 else []
        self.explain_full_disk(code, failures)
        why = self.reason or self.why_ended(code)
        last_lines = self.output.last_lines if self.lines_before_end is None else self.lines_before_end
        tail = [self.memory.explained(text) for text in last_lines if text.strip()][-_TAIL_LINES:]
        end = NodeEnd(
            code=code,
            reason=why if is_gone else f"{why}; some processes could not be ended",
            errors=tuple(failures),
            tail=tuple(tail) if code else (),
            gone=is_gone,
            outlived=self.outlived,
        )
        write_json(self.path("exit.json"), end)

    def explain_full_disk(self, code: int, failures: list[RankFailure]) -> None:
        """Name a full disk as the reason of a bad end that no rank explains; free the reserved space for exit.json."""
        is_full = free_bytes(self.node.state_dir) < RESERVE_BYTES or no_inodes(self.node.state_dir)
        room = room_in(self.node.state_dir)
        for name in RESERVES:
            with contextlib.suppress(OSError):
                os.unlink(self.path(name))
        says_so_already = "has a full disk" in self.reason
        if code != 0 and is_full and not says_so_already and all(map(has_only_exit_code, failures)):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.node.run_dir)
            self.reason = "; ".join(filter(None, (self.reason, f"the host {full_disk(full, room)}")))

    def why_ended(self, code: int) -> str:
        """Return why the start ended, if the agent hasn't ended it; '' for a good end."""
        if self.container is not None and (why := engine.not_started(self.container, code, self.root)):
            return why
        # the parent of a script ends with torchrun's exit code, but not by the signal that ended torchrun
        is_parent = self.is_script and (code < 0 or not self.has_torchrun)
        process = "the parent of the script (trainers.script.start)" if is_parent else "torchrun"
        return self.memory.explained(f"{process} ended with {describe(code)}") if code else ""

    def failures(self) -> list[RankFailure]:
        """Return the error of each rank that failed, without secrets; the earliest first."""
        now = time.time()
        early = {rank: RankExit(code, now) for rank, code in self.early_exits.ranks().items()}  # overridden by torchrun
        failures = rank_failures(
            self.node.state_dir,
            self.node.first_rank,
            {**early, **self.output.exits},
            ended_by_agent=self.end_at is not None,
            script_code=self.output.script_code,
        )
        masked = [masked_and_cut(failure, self.rules.hide) for failure in failures]
        return [failure._replace(message=self.memory.explained(failure.message)) for failure in masked]


def accepts_connection(address: str, port: int) -> bool:
    try:
        socket.create_connection((encoded_name(address), port), timeout=PEER_TRY_S).close()  # type: ignore[arg-type]
    except OSError:
        return False
    return True


class Rendezvous:
    """Watches in the kernel's tables when this node joins torchrun's rendezvous, and when the first node leaves it.

    ``endpoint``: address and port of the first node's store; None: a single node. ``first``: this is the first node.
    """

    def __init__(self, endpoint: tuple[str, int] | None, *, first: bool) -> None:
        self.endpoint, self.first = endpoint, first
        self.has_joined = False
        self.left_at: float | None = None  # monotonic: when the first node closed its connections
        self.looked_at = time.monotonic()

    def news(self) -> list[str]:
        """Return the line for the log when this node has joined, once."""
        now = time.monotonic()
        if self.endpoint is None or self.has_joined or now - self.looked_at < RENDEZVOUS_LOOK_S:
            return []
        self.looked_at = now
        self.has_joined = (LISTEN if self.first else ESTABLISHED) in self.states(*self.endpoint)
        line = "paceline: torchrun is at {}:{}, where the hosts meet".format(*self.endpoint)
        return [line] if self.has_joined else []

    def left_s(self) -> float:
        """Return how many seconds ago the first node's torchrun closed its connections to this node; 0.0: it hasn't."""
        if self.endpoint is None or self.first or not self.has_joined:
            return 0.0
        states = self.states(*self.endpoint)
        # in CLOSE_WAIT the other side has closed the connection, which torchrun and gloo here may not notice
        if CLOSE_WAIT not in states or ESTABLISHED in states:
            self.left_at = None
            return 0.0
        now = time.monotonic()
        self.left_at = self.left_at or now
        return now - self.left_at

    def states(self, address: str, port: int) -> set[str]:
        """Return the states of this host's connections to the endpoint; on the first node those of all its sockets."""
        end = f":{port:04X}"
        rows = [fields[1:4] for fields in tcp_table("/proc/net")]  # local and remote address, state
        if self.first:
            return {state for local, _, state in rows if local.endswith(end)}
        return {state for _, remote, state in rows if remote.endswith(end) and ip_address(remote) == address}
