"""The allowlist of configuration fields, on vLLM's own objects: complete, no false refusal, and new fields refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rose.policy.compat import TABLE, judge
from rose.policy.engine_fields import HARMLESS, KV_KINDS, RESTRICTED, is_section, row_of_field
from tests.engine_launcher import BASE_ARGS
from tests.plugin.conftest import ON_NEWEST
from tests.plugin.test_compute_only_engine import STATES
from tests.plugin.test_kv_cache_table import cache_of
from tests.tiny_quantized import FORMATS
from tests.tiny_shapes import write_shape
from vllm_plugin import compat, lines
from vllm_plugin.features import findings, plain

FILLED_IN: dict[str, tuple[Any, ...]] = {"worker_cls": ("auto",), "method": (None,)}
"""What vLLM puts something else in the place of before anybody looks."""
KV = {"kv_cache_memory_bytes": 48 << 20}
OPTIONAL = ("lora_config", "speculative_config", "model_config.multimodal_config")
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
ENGINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3", "dense", {}),
    ("qwen3", "dense", {"enable_lora": True, "speculative_config": NGRAM}),
    (
        "qwen3",
        "dense",
        {"speculative_config": {"method": "draft_model", "model": "SELF", "num_speculative_tokens": 2}},
    ),
    (
        "llama",
        "dense",
        {"speculative_config": {"method": "eagle", "model": "SELF", "num_speculative_tokens": 2}},
    ),
    (
        "llama",
        "dense",
        {"speculative_config": {"method": "eagle3", "model": "SELF", "num_speculative_tokens": 2}},
    ),
    ("qwen3", "fp8", {"kv_cache_dtype": "fp8"}),
    ("mla", "mla", {}),
    ("mtp", "mla", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    ("gemma3", "gemma3", {}),
    ("idefics3", "dense", {}),
    *(
        ("qwen3", "dense", {"hf_overrides": {"quantization_config": said}})
        for _, said in FORMATS.values()  # as a checkpoint's own config.json says it
    ),
)
"""``SELF``: the model is its own drafter.  Shape, kind of cache and options of what the engines of the tests run with, as far as fields with a row of their own are concerned."""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def config_of(shapes: Path, name: str = "qwen3", **args: Any) -> Any:
    """The ``VllmConfig`` that vLLM makes of a command, on the CPU build."""
    from vllm.engine.arg_utils import EngineArgs

    folder = shapes / name
    if not folder.exists():
        write_shape(folder, name)
        words = (folder / "tokenizer.json").read_text()  # two for the reasoning parser
        (folder / "tokenizer.json").write_text(
            words.replace('"w0"', '"<think>"').replace('"w1"', '"</think>"')
        )
    return EngineArgs(model=str(folder), load_format="dummy", **KV | args).create_engine_config()


def found_in(config: Any) -> dict[str, str]:
    return findings(config, device="cpu", stock_worker=compat.STOCK_CPU_WORKER, env={})


def answer(config: Any, role: str = "serving") -> tuple[str, str]:
    support, because = judge(role, found_in(config))
    return support.label, because.name


# --- shapes of models, as far as the configuration alone tells


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("llama", ("elastic", "decoder")),
        ("qwen3", ("elastic", "decoder")),
        ("moe", ("elastic", "decoder")),
        # Several groups, or another kind: their cache says so, when vLLM has sized it.
        ("gemma3", ("elastic", "decoder")),
        ("gpt_oss", ("elastic", "decoder")),
        ("sliding", ("elastic", "decoder")),
        ("chunked", ("elastic", "decoder")),
        ("mla", ("elastic", "mla")),
        # Of which kind their states are, too.
        ("qwen3_next", ("compute-only", "hybrid")),
        ("granite", ("compute-only", "hybrid")),
        ("lfm2", ("compute-only", "hybrid")),
        ("mamba2", ("compute-only", "hybrid")),
        ("jamba", ("compute-only", "hybrid")),
        ("mamba", ("compute-only", "hybrid")),
        ("encoder_decoder", ("refused", "encoder_decoder")),
        ("idefics3", ("elastic", "multimodal")),
        ("multimodal", ("refused", "modalities")),
        ("pooling", ("refused", "pooling")),
    ],
)
def test_a_model_of_every_shape_gets_its_row(shapes: Path, shape: str, expected: tuple[str, str]) -> None:
    assert answer(config_of(shapes, shape)) == expected


# --- options that operators set


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
        {"async_scheduling": True},
        {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
        {"dtype": "float32"},
        {"dtype": "float16", "kv_cache_dtype": "float16"},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 100},
        {"block_size": 32},
        {"gpu_memory_utilization": 0.5},
        {"kv_cache_memory_bytes": None},
        {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"},
        {"structured_outputs_config": {"backend": "xgrammar"}},
        {"reasoning_parser": "deepseek_r1"},
        {"kv_cache_metrics": True, "otlp_traces_endpoint": None, "show_hidden_metrics_for_version": "0.31"},
        {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"}},
        {"compilation_config": {"cudagraph_mode": "none"}},
        {"optimization_level": 0},
        {"served_model_name": ["a", "b"], "tokenizer_mode": "hf", "seed": 5, "revision": None},
        {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}},
        {"stream_interval": 4, "max_num_queued_reqs": 100},
        {"disable_log_stats": True, "shutdown_timeout": 5},
        {"weight_transfer_config": {"backend": "nccl"}},
        {"worker_extension_cls": "tests.plugin.pager_faults.HeldPager"},
    ],
    ids=lambda args: ",".join(args) or "defaults",
)
def test_what_operators_really_set_stays_elastic(shapes: Path, args: dict[str, Any]) -> None:
    assert answer(config_of(shapes, **args)) == ("elastic", "decoder")


@pytest.mark.parametrize(
    ("row", "args"),
    [
        ("prompt_embeds", {"enable_prompt_embeds": True}),
        ("logits_processors", {"logits_processors": ["tests.plugin.test_engine_fields.Processor"]}),
        ("lora", {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 16}),
        ("speculative", {"speculative_config": NGRAM}),
        (
            "lora",  # of several the first of the table
            {
                "speculative_config": NGRAM | {"prompt_lookup_min": 2},
                "enable_lora": True,
                "kv_cache_dtype": "fp8",
            },
        ),
    ],
)
def test_what_has_a_row_of_its_own_stays_elastic_by_that(
    shapes: Path, row: str, args: dict[str, Any]
) -> None:
    assert answer(config_of(shapes, **args)) == ("elastic", row)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"scheduling_policy": "priority"}, ("refused", "priority")),
        ({"kv_cache_dtype": "int8_per_token_head"}, ("refused", "kv_quant")),
        ({"quantization": "fp8"}, ("compute-only", "quantized_weights")),
        ({"enable_lora": True, "enable_moe_shared_loras": True}, ("refused", "other_option")),
        ({"speculative_config": NGRAM | {"method": "ngram_gpu"}}, ("refused", "drafts")),
        ({"watermark": 0.2}, ("compute-only", "kv_option")),
        ({"model_impl": "transformers"}, ("refused", "other_option")),
        ({"additional_config": {"mine": 1}}, ("refused", "other_option")),
    ],
    ids=str,
)
def test_an_option_that_was_not_tried_gets_its_row(
    shapes: Path, args: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert answer(config_of(shapes, **args)) == expected


@pytest.mark.parametrize(
    "args",
    [
        {"enable_prompt_embeds": True},
        {"logits_processors": ["mine.Processor"]},
        {"enable_lora": True},
        {"speculative_config": NGRAM},
        {"kv_cache_dtype": "fp8"},
    ],
)
def test_what_a_rollouts_trace_or_weights_cannot_tell_is_refused_to_it(
    shapes: Path, args: dict[str, Any]
) -> None:
    assert answer(config_of(shapes, **args), role="rollout")[0] == "refused"


# --- the allowlist itself


def sections(config: Any) -> Iterator[tuple[str, Any]]:
    """Every configuration below a ``VllmConfig`` that the allowlist looks into, by its path."""

    def below(one: Any, path: str) -> Iterator[tuple[str, Any]]:
        yield path, one
        for field in dataclasses.fields(one):
            inner = f"{path}.{field.name}" if path else field.name
            value = getattr(one, field.name)
            if is_section(inner) and value is not None:
                yield from below(value, inner)

    yield from below(config, "")


@pytest.fixture(scope="module")
def full(shapes: Path) -> Any:
    """A configuration with every optional section that is allowed."""
    return config_of(
        shapes,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq"},
        reasoning_parser="deepseek_r1",
        weight_transfer_config={"backend": "nccl"},
    )


@pytest.fixture(scope="module")
def complete(shapes: Path) -> Any:
    """One with every optional section that the allowlist looks into."""
    from vllm.config.multimodal import MultiModalConfig

    config = config_of(
        shapes,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq"},
        reasoning_parser="deepseek_r1",
        weight_transfer_config={"backend": "nccl"},
        enable_lora=True,
        speculative_config=NGRAM,
    )
    config.model_config.multimodal_config = MultiModalConfig()
    return config


def test_every_field_of_vllm_is_placed_and_every_placed_field_is_vllms(complete: Any) -> None:
    theirs = {
        f"{path}.{field.name}".lstrip(".")
        for path, one in sections(complete)
        for field in dataclasses.fields(one)
    }
    ours = {f"{path}.{name}".lstrip(".") for path, names in HARMLESS.items() for name in names.split()}
    ours |= {field.path for field in RESTRICTED}
    ours = {path for path in ours if not path.startswith(("kv_cache_config.", "kv_cache_tensor."))}
    ours = {
        path for path in ours if not path.startswith(("kv_cache_group.", "kv_cache_spec.", "state_spec."))
    }
    ours = {path for path in ours if not path.startswith("model.")}
    assert theirs == ours - lines.foreign_fields()


def test_every_cache_field_of_vllm_is_placed() -> None:
    from vllm.v1 import kv_cache_interface as theirs

    for path, kind in [
        ("kv_cache_config", theirs.KVCacheConfig),
        ("kv_cache_tensor", theirs.KVCacheTensor),
        ("kv_cache_group", theirs.KVCacheGroupSpec),
        ("kv_cache_spec", theirs.MLAAttentionSpec),
        ("state_spec", theirs.MambaSpec),
    ]:
        kinds = (kind, theirs.SlidingWindowSpec) if path == "kv_cache_spec" else (kind,)
        names = {field.name for one in kinds for field in dataclasses.fields(one)}
        placed = set(HARMLESS[path].split())
        placed |= {f.path.rpartition(".")[2] for f in RESTRICTED if f.path.startswith(f"{path}.")}
        foreign = {one.rpartition(".")[2] for one in lines.foreign_fields() if one.startswith(f"{path}.")}
        assert placed - foreign == names, path


def test_every_kind_of_cache_is_placed() -> None:
    from vllm.v1 import kv_cache_interface as theirs

    def kinds(one: type) -> set[str]:
        return {one.__name__}.union(*(kinds(each) for each in one.__subclasses__()))

    abstract = {"KVCacheSpec", "AttentionSpec"}
    assert kinds(theirs.KVCacheSpec) - abstract <= KV_KINDS.keys()


def test_what_a_dataclass_of_vllm_has_by_default_is_allowed(complete: Any) -> None:
    """Also where this platform never shows it: CUDA's commands start from the same defaults."""
    wrong = []
    for path, one in sections(complete):
        for field in dataclasses.fields(one):
            default = field.default
            if hasattr(default, "default"):  # pydantic's own description of the field
                default = default.default  # type: ignore[union-attr]
            made = plain(default)
            if isinstance(made, str) and made.startswith("<"):
                continue  # no default, or one that is made anew each time: those are in the configurations above
            where = f"{path}.{field.name}".lstrip(".")
            because = row_of_field(where, made, FILLED_IN.get(field.name, ()))
            if because is not None:
                wrong.append((where, made, because))
    assert wrong == []


def test_tried_is_what_the_engines_of_the_tests_run_with(shapes: Path) -> None:
    """Every other value that is allowed is allowed by reading, and the table says so."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    seen: dict[str, set[Any]] = {field.path: set() for field in RESTRICTED}
    for shape, kind, options in ENGINES:
        config_of(shapes, shape)  # writes the model
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", str(shapes / shape), *BASE_ARGS]
        )
        engine_args = EngineArgs.from_cli_args(args)
        for name, value in options.items():
            value = json.loads(json.dumps(value).replace("SELF", str(shapes / shape)))  # vLLM changes it
            setattr(engine_args, name, value)
        config = engine_args.create_engine_config()
        cache = cache_of(copy.deepcopy(config), kind)
        places = {
            "model": [config.model_config],
            "kv_cache_config": [cache],
            "kv_cache_tensor": cache.kv_cache_tensors,
            "kv_cache_group": cache.kv_cache_groups,
            "kv_cache_spec": [group.kv_cache_spec for group in cache.kv_cache_groups],
        }
        for path, values in seen.items():
            first, _, rest = path.partition(".")
            for place in places.get(first, [config]):
                one: Any = place
                for name in (rest if first in places else path).split("."):
                    one = getattr(one, name, None)
                    if one is None:
                        break
                # A section that is not there has no values, and a kind of cache has not every kind's fields.
                absent = any(
                    path.startswith(f"{section}.") and attrgetter(section)(config) is None
                    for section in OPTIONAL
                )
                if not absent and (first != "kv_cache_spec" or hasattr(place, rest)):
                    values.add(plain(one))
    seen["parallel_config.worker_cls"] = set()
    seen["state_spec.mamba_type"] = set(STATES.values())
    seen["model.attn_type"] |= {config_of(shapes, shape).model_config.attn_type for shape in STATES}
    # That there is such a section, or a window, is a row of its own.
    seen |= {path: {None} for path in (*OPTIONAL, "kv_cache_spec.sliding_window")}
    wrong = [
        (f.path, seen[f.path], f.tried)
        for f in RESTRICTED
        if f.path not in lines.foreign_fields()
        # What the newest line alone does is tried there.
        and (seen[f.path] != set(f.tried) if ON_NEWEST else not seen[f.path] <= set(f.tried))
    ]
    assert wrong == []
    assert all(not set(field.tried) & set(field.read) for field in RESTRICTED)


def test_rows_of_fields_are_rows_of_the_table() -> None:
    names = {one.name for one in TABLE}
    assert {field.row for field in RESTRICTED} <= names
    assert {row for row in KV_KINDS.values() if row is not None} <= names
    assert {row for field in RESTRICTED for _, row in field.own} <= names
    assert all(value in (*field.tried, *field.read) for field in RESTRICTED for value, _ in field.own)
    paths = [field.path for field in RESTRICTED]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    "section", ["", "cache_config", "scheduler_config", "compilation_config.pass_config"]
)
def test_a_field_that_vllm_adds_tomorrow_is_refused_by_its_name(full: Any, section: str) -> None:
    config = copy.deepcopy(full)
    one = dict(sections(config))[section]
    new = dataclasses.make_dataclass(
        type(one).__name__, [("entangled", bool, dataclasses.field(default=False))], bases=(_fields_of(one),)
    )()
    owner, _, name = section.rpartition(".")
    if section:
        object.__setattr__(dict(sections(config))[owner], name, new)
    else:
        config = new
    assert found_in(config) == {"unlisted": f"{section}.entangled = False".lstrip(".")}
    assert answer(config) == ("refused", "unlisted")


def _fields_of(one: Any) -> type:
    """A plain dataclass with the fields and values of ``one``: vLLM's own check what they are given."""
    values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    fields = [
        (name, Any, dataclasses.field(default_factory=lambda name=name: values[name])) for name in values
    ]
    return dataclasses.make_dataclass(type(one).__name__, fields)


def test_a_new_field_that_may_be_a_secret_is_named_without_its_value(full: Any) -> None:
    token = ("api_token", str, dataclasses.field(default="hunter2"))
    kind = dataclasses.make_dataclass("LoadConfig", [token], bases=(_fields_of(full.load_config),))
    config = copy.deepcopy(full)
    object.__setattr__(config, "load_config", kind())
    assert found_in(config) == {"unlisted": "load_config.api_token = <str>"}


@pytest.mark.parametrize("value", [True, 1, "x"])
def test_a_kind_of_model_that_vllm_adds_tomorrow_is_refused_by_its_name(full: Any, value: Any) -> None:
    config = copy.deepcopy(full)
    kind = type(config.model_config)
    config.model_config.__class__ = type("ModelConfig", (kind,), {"is_quantum": property(lambda _: value)})
    assert found_in(config) == {"unlisted": f"model.is_quantum = {value!r}"}


def test_a_row_says_which_field_had_which_value(shapes: Path) -> None:
    found = found_in(config_of(shapes, enable_lora=True, scheduling_policy="priority"))
    assert found == {
        "lora": "lora_config = <LoRAConfig>",
        "priority": "scheduler_config.policy = 'priority'",
    }


def test_no_value_is_shown_at_length(shapes: Path) -> None:
    config = config_of(shapes)
    object.__setattr__(config.scheduler_config, "policy", "p" * 10_000)
    assert all(len(says) < 200 for says in found_in(config).values())


def test_true_is_not_one_and_nothing_is_not_zero() -> None:
    assert row_of_field("parallel_config.nnodes", True) == "multi_host"
    assert row_of_field("parallel_config.nnodes", None) == "multi_host"
    assert row_of_field("model_config.enable_sleep_mode", 0) == "sleep_mode"


def test_compressed_tensors_of_numbers_that_nobody_ran_share_compute_only(shapes: Path) -> None:
    _, said = FORMATS["w8a8"]
    tried = config_of(shapes, hf_overrides={"quantization_config": said})
    other = config_of(shapes, hf_overrides={"quantization_config": said})
    other.model_config.hf_config.quantization_config = said | {"format": "float-quantized"}

    assert "quantized_weights" not in found_in(tried)
    assert found_in(other)["quantized_weights"].endswith("of float-quantized")
