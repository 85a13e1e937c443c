"""Stages with one vLLM engine of the 8B shape, without a checkpoint: does it run here, and does its KV memory come and go.

Each in a process of its own, with the engine in a process below it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu import figures, models
from benchmarks.gpu.common import GIB, Background, Figures, keep, place, rehearsing, torch_on_gpu
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState
from rose.demo.programs import ENGINE_ENV
from rose.errors import LedgerError
from rose.policy.compat import Support, row_of_number
from rose.policy.coserving.chunks import MOVING, UNMAPPED
from rose.policy.lending_events import Mode

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 512, 128
SINGLE_REQUESTS, SINGLE_TOKENS = 8, 64
"""Of a pass of ``lend``: one after the other, so that no answer depends on what else is in its batch."""
LENT_SHARE = 0.25
WAIT_S = 30.0
STOP_S = 10.0
"""For an engine to end by itself; then it is killed."""
SEED = 7
SEEDED = "benchmarks.gpu.seeded.SeededWeights"


def kernels() -> Figures:
    """The kernels that a dense bf16 model needs: norm, activation, FlashAttention 3 over a paged cache."""
    torch = torch_on_gpu()
    import vllm
    import vllm._custom_ops as ops
    from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE, flash_attn_varlen_func

    found: Figures = {"vllm": vllm.__version__, "fa3": bool(FA3_AVAILABLE)}
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight, out = torch.ones(4096, device="cuda", dtype=torch.bfloat16), torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    expected = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    found["rms_norm_error"] = float((out - expected).abs().max())
    gate = torch.empty(16, 2048, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(gate, x)
    expected = torch.nn.functional.silu(x[:, :2048].float()) * x[:, 2048:].float()
    found["silu_and_mul_error"] = float((gate.float() - expected).abs().max())
    keep(found)
    q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(2, 64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(64, device="cuda", dtype=torch.int32).view(4, 16)
    lengths = torch.full((4,), 256, device="cuda", dtype=torch.int32)
    attended = flash_attn_varlen_func(
        q, cache[0], cache[1], max_seqlen_q=1, cu_seqlens_q=torch.arange(5, device="cuda", dtype=torch.int32),
        max_seqlen_k=256, seqused_k=lengths, block_table=table, causal=True, fa_version=3,
    )  # fmt: skip
    return {**found, "attention_is_finite": bool(torch.isfinite(attended).all())}


def eager() -> Figures:
    """8B shape, eager, vLLM's own choice of runner."""
    return _speed(enforce_eager=True)


def old_runner() -> Figures:
    """8B shape, eager, the first model runner."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return _speed(enforce_eager=True)


def graphs() -> Figures:
    """8B shape with CUDA graphs."""
    return _speed(enforce_eager=False)


def lend() -> Figures:
    """A production engine, eager, lends a quarter of its cache between steps and takes it back: memory, time, and the same tokens."""
    return _lend(enforce_eager=True)


def lend_graphs() -> Figures:
    """The same with CUDA graphs: they hold addresses, and memory behind addresses comes and goes."""
    return _lend(enforce_eager=False)


@contextmanager
def _engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """An engine, which has ended when the block has: until then it writes into the stage's folders and holds its memory."""
    from vllm import LLM

    if rehearsing():
        shape, own = (
            models.TINY,
            {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True},
        )
        os.environ.update(ENGINE_ENV)
    else:
        shape, own = models.POLICY, {"max_model_len": 4096, "gpu_memory_utilization": 0.5}
    settings = {**own, **settings}
    engine = LLM(model=str(models.write_folder(shape, folder)), load_format="dummy", **settings)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown(timeout=STOP_S)


def _prompts(count: int, salt: int) -> list[Any]:
    """Other ``salt``, other prompts (no prefix is found again)."""
    length = PROMPT_TOKENS // 8 if rehearsing() else PROMPT_TOKENS
    return [
        {"prompt_token_ids": [7 + (salt * 1000 + i + j) % 5000 for j in range(length)]} for i in range(count)
    ]


def _generate(engine: Any, prompts: list[Any], new_tokens: int) -> list[list[int]]:
    """Tokens of every request, greedy."""
    from vllm import SamplingParams

    new_tokens = new_tokens // 4 if rehearsing() else new_tokens
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False, temperature=0.0)
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def _speed(**settings: Any) -> Figures:
    here = None if rehearsing() else place()
    free = here.free_bytes() if here is not None else 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _engine(Path(folder), **settings) as engine:
        found: Figures = {"start_s": time.monotonic() - begun}
        keep(found)
        _generate(engine, _prompts(PROMPTS, 0), NEW_TOKENS)
        begun = time.monotonic()
        num_tokens = sum(map(len, _generate(engine, _prompts(PROMPTS, 1), NEW_TOKENS)))
        found["tokens_per_s"] = num_tokens / (time.monotonic() - begun)
        if here is not None:
            found["used_gib"] = (free - here.free_bytes()) / GIB
        keep(found)  # all of it: what comes now is the engine's end
    return found


class _Agent:
    """Plays the node agent: states a loan, and keeps saying that it lives."""

    def __init__(self, node_dir: NodeDir) -> None:
        self._writer = node_dir.node_writer()
        self._loan = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._say()
        self._thread.start()

    def lend(self, pages: int) -> None:
        self._loan = pages

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._writer.close()

    def _beat(self) -> None:
        while not self._stop.wait(0.02):
            self._say()

    def _say(self) -> None:
        before, self._said = getattr(self, "_said", None), self._loan
        self._writer.write(
            NodeState(
                mode=Mode.ON,
                epoch=1,
                lend_pages=self._said,
                has_serving=1,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        if before != self._said:
            self._writer.wake()


@contextmanager
def _serving(folder: Path) -> Any:
    """The environment of a production engine that takes part, and an agent beside it."""
    node_dir = NodeDir(folder / "node")
    os.environ |= {
        "ROSE_ROLE": "serving",
        "ROSE_DIR": str(folder / "node"),
        "ROSE_ALLOW_UNMEASURED": "1",
        "ROSE_GUARD": os.environ.get(
            "ROSE_GUARD", "1"
        ),  # a use after release is a fault, not a read of zeros
        "VLLM_PLUGINS": "rose",
    }
    agent = _Agent(node_dir)
    try:
        yield node_dir, agent
    finally:
        agent.close()


def _lend(**settings: Any) -> Figures:
    if not rehearsing():
        torch_on_gpu()
    settings = {"enable_prefix_caching": False, "worker_extension_cls": SEEDED, **settings}
    with (
        tempfile.TemporaryDirectory() as name,
        _serving(Path(name)) as (node_dir, agent),
        _engine(Path(name) / "model", **settings) as engine,
    ):
        engine.collective_rpc("gpu_check_fill_weights", args=(SEED,))
        lease, rank = node_dir.serving_lease(), node_dir.rank("serving", 0)
        record = lease.read()
        if record is None or record.support != Support.ELASTIC:
            because = row_of_number(record.row) if record is not None else None
            raise LedgerError(
                f"the engine does not share: {because.feature if because else 'no plugin was loaded'}"
            )
        num_chunks = len(rank.extra)
        chunk_pages = record.total_pages // num_chunks
        pages = int(num_chunks * LENT_SHARE) * chunk_pages
        prompts = _prompts(SINGLE_REQUESTS, 2)
        tokens: dict[str, list[list[int]]] = {}
        seconds: dict[str, float] = {}

        def answer(name: str, first: threading.Event) -> None:
            tokens[name] = []
            for prompt in prompts:
                tokens[name] += _generate(engine, [prompt], SINGLE_TOKENS)
                first.set()

        # Twice with all of its memory: what differs between these two is not of our making.
        for name in ("alone", "again"):
            answer(name, threading.Event())
        free = {"before": _free_bytes()}
        keep({"control_same_tokens": tokens["alone"] == tokens["again"]})
        # Lend while the engine works, take back while it works: its tokens must not change.
        for name, loan in (("lend", pages), ("take_back", 0)):
            first = threading.Event()
            work = Background(lambda name=name, first=first: answer(name, first))
            work.start()
            _until(first.is_set, work)
            agent.lend(loan)
            begun = time.monotonic()
            _until(lambda loan=loan: _gone(rank) * chunk_pages == loan, work)
            seconds[name] = time.monotonic() - begun
            work.finish()
            # Handles are kept for the first chunks that come back; they are let go after some seconds.
            _until(lambda: _retained(rank) == 0, work)
            free["lent" if loan else "after"] = _free_bytes()
            keep({f"{key}_s": value for key, value in seconds.items()})
        found = figures.lending(free, pages, seconds, tokens)
        keep(found)  # as in _speed
    return found


def _free_bytes() -> int:
    return psutil.virtual_memory().available if rehearsing() else place().free_bytes()


def _gone(rank: Any) -> int:
    """Chunks that the worker reports as unmapped; -1 while one is on its way."""
    states = rank.extra
    return -1 if MOVING in states else states.count(UNMAPPED)


def _retained(rank: Any) -> int:
    record = rank.read()
    return record.retained_pages if record is not None else -1


def _until(condition: Callable[[], bool], work: Background) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        work.check()
        if time.monotonic() > until_s:
            raise LedgerError(f"not within {WAIT_S:.0f} s")
        time.sleep(0.002)
