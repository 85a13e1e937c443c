"""What it costs to hash weight objects, on one core of this machine: GB/s, best of several, 64 MiB at a time.

    python benchmarks/weight_transfer/digests.py [--json FILE]

``xxh3_128`` is the transport checksum, BLAKE3 binds objects to what the trainer signed; the others are there to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from blake3 import blake3

from rose.signatures import PublicKeys, SigningKey

DIGESTS: dict[str, Callable[[bytes], object]] = {
    "xxh3_128": xxhash.xxh3_128_digest,
    "blake3": lambda data: blake3(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
}


def gb_per_s(digest: Callable[[bytes], object], data: bytes, num_tries: int) -> float:
    """Best of ``num_tries``."""
    best_s = float("inf")
    for _ in range(num_tries):
        began_s = time.thread_time()
        digest(data)
        best_s = min(best_s, time.thread_time() - began_s)
    return len(data) / best_s / 1e9


def seal_s(num_tries: int) -> tuple[float, float]:
    """Seconds to sign and to check a head."""
    key = SigningKey.generate()
    keys, best = PublicKeys.parse(key.public), [float("inf"), float("inf")]
    for _ in range(num_tries):
        began_s = time.thread_time()
        seal = key.seal("head", "run", b"x" * 400)
        signed_s = time.thread_time()
        keys.check("head", "run", b"x" * 400, seal, name="head")
        best = [min(best[0], signed_s - began_s), min(best[1], time.thread_time() - signed_s)]
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    data = np.random.default_rng(1).bytes(64 << 20)
    found = {name: round(gb_per_s(digest, data, args.tries), 2) for name, digest in DIGESTS.items()}
    for name, value in found.items():
        print(f"{name:<9} {value:6.2f} GB/s")
    sign_s, check_s = seal_s(args.tries)
    print(f"a head is signed in {sign_s * 1e6:.0f} us and checked in {check_s * 1e6:.0f} us")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"gb_per_s": found, "sign_s": sign_s, "check_s": check_s}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
