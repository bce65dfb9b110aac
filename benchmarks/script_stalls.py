"""Hangs inside unedited scripts: does the message name the rank, its host and the kind, and nobody in a healthy run?

    python benchmarks/script_stalls.py [count] [healthy] [seed]        (Linux, root; raises its own two lab hosts)

Each case is a script under torchrun, with two ranks on this computer or on two lab hosts, that hangs at a step drawn
from the seed, or is long at work there. The script has no line of Paceline. Right is as in stalls.py; a line for each
case goes to script_stalls.jsonl in the working directory.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import tempfile
from pathlib import Path

from measure import ROOT, checked, surroundings
from stalls import STALL_S, Case, counted, follow, strike_from_outside

from pipeline import lab

LOOK_S = 1.5  # for the stacks and the processor time
HANGS = r"rank {rank} on {host} hangs in the script: "
KINDS = {  # kind → words of its message
    "stopped": HANGS + r"process \d+ is stopped",
    "skips a collective": r"rank {rank}.*(another collective|without a collective|mismatch)|collective mismatch",
    "sleeps in the data set": HANGS + r"it sleeps .*in __getitem__",
    "its loader's worker sleeps": HANGS + r"it waits for a worker process of its DataLoader",
    "waits for a lock": HANGS + r"it waits for a lock",
    "waits for a locked file": HANGS + r"it waits for a file that another process has locked",
    "reads a silent socket": HANGS + r"it waits for data from a connection",
    "its link is cut": r"{host}",
}
HEALTHY = ("compiles", "downloads slowly", "evaluates on one rank alone", "saves for long")
LAB_ALONE = ("its link is cut",)
SCRIPT = """
import argparse, fcntl, os, socket, subprocess, sys, threading, time
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--kind"), parser.add_argument("--rank", type=int), parser.add_argument("--at", type=int)
options = parser.parse_args()
dist.init_process_group("gloo")
strikes = dist.get_rank() == options.rank


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64 * 400

    def __getitem__(self, index):
        in_worker = torch.utils.data.get_worker_info() is not None
        sleeps = "its loader's worker sleeps" if in_worker else "sleeps in the data set"
        if strikes and index == 64 * options.at and options.kind == sleeps:
            print("now", flush=True), time.sleep(1e6)
        return torch.ones(16), index % 4


def hang_or_work(kind):
    if kind == "waits for a lock":
        lock = threading.Lock()
        lock.acquire(), lock.acquire()
    if kind == "waits for a locked file":
        held = open(f"/tmp/held-{os.getpid()}", "w")
        code = f"import fcntl, time; f = open({held.name!r}); fcntl.flock(f, 2); print(1, flush=True); time.sleep(1e6)"
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        other.stdout.readline()
        os.unlink(held.name)
        fcntl.flock(held, fcntl.LOCK_EX)
    if kind == "reads a silent socket":
        here, there = socket.socketpair()
        here.recv(1)
    if kind == "compiles":
        for width in range(3, 12):
            compiled = torch.compile(lambda x: (x.sin() @ x.T).softmax(-1).sum() * width)
            compiled(torch.randn(width * 7, width)), torch._dynamo.reset()
    if kind == "downloads slowly":
        server = socket.create_server(("127.0.0.1", 0))
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        def send():
            for _ in range(1000):
                sender.sendall(bytes(1000)), time.sleep(0.02)
            sender.close()
        threading.Thread(target=send, daemon=True).start()
        while receiver.recv(4096):
            pass
    if kind == "evaluates on one rank alone":
        until = time.time() + 20
        while time.time() < until:
            torch.randn(200, 200) @ torch.randn(200, 200)
    if kind == "saves for long":
        with open(f"/tmp/saved-{os.getpid()}", "wb") as file:
            for _ in range(40):
                file.write(bytes(1 << 20)), file.flush(), time.sleep(0.5)
        os.unlink(file.name)


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
workers = 1 if options.kind == "its loader's worker sleeps" else 0
loader = torch.utils.data.DataLoader(Data(), batch_size=64, num_workers=workers)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    if step % 5 == 0 and step < options.at:
        print(f"step {step}", flush=True) if dist.get_rank() == 0 else None
    if step == options.at:
        print("now", flush=True)
        if strikes:
            hang_or_work(options.kind)
        if not (strikes and options.kind == "skips a collective"):
            dist.barrier()
    if step > options.at and options.kind in ("stopped", "its link is cut"):
        time.sleep(0.05)
    elif step > options.at + 20:
        break
dist.destroy_process_group()
"""


def cases(count: int, healthy: int, seed: int) -> list[Case]:
    chance = random.Random(seed)
    kinds = [[*KINDS][number % len(KINDS)] for number in range(count)]
    kinds += [HEALTHY[number % len(HEALTHY)] for number in range(healthy)]
    chance.shuffle(kinds)
    places = ["lab" if kind in LAB_ALONE else chance.choice(["here", "lab"]) for kind in kinds]
    rows = enumerate(zip(kinds, places, strict=True))
    return [Case(n, kind, place, chance.randrange(2), chance.randrange(10, 60)) for n, (kind, place) in rows]


def main() -> int:
    words = [*sys.argv[1:], *["100", "20", "0"][len(sys.argv) - 1 :]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # its lab is taken down
    drawn = cases(int(words[0]), int(words[1]), int(words[2]))
    print(f"{len(drawn)} scripts, seed {words[2]}; {surroundings()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="script-stalls-") as temporary:
        place = Path(temporary)
        hosts = lab.up(place, 2)
        try:
            project = place / "project"
            checked(["git", "clone", "--quiet", str(ROOT), str(project)], cwd=place)
            (project / "hangs.py").write_text(SCRIPT)
            kinds = (*KINDS, *HEALTHY)
            return counted(drawn, kinds, Path("script_stalls.jsonl"), lambda case: run_case(project, case, hosts))
        finally:
            lab.down(place)


def run_case(project: Path, case: Case, hosts: lab.Lab) -> dict[str, object]:
    where = [f"cluster.ssh_config={hosts.ssh_config}", "cluster=two_node", "cluster.nproc_per_node=1"]
    where = where if case.place == "lab" else ["cluster.nproc_per_node=2"]
    if case.kind == "stopped":  # a fork of the warm parent shows no variables, by which the rank is found
        where.append("cluster.warm=false")
    runs = project.parent / f"runs{case.number}"
    words = [*where, f"cluster.stall_s={STALL_S:g}", "tracking=none", f"paths.runs={runs}", "program.script=hangs.py"]
    words += [f'program.args.kind="{case.kind}"', f"program.args.rank={case.rank}", f"program.args.at={case.step}"]
    is_cut = case.kind == "its link is cut"
    blame = re.compile(r"no rank has moved|training failed|no longer answers: ")

    def strike() -> None:
        lab.cut(hosts, case.host) if is_cut else strike_from_outside(case, runs, hosts)

    try:
        code, lines, after_s = follow(project, words, lambda line: line.endswith("now"), strike, blame)
    finally:
        if is_cut:
            lab.restore(hosts, case.host)
    said = "\n".join(lines)
    failure = next((line for line in lines if blame.search(line)), "")
    if case.kind in HEALTHY:
        right = code == 0 and not failure
    else:
        text = said[said.find(failure) :] if failure else ""
        right = re.search(KINDS[case.kind].format(rank=case.rank, host=case.host), text, re.DOTALL) is not None
    in_time = after_s is None or case.kind in HEALTHY or after_s <= STALL_S + 5 + LOOK_S
    return {"right": right and in_time, "after_s": after_s, "said": said[said.find(failure) :][:400] if failure else ""}


if __name__ == "__main__":
    sys.exit(main())
