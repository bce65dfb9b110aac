"""Packing and reading image files against the loops that people write, in interleaved pairs.

    python benchmarks/image_data.py [pack|read|train] [images] [pairs] [workers]

pack: `dataset=folder` with JPEGs of 500×375 to 224×224, against a multiprocessing.Pool of Pillow (open, convert, resize
and centre crop) that fills a numpy.memmap on the same cores; each in a new process, whole. read: an epoch of an encoded
pack in batches of 64 with random-resized crops, against torchvision's ImageFolder, RandomResizedCrop and PILToTensor in
a DataLoader, with as many images and workers; both ready before their clocks start, nothing trains. train: the same
with a step of a small network on each batch, in this process, whose interpreter our threads share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
from measure import ROOT, interleaved, spread, surroundings, verdict
from PIL import Image

sys.path.insert(0, str(ROOT))

SIZE, CLASSES, BATCH, SMALLEST = 224, 10, 64, 0.08
TARGETS = {"pack": 1 / 0.9, "read": 1.0, "train": 1.0}  # our seconds in one of theirs
SPENT: dict[str, list[float]] = {"paceline": [], "DataLoader": []}  # processor time of epochs, with all processes


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_images(root / "photos", given.images)
        if given.what == "pack":
            first, second = packing(root, given.images, given.workers)
        else:
            first, second = reading(root, given.workers, training_step() if given.what == "train" else nothing)
        a, b = interleaved(first, second, given.pairs)
    print(f"{given.what}: {given.images} images, {given.workers} workers; {surroundings()}")
    if SPENT["paceline"]:
        ratios = [ours / theirs for ours, theirs in zip(SPENT["paceline"], SPENT["DataLoader"], strict=True)]
        ours, theirs = (spread(SPENT[side], "s") for side in SPENT)
        print(f"processor time: {ours}, {theirs}; ratio {spread(ratios)}")
    return verdict(
        ("paceline", "Pillow in a pool" if given.what == "pack" else "DataLoader"), a, b, TARGETS[given.what]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["pack", "read", "train"], default="pack")
    parser.add_argument("images", nargs="?", type=int, default=10_000)
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("workers", nargs="?", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def write_images(folder: Path, count: int) -> None:
    """Like photos: smooth shapes with some noise, about 60 KB each; 50 different ones, copied."""
    random = np.random.default_rng(0)
    contents = []
    for _ in range(50):
        small = Image.fromarray(random.integers(0, 255, (46, 62, 3), dtype=np.uint8))
        smooth = small.resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + random.normal(0, 8, (375, 500, 3))
        file = BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        contents.append(file.getvalue())
    for number in range(count):
        path = folder / f"class{number % CLASSES}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[number % 50])


def in_new_process(function, *args) -> float:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"{function.__name__} ended with {process.exitcode}")
    return time.perf_counter() - began


def packing(root: Path, count: int, workers: int):  # type: ignore[no-untyped-def]
    def ours(pair: int) -> float:
        return in_new_process(pack, root / "photos", root / f"data{pair}", 8.0)

    def theirs(pair: int) -> float:
        return in_new_process(plain, root / "photos", root / "plain.bin", workers)

    return ours, theirs


def pack(photos: Path, data: Path, limit: float) -> None:
    from pipeline.data.datasets.folder import FolderConfig
    from pipeline.data.store import fetch

    holdout = sum(1 for _ in photos.rglob("*.jpg")) // 10
    config = FolderConfig(source=str(photos), image_size=SIZE, holdout=holdout, decoded_limit=limit)
    fetch(config, data, on_progress=lambda *_: None)
    if limit:
        shutil.rmtree(data)


def plain(photos: Path, target: Path, workers: int) -> None:
    paths = sorted(photos.rglob("*.jpg"))
    out = np.memmap(target, dtype=np.uint8, mode="w+", shape=(len(paths), 3, SIZE, SIZE))
    with multiprocessing.Pool(workers) as pool:
        for number, image in enumerate(pool.imap(decoded, paths, chunksize=16)):
            out[number] = image.transpose(2, 0, 1)
    out.flush()


def decoded(path: Path) -> np.ndarray:
    image = Image.open(path).convert("RGB")
    scale = SIZE / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, upper = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    return np.asarray(image.crop((left, upper, left + SIZE, upper + SIZE)))


def nothing(images, labels) -> None:  # type: ignore[no-untyped-def]
    pass


def training_step():  # type: ignore[no-untyped-def]
    """A step of a network of 10 million multiply-adds an image, with one thread."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    layers = nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, CLASSES))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images.float().div_(255)), labels).backward()
        optimizer.step()

    return step


def processor_seconds() -> float:
    """Of this process and its children."""
    this = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (this, *this.children(recursive=True)))


def reading(root: Path, workers: int, step):  # type: ignore[no-untyped-def]
    import torch
    from torchvision import datasets, transforms

    from trainers.core.config import DatasetConfig
    from trainers.data.augment import plan_epoch
    from trainers.data.encoded import EncodedReader
    from trainers.data.image_files import Geometry
    from trainers.data.pack import open_pack

    pack(root / "photos", root / "data", 0.0)
    opened = open_pack(next((root / "data").glob("folder-*")))
    settings = DatasetConfig(name="folder", random_resized_crop=SMALLEST)
    geometry = Geometry(height=SIZE, width=SIZE, channels=3)
    reader = EncodedReader(
        opened.folder,
        geometry,
        opened.places,
        opened.labels,
        torch.device("cpu"),
        smallest_crop=SMALLEST,
        workers=workers,
    )
    start, stop = opened.manifest.splits["train"]
    batches = (stop - start) // BATCH

    def ours(pair: int) -> float:
        plan = plan_epoch(settings, opened, seed=0, epoch=pair)
        began, spent = time.perf_counter(), processor_seconds()
        parts = [plan.batch(number * BATCH, BATCH).row_request for number in range(batches)]
        reader.expect(parts)
        for part in parts:
            step(*reader.take(part))
        SPENT["paceline"].append(processor_seconds() - spent)
        return time.perf_counter() - began

    crops = transforms.Compose([transforms.RandomResizedCrop(SIZE, scale=(SMALLEST, 1)), transforms.PILToTensor()])
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(datasets.ImageFolder(str(root / "photos"), crops), range(batches * BATCH)),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
    )

    def theirs(pair: int) -> float:
        began, spent = time.perf_counter(), processor_seconds()
        for images, labels in loader:
            step(images, labels)
        SPENT["DataLoader"].append(processor_seconds() - spent)
        return time.perf_counter() - began

    theirs(0)  # starts its workers
    SPENT["DataLoader"].clear()
    return ours, theirs


if __name__ == "__main__":
    sys.exit(main())
