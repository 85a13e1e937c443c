"""What is claimed (:data:`CLAIMS`): of each line of docs/evidence.md the words, the benchmark, its figures, and the bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of the table.

    Attributes:
        keys: Figures of the benchmark; one with ``*`` stands for all that match, in their order by name.
        form: How each figure is written, e.g. ``{:.2f}x``; a ``%`` after it means times 100.
        bar: Which figure (None: each), how it is compared, with what; a pair ``(other figure, added)`` is that figure and so much more.
        every: A line for every run that has the figures, instead of the newest.
        undecided: No claim is made of it: it stands in the second table.
    """

    text: str
    benchmark: str
    keys: tuple[str, ...]
    form: str = "{:.2f}"
    bar: tuple[int | None, Literal["<=", ">="], float | tuple[int, float]] | None = None
    every: bool = False
    undecided: bool = False


CLAIMS = (
    Claim(
        text="provisioning, two jobs in virtual time: tokens over the best fixed split of the harvested engines, and the ends of its 95 % interval", benchmark="provisioning",
        keys=("gain_over_static", "gain_over_static_low", "gain_over_static_high"), form="{:.3f}x", bar=(1, ">=", 1.0), every=True,
    ),
    Claim(
        text="two jobs whose phases alternate, simulated: rollouts of a step over those on a fixed half of the devices, and the ends of the 95 % interval", benchmark="device_shares",
        keys=("rollout_over_half", "rollout_over_half_low", "rollout_over_half_high"), form="{:.3f}x", every=True,
    ),
    Claim(
        text="a device that goes from one job's policy to another's, 34 M parameters, a real engine: to the first token, median and longest of 40", benchmark="switch_time",
        keys=("switch_s", "switch_max_s"), form="{:.2f} s", bar=(0, "<=", 1.0), every=True,
    ),
    Claim(
        text="the same: turns that were sampled with the other job's weights", benchmark="switch_time", keys=("mixed",), form="{:.0f}", bar=(0, "<=", 0.0), every=True,
    ),
    Claim(
        text="two jobs with one model name on two real engines that change hands, scheduler killed on the way, and nodes too from the second run: from the order to the run in force, median and longest", benchmark="two_jobs",
        keys=("switch_s", "switch_max_s"), form="{:.2f} s", bar=(0, "<=", 1.0), every=True,
    ),
    Claim(
        text="the same: tokens of another run, turns that an engine started with those weights does not sample, trajectories lost, requests of production that failed", benchmark="two_jobs",
        keys=("mixed", "different", "lost", "failed"), form="{:.0f}", bar=(1, "<=", 0.0), every=True,
    ),
    Claim(
        text="the same, nodes killed: times that a device changed hands, tokens recorded from an engine whose memory was not scanned in their time, scans that found another run's weights", benchmark="two_jobs",
        keys=("switches", "unproved", "wrong"), form="{:.0f}", bar=(1, "<=", 0.0), every=True,
    ),
    Claim(
        text="provisioning: tokens over half of the harvested engines for each job, and the ends of its 95 % interval", benchmark="provisioning",
        keys=("gain_over_always", "gain_over_always_low", "gain_over_always_high"), form="{:.3f}x", bar=(1, ">=", 1.0), every=True,
    ),
    Claim(
        text="the same against the clock, real scheduler process: time of a step's rollouts with none, half each, best split, over provisioned; engines' time the machine was late for (above 0.02: says nothing)",
        benchmark="provisioning_live", keys=("gain_over_never", "gain_over_always", "gain_over_static", "late_share"), form="{:.3f}", bar=(3, "<=", 0.02),
    ),
    Claim(
        text="routing: time to the last trajectory where running turns may move, over that where they stay, and the ends of its 95 % interval (73d8ed0: of a form that missed on the mean and is gone)", benchmark="migration",
        keys=("makespan", "makespan_low", "makespan_high"), form="{:.3f}x", bar=(2, "<=", 1.0), every=True,
    ),
    Claim(
        text="conformance, every shape of model x every feature on real engines: cells, those that are otherwise than the table or the doctor says, and the largest difference of a log-prob beside rollouts",
        benchmark="conformance", keys=("cells", "wrong", "logprob_diff_max"), form="{:g}", bar=(1, "<=", 0.0), every=True,
    ),
    Claim(
        text="faults on real engines at random instants (402 cases on a core each: 20 of each kill, stop and freeze, 3 of each fault of a file): requests of production that failed, wrong answers, cases without all memory back, cases that did not recover without help",
        benchmark="faults", keys=("production_errors", "wrong_answers", "not_back", "not_recovered"), form="{:.0f}", bar=(None, "<=", 0.0), every=True,
    ),
    Claim(
        text="the same: cases whose memory was back later than promised; production's longest silence, median case and longest, and the longest case without a fault",
        benchmark="faults", keys=("late", "silence_s_faults_median", "silence_s_faults_max", "silence_s_alone_max"), form="{:.2f}", bar=(0, "<=", 0.0), every=True,
    ),
    Claim(
        text="10,000 random changes of loans between two processes with kills: pages of the device, the most that the kernel ever counted, and pages that did not come back", benchmark="churn",
        keys=("total_pages", "worst_pages", "left_pages"), form="{:.0f}",
    ),
    Claim(
        text="50 times on and off beside requests of every kind, production restarted three times while lent: requests that failed, answers that differ from stock vLLM's",
        benchmark="cycles", keys=("errors", "different_from_stock"), form="{:.0f}", bar=(None, "<=", 0.0), every=True,
    ),
    Claim(
        text="the same: bytes that production grew by, and stock vLLM, whose growth and 16 MiB are the bound", benchmark="cycles",
        keys=("resident_bytes_growth_max", "resident_bytes_growth_stock"), form="{:.0f}", bar=(0, "<=", (1, 16777216.0)), every=True,
    ),
    Claim(
        text="steps that stop at a layer for a prompt, on a CPU: late prompts beyond those of production alone, without and with stops", benchmark="coserve",
        keys=("tight_added_misses_without", "tight_added_misses_with"), form="{:.0f}", bar=(1, "<=", 1.68), every=True,
    ),
    Claim(
        text="steps that stop at a layer: rollout tokens a second, with over without", benchmark="coserve",
        keys=("stop_rollout_tokens_ratio",), form="{:.2f}x", bar=(0, ">=", 0.9), every=True,
    ),
    Claim(
        text="the demo (runs of 2026-11-21: of one that harvested after it had learned), by seed: success in the last of its steps", benchmark="demo",
        keys=("seed*.success_rate_last",), bar=(None, ">=", 0.9),
        every=True,
    ),
    Claim(
        text="the demo: seconds after set-up", benchmark="demo", keys=("seed*.seconds_total",), form="{:.0f}", bar=(None, "<=", 420.0),
        every=True,
    ),
    Claim(
        text="the demo: bytes of weights sent, of what whole versions take", benchmark="demo", keys=("seed*.sent_over_dense",),
        bar=(None, "<=", 0.3),
        every=True,
    ),
    Claim(
        text="the demo: turns that moved, of those looked at, with 8 tokens or more on both sides of the cut", benchmark="demo",
        keys=("seed*.resumed_with_8_tokens_each_side",), form="{:.0f}", bar=(None, ">=", 1.0),
        every=True,
    ),
    Claim(
        text="the demo: production's requests that failed", benchmark="demo", keys=("seed*.production_errors",), form="{:.0f}",
        bar=(None, "<=", 0.0),
        every=True,
    ),
    Claim(
        text="the demo: RL steps per minute with harvesting on over off, and the ends of each seed's 95 % interval (the pairs of blocks that its steps lasted for)",
        benchmark="demo", keys=("seed*.steps_gain", "seed*.steps_gain_low", "seed*.steps_gain_high"), form="{:.2f}x", undecided=True,
        every=True,
    ),
    Claim(
        text="the demo: RL steps per minute with harvesting on over off, all pairs of blocks of its seeds together, and the ends of its 95 % interval",
        benchmark="demo", keys=("pooled.steps_gain", "pooled.steps_gain_low", "pooled.steps_gain_high"), form="{:.2f}x", bar=(1, ">=", 1.0),
        every=True,
    ),
    Claim(
        text="the demo: share of turns that ran harvested", benchmark="demo", keys=("seed*.harvested_turn_share",),
        every=True,
    ),
    Claim(
        text="the demo: production's P99 first token, shared over alone, and the noise (alone over alone)", benchmark="demo",
        keys=("seed*.p99_ttft_ratio", "seed*.aa_ttft_ratio"), form="{:.2f}x",
        every=True,
    ),
    Claim(
        text="the demo: production's P99 between tokens, shared over alone, and the noise", benchmark="demo",
        keys=("seed*.p99_itl_ratio", "seed*.aa_itl_ratio"), form="{:.2f}x",
        every=True,
    ),
    Claim(
        text="what a harvested engine adds to training on timed engines, over what its speed alone would",
        benchmark="train", keys=("throughput_harvest_gain_over_limit",), bar=(0, ">=", 0.9), every=True,
    ),
    Claim(
        text="training tokens/s without and with the harvested engine, timed engines", benchmark="train",
        keys=("throughput_async_tokens_per_s", "throughput_async_harvest_tokens_per_s"), form="{:.0f}",
    ),
    Claim(
        text="a step that begins with the groups that are complete, over one that waits: real loops on timed engines with stragglers, synchronous",
        benchmark="streamed steps", keys=("ratio_synchronous", "ratio_low_synchronous"), form="{:.2f}x", bar=(1, ">=", 1.0),
    ),
    Claim(
        text="the same, asynchronous", benchmark="streamed steps", keys=("ratio_asynchronous", "ratio_low_asynchronous"),
        form="{:.2f}x", bar=(1, ">=", 1.0),
    ),
    Claim(
        text="CPU time of ROSE in a step of production's scheduler, 256 requests, the clock's own in it (see the next): p50, p99",
        benchmark="overhead", keys=("hook_p50_us", "hook_p99_us"), form="{:.0f} us", bar=(1, "<=", 100.0),
    ),
    Claim(
        text="the clock alone: p50, p99", benchmark="overhead", keys=("clock_p50_us", "clock_p99_us"), form="{:.0f} us",
    ),
    Claim(
        text="the same with cold caches: p50, p99 (a goal)", benchmark="overhead", keys=("cold_p50_us", "cold_p99_us"), form="{:.0f} us", bar=(1, "<=", 100.0),
    ),
    Claim(
        text="beside a rollout engine: p50, p99", benchmark="overhead", keys=("beside_p50_us", "beside_p99_us"), form="{:.0f} us", bar=(1, "<=", 100.0),
    ),
    Claim(
        text="a whole scheduler step with ROSE's hooks over without, nothing lent; and the noise",
        benchmark="overhead", keys=("step_ratio", "aa_ratio"), form="{:.3f}x",
    ),
    Claim(
        text="a request through vLLM's whole server with ROSE over without; and the noise", benchmark="overhead",
        keys=("end_ratio", "end_aa_ratio"), form="{:.3f}x",
    ),
    Claim(
        text="memory of a rollout engine that is switched off (bytes), and of that its KV memory",
        benchmark="activation", keys=("inactive_pss_bytes", "inactive_kv_resident_bytes"), form="{:,.0f}",
        bar=(0, "<=", 2e9),
    ),
    Claim(
        text="switching it on to its first token, median and worst; off until all memory is back, median",
        benchmark="activation", keys=("first_token_s_p50", "first_token_s_max", "returned_s_p50"), form="{:.2f} s",
        bar=(1, "<=", 1.0),
    ),
    Claim(
        text="production killed under a whole loan: its start without ROSE; with rollouts beside it; agent stopped",
        benchmark="production_restart",
        keys=("stock_start_s_p50", "killed_start_s_p50", "agent_stopped_start_s_p50"), form="{:.1f} s",
        bar=(2, "<=", (0, 2.0)),
    ),
    Claim(
        text="weight codec: bytes per changed weight over the bound for independent changes, the worst of the runs and of the fit", benchmark="weights",
        keys=("shannon_ratio",), form="{:.3f}", bar=(0, "<=", 1.03),
    ),
    Claim(
        text="publish to acknowledged by two engines over the transfer alone, a whole version of 401 MB at 1 Gbps: pulled ahead of the head, at the head",
        benchmark="weights_link", keys=("whole_1gbps_ahead_over_transfer", "whole_1gbps_at_head_over_transfer"), form="{:.2f}x", bar=(0, "<=", 1.2),
    ),
    Claim(
        text="the same: share of the transfer that is hidden, pulled ahead and at the head", benchmark="weights_link",
        keys=("whole_1gbps_ahead_overlap_ratio", "whole_1gbps_at_head_overlap_ratio"), form="{:.2f}",
    ),
    Claim(
        text="weight codec: pairs of index and value (COO) over its bytes", benchmark="weights",
        keys=("coo_ratio",), form="{:.2f}x",
    ),
    Claim(
        text="trainer to two vLLM engines, 8.7 M parameters: publish to acknowledged, engines idle and busy",
        benchmark="weights_live", keys=("acknowledged_s_median_idle", "acknowledged_s_median_busy"), form="{:.2f} s",
    ),
    Claim(
        text="1,000 readers behind a tree of four relays: the relays' CPU seconds per GB, and of one relay for all; the busiest of the four, of the one", benchmark="fanout",
        keys=("tree_cpu_s_per_gb", "one_cpu_s_per_gb", "busiest_share"), form="{:.2f}", bar=(2, "<=", 0.35), every=True,
    ),
    Claim(
        text="the same: leases a minute while 10,000 are held", benchmark="fanout", keys=("leases_per_minute",), form="{:.0f}", bar=(0, ">=", 10_000.0), every=True,
    ),
    Claim(
        text="the same, one of the four killed while a version goes out: readers that never have it, and seconds until all have", benchmark="fanout",
        keys=("stuck", "after_kill_s"), form="{:.1f}", bar=(0, "<=", 0.0), every=True,
    ),
    Claim(
        text="1,000 SIGKILLs at random instants over a trainer, relays and subscribers: wrong, stuck, processes that ended by themselves",
        benchmark="weights_kills", keys=("wrong", "stuck", "fallen"), form="{:.0f}", bar=(None, "<=", 0.0), every=True,
    ),
    Claim(
        text="the same: until all had a version that was published after the kill, median, P99 and longest", benchmark="weights_kills",
        keys=("recovery_s_p50", "recovery_s_p99", "recovery_s_max"), form="{:.1f} s", bar=(2, "<=", 20.0), every=True,
    ),
    Claim(
        text="50 more with a vLLM engine and its node agent: wrong, stuck, processes that ended by themselves",
        benchmark="weights_kills", keys=("engine_wrong", "engine_stuck", "engine_fallen"), form="{:.0f}", bar=(None, "<=", 0.0), every=True,
    ),
    Claim(
        text="pause of an engine for it, idle and busy", benchmark="weights_live",
        keys=("pause_ms_median_idle", "pause_ms_median_busy"), form="{:.0f} ms",
    ),
    Claim(
        text="placing a turn among 1,000 workers with 100,000 trajectories: p99", benchmark="routing",
        keys=("decision_p99_us",), form="{:.0f} us", bar=(0, "<=", 200.0), every=True,
    ),
    Claim(
        text="largest log-prob difference to the trainer in float32, nats: fresh, and after moves in mid-turn",
        benchmark="logprobs", keys=("float32.fresh.logprob_diff_max", "float32.moved.logprob_diff_max"),
        form="{:.7f}", bar=(1, "<=", 1e-3),
    ),
    Claim(
        text="mismatch KL in bf16, nats: fresh, and after moves in mid-turn", benchmark="logprobs",
        keys=("bfloat16.fresh.mismatch_kl", "bfloat16.moved.mismatch_kl"), form="{:.7f}",
    ),
    Claim(
        text="`/rose/v1/generate`: requests per CPU second over a bare aiohttp proxy's", benchmark="gateway",
        keys=("generate_ratio",), bar=(0, ">=", 0.7), every=True,
    ),
    Claim(
        text="chat: requests per CPU second over a proxy with the same calls", benchmark="gateway",
        keys=("chat_ratio",), bar=(0, ">=", 0.9), every=True,
    ),
    Claim(
        text="P99 that the gateway adds at half its load over a bare proxy's", benchmark="gateway",
        keys=("added_p99_ratio",), form="{:.1f}x", bar=(0, "<=", 3.0), every=True,
    ),
    Claim(
        text="`/rose/v1/generate` of a compiled scheduler (`make compiled`), likewise", benchmark="gateway",
        keys=("generate_ratio:compiled",), bar=(0, ">=", 0.7), every=True,
    ),
    Claim(
        text="chat of a compiled scheduler, likewise", benchmark="gateway", keys=("chat_ratio:compiled",), bar=(0, ">=", 0.9), every=True,
    ),
    Claim(
        text="P99 that a compiled scheduler adds, likewise", benchmark="gateway",
        keys=("added_p99_ratio:compiled",), form="{:.1f}x", bar=(0, "<=", 3.0), every=True,
    ),
    Claim(
        text="20 SIGKILLs of the active scheduler under 500 trajectories and two trainers: lost, doubled, wrong, failed", benchmark="standby",
        keys=("lost", "doubled", "wrong_turns", "failed_calls"), form="{:.0f}", bar=(None, "<=", 0.0), every=True,
    ),
    Claim(
        text="the same: until the stand-by answers a turn, median and longest", benchmark="standby",
        keys=("takeover_s_median", "takeover_s_max"), form="{:.1f} s", bar=(1, "<=", 5.0), every=True,
    ),
    Claim(
        text="1,000 agents at once, six turns each: time to half of the groups over a plain queue's", benchmark="crowd",
        keys=("half_ratio",), form="{:.2f}x", bar=(0, "<=", 1.0), every=True,
    ),
    Claim(
        text="the same: time to all of them", benchmark="crowd", keys=("end_ratio",), form="{:.2f}x", bar=(0, "<=", 1.05), every=True,
    ),
    Claim(
        text="the same: P99 of a turn", benchmark="crowd", keys=("p99_ratio",), form="{:.1f}x", bar=(0, "<=", 1.5), every=True,
    ),
    Claim(
        text="2,000 trajectories of 20 turns, n = 16 among them: bytes of journal and of memory for a sampled token", benchmark="endpoint_memory",
        keys=("journal_bytes_per_token", "memory_bytes_per_token"), form="{:.0f}", every=True,
    ),
    Claim(
        text="the same: what a round adds to the memory that is left when all have ended", benchmark="endpoint_memory",
        keys=("growth_share",), form="{:.1f}%", bar=(0, "<=", 0.02), every=True,
    ),
    Claim(
        text="simulator, exact mode: CPU time of one hour of 256 serving and 64 dedicated devices (limit 300 s until 2026-11-29)", benchmark="sim",
        keys=("exact.cpu_s",), form="{:.0f} s", bar=(0, "<=", 180.0),
    ),
    Claim(
        text="the same, compiled (`make compiled`)", benchmark="sim", keys=("exact_compiled.cpu_s",), form="{:.0f} s", bar=(0, "<=", 180.0),
    ),
    Claim(
        text="simulated, a quarter of the paper's GRPO 8B setting, 14 seeds: limits missed that ROSE adds, of the requests answered in each run's own time (counted so then, and before attention was; the cells below compare the same requests)",
        benchmark="sim_maps", keys=("ablation.cell.rose.slo_missed_added",), form="{:.2f} %",
    ),
    Claim(
        text="simulated, over fixed (not tuned) with 1, 2, 4, 8 dedicated engines for 64 trajectories (it loses with 4 and 8)",
        benchmark="sim_maps", keys=("map.dedicated.*.rose.gain_over_fixed",), form="{:.2f}x",
    ),
    Claim(
        text="simulated, 4 and 8 dedicated engines with room for all: step time of the fixed system over ROSE's as it is by default, lower ends of 14 fresh seeds", benchmark="never_lose",
        keys=("moving.gain_over_fixed.4.low", "moving.gain_over_fixed.8.low"), form="{:.3f}x", bar=(None, ">=", 0.99),
    ),
    Claim(
        text="`horizon_turns = 8` over 2 on workloads A to D, fluid engines: mean trajectory time and p90, upper ends", benchmark="never_lose",
        keys=("h8.mean_s_over_h2.high", "h8.p90_s_over_h2.high"), form="{:.3f}x", bar=(None, "<=", 1.01),
    ),
    Claim(
        text="six pairs of whole training runs: success on boards held out, harvested less dedicated, and the ends of its 95 % interval",
        benchmark="learning_fleets", keys=("harvested.held_out", "harvested.held_out_low", "harvested.held_out_high"), form="{:.3f}", bar=(1, ">=", -0.05),
    ),
    Claim(
        text="the same of the dedicated fleet once more (A/A)", benchmark="learning_fleets",
        keys=("again.held_out", "again.held_out_low", "again.held_out_high"), form="{:.3f}",
    ),
    Claim(
        text="FrozenLake's success at the end: dedicated alone, and with a harvested engine", benchmark="learning",
        keys=("frozenlake_dedicated_success_last", "frozenlake_harvested_success_last"), every=True, undecided=True,
    ),
    Claim(
        text="FrozenLake: 95 % interval of harvested less dedicated", benchmark="learning",
        keys=("frozenlake_difference_low", "frozenlake_difference_high"), form="{:.3f}", bar=(0, ">=", -0.05),
        every=True, undecided=True,
    ),
    Claim(
        text="FrozenLake: greedy success on maps held out: dedicated alone, and with a harvested engine", benchmark="learning",
        keys=("frozenlake_dedicated_success_held_out", "frozenlake_harvested_success_held_out"),
        every=True, undecided=True,
    ),
    Claim(
        text="FrozenLake, maps held out, mean of the second half: 95 % interval of harvested less dedicated",
        benchmark="learning",
        keys=("frozenlake_harvested_held_out_difference_low", "frozenlake_harvested_held_out_difference_high"),
        form="{:.3f}", undecided=True,
    ),
    Claim(
        text="the same of a second engine that is never cut, less dedicated", benchmark="learning",
        keys=("frozenlake_uncut_held_out_difference_low", "frozenlake_uncut_held_out_difference_high"),
        form="{:.3f}", undecided=True,
    ),
    Claim(
        text="arithmetic's success at the end: dedicated alone, and with a harvested engine", benchmark="learning",
        keys=("maths_dedicated_success_last", "maths_harvested_success_last"), every=True, undecided=True,
    ),
    Claim(
        text="arithmetic: 95 % interval of harvested less dedicated", benchmark="learning",
        keys=("maths_difference_low", "maths_difference_high"), form="{:.3f}", bar=(0, ">=", -0.05),
        every=True, undecided=True,
    ),
    Claim(
        text="simulator's skill on differences between arms whose steps take turns, over no difference at all, and the ends of its 95 % interval", benchmark="skill",
        keys=("over_as_alone", "over_as_alone_low", "over_as_alone_high"), form="{:.2f}", bar=(1, ">=", 0.0), every=True,
    ),
    Claim(
        text="the same over the mean difference of the other live workloads", benchmark="skill",
        keys=("over_constant", "over_constant_low", "over_constant_high"), form="{:.2f}", bar=(1, ">=", 0.0), every=True,
    ),
    Claim(
        text="simulated, the paper's setting founded anew, by cell: ROSE over the tuned fixed baseline (lower ends)", benchmark="sim_paper",
        keys=("*_*_*_*.rose.gain_low",), form="{:.2f}x", bar=(None, ">=", 1.0),
    ),
    Claim(
        text="the same: ROSE over the paper's policies (lower ends)", benchmark="sim_paper", keys=("*_*_*_*.rose.over_paper_low",), form="{:.2f}x",
        bar=(None, ">=", 1.0),
    ),
    Claim(
        text="the same: what ROSE gets of what the ceiling allows", benchmark="sim_paper", keys=("*_*_*_*.rose.reached",), form="{:.0f}%",
        bar=(None, ">=", 0.85),
    ),
    Claim(
        text="the same: misses that ROSE adds, of all requests (upper ends)", benchmark="sim_paper", keys=("*_*_*_*.rose.misses_added_high",), form="{:.3f}%",
        bar=(None, "<=", 0.0002),
    ),
    Claim(
        text="the same with the tail engine, over a tuned fixed job that streams its steps too (lower ends)", benchmark="sim_paper",
        keys=("*_*_*_*.rose_tail.gain_low",), form="{:.2f}x", bar=(None, ">=", 1.0),
    ),
    Claim(
        text="the same: over the paper's policies that stream (lower ends)", benchmark="sim_paper", keys=("*_*_*_*.rose_tail.over_paper_low",), form="{:.2f}x",
        bar=(None, ">=", 1.0),
    ),
    Claim(
        text="the same: of what a ceiling that streams allows", benchmark="sim_paper", keys=("*_*_*_*.rose_tail.reached",), form="{:.0f}%",
        bar=(None, ">=", 0.85),
    ),
    Claim(
        text="the same: misses that it adds, of all requests (upper ends)", benchmark="sim_paper", keys=("*_*_*_*.rose_tail.misses_added_high",), form="{:.3f}%",
        bar=(None, "<=", 0.0002),
    ),
    Claim(
        text="simulated, ten cells: step time with a move home shared over 2 turns over that with 16 while a job drains, all cells and GRPO's of 256 (lower ends)", benchmark="draining",
        keys=("all_cells.gain_low", "grpo_8b_256_quiet.gain_low", "grpo_32b_256_quiet.gain_low", "grpo_8b_256_busy.gain_low", "grpo_32b_256_busy.gain_low"),
        form="{:.3f}x", bar=(0, ">=", 0.98), every=True,
    ),
    Claim(
        text="the same, workloads A to D: mean trajectory time and p90 of 16 over 2 (upper ends)", benchmark="draining",
        keys=("loads.mean_s_high", "loads.p90_s_high"), form="{:.3f}x", bar=(None, "<=", 1.01), every=True,
    ),
    Claim(
        text="simulated, each cell that was judged: streamed steps on the tuned fixed job, and on ROSE (lower ends)", benchmark="levers",
        keys=("*.streamed.fixed_gain_low", "*.streamed.rose_gain_low"), form="{:.2f}x", bar=(None, ">=", 1.0), every=True,
    ),
    Claim(
        text="the same: with all levers on both, ROSE over the tuned fixed job, and the ends of its 95 % interval", benchmark="levers",
        keys=("*.all.harvest", "*.all.harvest_low", "*.all.harvest_high"), form="{:.3f}x", every=True,
    ),
    Claim(
        text="simulated, the paper's GRPO 8B setting: ROSE over fixed synchronous (not tuned)", benchmark="sim_paper",
        keys=("grpo_8b.rose.gain",), form="{:.2f}x", undecided=True,
    ),
    Claim(
        text="simulator's figures within 15 % or twice the live spread, of all", benchmark="sim_predict",
        keys=("figures_within", "figures"), form="{:.0f}", undecided=True,
    ),
)  # fmt: skip
