"""`leafsum bench` as a command, with suites that measure nothing: what is chosen, printed and refused."""

import json

import pytest
from leafsum.errors import ConfigError, LeafsumError
from leafsum.runtime.bench import run as run_module
from leafsum.runtime.bench.aims import AIMS
from leafsum.runtime.bench.options import FAMILIES, SUITES, BenchModel, Shape, parse_counts
from leafsum.runtime.bench.rounds import Variant, median_of
from leafsum.runtime.commands.main import run


@pytest.fixture
def measured(monkeypatch):
    """Suites of two variants, each sample 1 s; (names, options) of every part that ran. `broken` fails."""
    calls = []

    def part(names, options, rounds, results):
        calls.append((list(names), options))
        for name in names:
            series = rounds.run(name, [Variant("A", lambda: {"s": 1.0}), Variant("B", lambda: {"s": 0.5})])
            results.series += series
            if name == "startup":
                results.values["help"] = median_of(series, "B", "s")

    def broken(names, _options, _rounds, _results):
        raise LeafsumError(f"{', '.join(names)} broke")

    names = (("kernels",), ("decode", "prompt"), ("waiting",), ("transport",), ("startup",))
    parts = tuple((each, broken if each == ("transport",) else part) for each in names)
    monkeypatch.setattr(run_module, "_parts", lambda: parts)
    return calls


def bench(capfd, *arguments):
    exit_code = run(["bench", *arguments])
    out, err = capfd.readouterr()
    return exit_code, out, err


def test_suites_can_be_chosen_in_any_order_and_run_in_one(measured, capfd):
    assert bench(capfd, "startup", "prompt", "kernels")[0] == 0
    assert [names for names, _ in measured] == [["kernels"], ["prompt"], ["startup"]]


def test_without_a_name_all_suites_run(measured, capfd):
    exit_code, out, _ = bench(capfd, "--json")
    assert exit_code == 1
    assert json.loads(out)["suites"] == list(SUITES)
    assert [names for names, _ in measured] == [["kernels"], ["decode", "prompt"], ["waiting"], ["startup"]]


def test_the_document_holds_every_sample_where_it_was_made_and_the_aims(measured, capfd):
    exit_code, out, err = bench(capfd, "kernels", "startup", "--rounds", "4", "--json")
    assert (exit_code, err, len(measured)) == (0, "", 2)
    found = json.loads(out)
    assert set(found) == {
        "format", "method", "suites", "rounds", "work", "code", "packages", "machine", "measurements", "aims", "notes",
        "failures",
    }  # fmt: skip
    assert (found["format"], found["rounds"]) == ("leafsum bench 3", 4)
    assert [(each["suite"], each["variant"]) for each in found["measurements"]] == [
        ("kernels", "A"), ("kernels", "B"), ("startup", "A"), ("startup", "B"),
    ]  # fmt: skip
    assert found["measurements"][1]["samples"] == [0.5] * 4
    assert {"cpu", "cores", "instruction_set"} <= set(found["machine"])
    assert {"torch", "numpy", "transformers"} <= set(found["packages"])
    assert found["work"]["shapes"] == ["2560x12288"]
    assert found["work"]["models"] == list(FAMILIES)
    aims = {aim["aim"]: aim for aim in found["aims"]}
    assert len(aims) == len(AIMS)
    assert (aims["leafsum --help"]["value"], aims["leafsum --help"]["word"]) == (0.5, "miss")


@pytest.mark.usefixtures("measured")
def test_a_pipe_gets_both_tables_and_no_progress(capfd):
    exit_code, out, err = bench(capfd, "startup")
    assert (exit_code, err) == (0, "")
    heading, empty, *lines = out.splitlines()
    assert "3 rounds after a warm-up" in heading
    assert empty == ""
    assert lines[0].split() == ["suite", "model", "variant", "median", "min", "max", "unit"]
    assert lines[3] == ""
    assert len(lines) == 3 + 1 + 1 + len(AIMS)


@pytest.mark.usefixtures("measured")
def test_a_suite_that_fails_is_named_and_the_others_are_shown(capfd):
    exit_code, out, err = bench(capfd, "transport", "startup")
    assert (exit_code, err) == (1, "leafsum: transport failed: transport broke\n")
    assert "startup  -      B" in out


def test_flags_reach_the_suites(measured, capfd):
    flags = ("--tp", "1,3", "--threads", "2", "--shape", "16x32", "--shape", "64x16", "--exchange", "slots")
    assert bench(capfd, "decode", *flags, "--model", "tiny", "--no-transformers")[0] == 0
    ((_, options),) = measured
    assert (options.rank_counts, options.settings.threads, options.settings.exchange) == ((1, 3), 2, "slots")
    assert options.shapes == (Shape(16, 32), Shape(64, 16))
    ((name, folder),) = [(model.name, model.folder) for model in options.models]
    assert (name, options.with_transformers) == ("tiny", False)
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("families", [FAMILIES, FAMILIES[1:], FAMILIES[::-1]])
def test_of_the_models_made_for_bench_some_can_be_chosen(families, measured, capfd):
    flags = [word for family in families for word in ("--family", family)]
    assert bench(capfd, "decode", "--requests", "7", *flags)[0] == 0
    ((_, options),) = measured
    assert options.models == tuple(BenchModel(family) for family in FAMILIES if family in families)
    assert options.num_requests == 7


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("kernel",), "'kernel' is not one of 'kernels'"),
        (("--rounds", "0"), "--rounds"),
        (("--new-tokens", "1"), "--new-tokens"),
        (("--prompt-tokens", "9" * 20), "'--prompt-tokens': 99999999999999999999 is not in the range 1<=x<=1000000"),
        (("--gather-bytes", "99999999999999"), "is not in the range 1<=x<=268435456"),
        (("--tp", "1,x"), "--tp: expected whole numbers of 1 to 64 with commas between, found 'x'"),
        (("--gather-ranks", "2,2"), "--gather-ranks: expected every number once, found '2,2'"),
        (("--shape", "2560"), "--shape: expected INxOUT, such as 2560x12288, found '2560'"),
        (("--dtype", "int8"), "--dtype"),
        (("--requests", "0"), "--requests"),
        (("--family", "qwen5"), "'qwen5' is not one of 'qwen3_moe', 'qwen4_exp'"),
        (("--family", "qwen4_exp", "--model", "tiny"), "--family: expected no --model beside it"),
        (("--model", "no/such/folder"), "there is no folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(measured, arguments, told, capfd):
    exit_code, out, err = bench(capfd, *arguments)
    assert (exit_code, out, measured) == (2, "", [])
    assert told in err


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "65", "1;2", "1.5"])
def test_counts_are_whole_numbers_with_commas_between(text):
    with pytest.raises(ConfigError, match=r"--tp: expected whole numbers of 1 to 64"):
        parse_counts(text, "--tp", 64)
    assert parse_counts("1,2,64", "--tp", 64) == (1, 2, 64)


@pytest.mark.parametrize("text", ["0x3", "3x", "3X4", "3x4x5", "-1x2", "9999999x1"])
def test_shapes_are_two_sizes(text):
    with pytest.raises(ConfigError, match="expected INxOUT"):
        Shape.parse(text)


def test_the_help_teaches_every_suite(capfd):
    exit_code, out, _ = bench(capfd, "--help")
    assert exit_code == 0
    assert all(f"\n    {suite} " in out for suite in SUITES)
    assert "How to read it" in out
