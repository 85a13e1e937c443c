"""Production's book of steps: claims, steps under way, broken promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.policy.coserving.steps import WATERMARK_FRACTION, StepBook

MS = 1_000_000


def test_what_waits_and_a_watermark_are_claimed_in_whole_chunks() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    changed = book.claim(lent_chunks=5, free_blocks=2, waiting_blocks=10)

    assert changed
    assert book.claim_chunks == 2  # 10 and 5 of watermark, less 2
    assert book.needed_chunks(usable_chunks=7) == 9


def test_nothing_beyond_the_loan_is_claimed() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.claim(lent_chunks=3, free_blocks=0, waiting_blocks=1000)

    assert book.claim_chunks == 3


def test_a_claim_that_goes_on_is_one_pressure() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    for free in (0, 3, 0):
        book.claim(lent_chunks=5, free_blocks=free, waiting_blocks=0)
    book.claim(lent_chunks=5, free_blocks=50, waiting_blocks=0)
    book.claim(lent_chunks=5, free_blocks=0, waiting_blocks=0)

    assert book.pressure_seq == 2


def test_without_a_claim_nothing_is_needed() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    assert book.needed_chunks(usable_chunks=12) == 0


def test_a_second_step_has_the_workers_only_when_the_first_has_ended() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    assert book.scheduled(100, 1, 10 * MS)
    assert not book.scheduled(0, 2, 15 * MS)
    assert book.ended(30 * MS, 0) == (100, 1, 0)

    assert (book.started_ns, book.step_ns, book.oldest) == (30 * MS, 20 * MS, (0, 2, 0))


def test_a_step_without_tokens_is_not_busy() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.scheduled(0, 0, 0)

    assert not book.is_busy()
    book.scheduled(0, 1, 0)
    assert book.is_busy()


def test_a_step_longer_than_promised_breaks_a_promise_only_of_who_decodes() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.scheduled(500, 0, 0)
    book.ended(200 * MS, 100 * MS)
    assert book.breaches == 0
    book.scheduled(500, 1, 200 * MS)
    book.ended(400 * MS, 100 * MS)
    assert book.breaches == 1


def test_late_first_tokens_and_long_steps_are_breaches() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.scheduled(500, 1, 0)
    book.ended(200 * MS, 100 * MS)
    book.first_tokens.arrived("a", 0.0)
    book.first_tokens.came(["a"], 0.2, 0.1)

    assert book.breaches == 2


def test_the_end_of_no_step_says_so() -> None:
    assert StepBook(num_blocks=100, chunk_blocks=8).ended(1, 1) is None


@given(
    num_blocks=st.integers(1, 10_000),
    chunk_blocks=st.integers(1, 64),
    looks=st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 10_000), st.integers(0, 10_000)), max_size=20
    ),
)
def test_a_claim_leaves_nobody_short_whom_the_loan_could_help(
    num_blocks: int, chunk_blocks: int, looks: list[tuple[int, int, int]]
) -> None:
    book = StepBook(num_blocks, chunk_blocks)
    for lent, free, waiting in looks:
        book.claim(lent_chunks=lent, free_blocks=free, waiting_blocks=waiting)
        enough = waiting + int(WATERMARK_FRACTION * num_blocks)
        assert 0 <= book.claim_chunks <= lent
        assert free + book.claim_chunks * chunk_blocks >= enough or book.claim_chunks == lent
        assert book.claim_chunks == 0 or free + (book.claim_chunks - 1) * chunk_blocks < enough
        assert book.under_pressure == (book.claim_chunks > 0)


# --- speculative decoding


def test_drafts_are_work_and_no_prompt() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.scheduled(0, 4, 0, drafts=12)

    assert book.is_busy()
    assert not book.reads_prompt()
    assert book.oldest == (12, 4, 0)
    assert book.ended(10 * MS, 0) == (12, 4, 0)


def test_a_step_that_verifies_drafts_can_break_the_promise_of_who_decodes() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.scheduled(0, 1, 0, drafts=3)
    book.ended(200 * MS, 100 * MS)

    assert book.breaches == 1


def test_what_steps_verify_of_late_is_expected_of_the_next() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)
    assert book.expects(8) == (0, 8)

    for _ in range(100):
        book.scheduled(0, 4, 0, drafts=12)
        book.ended(0, 0)
    drafts, decodes = book.expects(8)
    assert decodes == 8
    assert 23.5 < drafts <= 24

    for _ in range(100):  # the drafter finds nothing any more
        book.scheduled(50, 4, 0)
        book.ended(0, 0)
    assert book.expects(8)[0] < 0.1


def test_a_step_without_decodes_teaches_nothing_of_drafts() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)
    book.scheduled(0, 1, 0, drafts=3)
    before = book.drafts_per_decode

    book.scheduled(500, 0, 0)

    assert book.drafts_per_decode == before > 0


def test_what_an_encoder_does_belongs_to_its_step() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.scheduled(80, 2, 0, encoder=64)
    book.scheduled(0, 3, 0)

    assert book.oldest == (80, 2, 64)
    assert book.ended(10 * MS, 0) == (80, 2, 64)
    assert book.oldest == (0, 3, 0)


# --- pipeline parallelism


def test_a_pipelines_step_takes_from_when_it_was_put_together() -> None:
    """Two stages, two batches that take turns: one ends every 10 ms, and a token takes 20."""
    book = StepBook(num_blocks=100, chunk_blocks=8, stages=True)
    assert book.scheduled(0, 4, 0)
    assert not book.scheduled(0, 3, 10 * MS)
    for end in range(20, 200, 10):
        ended = book.ended(end * MS, 15 * MS)
        assert ended == ((0, 4, 0) if end % 20 == 0 else (0, 3, 0))
        assert book.step_ns == 20 * MS
        assert (book.started_ns, book.due_since_ns) == ((end - 10) * MS,) * 2  # of the other one
        assert not book.scheduled(0, ended[1], end * MS)

    assert book.breaches == 18  # each, though no gap is longer than promised
    assert book.busy_ns == 190 * MS


def test_steps_that_fill_a_pipeline_up_count_for_nothing() -> None:
    """One batch: vLLM puts a step without tokens together beside each of its steps."""
    book = StepBook(num_blocks=100, chunk_blocks=8, stages=True)
    book.scheduled(0, 4, 0)
    book.scheduled(0, 0, 1 * MS)
    assert book.ended(20 * MS, 0) == (0, 4, 0)
    assert not book.is_busy()
    assert (book.oldest, book.due_since_ns) == (None, 20 * MS)

    assert book.scheduled(0, 4, 21 * MS)
    assert book.ended(22 * MS, 0) == (0, 0, 0)

    assert (book.oldest, book.started_ns, book.due_since_ns) == ((0, 4, 0), 21 * MS, 21 * MS)
    assert book.step_ns == 20 * MS
    assert book.ended(41 * MS, 0) == (0, 4, 0)
    assert book.busy_ns == 40 * MS


def test_only_what_is_not_out_yet_is_lent_and_nothing_under_pressure_or_of_what_has_just_come_back() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    assert book.to_lend(5, 2) == 3
    assert book.to_lend(2, 5) == 0
    assert book.to_lend(5, 2, came_back=True) == 0
    book.claim(lent_chunks=2, free_blocks=0, waiting_blocks=0)
    assert book.to_lend(5, 2) == 0


def test_of_a_fixed_split_nothing_can_be_claimed() -> None:
    book = StepBook(num_blocks=100, chunk_blocks=8)

    assert book.claimable(4) == 4
    book.fixed = True
    assert book.claimable(4) == 0


def test_a_claim_after_one_that_was_withdrawn_is_another_pressure() -> None:
    """Who asked was aborted, and the engine idle: the next request that waits for memory is news to who watches."""
    book = StepBook(num_blocks=100, chunk_blocks=8)

    book.claim(lent_chunks=5, free_blocks=0, waiting_blocks=10)
    book.withdraw()
    assert book.needed_chunks(usable_chunks=7) == 0
    book.claim(lent_chunks=5, free_blocks=0, waiting_blocks=10)

    assert book.pressure_seq == 2
