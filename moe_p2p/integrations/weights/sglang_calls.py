"""How calls of a weight-update session reach SGLang: in this process, or over its server's HTTP.

Both have the same names: methods of its tokenizer manager are paths of its server.
"""

from __future__ import annotations

import base64
import http.client
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import torch

from moe_p2p.errors import ProtocolError, TransportError, make, require
from moe_p2p.integrations import required

_REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
}
_WITHOUT_REQUEST = ("pause_generation", "continue_generation")
# Makes the call of that name, with these fields of its request. Raises where SGLang refuses it.
Call = Callable[..., None]


def in_process(engine: Any) -> Call:
    """engine: has `loop` and `tokenizer_manager`, as sglang.Engine."""
    structs = required("sglang.srt.managers.io_struct", "sglang")

    def call(name: str, **fields: Any) -> None:
        request = getattr(structs, _REQUESTS[name])(**fields)
        given = (request,) if name in _WITHOUT_REQUEST else (request, None)
        method = getattr(engine.tokenizer_manager, name)
        found = engine.loop.run_until_complete(method(*given))
        if found is not None and not found[0]:
            raise make(ProtocolError, f"SGLang refuses {name}: {found[1]}")

    return call


def over_http(url: str, api_key: str, timeout_s: float) -> Call:
    """url: of a server, as http://host:port. api_key: its admin key; "": it has none."""
    require(
        url.startswith(("http://", "https://")),
        f"SGLang's server is {url!r}, must be its URL, as http://host:port",
    )
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"

    def encoded(value: Any) -> str:
        return base64.b64encode(value).decode()

    def call(name: str, **fields: Any) -> None:
        body = json.dumps(fields, default=encoded).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/{name}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as refused:
            said = refused.read(2000).decode(errors="replace")
            text = f"SGLang at {url} refuses {name} with status {refused.code}: {said}"
            raise make(ProtocolError, text) from None
        except (OSError, http.client.HTTPException) as error:
            text = f"SGLang at {url} does not answer {name} within {timeout_s:g} s: {error!r}"
            raise make(TransportError, text) from None

    return call


class _Bytes:
    """A uint8 tensor on the CPU once it is unpickled, in whatever process of whatever host: torch's
    own pickles of tensors name memory of this one. SGLang's unpickler knows this constructor."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, (list(self._data),)


def payload(data: bytes) -> bytes:
    """Returns one named tensor of these bytes, as SGLang takes it."""
    return pickle.dumps([("moe_p2p", _Bytes(data))])
