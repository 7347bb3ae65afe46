"""`python -m moe_p2p.deep_ep_v25 SCRIPT [ARGS]` or `... -m MODULE [ARGS]`: runs it with this
deep_ep_v25.

Processes that the program starts get it too. `--path` prints the folder to put on PYTHONPATH.
"""

import sys

from moe_p2p import aliases
from moe_p2p.deep_ep_v25.installation import PATH, install


def main(arguments: list[str]) -> int:
    return aliases.run("moe_p2p.deep_ep_v25", PATH, install, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
