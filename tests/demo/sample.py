"""A made-up run of the demo, for tests of the report: shaped like a real one, a function of its seed."""

from __future__ import annotations

import numpy as np

from rose.demo.result import (
    ALONE_1,
    ALONE_2,
    ARMS,
    DEDICATED,
    HARVESTED,
    REST,
    SHARED,
    Curve,
    DemoResult,
    MeasuredBlock,
    ProductionLatency,
    Reclaim,
    ResumedTurn,
    SampledToken,
    StepRecord,
    TierCount,
    TimelineEvent,
    TrafficPhase,
)
from rose.evaluation.arms import RequestLatency, Slo, arm_stats, ratio
from rose.evaluation.arrivals import TrafficShape, busiest_second_ratio, generate_arrivals

SLO = Slo(ttft_s=0.5, tpot_s=0.15)
SHAPE = TrafficShape(
    period_s=40.0,
    mean_rate_hz=1.5,
    prompt_median_tokens=64,
    prompt_max_tokens=400,
    output_median_tokens=20,
    output_max_tokens=80,
)
STARTS_S = {ALONE_1: 70.0, ALONE_2: 110.0, SHARED: 155.0}
END_S = 460.0


def sample_result(seed: int = 0, num_errors: int = 0) -> DemoResult:
    rng = np.random.default_rng(seed)
    arrivals = generate_arrivals(SHAPE, seed)
    samples: dict[str, list[RequestLatency]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for cycle in range(7 if arm == SHARED else 1):
            for index, arrival in enumerate(arrivals):
                slower = 1.06 if arm == SHARED else 1.0
                gaps = 0.02 * slower * rng.lognormal(0, 0.25, max(0, arrival.output_tokens - 1))
                ttft_s = (0.03 + 0.0004 * arrival.prompt_tokens) * slower * float(rng.lognormal(0, 0.3))
                samples[arm].append(
                    RequestLatency(
                        index=index,
                        phase=arm,
                        at_s=STARTS_S[arm] + 40.0 * cycle + arrival.at_s,
                        ttft_s=ttft_s,
                        end_s=ttft_s + float(gaps.sum()),
                        itl_s=tuple(gaps.tolist()),
                        num_tokens=arrival.output_tokens,
                        late_s=float(rng.exponential(0.0004)),
                        error="HTTP 503: <busy>"
                        if arm == SHARED and cycle == 0 and index < num_errors
                        else None,
                    )
                )
    alone = samples[ALONE_1] + samples[ALONE_2]
    ratios = {}
    for metric in ("ttft", "itl", "stall"):
        for name, fraction in (("p50", 0.5), ("p99", 0.99)):
            ratios[f"{metric}_{name}"] = ratio(samples[SHARED], alone, metric, fraction, num_resamples=100)
            ratios[f"aa_{metric}_{name}"] = ratio(
                samples[ALONE_2], samples[ALONE_1], metric, fraction, num_resamples=100
            )
    every = [sample for arm in ARMS for sample in samples[arm]]
    steps = sample_steps(rng)
    seconds = np.arange(0.0, END_S)
    busy = np.bincount([int(s.at_s) for s in every], minlength=len(seconds)).astype(float)
    lent = np.where(seconds < STARTS_S[SHARED], 0.0, np.maximum(0.0, 420.0 - 30.0 * busy))
    dedicated = np.where(seconds < 60, 0.0, 30.0 + 4.0 * rng.standard_normal(len(seconds)))
    return DemoResult(
        seed=seed,
        complete=True,
        seconds_total=END_S,
        traffic_source=f"generator, seed {seed}",
        busiest_second_ratio=busiest_second_ratio(arrivals, SHAPE.period_s),
        phases=[
            TrafficPhase(name="startup", start_s=0.0, end_s=70.0),
            *(
                TrafficPhase(name=name, start_s=70.0 + 40.0 * at, end_s=110.0 + 40.0 * at)
                for at, name in enumerate((ALONE_1, SHARED, SHARED, ALONE_2))
            ),
            TrafficPhase(name=REST, start_s=230.0, end_s=435.0),
        ],
        blocks=sample_blocks(),
        resumed=[(9, 16), (3, 22), (12, 13)],
        longest_resumed=ResumedTurn(
            trajectory_id="tr-7",
            prompt="<|user|>FF\n@G<|end|><|assistant|>",
            parts=(12, 13),
            tokens=tuple(
                SampledToken(
                    text=("left", "down", "right", "<up>")[at % 4],
                    logprob=-0.1 * at,
                    worker="harvested" if at < 12 else "dedicated",
                    tier=HARVESTED if at < 12 else DEDICATED,
                    version="1.4",
                )
                for at in range(25)
            ),
        ),
        latency=ProductionLatency(
            slo=SLO,
            arms={arm: arm_stats(samples[arm], SLO) for arm in ARMS},
            ratios=ratios,
            distributions={
                arm: (
                    sorted(s.ttft_s for s in samples[arm]),
                    sorted(gap for s in samples[arm] for gap in s.itl_s),
                )
                for arm in ARMS
            },
        ),
        production_requests=len(every),
        production_errors=num_errors,
        error_examples=["shared, request 0: HTTP 503: <busy>"] if num_errors else [],
        steps=steps,
        tiers={
            DEDICATED: TierCount(num_turns=9_800, num_tokens=12_100),
            HARVESTED: TierCount(num_turns=5_100, num_tokens=6_300),
        },
        reclaim=Reclaim(pressure_events=9, cuts=6, cut_requests=31, resumed_turns=31, kills=0),
        events=[
            TimelineEvent(at_s=t, kind=kind, text=text)
            for t, kind, text in (
                (162.2, "pressure", "serving asked for 96 pages"),
                (162.3, "cut", "12 requests stopped, 96 pages back in 31 ms"),
                (240.4, "pressure", "serving asked for 40 pages"),
                (318.9, "cut", "7 requests stopped"),
                (390.0, "restart", "rose node: killed, started again"),
            )
        ],
        curves={
            "production": Curve(name="production requests", points=list(zip(seconds, busy, strict=True))),
            DEDICATED: Curve(name="tokens", points=list(zip(seconds, dedicated, strict=True))),
            HARVESTED: Curve(name="tokens", points=list(zip(seconds, lent / 18, strict=True))),
            "lent": Curve(name="pages", points=list(zip(seconds, lent, strict=True))),
        },
        machine={"Processor": "sample", "Cores": "2", "vLLM": "0.32.0"},
        settings={"Seed": str(seed), "SLO": "first token 500 ms, then 150 ms a token"},
    )


def sample_blocks() -> list[MeasuredBlock]:
    """Two pairs: 8 and 10 steps, then 12 and 8, in 40 s."""
    return [
        MeasuredBlock(
            harvesting=on,
            start_s=70.0 + 40.0 * at,
            end_s=110.0 + 40.0 * at,
            num_steps=num_steps,
            tiers={
                DEDICATED: TierCount(num_turns=1_000, num_tokens=25_000),
                HARVESTED: TierCount(num_turns=500 if on else 0, num_tokens=12_500 if on else 0),
            },
        )
        for at, (on, num_steps) in enumerate(((False, 8.0), (True, 10.0), (True, 12.0), (False, 8.0)))
    ]


def sample_steps(rng: np.random.Generator) -> list[StepRecord]:
    steps: list[StepRecord] = []
    at_s = 60.0
    for number in range(20):
        harvested = 0 if at_s < STARTS_S[SHARED] else int(rng.integers(240, 360))
        took_s = 24.0 if not harvested else 17.0
        success = min(0.97, 0.14 + 0.055 * number + 0.02 * float(rng.standard_normal()))
        steps.append(
            StepRecord(
                step=number,
                start_s=at_s,
                end_s=at_s + took_s,
                success_rate=round(success, 3),
                lr=1e-3,
                tiers={
                    DEDICATED: TierCount(num_turns=780 - harvested, num_tokens=780 - harvested),
                    HARVESTED: TierCount(num_turns=harvested, num_tokens=harvested),
                },
                rollout_s=took_s - 5.5,
                train_s=4.5,
                publish_s=1.0,
                entropy=1.3 - 0.05 * number,
                mismatch_kl=2e-4,
                update_kind="anchor" if number == 0 else "delta",
                bytes_dense=1_900_000,
                bytes_sent=1_900_000 if number == 0 else 61_000,
                density=1.0 if number == 0 else 0.031,
            )
        )
        at_s += took_s
    return steps
