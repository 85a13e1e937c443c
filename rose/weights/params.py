"""Settings of publishing and subscribing; plain dataclasses, so that the plugin may load them too."""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import ConfigError
from rose.weights.kernels import SEGMENT

_CASTS = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsParams:
    """How versions are cut and when they travel whole.

    Args:
        cast: Type that the engines hold floats in; fp32 masters are rounded to it.
        keep: Name patterns (shell globs: ``*.e_score_correction_bias``) of tensors that keep their own type.  One that no tensor
            has is warned of.
        anchor_every: A full copy is composed every so many versions, beside the deltas and the trainer; more often
            where room is short.
        compose: False: somebody else composes them (``rose weights compose``, with a key that may sign anchors alone), and the
            publisher takes those that it finds.
        raw_density: A fragment goes raw above this share of changed elements: the encoder's cost grows with
            changes, and from here on raw is cheaper to make (measured break-even 15-25 %).
        anchor_density: The whole version is published as an anchor above this share.
        chain_fraction: A reader takes the anchor when the chain costs more than this share of a full copy.
        fragment_elements: Elements per section; bounds memory, a multiple of 65,536.
        bucket_bytes: Bytes per object, about.
        num_threads: Threads that encode (publisher) or decode, write and hash (subscriber).
        collect: Delete versions that no reader can need, and more of them when the store is full.
        check_replicas: Compare what several ranks of a trainer hold, some of it at each publish, and refuse to publish copies
            that drifted apart.
        pull_ahead: A reader pulls objects before the head names them, where the store tells of them.
        max_store_bytes: What the run may take at the store, at least two full copies; None: what the store has.  Above
            it versions go that only leases keep, and anchors come sooner.
    """

    cast: str = "BF16"
    keep: tuple[str, ...] = ()
    anchor_every: int = 20
    compose: bool = True
    raw_density: float = 0.20
    anchor_density: float = 0.25
    chain_fraction: float = 0.8
    fragment_elements: int = 1 << 24
    bucket_bytes: int = 64 << 20
    num_threads: int = 1
    collect: bool = True
    check_replicas: bool = True
    pull_ahead: bool = True
    max_store_bytes: int | None = None

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> ConfigError:
            return ConfigError(f"must be {rule}, got {getattr(self, name)!r}", field=f"weights.{name}")

        if isinstance(self.keep, str) or not all(isinstance(pattern, str) for pattern in self.keep):
            raise refuse("keep", "a tuple of name patterns")
        if self.cast not in _CASTS:
            raise refuse("cast", f"one of {', '.join(_CASTS)}")
        for name in ("raw_density", "anchor_density", "chain_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise refuse(name, "within 0..1")
        for name in ("anchor_every", "num_threads"):
            if getattr(self, name) < 1:
                raise refuse(name, "at least 1")
        if self.max_store_bytes is not None and self.max_store_bytes < 1:
            raise refuse("max_store_bytes", "at least 1")
        if not 0 < self.fragment_elements <= 1 << 26 or self.fragment_elements % SEGMENT:
            raise refuse("fragment_elements", f"a multiple of {SEGMENT}, at most 2**26")
        if not 1 << 10 <= self.bucket_bytes <= 1 << 29:
            raise refuse("bucket_bytes", "within 1 KiB..512 MiB")


def given(params: WeightsParams | None) -> WeightsParams:
    """The settings of who was given ``params``.

    Raises:
        ConfigError: They are something else.
    """
    if params is not None and not isinstance(params, WeightsParams):
        raise ConfigError(f"must be WeightsParams, got {type(params).__name__}", field="params")
    return params or WeightsParams()
