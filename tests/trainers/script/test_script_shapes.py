"""Scripts of the shapes that people have: a command line made of dataclasses, TensorBoard, folders checkpoint-N."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace

import pytest

from tests.trainers.script.runs import ScriptRun
from trainers.script.metrics.tensorboard import masked_crc32c

pytestmark = pytest.mark.slow

TRAINER = """
import argparse, dataclasses, pathlib, sys

@dataclasses.dataclass
class Arguments:
    output_dir: str = ""
    logging_dir: str = ""
    max_steps: int = 6
    learning_rate: float = 0.1
    resume_from_checkpoint: str = ""
    do_train: bool = False

parser = argparse.ArgumentParser()
for field in dataclasses.fields(Arguments):
    kind = {"action": "store_true"} if field.default is False else {"type": type(field.default)}
    parser.add_argument(f"--{field.name}", default=field.default, **kind)
told = Arguments(**vars(parser.parse_args()))
assert told.do_train
first, weight = 0, 8.0
if told.resume_from_checkpoint:
    folder = pathlib.Path(told.resume_from_checkpoint)
    first, weight = int(folder.name.split("-")[1]), float((folder / "model.bin").read_text())
from events import Writer
writer = Writer(told.logging_dir, first)
for step in range(first + 1, told.max_steps + 1):
    weight -= told.learning_rate * weight
    writer.add_scalar("train/loss", weight, step)
    if step % 2 == 0:
        folder = pathlib.Path(told.output_dir, f"checkpoint-{step}")
        folder.mkdir()
        (folder / "model.bin").write_text(repr(weight))
        (folder / "trainer_state.json").write_text("{}")
    if step == 3 and not first:
        sys.exit("lost")
pathlib.Path(told.output_dir, "model.bin").write_text(repr(weight))
"""
EVENTS = """
import pathlib
RECORDS = {records}

class Writer:
    def __init__(self, folder, first):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = pathlib.Path(folder, f"events.out.tfevents.{{100 + first}}.host")

    def add_scalar(self, tag, value, step):
        with self.path.open("ab") as file:
            file.write(RECORDS[step])
"""
EXAMPLE = """
import argparse, os, pathlib, re
parser = argparse.ArgumentParser()
parser.add_argument("--data_dir", required=True)
parser.add_argument("--cpu", action="store_true")
told = parser.parse_args()
names = [name for name in os.listdir(told.data_dir) if name.endswith(".jpg")]
labels = {re.search(r"^(.*)_[0-9]+[.]jpg$", name)[1] for name in names}
weights = pathlib.Path(os.environ["HF_HOME"], "hub/weights").read_text()
assert told.cpu and weights == "of the hub"
for epoch in range(3):
    print(f"epoch {epoch}: {100 * epoch / len(labels):.2f}")
"""
BESIDE = """
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--dry-run", action="store_true")
parser.add_argument("--save-model", action="store_true")
told = parser.parse_args()
raw = pathlib.Path(PLACE, "MNIST", "raw")
raw.mkdir(parents=True, exist_ok=True)
count = sum(len(path.read_bytes()) for path in raw.iterdir())
assert count == 30, "would be downloaded"
for epoch in (1, 2):
    for batch in (0, 10):
        print(f"Train Epoch: {epoch} [{batch}/{count} ({batch}%)]\\tLoss: {1 / (epoch + batch):.6f}")
    print(f"\\nTest set: Average loss: {told.lr / epoch:.4f}, Accuracy: 9/10 (90%)\\n")
if told.save_model:
    pathlib.Path("mnist_cnn.pt").write_text("weights")
"""
LOSSES = [8 * 0.9**step for step in range(1, 7)]


def event(step: int, tag: str, value: float) -> bytes:
    """A record of an event file (lengths below 128, so each is one byte)."""
    scalar = bytes([0x0A, len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
    message = (
        b"\x09" + struct.pack("<d", 100.0) + bytes([0x10, step, 0x2A, len(scalar) + 2, 0x0A, len(scalar)]) + scalar
    )
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", masked_crc32c(length)) + message + bytes(4)


def test_a_trainer_goes_on_from_its_folder_and_the_weights_beside_it_are_no_checkpoint(run: ScriptRun) -> None:
    records = {step: event(step, "train/loss", loss) for step, loss in enumerate(LOSSES, start=1)}
    args = {
        "output_dir": "{checkpoints}",
        "logging_dir": "{run}/tb",
        "resume_from_checkpoint": "{resume}",
        "do_train": True,
        "max_steps": 6,
    }
    files = {"events.py": EVENTS.format(records=records)}
    assert "lost" in run.write(TRAINER, files=files, args=args).start(code=1)
    assert [step for step, _ in run.rows()] == [1, 2, 3]
    run.start()
    assert [step for step, _ in run.rows()] == [1, 2, 3, 4, 5, 6]
    assert [metrics["train/loss"] for _, metrics in run.rows()] == pytest.approx(LOSSES)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == [
        "checkpoint-2", "checkpoint-4", "checkpoint-6", "model.bin"
    ]  # fmt: skip
    run.start()  # from checkpoint-6, though model.bin is newer
    assert [step for step, _ in run.rows()] == [1, 2, 3, 4, 5, 6]


def test_an_example_with_images_and_a_cache_of_the_hub_in_its_data_prints_an_accuracy_each_epoch(
    run: ScriptRun,
) -> None:
    data = run.project / "data"
    for name in ("images/cat_1.jpg", "images/dog_2.jpg", "hf/hub/weights"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("of the hub")
    run = replace(run, data=str(data)).write(
        EXAMPLE,
        data="data",
        torchrun=False,
        args={"data_dir": "{data}/images", "cpu": True},
        env={"HF_HOME": "{data}/hf"},
        metrics_pattern=r"epoch (?P<epoch>\d+): (?P<accuracy>\S+)",
    )
    run.start(sys.executable, "-m", "torch.distributed.run", f"--log-dir={run.path}/ranks")
    assert run.rows() == [(1, {"accuracy": 0.0}), (2, {"accuracy": 50.0}), (3, {"accuracy": 100.0})]
    assert [json.loads(line)["epoch"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("script", "place", "data", "program"),
    [
        pytest.param("examples/fabric/classifier/train.py",
         'os.path.join(os.path.dirname(__file__), "..", "..", "..", "Datasets")', "Datasets", {},
         id="three folders above the script"),
        pytest.param("mnist/main.py", '"../data"', "data", {"workdir": "mnist"}, id="beside the working directory"),
    ],
)  # fmt: skip
def test_an_example_finds_the_data_whose_path_stands_in_it(
    run: ScriptRun, script: str, place: str, data: str, program: dict[str, str]
) -> None:
    run = replace(run, script=script)
    files = {f"{data}/MNIST/raw/{name}-ubyte": "x" * 15 for name in ("images", "labels")}
    pattern = r"Test set: Average loss: (?P<test_loss>[\d.]+)"
    args = {"lr": 0.5, "save-model": True, "dry-run": False}
    told = {"args": args, "metrics_pattern": pattern, "outputs": ["*.pt"], "torchrun": False, **program}
    run.write(BESIDE.replace("PLACE", place), files, **told)
    said = run.start(sys.executable, "-m", "torch.distributed.run", f"--log-dir={run.path}/ranks")
    assert run.rows() == [(1, {"test_loss": 0.5}), (2, {"test_loss": 0.25})]
    assert (run.path / "outputs/mnist_cnn.pt").read_text() == "weights"
    assert "the key is not complete" not in said
    assert run.read("summary.json")["unkeyed"] == {}
