"""What production fleets switch on, as options of vLLM's: written once, for every benchmark that starts a production engine.

:data:`FEATURES` are the columns of ``benchmarks/conformance.py``; :data:`KINDS` are those whose cost for production is measured
(``--engine KIND``), each a plain model with one thing more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiny_model import write_tiny_adapter
from tests.tiny_shapes import SHAPES

Options = Mapping[str, Any]
"""Fields of vLLM's ``EngineArgs``, as ``vllm serve`` takes them too: :func:`arguments`."""

NGRAM: Options = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
}
ADAPTERS: Options = {"enable_lora": True}


def arguments(options: Options) -> tuple[str, ...]:
    """The same on a command line."""
    found: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        else:
            found.append(
                f"{flag}={value if isinstance(value, (str, int)) else json.dumps(value, separators=(',', ':'))}"
            )
    return tuple(found)


PLAIN = "plain"
FEATURES: dict[str, tuple[str, tuple[str, ...]]] = {  # MODEL: the shape's own folder
    PLAIN: ("decoder", ()),
    "kv_events": ("decoder", ('--kv-events-config={"enable_kv_cache_events":true,"publisher":"null"}',)),
    "logits_processors": (
        "logits_processors",
        ("--logits-processors=tests.plugin.logits_for_tests:Never",),
    ),
    "prompt_embeds": ("prompt_embeds", ("--enable-prompt-embeds",)),
    "api_servers": ("api_servers", ("--api-server-count=2",)),
    "tensor_parallel": ("tensor_parallel", ("--tensor-parallel-size=2",)),
    "offload": (
        "kv_connector",
        ('--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_role":"kv_both"}',),
    ),
    "connector": (
        "kv_connector",
        # By default it keeps all models' caches in one place, by their prompts alone.
        (
            '--kv-transfer-config={"kv_connector":"ExampleConnector","kv_role":"kv_both",'
            '"kv_connector_extra_config":{"shared_storage_path":"MODEL/kv"}}',
        ),
    ),
    "kv_sharing": ("kv_option", ("--kv-sharing-fast-prefill",)),
    "fp8_weights": ("quantized_weights", ("--quantization=fp8",)),
    "lora": ("lora", arguments(ADAPTERS)),
    "speculative": ("speculative", arguments(NGRAM)),
    "draft_model": (
        "speculative",
        ('--speculative-config={"method":"draft_model","model":"MODEL","num_speculative_tokens":2}',),
    ),
    "fp8_kv": ("fp8_kv", ("--kv-cache-dtype=fp8",)),
    "priority": ("priority", ("--scheduling-policy=priority",)),
    "expert_parallel": ("expert_parallel", ("--enable-expert-parallel",)),
    "pipeline_parallel": (
        "pipeline_parallel",
        # With a warm-up: without one vLLM's CPU build has no buffers for a later stage.
        (
            "--pipeline-parallel-size=2",
            "--no-enforce-eager",
            '--compilation-config={"mode":1,"backend":"eager"}',
        ),
    ),
    "other_scheduler": (
        "other_scheduler",
        ("--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler",),
    ),
}
"""Name -> the row of docs/compatibility.md that it touches, and its arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A production engine with one thing more than a plain one.

    Attributes:
        options: That switch it on, of the engine.
        server_options: And of ``vllm serve`` alone.
        shape: Of ``tests.tiny_shapes``, whose kinds of layers the model has; None: the plain model's own.
        num_adapters: LoRA adapters that requests ask for in turn.
        num_cores: Engine cores, each with a node directory, an agent and a rollout engine of its own.
        num_drafts: Tokens that are drafted for each request and step.
    """

    options: Options = field(default_factory=dict[str, Any])
    server_options: Options = field(default_factory=dict[str, Any])
    shape: str | None = None
    num_adapters: int = 0
    num_cores: int = 1
    num_drafts: int = 0

    def prepare(self, plain: Path, folder: Path) -> tuple[Path, tuple[str, ...]]:
        """Write what this kind has beside the model in ``plain``; its own model, and the arguments of ``vllm serve``."""
        args = arguments({**self.options, **self.server_options})
        told = json.loads((plain / "config.json").read_text())
        if self.shape is not None:
            plain, args = (
                _reshaped(plain, told, folder / self.shape, self.shape),
                (*args, "--load-format=dummy"),
            )
        for seed, name in enumerate(self.adapters()):
            write_tiny_adapter(
                folder / name,
                seed=seed,
                num_layers=told["num_hidden_layers"],
                hidden_size=told["hidden_size"],
                num_heads=told["num_attention_heads"],
                head_size=told["head_dim"],
            )
        if self.num_adapters:
            args = (*args, "--lora-modules", *(f"{name}={folder / name}" for name in self.adapters()))
        return plain, args

    def adapters(self) -> tuple[str, ...]:
        return tuple(f"adapter{number}" for number in range(self.num_adapters))

    def model_of(self, number: int, model: str) -> str:
        """What request ``number`` asks for: the model, or one of its adapters."""
        names = (model, *self.adapters())
        return names[number % len(names)]


def _reshaped(plain: Path, told: Mapping[str, Any], folder: Path, shape: str) -> Path:
    """A model of another shape and of about the plain one's size, with its tokenizer; without weights."""
    pattern = SHAPES[shape]["layer_types"]
    times = max(1, told["num_hidden_layers"] // len(pattern))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    tokens = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = SHAPES[shape] | {name: told[name] for name in (*sizes, *tokens) if name in told}
    config |= {
        "layer_types": pattern * times,
        "num_hidden_layers": len(pattern) * times,
        "query_pre_attn_scalar": told["head_dim"],
    }
    folder.mkdir(parents=True)
    for one in plain.glob("token*.json"):
        shutil.copyfile(one, folder / one.name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


KINDS: dict[str, Kind] = {
    PLAIN: Kind(),
    "ngram": Kind(options=NGRAM, num_drafts=2),
    # Room for all of them: who waits for a slot measures the adapters' number, not their cost.
    "lora": Kind(options={**ADAPTERS, "max_loras": 2}, num_adapters=2),
    "sliding": Kind(shape="gemma3"),
    # vLLM would start an API server for each core: a second thing more.
    "dp2": Kind(options={"data_parallel_size": 2}, server_options={"api_server_count": 1}, num_cores=2),
}
