"""Ed25519 signatures of what the trainer says: keys, and who may have signed what.

A *seal* is the text of a signature with the key that made it.  What is signed is the kind of the document, the run it is
of, and the BLAKE3 digest of its bytes as they travel: a seal says nothing about another kind, run or byte.

    ed25519:KEY:SIGNATURE                          by the trainer's key
    ed25519:KEY:SIGNATURE:ISSUER:DELEGATION        by a key that ISSUER lets sign anchors, and nothing else

Keys and signatures are base64url without padding.  A reader pins public keys (:class:`PublicKeys`); delegates it knows by
what their issuer signed.  Nothing here says how new a document is: an old one is as authentic as on its day.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rose.errors import ConfigError, NotAuthentic

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_SEAL_CHARS = 512
MAX_KEYS = 64
_MAX_KEYS_CHARS = 1 << 16
DELEGATED = "anchor"
"""What a delegated key may sign."""
_DOMAIN = b"rose weights 1"
_KEY = r"[A-Za-z0-9_-]{43}"
_SIGNATURE = r"[A-Za-z0-9_-]{86}"
_PUBLIC = re.compile(rf"ed25519:({_KEY})")
_PRIVATE = re.compile(rf"ed25519-private:({_KEY})(?::({_KEY}):({_SIGNATURE}))?")
_SEAL = re.compile(rf"ed25519:({_KEY}):({_SIGNATURE})(?::({_KEY}):({_SIGNATURE}))?")


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key.  ``repr`` hides it; ``text`` is how it is kept.

    Args:
        private: 32 bytes, base64url.
        issuer: Of a delegated key: the public key that lets it sign anchors.
        delegation: The issuer's signature that says so.
    """

    private: str = field(repr=False)
    issuer: str = ""
    delegation: str = field(default="", repr=False)

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key from the system's random source."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(_text(Ed25519PrivateKey.generate().private_bytes_raw()))

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Raises ConfigError where ``text`` is no private key; the message does not show it."""
        found = _PRIVATE.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                "is not a private key of ROSE", field="publish_key", fix="rose tokens makes one"
            )
        private, issuer, delegation = found.groups(default="")
        return cls(private, issuer, delegation)

    @property
    def text(self) -> str:
        given = f":{self.issuer}:{self.delegation}" if self.delegation else ""
        return f"ed25519-private:{self.private}{given}"

    @property
    def public(self) -> str:
        """What readers pin; of a delegated key, its issuer's."""
        return f"ed25519:{self.issuer or self._own}"

    @property
    def _own(self) -> str:
        return _text(self._key().public_key().public_bytes_raw())

    @property
    def may_all(self) -> bool:
        """False of a delegated key."""
        return not self.delegation

    def delegate(self) -> SigningKey:
        """A new key that may sign anchors of this key's runs, and nothing else.

        Raises:
            ConfigError: This one is delegated itself.
        """
        if not self.may_all:
            raise ConfigError("is a delegated key, which can pass nothing on", field="publish_key")
        new = SigningKey.generate()
        given = self._key().sign(_message("delegate", DELEGATED, _bytes(new._own)))
        return SigningKey(new.private, self._own, _text(given))

    def seal(self, kind: str, run_id: str, data: bytes | bytearray | memoryview) -> str:
        """Sign a document.

        Raises:
            ConfigError: A delegated key was asked for something else than an anchor.
        """
        if not self.may_all and kind != DELEGATED:
            raise ConfigError(f"may sign anchors only, not a {kind}", field="publish_key")
        signature = _text(self._key().sign(_message(kind, run_id, data)))
        given = f":{self.issuer}:{self.delegation}" if self.delegation else ""
        return f"ed25519:{self._own}:{signature}{given}"

    def _key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(_bytes(self.private))


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Whose word is taken: base64url of each key, without the prefix."""

    keys: frozenset[str]

    @classmethod
    def parse(cls, text: str, *, what: str = "public_key") -> PublicKeys:
        """Keys as ``ed25519:...``, with spaces, commas or ends of lines between them; lines that begin with ``#`` are left out.

        Raises:
            ConfigError: None, too many, or something that is no key.
        """
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        found: set[str] = set()
        words = " ".join(lines).replace(",", " ").split()
        for word in words[:MAX_KEYS]:
            key = _PUBLIC.fullmatch(word)
            if key is None:
                # Not shown: it may be the private one.
                raise ConfigError(
                    f"word {words.index(word) + 1} is not of the form ed25519:KEY",
                    field=what,
                    fix="the line public_key of the trainer's token file has it",
                )
            found.add(key[1])
        if not 1 <= len(words) <= MAX_KEYS:
            raise ConfigError(f"must name 1 to {MAX_KEYS} keys", field=what)
        return cls(frozenset(found))

    @classmethod
    def load(cls, text: str, *, what: str = "public_key") -> PublicKeys:
        """As :meth:`parse`, or from the file of such lines whose path ``text`` is (it begins with ``/``, ``./``, ``../`` or ``~``).

        Raises:
            ConfigError: The file cannot be read; besides what :meth:`parse` raises.
        """
        if text.startswith(("/", "./", "../", "~")):
            try:
                with Path(text).expanduser().open() as file:
                    text = file.read(_MAX_KEYS_CHARS)
            except (OSError, UnicodeDecodeError, ValueError) as error:
                raise ConfigError(f"{text} cannot be read: {error}", field=what) from error
        return cls.parse(text, what=what)

    def check(
        self, kind: str, run_id: str, data: bytes | bytearray | memoryview, seal: str | None, *, name: str
    ) -> None:
        """``data`` is what a holder of one of these keys signed as ``kind`` of ``run_id``.

        Args:
            name: Of the document, for the message.

        Raises:
            NotAuthentic: It is not, and why.
        """
        if not seal:
            raise NotAuthentic(
                "is not signed",
                field=name,
                fix="the trainer signs with the key beside its token file (rose tokens --upgrade); for a store that nobody else can "
                "write to: weights.signed = false",
            )
        found = _SEAL.fullmatch(seal)
        if found is None:
            raise NotAuthentic("has a seal that cannot be read", field=name)
        key, signature, issuer, delegation = found.groups(default="")
        if delegation:
            if kind != DELEGATED:
                raise NotAuthentic("is signed by a delegated key, which may sign anchors only", field=name)
            if issuer not in self.keys:
                raise NotAuthentic(f"is signed for ed25519:{issuer}, which is not pinned here", field=name)
            if not _verify(issuer, delegation, _message("delegate", DELEGATED, _bytes(key))):
                raise NotAuthentic("is signed by a key to which nothing was delegated", field=name)
        elif key not in self.keys:
            raise NotAuthentic(
                f"is signed by ed25519:{key}, which is not pinned here",
                field=name,
                fix="if the trainer has a new key: weights.public_key",
            )
        if not _verify(key, signature, _message(kind, run_id, data)):
            raise NotAuthentic("is not what was signed", field=name)


def _message(kind: str, run_id: str, data: bytes | bytearray | memoryview) -> bytes:
    from blake3 import blake3

    # Neither a kind nor a run's name holds a NUL.
    return b"\0".join((_DOMAIN, kind.encode(), run_id.encode(), blake3(data).digest()))


def _verify(key: str, signature: str, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(_bytes(key)).verify(_bytes(signature), message)
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    return True


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
