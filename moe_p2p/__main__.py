"""`python -m moe_p2p bench | demo | doctor | plan`. Each command explains itself with --help."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "bench": ("moe_p2p.bench.command", "correctness, then latency and bytes on the wire"),
    "demo": ("moe_p2p.demo", "train a small language model with experts spread over ranks"),
    "doctor": ("moe_p2p.doctor", "what this machine has and lacks: GPUs, NICs, rails, libraries"),
    "plan": ("moe_p2p.plan", "memory of every region for given shapes"),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        lines = [f"  {name:6} {about}" for name, (_, about) in COMMANDS.items()]
        asked = arguments[0] if arguments else "--help"
        print("\n".join(["usage: python -m moe_p2p COMMAND [OPTIONS]", "", *lines]))
        return 0 if asked in ("-h", "--help") else 2
    command = importlib.import_module(COMMANDS[arguments[0]][0])
    return int(command.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
