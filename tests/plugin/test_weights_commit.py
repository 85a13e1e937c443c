"""A commit whose executor fails half-way: the engine goes on only with weights that are proved to be the old ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.errors import RequestError
from rose.lineage import WeightVersion
from vllm_plugin.engine_control import EngineControl

TARGET = WeightVersion(1, 2)


class Client:
    """vLLM's EngineClient with one rank, as far as a commit uses it; ``fails`` names the calls that raise."""

    def __init__(self, *fails: str) -> None:
        self._fails = fails
        self.engine_core = self
        self.calls: list[str] = []
        self.phase = "staged"
        self.slices = 1
        self.errored = False
        self.dead_error = ConnectionError("the engine is dead")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self._fails:
            raise ConnectionError(name)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        self._call(method)
        if method == "rose_weights_undo":
            self.phase = "failed"
        self.slices -= method == "rose_weights_outcome"
        return [
            {
                "committed": self.slices == 0,
                "more": self.slices > 0,
                "failed": None,
                "commit_s": 0.5,
                "ok": True,
                "phase": self.phase,
                "run": "job",
                "target_run": "job",
                "version": "1.1",
                "target": str(TARGET),
                "error": None,
                "session": False,
                "header": "h",
                "partial": {},
            }
        ]

    async def call_utility_async(self, _: str, name: str, argument: Any = None) -> Any:
        return {"run": argument or "job"} if name == "run" else None

    async def is_paused(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            self._call(name)

        return call


async def test_a_version_that_streams_is_asked_for_slice_by_slice_in_one_session() -> None:
    client = Client()
    client.slices = 3
    done = await EngineControl(client).commit(TARGET, "reset")
    assert (done["version"], done["commit_s"]) == (str(TARGET), 0.5)
    session = [call for call in client.calls if "weight_update" in call or call == "update_weights"]
    assert session[:5] == ["start_weight_update", *["update_weights"] * 3, "finish_weight_update"]
    assert "resume_generation" in client.calls


async def test_an_executor_that_fails_is_undone_and_the_engine_goes_on() -> None:
    client = Client("update_weights")
    with pytest.raises(ConnectionError):
        await EngineControl(client).commit(TARGET, "reset")
    assert client.calls[-4:] == [
        "rose_weights_undo",
        "finish_weight_update",
        "rose_weights_staged",
        "resume_generation",
    ]


@pytest.mark.parametrize("also", ["rose_weights_undo", "finish_weight_update"])
async def test_where_the_undo_fails_too_the_engine_stays_paused_and_says_so(also: str) -> None:
    client = Client("update_weights", also)
    with pytest.raises(RequestError) as caught:
        await EngineControl(client).commit(TARGET, "reset")
    assert caught.value.code == "weights_broken"
    assert "resume_generation" not in client.calls


async def test_a_call_that_a_dead_engine_leaves_open_ends_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the server, which waits for its open connections, would not end either."""
    client = Client()

    async def dies(_: Any) -> None:
        client.errored = True
        client._fails = ("rose_weights_undo",)
        await asyncio.Event().wait()

    client.update_weights = dies  # type: ignore[attr-defined]
    monkeypatch.setattr("vllm_plugin.engine_control.ALIVE_EVERY_S", 0.01)
    with pytest.raises(RequestError) as caught:
        await EngineControl(client).commit(TARGET, "reset")
    assert caught.value.code == "weights_broken"
