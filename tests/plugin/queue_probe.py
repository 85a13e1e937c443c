"""Two processes of one core with vLLM's own message queues: how often a parked reader of either was not woken by the writer's word.

    python -m tests.plugin.queue_probe stock|ours

prints that number, of 100 round trips.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from vllm_plugin import compat

ROUND_TRIPS = 100
LONG_MS = {"stock": 20, "ours": 2000}
"""When a parked reader looks again by itself; vLLM's would after five seconds."""


class Poller:
    """Counts the waits that ended without a word although the message was there."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self.num_empty = 0

    def poll(self, timeout: int | None) -> Any:
        events = self._stock.poll(timeout)
        self.num_empty += not events
        return events


def patch(how: str) -> None:
    compat.PARKED_MS = LONG_MS[how]
    os.environ["ROSE_ROLE"] = "rollout"  # it parks from its first message on
    compat.patch_spin()
    if how == "stock":
        written = compat._applied["queue word"]
        setattr(written.owner, written.attribute, written.original)


def counted(queue: MessageQueue) -> Poller:
    condition: Any = queue._spin_condition
    condition.poller = Poller(condition.poller)
    return condition.poller


def echo(handle: Any, pipe: Connection) -> None:
    asked, answers = MessageQueue.create_from_handle(handle, 0), MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    asked.wait_until_ready()
    answers.wait_until_ready()
    poller = counted(asked)
    for _ in range(ROUND_TRIPS):
        answers.enqueue(asked.dequeue())
    pipe.send(poller.num_empty)


def main(how: str) -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    patch(how)
    asked = MessageQueue(1, 1)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=echo, args=(asked.export_handle(), theirs))
    child.start()
    answers = MessageQueue.create_from_handle(ours.recv(), 0)
    asked.wait_until_ready()
    answers.wait_until_ready()
    poller = counted(answers)
    for number in range(ROUND_TRIPS):
        asked.enqueue(number)
        assert answers.dequeue() == number
    num_empty = poller.num_empty + ours.recv()
    child.join()
    return num_empty


if __name__ == "__main__":
    print("without a word:", main(sys.argv[1]))
