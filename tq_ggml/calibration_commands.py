"""``tq-ggml calibrate``, ``inspect`` and ``recommend``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tq_ggml import calibration, inspection, metadata, report, texts
from tq_ggml.cache_types import parse_pair
from tq_ggml.calibration import (
    DEFAULT_MAX_KLD,
    DEFAULT_TEXT,
    DEFAULT_TOKENS,
    Calibration,
    cut_tokens,
    default_text,
    gather,
    side_file,
    store,
)
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.models import resolve_model

_INSPECT = (
    report.Column("layer", "layer", "d"),
    report.Column("K variance", "key_variance", ".3g"),
    report.Column("V variance", "value_variance", ".3g"),
    report.Column("K mean %", "key_mean_share", ".0f", scale=100),
    report.Column("V mean %", "value_mean_share", ".0f", scale=100),
    report.Column("largest channel", "key_peak", ".1f"),
    report.Column("kurtosis", "key_kurtosis", ".2f"),
    *(report.Column(f"{name} logit error", f"logit_error_plain_{name}", ".3f") for name in inspection.CODECS),
    *(report.Column(f"{name} conditioned", f"logit_error_{name}", ".3f") for name in inspection.CONDITIONED),
)
_RECOMMEND = (
    report.Column("K/V", "type"),
    report.Column("bits a value", "bits", ".2f"),
    report.Column("predicted KL divergence", "kld", ".4f"),
    report.Column("", "note"),
)


def calibrate(args: argparse.Namespace) -> None:
    """``tq-ggml calibrate``: the path of what was written is the last line on stdout."""
    path = resolve_model(args.model)
    target = args.output or args.side_file
    if target and target.exists():
        _check_replaceable(target, path, args.force or args.dry_run)
    with Model(path) as model:
        tokens = _tokens(args, model)
        # Of a path the name alone: the file may be given away.
        text_name = Path(args.text or DEFAULT_TEXT).name
        made = calibration.calibrate(model, tokens, text_name=text_name, n_threads=args.threads)
    target = target or side_file(made.digest)
    _print_summary(made)
    if args.output:
        metadata.write_patched_copy(path, target, made.metadata(), force=args.force, dry_run=args.dry_run)
    elif not args.dry_run:
        store(made, target)
    print(f"would write {target}" if args.dry_run else target)


def _check_replaceable(target: Path, model: Path, allowed: bool) -> None:
    if target.samefile(model):
        raise TqError(f"{target} is the model itself, which is never changed in place; choose another name")
    if not allowed:
        raise TqError(f"{target} exists; give another name, or --force to replace it")


def _print_summary(made: Calibration) -> None:
    klds = ", ".join(f"{name} {kld:.4f}" for name, kld in made.expected_kld.items())
    print(f"{len(made.layers)} layers, {made.n_tokens} tokens of {made.text}", file=sys.stderr)
    print(f"predicted KL divergence: {klds}; recommended: {made.recommended_type}", file=sys.stderr)


def inspect(args: argparse.Namespace) -> None:
    """``tq-ggml inspect``: one row per layer."""
    if args.plot:
        report.check_plot(args.plot)
    path = resolve_model(args.model)
    rows = [layer.row() for layer in _inspected(args, path)]
    sys.stdout.write(report.render(rows, args.output, _INSPECT))
    if args.plot:
        report.plot_layers(rows, args.plot, path.stem)


def recommend(args: argparse.Namespace) -> None:
    """``tq-ggml recommend``: the candidates, and the smallest that is good enough."""
    klds = inspection.predict_pairs(_inspected(args, resolve_model(args.model)))
    chosen = inspection.recommend(klds, args.max_kld or DEFAULT_MAX_KLD)
    rows = [_candidate(name, kld, chosen) for name, kld in klds.items()]
    sys.stdout.write(report.render(rows, args.output, _RECOMMEND))
    print(
        f"{chosen}: the smallest with a predicted KL divergence of at most {args.max_kld or DEFAULT_MAX_KLD}. "
        f"{inspection.ACCURACY}",
        file=sys.stderr,
    )


def _candidate(name: str, kld: float, chosen: str) -> dict[str, Any]:
    bits = sum(side.bits_per_value for side in parse_pair(name)) / 2
    return {"type": name, "bits": bits, "kld": kld, "note": "recommended" if name == chosen else ""}


def _inspected(args: argparse.Namespace, path: Path) -> list[inspection.LayerReport]:
    with Model(path) as model:
        return inspection.inspect(gather(model, _tokens(args, model), n_threads=args.threads))


def _tokens(args: argparse.Namespace, model: Model) -> Any:
    text = default_text() if args.text is None else texts.named_text(args.text)
    return cut_tokens(model, text, args.tokens or DEFAULT_TOKENS)
