"""Bearer tokens by role, and keys of single trajectories.

Every port of ROSE asks for a token.  A *token file* (TOML; of the user who reads it, mode 0600) holds one per role::

    agent = "..."        # may chat, in any trajectory or in none
    environment = "..."  # also begins trajectories, sets their rewards, cancels, lists and reads them
    trainer = "..."      # leases batches, publishes versions
    node = "..."         # node agents: worker registry, heartbeats, engine control
    relay = "..."        # reads weight objects, and holds what it reads
    publish = "..."      # also writes and deletes them, and moves a run's head
    admin = "..."        # everything
    secret = "..."       # no token: trajectory keys are made with it
    public_key = "..."   # no secret either: whose signed weights are taken (rose/signatures.py)

The private half of ``public_key`` is in a file of its own beside this one, ``tokens.key`` beside ``tokens.toml``, with the same mode
and owner.  Whoever has it chooses the weights of every engine; only the trainer needs it.

``admin`` passes wherever another role does.  Tokens are compared in constant time and never logged.

A file may have some of them only: a program that is broken into gives away what it was given.  :data:`PARTS` says who needs what, and
``rose tokens FILE --split FOLDER`` writes a file for each.

A *trajectory key* names one trajectory and chats in it: what an agent is given that must not touch its own reward.  It is
``rose-ID.SEAL``, where the seal is an HMAC of the id under ``secret``: whoever has the token file makes the same keys, and
nobody keeps them.

A file from before there were environments has no ``environment`` and no ``secret``: the agent's token then passes for both
roles, and the secret is derived from the other tokens.  One from before weights were signed has no ``publish``: the relay's token passes
for it, and no ``public_key``.  ``rose tokens FILE --upgrade`` adds what is missing.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rose.errors import ConfigError, LedgerError, Unauthorized
from rose.private_dir import require_own
from rose.signatures import SigningKey

ROLES = ("agent", "environment", "trainer", "node", "relay", "publish", "admin")
ENV_TOKEN_FILE = "ROSE_TOKEN_FILE"
PARTS = {
    "scheduler": ("agent", "environment", "trainer", "node", "admin", "secret"),
    "relay": ("relay", "publish", "public_key"),
    "node": ("node", "relay", "public_key"),
    "train": ("environment", "trainer", "publish", "public_key", "publish_key"),
}
"""What each program of a fleet needs of the file."""
_IN_FILE = (*ROLES, "secret", "public_key")
_NAMES = (*_IN_FILE, "publish_key")
KEY_SUFFIX = ".key"
"""Of the file beside a token file that has ``publish_key``."""
_OLD_ROLES = ("agent", "trainer", "node", "relay", "admin")
_MIN_CHARS = 16
_KEY = "rose-"
_SEAL_BYTES = 24
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One token per role, and the secret of trajectory keys; empty: not in the file, and nobody's.  ``repr`` hides them."""

    agent: str = field(repr=False)
    environment: str = field(repr=False)
    trainer: str = field(repr=False)
    node: str = field(repr=False)
    relay: str = field(repr=False)
    publish: str = field(default="", repr=False)
    admin: str = field(repr=False)
    secret: str = field(repr=False)
    public_key: str = ""
    publish_key: str = field(default="", repr=False)
    """As :class:`rose.signatures.SigningKey` reads it."""

    @classmethod
    def generate(cls) -> Tokens:
        """New tokens for all roles, and a new key to sign weights with, from the system's random source."""
        key = SigningKey.generate()
        tokens = {name: secrets.token_urlsafe(24) for name in (*ROLES, "secret")}
        return cls(**tokens, public_key=key.public, publish_key=key.text)

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        needs: Sequence[str] = _IN_FILE,
        *,
        key_file: Path | None = None,
    ) -> Tokens:
        """Read a token file; ``path=None`` takes the one named by ``ROSE_TOKEN_FILE``.

        Args:
            needs: Roles (and ``secret``, ``public_key``) that have to be in it.  ``publish_key`` is read where it is named here.
            key_file: Where ``publish_key`` is; None: beside the token file.

        Raises:
            ConfigError: No path given, file missing, not ours alone, a role missing, or a token under 16 characters.
        """
        path = path or os.environ.get(ENV_TOKEN_FILE)
        if not path:
            raise ConfigError(
                "no token file", field="token_file", fix=f"set {ENV_TOKEN_FILE}, or: rose tokens PATH"
            )
        text = _read_own(path, "token_file", f"rose tokens {path}")
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not readable TOML: {error}", field="token_file") from error
        if "publish" in needs and "relay" in table:
            table.setdefault("publish", table["relay"])
        is_old = all(role in table for role in _OLD_ROLES)
        for name in _IN_FILE:
            value = table.get(name)
            wanted = name in needs and not (is_old and name not in _OLD_ROLES)
            if (value is not None or wanted) and (not isinstance(value, str) or len(value) < _MIN_CHARS):
                raise ConfigError(
                    f"{path} needs a string of {_MIN_CHARS} characters or more",
                    field=f"token_file.{name}",
                    # A file that --upgrade helps has all old roles and never comes here: this is one program's part.
                    fix=None
                    if value is not None
                    else "this is one program's part, and not this one's: where the whole file is, "
                    "rose tokens FILE --split FOLDER writes each program's",
                )
        if is_old:
            table.setdefault("environment", table["agent"])
            table.setdefault("secret", _derived([table[role] for role in _OLD_ROLES]))
        key = read_key(key_file or key_beside(path)).text if "publish_key" in needs else ""
        return cls(**{name: table.get(name, "") for name in _IN_FILE}, publish_key=key)

    def only(self, names: Sequence[str]) -> Tokens:
        """These, and no others."""
        return replace(self, **{name: "" for name in _NAMES if name not in names})

    @property
    def names(self) -> tuple[str, ...]:
        """Which there are."""
        return tuple(name for name in _NAMES if getattr(self, name))

    @property
    def has_environment(self) -> bool:
        """Whether rewards need another token than chatting does."""
        return not self.agent or self.environment != self.agent

    @property
    def has_publish(self) -> bool:
        """Whether weights are written with another token than they are read with."""
        return not self.relay or self.publish != self.relay

    def upgraded(self) -> Tokens:
        """With tokens of their own for environments and for publishing, and a key; all others, and the keys made so far, stay."""
        new: dict[str, str] = {}
        if not self.has_environment:
            new["environment"] = secrets.token_urlsafe(24)
        if self.relay and not (self.publish and self.has_publish):
            new["publish"] = secrets.token_urlsafe(24)
        if not self.public_key:
            key = SigningKey.generate()
            new |= {"public_key": key.public, "publish_key": key.text}
        return replace(self, **new)

    def save(self, path: Path) -> None:
        """Write the token file, and the key beside it where there is one, each with mode 0600 from its first byte on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f'{name} = "{getattr(self, name)}"\n' for name in self.names if name != "publish_key"]
        write_own(path, "".join(lines))
        if self.publish_key:
            write_own(key_beside(path), key_text(self.publish_key))

    def check(self, authorization: str | None, *roles: str) -> str:
        """Return the role of an ``Authorization`` header value.

        Raises:
            Unauthorized: Missing, malformed, or of a role that is not in ``roles`` (nor admin).
        """
        given = _bearer_of(authorization)
        if given:
            for role in (*roles, "admin"):
                if hmac.compare_digest(given, getattr(self, role).encode()):
                    return role
        raise Unauthorized(
            f"a bearer token of role {' or '.join(roles)} is needed",
            field="Authorization",
            fix="send the header 'Authorization: Bearer TOKEN'",
        )

    def key_of(self, trajectory_id: str) -> str:
        """The key that chats in this trajectory and does nothing else.  To be shown to whoever began it, and to nobody else.

        Raises:
            ConfigError: There is no secret to make it with.
        """
        if not self.secret:
            raise ConfigError("has no secret to make keys with", field="token_file.secret")
        return f"{_KEY}{trajectory_id}.{self._seal(trajectory_id.encode())}"

    def trajectory_of(self, authorization: str | None) -> str | None:
        """The id of the trajectory whose key an ``Authorization`` header carries; None where it carries none."""
        given = _bearer_of(authorization)
        if not self.secret or not given.startswith(_KEY.encode()):
            return None
        name, _, seal = given[len(_KEY) :].rpartition(b".")
        return name.decode() if hmac.compare_digest(seal, self._seal(name).encode()) else None

    def _seal(self, trajectory_id: bytes) -> str:
        whole = hmac.digest(self.secret.encode(), b"trajectory key\0" + trajectory_id, "sha256")
        return base64.urlsafe_b64encode(whole[:_SEAL_BYTES]).decode()


def key_beside(path: Path | str) -> Path:
    """Where the private key that belongs to a token file is.

    Raises:
        ConfigError: The token file itself has that name.
    """
    found = Path(path).with_suffix(KEY_SUFFIX)
    if found == Path(path):
        raise ConfigError(f"{path} ends as the file of its key does", field="token_file", fix="name it .toml")
    return found


def key_text(publish_key: str) -> str:
    """What the file of a private key says."""
    kind = "sign the weights that every engine takes"
    if not SigningKey.parse(publish_key).may_all:
        kind = "sign anchors, full copies of versions that the trainer published"
    return f"# Who has this file can {kind}.\n{publish_key}\n"


def read_key(path: Path) -> SigningKey:
    """The private key in a file of ours that nobody else may read.

    Raises:
        ConfigError: Missing, open to others, or no key.
    """
    name = "publish_key"
    text = _read_own(
        path,
        name,
        "copy it from where `rose tokens` made it; a token file without public_key gets both by rose tokens --upgrade FILE; where nobody "
        "else can write to the store, weights.signed = false goes without",
    )
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) != 1:
        raise ConfigError(f"{path} holds {len(lines)} keys, not one", field=name)
    try:
        return SigningKey.parse(lines[0])
    except ConfigError as error:
        raise ConfigError(f"{path} {error.message}", field=name, fix=error.fix) from None


def _read_own(path: Path | str, field: str, fix: str) -> str:
    """The text of a file that is this user's alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            require_own(descriptor, path)
            return file.read(_MAX_FILE_BYTES).decode()
    except LedgerError as error:
        raise ConfigError(f"{path} {error.message}", field=field, fix=error.fix) from None
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", field=field, fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field=field) from error


def write_own(path: Path, text: str) -> None:
    """Write a file with mode 0600, from its first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)


def _derived(tokens: list[str]) -> str:
    """A secret for a file without one.  From all of its tokens: whoever was given one of them cannot guess the others."""
    return hmac.digest(b"trajectory secret", "\0".join(tokens).encode(), "sha256").hex()


def _bearer_of(authorization: str | None) -> bytes:
    """The token in an ``Authorization`` header; empty where there is none.  What a peer sends need not be text."""
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def bearer(token: str) -> dict[str, str]:
    """The header that carries a token."""
    return {"Authorization": f"Bearer {token}"}
