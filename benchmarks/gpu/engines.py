"""Stages with one vLLM engine of the 8B shape and dummy weights: does it run here, and does its KV memory come and go.

Each in a process of its own, with the engine in a process below it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import figures, models
from benchmarks.gpu.common import GIB, Figures, Skip, keep, torch_on_gpu
from rose.coserve.ledger import NodeDir, NodeState
from rose.errors import LedgerError
from rose.policy.compat import Support, row_of_number
from rose.policy.lending_events import Mode
from vllm_plugin.memory import GOING, UNMAPPED

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 512, 128
LENT_SHARE = 0.25
WAIT_S = 30.0


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


def _engine(folder: Path, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(models.write_folder(models.POLICY, folder)), load_format="dummy", max_model_len=4096,
        **{"gpu_memory_utilization": 0.5, **settings},
    )  # fmt: skip


def _generate(engine: Any, salt: int) -> list[list[int]]:
    """Tokens of every request, greedy; other ``salt``, other prompts (no prefix is found again)."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, temperature=0.0)
    prompts: Any = [
        {"prompt_token_ids": [7 + (salt * 1000 + i + j) % 5000 for j in range(PROMPT_TOKENS)]}
        for i in range(PROMPTS)
    ]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def _speed(**settings: Any) -> Figures:
    torch = torch_on_gpu()
    free, _total = torch.cuda.mem_get_info()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        engine = _engine(Path(folder), **settings)
        found: Figures = {"start_s": time.monotonic() - begun}
        keep(found)
        _generate(engine, 0)
        begun = time.monotonic()
        _generate(engine, 1)
        took_s = time.monotonic() - begun
    return {
        **found,
        "tokens_per_s": PROMPTS * NEW_TOKENS / took_s,
        "used_gib": (free - torch.cuda.mem_get_info()[0]) / GIB,
    }


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
            NodeState(mode=Mode.ON, epoch=1, lend_pages=self._said, heartbeat_ns=time.monotonic_ns())
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
        "VLLM_PLUGINS": "rose",
    }
    agent = _Agent(node_dir)
    try:
        yield node_dir, agent
    finally:
        agent.close()


def _lend(**settings: Any) -> Figures:
    torch = torch_on_gpu()
    with tempfile.TemporaryDirectory() as name, _serving(Path(name)) as (node_dir, agent):
        engine = _engine(Path(name) / "model", **settings)
        lease, rank = node_dir.serving_lease(), node_dir.rank("serving", 0)
        record = lease.read()
        if record is None or record.support != Support.ELASTIC:
            because = row_of_number(record.row) if record is not None else None
            raise Skip(f"the engine does not share: {because.feature if because else 'no plugin was loaded'}")
        plain = _generate(engine, 2)
        num_chunks = len(rank.extra)
        chunk_pages = record.total_pages // num_chunks
        pages = int(num_chunks * LENT_SHARE) * chunk_pages
        free = {"before": torch.cuda.mem_get_info()[0]}
        seconds: dict[str, float] = {}
        tokens: list[list[list[int]]] = []

        def load() -> None:
            tokens.append(_generate(engine, 2))

        # Lend while the engine works, take back while it works: its tokens must not change.
        for what, loan in (("lend", pages), ("take_back", 0)):
            worker = threading.Thread(target=load)
            worker.start()
            time.sleep(0.3)
            agent.lend(loan)
            begun = time.monotonic()
            _until(lambda loan=loan: _gone(rank) * chunk_pages == loan)
            seconds[what] = time.monotonic() - begun
            worker.join()
            _until(
                lambda: _retained(rank) == 0
            )  # kept for the first chunks that come back; let go after some seconds
            free["lent" if loan else "after"] = torch.cuda.mem_get_info()[0]
            keep({**seconds})
        return figures.lending(free, pages, seconds, all(one == plain for one in tokens))


def _gone(rank: Any) -> int:
    """Chunks that the worker reports as unmapped; -1 while one is on its way."""
    states = rank.extra
    return -1 if GOING in states else states.count(UNMAPPED)


def _retained(rank: Any) -> int:
    record = rank.read()
    return record.retained_pages if record is not None else -1


def _until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise LedgerError(f"not within {WAIT_S:.0f} s")
        time.sleep(0.002)
