"""Quality of a cache type: perplexity, and how far its next-token distribution is from an f16 cache's.

The figures and their definitions are those of llama.cpp's llama-perplexity. An f16 context and one context per
cache type run side by side over the same tokens, so that only a few megabytes of logits are alive at a time and
nothing is rounded on the way through a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from tq_ggml.cache_types import CacheType, Pair, resolve
from tq_ggml.errors import TqError

if TYPE_CHECKING:
    from tq_ggml.engine import Context, Model

LOGIT_BYTES = 64 << 20  # alive per context
F16: Pair = (resolve("f16"), resolve("f16"))
Key = Pair | str
"""What a context is known by while it is scored."""


@dataclass(frozen=True)
class Quality:
    """What a cache type costs in fidelity, over ``n_tokens`` scored tokens.

    Attributes:
        type_k, type_v: cache types of keys and values.
        kv_bytes: size of the cache as the engine allocated it, bytes.
        ratio: the f16 cache's bytes over these.
        ppl, ppl_err: perplexity and its standard error, ``ppl * sd(nll) / sqrt(n)``.
        kld, kld_err: mean KL(f16 || type) in nats and its standard error over tokens.
        kld_median, kld_p999: median and 99.9th percentile of the tokens' divergences, nats.
        same_top: fraction (0..1) of tokens for which both caches rank the same token first.
        rms_dp: root mean square change of the correct token's probability, as a fraction (0..1).
    """

    type_k: CacheType
    type_v: CacheType
    kv_bytes: int
    ratio: float
    ppl: float
    ppl_err: float
    kld: float
    kld_err: float
    kld_median: float
    kld_p999: float
    same_top: float
    rms_dp: float
    n_tokens: int

    def row(self) -> dict[str, Any]:
        """The attributes as a report row: type names, and the size in MiB as ``kv_mib``."""
        row = {"type_k": str(self.type_k), "type_v": str(self.type_v), "kv_mib": self.kv_bytes / 2**20}
        return row | {f.name: getattr(self, f.name) for f in fields(self)[3:]}


class TokenScore(NamedTuple):
    """One scored token: -ln p, KL divergence in nats, 1.0 if the top token agrees, change of probability."""

    nll: float
    kld: float
    same_top: float
    p_diff: float


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float64, of one row of logits (n_vocab,). Not finite where the logits are not."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(np.exp(shifted).sum())
    return shifted


def score_token(reference: np.ndarray, candidate: np.ndarray, token: int) -> TokenScore:
    """Compare two log-softmax rows (n_vocab,) at the position whose next token is ``token``."""
    p_reference = np.exp(reference)
    return TokenScore(
        nll=-float(candidate[token]),
        kld=float(p_reference @ (reference - candidate)),
        same_top=float(reference.argmax() == candidate.argmax()),
        p_diff=math.exp(candidate[token]) - math.exp(reference[token]),
    )


def summarise(scores: Sequence[TokenScore]) -> dict[str, float]:
    """The means, errors and percentiles of :class:`Quality` from at least two token scores."""
    nll, kld, same_top, p_diff = np.array(scores, dtype=np.float64).T
    root_n = math.sqrt(len(nll))
    ppl = math.exp(nll.mean())
    return {
        "ppl": ppl,
        "ppl_err": float(ppl * nll.std(ddof=1) / root_n),
        "kld": float(kld.mean()),
        "kld_err": float(kld.std(ddof=1) / root_n),
        "kld_median": float(np.median(kld)),
        "kld_p999": float(np.percentile(kld, 99.9)),
        "same_top": float(same_top.mean()),
        "rms_dp": float(np.sqrt(np.mean(p_diff**2))),
        "n_tokens": len(nll),
    }


def cut_windows(tokens: np.ndarray, n_ctx: int, n_windows: int, bos: int | None) -> np.ndarray:
    """The first ``n_windows`` consecutive windows, int32 (n_windows, n_ctx), each opened by BOS where there is one.

    As in llama-perplexity, BOS takes the place of a window's first token.

    Raises:
        TqError: fewer than ``n_windows * n_ctx`` tokens.
    """
    needed = n_windows * n_ctx
    if len(tokens) < needed:
        raise TqError(
            f"the text has {len(tokens)} tokens, but {n_windows} windows of {n_ctx} need {needed}: "
            "give a longer --text, fewer --windows or a smaller --ctx"
        )
    windows = np.array(tokens[:needed], dtype=np.int32).reshape(n_windows, n_ctx)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def rows_per_chunk(n_vocab: int) -> int:
    """Rows of float32 logits to hold at once: about 64 MiB, between 16 and 256 rows."""
    return min(max(LOGIT_BYTES // (4 * n_vocab), 16), 256)


def evaluate(
    model: Model, pairs: Sequence[Pair], windows: np.ndarray, *, n_threads: int | None = None
) -> list[Quality]:
    """Score the second half of each window under every cache type, against f16 keys and values.

    Args:
        model: an open model; one context per pair is alive during the call, and an f16 one.
        pairs: distinct (key type, value type); f16/f16 is always run, and scored only if it is among them.
        windows: from :func:`cut_windows`; positions n_ctx/2 .. n_ctx-2 of each predict the scored tokens.

    Raises:
        TqError: a context cannot be made, or a cache type makes logits that are not finite.
    """
    n_ctx = windows.shape[1]
    ubatch = rows_per_chunk(model.n_vocab)
    with ExitStack() as stack:
        contexts = {
            pair: stack.enter_context(model.context(*pair, n_ctx=n_ctx, n_ubatch=ubatch, n_threads=n_threads))
            for pair in (F16, *pairs)
        }
        scores = score(contexts, F16, windows)
        sizes = {pair: context.kv_bytes for pair, context in contexts.items()}
    return [Quality(*pair, sizes[pair], sizes[F16] / sizes[pair], **summarise(scores[pair])) for pair in pairs]


def score(contexts: Mapping[Key, Context], reference: Key, windows: np.ndarray) -> dict[Key, list[TokenScore]]:
    """Score the second half of each window in every context against the one named ``reference``.

    Args:
        contexts: of one model, each with room for a window; a key is a pair of types, or a name.
        windows: from :func:`cut_windows`.

    Raises:
        TqError: a context makes logits that are not finite.
    """
    n_windows, n_ctx = windows.shape
    scores: dict[Key, list[TokenScore]] = {key: [] for key in contexts}
    rows = rows_per_chunk(contexts[reference].model.n_vocab)
    with tqdm(total=n_windows * (n_ctx - 1), unit="tok", desc="quality", disable=None) as progress:
        for index, window in enumerate(windows):
            _score_window(contexts, reference, window, scores, rows, progress, f"window {index + 1}")
            progress.set_postfix_str(_running(scores, reference))
    return scores


def _score_window(
    contexts: Mapping[Key, Context],
    reference: Key,
    window: np.ndarray,
    scores: dict[Key, list[TokenScore]],
    rows: int,
    progress: tqdm,
    where: str,
) -> None:
    half, end = len(window) // 2, len(window) - 1
    for context in contexts.values():
        context.clear()
        context.decode(window[:half], 0)
    progress.update(half)
    for start in range(half, end, rows):
        stop = min(start + rows, end)
        logits = {key: context.decode(window[start:stop], start, logits="all") for key, context in contexts.items()}
        for row, token in enumerate(window[start + 1 : stop + 1]):
            _score_row({key: block[row] for key, block in logits.items()}, reference, int(token), scores, where)
        progress.update(stop - start)


def _score_row(
    rows: dict[Key, np.ndarray], reference: Key, token: int, scores: dict[Key, list[TokenScore]], where: str
) -> None:
    expected = _finite_log_softmax(rows[reference], reference, where)
    for key, row in rows.items():
        candidate = expected if key == reference else _finite_log_softmax(row, key, where)
        scores[key].append(score_token(expected, candidate, token))


def _finite_log_softmax(row: np.ndarray, key: Key, where: str) -> np.ndarray:
    # One NaN or infinity anywhere makes the sum of the row not finite, and a sum costs little.
    if not math.isfinite(row.sum(dtype=np.float64)):
        raise TqError(
            f"cache type {key_name(key)} gave logits that are not finite in {where}; "
            "check the model with --types f16 first"
        )
    return log_softmax(row)


def pair_name(pair: Pair) -> str:
    """``tq4`` when keys and values share a type, else ``q8_0/tq4``, as ``parse_pair`` reads it."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}/{pair[1]}"


def key_name(key: Key) -> str:
    """A context's key for messages."""
    return key if isinstance(key, str) else pair_name(key)


def _running(scores: dict[Key, list[TokenScore]], reference: Key) -> str:
    ppl = math.exp(np.mean([score.nll for score in scores[reference]]))
    klds = (
        f"{key_name(key)} {np.mean([score.kld for score in done]):.4f}"
        for key, done in scores.items()
        if key != reference
    )
    return f"{key_name(reference)} PPL {ppl:.2f}, KLD {' '.join(klds)}"
