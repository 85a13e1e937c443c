"""Answers that an environment allows, as tokens of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from rose.errors import ConfigError
from rose.train.rollout import single_token_ids


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"<unk>": 0, "left": 1}, r"'right' is no token of .*: it is read as <unk>"),
        ({"<unk>": 0, "left": 1, "LEFT": 2}, r"'LEFT' is the same token in .* as 'left'"),
    ],
)
def test_answers_must_be_different_tokens_that_the_model_knows(
    tmp_path: Path, vocabulary: dict[str, int], message: str
) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=message):
        single_token_ids(tmp_path, ["left", "LEFT" if "LEFT" in vocabulary else "right"])
