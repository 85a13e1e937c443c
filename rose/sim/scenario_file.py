"""Scenario files: read, checked with the hardware they name, and refused by file, line and field."""

from __future__ import annotations

from pathlib import Path

from rose.config import load_config
from rose.errors import ConfigError
from rose.sim.hardware import Hardware
from rose.sim.scenario import Scenario


def load_scenario(
    path: Path | None, overrides: list[str] | tuple[str, ...] = (), systems: tuple[str, ...] = ()
) -> Scenario:
    """Read and check a scenario, names of devices and models included; without a file all is as by default.

    Args:
        systems: That will run, where not the scenario's own: the fleet need be able to run these alone.

    Raises:
        ConfigError: Names the file, and the line or the field.
    """
    try:
        named = overrides if path is not None else ["name=fleet", *overrides]
        scenario = load_config(Scenario, path, named)
        scenario = scenario if path is None else _beside(path, scenario)
        Hardware(scenario).check(systems or scenario.systems)
    except ConfigError as error:
        changed = {text.partition("=")[0].strip() for text in overrides}
        line = None if path is None else _line_of(path, error.field)
        where = "--set" if error.field in changed or path is None else f"{path}:{line}" if line else str(path)
        field = f"{where}: {error.field}" if error.field and error.field != "config" else where
        raise ConfigError(error.message, field=field, fix=error.fix) from error
    return scenario


def _beside(path: Path, scenario: Scenario) -> Scenario:
    """With the files it names found from its own folder."""
    serving, job = scenario.serving, scenario.job
    serving = serving.model_copy(
        update={
            "trace": serving.trace and path.parent / serving.trace,
            "profile": serving.profile and path.parent / serving.profile,
        }
    )
    job = job.model_copy(update={"profile": job.profile and path.parent / job.profile})
    return scenario.model_copy(update={"serving": serving, "job": job})


def _line_of(path: Path, field: str | None) -> int | None:
    """Line of ``table.key`` in a TOML file: the last ``key =`` under that header, else the header; None when neither is there."""
    if not field:
        return None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    *tables, key = field.split(".")
    header, found = "", None
    for number, text in enumerate(lines, 1):
        text = text.strip()
        if text.startswith("["):
            header = text.strip("[] ")
            if header == field or (header == ".".join(tables) and found is None):
                found = number
        elif text.partition("=")[0].strip() == key and header == ".".join(tables):
            found = number
    return found
