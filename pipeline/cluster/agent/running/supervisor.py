"""The start of an attempt on a node, and the process that stays as long as its ranks: it owns torchrun."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

from trainers.contract import variables
from trainers.contract.beats import ENDED
from trainers.contract.host_facts import Container
from trainers.contract.records import as_json, from_json

from ..host import container
from ..host.reach import encoded_name
from ..log_lines import Rules, Tail
from ..node import RANK_OUTPUTS, from_environment, own_node, peers_of
from ..wire import (
    FULL,
    REMOVED,
    THERE,
    Json,
    free_bytes,
    full_disk,
    in_thread,
    no_inodes,
    reason,
    room_in,
    say,
    touch,
    write_json,
)
from . import warm
from .claims import Claim, claim_for_run
from .folders import link_pack, remove_leftovers, remove_ours, unpack
from .processes import (
    POLL_S,
    TERM_GRACE_S,
    Orphans,
    children_of,
    command_of,
    end_tree,
    find_processes,
    remove_container,
    start_time,
)
from .rank_errors import ENDED_EARLY, describe, has_only_exit_code, masked_and_cut, printed_error, recorded_error
from .registry import doubtful, end_attempts, in_words, own_entries, remove_outdated, tombstone_path
from .watches import EarlyExits, OutOfMemory, Rendezvous, Silence

BEAT_STALE_S = 3.0  # the controller sends a heartbeat every second
PEER_TRY_S = 1.0
PEER_RETRY_S = 0.2  # if no node answered
LEFT_S = 5.0  # for torchrun and ranks to end by themselves after the first node's torchrun has ended
SIBLING_GRACE_S = 2.0  # after a rank's error, for torchrun to end the other ranks by itself
REPORT_GRACE_S = 8.0  # the same if only torchrun knows how the rank ended: it reports after it has ended the others
UNATTENDED_S = 20.0
RESERVE_BYTES = 64 << 10  # room on a full disk for exit.json, and as much for the last output of ranks
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
# printed by trainers.script.start, without torchrun
_SCRIPT_ENDED = re.compile(r"paceline: error: .* ended with exit code (\d+)")
_OUTLIVED = "paceline: WARNING: went on after the script's end, and was ended: "


def start(request: Json) -> None:
    """Stage the run, end leftovers of the same key, leave a supervisor behind; answers when torchrun is up."""
    node = own_node(request)
    remove_outdated(request)
    before = own_entries(request)
    left = end_attempts(request)
    if left:
        raise SystemExit(f"an earlier attempt of this run cannot be ended: processes {sorted(left)}")
    refuse_doubtful(request)
    claim = claim_for_run(node.get("claim"))  # held by the processes that are forked from this one
    for _, entry in before:
        remove_ours(entry["remove"])
    if request["stage"]:
        remove_leftovers(request, node)
        unpack(sys.stdin.buffer, node["run_dir"])
    if request["pack_digest"]:  # a diagnosis may need no data
        link_pack(node["run_dir"], node["data_dir"])
    lay_out(node)
    read_fd, answer_fd = os.pipe()
    # forked twice: the supervisor leads no session, so it never gets a terminal, and init waits for its end
    if os.fork() == 0:
        os.close(read_fd)
        os.setsid()
        if os.fork() == 0:
            supervise(request, node, answer_fd, claim)
        os._exit(0)
    os.close(answer_fd)
    os.wait()
    with os.fdopen(read_fd, "r", encoding="utf-8") as pipe:
        answer = pipe.read()
    say(**(json.loads(answer) if answer else {"error": "the supervisor died at once"}))


def refuse_doubtful(request: Json) -> None:
    """Raise SystemExit while a doubtful process lives, which might write into the folder of the new attempt."""
    for _, entry in own_entries(request):
        if commands := doubtful(entry):
            pids = " ".join(map(str, commands))
            raise SystemExit(
                f"an earlier attempt of this run was killed, and {in_words(commands)} may be what it left: without the "
                f"mark of the run, in its folder {entry['run_dir']}; nothing starts beside that{THERE}kill {pids}"
            )


def lay_out(node: Json) -> None:
    """Create the folder of the agent's own files, with the stamp that ``clean`` checks, and begin the lease."""
    os.makedirs(node["state_dir"], mode=0o700, exist_ok=True)  # private, because it holds the ranks' unmasked output
    for folder in node["remove"]:
        open(os.path.join(folder, ".paceline"), "w").close()
    touch(os.path.join(node["state_dir"], "lease"))


def supervise(request: Json, node: Json, answer_fd: int, claim: Claim | None) -> None:
    """Be the supervisor's process to its end; never returns."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(os.path.join(node["state_dir"], "agent.log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.chdir("/")
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if not node.get("container"):  # the engine's own processes would be among the adopted ones
            Orphans.adopt()

        def tell(answer: Json) -> None:
            with contextlib.suppress(OSError):
                os.write(answer_fd, json.dumps(answer).encode())
            os.close(answer_fd)

        Supervisor(request, node).run(tell)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        if claim is not None:
            claim.release()
        os._exit(code)


class Supervisor:
    """Owns one torchrun: merges the ranks' output, keeps the lease, ends the tree, writes exit.json."""

    def __init__(self, request: Json, node: Json) -> None:
        self.request, self.node = request, node
        self.state = node["state_dir"]
        self.mark = f"{request['run_id']}:{node['node_rank']}"  # in the environment of all its processes
        self.container: Container | None = None
        if node.get("container"):
            self.container = container.of_run(from_json(Container, node["container"]), self.mark)
        self.reason = ""
        self.signalled = False
        self.end_at: float | None = None
        self.kill_at: float | None = None  # when SIGKILL follows; None before the processes are signalled
        self.signalled_pids: set[int] = set()
        self.escaped = ""  # a script's processes that went on after its end
        self.outlived: list[str] = []  # descriptions of these
        self.rules = Rules(request.get("hide", []))
        self.torchrun_log = Tail(self.path("torchrun.log"), self.rules)
        self.last_lines: list[str] = []
        self.lines_before_kill: list[str] | None = None  # if a signal ended torchrun: its output before that
        self.failed: dict[int, Json] = {}  # local rank → how it failed, by torchrun's log
        self.code = 0  # of the script, by that log
        self.early_exits = EarlyExits(self.state)
        self.early_before: dict[int, int] = {}  # ranks that had ended early at the last look → exit code
        self.tails: dict[str, tuple[int, Tail]] = {}  # output file → rank and its new lines
        self.lease = Silence(self.path("lease"))
        self.rendezvous = Rendezvous(request.get("rendezvous"), first=node["node_rank"] == 0)
        self.root: int | None = None  # torchrun, or the parent of a script
        self.memory = OutOfMemory()

    def ended_process(self, code: int) -> str:
        """Name the process that ended with ``code``: torchrun, or the parent of a script.

        The parent ends with torchrun's exit code, but not by the signal that ended torchrun.
        """
        argv = self.node["argv"]
        if "--" not in argv:  # the command of a script follows it
            return "torchrun"
        is_alone = argv.index("--") == len(argv) - 2  # the interpreter alone, without torchrun
        return "the parent of the script (trainers.script.start)" if is_alone or code < 0 else "torchrun"

    def path(self, name: str) -> str:
        return os.path.join(self.state, name)

    def run(self, tell: Callable[[Json], object]) -> None:
        """Run from the registration until every process of the run has ended, also after an error.

        ``tell`` takes the answer to the start, once.
        """
        signal.signal(signal.SIGTERM, self.on_term)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        entry, code = self.entry_path(), 1
        try:
            child = self.begin(tell)
            if child is None:
                return
            in_thread(self.watch_peers, on_error=lambda why: self.end(f"the node agent could not go on: {why}"))
            code = self.watch(child)
            if isinstance(child, warm.Launch) and child.parent_ended:
                self.reason = self.reason or "the warm parent of the ranks (trainers/ranks.py) ended while they ran"
            self.early_exits.torchrun_ended(code)
            if code < 0:  # its children are ended next, and their messages about that are no cause
                with contextlib.suppress(OSError):
                    self.pump()
                self.lines_before_kill = self.last_lines
            if code == 0 and self.kill_at is None and "--" in self.node["argv"]:
                escaped = self.rules.hide(described(find_processes(self.mark)))
                self.escaped = f"{escaped}; not waited for" if escaped else ""
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            self.end(f"the node agent could not go on: {reason(error)}")
        finally:
            self.early_exits.about_to_end_all()
            grace_s = 0.5 if self.kill_at is None else max(0.5, self.kill_at - time.monotonic())
            gone = end_tree(self.mark, grace_s, signalled=self.signalled_pids)
            if self.container and code != 0:  # else the engine has removed it
                remove_container(self.container.engine, self.container.name)
            if gone:
                with contextlib.suppress(OSError):
                    os.unlink(entry)
        self.conclude(code, gone)

    def begin(self, tell: Callable[[Json], object]) -> subprocess.Popen[bytes] | warm.Launch | None:
        """Register, start torchrun, answer the start command (which may have ended); None: it could not start."""
        child = None
        try:
            self.register()
            if os.path.exists(tombstone_path(self.request, self.request["run_id"])):
                raise SystemExit("it was stopped meanwhile")
            child = self.spawn()
            answer: Json = {"pid": os.getpid(), "unix_time": time.time()}
        except BaseException as error:
            # an error of writing has no name
            if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
                error.filename = self.path("agent.json")
            answer = {"error": f"cannot start {self.node['argv'][0]}: {reason(error)}"}
        tell(answer)
        return child

    def conclude(self, code: int, gone: bool) -> None:
        """Write the last lines and exit.json, unless the folder was removed."""
        if not os.path.isdir(self.state):
            return
        try:
            while self.pump(last=True):
                pass
        except OSError as error:
            self.reason = self.reason or f"its log could not be written: {reason(error)}"
        code = code or int(bool(self.early_exits.ranks()))
        is_full, room = free_bytes(self.state) < RESERVE_BYTES or no_inodes(self.state), room_in(self.state)
        for name in ("reserve", "reserve-of-ranks"):  # makes room on a full disk
            with contextlib.suppress(OSError):
                os.unlink(self.path(name))
        if code != 0 and is_full and all(has_only_exit_code(error) for error in self.errors()):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.node["run_dir"])
            self.reason = "; ".join(filter(None, (self.reason, f"the host {full_disk(full, room)}")))
        self.write_end(code, gone)

    def spawn(self) -> subprocess.Popen[bytes] | warm.Launch:
        env = {**from_environment(self.request["env_passed"]), **self.node["env"]}
        env[variables.NODE] = self.mark
        env[variables.RESERVE] = self.path("reserve-of-ranks")
        with open(self.torchrun_log.path, "ab") as output:
            if self.container:
                return container.begin(self.container, self.node, env, output.fileno())
            begin = warm.launch if self.request.get("warm") else warm.begin
            return begin(self.node["argv"], env, self.node["run_dir"], output.fileno())

    def entry_path(self) -> str:
        registry = os.path.expanduser(self.request["registry"])
        return os.path.join(registry, f"{self.request['run_id']}.{self.node['node_rank']}.json")

    def register(self) -> None:
        registry = os.path.expanduser(self.request["registry"])
        os.makedirs(registry, exist_ok=True)
        entry = {
            "identity": self.node["identity"],
            "run_key": self.request["run_key"],
            "run_id": self.request["run_id"],
            "mark": self.mark,
            "pid": os.getpid(),
            "born": start_time(os.getpid()),
            "state_dir": self.state,
            "run_dir": self.node["run_dir"],
            "remove": self.node["remove"],
            "container": as_json(self.container),
        }
        write_json(self.entry_path(), entry)
        write_json(self.path("agent.json"), entry)
        for name in ("reserve", "reserve-of-ranks"):
            with open(self.path(name), "wb") as reserve:
                reserve.write(bytes(RESERVE_BYTES))

    def on_term(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        self.end("stopped")

    def end(self, reason: str, grace_s: float = 0.0) -> None:
        """Request the end in ``grace_s``; the first reason counts, and nothing is signalled twice."""
        self.reason = self.reason or reason
        if self.kill_at is not None:
            return
        at = time.monotonic() + grace_s
        self.end_at = at if self.end_at is None else min(self.end_at, at)

    def watch(self, child: subprocess.Popen[bytes] | warm.Launch) -> int:
        """Wait until torchrun has ended. Returns its exit code (negative: the signal that ended it)."""
        looked = time.monotonic()
        while child.poll() is None:
            now = time.monotonic()
            if not self.container:
                self.root = child.pid
            try:
                self.pump()
                if now - looked > 0.5:
                    looked = now
                    Orphans.reap(child.pid)
                    self.look()
            except OSError as error:
                folder = self.node["run_dir"]
                removed = not os.path.exists(self.path("agent.json"))
                self.end(REMOVED % folder if removed else f"cannot write to {folder}: {reason(error)}")
            if self.end_at is not None and now >= self.end_at:
                self.early_exits.about_to_end_all()
                if isinstance(child, warm.Launch):
                    child.give_up()
                if self.kill_at is None:
                    self.signalled_pids |= self.signalled_by_others(self.root or child.pid)
                    self.kill_at = now + TERM_GRACE_S
                pids = self.signalled_pids
                in_thread(end_tree, self.mark, TERM_GRACE_S, "", pids, on_error=lambda _: None)  # tried again below
                self.end_at = now + TERM_GRACE_S + 3
            time.sleep(POLL_S)
        code = int(child.returncode or 0)
        return container.exit_code(code) if self.container else code

    def signalled_by_others(self, root: int) -> set[int]:
        """Return the processes of a script that other processes signal and wait for.

        torchrun (or the script without it) gets SIGTERM from the script's parent, and ranks get it from torchrun.
        """
        argv = self.node["argv"]
        if "--" not in argv:
            return set()
        below = children_of(root)
        return below if argv.index("--") == len(argv) - 2 else below.union(*map(children_of, below))

    def look(self) -> None:
        """Check other reasons to end: the folder removed, the controller gone, a rank's error. Raises OSError."""
        os.stat(self.path("agent.json"))
        if self.container and self.root is None:
            self.root = container.first_process(self.mark)
        touch(self.path("beat"))
        lease_s = self.request["lease_s"]
        if not os.path.exists(self.path("attached")):  # the controller died between start and follow
            lease_s = min(lease_s, UNATTENDED_S + self.request.get("slow_s", 0.0))
        silent_s = self.lease.look()
        if silent_s > lease_s:
            self.end(f"the controller has not been heard of for {lease_s:g} s")
        elif silent_s > BEAT_STALE_S and self.rendezvous.left_s() > LEFT_S:
            self.end("torchrun of the first node has ended, and the controller is not there to end this one")
        if glob.glob(os.path.join(glob.escape(self.state), "ranks/*/attempt_*/*/error.json")):
            self.end("a rank failed", SIBLING_GRACE_S)
        early = self.early_exits.ranks()
        if early and early.keys() == self.early_before.keys():  # torchrun had time to notice
            torchrun_reports = self.early_exits.torchrun_ends_others
            self.end("a rank ended before the run was over", REPORT_GRACE_S if torchrun_reports else SIBLING_GRACE_S)
        self.early_before = early

    def watch_peers(self) -> None:
        """End the run if this node is cut off: no heartbeats, and no other node answers any more.

        One answer a second is enough, because each connection costs a process of the other node's ssh server.
        """
        until = time.monotonic() + BEAT_STALE_S
        while not os.path.exists(self.path("attached")) and time.monotonic() < until:  # other nodes are being started
            time.sleep(POLL_S)
        peers, beats = peers_of(self.request, self.node), Silence(self.path("lease"))
        reached, misses = False, 0
        while peers:
            stale = beats.look() > BEAT_STALE_S
            if stale or not reached:
                alive = next((peer for peer in peers if answers(*peer)), None)
                if alive is not None:
                    reached, peers = True, [alive, *(peer for peer in peers if peer != alive)]
                misses = misses + 1 if stale and reached and alive is None else 0
                if misses >= 2:
                    self.end("isolated: neither the controller nor any other node can be reached")
            time.sleep(PEER_RETRY_S if misses else PEER_TRY_S)

    def pump(self, last: bool = False) -> bool:
        """Append new output of ranks and torchrun to the one log; return whether there was any."""
        if len(self.tails) < 2 * self.node["nproc_per_node"] or last:
            self.find_outputs()
        rows = [f"{rank} | {text}" for rank, tail in self.tails.values() for text in tail.lines(last)]
        rows += [f"- | {text}" for text in self.rendezvous.news()]
        if self.escaped:
            rows.append(f"- | {_OUTLIVED}{self.escaped}")
            self.outlived, self.escaped = [*self.outlived, self.escaped], ""
        for text in self.torchrun_log.lines(last):
            self.last_lines = [*self.last_lines[-39:], text]
            rows.append(f"- | {text}")
            self.early_exits.read(text)
            self.code = int(ended[1]) if (ended := _SCRIPT_ENDED.fullmatch(text)) else self.code
            failure = _FAILED.search(text)
            if failure:
                code, local_rank, pid = map(int, failure.groups())
                self.failed.setdefault(local_rank, {"code": code, "pid": pid, "unix_time": time.time()})
        if rows:
            with open(self.path("log"), "a", encoding="utf-8") as log:
                log.write("\n".join(rows) + "\n")
        return bool(rows)

    def find_outputs(self) -> None:
        if not os.path.isdir(self.path("ranks")):  # torchrun creates it after a second
            return
        for path in glob.glob(os.path.join(glob.escape(self.state), RANK_OUTPUTS)):
            if path not in self.tails:
                local_rank = int(os.path.basename(os.path.dirname(path)))
                tail = Tail(path, self.rules, shows_bars=local_rank == 0)  # the other ranks' bars say the same
                self.tails[path] = (self.node["first_rank"] + local_rank, tail)

    def write_end(self, code: int, gone: bool) -> None:
        """Write exit.json: how the run ended here, and why."""
        reason = self.reason or (container.not_started(self.container, code, self.root) if self.container else "")
        reason = reason or (
            "" if code == 0 else self.memory.explained(f"{self.ended_process(code)} ended with {describe(code)}")
        )
        if not gone:
            reason += "; some processes could not be ended"
        last_lines = self.last_lines if self.lines_before_kill is None else self.lines_before_kill
        tail = [self.memory.explained(text) for text in last_lines if text.strip()][-12:] if code else []
        errors = [] if code == 0 else self.errors()
        end = {"code": code, "reason": reason, "errors": errors, "tail": tail, "gone": gone}
        write_json(self.path("exit.json"), {**end, "outlived": "; ".join(self.outlived)})

    def errors(self) -> list[Json]:
        """Return each rank's own error: from torch's error file, else from its stderr and exit code."""
        by_rank: dict[int, Json] = {}
        early = {rank: {"code": code, "unix_time": time.time()} for rank, code in self.early_exits.ranks().items()}
        failed = {**early, **self.failed}
        for folder in sorted(glob.glob(os.path.join(glob.escape(self.state), "ranks/*/attempt_*/*/"))):
            local_rank = int(os.path.basename(os.path.dirname(folder)))
            error = recorded_error(os.path.join(folder, "error.json"))
            if error is None and (local_rank in failed or self.end_at is None):
                error = printed_error(os.path.join(folder, "stderr.log"), failed.get(local_rank), code=self.code)
            if error is not None:
                explained = self.memory.explain(masked_and_cut(error, self.rules.hide))
                by_rank[local_rank] = {"rank": self.node["first_rank"] + local_rank, **explained}
        if by_rank:
            for path in glob.glob(os.path.join(glob.escape(self.state), f"ranks/*/attempt_*/*/{ENDED}")):
                local_rank = int(os.path.basename(os.path.dirname(path)))
                about = {"rank": self.node["first_rank"] + local_rank, "message": ENDED_EARLY, "traceback": ""}
                by_rank.setdefault(local_rank, {**about, "unix_time": os.path.getmtime(path)})
        return sorted(by_rank.values(), key=lambda error: float(error["unix_time"]))


def described(pids: set[int]) -> str:
    """Return process ids with their commands, without processes that have ended."""
    words = []
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            words.append(f"process {pid} ({command_of(pid)[:400]})")
    return ", ".join(words)


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((encoded_name(address), port), timeout=PEER_TRY_S).close()  # type: ignore[arg-type]
    except OSError:
        return False
    return True
