"""An error of the gang crosses the wire and comes out as it went in, whatever its class."""

import inspect

import pytest
from leafsum import errors
from leafsum.errors import DeadlineExceeded, GangError, LeafsumError, ProtocolError, RankError, RankLost
from leafsum.ranks.messages import decode, encode
from leafsum.runtime.fatal import error_of, fatal_of
from leafsum.runtime.messages import FROM_COORDINATOR, Fatal

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
EVENTS = ("-0.002 s step 7 plan", "-0.001 s step 7 failed")
TEXT = "expected 3 ranks — found 2, at step 7"


def examples_of(kind: type[LeafsumError]) -> list[LeafsumError]:
    if issubclass(kind, RankError):
        return [
            kind(TEXT, rank=2, step=7, traceback_text="Traceback ...\n  line", events=EVENTS),
            kind(TEXT, rank=0, step=-1),
        ]
    if issubclass(kind, RankLost):
        return [kind(TEXT, role="rank 2", exit_status=status, rank=2, events=EVENTS) for status in (None, 0, -9)]
    if issubclass(kind, DeadlineExceeded):
        return [kind(TEXT, what="step 7", timeout_s=0.5, rank=1, step=7, events=EVENTS)]
    if issubclass(kind, GangError):
        return [kind(TEXT, rank=1, step=7, events=EVENTS)]
    if issubclass(kind, ProtocolError):
        return [kind(TEXT, rank=1), kind(TEXT)]
    return [kind(TEXT), kind("")]


def test_every_class_of_the_tree_is_tried():
    assert len(CLASSES) >= 13
    assert all(issubclass(kind, LeafsumError) for kind in CLASSES)


@pytest.mark.parametrize("error", [error for kind in CLASSES for error in examples_of(kind)], ids=repr)
def test_an_error_survives_the_way_to_the_program(error):
    message = decode(encode(fatal_of(error)), FROM_COORDINATOR)
    assert isinstance(message, Fatal)
    arrived = error_of(message)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("kind", ["NoSuchError", "annotations", "ValueError", "__name__"])
def test_a_kind_that_is_no_class_of_the_tree_is_still_an_error(kind):
    error = error_of(Fatal(kind=kind, text=TEXT))
    assert type(error) is LeafsumError
    assert str(error) == TEXT


def test_a_defect_of_the_coordinator_arrives_with_its_traceback():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as defect:
        message = decode(encode(fatal_of(defect)), FROM_COORDINATOR)
    error = error_of(message)
    assert type(error) is LeafsumError
    assert "the coordinator failed: ZeroDivisionError: division by zero" in str(error)
    assert "test_fatal.py" in error.__notes__[0]
