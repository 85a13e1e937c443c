"""A step that stops between two layers: on a small model of torch's, with production's and the agent's files written by the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose.coserve.cuda_driver import CudaDriver
from rose.coserve.records import LayerState, RolloutLease
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve import fakecuda
from tests.coserve.fakecuda import Device
from tests.coserve.memory_driver import MemoryDriver
from tests.plugin.stand_in import Host, S, eventually
from vllm_plugin import layer_stop
from vllm_plugin.layer_stop import LaunchAhead, LayerStop

LAYERS = 4
NAMES = [f"layers.{number}.attn" for number in range(LAYERS)]
STEP = 7


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.mlp(torch.relu(self.attn(x)))


class Model(torch.nn.Module):
    """Tells when layer ``at`` begins, and waits there until it may go on: the moment in which something happens to a step."""

    def __init__(self, at: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.at, self.reached, self.go_on = at, threading.Event(), threading.Event()
        self.begun: list[int] = []

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            if number == self.at:
                self.reached.set()
                assert self.go_on.wait(30)
            self.begun.append(number)
            x = layer(x)
        return x


class Step(threading.Thread):
    """One step of a rank in the background."""

    def __init__(self, stop: LayerStop, model: Model, number: int = STEP, on: bool = True) -> None:
        super().__init__(daemon=True)
        self._layer_stop, self._model, self._number, self._on = stop, model, number, on
        self.output: Any = None
        self.start()

    def run(self) -> None:
        with torch.inference_mode():
            self._layer_stop.begin(self._number, self._on)
            self.output = self._model(torch.ones(2, 8))

    def ended(self) -> Any:
        self.join(30)
        assert not self.is_alive(), "the step does not end"
        return self.output


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Production promises a first token within a minute; the rollout engine holds what it is lent."""
    tmp_path.chmod(0o700)
    host = Host(tmp_path)
    host.set(node={"slo_ttft_ns": 60 * S})
    host.lend(8)
    with host.dir.rollout_lease_writer() as lease:
        lease.write(RolloutLease(reserved_pages=8))
        yield host
    host.close()


@pytest.fixture
def ranks(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(layer_stop, "LOOK_EVERY_NS", 0)
    made: list[LayerStop] = []

    def make(model: Model, rank: int = 0, num_ranks: int = 1, ahead: LaunchAhead | None = None) -> LayerStop:
        stop = LayerStop(host.dir, rank, num_ranks, ahead=ahead)
        stop.find(model, NAMES)
        made.append(stop)
        return stop

    yield make
    for stop in made:
        stop.close()


def told(host: Host) -> LayerState:
    state = host.dir.layers().read()
    assert state is not None
    return state


def stands(host: Host) -> None:
    eventually(lambda: told(host).waiting, "the step stands")


def expected() -> Any:
    model = Model(at=-1)
    with torch.inference_mode():
        return model(torch.ones(2, 8))


def in_the_middle(host: Host, ranks: Any, **settings: Any) -> tuple[Step, Model]:
    """A step that stands behind its first layer, for a prompt that came while that layer ran."""
    model = Model()
    step = Step(ranks(model, **settings), model)
    assert model.reached.wait(30)
    host.set(owes_first=1)
    model.go_on.set()
    stands(host)
    return step, model


def test_a_step_stops_at_its_next_layer_for_a_prompt_and_goes_on_in_place(host: Host, ranks: Any) -> None:
    step, model = in_the_middle(host, ranks)
    assert model.begun == [0, 1]  # the second is called, and stands in its hook
    assert step.is_alive()
    assert told(host).step == STEP

    host.set(owes_first=0)

    assert torch.equal(step.ended(), expected())
    assert model.begun == list(range(LAYERS))
    state = told(host)
    assert (state.waiting, state.stops, state.given_up) == (0, 1, 0)
    assert state.waited_ns > 0


def test_a_step_that_may_not_stop_has_no_hook_in_its_way(host: Host, ranks: Any) -> None:
    host.set(owes_first=1)
    model = Model(at=-1)
    stop = ranks(model)
    assert torch.equal(Step(stop, model, on=False).ended(), expected())
    assert not any(one._forward_pre_hooks for one in model.modules())
    assert told(host).stops == 0


def test_hooks_go_when_steps_may_not_stop_any_more(host: Host, ranks: Any) -> None:
    model = Model(at=-1)
    stop = ranks(model)
    Step(stop, model).ended()
    assert any(one._forward_pre_hooks for one in model.modules())
    Step(stop, model, number=STEP + 1, on=False).ended()
    assert not any(one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"needed_pages": 60}, id="production claims memory"),
        pytest.param({"node": {"lend_pages": 7}}, id="the loan is smaller"),
        pytest.param({"node": {"mode": 0}}, id="switched off"),
    ],
)
def test_a_step_goes_on_to_its_end_when_memory_is_wanted_back(
    host: Host, ranks: Any, change: dict[str, Any]
) -> None:
    step, _ = in_the_middle(host, ranks)
    host.set(**change)
    assert torch.equal(step.ended(), expected())
    assert told(host).given_up == 1


def test_a_step_does_not_wait_for_production_that_is_gone(host: Host, ranks: Any) -> None:
    step, _ = in_the_middle(host, ranks)
    host.silence(serving=True)
    assert host._board_writer is not None
    host._board_writer.close()
    assert torch.equal(step.ended(), expected())


def test_a_step_waits_no_longer_than_a_first_token_may_take(host: Host, ranks: Any) -> None:
    host.set(node={"slo_ttft_ns": S // 20})
    model = Model()
    step = Step(ranks(model), model)
    assert model.reached.wait(30)
    host.set(owes_first=1)
    model.go_on.set()  # where it stands is no place to look for it: it may have gone on by then
    assert torch.equal(step.ended(), expected())
    state = told(host)
    assert state.given_up == 1
    assert state.waited_ns >= S // 20


def test_where_nothing_is_promised_nothing_is_waited_for(host: Host, ranks: Any) -> None:
    host.set(node={"slo_ttft_ns": 0}, owes_first=1)
    model = Model(at=-1)
    assert torch.equal(Step(ranks(model), model).ended(), expected())
    assert told(host).stops == 0


def test_all_ranks_stand_at_the_same_layer(host: Host, ranks: Any) -> None:
    """Whichever of them is ahead: here the second, which would be inside the next layer already."""
    models = [Model(), Model(at=-1)]
    stops = [ranks(model, rank, 2) for rank, model in enumerate(models)]
    steps = [Step(stop, model) for stop, model in zip(stops, models, strict=True)]
    assert models[0].reached.wait(30)
    host.set(owes_first=1)
    models[0].go_on.set()
    stands(host)
    eventually(lambda: len(models[1].begun) == 2, "the second has come to the same layer")
    assert models[0].begun == models[1].begun == [0, 1]

    host.set(owes_first=0)
    for step in steps:
        assert torch.equal(step.ended(), expected())


def test_when_rank_0_cannot_look_all_ranks_run_as_they_did_without_stops(host: Host, ranks: Any) -> None:
    models = [Model(at=-1), Model(at=-1)]
    stops = [ranks(model, rank, 2) for rank, model in enumerate(models)]
    path = host.dir.path / "serving.board"
    host.silence(serving=True)
    with path.open("r+b") as file:
        file.truncate(100)
    for step in [Step(stop, model) for stop, model in zip(stops, models, strict=True)]:
        assert torch.equal(step.ended(), expected())


def test_a_rank_whose_rank_0_says_nothing_goes_on(
    host: Host, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_stop, "LEADER_S", 0.05)
    models = [Model(at=-1), Model(at=-1)]
    second = [ranks(model, rank, 2) for rank, model in enumerate(models)][1]
    assert torch.equal(Step(second, models[1]).ended(), expected())
    assert torch.equal(Step(second, models[1], number=STEP + 1).ended(), expected())


@pytest.mark.parametrize("lose", ["deleted", "written over", "cut off"])
def test_a_lost_file_is_there_again_at_the_next_step(host: Host, ranks: Any, lose: str) -> None:
    model = Model(at=-1)
    stop = ranks(model)
    path = host.dir.path / "rollout.layers"
    if lose == "deleted":
        path.unlink()
    elif lose == "written over":
        path.write_bytes(b"\xff" * path.stat().st_size)
    else:
        path.write_bytes(b"")
    Step(stop, model, on=False).ended()
    assert told(host) == LayerState()


def test_a_model_without_the_layers_leaves_no_file_that_seems_alive(host: Host) -> None:
    with LayerStopped(host) as stop:
        with pytest.raises(LedgerError):
            stop.find(Model(), ["attn"])
        assert not host.dir.layers().alive()


def test_a_cache_of_no_layer_of_the_model_is_refused_by_name(host: Host) -> None:
    with LayerStopped(host) as stop, pytest.raises(LedgerError, match=r"layers\.9\.attn"):
        stop.find(Model(), ["layers.9.attn"])
    with LayerStopped(host) as stop, pytest.raises(LedgerError, match="no numbered layer"):
        stop.find(Model(), ["attn"])


class LayerStopped:
    """A rank's stops for a ``with`` block."""

    def __init__(self, host: Host) -> None:
        self._stop = LayerStop(host.dir, 0, 1)

    def __enter__(self) -> LayerStop:
        return self._stop

    def __exit__(self, *_: object) -> None:
        self._stop.close()


# --- a device that works behind its host's back


def sleeps(monkeypatch: pytest.MonkeyPatch, instead: Callable[[float], Any]) -> None:
    """What becomes of a sleep of the module's; other threads sleep on."""
    clock = SimpleNamespace(sleep=instead, monotonic=time.monotonic, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(layer_stop, "time", clock)


def test_the_host_is_never_further_before_its_device_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel a layer, and a device that gets one done whenever the host has to wait."""
    driver, stream = MemoryDriver(), 3
    sleeps(monkeypatch, lambda _: driver.finished.update({stream: driver.finished.get(stream, 0) + 1}))
    ahead = LaunchAhead(driver, lambda: stream, every=2, ahead=2)
    queued = []
    for _ in range(40):
        ahead.layer()
        driver.work(stream)
        queued.append(driver.launched[stream] - driver.finished.get(stream, 0))
    assert max(queued) == 6


@fakecuda.ONLY_WITHOUT_A_GPU
def test_events_of_the_launch_ahead_keep_the_drivers_rules_on_a_green_contexts_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Device(tmp_path, pages=4).plugged() as gpu:
        cuda = CudaDriver(0)
        address, handle = cuda.reserve(PAGE_BYTES), cuda.create(PAGE_BYTES)
        cuda.map(address, PAGE_BYTES, handle)
        cuda.allow(address, PAGE_BYTES)
        stream = cuda.green_stream(64)[0]
        ahead = LaunchAhead(cuda, lambda: stream, every=1, ahead=2)
        waits: list[float] = []
        sleeps(monkeypatch, lambda pause_s: (waits.append(pause_s), gpu.hold(False)))
        for _ in range(12):
            gpu.hold()
            ahead.layer()
            gpu.kernel(stream, address)
            assert gpu.count("events") <= 2
        assert waits
        ahead.drop()
        assert gpu.count("events") == 0


@pytest.mark.parametrize("call", ["record", "passed"])
def test_a_driver_that_fails_in_a_step_ends_the_stops_and_not_the_step(
    host: Host, ranks: Any, call: str
) -> None:
    driver = MemoryDriver()
    model = Model(at=-1)
    stop = ranks(model, ahead=LaunchAhead(driver, lambda: 3, every=1, ahead=0))
    driver.fail_at = {call: 2}
    assert torch.equal(Step(stop, model).ended(), expected())
    host.set(owes_first=1)
    assert torch.equal(Step(stop, model, number=STEP + 1).ended(), expected())
    assert told(host).stops == 0


def test_on_a_device_only_layers_are_points_and_on_the_host_their_parts_too(host: Host) -> None:
    model = Model()
    for ahead, points in ((LaunchAhead(MemoryDriver(), lambda: 3), LAYERS), (None, 3 * LAYERS)):
        stop = LayerStop(host.dir, 0, 1, ahead=ahead)
        stop.find(model, NAMES)
        assert len(stop._modules) == points
        stop.close()
