"""``rose relay`` and ``rose weights ls | verify | diff | compose | gc``; mounted by :mod:`rose.cli`."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rose.auth import Tokens, read_key
from rose.errors import CapacityError, ConfigError, NotAuthentic, NotFound, RoseError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys, SigningKey
from rose.units import format_bytes
from rose.weights import composer, manifest, retention, sealed, stored_manifests, upkeep
from rose.weights.file_store import FileStore
from rose.weights.manifest import Head, Kind, Manifest
from rose.weights.params import WeightsParams
from rose.weights.spec import TensorSpec
from rose.weights.store import ObjectStore
from rose.weights.stores import open_store
from rose.wire.hosts import in_url

app = typer.Typer(help="Look at published weight versions.", no_args_is_help=True, add_completion=False)
relay_app = typer.Typer(add_completion=False)
_ABOVE_TIMEOUT_S, _ABOVE_PATIENCE_S = 10.0, 3.0  # readers here have other addresses to go to
_log = logging.getLogger(__name__)
UNCHECKED = "none"
_MOST_RUNS = 20
_WAIT_S = 30.0

TokenFile = Annotated[
    Path | None, typer.Option(help="Tokens by role (rose tokens PATH); default: $ROSE_TOKEN_FILE.")
]
Relay = Annotated[
    str | None, typer.Option("--relay", help="URL of a relay, or of any store: s3://..., file://..., ...")
]
Folder = Annotated[
    Path | None, typer.Option("--directory", help="Folder of a relay or file store, read in place.")
]
PublicKey = Annotated[
    str | None,
    typer.Option(
        help="Whose signatures count, as ed25519:KEY; none: nobody's, nothing is checked; default: public_key of the token file, where there is one."
    ),
]
RunId = Annotated[str, typer.Argument(help="The run's name.")]


@relay_app.command()
def relay(
    directory: Annotated[Path, typer.Option(help="Where objects are kept; made if missing.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks one.")] = 8470,
    token_file: TokenFile = None,
    public_key: PublicKey = None,
    max_object_mib: Annotated[int, typer.Option(min=1, max=1024, help="Largest object.")] = 1024,
    max_total_gib: Annotated[
        float | None, typer.Option(min=0.001, help="All objects together; default: what the disk holds.")
    ] = None,
    fsync: Annotated[bool, typer.Option(help="Survive a restart of the machine; off for tmpfs.")] = True,
    upstream: Annotated[
        str | None,
        typer.Option(
            help="Keep copies of another store's objects: the relay above, or several with commas between them, the nearest first."
            " The folder is a cache then; default size: half of what its disk has free."
        ),
    ] = None,
) -> None:
    """The weight relay: versioned objects over HTTP, from the trainer to the nodes.

    One relay serves a cluster.  For more, or over a slow link, run a tree: each further relay names the one above it with --upstream,
    pulls every object once and serves it to its own readers.

    The token of role [bold]relay[/bold] reads, that of role [bold]publish[/bold] writes. Heads that no pinned key signed are refused; without a
    public key all are taken, and only the nodes check. A relay with --upstream passes on what it is given.
    """
    from rose.weights import relay as relays
    from rose.weights.pull_through import PullThroughRelay

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tokens = Tokens.load(token_file, ["relay", "publish"] if upstream is None else ["relay"])
    trusted = None if upstream is not None else _pinned(tokens, public_key)
    total_bytes = None if max_total_gib is None else int(max_total_gib * (1 << 30))

    def make() -> relays.Relay:
        files = FileStore(
            directory,
            max_object_bytes=max_object_mib << 20,
            max_total_bytes=None if upstream else total_bytes,
            durable=fsync and upstream is None,
        )
        if upstream is None:
            return relays.Relay(files, tokens, trusted)
        limit = total_bytes or files.total_bytes + shutil.disk_usage(directory).free // 2
        above = open_store(upstream, tokens.relay, timeout_s=_ABOVE_TIMEOUT_S, patience_s=_ABOVE_PATIENCE_S)
        return PullThroughRelay(files, tokens, above, limit, name=upstream)

    source = "" if upstream is None else f", copies of {upstream}"
    relays.run_relay(
        make,
        host=host,
        port=port,
        started=lambda taken: typer.echo(
            f"relay at http://{in_url(host)}:{taken}, objects in {directory}{source}"
        ),
    )


def _pinned(tokens: Tokens, public_key: str | None) -> PublicKeys | None:
    """Whose heads a relay takes; None: anybody's.  Says what the token file leaves open."""
    if not tokens.has_publish:
        _log.warning("whoever may read may write: the token file has no publish (rose tokens FILE --upgrade)")
    if public_key == UNCHECKED:
        return None
    if public_key is None and not tokens.public_key:
        _log.warning(
            "heads are not checked here: the token file has no public_key (rose tokens FILE --upgrade)"
        )
        return None
    return PublicKeys.parse(public_key or tokens.public_key)


def relay_main() -> None:
    """Entry point of ``rose relay``."""
    relay_app()


@app.command("ls")
def list_versions(
    run_id: RunId,
    relay: Relay = None,
    directory: Folder = None,
    token_file: TokenFile = None,
    public_key: PublicKey = None,
) -> None:
    """List the versions of a run, oldest first; the head is marked."""
    store = _open(relay, directory, token_file, public_key)
    head = store.get_head(run_id)
    head_version = None if head is None else head.identity
    versions = list(manifest.versions_in(store.list(f"{run_id}/"), run_id))
    if not versions and head is None:
        raise _no_version(store, run_id)
    typer.echo(f"{'version':>12}  {'kind':<7} {'from':>10}  {'sent':>10} {'dense':>10}  {'changed':>8}  step")
    for identity in versions:
        mark = " <- head" if identity == head_version else ""
        if head_version is None or identity > head_version:
            mark = " (begun, not the head yet)"
        damage: list[str] = []
        records = _manifests(store, run_id, identity, damage)
        for record in records:
            base = "-" if record.base is None else str(record.base.identity)
            step = "-" if record.step is None else str(record.step)
            typer.echo(
                f"{identity!s:>12}  {record.kind:<7} {base:>10}  {format_bytes(record.bytes_sent):>10}"
                f" {format_bytes(record.bytes_dense):>10}  {record.density:>8.3%}  {step}{mark}"
            )
        for problem in damage:
            typer.echo(f"{identity!s:>12}  damaged: {problem}{mark}")
        if not records and not damage:
            typer.echo(f"{identity!s:>12}  incomplete{mark}")


@app.command()
def verify(
    run_id: RunId,
    relay: Relay = None,
    directory: Folder = None,
    token_file: TokenFile = None,
    public_key: PublicKey = None,
) -> None:
    """Check every object of every version, then rebuild the head from its anchor and prove its state hashes.

    The head is rebuilt below TMPDIR (/tmp where it is not set): a folder on a disk with room for 2.2 times the model, and no tmpfs.
    """
    from rose.weights.subscriber import WeightSubscriber

    store = _open(relay, directory, token_file, public_key)
    num_bad = 0
    _require_versions(store, run_id)
    for identity in manifest.versions_in(store.list(f"{run_id}/"), run_id):
        damage: list[str] = []
        records = _manifests(store, run_id, identity, damage)
        num_bad += len(damage)
        for problem in damage:
            typer.echo(f"{identity!s:>12}  {problem}")
        for record in records:
            with _waiting(f"checking {identity}, {record.kind}") as say:
                problem = _check_objects(store, record, say)
            num_bad += problem is not None
            typer.echo(f"{identity!s:>12}  {record.kind:<7} {problem or 'ok'}")
    with tempfile.TemporaryDirectory(prefix="rose-verify-") as scratch:
        subscriber = WeightSubscriber(store, run_id, scratch)
        try:
            with _waiting(f"rebuilding the head in {scratch}"):
                version = subscriber.poll(0.0)
                damaged = subscriber.scan() if version is not None else []
            if version is None:
                typer.echo("no version is published")
            else:
                typer.echo(f"{version} rebuilt; {len(subscriber.state())} state hashes prove it")
            num_bad += len(damaged)
        except CapacityError as error:
            if error.status != 507 or error.field != "weights.directory":
                raise
            raise ConfigError(
                error.message.partition(";")[0],
                field="TMPDIR",
                fix="TMPDIR=FOLDER rose weights verify ..., on a disk: the head is rebuilt there",
            ) from error
        except RoseError as error:
            num_bad += 1
            typer.echo(f"head cannot be rebuilt: {error}")
        finally:
            subscriber.close()
    if num_bad:
        raise typer.Exit(1)


@app.command()
def diff(
    run_id: RunId,
    first: Annotated[str, typer.Argument(help="A version, for example 1.3.")],
    second: Annotated[str | None, typer.Argument(help="A later one; default: the head.")] = None,
    relay: Relay = None,
    directory: Folder = None,
    token_file: TokenFile = None,
    public_key: PublicKey = None,
    limit: Annotated[int, typer.Option(min=1, help="Tensors shown, most changed first.")] = 30,
) -> None:
    """What changed between two versions, tensor by tensor: from their manifests, without fetching weights.

    A weight that changed in several of the versions between is counted once for each, so counts over more than
    one version are upper bounds.
    """
    store = _open(relay, directory, token_file, public_key)
    begin = WeightVersion.parse(first, field="first")
    head = store.get_head(run_id)
    if head is None:
        raise _no_version(store, run_id)
    end = head.identity if second is None else WeightVersion.parse(second, field="second")
    if end < begin:
        raise ConfigError(
            f"{begin} is later than {end}", field="first", fix=f"rose weights diff {run_id} {end} {begin}"
        )
    steps = _deltas_between(store, run_id, begin, end)
    before, after = _state_of(store, run_id, begin), _state_of(store, run_id, end)
    if steps is None:
        typer.echo(f"{begin} and {end} are not joined by deltas: only states are compared")
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    counts = dict.fromkeys(changed, 0)
    sizes = dict.fromkeys(changed, 0)
    for section in (section for step in steps or () for section in step.sections):
        counts[section.tensor] = counts.get(section.tensor, 0) + section.num_changed
        sizes[section.tensor] = sizes.get(section.tensor, 0) + section.nbytes
    same = len(before.keys() & after.keys()) - sum(name in before and name in after for name in changed)
    typer.echo(f"{begin} -> {end}: {len(changed)} tensors differ, {same} are equal")
    if not changed:
        return
    totals = {name: spec.num_elements for name, spec in _specs_of(store, run_id, end).items()}
    typer.echo(f"{'changed':>12} {'share':>9} {'sent':>10}  tensor")
    ordered = sorted(changed, key=lambda name: (-counts[name], name))
    for name in ordered[:limit]:
        note = "" if name in before and name in after else "  (only in one of them)"
        share = f"{counts[name] / totals[name]:.3%}" if steps and totals.get(name) else "?"
        number = str(counts[name]) if steps else "?"
        typer.echo(f"{number:>12} {share:>9} {format_bytes(sizes[name]):>10}  {name}{note}")
    if len(ordered) > limit:
        typer.echo(f"... and {len(ordered) - limit} more (--limit)")


def _deltas_between(
    store: ObjectStore, run_id: str, begin: WeightVersion, end: WeightVersion
) -> list[Manifest] | None:
    """The deltas that lead from ``begin`` to ``end``, newest first; None when they do not."""
    found: list[Manifest] = []
    at = end
    while at > begin:
        deltas = [record for record in _manifests(store, run_id, at) if record.base is not None]
        if not deltas or deltas[0].base is None:
            return None
        found.append(deltas[0])
        at = deltas[0].base.identity
    return found if at == begin else None


def _some_manifest(store: ObjectStore, run_id: str, identity: WeightVersion) -> Manifest:
    records = _manifests(store, run_id, identity)
    if not records:
        raise NotFound(f"version {identity} is not (or no longer) there", field=run_id)
    return records[0]


def _state_of(store: ObjectStore, run_id: str, identity: WeightVersion) -> dict[str, str]:
    return _some_manifest(store, run_id, identity).state()


def _specs_of(store: ObjectStore, run_id: str, identity: WeightVersion) -> dict[str, TensorSpec]:
    return _some_manifest(store, run_id, identity).specs()


@app.command()
def compose(
    run_id: RunId,
    key: Annotated[
        Path,
        typer.Option(
            help="The key that signs: rose tokens TOKENS --anchor-key FILE makes one that may sign anchors only."
        ),
    ],
    relay: Relay = None,
    directory: Folder = None,
    token_file: TokenFile = None,
    every: Annotated[
        int, typer.Option(min=1, help="Once the head is so many versions past its anchor.")
    ] = 20,
    follow: Annotated[bool, typer.Option(help="Go on, until Ctrl-C.")] = False,
) -> None:
    """Compose an anchor of the head from the one before and the deltas since, beside a trainer that leaves it to others.

    For a trainer with [bold]WeightsParams(compose=False)[/bold]: it takes what it finds here, and engines that join start there.
    """
    store = _open(relay, directory, token_file, role="publish", key=read_key(key))
    console = Console(stderr=True)
    at: WeightVersion | None = None
    anchored: WeightVersion | None = None
    while True:
        head = _head_for(store, run_id, at, _WAIT_S if follow else 0.0)
        if head is not None:
            at = head.identity
            record = stored_manifests.read(store, run_id, at, head.kind)
            # The trainer's next delta names what was composed; until then that counts here.
            anchored = max(WeightVersion(*record.anchor), anchored or _newest_anchor(store, run_id, at))
            num_since = at.version - anchored.version if anchored.attempt == at.attempt else at.version
            if not follow and anchored == at:
                typer.echo(f"there is an anchor of {at}")
            elif num_since >= every:
                with console.status(f"composing {at}"), upkeep.holding(store, run_id, at) as still_held:
                    anchor = composer.compose(store, run_id, at, WeightsParams(), still_held)
                anchored = at
                typer.echo(f"composed {at}, {format_bytes(anchor.bytes_sent)}")
            elif not follow:
                typer.echo(
                    f"{at} is {num_since} versions past its anchor, and nothing is to do (--every {every})"
                )
        elif not follow:
            raise _no_version(store, run_id)
        if not follow:
            return


def _head_for(store: ObjectStore, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
    """The next head to compose an anchor of.  Raises NotAuthentic where ``--key`` is not of its trainer."""
    refused: str | None
    try:
        head, refused = store.wait_head(run_id, after, timeout_s), sealed.passed_over(store)
    except NotAuthentic as error:  # to a key that may sign anchors only; a trainer's passes it over
        head, refused = None, f"{error.field}: {error.message}"
    if refused is not None:
        raise NotAuthentic(
            refused, field="key", fix="use the trainer's key, or one of rose tokens --anchor-key"
        )
    return head


def _newest_anchor(store: ObjectStore, run_id: str, upto: WeightVersion) -> WeightVersion:
    """Of the versions up to one, the last that is there whole."""
    keys = set(store.list(f"{run_id}/"))
    found = [
        identity
        for identity in manifest.versions_in(list(keys), run_id)
        if identity <= upto and manifest.manifest_key(run_id, identity, "anchor") in keys
    ]
    return max(found, default=WeightVersion(upto.attempt, 0))


def _require_versions(store: ObjectStore, run_id: str) -> None:
    if not store.list(f"{run_id}/"):
        raise _no_version(store, run_id)


def _no_version(store: ObjectStore, run_id: str) -> NotFound:
    """That nothing of the run is there, and what is: a name is easily misspelt."""
    runs: list[str] = []
    with contextlib.suppress(NotFound):  # a relay of an earlier build does not tell
        runs = store.runs()
    more = f" and {len(runs) - _MOST_RUNS} more" if len(runs) > _MOST_RUNS else ""
    there = f"there are: {', '.join(runs[:_MOST_RUNS])}{more}" if runs else "is this its store?"
    return NotFound("no version is published", field=run_id, fix=there)


@app.command()
def gc(
    run_id: RunId,
    relay: Relay = None,
    directory: Folder = None,
    token_file: TokenFile = None,
    public_key: PublicKey = None,
    ignore_leases: Annotated[
        bool, typer.Option(help="Also what only readers' leases keep; they start over from the head.")
    ] = False,
) -> None:
    """Delete versions that no reader can need, and what failed publishes left; leased versions stay."""
    need = retention.Need.OVER if ignore_leases else retention.Need.TIDY
    store = _open(relay, directory, token_file, public_key, "publish")
    _require_versions(store, run_id)
    with _waiting("looking for what no reader needs, and deleting it"):
        deleted = retention.collect(store, run_id, need)
    typer.echo(f"deleted {len(deleted)} versions" + (f", up to {deleted[-1]}" if deleted else ""))


def _open(
    url: str | None,
    directory: Path | None,
    token_file: Path | None,
    public_key: str | None = None,
    role: str = "relay",
    key: SigningKey | None = None,
) -> ObjectStore:
    """The store that was named; what is read of it is checked where a public key is known."""
    if (url is None) == (directory is None):
        raise ConfigError("give one of --relay URL and --directory PATH", field="rose weights")
    token, pinned = "", "" if public_key == UNCHECKED else public_key or (key.public if key else "")
    if directory is not None:
        if not (directory / "objects").is_dir():
            raise ConfigError(f"{directory} is not the folder of a store", field="directory")
        url = str(directory)
    assert url is not None
    if url.lower().startswith(("http://", "https://")):
        tokens = Tokens.load(token_file, [role])
        token = getattr(tokens, role)
        pinned = pinned or (tokens.public_key if public_key is None else "")
    elif token_file is not None and public_key is None:
        pinned = pinned or Tokens.load(token_file, []).public_key
    return open_store(url, token, trusted=PublicKeys.parse(pinned) if pinned else None, key=key)


def _manifests(
    store: ObjectStore, run_id: str, identity: WeightVersion, damage: list[str] | None = None
) -> list[Manifest]:
    """What is there of a version.  A manifest that cannot be read is an error, or a line of ``damage`` if given."""
    found: list[Manifest] = []
    kinds: tuple[Kind, ...] = ("delta", "anchor")
    for kind in kinds:
        try:
            found.append(stored_manifests.read(store, run_id, identity, kind))
        except NotFound:
            continue
        except SectionCorrupt as error:
            if damage is None:
                raise
            damage.append(str(error))
    return found


@contextlib.contextmanager
def _waiting(words: str) -> Iterator[Callable[[str], None]]:
    """Say what somebody at a terminal waits for; the block may say how far it has come."""
    with Console(stderr=True).status(words) as status:
        yield lambda more: status.update(f"{words}: {more}")


def _check_objects(store: ObjectStore, record: Manifest, say: Callable[[str], None]) -> str | None:
    """What is wrong with a version's objects; None when nothing is."""
    for number, reference in enumerate(record.objects, 1):
        say(f"object {number} of {len(record.objects)}")
        try:
            data = memoryview(store.get(reference.key, max_bytes=reference.nbytes))
        except RoseError as error:
            return str(error)
        try:
            sealed.require_bound(store, reference)
            if not sealed.check_content(reference, data):
                return f"{reference.key}: checksum is wrong"
        except NotAuthentic as error:
            return str(error)
        for section in record.sections:
            piece = data[section.offset : section.offset + section.nbytes]
            if record.objects[section.object] is reference and manifest.digest(piece) != section.xxh3:
                return f"{section.tensor} at {section.start}: checksum is wrong"
    return None


__all__ = ["app", "relay_main"]
