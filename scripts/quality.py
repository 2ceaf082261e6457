#!/usr/bin/env python3
"""Measure quality for docs/quality.md: KL divergence, long windows, and behaviour, on the models that packages carry.

Each measurement is one run of ``tq-ggml`` whose JSON is kept in build/quality; what is there is not measured again.
All of it takes about an hour on two cores. ``--render`` only writes the tables anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from pages import markdown, put_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "quality"
DOCUMENT = ROOT / "docs" / "quality.md"

MODELS = {"smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma-3-270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}
_PERPLEXITY = ["perplexity", "--text", "Persuasion"]
_SHORT, _LONG = ["--ctx", "2048", "--windows", "4"], ["--ctx", "8192", "--windows", "1"]
STEPS = {
    "auto": [*_PERPLEXITY, *_SHORT, "--types", "q8_0,q4_0,iq4_nl,tq4,tq4/tq3,tq3"],
    "on": [*_PERPLEXITY, *_SHORT, "--types", "q8_0,q4_0,iq4_nl", "--calibration", "on"],
    "off": [*_PERPLEXITY, *_SHORT, "--types", "tq4,tq3", "--calibration", "off"],
    "long": [*_PERPLEXITY, *_LONG, "--types", "q8_0,q4_0,tq4,tq3"],
    "behaviour": [
        *("compare", "--text", "Persuasion", "--ctx", "256", "--windows", "1", "-d", "64", "-n", "4", "-r", "1"),
        *("--types", "f16,q8_0,q4_0,tq4,tq3", "--passkey", "1024,4096,8192", "--agreement", "40"),
    ],
}
BEHAVIOUR_MODEL = "qwen2.5-coder-0.5b"


def steps() -> list[tuple[str, str]]:
    """(model, step) of all measurements."""
    pairs = [(model, step) for model in MODELS for step in STEPS if step != "behaviour"]
    return [*pairs, (BEHAVIOUR_MODEL, "behaviour")]


def measure(model: str, step: str, threads: int) -> None:
    """Run one measurement unless its result is there."""
    path = RESULTS / f"{model}.{step}.json"
    if path.exists():
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    print(f"{model}: {step}", file=sys.stderr)
    command = [sys.executable, "-m", "tq_ggml", *STEPS[step], "-m", model, "-t", str(threads), "-o", "json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"quality: tq-ggml failed for {model}, {step}; its message is above")
    path.write_text(done.stdout, encoding="utf-8")


# ---- tables --------------------------------------------------------------------------------------------------------


def load(model: str, step: str) -> dict[str, dict]:
    """A result's rows by type name; empty where it has not been measured."""
    path = RESULTS / f"{model}.{step}.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {r["type_k"] if r["type_k"] == r["type_v"] else f"{r['type_k']}/{r['type_v']}": r for r in rows}


def kld(row: dict | None) -> str:
    return f"{row['kld']:.4f} ± {row['kld_err']:.4f}" if row else "–"


def short_table() -> str:
    rows = []
    for name, step, label in (
        ("q8_0", "auto", "q8_0"),
        ("q8_0", "on", "q8_0, conditioned"),
        ("q4_0", "auto", "q4_0"),
        ("q4_0", "on", "q4_0, conditioned"),
        ("iq4_nl", "auto", "iq4_nl"),
        ("iq4_nl", "on", "iq4_nl, conditioned"),
        ("tq4", "off", "tq4, calibration off"),
        ("tq4", "auto", "**tq4**"),
        ("tq4/tq3", "auto", "**tq4 keys, tq3 values**"),
        ("tq3", "off", "tq3, calibration off"),
        ("tq3", "auto", "**tq3**"),
    ):
        found = [load(model, step).get(name) for model in MODELS]
        cells = [f"{kld(r)}, {100 * r['same_top']:.1f} %, {r['ppl']:.2f}" if r else "–" for r in found]
        rows.append([label, *cells])
    return markdown(["KL divergence, same top token, PPL", *MODELS.values()], rows)


def long_table() -> str:
    rows = []
    for name in ("q8_0", "q4_0", "tq4", "tq3"):
        cells = []
        for model in MODELS:
            row, short = load(model, "long").get(name), load(model, "auto").get(name)
            cells.append(f"{kld(row)} ({row['kld'] / short['kld']:.2f}x)" if row and short else "–")
        rows.append([name, *cells])
    return markdown(["1 window of 8192 (over 4 of 2048)", *MODELS.values()], rows)


def behaviour_table() -> str:
    rows = [
        [
            name,
            *(f"{100 * r[f'passkey_{n}']:.0f} %" for n in (1024, 4096, 8192)),
            f"{r['prefix']:.1f} ± {r['prefix_err']:.1f} of {r['answer_tokens']:.1f}",
            f"{100 * r['identical']:.0f} %",
        ]
        for name, r in load(BEHAVIOUR_MODEL, "behaviour").items()
    ]
    return markdown(["type", "passkey 1024", "4096", "8192", "tokens as with f16", "same answers"], rows)


def render() -> None:
    """Put the tables between the marks of docs/quality.md."""
    tables = f"{short_table()}\n{long_table()}\n{MODELS[BEHAVIOUR_MODEL]}, 40 prompts:\n\n{behaviour_table()}\n"
    text = put_in(DOCUMENT.read_text(encoding="utf-8"), "scripts/quality.py", tables)
    DOCUMENT.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="write the tables from what has been measured")
    parser.add_argument("--only", metavar="MODEL.STEP,...", help="measure only these")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if not args.render:
        wanted = args.only.split(",") if args.only else None
        for model, step in steps():
            if wanted is None or f"{model}.{step}" in wanted:
                measure(model, step, args.threads)
    render()


if __name__ == "__main__":
    main()
