"""A picture that says what it was drawn from: a text inside the PNG, so that a test can tell when rows moved on."""

import hashlib
import struct
import zlib
from pathlib import Path

import plotly.graph_objects as go

KEYWORD = b"kv4rl"
HEAD = 33  # bytes of a PNG before its second chunk: signature and IHDR


def digest(figure: go.Figure) -> str:
    """A short hash of everything that a figure draws."""
    return hashlib.sha256(figure.to_json().encode()).hexdigest()[:16]


def stamp(path: Path, text: str) -> None:
    """Put `text` into the PNG at `path` as its `kv4rl` tEXt chunk (Latin-1, as PNG has it)."""
    body = b"tEXt" + KEYWORD + b"\0" + text.encode("latin-1")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    drawn = path.read_bytes()
    path.write_bytes(drawn[:HEAD] + chunk + drawn[HEAD:])


def stamped(path: Path) -> str:
    """The text that `stamp` put into the PNG at `path`; empty if there is none."""
    drawn, begin = path.read_bytes(), b"tEXt" + KEYWORD + b"\0"
    at = drawn.find(begin)
    if at < 0:
        return ""
    (length,) = struct.unpack(">I", drawn[at - 4 : at])
    return drawn[at + len(begin) : at + 4 + length].decode("latin-1")
