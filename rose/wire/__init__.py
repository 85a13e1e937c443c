"""What ROSE's daemons say to each other over HTTP: one definition of each body, for both sides.

A body is a :class:`msgspec.Struct`.  From it follow how it is sent, how it is read and what is refused (:mod:`rose.wire.reading`), and
how ``/openapi.json`` describes it (:mod:`rose.wire.schema`).  A new field is one line here, and whoever sets and reads it.

- :mod:`rose.wire.workers`: node agents register engines and send heartbeats.
- :mod:`rose.wire.samples`: environments begin and finish trajectories, trainers lease batches and publish versions.
- :mod:`rose.wire.answers`: what environments, trainers and operators are answered.
- :mod:`rose.wire.errors`: every refusal, in OpenAI's shape.
- :mod:`rose.wire.http_client`, :mod:`rose.wire.pool`: the two ways to ask, for control and for turns.

Chat bodies are not here: they are OpenAI's, and passed through (:mod:`rose.scheduler.openai_api`).
"""
