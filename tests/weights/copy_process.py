"""A process that keeps a shared host copy, to be killed: ``python copy_process.py STORE DIRECTORY``; prints each version."""

from __future__ import annotations

import sys
from pathlib import Path

from rose.weights.file_store import FileStore
from rose.weights.shared_copy import SharedCopy
from rose.weights.subscriber import WeightSubscriber


def main(store: str, directory: str) -> None:
    def subscribe() -> WeightSubscriber:
        return WeightSubscriber(FileStore(store), "run", directory, owns_store=True)

    Path(directory).mkdir(exist_ok=True)
    copy = SharedCopy("run", directory, subscribe)
    while True:
        version = copy.poll(5.0)
        if version is not None:
            print(version, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
