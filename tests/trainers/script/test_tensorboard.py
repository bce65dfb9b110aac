"""TensorBoard's event files, as tensorboardX 2.6 wrote one."""

from __future__ import annotations

import base64
import math
import zlib
from pathlib import Path

from trainers.script.metrics.tensorboard import EventFile, Scalar

# add_scalar, add_text, a scalar as TensorProto of each kind, a vector, a NaN
WRITTEN = zlib.decompress(
    base64.b85decode(
        b"c-oU-fPlsI-b$Pu@9WMSJ8;WUiZ`h!F*8rkwJbHS#L8%yL-$Mts5;HJD+4&eEP+S|0Y)uhE<rA?5|C>Boc!WqQJ{o<q5Ql|E2w&*sjnVE)H{IH"
        b">vCyx3FhUOr0SQXR+PjSm*(as7F9a&aIg!p2r+RmIx%HrdU0^Eaj}5p@2%rJs01~sLeTav#3TivN&o&s0izZV7Z(?EVsbLjZU=ilnMb<nP#wD;Z"
        b"ghj_XaMS9){^3q;NmGs%`46?(of6DPb_ib;9%5Z0ZQ9lFc!_wfol7*?u;w4HhC^tE?%g%l>E}9oK&E5nUpvns(;wW=KmGchU#sTKJ1OGSB^^t7("
        b"5WYnRz8nd>ouXTtDG%SO4o#PK>o>smUezML=sAwKzb|1%>jhq>v4AP`x+r2pK{29sufX009L^xa1|~0mJ1$y~3u9766q&eGC"
    )
)
FINITE = [
    Scalar(100.25, 1, "train/loss", 0.5),
    Scalar(100.5, -2, "acc", 0.75),
    Scalar(102.0, 3, "tensor/float", 0.25),
    Scalar(102.0, 3, "tensor/double", 1.5),
    Scalar(102.0, 3, "tensor/int", -7.0),
]


def test_scalars_are_read_once_however_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.touch()
    file, found = EventFile(path), []
    for end in range(0, len(WRITTEN) + 1, 7):
        path.write_bytes(WRITTEN[:end])
        found += file.scalars()
    path.write_bytes(WRITTEN)
    found += file.scalars()
    last = found.pop()
    assert found == FINITE
    assert (last.time_s, last.step, last.tag, math.isnan(last.value)) == (103.0, 1 << 40, "nan", True)
    assert (list(file.scalars()), file.damage) == ([], "")


def test_a_damaged_file_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    at = WRITTEN.index(b"train/loss") + 100  # the length of a later record
    at = WRITTEN.rindex(b"\0\0\0\0\0\0", 0, WRITTEN.index(b"tensor/float"))
    path.write_bytes(WRITTEN[:at] + b"\1" + WRITTEN[at + 1 :])
    file = EventFile(path)
    assert list(file.scalars()) == FINITE[:2]
    assert file.damage.startswith("its record at byte ")
    assert list(file.scalars()) == []
