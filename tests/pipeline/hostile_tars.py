"""Tars as no sender of ours writes them: each with what is wrong with it."""

from __future__ import annotations

import io
import tarfile

DEEP = "b" * 247


def raw(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A header may say that it has more than follows."""
    buffer = io.BytesIO()
    for member, content in members:
        buffer.write(member.tobuf(tarfile.USTAR_FORMAT if len(member.name) < 100 else tarfile.GNU_FORMAT))
        buffer.write(content + bytes(-len(content) % 512))
    return buffer.getvalue() + bytes(10240)


def of(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, **more: object
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.size = len(content)
    for field, value in more.items():
        setattr(member, field, value)
    return member, content


def huge(name: str, kind: bytes, size: int) -> bytes:
    """A header that promises more than anybody can hold; in GNU's format, which has room for such a number."""
    member, _ = of(name, b"", kind, size=size)
    return member.tobuf(tarfile.GNU_FORMAT)


def hostile(inside: str) -> dict[str, tuple[bytes, str]]:
    """Named by what is wrong → the tar, and what is said. ``inside`` is a name that would be taken."""
    nested = b"".join(raw(of("x", b"11 path=ab\n", tarfile.XHDTYPE))[:1024] for _ in range(900))
    return {
        "absolute": (raw(of("/tmp/evil-absolute")), "leads out of its folder"),
        "above": (raw(of("../evil")), "leads out of its folder"),
        "above, inside": (raw(of(f"{inside}/../../../evil")), "leads out of its folder"),
        "link": (raw(of(inside, b"", tarfile.SYMTYPE, linkname="/etc/passwd")), "is no plain file"),
        "hard link": (raw(of(inside, b"", tarfile.LNKTYPE, linkname="../secret")), "is no plain file"),
        "device": (raw(of(inside, b"", tarfile.CHRTYPE)), "is no plain file"),
        "pipe": (raw(of(inside, b"", tarfile.FIFOTYPE)), "is no plain file"),
        "long part": (raw(of(f"{DEEP * 2}")), "is no name of a file"),
        "twice": (raw(of(inside), of(inside)), "is in it twice"),
        "sparse": (raw(of(inside, b"", tarfile.GNUTYPE_SPARSE)), "is no plain file"),
        "pax header of 4 GiB": (huge("x", tarfile.XHDTYPE, 4 << 30), "a header of it has 4,294,967,296 bytes"),
        "long name of 4 GiB": (huge("x", tarfile.GNUTYPE_LONGNAME, 4 << 30), "a header of it has 4,294,967,296 bytes"),
        "headers in headers": (nested, ""),
        "negative": (huge(inside, tarfile.REGTYPE, -512), ""),
        "cut off": (raw(of(inside, b"x" * 2048))[:1536], "is cut off"),
        "no end": (raw(of(inside))[:1024], "is cut off"),
        "too large": (huge(inside, tarfile.REGTYPE, 1 << 60), "1,152,921,504,606,846,976 bytes, of at most"),
    }
