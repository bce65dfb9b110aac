"""The tracker that writes an event file for TensorBoard, in ``tensorboard/NAME/`` of the run folder.

After a kill, writing goes on behind the file's last complete record, so each point is there once.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline.tracking.description import Description
from pipeline.tracking.points import Mark, Point, next_mark
from pipeline.tracking.trackers.base import Tracker

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"
_ABOUT = "run"
_NOT_IN_A_NAME = re.compile(r"[^\w.=,+·() -]")
_LONGEST_NAME = 60  # characters, each of up to four bytes
_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")


class TensorBoard(Tracker):
    """One event file per run: scalars, and the run's description as text."""

    def __init__(self, settings: Any, run_dir: Path) -> None:
        super().__init__(settings, run_dir)
        self._file: IO[bytes] | None = None

    def begin(self, run: Description) -> Mapping[str, Mark]:
        start_s = (run.start_ms or 0) / 1000
        (self.run_dir / FOLDER).mkdir(exist_ok=True)
        paths = sorted(self.run_dir.glob(f"{FOLDER}/*/events.out.tfevents.*"))
        name = _NOT_IN_A_NAME.sub("_", run.name)[:_LONGEST_NAME].strip(" .") or run.key  # TensorBoard shows it
        path = paths[0] if paths else self.run_dir / FOLDER / name / f"events.out.tfevents.{int(start_s)}.{run.key}"
        path.parent.mkdir(exist_ok=True)
        file = self._file = path.open("r+b" if paths else "x+b")
        complete_bytes, marks = _complete_records(file)
        file.truncate(complete_bytes)
        file.seek(complete_bytes)
        first_records = [] if complete_bytes else [Event(wall_time=start_s, file_version=_VERSION)]
        if _ABOUT not in marks:
            first_records.append(_about(run, start_s))
        self._write(first_records)
        return marks

    def log(self, points: Sequence[Point]) -> None:
        rows = itertools.groupby(points, key=lambda point: (point.time_ms, point.step))
        self._write(
            Event(
                wall_time=time_ms / 1000,
                step=step,
                summary=Summary(value=[Summary.Value(tag=point.key, simple_value=point.value) for point in row]),
            )
            for (time_ms, step), row in rows
        )

    def end(self, run: Description, state: str, end_ms: int | None) -> None:
        """Do nothing: an event file has no end record."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, events: Any) -> None:
        assert self._file is not None
        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
        self._file.flush()
        os.fsync(self._file.fileno())


def _complete_records(file: IO[bytes]) -> tuple[int, dict[str, Mark]]:
    """Return the offset in bytes behind the last complete record, and the last point of each metric up to there."""
    # a record: length of the event, checksum of the length, the event, checksum of the event
    end, marks = 0, dict[str, Mark]()
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, check = _HEAD.unpack(head)
        data = file.read(length + _TAIL.size) if masked_crc32c(head[:8]) == check else b""
        if len(data) < length + _TAIL.size or masked_crc32c(data[:length]) != _TAIL.unpack(data[length:])[0]:
            break
        event: Any = Event.FromString(data[:length])
        for value in event.summary.value:
            marks[value.tag] = next_mark(marks.get(value.tag), event.step)
        end = file.tell()
    return end, marks


def _about(run: Description, time_s: float) -> Event:
    """Return the event that has the run's description as text."""
    text = f"**{run.name}**\n\n{run.tags.get('mlflow.note.content', '')}"
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    metadata = create_summary_metadata(display_name=_ABOUT, description="")
    return Event(wall_time=time_s, summary=Summary(value=[Summary.Value(tag=_ABOUT, tensor=tensor, metadata=metadata)]))
