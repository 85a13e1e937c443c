"""``rose relay`` and ``rose weights ls | verify | diff | gc``; mounted by :mod:`rose.cli`."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rose.auth import PARTS, Tokens
from rose.errors import ConfigError, NotFound, RoseError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.units import format_bytes
from rose.weights import manifest, retention
from rose.weights.manifest import Kind, Manifest
from rose.weights.spec import TensorSpec
from rose.weights.store import FileStore, Store
from rose.wire.hosts import in_url

app = typer.Typer(help="Look at published weight versions.", no_args_is_help=True, add_completion=False)
relay_app = typer.Typer(add_completion=False)

TokenFile = Annotated[
    Path | None, typer.Option(help="Tokens by role (rose tokens PATH); default: $ROSE_TOKEN_FILE.")
]
Relay = Annotated[
    str | None, typer.Option("--relay", help="URL of a relay, or of any store: s3://..., file://..., ...")
]
Folder = Annotated[
    Path | None, typer.Option("--directory", help="Folder of a relay or file store, read in place.")
]
RunId = Annotated[str, typer.Argument(help="The run's name.")]


@relay_app.command()
def relay(
    directory: Annotated[Path, typer.Option(help="Where objects are kept; made if missing.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks one.")] = 8470,
    token_file: TokenFile = None,
    max_object_mib: Annotated[int, typer.Option(min=1, max=1024, help="Largest object.")] = 1024,
    max_total_gib: Annotated[
        float | None, typer.Option(min=0.001, help="All objects together; default: what the disk holds.")
    ] = None,
    fsync: Annotated[bool, typer.Option(help="Survive a restart of the machine; off for tmpfs.")] = True,
) -> None:
    """The weight relay: versioned objects over HTTP, from the trainer to the nodes."""
    from rose.weights.relay import run_relay

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_relay(
        host=host,
        port=port,
        directory=directory,
        tokens=Tokens.load(token_file, PARTS["relay"]),
        max_object_bytes=max_object_mib << 20,
        max_total_bytes=None if max_total_gib is None else int(max_total_gib * (1 << 30)),
        durable=fsync,
        started=lambda taken: typer.echo(f"relay at http://{in_url(host)}:{taken}, objects in {directory}"),
    )


def relay_main() -> None:
    """Entry point of ``rose relay``."""
    relay_app()


@app.command("ls")
def list_versions(
    run_id: RunId, relay: Relay = None, directory: Folder = None, token_file: TokenFile = None
) -> None:
    """List the versions of a run, oldest first; the head is marked."""
    store = _open(relay, directory, token_file)
    head = store.get_head(run_id)
    head_version = None if head is None else head.identity
    typer.echo(f"{'version':>12}  {'kind':<7} {'from':>10}  {'sent':>10} {'dense':>10}  {'changed':>8}  step")
    for identity in manifest.versions_in(store.list(f"{run_id}/"), run_id):
        mark = " <- head" if identity == head_version else ""
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
    run_id: RunId, relay: Relay = None, directory: Folder = None, token_file: TokenFile = None
) -> None:
    """Check every object of every version, then rebuild the head from its anchor and prove its state hashes."""
    from rose.weights.subscriber import WeightSubscriber

    store = _open(relay, directory, token_file)
    num_bad = 0
    for identity in manifest.versions_in(store.list(f"{run_id}/"), run_id):
        damage: list[str] = []
        records = _manifests(store, run_id, identity, damage)
        num_bad += len(damage)
        for problem in damage:
            typer.echo(f"{identity!s:>12}  {problem}")
        for record in records:
            problem = _check_objects(store, record)
            num_bad += problem is not None
            typer.echo(f"{identity!s:>12}  {record.kind:<7} {problem or 'ok'}")
    with tempfile.TemporaryDirectory(prefix="rose-verify-") as scratch:
        subscriber = WeightSubscriber(store, run_id, scratch)
        try:
            version = subscriber.poll(0.0)
            damaged = subscriber.scan() if version is not None else []
            if version is None:
                typer.echo("no version is published")
            else:
                typer.echo(f"{version} rebuilt; {len(subscriber.state())} state hashes prove it")
            num_bad += len(damaged)
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
    limit: Annotated[int, typer.Option(min=1, help="Tensors shown, most changed first.")] = 30,
) -> None:
    """What changed between two versions, tensor by tensor: from their manifests, without fetching weights.

    A weight that changed in several of the versions between is counted once for each, so counts over more than
    one version are upper bounds.
    """
    store = _open(relay, directory, token_file)
    begin = WeightVersion.parse(first, field="first")
    head = store.get_head(run_id)
    if head is None:
        raise NotFound("no version is published", field=run_id)
    end = head.identity if second is None else WeightVersion.parse(second, field="second")
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
    store: Store, run_id: str, begin: WeightVersion, end: WeightVersion
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


def _some_manifest(store: Store, run_id: str, identity: WeightVersion) -> Manifest:
    records = _manifests(store, run_id, identity)
    if not records:
        raise NotFound(f"version {identity} is not (or no longer) there", field=run_id)
    return records[0]


def _state_of(store: Store, run_id: str, identity: WeightVersion) -> dict[str, str]:
    return _some_manifest(store, run_id, identity).state()


def _specs_of(store: Store, run_id: str, identity: WeightVersion) -> dict[str, TensorSpec]:
    return _some_manifest(store, run_id, identity).specs()


@app.command()
def gc(
    run_id: RunId,
    relay: Relay = None,
    directory: Folder = None,
    token_file: TokenFile = None,
    ignore_leases: Annotated[
        bool, typer.Option(help="Also what only readers' leases keep; they start over from the head.")
    ] = False,
) -> None:
    """Delete versions that no reader can need, and what failed publishes left; leased versions stay."""
    need = retention.Need.OVER if ignore_leases else retention.Need.TIDY
    deleted = retention.collect(_open(relay, directory, token_file), run_id, need)
    typer.echo(f"deleted {len(deleted)} versions" + (f", up to {deleted[-1]}" if deleted else ""))


def _open(url: str | None, directory: Path | None, token_file: Path | None) -> Store:
    if (url is None) == (directory is None):
        raise ConfigError("give one of --relay URL and --directory PATH", field="rose weights")
    if directory is not None:
        if not (directory / "objects").is_dir():
            raise ConfigError(f"{directory} is not the folder of a store", field="directory")
        return FileStore(directory)
    from rose.weights.stores import open_store

    assert url is not None
    needs_token = url.startswith(("http://", "https://"))
    return open_store(url, Tokens.load(token_file, ["relay"]).relay if needs_token else "")


def _manifests(
    store: Store, run_id: str, identity: WeightVersion, damage: list[str] | None = None
) -> list[Manifest]:
    """What is there of a version.  A manifest that cannot be read is an error, or a line of ``damage`` if given."""
    found: list[Manifest] = []
    kinds: tuple[Kind, ...] = ("delta", "anchor")
    for kind in kinds:
        try:
            found.append(retention.read_manifest(store, run_id, identity, kind))
        except NotFound:
            continue
        except SectionCorrupt as error:
            if damage is None:
                raise
            damage.append(str(error))
    return found


def _check_objects(store: Store, record: Manifest) -> str | None:
    """What is wrong with a version's objects; None when nothing is."""
    for reference in record.objects:
        try:
            data = memoryview(store.get(reference.key, max_bytes=reference.nbytes))
        except RoseError as error:
            return str(error)
        if len(data) != reference.nbytes or manifest.digest(data) != reference.xxh3:
            return f"{reference.key}: checksum is wrong"
        for section in record.sections:
            piece = data[section.offset : section.offset + section.nbytes]
            if record.objects[section.object] is reference and manifest.digest(piece) != section.xxh3:
                return f"{section.tensor} at {section.start}: checksum is wrong"
    return None


__all__ = ["app", "relay_main"]
