"""A worker whose pager can be held: loaded with ``--worker-extension-cls``, called over vLLM's developer route."""

from __future__ import annotations

from typing import Any


class HeldPager:
    """Adds a call to the worker; changes nothing until it is made."""

    rank: int

    def hold_pager(self, rank: int, held: bool) -> bool:
        """On ``rank``, let the pager report as ever, but move no page while it is ``held``."""
        pager: Any = self.rose_pager  # type: ignore[attr-defined]
        if self.rank != rank:
            return False
        if held:
            pager.agree = lambda *_: None
        else:
            vars(pager).pop("agree", None)
        return True
