"""What the ranks would find wrong with a run's data is said before they are started."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.core.errors import UsageError
from pipeline.execution.run import refuse_misfits
from trainers.contract.data_pack import Manifest
from trainers.core.config import DatasetConfig, TrainConfig, TrainerConfig


def data(encoding: dict[str, int | None] | None = None) -> Manifest:
    return cast(Manifest, SimpleNamespace(name="photos", num_classes=3, encoding=encoding, splits={"train": (0, 300)}))


def told(*, crop: float = 0.0, **trainer: Any) -> TrainConfig:
    dataset = DatasetConfig(name="folder", random_resized_crop=crop)
    return cast(TrainConfig, SimpleNamespace(dataset=dataset, trainer=TrainerConfig(**trainer)))


@pytest.mark.parametrize(
    ("train", "text"),
    [
        (told(class_weights=[1.0, 2.0]), "trainer.class_weights has 2 weights, and photos has 3 classes"),
        (told(crop=0.2), "dataset.random_resized_crop=0.2 is cut from the files, and the pack of photos has pixels"),
        (
            told(global_batch_size=512),
            "trainer.global_batch_size=512: the train split of photos has 300 images, fewer than that\n"
            "  try: trainer.global_batch_size=N, N at most 300 and a multiple of the number of ranks",
        ),
    ],
)
def test_settings_that_don_t_fit_the_data_are_refused(train: TrainConfig, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        refuse_misfits(train, data())


def test_settings_that_fit_the_data_pass() -> None:
    refuse_misfits(told(class_weights=[1.0, 2.0, 0.5], crop=0.2), data({"resize": None}))
    refuse_misfits(told(class_weights="balanced"), data())
