"""Whether a checkpoint's files are the bytes that were written: damage that still parses would train on silently.

`digests.json` holds a BLAKE2 digest of every other file. A file is hashed block by block by several threads, which
keeps up with the disk: the 48 GB of a 4B model take the seconds that they take to read. A checkpoint is hashed as it
is written, beside the run.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE = "digests.json"
BLOCK = 1 << 25  # bytes that a thread holds
THREADS = 8


def write_digests(directory: Path) -> None:
    """Digest the files that lie in `directory`."""
    digests = {path.name: file_digest(path) for path in sorted(directory.iterdir())}
    (directory / FILE).write_text(json.dumps(digests, indent=1))


def check_digests(directory: Path) -> None:
    """Raise ValueError, naming it, for a file that is not as it was written; OSError for one that is missing."""
    digests = json.loads((directory / FILE).read_text())
    wrong = [name for name, digest in dict(digests).items() if file_digest(directory / name) != digest]
    if wrong:
        raise ValueError(f"not as they were written: {', '.join(wrong)}")


def file_digest(path: Path) -> str:
    """BLAKE2 of the digests of a file's blocks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(descriptor).st_size, BLOCK)
        with ThreadPoolExecutor(THREADS) as pool:
            parts = pool.map(lambda start: hashlib.blake2b(os.pread(descriptor, BLOCK, start)).digest(), starts)
            return hashlib.blake2b(b"".join(parts)).hexdigest()[:32]
    finally:
        os.close(descriptor)
