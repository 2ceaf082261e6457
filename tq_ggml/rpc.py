"""Models split over other processes and machines (docs/rpc.md): ggml's RPC backend, whose other end is
``ggml-rpc-server``."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

from tq_ggml.errors import EngineError
from tq_ggml.library import activate

_HELLO, _CAPS = 14, 24  # ggml-rpc.cpp: RPC_CMD_HELLO, RPC_CONN_CAPS_SIZE
_PATIENCE = 10  # seconds
_used: list[str] = []


def use_servers(endpoints: str | Sequence[str]) -> None:
    """Let models that are loaded from now on spread over these servers, if ``n_gpu_layers`` is not 0.

    Each takes a share of the layers, by its free memory, and their part of the KV cache. A server that ends while it is
    in use ends this process, with a line that says so: ggml knows no way back.

    Args:
        endpoints: ``"HOST:PORT"``, several in a list or with commas between them.

    Raises:
        EngineError: a server that cannot be reached, is none, or is of another build than this library.
    """
    for endpoint in endpoints.split(",") if isinstance(endpoints, str) else endpoints:
        if endpoint not in _used:
            _greet(endpoint)
            _register(endpoint)
            _used.append(endpoint)


def servers() -> list[str]:
    """The servers in use."""
    return list(_used)


def _greet(endpoint: str) -> None:
    """Try what ggml will do, because it ends the process where it fails."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise EngineError(f"{endpoint!r} is no address of an RPC server; give HOST:PORT")
    try:
        with socket.create_connection((host, int(port)), timeout=_PATIENCE) as connection:
            connection.sendall(struct.pack(f"<BQ{_CAPS}x", _HELLO, _CAPS))
            answer = connection.makefile("rb").read(8 + 4 + _CAPS)
    except TimeoutError:
        raise EngineError(f"the RPC server {endpoint} does not answer; it may be serving another program") from None
    except OSError as problem:
        why = problem.strerror or problem
        raise EngineError(f"cannot reach the RPC server {endpoint}: {why}; start `ggml-rpc-server` there") from None
    if len(answer) != 8 + 4 + _CAPS or struct.unpack_from("<Q", answer) != (4 + _CAPS,):
        raise EngineError(f"what answers at {endpoint} is no RPC server of this version")
    (build,) = struct.unpack_from("<H", answer, 10)
    ours = activate().llama_cpp._lib.tq_rpc_build()
    if build != ours:
        raise EngineError(
            f"the RPC server {endpoint} is of build {build:04x}, and this library of {ours:04x}; start the "
            "`ggml-rpc-server` that was built with it"
        )


def _register(endpoint: str) -> None:
    lib = activate().llama_cpp._lib
    lib.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    lib.ggml_backend_register.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_register(lib.ggml_backend_rpc_add_server(endpoint.encode()))
