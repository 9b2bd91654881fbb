"""The command line: what it prints where, how it exits, and that its documented lines work."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from m31jax import Completion, ConfigError, Engine, SamplingParams, presets
from m31jax.finish import Step
from m31jax.request import Usage
from serving.__main__ import COMMANDS, cli
from serving.commands.options import FORMATS, PRESETS

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _restored_logging():
    """Commands set up m31jax's logger, which other tests of this process share."""
    log = logging.getLogger("m31jax")
    before = (log.level, list(log.handlers), log.propagate)
    yield
    log.level, log.handlers, log.propagate = before


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("M31JAX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*args, stdin=None):
    return CliRunner().invoke(cli, list(args), input=stdin, prog_name="m31jax")


def answer(result):
    """The JSON object that is all of stdout."""
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def leaves(command=cli, path=()):
    """(path, command) of every command that is no group."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from leaves(command.get_command(context, name), (*path, name))


LEAVES = dict(leaves())


# Help


@pytest.mark.parametrize("path", [(), ("checkpoint",), ("bench",), *LEAVES], ids=" ".join)
def test_help_has_an_example_that_parses(path):
    result = run(*path, "--help")
    assert result.exit_code == 0
    examples = [
        line.removeprefix("Example: ")
        for line in map(str.strip, result.stdout.splitlines())
        if line.removeprefix("Example: ").startswith("m31jax ")
    ]
    assert examples
    for example in examples:
        parse(example)


def parse(line):
    """Parse a documented line as a shell and click would, and run nothing."""
    name, *args = shlex.split(line, comments=True)
    assert name == "m31jax"
    command, context = cli, click.Context(cli)
    while isinstance(command, click.Group):
        word = args.pop(0)
        command = command.get_command(context, word)
        assert command is not None, f"{line}: no command {word}"
    command.make_context(command.name, args)


def documented():
    for file in ("README.md", "CONTRIBUTING.md"):
        text = (REPOSITORY / file).read_text("utf-8")
        yield from re.findall(r"^m31jax .+$", text, re.MULTILINE)


@pytest.mark.parametrize("line", list(documented()))
def test_documented_lines_parse(line):
    parse(line)


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md"])
def test_documented_files_exist(file):
    text = (REPOSITORY / file).read_text("utf-8")
    named = re.findall(r"`((?:m31jax|tests|serving|sharding|tools)/[\w./-]+)`", text)
    assert len(named) >= 5
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_there_are_documented_lines_and_a_wrong_one_is_seen():
    assert len(list(documented())) >= 8
    with pytest.raises(click.UsageError):
        parse("m31jax generate MODEL --promt hello")


def test_the_options_name_every_preset_and_format():
    assert tuple(presets.PRESETS) == PRESETS
    assert tuple(presets.FORMATS) == FORMATS


def test_the_promised_options_exist():
    """Those of `generate`, which scripts rely on; `serve`-like commands share the engine's."""
    promised = (
        "--prompt --raw --prompt-ids --prompt-file --max-tokens --temperature --top-p --top-k "
        "--seed --stop --ignore-eos --drafter --draft-tokens --tp --target --dtype --kv-dtype "
        "--index-dtype --activation-quant --json"
    )
    have = {name for option in LEAVES["generate",].params for name in option.opts}
    assert set(promised.split()) <= have
    make = {name for option in LEAVES["checkpoint", "make"].params for name in option.opts}
    promised = "--preset --format --drafter --seed --dry-run --output --drafter-for --from --json"
    assert set(promised.split()) <= make


@pytest.mark.parametrize("path", list(LEAVES), ids=" ".join)
def test_every_command_takes_json(path):
    assert any("--json" in option.opts for option in LEAVES[path].params)


def test_help_is_quick_because_jax_is_not_imported():
    code = (
        "import sys; from click.testing import CliRunner; from serving.__main__ import cli\n"
        f"for name in {COMMANDS!r}:\n"
        "    assert CliRunner().invoke(cli, [name, '--help']).exit_code == 0\n"
        "assert 'jax' not in sys.modules and 'm31jax' not in sys.modules, 'imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Exit codes


@pytest.mark.parametrize(
    "args",
    [
        ("serv",),
        ("generate",),
        ("generate", "tiny"),
        ("generate", "tiny", "--prompt", "a", "--prompt-ids", "1"),
        ("generate", "tiny", "--prompt-ids", "1,,2"),
        ("generate", "tiny", "--prompt-ids", "1,-2"),
        ("generate", "tiny", "--prompt-ids", "1", "--raw"),
        ("generate", "tiny", "--prompt", "a", "--dtype", "float16"),
        ("generate", "tiny", "--prompt", "a", "--tp", "0"),
        ("generate", "tiny", "--prompt-file", "no-such-file"),
        ("checkpoint", "make", "--format", "bf16", "--output", "x"),
        ("checkpoint", "make", "--preset", "tiny", "--output", "x"),
        ("checkpoint", "make", "--preset", "tiny", "--format", "bf16"),
        ("checkpoint", "make", "--preset", "tiny", "--from", "y", "--format", "bf16"),
        ("checkpoint", "make", "--from", "y", "--format", "bf16", "--output", "x"),
        ("checkpoint", "make", "--from", "y", "--format", "nvfp4", "--dry-run"),
        ("checkpoint", "make", "--drafter-for", "y", "--format", "nvfp4"),
        ("bench", "step"),
        ("bench", "step", "x", "--preset", "tiny"),
        ("bench", "ops", "no_such_op"),
        ("bench", "ops", "mlp", "--kind", "cuda"),
        ("doctor", "--op", "no_such_op"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_prints_nothing_on_stdout(args):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("explain", "Org/Model"), "hf download Org/Model --local-dir Model"),
        (("explain", str(REPOSITORY / "README.md")), "is a file; it must be a directory"),
        (("generate", "no-such-model", "--prompt-ids", "1"), "does not exist"),
        (("checkpoint", "inspect", "no-such-model"), "does not exist"),
        (("generate", "tiny", "--prompt-ids", "1", "--max-tokens", "0"), "max_tokens=0"),
        (("generate", "tiny", "--prompt-ids", "1", "--temperature", "-1"), "temperature=-1"),
        (("explain", "tiny", "--tp", "3"), "tp=3"),
        (("explain", "tiny", "--target", "sm_00"), "unknown target 'sm_00'"),
    ],
)
def test_a_failure_is_one_line_and_exits_with_1(args, message, cache):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.stderr.endswith(line + "\n")


def test_an_unknown_variable_is_a_failure(cache, monkeypatch):
    monkeypatch.setenv("M31JAX_" + "DISABEL_MLP", "1")
    result = run("explain", "tiny")
    assert result.exit_code == 1
    assert "M31JAX_DISABLE_MLP" in result.stderr


def test_a_list_of_problems_is_still_one_line(stub):
    stub.error = ConfigError("x has 2 problems:\n  first\n  second")
    result = run("generate", "x", "--prompt-ids", "1")
    assert result.stderr == "error: x has 2 problems: first; second\n"


def test_other_errors_are_not_hidden(stub):
    stub.error = ValueError("a mistake of ours")
    result = run("generate", "x", "--prompt-ids", "1")
    assert isinstance(result.exception, ValueError)


# generate and demo, over an engine that answers what it is told


class Tokenizer:
    """One id a character."""

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, messages):
        return f"<{messages[0]['role']}>{messages[0]['content']}"

    def encode(self, text, *, add_special=True):
        return [*([1] if add_special else []), *map(ord, text)]


class Stub:
    """Stands for an engine and remembers what it was asked."""

    def __init__(self):
        self.tokenizer = Tokenizer("template")
        self.config = type("Config", (), {"vocab_size": 100})
        self.error = None
        self.loaded = self.prompts = self.params = None

    def load(self, model, **options):
        if self.error is not None:
            raise self.error
        self.loaded = (model, options)
        return self

    def encode(self, prompt):
        return self.tokenizer.encode(prompt)

    def generate(self, prompts, params):
        self.prompts, self.params = prompts, params
        usage = Usage(len(prompts[0]), 2)
        return [Completion([5, 6], "some\ntext", "length", usage=usage, stats={"steps": 1})]

    def stream(self, prompt, params):
        self.prompts, self.params = [prompt], params
        yield Step((7,), "one ")
        yield Step((8, 9), "two", "length")


@pytest.fixture
def stub(monkeypatch):
    stub = Stub()
    monkeypatch.setattr(Engine, "load", stub.load)
    return stub


def test_generate_prints_the_text_alone_on_stdout(stub):
    result = run("generate", "dir", "--prompt", "Hi")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "some\ntext\n"
    assert stub.prompts == [[ord(c) for c in "<user>Hi"]]


def test_generate_json_has_the_promised_keys(stub):
    assert answer(run("generate", "dir", "--prompt-ids", "3, 4", "--json")) == {
        "prompt_ids": [3, 4],
        "token_ids": [5, 6],
        "text": "some\ntext",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 0},
        "stats": {"steps": 1},
    }


def test_raw_and_template_free_prompts_are_sent_as_they_are(stub):
    run("generate", "dir", "--prompt", "Hi", "--raw")
    assert stub.prompts == [[1, *map(ord, "Hi")]]
    stub.tokenizer = Tokenizer(None)
    run("generate", "dir", "--prompt", "Ho")
    assert stub.prompts == [[1, *map(ord, "Ho")]]


def test_a_prompt_file_is_read_to_the_byte(stub, tmp_path):
    (tmp_path / "prompt").write_bytes("é\r\n".encode())
    run("generate", "dir", "--prompt-file", str(tmp_path / "prompt"), "--raw")
    assert stub.prompts == [[1, *map(ord, "é\r\n")]]
    run("generate", "dir", "--prompt-file", "-", "--raw", stdin="x")
    assert stub.prompts == [[1, ord("x")]]
    (tmp_path / "prompt").write_bytes(b"\xff")
    result = run("generate", "dir", "--prompt-file", str(tmp_path / "prompt"))
    assert result.exit_code == 1
    assert "is not UTF-8 text" in result.stderr


def test_without_a_tokenizer_ids_come_out_and_stderr_says_so(stub):
    stub.tokenizer = None
    result = run("generate", "dir", "--prompt-ids", "3")
    assert result.stdout == "5,6\n"
    assert "no tokenizer.json" in result.stderr


def test_every_option_reaches_the_engine(stub):
    sampling = "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 4 --seed 2 --ignore-eos"
    engine = "--tp 1 --target cpu --dtype bfloat16 --kv-dtype fp8 --index-dtype nvfp4"
    rest = "--activation-quant none --drafter none --draft-tokens 3 --stop a --stop b"
    result = run(*f"generate dir --prompt-ids 1 {sampling} {engine} {rest}".split())
    assert result.exit_code == 0, result.stderr
    assert stub.params == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=2,
        stop=("a", "b"),
        ignore_eos=True,
    )
    assert stub.loaded == (
        "dir",
        {
            "tp": 1,
            "target": "cpu",
            "dtype": "bfloat16",
            "kv_dtype": "fp8",
            "index_dtype": "nvfp4",
            "activation_quant": "none",
            "drafter": None,
            "draft_tokens": 3,
        },
    )


def test_demo_streams_the_text_alone_on_stdout(stub):
    result = run("demo", "--prompt", "Hi", "--max-tokens", "3")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "one two\n"
    assert "tokens/s" in result.stderr
    assert stub.loaded[0] == "tiny"
    assert stub.params.max_tokens == 3


def test_demo_without_a_tokenizer_streams_ids(stub):
    stub.tokenizer = None
    result = run("demo", "--prompt", "\x05~")
    assert result.stdout == "7,8,9\n"
    assert stub.prompts == [[5, ord("~") % 100]]
    assert "no tokenizer" in result.stderr


def test_demo_json(stub):
    out = answer(run("demo", "--json"))
    assert (out["token_ids"], out["text"], out["finish_reason"]) == ([7, 8, 9], "one two", "length")
    assert out["stats"]["tokens_per_s"] > 0


# The real thing


@pytest.mark.long  # `.ci/run` runs `make demo` and looks at its answer
def test_demo_runs_with_nothing_configured(tmp_path):
    environ = os.environ | {"M31JAX_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "serving", "demo", "--max-tokens", "3"],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+,\d+,\d+\n", done.stdout)
    assert "its weights, and its text, are random" in done.stderr


def test_explain_is_what_the_engine_says(cache):
    explained = answer(run("explain", "tiny", "--kv-dtype", "fp8", "--json"))
    engine = Engine.load("tiny", kv_dtype="fp8", progress=False)
    assert explained == engine.explain()
    assert explained["pins"] == explained["kernel_objects"] == []
    text = run("explain", "tiny").stdout
    assert "index_score: kind reference, arch cpu" in text
    assert "params_bytes: " in text


def test_checkpoints_are_made_inspected_and_converted(tmp_path):
    made, orbax, back = (str(tmp_path / name) for name in ("made", "orbax", "back"))
    say = answer(
        run(*"checkpoint make --preset tiny --format nvfp4 --json".split(), "--output", made)
    )
    dry = answer(run(*"checkpoint make --preset tiny --format nvfp4 --dry-run --json".split()))
    assert say["output"] == made
    assert dry["output"] is None
    assert say["tensors"] == dry["tensors"]

    report = answer(run("checkpoint", "inspect", made, "--json"))
    assert report["problems"] == []
    assert report["total_bytes"] == say["total_bytes"] == dry["total_bytes"]

    assert answer(run("checkpoint", "convert", made, "--output", orbax, "--json"))["tp"] == 1
    assert answer(run("checkpoint", "inspect", orbax, "--json"))["layout"] == "orbax"
    answer(run("checkpoint", "convert", orbax, "--output", back, "--json"))
    for file in Path(made).iterdir():
        assert file.read_bytes() == (Path(back) / file.name).read_bytes(), file.name

    assert run("checkpoint", "convert", orbax, "--output", made, "--tp", "2").exit_code == 2
    assert run("checkpoint", "convert", made, "--output", orbax).exit_code == 1
    drafted = answer(run("checkpoint", "make", "--drafter-for", made, "--json"))
    assert drafted["output"] == made
    assert answer(run("checkpoint", "inspect", made, "--json"))["drafter"] is not None

    (shard,) = Path(made).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged = run("checkpoint", "inspect", made, "--json")
    assert damaged.exit_code == 1
    assert json.loads(damaged.stdout)["problems"]
    assert damaged.stderr.endswith("error: " + made + " has 1 problems\n")


def test_a_bf16_checkpoint_is_requantised(tmp_path):
    plain, small = str(tmp_path / "plain"), str(tmp_path / "small")
    run(*"checkpoint make --preset tiny --format bf16 --output".split(), plain)
    done = answer(
        run("checkpoint", "make", "--from", plain, "--format", "mxfp8", "--output", small, "--json")
    )
    report = answer(run("checkpoint", "inspect", small, "--json"))
    assert report["format"] == {"linear": "mxfp8", "experts": "mxfp8"}
    assert report["total_bytes"] == done["total_bytes"]


def test_devices_are_simulated_where_nobody_said_how_many(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    code = (
        "from serving.commands.options import simulate_devices\n"
        "simulate_devices(2)\n"
        "import jax; print(len(jax.devices()))"
    )
    for flags, count in ((None, 2), ("--xla_force_host_platform_device_count=3", 3)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            env=environ | ({} if flags is None else {"XLA_FLAGS": flags}),
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"{count}\n", done.stderr
        assert ("simulating 2 devices" in done.stderr) == (flags is None)


def test_doctor_runs_an_ops_oracle():
    report = answer(run("doctor", "--op", "rms_norm", "--json"))
    assert report["ok"]
    assert report["targets"]["cpu"] == "can run"
    assert {row["op"] for row in report["ops"]} == {"rms_norm"}
    assert report["versions"]["jax"]


def test_doctor_fails_where_an_op_disagrees(monkeypatch):
    from m31jax.ops import rms_norm

    real = rms_norm.reference
    monkeypatch.setattr(rms_norm, "CELLS", rms_norm.CELLS[:1])
    calls = []

    def wrong_the_second_time(*args, **kwargs):
        calls.append(None)
        return real(*args, **kwargs) * (1 if len(calls) == 1 else 1.01)

    monkeypatch.setattr(rms_norm, "reference", wrong_the_second_time)
    result = run("doctor", "--op", "rms_norm", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["ops"]
    assert not row["ok"]
    assert "ulp" in row["problem"]
    assert result.stderr.endswith("error: 1 of 1 cells disagree\n")


def test_bench_ops_rows(monkeypatch, tmp_path):
    from m31jax.ops import rms_norm

    monkeypatch.setattr(rms_norm, "CELLS", rms_norm.CELLS[:1])
    args = ["bench", "ops", "rms_norm", "--rounds", "2", "--json", "--output"]
    (row,) = answer(run(*args, str(tmp_path / "rows.json")))["rows"]
    assert (row["op"], row["ok"]) == ("rms_norm", True)
    assert row["ratio_to_floor"] > 0
    assert row["command"].startswith("m31jax")
    assert {"device", "versions", "commit"} <= row.keys()
    assert json.loads((tmp_path / "rows.json").read_text("utf-8")) == [row]
