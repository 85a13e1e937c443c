"""Rows that only the sized KV cache can answer for: kinds and groups as vLLM cuts them, and a geometry that adds up."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase
from rose.errors import ConfigError
from rose.policy.compat import Support, judge, row, row_of_number
from tests.plugin import harness
from tests.plugin.conftest import ON_NEWEST, newest_only
from tests.tiny_shapes import WINDOW, write_shape
from vllm_plugin import compat
from vllm_plugin.compat import OS_PAGE_BYTES
from vllm_plugin.features import kv_findings
from vllm_plugin.kv_layout import CountedCache, kv_entries, page_layers
from vllm_plugin.memory import ChunkPlan

KV_BYTES = 48 << 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return harness.engine_config(write_shape(tmp_path_factory.mktemp("model") / "m", "qwen3"))


def specs_of(shape: str) -> list[Any]:
    """The layers' specs as vLLM's models of that shape state them on the CPU."""
    import torch
    from vllm.v1 import kv_cache_interface as k
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    common = {"block_size": 128, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    full = k.FullAttentionSpec(**common)
    sliding = k.SlidingWindowSpec(**common, sliding_window=WINDOW)
    latent = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    if ON_NEWEST:
        latent |= {"block_stride_alignment": MultipleOf(16)}
    state = k.MambaSpec(
        block_size=512, shapes=((3, 192), (192, 16)), dtypes=(torch.bfloat16,) * 2, page_size_padded=32768
    )
    older = dataclasses.replace(state, mamba_type=MambaAttentionBackendEnum.MAMBA1)
    return {
        "dense": [full, full],
        "gemma3": [sliding] * 5 + [full],
        "gpt_oss": [sliding, full] * 2,
        "sliding": [sliding, sliding],
        "tokens": [full, k.FullAttentionSpec(**common | {"num_kv_heads": 1}), sliding],
        "chunked": [k.ChunkedLocalAttentionSpec(**common, attention_chunk_size=WINDOW), full],
        "mla": [k.MLAAttentionSpec(**latent)] * 2,
        "mamba": [older, older],
        "mamba2": [state, state],
        "hybrid": [state, full],
        "cross": [k.CrossAttentionSpec(**common)] * 2,
        "padded": [k.MLAAttentionSpec(**latent | {"block_stride_alignment": 512})] * 2,
        "sparse": [k.MLAAttentionSpec(**latent, is_index_group_leader=True)] * 2,
        "fp8": [
            k.FullAttentionSpec(**common | {"dtype": torch.uint8}, kv_quant_mode=k.KVQuantMode.FP8_PER_TENSOR)
        ]
        * 2,
        "e4m3": [k.FullAttentionSpec(**common | {"dtype": torch.float8_e4m3fn})] * 2,
        "unified": [k.FullAttentionSpec(**common, sliding_window=WINDOW)] * 2,
        "sizes": [full, k.FullAttentionSpec(**common | {"num_kv_heads": 4})],
        "int8": [k.FullAttentionSpec(**common, kv_quant_mode=k.KVQuantMode.INT8_PER_TOKEN_HEAD)] * 2,
    }[shape]


def cache_of(config: Any, shape: str) -> Any:
    """The ``KVCacheConfig`` that vLLM makes of these layers in 48 MiB."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(config)
    config.cache_config.kv_cache_layout = "LBHNC"
    layers = {f"model.layers.{index}.attn": spec for index, spec in enumerate(specs_of(shape))}
    (made,) = get_kv_cache_configs(config, [layers], [KV_BYTES])
    return made


@pytest.mark.parametrize(
    ("shape", "expected", "found"),
    [
        ("dense", ("elastic", "decoder"), ""),
        ("gemma3", ("elastic", "kv_groups"), "6 groups"),
        ("gpt_oss", ("elastic", "kv_groups"), "2 groups"),
        ("tokens", ("compute-only", "kv_layout"), "blocks differ between groups"),
        ("chunked", ("compute-only", "kv_kind"), "a group of ChunkedLocalAttentionSpec"),
        ("sliding", ("compute-only", "kv_kind"), "without a group of full attention"),
        ("unified", ("compute-only", "kv_kind"), "without a group of full attention"),
        ("sizes", ("compute-only", "kv_kind"), "a group of UniformTypeKVCacheSpecs"),
        ("mla", ("elastic", "decoder"), ""),
        ("padded", ("compute-only", "kv_layout"), "kv_cache_spec.block_stride_alignment = 512"),
        ("sparse", ("compute-only", "kv_kind"), "kv_cache_spec.is_index_group_leader = True"),
        ("mamba", ("refused", "state_kind"), "state_spec.mamba_type = 'MAMBA1'"),
        ("mamba2", ("compute-only", "hybrid"), "a group of MambaSpec of MAMBA2"),
        ("hybrid", ("compute-only", "hybrid"), "a group of MambaSpec of MAMBA2"),
        ("cross", ("refused", "encoder_decoder"), "a group of CrossAttentionSpec"),
        ("fp8", ("elastic", "fp8_kv"), ""),
        ("e4m3", ("refused", "kv_quant"), "kv_cache_spec.dtype = 'float8_e4m3fn'"),
        ("int8", ("refused", "kv_quant"), "kv_cache_spec.kv_quant_mode = 'INT8_PER_TOKEN_HEAD'"),
    ],
)
def test_a_cache_of_every_kind_gets_its_row(
    config: Any, shape: str, expected: tuple[str, str], found: str
) -> None:
    findings = kv_findings(cache_of(config, shape), OS_PAGE_BYTES)
    support, because = judge("serving", findings)
    assert (support.label, because.name) == expected
    assert found in findings.get(because.name, "")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            "gemma3",
            {
                "kv_groups": "6 groups: 5 SlidingWindowSpec, 1 FullAttentionSpec",
                "sliding_window": f"kv_cache_spec.sliding_window = {WINDOW}",
            },
        ),
        (
            "gpt_oss",
            {
                "kv_groups": "2 groups: 1 SlidingWindowSpec, 1 FullAttentionSpec",
                "sliding_window": f"kv_cache_spec.sliding_window = {WINDOW}",
            },
        ),
    ],
)
def test_groups_and_windows_are_found_where_they_keep_nothing_from_being_lent(
    config: Any, shape: str, expected: dict[str, str]
) -> None:
    assert kv_findings(cache_of(config, shape), OS_PAGE_BYTES) == expected


@pytest.mark.parametrize("shape", ["sliding", "unified"])
def test_windows_alone_are_not_said_to_lie_beside_full_attention(config: Any, shape: str) -> None:
    """As in Mistral and Phi-3, and where vLLM made one group of both kinds of layer."""
    assert kv_findings(cache_of(config, shape), OS_PAGE_BYTES).keys() == {"kv_kind"}


def test_drafts_beside_several_groups_lend_nothing(config: Any) -> None:
    assert kv_findings(cache_of(config, "dense"), OS_PAGE_BYTES, drafts=True) == {}
    made = cache_of(config, "gemma3")
    support, because = judge("serving", kv_findings(made, OS_PAGE_BYTES, drafts=True))
    assert (support, because) == (Support.COMPUTE_ONLY, row("grouped_drafts"))
    with pytest.raises(ConfigError, match="speculative decoding beside several"):
        compat.require_elastic(made, OS_PAGE_BYTES, "serving", drafts=True)
    compat.require_elastic(made, OS_PAGE_BYTES, "serving", drafts=False)


def test_latents_beside_other_groups_lend_nothing(config: Any) -> None:
    made = cache_of(config, "gemma3")
    (latent,) = cache_of(config, "mla").kv_cache_groups
    made.kv_cache_groups[0].kv_cache_spec = latent.kv_cache_spec
    findings = kv_findings(made, OS_PAGE_BYTES)
    assert findings["kv_kind"] == "latents beside other groups"
    assert judge("serving", findings) == (Support.COMPUTE_ONLY, row("kv_kind"))


def test_a_rollout_engine_gets_elastic_memory_or_none(config: Any) -> None:
    assert compat.standing_of(config, "rollout", cache_of(config, "dense")).support is Support.ELASTIC
    for shape in ("gemma3", "sliding", "fp8"):
        assert compat.standing_of(config, "rollout", cache_of(config, shape)).support is Support.REFUSED


def test_layers_that_only_encode_are_refused_although_vllm_gives_them_no_cache_today(config: Any) -> None:
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

    made = cache_of(config, "dense")
    (group,) = made.kv_cache_groups
    spec = group.kv_cache_spec
    group.kv_cache_spec = EncoderOnlyAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
    )
    assert kv_findings(made, OS_PAGE_BYTES) == {"pooling": "a group of EncoderOnlyAttentionSpec"}


def test_a_kind_that_vllm_adds_tomorrow_is_refused_by_its_name(config: Any) -> None:
    made = cache_of(config, "dense")
    kind = type(made.kv_cache_groups[0].kv_cache_spec)
    values = {
        f.name: getattr(made.kv_cache_groups[0].kv_cache_spec, f.name) for f in dataclasses.fields(kind)
    }
    made.kv_cache_groups[0].kv_cache_spec = type("HolographicSpec", (kind,), {})(**values)
    assert kv_findings(made, OS_PAGE_BYTES) == {"unlisted": "a group of HolographicSpec"}


def test_a_checkpoint_that_asks_for_another_cache_is_seen_where_the_command_did_not(config: Any) -> None:
    standing = compat.standing_of(config, "serving", cache_of(config, "e4m3"))
    assert (standing.support, standing.row) == (Support.REFUSED, row("kv_quant"))
    assert "kv_cache_spec.dtype = 'float8_e4m3fn'" in str(standing)


# --- a geometry that adds up, or a refusal that says what does not


def layout(**change: Any) -> Any:
    """Two layers of 64 blocks of 32 KiB, one behind the other."""
    made = harness.kv_cache_config(None)
    page = made.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    made.num_blocks = 64
    plain = {"size": 128 * page, "layer_stride": 64 * page, "block_stride": page}
    made.kv_cache_tensors = [dataclasses.replace(made.kv_cache_tensors[0], **plain | change)]
    return made


PAGE = 32 << 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 129 * PAGE}, "the allocation is"),
        ({"size": 127 * PAGE}, "the allocation is"),
        ({"layer_stride": 32 * PAGE}, f"layers overlap at byte {32 * PAGE}"),
        ({"layer_stride": 65 * PAGE}, f"layers leave a gap at byte {64 * PAGE}"),
        ({"offset": PAGE}, "layers leave a gap at byte 0"),
        ({"block_stride": 3 * PAGE}, "blocks are"),
        ({"layers": ["layer.0"]}, "its layers are not those of its group"),
        ({"layers": ["layer.0", "layer.0"]}, "its layers are not those of its group"),
        ({"layers": ["layer.0", "layer.2"]}, "its layers are not those of its group"),
    ],
)
def test_a_layout_that_does_not_add_up_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    made = layout(**change)
    with pytest.raises(ConfigError, match=reason):
        kv_entries(made, OS_PAGE_BYTES)
    support, because = judge("serving", kv_findings(made, OS_PAGE_BYTES))
    assert (support, because) == (Support.COMPUTE_ONLY, row("kv_layout"))
    assert reason in kv_findings(made, OS_PAGE_BYTES)["kv_layout"]


def test_layers_over_each_other_are_not_summed() -> None:
    made = layout()
    (tensor,) = made.kv_cache_tensors
    one = dataclasses.replace(tensor, size=64 * PAGE, layers=["layer.0"])
    made.kv_cache_tensors = [one, dataclasses.replace(one, layers=["layer.1"])]
    with pytest.raises(ConfigError, match="the allocation is"):
        kv_entries(made, OS_PAGE_BYTES)


def test_several_allocations_are_refused() -> None:
    made = layout()
    (tensor,) = made.kv_cache_tensors
    made.kv_cache_tensors = [
        dataclasses.replace(tensor, layers=["layer.0"]),
        dataclasses.replace(tensor, layers=["layer.1"], size=64 * PAGE),
    ]
    with pytest.raises(ConfigError, match="2 allocations"):
        kv_entries(made, OS_PAGE_BYTES)
    with pytest.raises(ConfigError, match="2 allocations"):
        CountedCache.of(made)


@newest_only
def test_prefixes_hashed_finer_than_a_block_lend_nothing() -> None:
    made = layout()
    made.hash_block_size = harness.BLOCK_TOKENS // 4
    assert kv_findings(made, OS_PAGE_BYTES) == {"kv_option": "kv_cache_config.hash_block_size = 32"}


@given(
    num_layers=st.integers(1, 5),
    num_blocks=st.integers(64, 3000),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    head_size=st.sampled_from([16, 32, 96]),
    blocks_outermost=st.booleans(),
    several_tensors=st.booleans(),
    piece=st.sampled_from([4096, 2 << 20]),
)
def test_chunks_and_tail_are_the_allocation_once_and_hold_every_layers_blocks(
    num_layers: int,
    num_blocks: int,
    kv_heads: int,
    head_size: int,
    blocks_outermost: bool,
    several_tensors: bool,
    piece: int,
) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    spec = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_size=head_size, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    names = [f"layer.{index}" for index in range(num_layers)]
    layer_stride = page if blocks_outermost else num_blocks * page
    block_stride = num_layers * page if blocks_outermost else page
    parts = [[name] for name in names] if several_tensors else [names]
    tensors = [
        KVCacheTensor(
            size=num_layers * num_blocks * page,
            layers=part,
            layer_stride=layer_stride,
            block_stride=block_stride,
            offset=names.index(part[0]) * layer_stride,
        )
        for part in parts
    ]
    made = KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(names, spec)])
    if several_tensors and num_layers > 1 and blocks_outermost and page % piece:
        # Layers of several tensors between each other's blocks cannot be set apart.
        assert kv_findings(made, piece).keys() == {"kv_layout"}
        return
    assert kv_findings(made, piece) == {}
    block_bytes = num_layers * page
    runs = {block_bytes if blocks_outermost else page}
    chunk_blocks = math.lcm(
        (2 << 20) // math.gcd(2 << 20, block_bytes), *(piece // math.gcd(piece, run) for run in runs)
    )
    if num_blocks < 4 * chunk_blocks:
        with pytest.raises(ConfigError, match="4 are needed"):
            ChunkPlan.of(made, piece)
        return
    plan = ChunkPlan.of(made, piece)
    pieces = [run for chunk in range(plan.num_chunks) for run in plan.ranges([chunk])]
    assert sum(length for _, length in pieces) == plan.total_pages * (2 << 20)
    spans = sorted((at, at + length) for at, length in [*pieces, *plan.tail_ranges()])
    assert (spans[0][0], spans[-1][1]) == (0, -(-plan.size_bytes // piece) * piece)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(spans))
    assert plan.geometry.total_bytes <= plan.size_bytes


@given(
    layers=st.lists(st.integers(1, 4), min_size=2, max_size=6),
    num_blocks=st.integers(64, 3000),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    blocks_outermost=st.booleans(),
    piece=st.sampled_from([4096, 2 << 20]),
)
def test_a_chunk_of_several_groups_is_the_blocks_of_each_and_no_byte_of_another_chunk(
    layers: list[int], num_blocks: int, kv_heads: int, blocks_outermost: bool, piece: int
) -> None:
    """Groups as vLLM lays them over each other, some of fewer layers; every page of every layer lies in its block's chunk."""
    import torch
    from vllm.v1 import kv_cache_interface as k

    common = {"block_size": 16, "num_kv_heads": kv_heads, "head_size": 32, "dtype": torch.bfloat16}
    full, sliding = k.FullAttentionSpec(**common), k.SlidingWindowSpec(**common, sliding_window=64)
    page, most = full.page_size_bytes, max(layers)
    layer_stride = page if blocks_outermost else num_blocks * page
    block_stride = most * page if blocks_outermost else page
    names = [[f"layer.{group}.{index}" for index in range(count)] for group, count in enumerate(layers)]
    tensors = [
        k.KVCacheTensor(
            size=most * num_blocks * page,
            layers=of_group,
            layer_stride=layer_stride,
            block_stride=block_stride,
        )
        for of_group in names
    ]
    groups = [
        k.KVCacheGroupSpec(of_group, sliding if number else full) for number, of_group in enumerate(names)
    ]
    made = k.KVCacheConfig(num_blocks, tensors, groups)
    if kv_findings(made, piece).keys() != {"kv_groups", "sliding_window"}:
        assert blocks_outermost  # a group of one layer cannot be told from layers that lie apart
        assert page % piece
        return
    block_bytes = most * page
    run = block_bytes if blocks_outermost else page
    chunk_blocks = math.lcm((2 << 20) // math.gcd(2 << 20, block_bytes), piece // math.gcd(piece, run))
    if num_blocks < 4 * chunk_blocks:
        with pytest.raises(ConfigError, match="4 are needed"):
            ChunkPlan.of(made, piece)
        return
    plan = ChunkPlan.of(made, piece)
    owner: dict[int, int] = {}
    for chunk in range(plan.num_chunks):
        for at, length in plan.ranges([chunk]):
            assert at % piece == length % piece == 0
            for place in range(at // piece, (at + length) // piece):
                assert owner.setdefault(place, chunk) == chunk
    assert len(owner) * piece == plan.total_pages * (2 << 20)
    paged = page_layers(made, piece)
    for tensor in paged.kv_cache_tensors:
        for layer in range(len(tensor.layers)):
            for block in (
                0,
                plan.chunk_blocks - 1,
                plan.chunk_blocks,
                plan.num_chunks * plan.chunk_blocks - 1,
            ):
                first = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
                for byte in (first, first + page - 1):
                    assert owner[byte // piece] == block // plan.chunk_blocks
                    assert byte < tensor.size == plan.size_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offset": 4096}, "between the pages of another's"),
        ({"layer_stride": 3 << 20}, "between the pages of another's"),
        ({"layers": ["model.layers.0.attn", "model.layers.1.attn"]}, "its layers are not those of its group"),
        ({"layers": []}, "its layers are not those of its group"),
    ],
)
def test_groups_that_do_not_lie_over_each_other_are_refused_by_name(
    config: Any, change: dict[str, Any], reason: str
) -> None:
    made = cache_of(config, "gpt_oss")
    made.kv_cache_tensors[1] = dataclasses.replace(made.kv_cache_tensors[1], **change)
    support, because = judge("serving", kv_findings(made, OS_PAGE_BYTES))
    assert (support, because) == (Support.COMPUTE_ONLY, row("kv_layout"))
    assert reason in kv_findings(made, OS_PAGE_BYTES)["kv_layout"]


# --- the books of a cache that is only counted


@pytest.mark.parametrize("shape", ["chunked", "gemma3", "mla"])
def test_a_cache_that_is_only_counted_is_counted_once(config: Any, shape: str) -> None:
    made = cache_of(config, shape)
    plan = ChunkPlan.of(compat.counted(made))
    (size,) = {tensor.size for tensor in made.kv_cache_tensors}
    assert plan.total_pages == size // (2 << 20)
    assert plan.size_bytes == plan.total_pages * (2 << 20) + plan.tail_bytes
    assert plan.num_chunks == 1  # with vLLM's null block in it: never lent


@pytest.fixture
def serving(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A serving scheduler on a cache; the function that makes it."""
    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_refusal", None)
    made: list[Any] = []

    def make(shape: str) -> tuple[Any, NodeDir]:
        config.cache_config.num_gpu_blocks = cache_of(config, shape).num_blocks
        made.append(harness.build(ServingScheduler, config, cache_of(config, shape)))
        return made[-1], NodeDir(tmp_path / "n")

    yield make
    for scheduler in made:
        if scheduler.rose is not None:
            scheduler.rose.stop() if scheduler.rose._thread.is_alive() else None
    if compat._refusal is not None:
        compat._refusal.close()


def test_production_that_lends_nothing_publishes_slack_and_what_its_memory_is(serving: Any) -> None:
    scheduler, node = serving("chunked")
    scheduler.add_request(harness.request("a", num_tokens=100))
    harness.step(scheduler)

    lease, board = node.serving_lease().read(), node.serving_board().read()
    assert (lease.support, row_of_number(lease.row)) == (Support.COMPUTE_ONLY, row("kv_kind"))
    assert (lease.total_pages, lease.reserved_pages, lease.lent_pages) == (24, 24, 0)
    assert (board.step, board.running) == (1, 1)
    assert 0 < board.used_pages <= 24
    assert scheduler.get_kv_cache_usage() == pytest.approx(scheduler.kv_cache_manager.usage)


def test_production_whose_cache_is_refused_stays_stock_and_says_why(serving: Any) -> None:
    scheduler, node = serving("e4m3")
    assert scheduler.rose is None
    record = node.serving_lease().read()
    assert (record.phase, row_of_number(record.row)) == (Phase.OFF, row("kv_quant"))
    scheduler.add_request(harness.request("a"))
    assert harness.step(scheduler).num_scheduled_tokens == {"a": 20}


def test_a_rollout_scheduler_on_such_a_cache_does_not_start(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_plugin.scheduler import RolloutScheduler

    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    made = cache_of(config, "gemma3")
    config.cache_config.num_gpu_blocks = made.num_blocks
    with pytest.raises(ConfigError, match="6 groups: 5 SlidingWindowSpec"):
        harness.build(RolloutScheduler, config, made)


@pytest.mark.parametrize("role", ["serving", "rollout"])
def test_a_worker_leaves_vllms_own_memory_to_such_a_cache(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_plugin.worker import RoseCPUWorker

    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("ROSE_ROLE", role)
    seen: list[Any] = []

    def allocate(self: Any, kv_cache_config: Any) -> None:
        seen.append(kv_cache_config)
        self.cache = torch.zeros(kv_cache_config.kv_cache_tensors[0].size, dtype=torch.int8)

    monkeypatch.setattr(CPUWorker, "initialize_from_config", allocate)
    worker = object.__new__(RoseCPUWorker)
    worker.rank = 0
    made = cache_of(config, "chunked")
    if role == "rollout":
        with pytest.raises(ConfigError, match="2 groups"):
            worker.initialize_from_config(made)
        return
    worker.initialize_from_config(made)
    assert seen == [made]
    assert seen[0] is made  # as vLLM made it
    assert worker.rose_pager is None
    assert NodeDir(tmp_path / "n").ranks("serving") == []
