"""`m31jax generate`: one completion."""

from typing import IO, Any

import click

from .options import answer_json, engine_options, json_option, load_engine, say
from .prompts import as_object, encode, join_ids


class TokenIds(click.ParamType):
    """A comma-separated list of token ids."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is not a list of token ids; write for example 1,2,3", param, ctx)
        return [int(part) for part in parts]


@click.command("generate", short_help="Complete one prompt.")
@click.argument("model")
@click.option("--prompt", metavar="TEXT", help="Text; one user turn if MODEL has a chat template.")
@click.option("--prompt-ids", type=TokenIds(), metavar="1,2,3", help="Token ids.")
@click.option(
    "--prompt-file", type=click.File("rb"), metavar="F", help="Text from a file; - is stdin."
)
@click.option("--raw", is_flag=True, help="Send text as it is, without the chat template.")
@click.option(
    "--max-tokens",
    type=int,
    default=128,
    show_default=True,
    metavar="N",
    help="Most tokens to generate.",
)
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, metavar="T", help="0 is greedy."
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    metavar="P",
    help="Keep the likeliest tokens up to this mass.",
)
@click.option(
    "--top-k",
    type=int,
    default=0,
    show_default=True,
    metavar="K",
    help="Keep the K likeliest tokens; 0 is off.",
)
@click.option("--seed", type=int, metavar="S", help="The same seed gives the same tokens.")
@click.option("--stop", multiple=True, metavar="S", help="Text that ends the answer; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@engine_options
@json_option
def command(
    model: str,
    prompt: str | None,
    prompt_ids: list[int] | None,
    prompt_file: IO[bytes] | None,
    raw: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate one completion with MODEL, a checkpoint's directory or `tiny`.

    \b
    Examples:
      m31jax generate tiny --prompt-ids 1,2,3 --max-tokens 16
      m31jax generate ./MiniMax-M3.1 --prompt "Why is the sky blue?" --temperature 0.7 --seed 1
    """
    if sum(given is not None for given in (prompt, prompt_ids, prompt_file)) != 1:
        raise click.UsageError("give exactly one of --prompt, --prompt-ids and --prompt-file")
    if raw and prompt_ids is not None:
        raise click.UsageError("--raw is about text; --prompt-ids is sent as it is anyway")

    from m31jax import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    text = prompt if prompt_file is None else read_text(prompt_file)
    engine = load_engine(model, options)
    ids = encode(engine, text, is_raw=raw) if text is not None else (prompt_ids or [])
    (completion,) = engine.generate([ids], params)
    if as_json:
        answer_json(as_object(ids, completion))
    elif engine.tokenizer is not None:
        click.echo(completion.text)
    else:
        say("the model directory has no tokenizer.json: ids go in and come out")
        click.echo(join_ids(completion.token_ids))


def read_text(file: IO[bytes]) -> str:
    """A prompt from a file, to the byte; RequestError if it is not UTF-8."""
    try:
        return file.read().decode()
    except UnicodeDecodeError as error:
        from m31jax import RequestError

        raise RequestError(f"{file.name} is not UTF-8 text: {error}; convert it first") from error
