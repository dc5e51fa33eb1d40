"""Writes the hostile files beside it, the same bytes every time: run it as a script.

Each is a file of format version 1 for chunk `KEY` of `NAMESPACE` with something wrong. Where the lie is
in a field, the header's checksum is right all the same: an attacker would see to that, as bit rot would not.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

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


SUMS = tuple(zlib.crc32(PAYLOAD[at : at + PAGE]) for at in (0, PAGE))
LIES: dict[str, dict[str, Any]] = {
    "magic-of-a-relative": {"magic": b"LMKV\r\n\x1a\r"}, "version-0": {"version": 0}, "version-2": {"version": 2},
    "version-65535": {"version": 65535}, "unknown-flag": {"flags": 0x8000}, "header-0-long": {"header_bytes": 0},
    "header-odd": {"header_bytes": PAGE + 1}, "header-over-the-end": {"header_bytes": 1 << 20},
    "header-4-gib": {"header_bytes": 0xFFFFF000}, "header-reaches-into-payload": {"header_bytes": 2 * PAGE},
    "payload-0-long": {"payload_bytes": 0, "checksums": ()}, "payload-shorter": {"payload_bytes": 4097},
    "payload-longer": {"payload_bytes": 5001}, "payload-16-eib": {"payload_bytes": 2**64 - 1},
    "payload-and-checksums-16-tib": {"payload_bytes": (2**32 - 1) * PAGE, "checksum_count": 2**32 - 1},
    "segments-of-0": {"segment_bytes": 0}, "segments-of-1": {"segment_bytes": 1},
    "segments-of-2-gib": {"segment_bytes": 1 << 31}, "checksums-missing": {"checksums": ()},
    "checksums-too-many": {"checksum_count": 1000}, "checksums-wrong": {"checksums": (1, 2)},
    "checksums-swapped": {"checksums": SUMS[::-1]}, "tokens-4-gi": {"token_count": 2**32 - 1},
    "tokens-just-too-many": {"token_count": (PAGE - 4 - 132 - 8) // 4 + 1}, "other-key": {"key": bytes(32)},
    "other-namespace": {"namespace": bytes(32)}, "payload-of-zeros": {"payload": bytes(len(PAYLOAD))},
    "payload-torn": {"payload": PAYLOAD[:PAGE] + bytes(len(PAYLOAD) - PAGE)},
    "payload-segments-swapped": {"payload": PAYLOAD[PAGE:].ljust(PAGE, b"\0") + PAYLOAD[:PAGE]},
}  # fmt: skip
"""What of the header, or which payload, is another one."""
SOUND = file()
ATTACKS: dict[str, bytes] = {
    **{name: file(**lie) for name, lie in LIES.items()},
    "empty": b"", "one-byte": b"L", "magic-alone": SOUND[:8], "header-alone": SOUND[:PAGE],
    "payload-cut": SOUND[: 2 * PAGE], "page-too-long": SOUND + bytes(PAGE), "byte-too-long": SOUND + b"\0",
    "zeros": bytes(3 * PAGE), "ones": b"\xff" * (3 * PAGE), "zip": b"PK\3\4".ljust(3 * PAGE, b"\0"),
    # A pickle that a reader which unpickles would run.
    "pickle": b"cos\nsystem\n(S'touch /tmp/lmkv-was-here'\ntR.".ljust(3 * PAGE, b"\0"),
    "text-mode": SOUND.replace(b"\r\n", b"\n", 1) + b"\0",
    "header-unsealed": flipped(SOUND, PAGE - 1), "payload-bit": flipped(SOUND, PAGE + 4999),
}  # fmt: skip


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sound.kv1").write_bytes(file())
    for name, data in ATTACKS.items():
        (folder / f"{name}.kv1").write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
