"""Calibration: what a model's keys and queries are like, gathered in one f16 run, kept as metadata, found again.

`gather` runs a text and sums up; `Calibration` is what a KV cache needs of it; `choose` turns the user's
``calibration=`` into one. docs/conditioning.md tells what the constants are for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tq_ggml import metadata, packages
from tq_ggml.cache_types import CacheType
from tq_ggml.conditioning import Batch, KeyMoments, Rope, Rows, filtering, layer_rope
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.gguf_check import GgufInfo, open_gguf

VERSION = 2
"""Of the metadata; another one is another meaning of the arrays."""

SINKS = 4
"""First positions that the sums leave out: keys and queries of attention sinks are like no others."""

STARTS = 32
"""Texts of one token that tell what keys at position 0 are like, for models that do not open a text with BOS."""

SAMPLE_EVERY = 8
"""One token in so many keeps its rows whole, for `tq_ggml.inspection`."""

DEFAULT_TOKENS = 512
DEFAULT_TEXT = "tq-ggml"
DEFAULT_MAX_KLD = 0.03
CHOICES = ("auto", "on", "off")
_LAYER = re.compile(r"(layer\.([0-9]{1,4}))\.head_count_kv")
_MOMENTS = {f.name: f.name if f.name.startswith("query") else f"key_{f.name}" for f in dataclasses.fields(KeyMoments)}


class CalibrationError(TqError):
    """Metadata that is damaged, or belongs to another model or version."""


def default_text() -> str:
    """The text that calibration runs over by default: our own words, in several scripts and programming languages."""
    return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8")


# ---- gathering -----------------------------------------------------------------------------------------------------


@dataclass
class Sums:
    """Running sums over tokens of a layer's rows of one kind, float64 of shape (n_head, head_size)."""

    n: int = 0
    total: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0
    products: np.ndarray | float = 0.0

    def add(self, rows: np.ndarray, rope: Rope | None = None) -> None:
        """Add rows, float32 (n_tokens, n_head, head_size); with a ``rope`` also products of partners."""
        self.n += len(rows)
        self.total = self.total + rows.sum(axis=0, dtype=np.float64)
        self.squares = self.squares + np.square(rows, dtype=np.float64).sum(axis=0)
        if rope is not None:
            self.products = self.products + (rows * rope.partners(rows)).sum(axis=0, dtype=np.float64)

    @property
    def mean(self) -> np.ndarray:
        return self.total / self.n

    @property
    def energy(self) -> np.ndarray:
        """Mean square."""
        return self.squares / self.n

    @property
    def variance(self) -> np.ndarray:
        return np.maximum(self.energy - self.mean**2, 0.0)


@dataclass
class Layer:
    """What one layer stored and attended with during the calibration run.

    Attributes:
        rope: how its keys turn.
        logit_scale: of its attention.
        sums: of keys and queries before RoPE, and of values, by `Rows`.
        starts: of keys at position 0.
        sample: rows of one token in `SAMPLE_EVERY` with RoPE, and their positions, as lists of arrays.
    """

    rope: Rope
    logit_scale: float
    sums: dict[Rows, Sums] = field(default_factory=lambda: {kind: Sums() for kind in Rows})
    starts: Sums = field(default_factory=Sums)
    sample: dict[Rows, list[np.ndarray]] = field(default_factory=lambda: {kind: [] for kind in Rows})
    positions: list[np.ndarray] = field(default_factory=list)

    def add(self, kind: Rows, positions: np.ndarray, rows: np.ndarray) -> None:
        """Add rows, float32 (n_tokens, n_head, head_size), of tokens at ``positions``, int32 (n_tokens,)."""
        if positions[-1] == 0:
            if kind == Rows.K:
                self.starts.add(rows)
            return
        kept = positions >= SINKS
        positions, rows = positions[kept], rows[kept]
        if kind == Rows.V:
            self.sums[kind].add(rows)
        else:
            self.sums[kind].add(self.rope.turn_back(rows, positions), self.rope)
        self.sample[kind].append(rows[::SAMPLE_EVERY].copy())
        if kind == Rows.K:
            self.positions.append(positions[::SAMPLE_EVERY].copy())

    def key_moments(self) -> KeyMoments:
        """The constants of key conditioning."""
        keys, queries = self.sums[Rows.K], self.sums[Rows.Q]
        n_head_kv = len(keys.mean)
        found = {
            "mean": keys.mean,
            "start": self.starts.mean,
            "variance": keys.variance,
            "covariance": keys.products / keys.n - keys.mean * self.rope.partners(keys.mean),
            "query_energy": _by_kv_head(queries.energy, n_head_kv),
            "query_product": _by_kv_head(queries.products / queries.n, n_head_kv),
        }
        return KeyMoments(**{name: array.astype(np.float32) for name, array in found.items()})


def _by_kv_head(energy: np.ndarray, n_head_kv: int) -> np.ndarray:
    """The mean over the query heads that share a KV head: (n_head, head_size) to (n_head_kv, head_size)."""
    return energy.reshape(n_head_kv, -1, energy.shape[-1]).mean(axis=1)


def gather(model: Model, tokens: np.ndarray, *, n_threads: int | None = None) -> dict[int, Layer]:
    """Run ``tokens``, int32 (n,), through an f16 cache and sum up what every layer stores and attends with.

    Layers that share another's keys add their queries to it.

    Raises:
        TqError: too few tokens, or a model whose keys tq-ggml does not see.
        EngineError: llama.cpp fails.
    """
    if len(tokens) <= 2 * SINKS:
        raise TqError(f"calibration needs more than {2 * SINKS} tokens, not {len(tokens)}")
    layers: dict[int, Layer] = {}

    def observe(batch: Batch) -> None:
        il = batch.layer
        if il not in layers and (rope := layer_rope(context.handle, il)) is not None:
            layers[il] = Layer(rope, batch.logit_scale)
        if il in layers:
            layers[il].add(batch.kind, batch.positions, batch.rows)

    with (
        filtering(observe) as check,
        model.context("f16", n_ctx=len(tokens), n_threads=n_threads) as context,
        tqdm(total=len(tokens), unit="tok", desc="calibrating", disable=None) as progress,
    ):
        for start in range(0, len(tokens), context.n_batch):
            chunk = tokens[start : start + context.n_batch]
            context.decode(chunk, start)
            check()
            progress.update(len(chunk))
        for token in _starts(model, tokens):
            context.clear()
            context.decode([token], 0)
        check()
    if not layers:
        raise TqError(f"tq-ggml does not see the keys of this model ({model.info.arch}), so it cannot calibrate it")
    return layers


def _starts(model: Model, tokens: np.ndarray) -> np.ndarray:
    """First tokens to look at: the one that opens every text, or some where there is none."""
    return tokens[:1] if model.bos is not None else tokens[:: -(-len(tokens) // STARTS)]


def cut_tokens(model: Model, text: str, n_tokens: int) -> np.ndarray:
    """The first ``n_tokens`` of a text, int32, fewer where the model's training context is shorter.

    Raises:
        TqError: the text is too short.
    """
    n_tokens = min(n_tokens, model.n_ctx_train)
    tokens = model.tokenize(text[: 32 * n_tokens], add_bos=True)  # no token of a text is that long on average
    if len(tokens) < n_tokens:
        raise TqError(
            f"the text has {len(tokens)} tokens, fewer than {n_tokens}; give a longer --text or fewer --tokens"
        )
    return tokens[:n_tokens]


# ---- what is kept --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """The constants of a model's key conditioning.

    Attributes:
        digest: `tq_ggml.metadata.model_digest` of the model.
        layers: by layer index.
        n_tokens, text: what they were gathered on; the text by name.
        expected_kld: KL divergence that `tq_ggml.inspection` predicts, nats, by cache type.
        recommended_type: the cache type it recommends.
        every_type: whether caches of llama.cpp's own quantised types are conditioned as well.
    """

    digest: str
    layers: Mapping[int, KeyMoments]
    n_tokens: int
    text: str
    expected_kld: Mapping[str, float] = field(default_factory=dict)
    recommended_type: str = ""
    every_type: bool = False

    def constants_for(self, type_k: CacheType) -> Mapping[int, KeyMoments] | None:
        """What `tq_ggml.conditioning.conditioned` takes for keys of this type."""
        ours = type_k.name.startswith("tq")
        return self.layers if ours or (self.every_type and type_k.is_quantized) else None

    @property
    def checksum(self) -> str:
        """Of the constants: what a saved cache depends on."""
        return self.metadata()[f"{metadata.PREFIX}checksum"]

    def metadata(self) -> dict[str, Any]:
        """The ``tq_ggml.*`` keys and values."""
        values: dict[str, Any] = {
            "version": np.uint32(VERSION),
            "model_digest": self.digest,
            "calibration.tokens": np.uint32(self.n_tokens),
            "calibration.text": self.text,
            "recommended_type": self.recommended_type,
        }
        values |= {f"expected_kld.{name}": np.float32(kld) for name, kld in self.expected_kld.items()}
        for il, moments in self.layers.items():
            values[f"layer.{il}.head_count_kv"] = np.uint32(len(moments.mean))
            values |= {f"layer.{il}.{key}": getattr(moments, name).ravel() for name, key in _MOMENTS.items()}
        values["checksum"] = _checksum(values)
        return {metadata.PREFIX + key: value for key, value in values.items()}


def parse(values: Mapping[str, Any], digest: str, info: GgufInfo, where: str | Path) -> Calibration:
    """A `Calibration` from ``tq_ggml.*`` metadata.

    Args:
        digest, info: of the model it is to serve.
        where: the file, for messages.

    Raises:
        CalibrationError: another version, another model, or arrays that do not fit it.
    """
    values = {key.removeprefix(metadata.PREFIX): value for key, value in values.items()}

    def read(key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = values.get(key, default)
        if not isinstance(value, kind):
            raise _damaged(where, f"{metadata.PREFIX}{ascii(key[:64])[1:-1]} is of a wrong type")
        return value

    version = read("version", int, 0)
    if version != VERSION:
        raise CalibrationError(
            f"the calibration in {where} has version {version}, and this tq-ggml reads {VERSION}; "
            "make it again with `tq-ggml calibrate`"
        )
    if read("model_digest", str, "") != digest:
        raise CalibrationError(
            f"the calibration in {where} belongs to another model than {info.path.name}; "
            "make one with `tq-ggml calibrate`"
        )
    found = [match for match in map(_LAYER.fullmatch, values) if match]
    layers = {int(match[2]): _moments(values, match[1], info, where) for match in found}
    if not layers or max(layers) >= info.n_layer:
        raise _damaged(where, f"its layers are not those of {info.path.name}")
    klds = [key for key in values if key.startswith("expected_kld.")]
    parsed = Calibration(
        digest=digest,
        layers=layers,
        n_tokens=read("calibration.tokens", int, 0),
        text=read("calibration.text", str, ""),
        expected_kld={key.removeprefix("expected_kld."): float(read(key, (int, float), 0)) for key in klds},
        recommended_type=read("recommended_type", str, ""),
    )
    if read("checksum", str, "") != _checksum(values):
        raise _damaged(where, "its arrays are not those that were written")
    return parsed


def _checksum(values: Mapping[str, Any]) -> str:
    """Hex SHA-256 over the arrays: a changed bit in one of them is a finite number and would go unseen."""
    out = hashlib.sha256()
    for key in sorted(key for key, value in values.items() if isinstance(value, np.ndarray)):
        out.update(key.encode() + values[key].tobytes())
    return out.hexdigest()


def _damaged(where: str | Path, why: str) -> CalibrationError:
    return CalibrationError(f"the calibration in {where} is damaged: {why}; make it again with `tq-ggml calibrate`")


def _moments(values: Mapping[str, Any], layer: str, info: GgufInfo, where: str | Path) -> KeyMoments:
    def refuse(why: str) -> CalibrationError:
        return _damaged(where, f"{metadata.PREFIX}{layer} {why}")

    n_head_kv, expected = values[f"{layer}.head_count_kv"], info.n_head_kv
    if isinstance(expected, tuple):
        expected = expected[min(int(layer.split(".")[1]), len(expected) - 1)]
    if not isinstance(n_head_kv, int) or n_head_kv != expected:
        raise refuse("has no number of KV heads that is the model's")
    arrays = {}
    for name, key in _MOMENTS.items():
        array = values.get(f"{layer}.{key}")
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.size == 0 or array.size % n_head_kv:
            raise refuse(f"has no array {key} of float32 for {n_head_kv} heads")
        if not np.isfinite(array).all():
            raise refuse(f"has values in {key} that are not finite")
        arrays[name] = array.reshape(n_head_kv, -1)
    if len({array.shape for array in arrays.values()}) != 1:
        raise refuse("has arrays of different lengths")
    if min(arrays["variance"].min(), arrays["query_energy"].min()) < 0:
        raise refuse("has a negative variance")
    return KeyMoments(**arrays)


# ---- making and finding --------------------------------------------------------------------------------------------


def calibrate(
    model: Model, tokens: np.ndarray, *, text_name: str = DEFAULT_TEXT, n_threads: int | None = None
) -> Calibration:
    """Make the constants of a model in a run over ``tokens``, int32 (n,).

    Raises:
        TqError: too few tokens, or the model is of a kind that tq-ggml cannot calibrate.
        EngineError: llama.cpp fails.
    """
    from tq_ggml import inspection  # which is about what this module gathers

    gathered = gather(model, tokens, n_threads=n_threads)
    klds = inspection.predict_pairs(inspection.inspect(gathered))
    return Calibration(
        digest=metadata.model_digest(model.path),
        layers={il: layer.key_moments() for il, layer in gathered.items()},
        n_tokens=len(tokens),
        text=text_name,
        expected_kld=klds,
        recommended_type=inspection.recommend(klds, DEFAULT_MAX_KLD),
    )


def side_file(digest: str) -> Path:
    """Where the calibration of a model without one of its own is kept."""
    return packages.cache_dir() / "calibration" / f"{digest[:32]}.gguf"


def choose(
    spec: str | Path, info: GgufInfo, types_k: Iterable[CacheType], *, n_threads: int | None = None
) -> Calibration | None:
    """The calibration that the user's ``calibration=`` means for a model and the key types it is to run with.

    Args:
        spec: ``"auto"``: for tq types what the model's GGUF or the cache folder holds; where neither has one, it is
            made now and kept in the cache folder. ``"on"``: the same for every quantised type. ``"off"``: none. Else a
            file that `tq-ggml calibrate` has written.

    Returns:
        None where no key is to be conditioned: ``"off"``, no type that takes it, or a model that cannot be calibrated;
        a line on stderr then says why.

    Raises:
        CalibrationError: the file is damaged or of another model.
        TqError: the file is missing, or llama.cpp does not load the model.
    """
    every_type = spec != "auto"
    types_k = [t for t in types_k if t.is_quantized and (every_type or t.name.startswith("tq"))]
    if spec == "off" or not types_k:
        return None
    with open_gguf(info.path) as (data, header):
        digest = metadata.digest(data, header)
        own = {key: metadata.decode(value) for key, value in metadata.encoded(data, header).items()}
    if spec not in CHOICES:
        found = parse(_read(Path(spec)), digest, info, spec)
    elif own:
        found = _own(own, digest, info)
    else:
        found = _cached(digest, info) or _make(digest, info, n_threads)
    return found and dataclasses.replace(found, every_type=every_type)


def _own(values: Mapping[str, Any], digest: str, info: GgufInfo) -> Calibration:
    try:
        return parse(values, digest, info, info.path)
    except CalibrationError as problem:
        raise CalibrationError(
            f"{problem} --side-file FILE and pass --calibration FILE, or --calibration off"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    values = metadata.read_metadata(path)
    if not values:
        raise CalibrationError(f"{path} holds no calibration; make one with `tq-ggml calibrate`")
    return values


def _cached(digest: str, info: GgufInfo) -> Calibration | None:
    path = side_file(digest)
    if not path.exists():
        return None
    try:
        return parse(_read(path), digest, info, path)
    except TqError as problem:
        _note(f"{problem}; making it again")
        return None


def _make(digest: str, info: GgufInfo, n_threads: int | None) -> Calibration | None:
    path = side_file(digest)
    with Model(info.path) as model:
        if not model.has_vocabulary:
            _note(f"{info.path.name} has no vocabulary to calibrate with: its keys are not conditioned")
            return None
        _note(f"calibrating {info.path.name} once, a run over {DEFAULT_TOKENS} tokens, to be kept in {path.parent}")
        # The user asked for a cache type: what only helps it must not be what stops it.
        try:
            made = calibrate(model, cut_tokens(model, default_text(), DEFAULT_TOKENS), n_threads=n_threads)
        except TqError as problem:
            _note(f"{problem}: its keys are not conditioned")
            return None
    try:
        store(made, path)
    except TqError as problem:
        _note(f"{problem}, so it will be made again next time")
    return made


def store(made: Calibration, path: Path) -> None:
    """Write a side file, and its folder.

    Raises:
        TqError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise TqError(f"cannot make the folder {path.parent}: {problem.strerror or problem}") from None
    metadata.write_side_file(path, made.metadata())


def _note(text: str) -> None:
    print(f"tq-ggml: {text}", file=sys.stderr)
