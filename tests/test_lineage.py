"""One definition of which weights are meant, and one spelling of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import RequestError
from rose.lineage import LIMIT, Lineage, WeightVersion, format_version, parse_version

PARTS = st.integers(0, LIMIT - 1)
RUNS = st.one_of(st.just(""), st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"))


@given(run=RUNS, attempt=PARTS, version=PARTS)
def test_what_is_written_is_read_again(run: str, attempt: int, version: int) -> None:
    lineage = Lineage(run, WeightVersion(attempt, version))

    assert Lineage.parse(str(lineage)) == lineage
    assert parse_version(format_version((attempt, version))) == parse_version([attempt, version])


@pytest.mark.parametrize(
    "text",
    ["", "1", "01.2", "1.02", "+1.2", "1.2 ", "@1.2", "a@", "a@b@1.2", "../a@1.2", ".a@1.2", "a/b@1.2", "a@1.2\n", f"1.{LIMIT}", None, 1.2],
)  # fmt: skip
def test_there_is_one_spelling(text: object) -> None:
    """A version with a leading zero was one for the scheduler and none for the relay."""
    with pytest.raises(RequestError):
        Lineage.parse(text)


@pytest.mark.parametrize("text", ["01.2", "1.02", [1], [1, -1], [1, True], ["1", 2], {"a": 1}])
def test_no_door_reads_what_another_refuses(text: object) -> None:
    with pytest.raises(RequestError):
        parse_version(text)
