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

// Scales the encoder tries for each block.
#define TQ_N_CANDIDATES {n_candidates}

// Magnitudes, as fractions of the block's largest, that the search for the scale tells apart.
#define TQ_N_BUCKETS {n_buckets}

// What the encoder of a type looks up. It holds magnitudes in bytes: first as a bucket, which is the fraction of the
// block's largest in 31sts, rounded; then, with the chosen scale, in steps, rounded down. Rows of 16 bytes are one
// register's table look-up in any SIMD instruction set.
typedef struct {{
    uint8_t levels[16];
    uint8_t index[16];       // a level's index is the high half of steps + index[steps / 16], mod 256
    uint8_t half_steps[16];  // of a level, less 1, mod 256: 2 * steps less this is from the middle of the step
    float   half_step;       // in level units
    float   steps[TQ_N_CANDIDATES];  // of the block's largest
    float   scale[TQ_N_CANDIDATES];  // fp16 scale / the block's largest before the transform is divided by sqrt(32)
    uint8_t errors[TQ_N_CANDIDATES][TQ_N_BUCKETS];  // squared
}} tq_encoder;
"""

TABLE = """
// ---- tq{bits} ----

#define TQ{bits}_LEVEL_UNIT (1.0f / {multiplier})

static const int8_t TQ{bits}_LEVELS[{n}] = {{{levels}}};

// Candidate scales / the scale whose largest level is the block's largest magnitude:
// {ratios}
static const tq_encoder TQ{bits}_ENCODER = {{
    {{{levels}}},
    {{{index}}},
    {{{half_steps}}},
    {half_step},
{steps},
{scale},
    {{
{errors}
    }},
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
    tables = [cb.block_table(bits, d) for bits in cb.CANDIDATE_RATIOS]
    return "\n".join(
        f"//     {t.bits} bit, multiplier {t.multiplier}, D_mse {cb.distortion(t.levels / t.multiplier, d):.9f}"
        for t in tables
    )


def _joined(values: np.ndarray, form: str) -> str:
    return ", ".join(format(v, form) for v in values.tolist())


def _float(value: float) -> str:
    text = f"{np.float32(value):.9g}"
    return (text if "." in text else text + ".0") + "f"


def _floats(values: np.ndarray) -> str:
    """Two lines of four."""
    halves = (", ".join(_float(v) for v in half) for half in np.split(values, 2))
    return "    {{{},\n     {}}}".format(*halves)


def index_table(edges: np.ndarray) -> np.ndarray:
    """`tq_encoder.index` for the ends of the cells: uint8 (16,)."""
    start = np.arange(16) * 16
    inside = (edges > start[:, None]) & (edges < start[:, None] + 16)
    to_end = np.where(inside.any(axis=1), 16 - np.sum(inside * (edges % 16), axis=1), 0)
    return ((np.searchsorted(edges, start, side="right") - np.arange(16)) * 16 + to_end) % 256


def _errors(errors: np.ndarray) -> str:
    """Two lines a candidate."""
    halves = errors.reshape(len(errors), 2, -1)
    return "\n".join(f"        {{{_joined(a, '3d')},\n         {_joined(b, '3d')}}}," for a, b in halves)


def _table(table: cb.BlockTable) -> str:
    levels = table.levels.astype(int)
    return TABLE.format(
        bits=table.bits,
        n=len(levels),
        multiplier=table.multiplier,
        levels=_joined(levels, "d"),
        ratios=_joined(table.ratios, ".2f"),
        index=_joined(index_table(table.edges), "d"),
        half_steps=_joined((levels * table.half_steps - 1) % 256, "d"),
        half_step=_float(1 / table.half_steps),
        steps=_floats(table.steps_of_largest),
        scale=_floats(table.scale_of_largest),
        errors=_errors(table.errors),
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
        golden=cb.GOLDEN_RATIO_32, signs=cb.sign_mask(), n_candidates=cb.N_CANDIDATES, n_buckets=cb.N_BUCKETS
    )
    tables = "".join(_table(cb.block_table(bits, d)) for bits in cb.CANDIDATE_RATIOS)
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
