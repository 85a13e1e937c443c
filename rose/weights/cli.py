"""``rose relay`` and ``rose weights ls | verify | gc``; mounted by :mod:`rose.cli`."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rose.auth import Tokens
from rose.errors import ConfigError, NotFound, RoseError
from rose.units import format_bytes
from rose.weights import manifest, retention
from rose.weights.manifest import Kind, Manifest
from rose.weights.store import FileStore, Store
from rose.weights.version import WeightVersion

app = typer.Typer(help="Look at published weight versions.", no_args_is_help=True, add_completion=False)
relay_app = typer.Typer(add_completion=False)

TokenFile = Annotated[
    Path | None, typer.Option(help="Tokens by role (rose tokens PATH); default: $ROSE_TOKEN_FILE.")
]
Relay = Annotated[str | None, typer.Option("--relay", help="URL of a relay.")]
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
        tokens=Tokens.load(token_file),
        max_object_bytes=max_object_mib << 20,
        max_total_bytes=None if max_total_gib is None else int(max_total_gib * (1 << 30)),
        durable=fsync,
        started=lambda taken: typer.echo(f"relay at http://{host}:{taken}, objects in {directory}"),
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
        records = _manifests(store, run_id, identity)
        for record in records:
            base = "-" if record.base is None else str(record.base.identity)
            step = "-" if record.step is None else str(record.step)
            typer.echo(
                f"{identity!s:>12}  {record.kind:<7} {base:>10}  {format_bytes(record.bytes_sent):>10}"
                f" {format_bytes(record.bytes_dense):>10}  {record.density:>8.3%}  {step}{mark}"
            )
        if not records:
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
        for record in _manifests(store, run_id, identity):
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
def gc(run_id: RunId, relay: Relay = None, directory: Folder = None, token_file: TokenFile = None) -> None:
    """Delete versions that no reader can need; leased ones stay."""
    deleted = retention.collect(_open(relay, directory, token_file), run_id)
    typer.echo(f"deleted {len(deleted)} versions" + (f", up to {deleted[-1]}" if deleted else ""))


def _open(url: str | None, directory: Path | None, token_file: Path | None) -> Store:
    if (url is None) == (directory is None):
        raise ConfigError("give one of --relay URL and --directory PATH", field="rose weights")
    if directory is not None:
        if not (directory / "objects").is_dir():
            raise ConfigError(f"{directory} is not the folder of a store", field="directory")
        return FileStore(directory)
    from rose.weights.http_store import HttpStore

    assert url is not None
    return HttpStore(url, Tokens.load(token_file).relay)


def _manifests(store: Store, run_id: str, identity: WeightVersion) -> list[Manifest]:
    found: list[Manifest] = []
    kinds: tuple[Kind, ...] = ("delta", "anchor")
    for kind in kinds:
        try:
            found.append(retention.read_manifest(store, run_id, identity, kind))
        except NotFound:
            continue
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
