"""Bearer tokens by role.

Every port of ROSE asks for a token.  A *token file* (TOML, mode 0600) holds one per role::

    agent = "..."    # agents and environments: the OpenAI routes, trajectories, rewards
    trainer = "..."  # leases batches, publishes versions
    node = "..."     # node agents: worker registry, heartbeats, engine control
    relay = "..."    # weight objects
    admin = "..."    # everything

``admin`` passes wherever another role does.  Tokens are compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from rose.errors import ConfigError, Unauthorized

ROLES = ("agent", "trainer", "node", "relay", "admin")
ENV_TOKEN_FILE = "ROSE_TOKEN_FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One secret per role.  ``repr`` hides them."""

    agent: str = field(repr=False)
    trainer: str = field(repr=False)
    node: str = field(repr=False)
    relay: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def generate(cls) -> Tokens:
        return cls(**{role: secrets.token_urlsafe(24) for role in ROLES})

    @classmethod
    def load(cls, path: Path | str | None = None) -> Tokens:
        """Read a token file; ``path=None`` takes the one named by ``ROSE_TOKEN_FILE``.

        Raises:
            ConfigError: No path given, file missing, a role missing, or a token under 16 characters.
        """
        path = path or os.environ.get(ENV_TOKEN_FILE)
        if not path:
            raise ConfigError(
                "no token file", field="token_file", fix=f"set {ENV_TOKEN_FILE}, or: rose tokens PATH"
            )
        try:
            table = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist", field="token_file", fix=f"rose tokens {path}"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} is not readable TOML: {error}", field="token_file") from error
        for role in ROLES:
            value = table.get(role)
            if not isinstance(value, str) or len(value) < 16:
                raise ConfigError(
                    f"{path} needs a string of 16 characters or more", field=f"token_file.{role}"
                )
        return cls(**{role: table[role] for role in ROLES})

    def save(self, path: Path) -> None:
        """Write the token file with mode 0600, from its first byte on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            for role in ROLES:
                file.write(f'{role} = "{getattr(self, role)}"\n')

    def check(self, authorization: str | None, *roles: str) -> str:
        """Return the role of an ``Authorization`` header value.

        Raises:
            Unauthorized: Missing, malformed, or of a role that is not in ``roles`` (nor admin).
        """
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() == "bearer" and given:
            for role in (*roles, "admin"):
                if hmac.compare_digest(given.strip().encode(), getattr(self, role).encode()):
                    return role
        raise Unauthorized(
            f"a bearer token of role {' or '.join(roles)} is needed",
            field="Authorization",
            fix="send the header 'Authorization: Bearer TOKEN'",
        )


def bearer(token: str) -> dict[str, str]:
    """The header that carries a token."""
    return {"Authorization": f"Bearer {token}"}
