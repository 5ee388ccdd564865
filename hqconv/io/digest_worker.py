"""Program of a process that hashes files: `digest_processes` starts it by its path, so it imports nothing of hqconv.

Each line of its input is a path in hexadecimal; it answers with `sha256 DIGEST` or `errno NUMBER`. It ends with its
input, and so with the process that started it.
"""

from __future__ import annotations

import hashlib
import sys

_CHUNK_BYTES = 1 << 20


def main() -> None:
    """Answer every line of the input."""
    print("ready", flush=True)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for line in sys.stdin:
        try:
            digest = hashlib.sha256()
            with open(bytes.fromhex(line), "rb", buffering=0) as file:  # noqa: PTH123 - without an import
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
            answer = f"sha256 {digest.hexdigest()}"
        except OSError as error:
            answer = f"errno {error.errno or 0}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
