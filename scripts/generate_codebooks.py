#!/usr/bin/env python3
"""Write (or check) c_src/tq/tq_codebook.h, the numbers of the tq3 and tq4 codecs."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))  # the generator runs before the package is built and installed

from tq_ggml import codebooks as cb  # noqa: E402

DEFAULT_HEADER = REPO / "c_src" / "tq" / "tq_codebook.h"

INTRO = """\
// DO NOT EDIT. Written by scripts/generate_codebooks.py; to change it, edit tq_ggml/codebooks.py and run
//
//     {command}
//
// Lloyd-Max codebooks of one coordinate of a randomly rotated unit vector in R^d, from its density
//
//     f(t) = C (1 - t^2)^((d-3)/2),  -1 <= t <= 1,  C = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2))
//
// scaled by sqrt(d) so that sigma = 1 (d = infinity: the standard normal). Each level is the mean of its cell, each
// cell ends halfway between two levels. Here d = {d}. Tables are symmetric; only magnitudes are listed.
//
{levels}
//
// Kernels use integer levels, level = integer * LEVEL_UNIT in units of sigma, and decode to
// fp16 scale * (+-integer) / 32. The integers come from the multiplier that costs the least D_mse:
//
{integers}
"""

CONSTANTS = """\
#ifndef TQ_CODEBOOK_H
#define TQ_CODEBOOK_H

#include <stdint.h>

// Fixed +-1 before the Walsh-Hadamard transform: bit i set negates element i.
// Bit i is the top bit of (i+1) * 0x{golden:08X} mod 2^32 (Fibonacci hashing).
static const uint32_t TQ_SIGN_MASK = 0x{signs:08X}u;

// The encoder's fixed point: a block is scaled so that its RMS is this integer.
#define TQ_RMS_ONE {rms_one}

// Scales the encoder tries for each block.
#define TQ_N_CANDIDATES {n_candidates}
"""

TABLE = """
// ---- tq{bits} ----

#define TQ{bits}_LEVEL_UNIT (1.0f / {multiplier})

static const int8_t TQ{bits}_LEVELS[{n}] = {{{levels}}};

// Ends of the cells for candidate k: round(TQ_RMS_ONE * r[k] * (L[j] + L[j+1]) / 2 * TQ{bits}_LEVEL_UNIT), with
// r[k] = scale / the scale that fits the block's RMS = {ratios}
static const int16_t TQ{bits}_CANDIDATE_THRESHOLDS[TQ_N_CANDIDATES][{n_thresholds}] = {{
{thresholds}
}};
"""


def _levels_comment(d: float | None) -> str:
    lines = []
    for bits in range(1, 5):
        levels = cb.lloyd_max(bits, d)
        lines.append(f"//     {bits} bit, D_mse {cb.distortion(levels, d):.9f}:")
        for row in range(0, len(levels), 4):
            lines.append("//         " + "  ".join(f"{level:.9f}" for level in levels[row : row + 4]))
    return "\n".join(lines)


def _integers_comment(d: float | None) -> str:
    tables = [cb.block_table(bits, d) for bits in cb.CANDIDATE_RANGE]
    return "\n".join(
        f"//     {t.bits} bit, multiplier {t.multiplier}, D_mse {cb.distortion(t.levels / t.multiplier, d):.9f}"
        for t in tables
    )


def _joined(values: np.ndarray, form: str) -> str:
    return ", ".join(format(v, form) for v in values.tolist())


def _table(table: cb.BlockTable) -> str:
    return TABLE.format(
        bits=table.bits,
        n=len(table.levels),
        multiplier=table.multiplier,
        levels=_joined(table.levels, "d"),
        ratios=_joined(table.ratios, ".4f"),
        n_thresholds=table.thresholds.shape[1],
        thresholds="\n".join(f"    {{{_joined(row, '4d')}}}," for row in table.thresholds),
    )


def _command(d: float | None) -> str:
    return "python scripts/generate_codebooks.py" + ("" if d is None else f" --dim {d:g}")


def render(d: float | None = None) -> str:
    """The whole header for dimension ``d`` (None: the Gaussian limit)."""
    intro = INTRO.format(
        command=_command(d),
        d="infinity" if d is None else f"{d:g}",
        levels=_levels_comment(d),
        integers=_integers_comment(d),
    )
    constants = CONSTANTS.format(
        golden=cb.GOLDEN_RATIO_32, signs=cb.sign_mask(), rms_one=cb.RMS_ONE, n_candidates=cb.N_CANDIDATES
    )
    tables = "".join(_table(cb.block_table(bits, d)) for bits in cb.CANDIDATE_RANGE)
    return f"{intro}\n{constants}{tables}\n#endif // TQ_CODEBOOK_H\n"


def check(path: Path, wanted: str, d: float | None) -> int:
    """0 when the file at ``path`` is what the generator writes, else 1 and a diff on standard error."""
    found = path.read_text(encoding="utf-8") if path.is_file() else ""
    if found == wanted:
        return 0
    diff = difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(path), "generated", lineterm="")
    print(*diff, sep="\n", file=sys.stderr)
    print(f"error: {path} is out of date; write it with: {_command(d)}", file=sys.stderr)
    return 1


def _dim(text: str) -> float | None:
    try:
        d = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not d >= 3:
        raise argparse.ArgumentTypeError(f"{text}: the dimension must be at least 3, or inf for the Gaussian limit")
    return None if math.isinf(d) else d


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=_dim, metavar="D", help="dimension of the rotated vector (default: inf)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file would change")
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT_HEADER, metavar="FILE", help="the header")
    args = parser.parse_args(argv)
    header = render(args.dim)
    if args.check:
        return check(args.output, header, args.dim)
    try:
        args.output.write_text(header, encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write {args.output}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
