"""`python -m moe_p2p.nixl_ep SCRIPT [ARGS]` or `... -m MODULE [ARGS]`: runs it with this nixl_ep.

Processes that the program starts get it too. `--path` prints the folder to put on PYTHONPATH.
"""

import sys

from moe_p2p import aliases
from moe_p2p.nixl_ep.installation import PATH, install


def main(arguments: list[str]) -> int:
    return aliases.run("moe_p2p.nixl_ep", PATH, install, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
