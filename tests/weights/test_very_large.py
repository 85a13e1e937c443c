"""Models whose counts pass 2**32, without their memory: 235 B parameters, and single tensors of more than 2**32 elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rose.errors import SectionCorrupt, WeightsError
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights import boxes, codec, layout, manifest, statehash
from rose.weights.boxes import Box
from rose.weights.host_copy import _header, _offsets
from rose.weights.layout import HeldBoxes
from rose.weights.manifest import Base, Manifest, ManifestSection, ObjectRef, TensorState
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.source import RawBits
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.subscriber import WeightSubscriber

PAST_32_BITS = 1 << 32
XXH3 = "0123456789abcdef" * 2
THIS, OBJECT_BYTES = WeightVersion(1, 5), 64 << 20


@cache
def specs_of_235b() -> dict[str, TensorSpec]:
    """Qwen3-235B-A22B: 94 layers of 128 experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (151_936, 4096),
        "lm_head.weight": (151_936, 4096),
        "model.norm.weight": (4096,),
    }
    for layer in range(94):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (8192, 4096),
            f"{name}.self_attn.k_proj.weight": (512, 4096),
            f"{name}.self_attn.v_proj.weight": (512, 4096),
            f"{name}.self_attn.o_proj.weight": (4096, 8192),
            f"{name}.self_attn.q_norm.weight": (128,),
            f"{name}.self_attn.k_norm.weight": (128,),
            f"{name}.input_layernorm.weight": (4096,),
            f"{name}.post_attention_layernorm.weight": (4096,),
            f"{name}.mlp.gate.weight": (128, 4096),
        }
        for expert in range(128):
            for part in ("gate_proj", "up_proj"):
                shapes[f"{name}.mlp.experts.{expert}.{part}.weight"] = (1536, 4096)
            shapes[f"{name}.mlp.experts.{expert}.down_proj.weight"] = (4096, 1536)
    return {name: TensorSpec(name, "BF16", shape) for name, shape in shapes.items()}


def pieces(spec: TensorSpec, parts: int) -> Iterator[Box]:
    """``parts`` runs of rows, no longer than a publisher's fragments."""
    step = min(-(-spec.num_elements // parts), WeightsParams().fragment_elements)
    for start in range(0, spec.num_elements, step):
        yield Box.flat(start, min(step, spec.num_elements - start))


def delta_manifest(specs: dict[str, TensorSpec], parts: int = 1) -> Manifest:
    """A delta of 3 % of every tensor, as ``parts`` ranks that cut every tensor would describe it."""
    sections: list[ManifestSection] = []
    h_after: dict[str, int] = {}
    ends = [0]
    for spec in specs.values():
        for box in pieces(spec, parts):
            num_changed = -(-box.num_elements * 3 // 100)
            if ends[-1] + num_changed > OBJECT_BYTES:
                ends.append(0)
            dh = statehash.mix(len(sections))
            sections.append(
                ManifestSection(
                    object=len(ends) - 1, offset=ends[-1], nbytes=num_changed, xxh3=XXH3, encoding="planes",
                    tensor=spec.name, start=box.start, num_elements=box.num_elements, num_changed=num_changed,
                    dh=statehash.to_hex(dh),
                )
            )  # fmt: skip
            ends[-1] += num_changed
            h_after[spec.name] = statehash.add(h_after.get(spec.name, 0), dh)
    num_changed = sum(section.num_changed for section in sections)
    num_elements = sum(spec.num_elements for spec in specs.values())
    return Manifest(
        schema=manifest.SCHEMA, run_id="run", attempt=1, version=5, kind="delta",
        base=Base(attempt=1, version=4, kind="anchor"), anchor=(1, 4), model=model_digest(specs.values()),
        objects=tuple(
            ObjectRef(key=manifest.object_key("run", THIS, 0, number, XXH3), nbytes=nbytes, xxh3=XXH3)
            for number, nbytes in enumerate(ends)
        ),
        sections=tuple(sections),
        tensors=tuple(
            TensorState(
                name=spec.name, dtype=spec.dtype, shape=spec.shape, h_before=statehash.to_hex(0),
                h_after=statehash.to_hex(h_after[spec.name]),
            )
            for spec in specs.values()
        ),
        num_changed=num_changed, num_elements=num_elements, bytes_dense=2 * num_elements, bytes_sent=sum(ends),
        density=num_changed / num_elements, created_s=1.0,
    )  # fmt: skip


def test_the_manifest_of_a_235b_model_is_read_back_with_every_count() -> None:
    record = delta_manifest(specs_of_235b())
    assert record.num_elements == 235_093_634_560
    assert min(record.num_changed, record.bytes_sent, record.bytes_dense) > PAST_32_BITS
    data = manifest.encode_manifest(record)
    assert manifest.decode_manifest(data, "run", THIS, "delta") == record


def test_a_manifest_that_readers_would_refuse_for_its_size_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    store = MemoryStore()
    publisher = WeightPublisher(lambda: {"w": RawBits(bits, "BF16")}, store, "run", 1)
    publisher.publish(0)
    bits += 1
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(WeightsError, match=r"bytes, at most 500.*fewer ranks"):
        publisher.publish(1)
    assert publisher.published == WeightVersion(1, 0)
    monkeypatch.undo()
    publisher.publish(1)
    assert publisher.published == WeightVersion(1, 1)


GIANT = TensorSpec("experts", "BF16", (3, 1 << 16, 1 << 15))
"""3 * 2**31 elements in one tensor: rows past 2**32, as one fused tensor of all experts may have."""


def test_ranks_that_cut_a_giant_tensor_by_rows_or_columns_hold_it_whole_and_once() -> None:
    rows, columns = GIANT.shape[1] // 2, GIANT.shape[2] // 4
    for extent in ((1, rows, GIANT.shape[2]), (1, GIANT.shape[1], columns)):
        claims = [
            [
                HeldBoxes(
                    GIANT.name, GIANT.dtype, GIANT.shape, (box.start, box.num_elements, box.run, box.stride)
                )
                for box in boxes.of_slice(GIANT.shape, offset, extent)
            ]
            for offset in (
                (expert, row, column)
                for expert in range(3)
                for row in range(0, GIANT.shape[1], extent[1])
                for column in range(0, GIANT.shape[2], extent[2])
            )
        ]
        assert sum(len(owned) for owned in layout.assign(claims).owned) == len(claims)
        with pytest.raises(WeightsError, match=f"{extent[1] * extent[2]} elements are in no piece"):
            layout.assign(claims[:-1])


def test_a_strided_box_that_begins_past_32_bits_names_the_right_elements() -> None:
    # The last quarter of the columns of the last expert.
    column = GIANT.shape[2] * 3 // 4
    (whole,) = boxes.of_slice(GIANT.shape, (2, 0, column), (1, GIANT.shape[1], GIANT.shape[2] // 4))
    assert whole.start == (2 << 31) + column >= PAST_32_BITS
    pieces_of_it = list(boxes.cut(whole, 1 << 24))
    assert sum(piece.num_elements for _, piece in pieces_of_it) == whole.num_elements
    _, last = pieces_of_it[-1]
    index = np.array([0, last.run - 1, last.run, last.num_elements - 1], np.uint32)
    found = [last.start + int(at) for at in boxes.positions(last, index)]
    row = last.start // GIANT.shape[2]
    begin = row * GIANT.shape[2] + column
    assert found == [begin, begin + last.run - 1, begin + GIANT.shape[2], GIANT.num_elements - 1]


def test_sections_of_a_giant_tensor_are_checked_and_give_64_bit_indices(tmp_path: Path) -> None:
    old = np.zeros(1 << 16, np.uint16)
    new = old.copy()
    new[[3, 65_535]] = 7
    start = GIANT.num_elements - new.size
    encoded = codec.encode(old, new, start=start)
    assert encoded is not None
    dh = sum(statehash.mix((start + at) << 16 | 7) - statehash.mix((start + at) << 16) for at in (3, 65_535))
    assert encoded.dh == dh & statehash.MASK
    section = ManifestSection(
        object=0, offset=0, nbytes=len(encoded.data), xxh3=manifest.digest(encoded.data), encoding="planes",
        tensor=GIANT.name, start=start, num_elements=new.size, num_changed=2, dh=statehash.to_hex(encoded.dh),
    )  # fmt: skip
    template = delta_manifest({"norm": TensorSpec("norm", "BF16", (8,))})
    record = Manifest(
        **{
            **{name: getattr(template, name) for name in template.__struct_fields__},
            "model": model_digest([GIANT]),
            "objects": (
                ObjectRef(
                    key=manifest.object_key("run", THIS, 0, 0, XXH3), nbytes=len(encoded.data), xxh3=section.xxh3
                ),
            ),
            "sections": (section,),
            "tensors": (
                TensorState(
                    name=GIANT.name, dtype=GIANT.dtype, shape=GIANT.shape, h_before=statehash.to_hex(0),
                    h_after=section.dh,
                ),
            ),
        }
    )  # fmt: skip
    assert manifest.decode_manifest(manifest.encode(record), "run", THIS, "delta") == record

    reader = WeightSubscriber(MemoryStore(), "run", tmp_path / "reader")
    try:
        folder = tmp_path / "reader" / "spool" / str(THIS)
        folder.mkdir()
        (folder / Path(record.objects[0].key).name).write_bytes(encoded.data)
        index, values = reader._files._changed(GIANT, [(record, section)])
    finally:
        reader.close()
    assert index is not None
    assert values is None  # the copy says what is there
    assert index.dtype == np.int64
    assert index.tolist() == [start + 3, GIANT.num_elements - 1]


def test_a_section_that_ends_past_a_giant_tensor_is_refused() -> None:
    record = delta_manifest({GIANT.name: GIANT})
    *rest, last = record.sections
    shifted = ManifestSection(
        **{name: getattr(last, name) for name in last.__struct_fields__} | {"start": last.start + 1}
    )
    broken = Manifest(
        **{name: getattr(record, name) for name in record.__struct_fields__} | {"sections": (*rest, shifted)}
    )
    with pytest.raises(SectionCorrupt, match="reaches outside the tensor"):
        manifest.decode_manifest(manifest.encode(broken), "run", THIS, "delta")


def test_the_host_copy_of_a_235b_model_places_tensors_past_32_bits() -> None:
    specs = list(specs_of_235b().values())
    offsets = _offsets(specs)
    ends = sorted((offsets[spec.name], offsets[spec.name] + spec.nbytes) for spec in specs)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert ends[-1][1] == 470_187_269_120
    assert len(_header(specs)) % 8 == 0
