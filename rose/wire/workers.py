"""Node agents to rose-scheduler: ``POST /workers`` and ``POST /workers/{id}/heartbeat``.

A fleet is upgraded host by host, so both ends let through what they do not know: a newer node's report is read without what is new in
it (:class:`rose.wire.reading.Reports` counts that and names it once), and answers are read in the same way.  What is added to one of
these has a default, for an older node does not send it.  Bodies of clients are strict: there an unknown field is a mistake.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from rose.wire.types import (
    Count,
    LongName,
    Name,
    Positive,
    RunName,
    Seconds,
    Share,
    ShortName,
    Slack,
    SomeSeconds,
    VersionText,
)

MAX_COPIES = 64
"""More than these a node does not name."""


class Registration(Struct, kw_only=True, omit_defaults=True):
    """An engine that may take turns, once per incarnation of it."""

    worker_id: ShortName
    """By which its node calls it, from start to start."""
    url: LongName
    """``http://host:port``, as the scheduler reaches it."""
    tier: Literal["dedicated", "harvested", "borrowed"]
    model: Name
    max_model_len: Annotated[int, Meta(ge=2, le=2**24)]
    """Longest prompt and output together, in tokens."""
    incarnation: ShortName
    """Another one after each start of the engine."""
    engine_token: LongName | None = None
    """What the scheduler shows the engine; None: nothing is asked for."""
    vocab_size: Annotated[int, Meta(ge=1, le=2**32)] | None = None
    """With it a token id that the model does not know is refused before any engine sees it."""
    cap: Positive | None = None
    """Turns at once; None: by tier."""
    max_num_seqs: Positive | None = None
    """What is beyond it waits in the scheduler, where it can still go to whoever is free first."""
    logprobs_mode: ShortName | None = None
    """vLLM's ``--logprobs-mode``: of which distribution its log-probs are."""
    host: ShortName | None = None
    """The node's, as it calls itself: two hosts with one ``worker_id`` are told apart also where their ``url`` was copied as well."""


class Registered(Struct, kw_only=True):
    """What a registration is answered with."""

    worker_id: str = ""


class Heartbeat(Struct, kw_only=True, omit_defaults=True):
    """Twice a second."""

    incarnation: ShortName
    """As registered."""
    seq: Count
    """Counts up; an older one that arrives late is passed over."""
    state: Literal["ready", "starting", "stopping"]
    """Of the engine."""
    version: VersionText | None = None
    """Of the weights in force; None: none yet."""
    run: RunName | None = None
    """Whose they are, by the engine's own word; None: nobody has said, and it serves only jobs that do not name a run."""
    follows: RunName | None = None
    """Whose weights the node fetches; before the first of them arrived, too."""
    kv_budget_tokens: Count | None = None
    """KV memory that the engine has now; None: unknown."""
    kv_used_tokens: Count | None = None
    """Of it in use; None: unknown."""
    running: Count = 0
    """Requests in the engine's steps."""
    waiting: Count = 0
    """Requests in the engine's queue."""
    num_preemptions: Count = 0
    """That it made itself for want of KV memory, since it started."""
    decoded_tokens: Count | None = None
    """Sampled by the engine since it started; tells how far turns have come that are not streamed."""
    gated: bool = False
    """No step runs now, for production's sake."""
    commit_s: Seconds | None = None
    """What the last change of the run took here, measured, besides the pull; None: there was none since the node started."""
    pull_s: Seconds | None = None
    """What the last policy took to arrive of which this host had no copy."""
    num_switches: Count = 0
    """Changes of the run since the node started."""
    copies: Annotated[list[RunName], Meta(max_length=MAX_COPIES)] = field(default_factory=list)
    """Runs whose policy lies on this host: to go over to one of them takes no pull."""
    lent_s: Seconds | None = None
    """Of a borrowed device: how much longer its owner leaves it, from now.  Seconds and no time of day: two machines have two clocks.
    None: it is not lent."""
    reclaim_seq: Count = 0
    """How often memory was given back with turns in it."""
    slack_s: Slack | None = None
    """How much longer production's next step can wait; None: there is no production, or nobody said."""
    serving_use: Share = 0.0
    """Of production's KV memory."""
    slo_breaches: Count = 0
    """Requests and steps of production that missed their objective, since it started."""
    serving_ttft_p99_s: Seconds | None = None
    """Production's, to the first token; None: unknown."""
    serving_tpot_p99_s: Seconds | None = None
    """Production's, between tokens; None: unknown."""
    slo_ttft_s: SomeSeconds | None = None
    """Its objective; None: there is none."""
    slo_tpot_s: SomeSeconds | None = None
    """Its objective; None: there is none."""
    group: ShortName | None = None
    """Of the fleet's switch (:mod:`rose.policy.fleet_switch`)."""
    mode: Literal["off", "observe", "on"] | None = None
    """As the node's own operator has it."""
    held: bool | None = None
    """Does it lend nothing for the fleet's sake?  None: a node that knows no such order."""
    held_pages: Count | None = None
    """That its rollout engine holds."""
    lent_pages: Count | None = None
    """That it may hold; None: an older node does not say, as with the next three."""
    slo_breaches_while_lending: Count | None = None
    """Of ``slo_breaches``, those that were seen while ``held_pages`` was not 0, since the node started."""
    engine_kills: Count | None = None
    """Rollout engines that had to be killed, since the node started."""
    switched_off: ShortName | None = None
    """Why the node ended its lending by itself, until its operator switches it on again: ``slo``, ``audit``; None: it did not."""
    stranded_pages: Count | None = None
    """Of production's, wanted back from a holder that neither obeys nor dies; None: an older node does not say, as with the next."""
    plugin_errors: Count | None = None
    """That have switched ROSE off in production, until that is started again."""


class HeartbeatAnswer(Struct, kw_only=True):
    """What a heartbeat is answered with."""

    known: bool = True
    """False: register again."""
    active: bool = True
    """False: no job wants this device now, its engine is to give its memory back; production's is not touched."""
    job: Name | None = None
    """Which job it works for; None: any, or none."""
    run: RunName | None = None
    """Whose policy it is to have; None: as it is, unless ``own_run``."""
    own_run: bool = False
    """This scheduler assigns nobody (``provisioning.mode``): the node is to have the policy that its own configuration names, also
    where this scheduler, before it was restarted, had told it to have another's."""
    floor_run: RunName | None = None
    """The run that ``floor`` is of."""
    floor: VersionText | None = None
    """What the trainer of ``floor_run`` has published, by its own word: a store that names an older version has gone back."""
    held: bool = False
    """The fleet is switched off here: the node lends nothing, whatever its mode."""
