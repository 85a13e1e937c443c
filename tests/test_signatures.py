"""Seals: what they say, for whom, and that nothing else passes for one."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError, NotAuthentic
from rose.signatures import MAX_SEAL_CHARS, PublicKeys, SigningKey

KEY = SigningKey.generate()
PINNED = PublicKeys.parse(KEY.public)


def check(
    seal: str | None, kind: str = "head", run: str = "run", data: bytes = b"x", keys: PublicKeys = PINNED
) -> None:
    keys.check(kind, run, data, seal, name="it")


def test_what_the_pinned_key_signed_is_taken() -> None:
    for kind in ("head", "delta", "anchor"):
        check(KEY.seal(kind, "run", b"x"), kind)


@pytest.mark.parametrize(
    ("kind", "run", "data"), [("delta", "run", b"x"), ("head", "r", b"x"), ("head", "run", b"y")]
)
def test_a_seal_is_of_one_kind_one_run_and_one_content(kind: str, run: str, data: bytes) -> None:
    with pytest.raises(NotAuthentic, match="is not what was signed"):
        check(KEY.seal("head", "run", b"x"), kind, run, data)


def test_a_missing_seal_is_named_with_the_fix() -> None:
    with pytest.raises(NotAuthentic, match=r"is not signed.*weights\.signed = false"):
        check(None)


def test_another_key_is_named() -> None:
    other = SigningKey.generate()
    with pytest.raises(NotAuthentic, match=f"signed by {other.public}, which is not pinned"):
        check(other.seal("head", "run", b"x"))


def test_a_delegated_key_signs_anchors_and_nothing_else() -> None:
    delegated = SigningKey.parse(KEY.delegate().text)
    seal = delegated.seal("anchor", "run", b"x")
    assert len(seal) < MAX_SEAL_CHARS
    check(seal, "anchor")
    with pytest.raises(ConfigError, match="anchors only"):
        delegated.seal("head", "run", b"x")
    with pytest.raises(NotAuthentic, match="anchors only"):
        check(seal, "head")
    with pytest.raises(ConfigError, match="can pass nothing on"):
        delegated.delegate()


def test_a_delegation_is_of_one_key_by_one_key() -> None:
    mine, stranger = KEY.delegate(), SigningKey.generate().delegate()
    with pytest.raises(NotAuthentic, match="is not pinned"):
        check(stranger.seal("anchor", "run", b"x"), "anchor")
    borrowed = SigningKey(stranger.private, mine.issuer, mine.delegation)
    with pytest.raises(NotAuthentic, match="nothing was delegated"):
        check(borrowed.seal("anchor", "run", b"x"), "anchor")


@pytest.mark.parametrize(
    "seal", ["x", "ed25519:" + "A" * 43, "ed25519:" + "A" * 43 + ":" + "A" * 85, "\0", "ed25519:é:x"]
)
def test_nonsense_is_refused(seal: str) -> None:
    with pytest.raises(NotAuthentic, match="cannot be read"):
        check(seal)


def test_no_changed_character_of_a_seal_passes() -> None:
    seal = KEY.seal("head", "run", b"x")
    # The last character of a part holds bits that no byte has: they say nothing, and change nothing that is signed.
    loose = {seal.index(":", 8) - 1, len(seal) - 1}
    for place in sorted(set(range(len(seal))) - loose):
        other = "A" if seal[place] != "A" else "B"
        with pytest.raises(NotAuthentic):
            check(seal[:place] + other + seal[place + 1 :])


def test_keys_may_be_several_and_commented() -> None:
    other = SigningKey.generate()
    keys = PublicKeys.parse(f"# of the trainer\n{KEY.public}\n{other.public}, {KEY.public}\n")
    assert len(keys.keys) == 2
    check(other.seal("head", "run", b"x"), keys=keys)


@pytest.mark.parametrize(
    "text",
    ["", "# nothing", "ed25519:short", KEY.text, " ".join([KEY.public] * 100 + ["x"])],
    ids=["empty", "comment", "short", "private", "many"],  # keys are drawn anew: workers must agree on names
)
def test_what_is_no_public_key_is_refused_without_being_shown_whole(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PublicKeys.parse(text)
    assert KEY.private not in str(caught.value)


def test_a_private_key_is_in_no_text_of_ours() -> None:
    assert KEY.private not in repr(KEY)
    with pytest.raises(ConfigError) as caught:
        SigningKey.parse(KEY.text + "x")
    assert KEY.private not in str(caught.value)
