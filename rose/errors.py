"""Every error ROSE raises on purpose, in one tree.

::

    RoseError                      message is one line; `field` names what was wrong, `fix` what to do
    +-- ConfigError                a configuration value, command-line argument or the machine itself
    +-- RequestError               a peer sent us something we refuse        -> its `status` (4xx)
    |   +-- Unauthorized           401, token missing or of the wrong role
    |   +-- NotFound               404, unknown trajectory, worker, batch, object
    |   +-- Conflict               409 / 422, the same name with other content
    |   +-- TooLarge               413, a size limit
    |   +-- Gone                   410, cancelled or expired
    +-- CapacityError              429 queue full, 503 no capacity, 504 deadline; safe to retry where said
    +-- EngineError                502, an engine failed or answered nonsense
    |   +-- AgentHangs             a node agent is there and says nothing
    +-- LedgerError                a shared file is missing, torn, of another version, or of another writer
    +-- WeightsError               a weight object or version
    |   +-- SectionCorrupt         checksum or stream is wrong; safe to fetch again
    |   |   +-- NotAuthentic       not signed by a key that is pinned, or not what was signed
    |   +-- WrongBase              the delta is not for the state we hold; take the anchor
    |   |   +-- RolledBack         older than what is known to be published
    |   +-- VersionRefused         published twice, older attempt, or of another model
    +-- PolicyError                an event that the state does not allow; nothing was changed
    +-- TrainError                 a trainer, environment or reward failure that the run cannot absorb
    |   +-- RunInterrupted         ended from outside; started again, the run goes on from its checkpoint

Foreign exceptions are renamed where they enter ROSE, with ``raise ... from``; the layers above
handle only this tree.  ``str(error)`` is safe to show: it never contains a secret.
"""

from __future__ import annotations


class RoseError(Exception):
    """Base of the tree.

    Args:
        message: One line, no trailing dot, names the value that was wrong.
        field: Dotted name of the field, argument or file; None when there is none.
        fix: What the reader can do about it; None when the message says it.
    """

    status: int = 500
    code: str = "internal"
    exit_code: int = 2
    """Of a program that ends with this error."""

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.fix = fix

    def __str__(self) -> str:
        text = self.message if self.field is None else f"{self.field}: {self.message}"
        return text if self.fix is None else f"{text} ({self.fix})"


class ConfigError(RoseError):
    """A configuration value, a command-line argument, or a machine that cannot run it."""

    status = 400
    code = "config_error"


class RequestError(RoseError):
    """A request that we refuse; the HTTP shells answer ``status`` with ``code``."""

    status = 400
    code = "invalid_request"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        fix: str | None = None,
        status: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, field=field, fix=fix)
        if status is not None:
            self.status = status
        if code is not None:
            self.code = code


class Unauthorized(RequestError):
    """No token, or one whose role may not do this."""

    status = 401
    code = "unauthorized"


class NotFound(RequestError):
    """No trajectory, worker, batch or object has this name."""

    status = 404
    code = "not_found"


class Conflict(RequestError):
    """The name is used already, for something else."""

    status = 409
    code = "conflict"


class TooLarge(RequestError):
    """More than a limit lets through; ``field`` names the limit or the part."""

    status = 413
    code = "too_large"


class Gone(RequestError):
    """``reason``: why, in one word that a program can act on (``stale``); empty where there is no more to say."""

    status = 410
    code = "gone"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        fix: str | None = None,
        status: int | None = None,
        code: str | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message, field=field, fix=fix, status=status, code=code)
        self.reason = reason


class CapacityError(RequestError):
    """The request is fine, but not now.

    ``retry_after_s`` is None when a retry is pointless (a deadline has passed).
    """

    status = 503
    code = "no_capacity"

    def __init__(
        self,
        message: str,
        *,
        status: int = 503,
        code: str = "no_capacity",
        retry_after_s: float | None = 1.0,
        field: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message, field=field, fix=fix, status=status, code=code)
        self.retry_after_s = retry_after_s


class EngineError(RoseError):
    """An engine failed, did not answer, or answered nonsense."""

    status = 502
    code = "engine_failed"


class AgentHangs(EngineError):
    """A node agent is there and says nothing: it hangs, or no core is left to it."""

    exit_code = 3


class LedgerError(RoseError):
    """A file of the node directory is missing, damaged, of another version, or another process's."""

    code = "ledger"


class WeightsError(RoseError):
    """Weights that cannot be published, fetched or taken up."""

    status = 409
    code = "weights"


class SectionCorrupt(WeightsError):
    """A checksum is wrong, or a stream cannot be decoded; it may be fetched again."""

    code = "section_corrupt"


class NotAuthentic(SectionCorrupt):
    """It does not bear, or is not what bears, the signature of a key that is pinned here."""

    code = "not_authentic"


class WrongBase(WeightsError):
    """A delta does not start from the state that is there; the anchor helps."""

    code = "wrong_base"


class RolledBack(WrongBase):
    """A store names an older version than one that is known to be published."""

    code = "rolled_back"


class VersionRefused(WeightsError):
    """A version that is published with other weights, goes back, or is of an older attempt or another model."""

    code = "version_refused"


class PolicyError(RoseError):
    """An event that the state does not allow; nothing was changed."""

    code = "illegal_event"


class TrainError(RoseError):
    """A failure of a trainer, an environment or a reward that the run cannot go on with."""

    code = "train"


class RunInterrupted(TrainError):
    """Ended from outside; started again, the run goes on from its checkpoint."""

    code = "run_interrupted"
    exit_code = 75
    """``EX_TEMPFAIL`` of sysexits.h: a supervisor may start it again."""
