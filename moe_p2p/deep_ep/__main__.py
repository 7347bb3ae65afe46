"""`python -m moe_p2p.deep_ep SCRIPT [ARGS]` or `... -m MODULE [ARGS]`: runs it with this deep_ep.

Processes that the program starts get it too: new programs through PYTHONPATH, multiprocessing's
children through sys.path, which they copy. `--path` prints the folder to put on PYTHONPATH.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from moe_p2p import env
from moe_p2p.deep_ep.installation import PATH, install

_USAGE = "usage: python -m moe_p2p.deep_ep SCRIPT [ARGS] | -m MODULE [ARGS] | --path"


def main(arguments: list[str]) -> int:
    if arguments == ["--path"]:
        print(PATH)
        return 0
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or program[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 2
    install()
    env.prepend_to_python_path(PATH)
    sys.argv = program
    if as_module:
        sys.path.insert(1, str(PATH))
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(program[0]).resolve().parent), str(PATH)]
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
