"""The ``tq-ggml`` command."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tq_ggml import streams
from tq_ggml.cache_types import CacheType, Pair, names, parse_pair, resolve
from tq_ggml.errors import CacheTypeError, TqError
from tq_ggml.report import FORMATS

DEFAULT_TYPES = "f16,q8_0,q4_0,tq4,tq3"
DEFAULT_CTX, DEFAULT_DEPTH, DEFAULT_CHAT_CTX = 2048, 4096, 4096
DEFAULT_WINDOWS, DEFAULT_GEN, DEFAULT_ROUNDS = 4, 32, 3
DEFAULT_PASSKEY, DEFAULT_PASSKEY_DEPTHS = [1024, 4096, 8192], [10, 50, 90]
DEFAULT_ANSWER, N_PROMPTS = 64, 40  # the prompts of tq_ggml/prompts.txt
MAX_TOKENS = 1 << 24  # no context is longer; catches slips before they become an out-of-memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 when ``doctor`` found a problem; 2 after an error message for the user; 130 after Ctrl-C; 141 when whatever
        reads our output went away.
    """
    streams.prepare()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # also after --help: a full disk shows only here
    except TqError as error:
        return _fail(error, argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        streams.discard_output()
        return 141
    except OSError as error:
        streams.discard_output()
        return _fail(f"{error.filename or 'cannot write the output'}: {error.strerror or error}", argv)


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    # numpy and the engine come in here, so that --help is quick.
    from tq_ggml import commands

    return getattr(commands, args.run)(args) or 0


def _fail(error: TqError | str, argv: Sequence[str] | None) -> int:
    from tq_ggml import doctor

    words = sys.argv[1:] if argv is None else argv
    with contextlib.suppress(OSError):  # stderr may be what cannot be written
        print(f"tq-ggml: error: {_without_key(str(error), words)}", file=sys.stderr)
    with contextlib.suppress(OSError):  # a help for later, not worth a second error now
        doctor.last_error_path().parent.mkdir(parents=True, exist_ok=True)
        line = _without_key(f"tq-ggml {' '.join(words)}: {error}\n", words)
        doctor.last_error_path().write_text(line, encoding="utf-8", errors="backslashreplace")
    return 2


def _without_key(text: str, words: Sequence[str]) -> str:
    """A text with ``***`` for the value of ``--api-key`` on a command line; a misspelt option's value is as secret."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(("--ap", "--key")):
            _, is_joined, value = word.partition("=")
            key = value if is_joined else after
            text = text.replace(key, "***") if key else text
    return text


# ---- arguments -----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are one line like every other error, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise TqError(f"{message} (`{self.prog} --help` lists the options)")


def _whole(low: int, high: int = MAX_TOKENS) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.strip().lstrip("-").isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return parse


def _wholes(low: int, high: int = MAX_TOKENS) -> Callable[[str], list[int]]:
    one = _whole(low, high)
    return lambda text: [one(part) for part in text.split(",")]


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 10:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")


def _readable(text: str) -> str:
    """An argument whose bytes were not text in the terminal's encoding, with replacement characters for those."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _key(text: str) -> str:
    # An empty one is most likely a variable that was not set; the rest cannot be sent in a header.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("a key (also TQ_GGML_API_KEY) is ASCII characters, none of them a space")
    return text


def _type(text: str) -> CacheType:
    try:
        return resolve(text)
    except CacheTypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pair(text: str) -> Pair:
    try:
        return parse_pair(text)
    except CacheTypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pairs(text: str) -> list[Pair]:
    return list(dict.fromkeys(_pair(part) for part in text.split(",")))


def _shared() -> argparse.ArgumentParser:
    """Options that every command with a model has."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-m", "--model", required=True, help="GGUF file, or a name that `tq-ggml models` lists")
    parser.add_argument(
        "-t",
        "--threads",
        type=_whole(1, 512),
        default=os.cpu_count() or 1,
        help="CPU threads (default: all, %(default)s)",
    )
    parser.add_argument(
        "--calibration",
        default="auto",
        metavar="auto|on|off|FILE",
        help="constants that condition the keys: auto for tq types (made once where the model has none), on for every "
        "quantised type, off, or a file of `tq-ggml calibrate` (default: auto)",
    )
    parser.add_argument(
        "--rpc", metavar="HOST:PORT[,...]", help="split the model over these ggml-rpc-servers (docs/rpc.md)"
    )
    types = parser.add_argument_group(f"cache types ({names()})")
    types.add_argument(
        "--cache-type", type=_pair, metavar="TYPE", help="type of keys and values, or KEYS/VALUES: tq4, q8_0/tq4"
    )
    types.add_argument("-ctk", "--cache-type-k", type=_type, metavar="TYPE", help="type of keys")
    types.add_argument("-ctv", "--cache-type-v", type=_type, metavar="TYPE", help="type of values")
    return parser


def _measuring() -> argparse.ArgumentParser:
    """Options that compare, perplexity and bench share."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--types",
        type=_pairs,
        metavar="LIST",
        help=f"cache types to compare, KEYS/VALUES for a mixed pair (default: {DEFAULT_TYPES}; "
        "f16 and the one type when --cache-type is given)",
    )
    _add_quality(parser.add_argument_group("quality (bench ignores them)"))
    _add_speed(parser.add_argument_group("speed (perplexity ignores them)"))
    _add_behaviour(parser.add_argument_group("behaviour (off unless asked for, it takes minutes; compare only)"))
    output = parser.add_argument_group("output")
    _add_output(output, FORMATS)
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw the result as png, svg or pdf")
    return parser


def _add_quality(quality: Any) -> None:
    quality.add_argument("-f", "--text", metavar="FILE", help="UTF-8 text, or a novel's title (default: the demo text)")
    quality.add_argument(
        "-c",
        "--ctx",
        type=_whole(16),
        metavar="N",
        help=f"tokens per window (default: {DEFAULT_CTX}, or the model's limit)",
    )
    quality.add_argument(
        "--windows",
        type=_whole(1),
        default=DEFAULT_WINDOWS,
        metavar="N",
        help="windows to score (default: %(default)s)",
    )


def _add_speed(speed: Any) -> None:
    speed.add_argument(
        "-d",
        "--depth",
        "--n-depth",
        type=_wholes(0),
        metavar="N[,N]",
        help=f"tokens in the cache when decoding starts (default: {DEFAULT_DEPTH}, or the model's limit)",
    )
    speed.add_argument(
        "-p",
        "--n-prompt",
        type=_whole(0),
        metavar="N",
        help="tokens whose prefill is timed after the depth, 0 for none (default: the depth's own prefill is timed)",
    )
    speed.add_argument(
        "-n",
        "--n-gen",
        type=_whole(0),
        default=DEFAULT_GEN,
        metavar="N",
        help="tokens to decode (default: %(default)s)",
    )
    speed.add_argument(
        "-r", "--repetitions", type=_whole(1), default=DEFAULT_ROUNDS, metavar="N", help="rounds (default: %(default)s)"
    )


def _add_behaviour(behaviour: Any) -> None:
    behaviour.add_argument(
        "--passkey",
        type=_wholes(1),
        nargs="?",
        const=DEFAULT_PASSKEY,
        metavar="N[,N]",
        help=f"find a number in a text of N tokens (N without a value: {_comma(DEFAULT_PASSKEY)}, as the model allows)",
    )
    behaviour.add_argument(
        "--passkey-depths",
        type=_wholes(0, 100),
        default=DEFAULT_PASSKEY_DEPTHS,
        metavar="P[,P]",
        help=f"where in the text it is, in per cent; one run each (default: {_comma(DEFAULT_PASSKEY_DEPTHS)})",
    )
    behaviour.add_argument(
        "--agreement",
        type=_whole(1, N_PROMPTS),
        nargs="?",
        const=N_PROMPTS,
        metavar="N",
        help=f"compare greedy answers with an f16 cache's, to N of {N_PROMPTS} prompts (N without a value: all)",
    )
    behaviour.add_argument(
        "--agreement-tokens",
        type=_whole(1),
        default=DEFAULT_ANSWER,
        metavar="N",
        help="tokens of each answer (default: %(default)s)",
    )


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _add_output(parser: Any, formats: Sequence[str]) -> None:
    parser.add_argument("-o", "--output", choices=formats, default="md", help="format on stdout (default: md)")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="tq-ggml", description="A smaller KV cache for llama.cpp: types tq3 and tq4.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=parents)
        command.set_defaults(run=name)
        return command

    shared, measuring = _shared(), _measuring()
    calibrating = _calibrating()
    add("compare", "Memory, quality and speed of cache types side by side.", shared, measuring)
    add("perplexity", "Perplexity and KL divergence against an f16 cache.", shared, measuring)
    add("bench", "Prefill and decode tokens per second at depths.", shared, measuring)
    _add_chat(add("chat", "Talk to a model in the terminal, or line by line over a pipe.", shared))
    _add_serve(add("serve", "An OpenAI-compatible server (llama-cpp-python's) with this cache.", shared))
    _add_fit(add("fit", "What a model and its cache take, and the longest context that fits."))
    _add_calibrate(add("calibrate", "Gather the constants that condition a model's keys.", calibrating))
    _add_inspect(
        add("inspect", "What a model's keys and values are like, and what cache types do to them.", calibrating)
    )
    _add_recommend(add("recommend", "Which cache type suits a model.", calibrating))
    _add_output(add("doctor", "What is loaded, and does it work."), ("md", "json"))
    _add_models(add("models", "Models that Python packages carry."))
    return parser


def _calibrating() -> argparse.ArgumentParser:
    """Options of the commands that run a calibration."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model", metavar="MODEL", help="GGUF file, or a name that `tq-ggml models` lists")
    parser.add_argument("-f", "--text", metavar="FILE", help="UTF-8 text, or a novel's title (default: a text of ours)")
    parser.add_argument("--tokens", type=_whole(16), metavar="N", help="of the text (default: 512)")
    parser.add_argument("-t", "--threads", type=_whole(1, 512), default=os.cpu_count() or 1, help="CPU threads")
    return parser


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "-o", "--output", type=Path, metavar="GGUF", help="write a copy of the model with the constants"
    )
    target.add_argument(
        "--side-file", type=Path, metavar="FILE", help="write the constants alone (default: cache folder)"
    )
    parser.add_argument("--dry-run", action="store_true", help="run, say what would be written, write nothing")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_output(parser, FORMATS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result as png, svg or pdf")


def _add_recommend(parser: argparse.ArgumentParser) -> None:
    _add_output(parser, FORMATS)
    parser.add_argument(
        "--max-kld", type=_positive, metavar="NATS", help="KL divergence that is acceptable (default: 0.03)"
    )


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 100:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 100")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--n-ctx", "--ctx", type=_whole(16), metavar="N", help="context (default: 4096, or the model's limit)"
    )
    parser.add_argument("--max-tokens", type=_whole(1), default=512, metavar="N", help="longest reply (default: 512)")
    parser.add_argument(
        "--temp", type=_temperature, default=0.7, metavar="T", help="0 always takes the likeliest token (default: 0.7)"
    )
    parser.add_argument("--seed", type=_whole(0, 2**32 - 1), metavar="N", help="repeat the same replies")
    parser.add_argument("--system", type=_readable, metavar="TEXT", help="system prompt")
    parser.add_argument("--prompt", type=_readable, metavar="TEXT", help="answer this and leave")
    parser.add_argument("--web", action="store_true", help="chat in the browser, on a page that `tq-ggml serve` serves")
    parser.add_argument("--session", type=Path, metavar="FILE", help="go on with what /save has written")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--n-ctx", "--ctx", type=_whole(16), metavar="N", help="context (default: 4096, or the model's limit)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_whole(0, 65535), default=8000, help="0 for a free one (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        type=_key,
        default=os.environ.get("TQ_GGML_API_KEY") or None,
        metavar="KEY",
        help="clients must send it (default: the environment's TQ_GGML_API_KEY, else none)",
    )
    parser.add_argument("--browser", action="store_true", help="open the chat page in the browser")
    parser.add_argument("--alias", metavar="NAME", help="the model's name for clients (default: the file's)")
    parser.add_argument("--chat-format", metavar="NAME", help="of llama-cpp-python (default: the model's template)")
    parser.add_argument("--embedding", action="store_true", help="serve /v1/embeddings")
    parser.add_argument(
        "--queue", type=_whole(0, 1000), default=8, metavar="N", help="requests that may wait (default: %(default)s)"
    )
    parser.add_argument(
        "--drain", type=_whole(0, 3600), default=30, metavar="S", help="seconds for answers to finish on SIGTERM"
    )
    parser.add_argument(
        "--max-body", type=_whole(1024, 1 << 30), default=4 << 20, metavar="BYTES", help="largest request"
    )
    parser.add_argument(
        "--origin", action="append", default=[], metavar="URL", help="a web page's origin that may call the server"
    )


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="GGUF file, or a name that `tq-ggml models` lists")
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help="such as 8G (default: what is free)")
    parser.add_argument(
        "-c", "--ctx", type=_wholes(1), metavar="N[,N]", help="contexts to show (default: some, and the model's limit)"
    )
    _add_output(parser, FORMATS)


def _memory(text: str) -> int:
    from tq_ggml.fit import parse_memory

    try:
        return parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_models(parser: argparse.ArgumentParser) -> None:
    _add_output(parser, FORMATS)
    get = parser.add_subparsers(metavar="get").add_parser("get", help="fetch one, check it and print its path")
    get.add_argument("name", metavar="NAME")
    get.add_argument("--accept-licence", "--accept-license", action="store_true", help="of a model that asks for it")
    get.set_defaults(run="get_model")
