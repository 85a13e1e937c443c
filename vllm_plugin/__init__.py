"""ROSE's vLLM plugin: inert unless ``ROSE_ROLE`` says otherwise.

vLLM calls :func:`register` in every process it starts.  Without ``ROSE_ROLE`` it returns at once:
nothing is imported, nothing is patched, unless the server is started with ``--weight-transfer-config '{"backend": "rose"}'``: then
that name is made known, and on CPU weights stay where they can be written (:func:`vllm_plugin.weights.stand_alone`).  With it:

``ROSE_ROLE=serving``
    Production.  The engine lends KV memory and publishes its slack.  Anything that goes wrong here
    (unknown version, unsupported configuration, an exception in one of our hooks) leaves vLLM as
    it would be without us, with one log line and ``phase = off`` in ``serving.lease``.
``ROSE_ROLE=rollout``
    The rollout engine.  It runs only while production has slack, inside a memory budget that may
    shrink at any moment.  What goes wrong here stops the engine: its node agent restarts it.

``ROSE_DIR`` names the node directory that both engines and the node agent share.
"""

from __future__ import annotations

import logging

from vllm_plugin.roles import role, weights_asked


def register() -> None:
    """Entry point of ``vllm.general_plugins``.  Idempotent; called in every process of vLLM."""
    wanted = role()
    if wanted is None:
        if weights_asked():
            from vllm_plugin.weights import stand_alone

            stand_alone()
        return
    try:
        from vllm_plugin import compat

        if wanted == "rollout":
            from vllm_plugin.orphans import end_with_guard

            end_with_guard()
        compat.switch_on(wanted)
    except Exception:
        if wanted == "rollout":
            raise
        # vLLM passes what a plugin raises on to its caller: production would not start.
        logging.getLogger("vllm.rose").exception("ROSE is off, serving goes on as without it")
