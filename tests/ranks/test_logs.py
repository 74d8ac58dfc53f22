"""One line an event, whoever speaks, and none that holds its process up."""

import contextlib
import logging
import os
import subprocess
import sys
import textwrap

import pytest
from leafsum.ranks.journal import NUM_EVENTS_KEPT, Journal, quoted
from leafsum.ranks.logs import MAX_LINE_BYTES, LineFormatter, LineHandler


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        os.close(fd)


@pytest.fixture
def logger(pipe):
    handler = LineHandler(pipe[1])
    handler.setFormatter(LineFormatter("run=r rank=1"))
    logger = logging.Logger("leafsum.test")
    logger.addHandler(handler)
    return logger


def lines_in(pipe) -> list[str]:
    return os.read(pipe[0], 1 << 20).decode().splitlines()


def test_an_event_is_a_line_that_can_be_split_at_its_spaces(pipe, logger):
    Journal(logger, "r", 1).note("plan", 7, rows=3, text='two "words"\nand = a \\', empty="", seconds=0.25, path="ü/x")
    (line,) = lines_in(pipe)
    time, rest = line.split(" ", 1)
    assert len(time) == len("2000-01-01T00:00:00.000+00:00")
    text = r'"two \"words\"\nand = a \\"'
    assert rest == f'debug run=r rank=1 step=7 event=plan rows=3 text={text} empty="" seconds=0.250 path=ü/x'


def test_what_others_say_is_one_line_that_names_the_run(pipe, logger):
    try:
        raise ValueError("no\nsuch")
    except ValueError:
        logger.exception("broke at %d", 3)
    (line,) = lines_in(pipe)
    assert ' error run=r rank=1 event=log logger=leafsum.test text="broke at 3" traceback="Traceback' in line
    assert r"ValueError: no\nsuch" in line


def test_a_long_line_is_cut_to_what_a_pipe_takes_whole(pipe, logger):
    Journal(logger, "r", 0).note("long", text="ü " * 9000)
    logger.error("and of others: %s", "ü " * 9000)
    for line in os.read(pipe[0], 1 << 20).splitlines():
        assert len(line) < MAX_LINE_BYTES
        assert line.endswith(b'"'), "a quoted word that is cut has an end all the same"


def test_lines_that_are_not_taken_are_counted_and_the_next_one_tells(pipe, logger):
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe[1], bytes(4096))
    journal = Journal(logger, "r", 0)
    journal.note("first")
    journal.note("second")
    os.read(pipe[0], 1 << 20)
    journal.note("third")
    journal.note("fourth")
    third, fourth = lines_in(pipe)
    assert third.endswith("event=third lines_lost=2")
    assert fourth.endswith("event=fourth")


def test_the_newest_events_are_kept_whether_they_are_logged_or_not(logger):
    logger.setLevel("WARNING")
    journal = Journal(logger, "r", 0)
    for step in range(NUM_EVENTS_KEPT + 5):
        journal.note("plan", step, rows=step)
    assert [event.step for event in journal.events] == list(range(5, NUM_EVENTS_KEPT + 5))
    assert journal.events[-1].facts == f"rows={NUM_EVENTS_KEPT + 4}"


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (True, "True"), (None, "None"), ("a=b", '"a=b"'), ("\x00", r'"\x00"')]
)
def test_a_value_is_one_word(value, text):
    assert quoted(value) == text


def test_a_closed_standard_error_is_filled():
    """No socket gets its number, and with it what libraries say."""
    program = "import os; os.close(2); from leafsum.ranks.logs import configure_logs; configure_logs('debug', 'r')"
    program += "; print(os.readlink('/proc/self/fd/2'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "/dev/null\n"


def test_a_process_says_warnings_in_lines_and_survives_a_wrong_call():
    program = """
        import logging, warnings
        from leafsum.ranks.logs import configure_logs
        configure_logs("warning", "r", 2)
        logging.getLogger("x").warning("%d of %d", 1)
        logging.getLogger("x").info("too low")
        warnings.warn("mind\\nthis")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert " warning run=r rank=2 event=log logger=py.warnings text=" in line
    assert r"UserWarning: mind\nthis" in line
