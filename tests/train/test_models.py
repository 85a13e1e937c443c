"""The demo's models: reproducible, complete or absent, and made for the environments and templates they meet."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rose.demo.models import POLICY, PRODUCTION, SINGLE_TOKEN_WORDS, build_tokenizer, ensure_model, model_key
from rose.errors import ConfigError
from rose.train.envs.frozenlake import ACTIONS

SMALL = replace(POLICY, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=1, num_kv_heads=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    first = contents(ensure_model(SMALL, tmp_path / "a", seed=1))
    again = contents(ensure_model(SMALL, tmp_path / "b", seed=1))
    other = contents(ensure_model(SMALL, tmp_path / "a", seed=2))
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]


def test_a_cached_model_is_not_touched(tmp_path: Path) -> None:
    folder = ensure_model(SMALL, tmp_path, seed=1)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(SMALL, tmp_path, seed=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_makers_at_the_same_time_end_with_one_model_and_no_leftovers(tmp_path: Path) -> None:
    found: list[Path] = []
    makers = [
        threading.Thread(target=lambda: found.append(ensure_model(SMALL, tmp_path, seed=3))) for _ in range(3)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(found) == 3
    assert [path.name for path in tmp_path.iterdir()] == [found[0].name]


def test_the_key_depends_on_shape_and_seed() -> None:
    keys = {model_key(POLICY, seed=0), model_key(POLICY, seed=1), model_key(PRODUCTION, seed=0)}
    assert len(keys) == 3


def test_the_two_models_differ_in_every_dimension_of_their_kv_cache() -> None:
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size"):
        assert getattr(POLICY, name) != getattr(PRODUCTION, name), name


def test_actions_and_board_cells_are_single_tokens() -> None:
    tokenizer = build_tokenizer()
    assert SINGLE_TOKEN_WORDS[:4] == ACTIONS
    for text in (*ACTIONS, *"SFHG@"):
        assert len(tokenizer.encode(text).ids) == 1, text
    assert len(tokenizer.encode("SFFF\nFHFH\nF@FH\nHFFG").ids) == 19


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    text = "upright leftover: übel 你好 \t\n{} \x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_chat_template_is_prefix_stable_around_sampled_ids(policy_model: Path) -> None:
    """What an engine saw and sampled is, token by token, how the next prompt begins."""
    tokenizer = AutoTokenizer.from_pretrained(policy_model)
    messages = [{"role": "system", "content": "Reach the goal."}]

    def render(generate: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=generate, tokenize=True, return_dict=False
        )

    for action in ACTIONS:
        messages.append({"role": "user", "content": "SFFF\nFHFH\nF@FH\nHFFG"})
        prompt = render(True)
        sampled = tokenizer.encode(action, add_special_tokens=False)
        assert len(sampled) == 1
        messages.append({"role": "assistant", "content": action})
        assert render(False) == [*prompt, *sampled, tokenizer.eos_token_id]


def test_the_engine_finds_no_sampling_defaults_it_could_apply_unasked(policy_model: Path) -> None:
    generation = json.loads((policy_model / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k"} & set(generation)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        ensure_model(SMALL, tmp_path / "file", seed=0)
    assert caught.value.field == "cache_dir"
