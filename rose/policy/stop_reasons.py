"""``stop_reason`` of a request that a rollout engine ended by itself (``finish_reason "abort"``); its tokens so far are good.

Written by the plugin, read by the turn book.
"""

from __future__ import annotations

RECLAIMED = "rose:kv_reclaimed"
"""It lost its KV memory: production wanted it back."""
TOO_LARGE = "rose:exceeds_budget"
"""The present KV budget can never hold it."""
OTHER_RUN = "rose:other_run"
"""The weights here are, or are about to be, another run's than the one that it was placed for."""
