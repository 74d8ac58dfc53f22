"""Rounds of the benchmark: who is measured when, what counts, and what is said of it."""

import itertools

import pytest
from leafsum.runtime.bench.aims import AIMS, judged
from leafsum.runtime.bench.results import Results
from leafsum.runtime.bench.rounds import Rounds, Series, Variant, median_of
from leafsum.runtime.bench.table import aims, measured, number
from leafsum.runtime.bench.transport import percentile


def run_counted(num_rounds):
    """Three variants whose every sample is the number of the call, and the order of the calls."""
    calls, count, stages = [], itertools.count(), []

    def variant(name):
        def measure():
            calls.append(name)
            return {"calls": float(next(count))}

        return Variant(name, measure)

    series = Rounds(num_rounds, stages.append).run("suite", [variant(name) for name in "ABC"])
    return series, calls, stages


def test_variants_take_turns():
    _, calls, _ = run_counted(3)
    assert "".join(calls) == "ABC" * 4


def test_the_first_sample_of_each_is_thrown_away():
    series, _, _ = run_counted(3)
    assert [(each.variant, each.samples) for each in series] == [
        ("A", (3.0, 6.0, 9.0)),
        ("B", (4.0, 7.0, 10.0)),
        ("C", (5.0, 8.0, 11.0)),
    ]


def test_what_begins_is_told():
    _, _, stages = run_counted(1)
    assert stages[0] == "suite: warm-up: A"
    assert stages[-1] == "suite: round 1 of 1: C"


def test_a_variant_may_have_several_figures():
    variants = [Variant(name, lambda: {"ms, median": 1.0, "ms, p95": 2.0}) for name in ("first", "second")]
    series = Rounds(2, lambda _: None).run("suite", variants)
    assert [(each.variant, each.figure) for each in series] == [
        ("first", "ms, median"),
        ("first", "ms, p95"),
        ("second", "ms, median"),
        ("second", "ms, p95"),
    ]
    assert median_of(series, "second", "ms, p95") == 2.0


def test_the_model_is_told_and_kept():
    stages = []
    (series,) = Rounds(1, stages.append).run("decode", [Variant("A", lambda: {"s": 1.0})], "qwen4_exp")
    assert series.model == "qwen4_exp"
    assert stages == ["decode, qwen4_exp: warm-up: A", "decode, qwen4_exp: round 1 of 1: A"]


def test_a_series_says_median_and_spread_with_all_samples():
    found = Series("suite", "A", "s", (4.0, 1.0, 2.0)).to_dict()
    assert found == {
        "suite": "suite",
        "model": "",
        "variant": "A",
        "figure": "s",
        "median": 2.0,
        "min": 1.0,
        "max": 4.0,
        "samples": (4.0, 1.0, 2.0),
    }
    assert Series("suite", "A", "s", (1.0, 2.0)).median == 1.5


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 95, 3.0), (list(range(100, 0, -1)), 95, 95), (list(range(1, 21)), 95, 19), (list(range(1, 22)), 95, 20)],
)
def test_a_percentile_is_one_of_the_values(values, percent, expected):
    assert percentile(values, percent) == expected


def test_an_aim_gets_its_word_on_either_side_of_its_bound():
    by_key = {aim.key: aim for aim in AIMS}
    assert len(by_key) == len(AIMS)
    more, less = by_key["decode qwen4_exp"], by_key["help"]
    assert [more.word(value) for value in (2.99, 3.0, None)] == ["miss", "pass", "not measured"]
    assert [less.word(value) for value in (0.29, 0.3, None)] == ["pass", "miss", "not measured"]


def test_every_aim_is_judged_measured_or_not():
    found = {aim.key: value for aim, value in judged({"help": 0.1})}
    assert found.pop("help") == 0.1
    assert set(found.values()) == {None}


def test_tables_align_and_hold_every_series_and_aim():
    series = [
        Series("decode", "leafsum, tp 1", "tokens/s", (30.0, 40.0), "qwen4_exp"),
        Series("startup", "leafsum --help", "s", (0.25, 0.125)),
    ]
    results = Results(series=series, values={"help": 0.1875})
    assert list(measured(results).plain()) == [
        "suite    model      variant         median    min   max  unit",
        "decode   qwen4_exp  leafsum, tp 1       35     30    40  tokens/s",
        "startup  -          leafsum --help   0.188  0.125  0.25  s",
    ]
    lines = list(aims(results).plain())
    assert len(lines) == 1 + len(AIMS)
    assert lines[-1].split() == ["startup", "leafsum", "--help", "<", "0.3", "s", "0.188", "s", "pass"]
    assert all(line.endswith("not measured") for line in lines[1:-1])


def test_a_rich_table_has_the_same_cells():
    columns = aims(Results())
    assert columns.rich().row_count == len(columns.rows)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.01234, "0.0123"), (1.0, "1"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1,234")]
)
def test_numbers_have_three_digits(value, expected):
    assert number(value) == expected
