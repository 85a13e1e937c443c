"""The two tiny models of the demo, made from a seed: no network, random weights, real formats.

:func:`ensure_models` returns two Hugging Face folders and makes the missing ones.  They are
*differently shaped* on purpose (layers, heads, head size, hidden size): two models whose KV
layouts agree would hide the mistakes that co-serving must not make.

- the **production model**, about 25 M parameters, so that one vLLM step costs 10-30 ms on a core;
- the **policy model**, about 0.6 M parameters, small enough to learn FrozenLake in minutes.

Both use one tokenizer: byte-level BPE without training data, so every text can be encoded, with
whole-word merges for :data:`SINGLE_TOKEN_WORDS` (the actions and a few words of the prompts).
A board cell is one letter and therefore one token.  The chat template is *prefix-stable*: a message
is ``<|role|>content<|end|>`` and nothing depends on later messages, so rendering ``messages[:k]``
with the generation prompt, then the sampled ids and ``<|end|>``, is a prefix of rendering
``messages[:k+1]``, token by token.

Invariants: the same recipe and seed give the same bytes; a folder is complete or absent (it is
written beside its place and renamed); a folder is never changed after that.

Heavy imports happen inside functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rose.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
"""Part of the cache key: raise it when the same recipe is to give other files."""

END, USER, ASSISTANT, SYSTEM, PAD = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)

SINGLE_TOKEN_WORDS = ("left", "down", "right", "up", "goal", "lake", "move", "step", "the", "and")
"""Words that are one token.  The first four are FrozenLake's actions, in gymnasium's order."""

VOCAB_SIZE = 320
"""Padded up from the tokens in use to a multiple of 64, which every engine tiles without padding."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MARKER = "rose_recipe.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """The shape of one Qwen3 model.  Head sizes must be among those of vLLM's CPU attention (32, 64, ...)."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    tie_embeddings: bool
    initializer_range: float = 0.02


PRODUCTION = ModelRecipe(
    name="production",
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    max_position=4096,
    tie_embeddings=False,
)

POLICY = ModelRecipe(
    name="policy",
    hidden_size=128,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    max_position=1024,
    tie_embeddings=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoModels:
    """Folders of the two models."""

    production: Path
    policy: Path


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/rose/models`` or ``~/.cache/rose/models``."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "rose" / "models"


def ensure_models(cache_dir: Path | None = None, *, seed: int = 0) -> DemoModels:
    """Make both demo models unless they are cached; about five seconds the first time.

    Raises:
        ConfigError: The cache folder cannot be written.
    """
    return DemoModels(
        production=ensure_model(PRODUCTION, cache_dir, seed=seed),
        policy=ensure_model(POLICY, cache_dir, seed=seed),
    )


def ensure_model(recipe: ModelRecipe, cache_dir: Path | None = None, *, seed: int = 0) -> Path:
    """Return the folder of ``recipe`` and ``seed``, making it first if it is missing.

    Safe to call from several processes at once: the first rename wins, and the contents are equal.
    """
    cache_dir = cache_dir or default_cache_dir()
    target = cache_dir / f"{recipe.name}-{model_key(recipe, seed=seed)}"
    if (target / _MARKER).is_file():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{recipe.name}-", dir=cache_dir))
    except OSError as error:
        raise ConfigError(f"{cache_dir} cannot be written: {error}", field="cache_dir") from error
    try:
        _write_model(recipe, seed, staging)
        sync_tree(staging)
        staging.chmod(0o755)  # mkdtemp gives 0700; another user's engine may read the cache
        try:
            staging.rename(target)
        except OSError:
            if not (target / _MARKER).is_file():  # not the race we know
                raise
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}", field="cache_dir") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def model_key(recipe: ModelRecipe, *, seed: int) -> str:
    """Digest of everything the files depend on."""
    described = {
        "format": FORMAT,
        "seed": seed,
        "recipe": dataclasses.asdict(recipe),
        "words": SINGLE_TOKEN_WORDS,
        "specials": SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "template": CHAT_TEMPLATE,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 byte tokens, the merges of :data:`SINGLE_TOKEN_WORDS`, the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in SINGLE_TOKEN_WORDS:
        for end in range(2, len(word) + 1):  # 'l'+'e', 'le'+'f', 'lef'+'t'
            pair = (word[: end - 1], word[end - 1])
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault(word[:end], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    for word in SINGLE_TOKEN_WORDS:
        if len(tokenizer.encode(word).ids) != 1:  # one word's merges have broken up another
            raise ConfigError(f"'{word}' is not a single token", field="SINGLE_TOKEN_WORDS")
    if tokenizer.get_vocab_size() > VOCAB_SIZE:
        raise ConfigError(f"{tokenizer.get_vocab_size()} tokens exceed {VOCAB_SIZE}", field="VOCAB_SIZE")
    return tokenizer


def _write_model(recipe: ModelRecipe, seed: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    end_id, pad_id = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_size,
        max_position_embeddings=recipe.max_position,
        tie_word_embeddings=recipe.tie_embeddings,
        initializer_range=recipe.initializer_range,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    if recipe.tie_embeddings:
        del tensors["lm_head.weight"]  # the same storage as the embedding; the format holds each tensor once
    # Written directly: `save_pretrained` draws progress bars, which would tear the demo's own display.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    # No sampling defaults here: an engine would apply them to requests that do not ask for any.
    GenerationConfig(eos_token_id=end_id, pad_token_id=pad_id).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.max_position,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    described = {"format": FORMAT, "seed": seed, **dataclasses.asdict(recipe)}
    (folder / _MARKER).write_text(json.dumps(described, indent=2) + "\n")


def sync_tree(folder: Path) -> None:
    """Make the files durable before the rename makes them visible."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
