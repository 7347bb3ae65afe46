"""What docs/doors.md tells users of engines to write: options exist, and programs print that.

The other blocks of that page run in tests/package/test_readme.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import doors
from tests.engines import packages
from tests.support import warm

ROOT = doors.PAGE.parents[1]
# Section, project, files that declare its options.
OPTIONS = [
    ("vLLM", "vllm", ("vllm/engine/arg_utils.py", "vllm/config/parallel.py")),
    ("SGLang", "sglang", ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py")),
    ("Megatron-Core", "megatron-core", ("megatron/core/transformer/transformer_config.py",)),
]


def section(name: str) -> str:
    text = doors.PAGE.read_text()
    return text[text.index(f"### {name}\n") :].split("\n### ")[0]


@pytest.mark.parametrize(
    ("name", "project", "files"),
    [pytest.param(*each, marks=pytest.mark.engine(each[1]), id=each[0]) for each in OPTIONS],
)
def test_options_of_a_section_are_the_engines(
    name: str, project: str, files: tuple[str, ...]
) -> None:
    """By name, or as the field of which the engine makes them; words for values are its words."""
    root = packages.where(project)
    declared = "\n".join(path.read_text() for glob in files for path in root.glob(glob))
    commands = re.findall(r"^```\n(.*?)```$", section(name), re.MULTILINE | re.DOTALL)
    joined = "\n".join(commands).replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if "-m moe_p2p" not in line]
    options = re.findall(r"(?<= )--([\w-]+)(?: ([a-z_]{3,}))?", "\n".join(lines))
    options = [each for each in options if each[0] != "nproc-per-node"]  # torchrun's
    assert len(options) > 1
    for option, value in options:
        field = option.replace("-", "_")
        assert re.search(rf'"--{option}"|^    {field}:', declared, re.MULTILINE), option
        assert not value or f'"{value}"' in declared or f"'{value}'" in declared, value


@pytest.mark.engine("verl")
@pytest.mark.timeout(200)
def test_verl_finds_what_the_section_names(tmp_path: Path) -> None:
    """With stand-ins for ray, which is in no test environment."""
    ((code, printed),) = re.findall(
        r"^```python verl\n(.*?)```\n\n```text\n(.*?)```$",
        section("verl"),
        re.MULTILINE | re.DOTALL,
    )
    root = packages.where("verl")
    config = (root / "verl/workers/config/rollout.py").read_text()
    options = re.findall(r"rollout\.checkpoint_engine\.(\w+)=", section("verl"))
    assert options == ["backend", "custom_backend_module"]
    assert all(re.search(rf"^    {option}: ", config, re.MULTILINE) for option in options)
    assert (root / "verl/trainer/main_ppo.py").exists()
    begin = "from tests.engines import verl_weights_scenarios\n\nverl_weights_scenarios.begin()\n"
    (tmp_path / "program.py").write_text(
        f"import sys\n\nsys.path.append({str(ROOT)!r})\n{begin}{code}"
    )
    done = warm.run(
        str(tmp_path / "program.py"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith(printed)
