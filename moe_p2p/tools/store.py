"""`python -m moe_p2p store HOST:PORT`: where KV workers of engines find each other."""

from __future__ import annotations

import threading

from moe_p2p.errors import MoeP2pError
from moe_p2p.fleet import addresses
from moe_p2p.integrations.kv.worker import serve_store, split_address
from moe_p2p.tools.option_types import Parser


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m moe_p2p store",
        description="Serves the store in which KV workers of vLLM and SGLang find each other.",
    )
    parser.add_argument("address", metavar="HOST:PORT", help="of this machine, as engines reach it")
    address = parser.parse_args(arguments).address
    try:
        store = serve_store(address)
    except MoeP2pError as error:
        print(error)
        return 2
    if store is None:
        host, _ = split_address(address)
        print(
            f"{address} is served already"
            if addresses.is_own(host)
            else f"{host} is no address of this machine"
        )
        return 1
    print(f"serving {address}; ends with Ctrl-C", flush=True)
    threading.Event().wait()
    return 0
