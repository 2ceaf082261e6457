"""The commands of ``tq-ggml``; each takes the parsed arguments of `tq_ggml.cli`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tq_ggml import behaviour, benchmark, calibration, engine, report, rpc, texts
from tq_ggml.benchmark import Test
from tq_ggml.cache_types import CacheType, Pair, parse_pair
from tq_ggml.calibration_commands import calibrate, inspect, recommend  # noqa: F401 - cli.py looks them up here
from tq_ggml.chat import Chat
from tq_ggml.cli import (
    DEFAULT_CHAT_CTX,
    DEFAULT_CTX,
    DEFAULT_DEPTH,
    DEFAULT_GEN,
    DEFAULT_PASSKEY,
    DEFAULT_ROUNDS,
    DEFAULT_TYPES,
    DEFAULT_WINDOWS,
    build_parser,
)
from tq_ggml.doctor import as_rows, examine
from tq_ggml.errors import TqError
from tq_ggml.evaluation import F16, cut_windows, evaluate
from tq_ggml.fit import fit  # noqa: F401 - cli.py looks it up here
from tq_ggml.models import available, check_gguf, get, resolve_model
from tq_ggml.prompts import load_prompts
from tq_ggml.terminal import run as run_chat

_BEHAVIOUR = {"passkey": None, "agreement": None}  # what is off unless asked for


def compare(args: argparse.Namespace) -> None:
    """``tq-ggml compare``: one row per type with the figures of perplexity and bench."""
    if args.depth and len(args.depth) > 1:
        raise TqError("compare takes one --depth; `tq-ggml bench` takes several")
    with _opened(args) as model:
        # Whatever can be wrong with the request is found before minutes are spent on half of it.
        windows, tests = _windows(args, model), _tests(args, model)
        passkeys, questions = _passkeys(args, model), _questions(args, model)
        _calibrate(args, model)
        quality = _quality_rows(args, model, windows)
        speed = _speed_rows(args, model, tests)
        # Both measure a cache size; the one of the scored windows (--ctx) counts.
        rows = [s | q for q, s in zip(quality, speed, strict=True)]
        _add_behaviour(args, model, rows, passkeys, questions)
        _print(args, model, rows, rows, report.compare_columns(rows))


def perplexity(args: argparse.Namespace) -> None:
    """``tq-ggml perplexity``: quality only."""
    _note_ignored(
        args, {"depth": None, "n_prompt": None, "n_gen": DEFAULT_GEN, "repetitions": DEFAULT_ROUNDS} | _BEHAVIOUR
    )
    with _opened(args) as model:
        windows = _windows(args, model)
        _calibrate(args, model)
        rows = _quality_rows(args, model, windows)
        _print(args, model, rows, rows, report.PERPLEXITY)


def bench(args: argparse.Namespace) -> None:
    """``tq-ggml bench``: speed only, for each depth."""
    _note_ignored(args, {"text": None, "ctx": None, "windows": DEFAULT_WINDOWS} | _BEHAVIOUR)
    with _opened(args) as model:
        tests = _tests(args, model)
        _calibrate(args, model)
        rows = _speed_rows(args, model, tests)
        _print(args, model, rows, report.bench_tests(rows), report.BENCH)


def _note_ignored(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """The three commands share their options, so that a line can be run with another; say which have no effect."""
    given = [f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(args, name) != default]
    if given:
        _note(f"note: {args.command} makes no use of {', '.join(given)}; compare does")


def _opened(args: argparse.Namespace) -> engine.Model:
    """The model, once everything that can be checked without it has been."""
    args.types = _types(args)
    if args.plot:
        report.check_plot(args.plot)
    path = _model_path(args)
    if args.command != "bench":
        args.text = texts.demo_text() if args.text is None else texts.named_text(args.text)
    return engine.Model(path)


def _model_path(args: argparse.Namespace) -> Path:
    """The model's file; and the servers that it is to be split over, made ready."""
    path = resolve_model(args.model)
    if args.rpc:
        rpc.use_servers(args.rpc)
    return path


def _calibrate(args: argparse.Namespace, model: engine.Model) -> None:
    """Takes a run where it is the model's first, so it comes after everything that can be wrong with the request."""
    types_k = [type_k for type_k, _ in args.types]
    model.calibration = calibration.choose(args.calibration, model.info, types_k, n_threads=args.threads)


def _types(args: argparse.Namespace) -> list[Pair]:
    k, v = _sides(args)
    if args.types and (k or v):
        raise TqError("--types already says which cache types to compare; leave --cache-type out")
    if not (k or v):
        return args.types or [parse_pair(name) for name in DEFAULT_TYPES.split(",")]
    return list(dict.fromkeys([F16, (k or F16[0], v or F16[1])]))


def _sides(args: argparse.Namespace) -> tuple[CacheType | None, CacheType | None]:
    """Types of keys and of values, None where the command line does not say."""
    k, v = args.cache_type or (None, None)
    return args.cache_type_k or k, args.cache_type_v or v


def _windows(args: argparse.Namespace, model: engine.Model) -> np.ndarray:
    n_ctx = args.ctx or min(DEFAULT_CTX, model.n_ctx_train)
    _warn_length(model, "--ctx", n_ctx)
    return cut_windows(model.tokenize(args.text, add_bos=True), n_ctx, args.windows, model.bos)


def _quality_rows(args: argparse.Namespace, model: engine.Model, windows: np.ndarray) -> list[dict[str, Any]]:
    n_windows, n_ctx = windows.shape
    found = evaluate(model, args.types, windows, n_threads=args.threads)
    _note(f"quality: {n_windows} windows of {n_ctx} tokens, {found[0].n_tokens} tokens scored")
    return [quality.row() | {"ctx": n_ctx, "windows": n_windows} for quality in found]


def _tests(args: argparse.Namespace, model: engine.Model) -> list[Test]:
    longest = max(args.n_gen, args.n_prompt or 0)
    default = max(min(DEFAULT_DEPTH, model.n_ctx_train - longest), 0)
    tests = [Test(depth, args.n_gen, args.n_prompt) for depth in args.depth or [default]]
    empty = next((test for test in tests if not (test.prefilled or test.n_gen)), None)
    if empty:
        raise TqError(f"nothing to measure at depth {empty.depth}: give --n-prompt or --n-gen more than 0 tokens")
    _warn_length(model, "--depth", max(test.n_ctx for test in tests))
    return tests


def _speed_rows(args: argparse.Namespace, model: engine.Model, tests: Sequence[Test]) -> list[dict[str, Any]]:
    rows = []
    for test in tests:
        speeds = benchmark.bench(model, args.types, test, repeats=args.repetitions, n_threads=args.threads)
        rows += benchmark.to_rows(speeds)
        _note(f"speed: median of {args.repetitions} rounds at depth {test.depth}")
    return rows


def _passkeys(args: argparse.Namespace, model: engine.Model) -> list[behaviour.Passkey]:
    lengths = args.passkey or []
    if lengths is DEFAULT_PASSKEY:
        lengths = [n for n in lengths if n <= model.n_ctx_train] or [model.n_ctx_train]
    return behaviour.hide_passkeys(model, lengths, [percent / 100 for percent in args.passkey_depths])


def _questions(args: argparse.Namespace, model: engine.Model) -> list[np.ndarray]:
    return behaviour.pose(model, load_prompts()[: args.agreement], args.agreement_tokens) if args.agreement else []


def _add_behaviour(
    args: argparse.Namespace,
    model: engine.Model,
    rows: list[dict[str, Any]],
    passkeys: Sequence[behaviour.Passkey],
    questions: Sequence[np.ndarray],
) -> None:
    found: list[behaviour.Retrieval | behaviour.Agreement] = []
    if passkeys:
        found += behaviour.retrieve(model, args.types, passkeys, n_threads=args.threads)
        _note(f"passkey: {len(args.passkey_depths)} numbers per length, share of their digits that came back")
    if questions:
        agreements = behaviour.agree(
            model, args.types, questions, n_tokens=args.agreement_tokens, n_threads=args.threads
        )
        found += agreements
        _note(
            f"agreement: {len(questions)} prompts, f16 answers of {agreements[0].answer_tokens:.1f} tokens on average"
        )
    for index, result in enumerate(found):
        rows[index % len(rows)] |= result.row()


def _warn_length(model: engine.Model, option: str, n_tokens: int) -> None:
    if n_tokens > model.n_ctx_train:
        _note(f"warning: {option} means {n_tokens} tokens, but the model was trained on {model.n_ctx_train}")


def _print(
    args: argparse.Namespace, model: engine.Model, rows: list[dict], table: list[dict], columns: Sequence[report.Column]
) -> None:
    about = {"model": model.path.stem, "n_threads": args.threads}
    rows, table = [row | about for row in rows], [row | about for row in table]
    sys.stdout.write(report.render(table if args.output == "md" else rows, args.output, columns))
    if args.plot:
        report.plot(rows, args.plot, f"{model.path.stem}, {args.threads} threads")


def _note(line: str) -> None:
    print(line, file=sys.stderr)


# ---- chat, doctor, models ------------------------------------------------------------------------------------------


def chat(args: argparse.Namespace) -> None:
    """``tq-ggml chat``; the engine falls back to llama.cpp's environment variables for the cache types."""
    if args.web:
        defaults = build_parser().parse_args(["serve", "--browser", "--port", "0", "-m", args.model])
        serve(argparse.Namespace(**vars(defaults) | vars(args)))
        return
    # The class derives from llama_cpp.Llama: to import it is to load the libraries.
    from tq_ggml import session
    from tq_ggml.llama import Llama

    path, saved = _model_path(args), args.session is not None and args.session.exists()
    if saved and args.n_ctx is None:
        args.n_ctx = session.context_of(args.session)
    llama = Llama(path, **_engine_options(args, path))
    sampling = {"temperature": args.temp} | ({} if args.seed is None else {"seed": args.seed})
    with contextlib.closing(llama):
        if not any(key.startswith("tokenizer.chat_template") for key in llama.metadata):
            _note(f"warning: the model has no chat template; replies may be poor in the format of {llama.chat_format}")
        talk = Chat(llama, system=args.system, max_tokens=args.max_tokens, sampling=sampling, note=_note)
        if saved:
            session.load(talk, args.session)
            _note(f"({len(talk.turns)} turns of {args.session})")
        elif args.session:
            _note(f"({args.session} is not there yet: a new conversation; /save {args.session} keeps it)")
        run_chat(talk, args.prompt)


def _engine_options(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What chat and serve pass to `tq_ggml.Llama`."""
    k, v = _sides(args)
    return {
        "cache_type_k": k,
        "cache_type_v": v,
        "calibration": args.calibration,
        "n_ctx": args.n_ctx or min(DEFAULT_CHAT_CTX, check_gguf(path).n_ctx_train),
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "n_gpu_layers": -1 if args.rpc else 0,
        "chat_format": getattr(args, "chat_format", None),
    }


def serve(args: argparse.Namespace) -> None:
    """``tq-ggml serve``."""
    from tq_ggml import server  # needs packages that nothing else needs

    path = _model_path(args)
    with contextlib.closing(server.listen(args.host, args.port)) as sock:
        server.warn_if_open(args.host, args.api_key)
        llama = server.ServedLlama(path, **_engine_options(args, path), **server.embedding_options(args.embedding))
        with contextlib.closing(llama):
            alias = args.alias or path.name
            limits = {"queue": args.queue, "max_body": args.max_body, "origins": args.origin}
            hosts = ["127.0.0.1", "localhost"] if args.host in ("127.0.0.1", "localhost") else []
            app = server.make_app(llama, alias, api_key=args.api_key, hosts=hosts, **limits)
            address = server.address(sock)
            print(f"tq-ggml: {alias}, chat page at {address}/, API at {address}/v1", file=sys.stderr, flush=True)
            if args.browser:
                threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
            server.run(app, sock, drain=args.drain)


def doctor(args: argparse.Namespace) -> int:
    """``tq-ggml doctor``: 1 if there is a problem."""
    found = examine()
    if args.output == "json":
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        columns = (report.Column("item", "item"), report.Column("value", "value"))
        sys.stdout.write(report.markdown(as_rows(found), columns))
    return 1 if found["problems"] else 0


def models(args: argparse.Namespace) -> None:
    """``tq-ggml models``."""
    rows = [
        {
            "name": status.row.name,
            "size_mib": status.row.size / 2**20,
            "licence": status.row.licence,
            "note": status.row.note,
            "path": None if status.path is None else str(status.path),
        }
        for status in available()
    ]
    headers = {"name": "", "size_mib": ".0f", "licence": "", "note": "", "path": ""}
    columns = [report.Column(key.replace("size_mib", "MiB"), key, spec) for key, spec in headers.items()]
    sys.stdout.write(report.render(rows, args.output, columns))


def get_model(args: argparse.Namespace) -> None:
    """``tq-ggml models get``: the path is the last line on stdout."""
    print(get(args.name, accept_licence=args.accept_licence))
