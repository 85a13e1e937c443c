"""When an idle engine is woken to look for more to lend."""

from __future__ import annotations

from rose.policy.coserving.search import ROUND_S, LoanSearch


def test_what_was_looked_through_in_vain_is_left_alone_until_an_offer_or_time_changes_it() -> None:
    search = LoanSearch()
    assert search.may_find_more(0.0, None)
    search.looked(10.0, (1, 2), num_missing=3, none_left=True)

    assert not search.may_find_more(10.0, (1, 2))
    assert search.may_find_more(10.0, (1,))
    assert search.may_find_more(10.0, None)
    assert search.may_find_more(10.0 + ROUND_S, (1, 2))


def test_blocks_that_come_free_are_worth_another_look() -> None:
    search = LoanSearch()
    search.looked(10.0, None, num_missing=3, none_left=True)
    search.freed()
    assert search.may_find_more(10.0, None)


def test_a_look_goes_on_only_where_time_ran_out() -> None:
    search = LoanSearch()
    search.looked(1.0, None, num_missing=2, none_left=False)
    assert search.goes_on
    assert search.may_find_more(1.0, None)
    for missing, none_left in ((2, True), (0, False)):
        search.looked(1.0, None, num_missing=missing, none_left=none_left)
        assert not search.goes_on
