"""MNN 3.6.1's TQ4 and TQ3 caches beside tq-ggml's: each engine against its own unquantised cache, over the same tokens.

    python scripts/compare_mnn.py [-m MODEL] [-f TEXT] [-c N_CTX] [--windows N] [-t THREADS]

MNN comes from its wheel, unpacked into build/mnn. Its own converter wants PyTorch and the original checkpoint, so the
GGUF is turned into MNN's format here: the weights as float32, which changes none of them, and the heads in the order
of the original checkpoint, as MNN's converter leaves them. Perplexities of the two baselines still differ a little:
llama.cpp multiplies quantised weights with activations of 8 bits.

MNN runs in a process of its own, which this script starts: `compare_mnn.py --mnn FOLDER`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from tq_ggml import calibration, models, packages, texts
from tq_ggml.cache_types import parse_pair
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.evaluation import F16, TokenScore, cut_windows, evaluate, log_softmax, score_token, summarise
from tq_ggml.report import Column, markdown

VERSION = "3.6.1"
FOLDER = Path(__file__).resolve().parent.parent / "build" / "mnn"
BASELINE = "f32"
# attention_mode is 8 (flash attention) plus how keys and values are kept. The TQ modes scale the query by the attention
# scale and by 1/sqrt(head size), so the former has to be 1; the others only do the former.
MODES = {
    BASELINE: {"attention_mode": 8},
    "tq4": {"attention_mode": 14, "attn_scale": 1.0},
    "tq3": {"attention_mode": 12, "attn_scale": 1.0},
}
COLUMNS = (
    Column("engine", "engine"),
    Column("cache", "cache"),
    Column("keys", "keys"),
    Column("PPL", "ppl", ".3f", "ppl_err"),
    Column("vs own baseline %", "worse", "+.2f", scale=100),
    Column("KL divergence", "kld", ".5f", "kld_err"),
    Column("same top %", "same_top", ".2f", scale=100),
)
Row = dict[str, Any]


# ---- MNN's format ----------------------------------------------------------------------------------------------------


class Graph:
    """A network as the JSON that MNN's converter reads; every method adds an operator and returns its output's index.

    Float tensors are (1, tokens, ...). Large weights go into a file beside it.
    """

    def __init__(self, weights: BinaryIO) -> None:
        self.names: list[str] = []
        self._ops: list[dict] = []
        self._weights = weights

    def op(self, kind: str, parameter: str, main: dict, *inputs: int, name: str = "", outputs: int = 1) -> int:
        """The index of the first output; the others follow."""
        first = len(self.names)
        name = name or f"{kind}_{first}"
        self.names += [name if i == 0 else f"{name}.{i}" for i in range(outputs)]
        op = {"name": name, "type": kind, "main_type": parameter, "main": main, "defaultDimentionFormat": "NHWC"}
        op["outputIndexes"] = list(range(first, first + outputs))
        self._ops.append(op | ({"inputIndexes": inputs} if inputs else {}))
        return first

    def store(self, values: np.ndarray) -> list[int]:
        """Where it is in the file of weights: offset and bytes."""
        return [self._weights.tell(), self._weights.write(np.ascontiguousarray(values).tobytes())]

    def input(self, name: str, dims: list[int], dtype: str = "DT_FLOAT") -> int:
        return self.op("Input", "Input", {"dims": dims, "dtype": dtype, "dformat": "NCHW"}, name=name)

    def constant(self, values: np.ndarray) -> int:
        main = {"dims": values.shape, "dataType": "DT_FLOAT", "dataFormat": "NCHW", "float32s": values.ravel().tolist()}
        return self.op("Const", "Blob", main)

    def binary(self, kind: str, a: int, b: int) -> int:
        return self.op("BinaryOp", "BinaryOp", {"opType": kind, "T": "DT_FLOAT"}, a, b)

    def unary(self, kind: str, x: int) -> int:
        return self.op("UnaryOp", "UnaryOp", {"opType": kind, "T": "DT_FLOAT"}, x)

    def reshape(self, x: int, *dims: int) -> int:
        return self.op("Reshape", "Reshape", {"dims": dims, "dimType": "NCHW"}, x)

    def rms_norm(self, x: int, weight: np.ndarray, epsilon: float) -> int:
        main = {"axis": [-1], "epsilon": epsilon, "group": 1, "useRMSNorm": True}
        main |= {"gamma": weight.tolist(), "beta": [0.0] * weight.size}
        return self.op("LayerNorm", "LayerNorm", main, x)

    def linear(self, x: int, weight: np.ndarray, name: str = "") -> int:
        """``weight`` is (outputs, inputs). MNN has matrix products with constants as convolutions of one pixel."""
        n_out, n_in = weight.shape
        common = {"kernelX": 1, "kernelY": 1, "outputCount": n_out, "inputCount": n_in, "padMode": "CAFFE"}
        external = [*self.store(weight), self.store(np.zeros(n_out, np.float32))[1]]
        x = self._convert(self.reshape(x, -1, n_in, 1, 1), "NCHW", "NC4HW4")
        x = self.op("Convolution", "Convolution2D", {"common": common, "external": external}, x)
        x = self._convert(x, "NC4HW4", "NCHW")
        return self.op("Reshape", "Reshape", {"dims": [1, -1, n_out], "dimType": "NCHW"}, x, name=name)

    def _convert(self, x: int, source: str, dest: str) -> int:
        return self.op("ConvertTensor", "TensorConvertInfo", {"source": source, "dest": dest}, x)

    def rope(self, x: int, cos: int, sin: int, half: int) -> int:
        """Rotate (1, tokens, heads, 2 half): value i together with value i + half, as in the original checkpoints."""
        a = self.op("Slice", "Slice", {"axis": 3, "slicePoints": [half], "sourceType": "CAFFE"}, x, outputs=2)
        b = a + 1
        first = self.binary("SUB", self.binary("MUL", a, cos), self.binary("MUL", b, sin))
        second = self.binary("ADD", self.binary("MUL", b, cos), self.binary("MUL", a, sin))
        return self.op("Concat", "Axis", {"axis": 3}, first, second)

    def json(self, output: str) -> str:
        net = {"bizCode": "MNN", "oplists": self._ops, "outputName": [output], "sourceType": "ONNX"}
        return json.dumps(net | {"tensorName": self.names, "tensorNumber": len(self.names), "usage": "INFERENCE"})


class Weights:
    """The GGUF of a model of architecture llama: its numbers by name, its tensors as float32.

    Raises:
        TqError: another architecture, or a variant of this one that `build` does not know.
    """

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if (arch := self["general.architecture"]) != "llama":
            raise TqError(f"{path.name} is of architecture {arch}; the MNN side can only be built for llama (SmolLM2)")
        self.n_layer, self.width = self["llama.block_count"], self["llama.embedding_length"]
        self.n_head, self.n_head_kv = self["llama.attention.head_count"], self["llama.attention.head_count_kv"]
        self.epsilon, self.rope_base = self["llama.attention.layer_norm_rms_epsilon"], self["llama.rope.freq_base"]
        self.head_size = self.width // self.n_head
        unknown = [n for n in self._tensors if n.endswith(".bias") or n == "rope_freqs.weight" or "_exps" in n]
        if unknown or self["llama.rope.dimension_count"] != self.head_size:
            raise TqError(f"{path.name} has {(unknown or ['a partial RoPE'])[0]}; build() does not know such a llama")

    def __getitem__(self, key: str) -> Any:
        try:
            return self._reader.fields[key].contents()
        except KeyError:
            raise TqError(f"the GGUF has no {key}, which the MNN side is built from") from None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def heads(self, name: str, n: int) -> np.ndarray:
        """A matrix of queries or keys with its rows as in the checkpoint: GGUF puts RoPE's pairs next to each other."""
        rows = self.tensor(name)
        return rows.reshape(n, self.head_size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def build(weights: Weights, graph: Graph) -> list[int]:
    """The whole model into ``graph``; where its embedding is in the file of weights, for ``tie_embeddings``."""
    w, half = weights, weights.head_size // 2
    graph.store(np.zeros(16, np.float32))  # MNN takes an embedding at offset 0 for one in a file of its own
    embedding = w.tensor("token_embd.weight")
    at, _ = graph.store(embedding.astype(np.float16))
    hidden, mask = graph.input("input_ids", [-1, 1, w.width]), graph.input("attention_mask", [])
    position = graph.input("position_ids", [1, -1], "DT_INT32")
    graph.input("logits_index", [1], "DT_INT32")  # which logits are wanted: here always all
    position = graph.op("Cast", "CastParam", {"srcT": "DT_INT32", "dstT": "DT_FLOAT"}, position)
    frequencies = (w.rope_base ** (-np.arange(half) / half)).astype(np.float32).reshape(1, 1, 1, half)
    angle = graph.binary("MUL", graph.reshape(position, 1, -1, 1, 1), graph.constant(frequencies))
    cos, sin = graph.unary("COS", angle), graph.unary("SIN", angle)
    hidden = graph.reshape(hidden, 1, -1, w.width)
    for layer in range(w.n_layer):
        of = f"blk.{layer}."
        x = graph.rms_norm(hidden, w.tensor(of + "attn_norm.weight"), w.epsilon)
        q = graph.linear(x, w.heads(of + "attn_q.weight", w.n_head))
        k = graph.linear(x, w.heads(of + "attn_k.weight", w.n_head_kv))
        v = graph.linear(x, w.tensor(of + "attn_v.weight"))
        q = graph.rope(graph.reshape(q, 1, -1, w.n_head, w.head_size), cos, sin, half)
        k = graph.rope(graph.reshape(k, 1, -1, w.n_head_kv, w.head_size), cos, sin, half)
        v = graph.reshape(v, 1, -1, w.n_head_kv, w.head_size)
        about = {"kv_cache": True, "layer_index": layer, "kv_shared_layer_index": -1}
        x = graph.reshape(graph.op("Attention", "AttentionParam", about, q, k, v, mask), 1, -1, w.width)
        hidden = graph.binary("ADD", hidden, graph.linear(x, w.tensor(of + "attn_output.weight")))
        x = graph.rms_norm(hidden, w.tensor(of + "ffn_norm.weight"), w.epsilon)
        gate = graph.unary("SILU", graph.linear(x, w.tensor(of + "ffn_gate.weight")))
        x = graph.binary("MUL", gate, graph.linear(x, w.tensor(of + "ffn_up.weight")))
        hidden = graph.binary("ADD", hidden, graph.linear(x, w.tensor(of + "ffn_down.weight")))
    hidden = graph.rms_norm(hidden, w.tensor("output_norm.weight"), w.epsilon)
    graph.linear(hidden, w.tensor("output.weight") if "output.weight" in w else embedding, "logits")
    return [at, 0, 0, 16, 0]


def write_model(path: Path, folder: Path, threads: int) -> None:
    """All that MNN loads, except llm.mnn, which its converter makes of network.json."""
    weights = Weights(path)
    with (folder / "llm.mnn.weight").open("wb") as file:
        graph = Graph(file)
        tied = build(weights, graph)
    (folder / "network.json").write_text(graph.json("logits"))
    about = {"hidden_size": weights.width, "layer_nums": weights.n_layer, "attention_mask": "float"}
    (folder / "llm_config.json").write_text(json.dumps(about | {"tie_embeddings": tied}))
    # It insists on a tokenizer, but is given token ids: one of a single token will do (version, type; counts; "a").
    (folder / "tokenizer.txt").write_text("430 1\n0 1 0\n0 \n1\nYQ==\n")
    common = {"backend_type": "cpu", "thread_num": threads, "precision": "high", "memory": "high", "all_logits": True}
    for name, mode in MODES.items():
        (folder / f"{name}.json").write_text(json.dumps(common | mode))


# ---- MNN's process ---------------------------------------------------------------------------------------------------


def run_in_mnn(folder: Path) -> None:
    """Convert the network, score windows.npy under every mode, and write scores.npz: a mode's TokenScores as rows."""
    # Not MNN.tools: importing that installs a telemetry client with whichever pip is first on the PATH, and calls home.
    import _tools
    from MNN import llm

    _tools.mnnconvert(["", "-f", "JSON", "--modelFile", f"{folder}/network.json", "--MNNModel", f"{folder}/llm.mnn"])
    engines = {name: llm.create(str(folder / f"{name}.json")) for name in MODES}
    for engine in engines.values():
        engine.load()
    scores: dict[str, list[TokenScore]] = {name: [] for name in MODES}
    for window in np.load(folder / "windows.npy"):
        logits = {name: logits_of(engine, window) for name, engine in engines.items()}
        for at in range(len(window) // 2, len(window) - 1):
            rows = {name: log_softmax(block[at]) for name, block in logits.items()}
            for name, row in rows.items():
                scores[name].append(score_token(rows[BASELINE], row, int(window[at + 1])))
    np.savez(folder / "scores.npz", **{name: np.array(done) for name, done in scores.items()})
    os._exit(0)  # MNN's clean-up at the end of Python crashes


def logits_of(engine: Any, window: np.ndarray) -> np.ndarray:
    """Float32 logits (tokens, n_vocab) of a window in an empty cache."""
    engine.reset()
    return engine.forward(window.tolist()).read().reshape(len(window), -1)


def get_mnn() -> Path:
    """The folder of the unpacked wheel, downloaded once."""
    kept = FOLDER / f"wheel-{VERSION}-{sys.implementation.cache_tag}"
    if not kept.is_dir():
        part = FOLDER / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with zipfile.ZipFile(packages.download("MNN", VERSION, part)) as wheel:
            wheel.extractall(part / "wheel")
        (part / "wheel").rename(kept)
        shutil.rmtree(part)
    return kept


def measure_mnn(path: Path, windows: np.ndarray, threads: int) -> list[Row]:
    wheel, folder = get_mnn(), FOLDER / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    print(f"converting {path.name} for MNN ...", file=sys.stderr)
    write_model(path, folder, threads)
    np.save(folder / "windows.npy", windows)
    print(f"MNN {VERSION}: {', '.join(MODES)} ...", file=sys.stderr)
    search = os.pathsep.join(filter(None, [str(wheel), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, "--mnn", str(folder)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise TqError(f"MNN {VERSION} ended with code {done.returncode}: {last}")
    with np.load(folder / "scores.npz") as scores:
        figures = {name: summarise([TokenScore(*row) for row in scores[name]]) for name in MODES}
    shutil.rmtree(folder)
    base = figures[BASELINE]["ppl"]
    return [row_of("MNN", name, "", figures[name], base) for name in MODES]


# ---- both ------------------------------------------------------------------------------------------------------------


def measure_ours(model: Model, windows: np.ndarray, threads: int) -> list[Row]:
    """f16, tq4 and tq3; the last two with keys as they are, and conditioned as the command line does by itself."""
    pairs = [parse_pair("tq4"), parse_pair("tq3")]
    base, *plain = evaluate(model, [F16, *pairs], windows, n_threads=threads)
    model.calibration = calibration.choose("auto", model.info, [pair[0] for pair in pairs], n_threads=threads)
    measured = [("", base), *(("plain", quality) for quality in plain)]
    if model.calibration:
        measured += [("conditioned", quality) for quality in evaluate(model, pairs, windows, n_threads=threads)]
    return [row_of("tq-ggml", str(q.type_k), keys, dataclasses.asdict(q), base.ppl) for keys, q in measured]


def row_of(engine: str, cache: str, keys: str, figures: Row, baseline: float) -> Row:
    return figures | {"engine": engine, "cache": cache, "keys": keys, "worse": figures["ppl"] / baseline - 1}


def run(args: argparse.Namespace) -> None:
    if args.ctx < 16 or args.windows < 1 or args.threads < 1:
        raise TqError("there is nothing to score: --ctx is 16 or more, --windows and --threads 1 or more")
    text = texts.named_text(args.text)
    with Model(models.resolve_model(args.model)) as model:
        windows = cut_windows(model.tokenize(text, add_bos=True), args.ctx, args.windows, model.bos)
        rows = measure_mnn(model.path, windows, args.threads) + measure_ours(model, windows, args.threads)
    print(markdown(rows, COLUMNS), end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2", help="GGUF file or name; a llama (default: %(default)s)")
    parser.add_argument("-f", "--text", default="Persuasion", help="a file, or a novel's title (default: %(default)s)")
    parser.add_argument("-c", "--ctx", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1, help="default: all, %(default)s")
    parser.add_argument("--mnn", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.mnn:
            run_in_mnn(args.mnn)
        run(args)
    except TqError as error:
        print(f"compare_mnn: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"compare_mnn: error: cannot write in {FOLDER}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
