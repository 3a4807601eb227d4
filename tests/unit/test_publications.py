"""Which server has newer weights, told by counts of inserts."""

from __future__ import annotations

from reverb_writer.client.publications import Publications

ORDER = ["a", "b", "c"]


def test_publication_that_went_to_all_is_fetched_once() -> None:
    known = Publications({}).updated({"a": (1, 5), "b": (2, 5), "c": (3, 5)}).passed(*ORDER)
    assert known.newest(ORDER) is None
    known = known.updated({"a": (1, 5), "b": (2, 6), "c": (3, 5)})  # under way
    assert known.newest(ORDER) == "b"
    known = known.taken("b")
    assert known.newest(ORDER) is None
    known = known.updated({"a": (1, 6), "b": (2, 6), "c": (3, 6)})
    assert known.newest(ORDER) is None
    assert known.updated({"a": (1, 7), "b": (2, 7), "c": (3, 7)}).newest(ORDER) == "a"


def test_server_that_has_missed_publications_is_behind_until_it_was_read() -> None:
    known = Publications({}).updated({"a": (1, 5), "b": (2, 5)}).passed("a", "b").updated({"b": (2, 7)}).taken("b")
    known = known.updated({"a": (1, 6), "b": (2, 8)})  # the third is everywhere
    assert known.newest(ORDER) == "b"


def test_server_that_was_started_again_is_read_once() -> None:
    known = Publications({}).updated({"a": (1, 5), "b": (2, 5)}).passed("a", "b")
    known = known.updated({"a": (9, 2), "b": (2, 6)})
    assert known.newest(ORDER) == "a"
    known = known.passed("a")  # its checkpoint was old
    assert known.newest(ORDER) == "b"
    known = known.taken("b")
    assert known.newest(ORDER) is None
    assert known.updated({"a": (9, 0), "b": (2, 0)}).newest(ORDER) is None  # reset: empty
    assert known.updated({"a": (9, 0), "b": (2, 1)}).newest(ORDER) == "b"


def test_server_that_does_not_answer_is_no_choice() -> None:
    known = Publications({}).updated({"a": (1, 1), "b": (2, 1)})
    assert known.newest(["b"]) == "b"
    assert known.newest([]) is None
