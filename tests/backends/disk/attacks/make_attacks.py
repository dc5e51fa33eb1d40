"""Writes the hostile files beside it, the same bytes every time: run it as a script.

Each is a file of format version 1 for chunk `KEY` of `NAMESPACE` with something wrong. Where the lie is
in a field, the header's checksum is right all the same: an attacker would see to that, as bit rot would not.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

NAMESPACE = bytes(range(32))
KEY = bytes(range(32, 64))
PAYLOAD = bytes((7 * at) % 256 for at in range(5000))
PAGE = 4096
FOLDER = Path(__file__).parent / "files"


def sealed(header: bytes, nbytes: int = PAGE) -> bytes:
    body = header.ljust(nbytes - 4, b"\0")[: nbytes - 4]
    return body + struct.pack("<I", zlib.crc32(body))


def file(
    *,
    magic: bytes = b"LMKV\r\n\x1a\n",
    version: int = 1,
    flags: int = 0,
    header_bytes: int = PAGE,
    payload_bytes: int = len(PAYLOAD),
    segment_bytes: int = PAGE,
    checksums: tuple[int, ...] | None = None,
    checksum_count: int | None = None,
    token_count: int = 0,
    namespace: bytes = NAMESPACE,
    key: bytes = KEY,
    payload: bytes = PAYLOAD,
    real_header_bytes: int = PAGE,
) -> bytes:
    """A file whose header says what it is told to, written without lmkv's own code."""
    if checksums is None:
        checksums = tuple(zlib.crc32(PAYLOAD[at : at + PAGE]) for at in range(0, len(PAYLOAD), PAGE))
    count = len(checksums) if checksum_count is None else checksum_count
    fixed = struct.pack(
        "<8sHHIQIII", magic, version, flags, header_bytes, payload_bytes, segment_bytes, count, token_count
    )
    header = fixed + namespace + key + bytes(32) + struct.pack(f"<{len(checksums)}I", *checksums)
    return sealed(header, real_header_bytes) + payload.ljust(-(-len(payload) // PAGE) * PAGE, b"\0")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def pickle_bomb() -> bytes:
    """A pickle that a reader which unpickles would run."""
    return b"cos\nsystem\n(S'touch /tmp/lmkv-was-here'\ntR.".ljust(3 * PAGE, b"\0")


ATTACKS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one-byte": lambda: b"L",
    "magic-alone": lambda: file()[:8],
    "header-alone": lambda: file()[:PAGE],
    "payload-cut": lambda: file()[: 2 * PAGE],
    "page-too-long": lambda: file() + bytes(PAGE),
    "byte-too-long": lambda: file() + b"\0",
    "zeros": lambda: bytes(3 * PAGE),
    "ones": lambda: b"\xff" * (3 * PAGE),
    "pickle": pickle_bomb,
    "zip": lambda: b"PK\3\4".ljust(3 * PAGE, b"\0"),
    "text-mode": lambda: file().replace(b"\r\n", b"\n", 1) + b"\0",
    "magic-of-a-relative": lambda: file(magic=b"LMKV\r\n\x1a\r"),
    "version-0": lambda: file(version=0),
    "version-2": lambda: file(version=2),
    "version-65535": lambda: file(version=65535),
    "unknown-flag": lambda: file(flags=0x8000),
    "header-0-long": lambda: file(header_bytes=0),
    "header-odd": lambda: file(header_bytes=PAGE + 1),
    "header-over-the-end": lambda: file(header_bytes=1 << 20),
    "header-4-gib": lambda: file(header_bytes=0xFFFFF000),
    "header-reaches-into-payload": lambda: file(header_bytes=2 * PAGE),
    "header-unsealed": lambda: flipped(file(), PAGE - 1),
    "payload-0-long": lambda: file(payload_bytes=0, checksums=()),
    "payload-shorter": lambda: file(payload_bytes=4097),
    "payload-longer": lambda: file(payload_bytes=5001),
    "payload-16-eib": lambda: file(payload_bytes=2**64 - 1),
    "payload-and-checksums-16-tib": lambda: file(payload_bytes=(2**32 - 1) * PAGE, checksum_count=2**32 - 1),
    "segments-of-0": lambda: file(segment_bytes=0),
    "segments-of-1": lambda: file(segment_bytes=1),
    "segments-of-2-gib": lambda: file(segment_bytes=1 << 31),
    "checksums-missing": lambda: file(checksums=()),
    "checksums-too-many": lambda: file(checksum_count=1000),
    "checksums-wrong": lambda: file(checksums=(1, 2)),
    "checksums-swapped": lambda: file(checksums=(zlib.crc32(PAYLOAD[PAGE:]), zlib.crc32(PAYLOAD[:PAGE]))),
    "tokens-4-gi": lambda: file(token_count=2**32 - 1),
    "tokens-just-too-many": lambda: file(token_count=(PAGE - 4 - 132 - 8) // 4 + 1),
    "other-key": lambda: file(key=bytes(32)),
    "other-namespace": lambda: file(namespace=bytes(32)),
    "payload-of-zeros": lambda: file(payload=bytes(len(PAYLOAD))),
    "payload-torn": lambda: file(payload=PAYLOAD[:PAGE] + bytes(len(PAYLOAD) - PAGE)),
    "payload-bit": lambda: flipped(file(), PAGE + 4999),
    "payload-segments-swapped": lambda: file(payload=PAYLOAD[PAGE:].ljust(PAGE, b"\0") + PAYLOAD[:PAGE]),
}


def attacks() -> Iterator[tuple[str, bytes]]:
    for name, make in ATTACKS.items():
        yield name, make()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sound.kv1").write_bytes(file())
    for name, data in attacks():
        (folder / f"{name}.kv1").write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
