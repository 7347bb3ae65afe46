#!/usr/bin/env python3
"""Makes the backend moe-p2p known to a checkout of CollectiveX: python install.py FOLDER

FOLDER: experimental/CollectiveX of SemiAnalysisAI/InferenceX, at 843c625 or near it. It copies
ep_moe_p2p.py to bench/ and adds the name in three files. Twice does no harm.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NAME = '"moe-p2p"'
ADAPTER = Path(__file__).with_name("ep_moe_p2p.py")
# By file: what is there once, and what stands there afterwards.
EDITS: dict[str, list[tuple[str, str]]] = {
    "bench/run_ep.py": [
        ("choices=[", f"choices=[{NAME}, "),
        (
            '    if args.backend == "mori":\n',
            f"    if args.backend == {NAME}:\n"
            "        from ep_moe_p2p import MoeP2pBackend as Backend\n"
            '    elif args.backend == "mori":\n',
        ),
    ],
    "configs/platform_config.json": [
        ('"backend_maturity": {', f'"backend_maturity": {{{NAME}: "candidate", '),
    ],
    "sweep_matrix.py": [
        ("BACKEND_PRECISIONS = {\n", f'BACKEND_PRECISIONS = {{\n    {NAME}: ("bf16", "fp8"),\n'),
    ],
}


def install(folder: Path) -> None:
    """Raises ValueError naming the file that is not as 843c625 has it; nothing is written then."""
    texts = {}
    for name, edits in EDITS.items():
        at = folder / name
        text = at.read_text() if at.is_file() else ""
        if NAME in text:
            continue
        for there, instead in edits:
            if text.count(there) != 1:
                raise ValueError(
                    f"{at} has {there.strip()!r} {text.count(there)} times, must have it once, as "
                    "at 843c625: check that commit out, or add the backend by hand"
                )
            text = text.replace(there, instead)
        texts[at] = text
    for at, text in texts.items():
        at.write_text(text)
    shutil.copy(ADAPTER, folder / "bench")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    install(Path(sys.argv[1]))
