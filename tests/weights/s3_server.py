"""An S3 server of our own (moto's, over HTTP on a free port), with one bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "weights"
# One request at a time: moto looks whether a key is there and writes afterwards, where S3's conditional write is one act.
_SERVE = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer
answer, one = DomainDispatcherApplication.__call__, threading.Lock()
def in_turn(*request):
    with one:
        return answer(*request)
DomainDispatcherApplication.__call__ = in_turn
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(port, flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Starts it, in a process of its own; gives the options with which fsspec opens it."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"MOTO_S3_CUSTOM_ENDPOINTS": ""},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        options = {
            "key": "nobody", "secret": "nothing",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
        }  # fmt: skip
        s3fs.S3FileSystem(**options).mkdir(BUCKET)
        yield options
    finally:
        process.kill()
        process.communicate()
