"""Engine and device: a phase of many steps is the same as the steps, and nothing is counted twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rose.policy.admission import AdmissionParams, Rule, StepModel
from rose.policy.rounds import RoundParams
from rose.sim.device import SimDevice
from rose.sim.engine import Request, SimEngine
from rose.sim.events import EventQueue
from rose.sim.hardware import Hardware
from rose.sim.scenario import Scenario

MODEL = StepModel(base_s=0.01, prefill_token_s=0.0001, decode_s=0.0005, context_token_s=1e-6)
CHUNK = 512


class Recorder:
    """A host that remembers; claims are answered by taking the whole loan back."""

    def __init__(self) -> None:
        self.ended: dict[str, float] = {}
        self.cut: dict[str, int] = {}
        self.claims = 0

    def served(self, device: SimDevice, request: Request, now_s: float) -> None:
        self.ended[request.key] = now_s

    turn_done = served

    def turn_cut(self, device: SimDevice, request: Request, produced: int, now_s: float) -> None:
        self.cut[request.key] = produced + request.kept

    def claimed(self, device: SimDevice, now_s: float) -> None:
        self.claims += 1
        device.lend_pages = 0

    def boundary(self, device: SimDevice, now_s: float) -> None:
        device.check()


def own_device(budget: int = 1 << 20) -> tuple[SimDevice, EventQueue, Recorder]:
    queue, host = EventQueue(), Recorder()
    engine = SimEngine(MODEL, CHUNK, budget)
    device = SimDevice("d", queue, host, total_pages=budget, serving=None, rollout=engine)
    device.rollout_up = True
    return device, queue, host


def step_by_step(arrivals: list[tuple[float, int, int]]) -> dict[str, float]:
    """The same engine, one step after the other: chunked prefill in order, then one token per step."""
    now_s, ended = 0.0, {}
    waiting = [[f"r{i}", at, prompt, target, 0] for i, (at, prompt, target) in enumerate(arrivals)]
    prefilling: list[list] = []
    pending = 0.0
    running: list[list] = []
    while waiting or prefilling or running:
        ready = [item for item in waiting if item[1] <= now_s + 1e-12]
        if not ready and not prefilling and not running:
            now_s = waiting[0][1]
            continue
        for item in ready:
            if prefilling and pending + item[2] + 1 > CHUNK:
                break
            waiting.remove(item)
            prefilling.append(item)
            pending += item[2]
        context = sum(item[2] + item[4] for item in running)
        tokens = 0.0
        if prefilling:
            steps = -(-pending // CHUNK)
            tokens = pending / steps
        now_s += MODEL.predict() + tokens * 1e-4 + len(running) * 5e-4 + context * 1e-6
        for item in list(running):
            item[4] += 1
            if item[4] == item[3]:
                running.remove(item)
                ended[item[0]] = now_s
        if prefilling:
            pending -= tokens
            if pending < 0.5:
                for item in prefilling:
                    item[4] = 1
                    if item[3] == 1:
                        ended[item[0]] = now_s
                    else:
                        running.append(item)
                prefilling, pending = [], 0.0
    return ended


@pytest.mark.parametrize("seed", range(20))
def test_a_phase_of_many_steps_ends_when_its_single_steps_would(seed: int) -> None:
    rng = random.Random(seed)
    arrivals = sorted(
        (rng.uniform(0, 5), rng.randint(1, 2000), rng.randint(1, 300)) for _ in range(rng.randint(1, 25))
    )
    device, queue, host = own_device()
    for index, (at_s, prompt, target) in enumerate(arrivals):
        request = Request(f"r{index}", prompt, target, at_s)
        queue.at(at_s, lambda now_s, request: device.add(request, now_s), request)

    queue.run(1e6)

    assert host.ended == pytest.approx(step_by_step(arrivals), rel=1e-6)


def test_out_of_memory_preempts_the_youngest_and_every_request_still_ends_whole() -> None:
    device, queue, host = own_device(budget=1000)
    for index in range(4):
        device.add(Request(f"r{index}", 200, 300, 0.0), 0.0)

    queue.run(1e6)

    assert sorted(host.ended) == ["r0", "r1", "r2", "r3"]
    assert device.rollout is not None
    assert device.rollout.num_preempted > 0
    assert device.rollout.used_tokens == 0


def shared_device(
    *, gated: bool, total: int = 4000, priority: bool = False, slo_tpot_s: float = 0.03, **others: Any
) -> tuple[SimDevice, EventQueue, Recorder]:
    queue, host = EventQueue(), Recorder()
    device = SimDevice(
        "s",
        queue,
        host,
        total_pages=total,
        serving=SimEngine(MODEL, 2048, total),
        rollout=SimEngine(MODEL, CHUNK, 0),
        params=AdmissionParams(rule=Rule.SLACK if gated else Rule.FREE),
        priority=priority,
        **others,
        slo_ttft_s=0.2,
        slo_tpot_s=slo_tpot_s,
    )
    device.rollout_up = True
    device.lend_pages = total * 9 // 10
    return device, queue, host


def test_serving_takes_memory_back_and_a_cut_turn_keeps_count_of_its_tokens() -> None:
    device, queue, host = shared_device(gated=False)
    device.add(Request("turn/1", 3000, 500, 0.0), 0.0)
    queue.run(5.0)
    device.arrive(Request("p", 2000, 10, queue.now_s), queue.now_s)

    queue.run(100.0)

    assert host.claims == 1
    assert 0 < host.cut["turn/1"] < 500
    assert "p" in host.ended


def test_the_gate_keeps_serving_at_its_own_pace_and_without_it_serving_is_slower() -> None:
    took = {}
    for gated in (True, False):
        device, queue, host = shared_device(gated=gated)
        for index in range(8):
            device.add(Request(f"turn{index}/1", 100, 200, 0.0), 0.0)
        device.arrive(Request("p", 100, 100, 0.0), 0.0)
        queue.run(1e3)
        took[gated] = host.ended["p"]

    # 100 tokens: alone 10.6 ms each; a rollout step beside it would break 30 ms minus that and the guard.
    assert took[True] < 0.03 * 100
    assert took[False] > took[True]


def test_with_priority_serving_is_as_fast_as_alone_and_rollouts_get_the_rest() -> None:
    alone, queue, host = shared_device(gated=False, priority=True, total=40_000)
    alone.arrive(Request("p", 500, 100, 0.0), 0.0)
    queue.run(1e3)
    alone_s = host.ended["p"]

    device, queue, host = shared_device(gated=False, priority=True, total=40_000)
    for index in range(8):
        device.add(Request(f"turn{index}/1", 100, 200, 0.0), 0.0)
    start_s = 0.5003
    request = Request("p", 500, 100, start_s)
    queue.at(start_s, lambda now_s, request: device.arrive(request, now_s), request)
    queue.run(1e3)

    assert host.ended["p"] - start_s == pytest.approx(alone_s)
    # At most one rollout step is lost to the interruption.
    alone, queue, turns = shared_device(gated=False, priority=True, total=40_000)
    for index in range(8):
        alone.add(Request(f"turn{index}/1", 100, 200, 0.0), 0.0)
    queue.run(1e3)
    lost_s = max(host.ended.values()) - alone_s - max(turns.ended.values())
    assert 0 <= lost_s < 0.03


def test_removed_requests_leave_nothing_behind() -> None:
    device, queue, _ = own_device()
    for index in range(6):
        device.add(Request(f"r{index}", 700, 100, 0.0), 0.0)
    queue.run(0.5)
    for index in range(6):
        device.remove(f"r{index}", queue.now_s)
    queue.run(10.0)

    assert device.rollout is not None
    assert device.rollout.used_tokens == 0
    device.check()


def cached(*requests: Request, block_tokens: int = 16, budget: int = 10_000) -> list[int]:
    """Tokens that each of ``requests`` finds, when one comes after the other has ended."""
    engine = SimEngine(MODEL, 4096, budget, block_tokens)
    for request in requests:
        engine.add(request)
        engine.admit(budget)
        engine.advance(1, engine.pending_tokens, 1.0)
        engine.advance(1000, 0.0, 1.0)
        if request.repeated is not None:
            engine.keep(request, request.repeated)
        engine.check()
    return [request.cached for request in requests]


def turn(key: str, prompt: int, conversation: str) -> Request:
    return Request(key, prompt, 20, 0.0, trajectory=conversation, repeated=prompt, group="system", shared=256)


def test_a_conversation_finds_its_former_prompt_and_a_stranger_the_system_prompt_by_whole_blocks() -> None:
    found = cached(turn("a1", 320, "a"), turn("a2", 384, "a"), turn("b1", 330, "b"), turn("a3", 448, "a"))

    assert found == [0, 320, 256, 384]
    # vLLM on CPU: 384 tokens are 3 blocks, 320 are 2 and a half.
    assert cached(turn("a1", 320, "a"), turn("a2", 384, "a"), turn("a3", 448, "a"), block_tokens=128) == [
        0,
        256,
        384,
    ]


def test_a_prompt_that_was_all_there_before_still_computes_its_last_block() -> None:
    assert cached(turn("a", 320, "a"), turn("b", 320, "a")) == [0, 304]


def test_a_turn_finds_what_another_of_its_conversation_that_still_runs_has_read() -> None:
    engine = SimEngine(MODEL, 4096, 10_000, 16)
    first, second = turn("a1", 320, "a"), turn("a2", 384, "a")
    for request in (first, second):
        engine.add(request)
        engine.admit(10_000)
        engine.advance(1, engine.pending_tokens, 1.0)

    assert engine.running == 2
    assert second.cached == 320


def test_a_loan_takes_the_prefixes_that_production_s_requests_do_not_hold() -> None:
    """The second turn finds its prompt's head; with the memory lent in between, only what is left."""
    hits = {}
    for lent in (0, 3600):
        device, queue, _ = shared_device(gated=False)
        assert device.serving is not None
        first, second = (turn(f"a{i}", 2000 + 64 * i, "a") for i in (1, 2))
        for request in (first, second):
            request.group = ""
        device.lend_pages = 0
        device.arrive(first, 0.0)
        queue.run(5.0)
        if lent:
            device.lend(lent, queue.now_s)
            device.add(Request("turn/1", 3000, 400, queue.now_s), queue.now_s)
        queue.run(6.0)
        device.arrive(second, queue.now_s)
        queue.run(100.0)
        hits[lent] = second.cached

    assert hits[0] == 2064
    assert hits[3600] == 0


def test_rollout_steps_beside_a_long_prompt_stop_before_its_first_token_is_late() -> None:
    """Read in four steps, 0.84 s alone: a rollout step beside each of them would break the promise of one second."""
    late = {}
    for gated in (True, False):
        device, queue, host = shared_device(gated=gated, total=200_000)
        device.slo_ttft_s = 1.0
        for index in range(100):
            device.add(Request(f"turn{index}/1", 10, 1000, 0.0), 0.0)
        queue.run(2.0)
        request = Request("p", 8000, 1, queue.now_s)
        device.arrive(request, queue.now_s)
        began_s = request.arrived_s
        queue.run(10.0)
        late[gated] = host.ended["p"] - began_s

    assert late[False] > 1.0
    assert 0.9 < late[True] <= 1.0


def attending_device(attention_s: float, **others: Any) -> tuple[SimDevice, EventQueue, Recorder]:
    queue, host = EventQueue(), Recorder()
    engine = SimEngine(MODEL, CHUNK, 1 << 20, attention_s=attention_s)
    device = SimDevice("d", queue, host, total_pages=1 << 20, serving=engine, rollout=None, **others)
    return device, queue, host


def test_a_long_prompt_takes_the_time_of_its_attention_too() -> None:
    """By hand, H100 and Qwen3-8B: 4 x 36 x 32 x 128 operations for each of 15,000**2 / 2 pairs, at 494.5 Tflop/s: 27 % more."""
    hardware = Hardware(Scenario(name="s"))
    attention_s = hardware.rollout_attention_s(1)
    linear_s = 15_000 * hardware.rollout_steps(1).prefill_token_s
    assert attention_s * 15_000**2 / 2 == pytest.approx(589_824 * 15_000**2 / 2 / 494.5e12)
    assert attention_s * 15_000**2 / 2 / linear_s == pytest.approx(0.27, abs=0.005)

    device, queue, host = attending_device(attention_s)
    device.arrive(Request("p", 15_000, 1, 0.0), 0.0)
    queue.run(1e3)

    num_steps = -(-15_000 // CHUNK)
    expected_s = num_steps * MODEL.base_s + 15_000 * MODEL.prefill_token_s + attention_s * 15_000**2 / 2
    assert host.ended["p"] == pytest.approx(expected_s)


def test_a_prompt_that_is_looked_at_in_the_middle_attends_no_more_and_no_less() -> None:
    took_s = []
    for looks in (0, 7):
        device, queue, host = attending_device(1e-8)
        device.arrive(Request("p", 9000, 1, 0.0), 0.0)
        for look in range(looks):
            queue.at(0.1 * look, lambda now_s, device: device.poke(now_s), device)
        queue.run(1e3)
        took_s.append(host.ended["p"])

    assert took_s[1] == pytest.approx(took_s[0])


def test_what_the_prefix_cache_has_is_attended_to_but_does_not_attend_again() -> None:
    engine = SimEngine(MODEL, 4096, 10_000, 16, attention_s=1.0)
    for request in (turn("a1", 320, "a"), turn("a2", 384, "a")):
        engine.add(request)
        engine.admit(10_000)
        pairs, _ = engine.prompt_attention_s(engine.pending_tokens)
        assert pairs == pytest.approx((request.prompt**2 - request.cached**2) / 2)
        engine.advance(1, engine.pending_tokens, 1.0)
    assert request.cached == 320


def test_several_prompts_of_one_step_attend_each_to_its_own_tokens() -> None:
    engine = SimEngine(MODEL, 4096, 10_000, attention_s=1.0)
    for index, prompt in enumerate((300, 500)):
        engine.add(Request(f"r{index}", prompt, 5, 0.0))
    engine.admit(10_000)

    assert engine.prompt_attention_s(800) == (pytest.approx((300**2 + 500**2) / 2), 0.0)
    half_s, _ = engine.prompt_attention_s(400)
    assert half_s == pytest.approx((300**2 + 500**2) / 4)


def test_admission_knows_what_a_chunk_attends_to() -> None:
    engine = SimEngine(MODEL, CHUNK, 100_000, attention_s=1e-7)
    engine.add(Request("r", 30_000, 5, 0.0))
    engine.admit(100_000)
    engine.advance(1, 20_000, 1.0)

    model = engine.asked_model(512)

    assert model.predict(512) == pytest.approx(MODEL.predict(512) + 1e-7 * 512 * (20_000 + 256))


def waited_s(start_s: float, **others: Any) -> tuple[float, float]:
    """Of a request that comes at ``start_s`` while rollouts run: until its end; and when the last rollout ended."""
    device, queue, host = shared_device(gated=True, total=200_000, **others)
    device.slo_ttft_s = 0.112  # 0.111 s alone: no rollout step fits beside it
    for index in range(20):
        device.add(Request(f"turn{index}/1", 400, 300, 0.0), 0.0)
    request = Request("p", 1000, 1, start_s)
    queue.at(start_s, lambda now_s, request: device.arrive(request, now_s), request)
    queue.run(1e3)
    device.check()
    assert device.rollout is not None
    assert len(host.ended) == 21
    return host.ended.pop("p") - start_s, max(host.ended.values())


@pytest.mark.parametrize("start_s", [0.013, 0.05, 0.3507, 2.0004])
def test_a_request_waits_for_a_layer_and_the_step_that_it_interrupts_goes_on(start_s: float) -> None:
    alone_s = MODEL.predict(1000)
    behind_s, behind_end_s = waited_s(start_s)
    soon_s, soon_end_s = waited_s(start_s, preempt_s=0.001)

    assert behind_s > alone_s + 0.001
    assert soon_s == pytest.approx(alone_s + 0.001)
    # Nothing of the interrupted step is done twice; when it goes on is all that differs.
    assert soon_end_s == pytest.approx(behind_end_s, abs=0.002)


def test_many_requests_interrupt_one_step_and_all_work_is_done_once() -> None:
    device, queue, host = shared_device(gated=False, total=200_000, preempt_s=0.001)
    for index in range(20):
        device.add(Request(f"turn{index}/1", 400, 300, 0.0), 0.0)
    for index in range(200):
        request = Request(f"p{index}", 50, 5, 0.0213 * index)
        queue.at(request.arrived_s, lambda now_s, request: device.arrive(request, now_s), request)
    queue.run(1e3)
    device.check()

    assert len(host.ended) == 220
    # Strict turns on one device: no more is done in a second than a second.
    assert device.busy_s <= max(host.ended.values()) + 1e-6


def test_a_rollout_step_beside_an_idle_engine_reads_no_more_than_it_is_allowed_to() -> None:
    steps_s = {}
    for chunk in (None, 64):
        device, queue, _ = shared_device(gated=True, total=200_000, idle_chunk_tokens=chunk)
        device.add(Request("turn/1", 2000, 2, 0.0), 0.0)
        queue.run(1e3)
        steps_s[chunk] = device.longest_step_s()

    assert steps_s[None] == pytest.approx(MODEL.predict(2000 // 4))
    assert steps_s[64] == pytest.approx(MODEL.predict(round(2000 / 32)), rel=0.01)


def in_rounds(most: int, **others: Any) -> tuple[SimDevice, EventQueue, Recorder]:
    """Five turns that decode, with production's limit far away."""
    device, queue, host = shared_device(
        gated=True, total=200_000, slo_tpot_s=0.5, rounds=RoundParams(most=most), **others
    )
    device.slo_ttft_s = 5.0
    for index in range(5):
        device.add(Request(f"turn{index}/1", 100, 2000, 0.0), 0.0)
    queue.run(1.0)
    return device, queue, host


def test_with_several_rollout_steps_in_turn_tokens_of_production_lie_so_many_steps_further_apart() -> None:
    """By hand: after its first token a step of its own for each, and three of five turns, which grow by one token each."""
    device, queue, host = in_rounds(3)
    rollout = device.rollout
    assert rollout is not None
    request = Request("p", 100, 100, queue.now_s)
    device.arrive(request, queue.now_s)
    context: list[float] = []

    def look(now_s: float, _: object) -> None:
        if request.first_s is None:
            queue.at(now_s + 1e-4, look)
        else:
            context.append(rollout.context_tokens)

    queue.at(queue.now_s, look)
    queue.run(1e3)

    took_s, read = 0.0, int(context[0])
    for token in range(99):
        took_s += MODEL.predict(0, 1, 101 + token)
        for _ in range(3):
            took_s += MODEL.predict(0, 5, read)
            read += 5
    assert request.token_s(host.ended["p"]) == pytest.approx(took_s / 99)


@pytest.mark.parametrize("others", [{}, {"overlap": 0.3}])
def test_a_phase_of_rounds_that_is_looked_at_in_the_middle_takes_as_long(others: dict[str, Any]) -> None:
    ended = []
    for looks in (0, 37):
        device, queue, host = in_rounds(4, **others)
        device.arrive(Request("p", 100, 300, queue.now_s), queue.now_s)
        for look in range(looks):
            queue.at(1.2 + 0.31 * look, lambda now_s, device: device.poke(now_s), device)
        queue.run(1e3)
        device.check()
        ended.append(host.ended)

    assert ended[1] == pytest.approx(ended[0])


@pytest.mark.parametrize("after_s", [0.4, 0.4123, 0.451, 0.4777])
def test_a_request_that_comes_in_a_round_waits_for_the_step_in_progress(after_s: float) -> None:
    first_s = {}
    for most in (1, 12):
        device, queue, _ = in_rounds(most)
        device.arrive(Request("p", 100, 300, queue.now_s), queue.now_s)
        second = Request("q", 100, 300, queue.now_s + after_s)
        queue.at(
            second.arrived_s, lambda now_s, request, device=device: device.arrive(request, now_s), second
        )
        queue.run(1e3)
        device.check()
        assert second.first_s is not None
        first_s[most] = second.first_s - second.arrived_s

    # One step of each that was in progress, its own, and one rollout step beside that.
    assert max(first_s.values()) < 4 * MODEL.predict(100, 6, 2000)


def test_slow_requests_bring_the_rounds_down_to_what_production_may_take() -> None:
    device, queue, host = in_rounds(32)
    apart_s = []
    for index in range(4):
        request = Request(f"p{index}", 100, 20, queue.now_s)
        device.arrive(request, queue.now_s)
        while request.key not in host.ended:
            queue.run(queue.now_s + 0.1)
        apart_s.append(request.token_s(host.ended[request.key]))

    # Half of 0.5 s is allowed, and the slack alone would hold it all.
    assert apart_s[0] > 0.25
    assert 0.05 < apart_s[-1] < 0.25


def test_a_layer_stop_in_the_middle_of_a_round_loses_and_repeats_nothing() -> None:
    sampled = {}
    for preempt_s in (None, 0.001):
        device, queue, host = in_rounds(6, preempt_s=preempt_s)
        device.arrive(Request("p", 100, 400, queue.now_s), queue.now_s)
        for index in range(40):
            request = Request(f"q{index}", 50, 5, 1.1 + 0.0713 * index)
            queue.at(
                request.arrived_s,
                lambda now_s, request, device=device: device.arrive(request, now_s),
                request,
            )
        queue.run(1e3)
        device.check()
        assert len(host.ended) == 46
        assert device.busy_s <= max(host.ended.values()) + 1e-6
        sampled[preempt_s] = max(host.ended.values())
    assert sampled[0.001] == pytest.approx(sampled[None], rel=0.02)
