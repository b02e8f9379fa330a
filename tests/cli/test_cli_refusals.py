"""Bad input on the command line: exit code 2, one clear message, no traceback, nothing started."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from bench.cli import main as command_line
from sweeps.settings import known_paths
from sweeps.suggest import _NAMES_HERE


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_sweep_file_that_is_wrong_leaves_no_results_folder(in_process, tmp_path: Path, verb):
    (tmp_path / "s.yaml").write_text("name: a\nbase: {env.LD_PRELOAD: x.so}\n")
    refused(in_process(verb, "s.yaml"), "s.yaml:2", "LD_PRELOAD")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("verb", [["plan"], ["run"], ["baseline", "noise"]])
def test_a_sweep_that_nobody_has_lists_those_that_come_with_the_tool(in_process, tmp_path, verb):
    refused(in_process(*verb, "nosuch"), "nosuch", "quickstart, reducers, speed, speed_memory")
    refused(in_process(*verb, "quickstrat"), "did you mean 'quickstart'?")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "nightly.yaml").write_text("name: a\n")
    refused(in_process(*verb, "mine/nigthly.yaml"), "no such file; did you mean 'nightly.yaml'?")
    (tmp_path / "quickstar.yaml").write_text("name: a\n")
    (tmp_path / ".quickstra-config.yaml").write_text("a: 1\n")
    refused(in_process(*verb, "quickstra.yaml"), "no such file; did you mean 'quickstar.yaml'?")


def test_of_two_names_as_near_the_one_that_begins_alike_is_suggested(in_process):
    fault = in_process("plan", "quickstart", "--set", "engine.name=fsdp3")
    refused(fault, "did you mean 'fsdp2'?")


def test_a_log_that_unpacks_to_more_than_the_limit_is_refused(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr("bench.cli.import_.MOST_BYTES", 1 << 20)
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"step 1 loss 2.0\n" * 70_000))
    refused(in_process("import", "log.gz"), "log.gz holds more than 1 MiB of text, unpacked")


def test_what_the_help_selects_is_there_in_a_plain_sweep(in_process, tmp_path):
    (tmp_path / "my.yaml").write_text("name: a\nmatrix: {product: {engine.name: [ddp, mfsdp]}}\n")
    (selection,) = re.findall(
        r"--only (\S+)", in_process("plan", "--help")[1].split("Examples:")[1]
    )
    code, out, err = in_process("plan", "my.yaml", "--only", selection)
    assert code == 0, err
    assert "mfsdp" in out


def test_a_plan_as_json_says_how_gradients_are_added_up(in_process):
    asked = ("plan", "pr3067_short", "--device", "H100", "--gpus", "8", "--json")
    sums = json.loads(in_process(*asked)[1])["gradient_sums"]
    assert sums["fsdp-fp32-ub_off"] == []
    (plain,), (registered,) = sums["fsdp-bf16-ub_off"], sums["fsdp-bf16-ub_on"]
    assert (plain["operation"], plain["sent"], plain["summed"]) == (
        "ReduceScatter",
        "bf16",
        "as sent",
    )
    assert registered["summed"] == "unknown"


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("learning_rate=1e-3", "did you mean 'train.lr'?"),
        ("train.learning_rate=1e-3", "did you mean 'train.lr'?"),
        ("batch_size=4", "did you mean 'train.global_batch' or 'train.micro_batch'?"),
        ("lr=1e-3", "did you mean 'train.lr'?"),
        ("world_size=4", "did you mean 'launch.ranks'?"),
        ("engine.dtypes=bf16", "'dtypes' is a section of its own, as in 'dtypes.compute'"),
        ("engine.dtyps=bf16", "'dtypes' is a section of its own, as in 'dtypes.compute'"),
        ("engine.name=fsdp", "did you mean 'fsdp2' or 'mfsdp'?"),
        ("engine.strategy=ZeRO-3", "did you mean 'optim_grads_params'?"),
        ("dtypes.compute=bfloat16", "did you mean 'bf16'?"),
    ],
)
def test_what_other_tools_call_it_is_understood(in_process, setting, meant):
    refused(in_process("plan", "quickstart", "--set", setting), meant)


def test_every_word_of_another_tool_leads_to_something_that_exists():
    from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, TrainSpec
    from bench.spec.engine_table import engine_names
    from sweeps.definition import SweepFile

    known = {*known_paths(), *SweepFile.model_fields, *engine_names()}
    for model in (DtypeSpec, EngineSpec, LaunchSpec, TrainSpec):
        known |= set(re.findall("'(\\w+)'", str(model.model_json_schema())))
    for word, meant in _NAMES_HERE.items():
        assert set(meant) <= known, word
        # Values of a recipe and of a front, and words of other tools for a strategy and an engine.
        assert word not in known or word in {"none", "megatron"}, word


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            (("plan", "quickstart", *options), words)
            for options, words in (
                (("--repeat", "0"), ["--repeat", "equal to 1"]),
                (("--repeat", "many"), ["--repeat"]),
                (("--gpus", "8"), ["--device and --gpus", "give both"]),
                (("--gpus", "8", "--device", "H1"), ["expected one of A100"]),
                (("--gpus", "9", "--device", "H100"), ["whole nodes of 8"]),
                (("--jsn",), ["--jsn"]),
            )
        ),
        (("plan",), ["SWEEP", "mfsdp-bench plan --help"]),
        (("schema", "sweeep"), ["extra argument", "mfsdp-bench schema --help"]),
        (("schema", "run"), ["'schema run' was removed", "below base"]),
        (("report", "--format", "matrix"), ["'report --format matrix' was removed", "compare"]),
        (("report", "--format", "xlsx"), ["'html', 'pr'. (mfsdp-bench report"]),
        (("show", "8f3a"), ["'show' was removed: use status RUN"]),
        (("validate", "--case", "ordered"), ["'ordered' was removed", "test_late_bugs.py"]),
        (("logs", "8f3a", "--rank", "1"), ["'logs' was removed: use status RUN --logs"]),
        (("status", "8f3a", "--logs", "--rank", "1"), ["'status --rank' was removed", "rankN.log"]),
    ],
)
def test_what_cannot_be_meant_is_refused(in_process, arguments, words):
    refused(in_process(*arguments), *words)


def written_to(cli, descriptor: object, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose standard output is `descriptor`."""
    done = subprocess.run(
        cli.command(*arguments),
        cwd=cli.folder,
        env=cli.environment,
        stdout=descriptor,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=200,
    )
    return done.returncode, done.stderr


def test_a_reader_that_goes_away_is_no_error(cli):
    read, write = os.pipe()
    os.close(read)
    ended = written_to(cli, write, "plan", "quickstart", "--json")
    os.close(write)
    assert ended == (0, "")


@pytest.mark.parametrize(
    "arguments", [("plan", "quickstart"), ("--help",), ("plan", "none.yaml")], ids=" ".join
)
def test_no_output_has_colours_where_it_is_no_terminal(in_process, arguments):
    _, out, err = in_process(*arguments)
    assert out + err
    assert "\x1b" not in out + err


def test_the_entry_point_passes_the_code_on(monkeypatch):
    monkeypatch.setattr("sys.argv", ["mfsdp-bench", "plan", "none.yaml"])
    with pytest.raises(SystemExit) as caught:
        command_line.main()
    assert caught.value.code == 2


def test_control_characters_of_a_file_do_not_reach_the_terminal(in_process, tmp_path: Path):
    (tmp_path / "s.yaml").write_text('name: a\ndescription: "\\e]0;owned\\a \\u202e"\n')
    _, out, _ = in_process("plan", "s.yaml")
    assert "owned" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_an_output_that_cannot_hold_a_character_shows_its_code(cli):
    path = cli.sweep("name: a\ndescription: caf\u00e9\n")
    done = cli.run("plan", path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "caf\\xe9" in done.stdout


def test_a_full_disk_under_the_output_is_named(cli):
    with Path("/dev/full").open("w") as full:
        ended = written_to(cli, full, "plan", "quickstart")
    assert ended == (3, "error: no space to write to: the output\n")


@pytest.mark.parametrize("words", [(), ("baseline",)], ids=["alone", "baseline"])
def test_without_a_verb_the_help_is_printed_and_is_no_error(in_process, words):
    code, _, err = in_process(*words)
    assert (code, err.lstrip().startswith("Usage: mfsdp-bench")) == (2, True)
    assert "error:" not in err
