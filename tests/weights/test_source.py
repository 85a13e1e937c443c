"""What a publisher reads from a trainer: casts as torch casts, tied tensors once, clear refusals."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import ConfigError, WeightsError
from rose.weights.source import RawBits, Shard, TensorBox, collect, round_to_bf16

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
init_device_mesh = pytest.importorskip("torch.distributed.device_mesh").init_device_mesh
fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
load_file = pytest.importorskip("safetensors.torch").load_file


def bits(tensor: TensorBox) -> np.ndarray:
    return tensor.bits(0, tensor.spec.num_elements)


def by_name(source: Any, **options: Any) -> dict[str, TensorBox]:
    return {tensor.spec.name: tensor for tensor in collect(source, **options)}


def tricky_floats() -> np.ndarray:
    """Every upper half, with lower halves below, at and above the rounding tie."""
    upper = np.arange(65_536, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower[None, :]).reshape(-1).view(np.float32)


def test_rounding_equals_torch_for_every_upper_half_and_tie() -> None:
    values = tricky_floats()
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bf16(values), expected)


def test_a_nan_stays_a_nan_when_rounded() -> None:
    values = tricky_floats()
    nans = round_to_bf16(values[np.isnan(values)])
    assert set(nans.tolist()) == {0x7FC0}


def test_module_parameters_come_as_the_engine_holds_them() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    found = by_name(module)
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, value in module.state_dict().items():
        assert (found[name].spec.dtype, found[name].spec.shape) == ("BF16", tuple(value.shape))
        expected = value.to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits(found[name]), expected)
        part = found[name].bits(1, 3)
        assert np.array_equal(part, expected[1:3])


def test_the_trainers_masters_are_not_touched() -> None:
    module = torch.nn.Linear(3, 5)
    before = module.weight.detach().clone()
    bits(by_name(module)["weight"])
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize(
    ("dtype", "cast", "expected"),
    [
        ("float32", "BF16", "BF16"),
        ("float32", "F16", "F16"),
        ("float32", "F32", "F32"),
        ("float64", "BF16", "BF16"),
        ("float16", "BF16", "BF16"),
        ("bfloat16", "F32", "F32"),
        ("float8_e4m3fn", "BF16", "F8_E4M3"),
        ("int64", "BF16", "I64"),
        ("int32", "BF16", "I32"),
        ("uint8", "BF16", "U8"),
        ("bool", "BF16", "BOOL"),
    ],
)
def test_floats_are_cast_and_everything_else_is_left_alone(dtype: str, cast: str, expected: str) -> None:
    value = torch.tensor([[0.0, 1.0, 1.5], [0.3, 0.7, 2.0]]).to(getattr(torch, dtype))
    tensor = by_name(lambda: {"x": value}, cast=cast)["x"]
    assert (tensor.spec.dtype, tensor.spec.shape) == (expected, (2, 3))
    target = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.get(expected, value.dtype)
    want = value.to(target).contiguous().view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(bits(tensor).view(np.uint8), want)


def test_numpy_and_torch_agree() -> None:
    values = np.random.default_rng(0).standard_normal((7, 5))
    for dtype in (np.float64, np.float32, np.float16):
        for cast in ("BF16", "F16", "F32"):
            array = values.astype(dtype)
            ours = by_name(lambda a=array: {"x": a}, cast=cast)["x"]
            theirs = by_name(lambda a=array: {"x": torch.from_numpy(a)}, cast=cast)["x"]
            # A double goes to bf16 through float32 in numpy and in torch alike.
            assert ours.spec == theirs.spec
            assert np.array_equal(bits(ours), bits(theirs))


def test_kept_patterns_keep_their_type() -> None:
    table = {"layer.gate.e_score_correction_bias": np.ones(4, np.float32), "layer.w": np.ones(4, np.float32)}
    found = by_name(lambda: table, keep=("*correction_bias",))
    assert [tensor.spec.dtype for tensor in found.values()] == ["F32", "BF16"]


def test_non_contiguous_tensors_are_read_in_row_major_order() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for value in (array.T, torch.from_numpy(array).T):
        tensor = by_name(lambda v=value: {"x": v})["x"]
        assert tensor.spec.shape == (4, 3)
        assert np.array_equal(bits(tensor), round_to_bf16(array.T.reshape(-1)))


class Tied(torch.nn.Module):
    def __init__(self, declared: Any) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 6, bias=False)
        self.embed = torch.nn.Embedding(6, 4)
        self.lm_head.weight = self.embed.weight
        self._tied_weights_keys = declared


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        (["lm_head.weight"], "embed.weight"),
        ({"lm_head.weight": "embed.weight"}, "embed.weight"),
        (None, "lm_head.weight"),
    ],
)
def test_tied_tensors_travel_once_under_the_checkpoints_name(declared: Any, name: str) -> None:
    assert list(by_name(Tied(declared))) == [name]


def test_views_of_one_memory_with_another_shape_or_order_are_different_tensors() -> None:
    array = np.ones((4, 4), np.float32)
    table = {"a": array, "order": array.T, "width": array[:, :2], "height": array[:2]}
    assert list(by_name(lambda: table)) == ["a", "order", "width", "height"]


def test_of_two_names_for_one_tensor_a_function_must_choose_whatever_their_order() -> None:
    weight = torch.ones(3, 2)
    for names in (("lm_head.weight", "embed.weight"), ("embed.weight", "lm_head.weight")):
        with pytest.raises(ConfigError, match=r"^tensors\.lm_head\.weight: is embed\.weight too") as caught:
            collect(lambda names=names: dict.fromkeys(names, weight))
        assert caught.value.fix == "return it once, under the name that the engine's checkpoint has"


def test_a_compiled_module_keeps_its_own_names() -> None:
    assert list(by_name(torch.compile(torch.nn.Linear(2, 2)))) == ["weight", "bias"]


def test_compiled_layers_inside_a_module_keep_the_checkpoints_names() -> None:
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    plain = list(by_name(module))
    module[0][0] = torch.compile(module[0][0])
    module[0] = torch.compile(module[0])
    assert list(by_name(module)) == plain
    assert list(by_name(lambda: dict(module.named_parameters()))) == plain


def test_a_compiled_layer_with_a_tied_tensor_is_still_declared_as_tied() -> None:
    module = Tied(["lm_head.weight"])
    module.lm_head = torch.compile(module.lm_head)
    assert list(by_name(module)) == ["embed.weight"]


def test_a_tensor_that_is_there_compiled_and_not_is_refused() -> None:
    table = {"a._orig_mod.w": np.zeros(2, np.float32), "a.w": np.ones(2, np.float32)}
    with pytest.raises(ConfigError, match=r"^tensors\.a\.w: is there twice"):
        collect(lambda: table)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, r"^tensors: needs a torch module"),
        (lambda: [1], r"^tensors: gave list"),
        (lambda: {"x": "text"}, r"^x: is a str"),
        (lambda: {"x": np.zeros(2, np.complex128)}, r"^x: numpy type complex128"),
        (lambda: {"x": torch.zeros(2, dtype=torch.complex128)}, r"^x: type torch\.complex128"),
        (lambda: {"x": []}, r"^tensors\.x: needs a list of one or more Shard"),
        (lambda: {"x": [np.zeros(2)]}, r"^tensors\.x: needs a list of one or more Shard"),
        (lambda: {"x": Shard(np.zeros((2, 2)), (4, 2), (3, 0))}, r"^tensors\.x: \(2, 2\) at \(3, 0\) is not"),
        (lambda: {"x": Shard(np.zeros(2), (4, 2), (0, 0))}, r"^tensors\.x: 2 offsets and 1 extents"),
        (lambda: {"x": Shard("text", (4,), (0,))}, r"^x: is a str"),
        (lambda: {"x": RawBits(np.zeros(2, np.uint16), "BF17")}, r"^x\.dtype: unknown element type"),
        (lambda: {"x\n": np.zeros(2)}, r"printable"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(source: Any, message: str) -> None:
    with pytest.raises((ConfigError, WeightsError), match=message):
        collect(source)


def test_raw_bits_of_another_width_are_refused_when_read() -> None:
    tensor = by_name(lambda: {"x": RawBits(np.zeros(2, np.uint32), "BF16")})["x"]
    with pytest.raises(WeightsError, match=r"^x: changed its type or size"):
        bits(tensor)


def test_numpy_arrays_of_the_other_byte_order_travel_as_little_endian() -> None:
    values = np.array([1.5, -2.25, 0.0], ">f4")
    found = by_name(lambda: {"w": values}, keep=("*",))["w"]
    assert np.array_equal(bits(found), values.astype("<f4").view("<u4"))


def test_a_conjugate_that_torch_has_not_made_yet_travels_as_its_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    found = by_name(lambda: {"w": values.conj()}, keep=("*",))["w"]
    assert np.array_equal(bits(found), values.conj().resolve_conj().numpy().view("<u8"))


# -- modules of transformers


def tiny(kind: str) -> Any:
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    sight = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14, "projection_dim": 16,
    }  # fmt: skip
    gemma = {**sizes, "model_type": "gemma", "head_dim": 8}
    qwen = {**sizes, "model_type": "qwen2", "tie_word_embeddings": True}
    made = {
        "gemma3_sees": lambda: transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config={**sizes, "head_dim": 8}, vision_config=sight, mm_tokens_per_image=4
            )
        ),
        "paligemma": lambda: transformers.PaliGemmaForConditionalGeneration(
            transformers.PaliGemmaConfig(
                text_config=gemma, vision_config={**sight, "model_type": "siglip_vision_model"}
            )
        ),
        "llava_tied": lambda: transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                text_config=qwen,
                vision_config={**sight, "model_type": "clip_vision_model"},
                tie_word_embeddings=True,
            )
        ),
        "dense": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8)),
        "olmoe": lambda: transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes, **experts)),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, num_local_experts=4)
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=8, moe_intermediate_size=24)
        ),
    }
    torch.manual_seed(1)
    return made[kind]()


@pytest.mark.parametrize(
    "kind", ["dense", "olmoe", "mixtral", "qwen3_moe", "gemma3_sees", "paligemma", "llava_tied"]
)
def test_a_model_of_transformers_goes_by_its_checkpoints_names(kind: str, tmp_path: Path) -> None:
    """A mixture's experts are one tensor in the module and many in the file that an engine loads; a model that sees
    has other prefixes there, and ties its own names."""
    model = tiny(kind)
    pieces = {piece.spec.name: piece for piece in collect(model)}
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(pieces) == set(saved)
    for name, tensor in saved.items():
        assert pieces[name].spec.shape == tuple(tensor.shape)
        expected = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
        assert np.array_equal(pieces[name].bits(0, tensor.numel()), expected)


def test_a_weight_that_is_computed_from_others_is_refused_with_the_way_out() -> None:
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"parametrizations.*remove_parametrizations"):
        collect(model)


def test_a_mixture_of_experts_that_trains_on_is_read_as_it_is_now() -> None:
    model = tiny("olmoe")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    first = {piece.spec.name: piece for piece in collect(model)}[name].copied()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    second = {piece.spec.name: piece for piece in collect(model)}[name]
    assert not np.array_equal(first.bits(0, 16 * 24), second.bits(0, 16 * 24))


def test_a_mixture_that_is_divided_over_ranks_is_refused_by_the_name_of_its_experts() -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny("olmoe")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="several tensors in the checkpoint") as caught:
            collect(model)
        assert caught.value.field == "tensors.model.layers.0.mlp.experts.down_proj"
    finally:
        distributed.destroy_process_group()


def recipe(name: str) -> Any:
    """A function of the page."""
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    block = next(
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"def {name}(" in text
    )
    found: dict[str, Any] = {"torch": torch}
    exec(block.partition("publisher =")[0], found)
    return found[name]


def test_the_pages_recipe_publishes_what_an_adapter_merges_to() -> None:
    """Bit by bit, at each version, and the base never moves."""
    torch.manual_seed(2)
    model = peft.get_peft_model(tiny("dense"), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    merged = recipe("merged")
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        pieces = {piece.spec.name: piece for piece in collect(lambda: merged(model))}
        assert set(pieces) == set(expected)
        for name, tensor in expected.items():
            bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(pieces[name].bits(0, tensor.numel()), bits.reshape(-1))


def test_a_module_under_data_parallel_keeps_its_names() -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny("olmoe")
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.compile(model))
        assert [piece.spec.name for piece in collect(wrapped)] == [
            piece.spec.name for piece in collect(model)
        ]
    finally:
        distributed.destroy_process_group()


def test_a_tensor_without_memory_is_named() -> None:
    with pytest.raises(WeightsError, match=r"0\.weight: is on the meta device"):
        collect(torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")))


@pytest.mark.parametrize("name", ["q.base_layer.weight", "q.lora_A.default.weight"])
def test_an_adapter_beside_the_model_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match="merged weights") as caught:
        collect(lambda: {name: np.zeros(3, np.float32)})
    assert caught.value.field == f"tensors.{name}"


def test_a_sparse_tensor_is_named() -> None:
    with pytest.raises(WeightsError, match=r"w: is torch\.sparse_coo"):
        collect(lambda: {"w": torch.eye(3).to_sparse()})


def test_replicas_of_one_process_keep_their_names() -> None:
    assert [piece.spec.name for piece in collect(torch.nn.DataParallel(torch.nn.Linear(2, 2)))] == [
        "weight",
        "bias",
    ]
