"""README and docs are about this tree: paths, links, error texts, options and figures exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moe_p2p.config import LOCAL_FIELDS, AllToAllConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/NOTES.md")
    ),
    *sorted(ROOT.glob("docs/*.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path in backticks: below a folder of the tree, or a file of the root.
FOLDERS = "csrc|kernels|moe_p2p|tests|docs|benchmarks"
PATH = re.compile(rf"^(?:(?:{FOLDERS})(?:/[\w.*{{}},-]+)*/?|[A-Z]\w+\.md)$")
MOST_README_LINES = 200
EXAMPLE = "`waits for rank 2 (node 1, 1 of 2 immediates came)`"  # in docs/failure.md, of one text


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(text: str, first_cell: str) -> list[list[str]]:
    """The cells of the table whose head begins with `first_cell`, without the head."""
    table = text[text.index(f"| {first_cell} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_backticks_exist(page: Path) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", prose(page)):
        path = quoted.split(" ")[0]  # of a file and its arguments
        if PATH.match(path):
            assert list(ROOT.glob(path)), path


def test_comments_name_pages_and_headings_that_exist() -> None:
    for folder, end in (("csrc", "*.*"), ("kernels", "*.*"), ("moe_p2p", "*.py"), ("tests", "*.*")):
        for source in (ROOT / folder).rglob(end):
            if source.suffix not in {".py", ".cpp", ".h", ".cu", ".cuh"}:
                continue
            text = re.sub(r"\s*\n\s*(//|#)?\s*", " ", source.read_text())  # comments go on
            for name, heading in re.findall(r'\bdocs/(\w+\.md)(?:, "([^"]+)")?', text):
                page = ROOT / "docs" / name
                assert page.exists(), f"{source}: {name}"
                found = re.findall(r"^#+ (?:\d+\. )?(.*)$", page.read_text(), re.MULTILINE)
                assert not heading or heading in found, f"{source}: {name} {heading}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def test_every_option_stands_there_with_its_default() -> None:
    reported = {}
    for names, default, _ in rows((ROOT / "docs/options.md").read_text(), "field"):
        for name in re.findall(r"`(\w+)`", names):
            reported[name] = (default, names.endswith("*"))
    fields = {field.name: field for field in dataclasses.fields(AllToAllConfig)}
    assert set(reported) == set(fields)
    assert {name for name, (_, local) in reported.items() if local} == LOCAL_FIELDS
    for name, (default, _) in reported.items():
        value = fields[name].default
        if value is None or value == "":
            continue  # what it then is stands there in words
        if value is dataclasses.MISSING:
            assert default == "", name
        elif name == "part_bytes":
            assert default == f"{value >> 20} MiB", name
        else:
            assert default == (f"{value:g}" if type(value) is float else str(value).split(".")[-1])


def code() -> str:
    """All sources, with literals that follow each other joined, as the compiler does."""
    sources = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("moe_p2p/**/*.py")]
    joined = "\n".join(path.read_text() for path in sources if path.suffix in {".cpp", ".h", ".py"})
    return re.sub(r'"\s*\n\s*f?"', "", joined)


def test_every_error_text_of_a_wait_is_in_the_code() -> None:
    text = (ROOT / "docs/failure.md").read_text()
    every_wait = text[text.index("## Every wait") :]
    last_cells = [
        line.rstrip("| ").rsplit(" | ", 1)[-1] for line in every_wait.splitlines() if "|" in line
    ]
    quoted = [found for cell in last_cells for found in re.findall(r"`([^`]+)`", cell)]
    outside = re.sub(r"^\|.*$", "", every_wait, flags=re.MULTILINE).replace("\n", " ")
    quoted += re.findall(r"`([^`]+)`", outside.replace(EXAMPLE, ""))
    source = code()
    num_texts = 0
    for each in quoted:
        if " " not in each:
            continue  # a name, not a text
        num_texts += 1
        for part in each.split("..."):
            assert part.strip() in source, each
    assert num_texts > 25


def plot_figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "plot_figures", ROOT / "benchmarks/plot_figures.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_of_the_readme_are_those_of_the_data() -> None:
    figures = plot_figures()
    data = figures.read()
    assert figures.table(data) in (ROOT / "README.md").read_text()
    assert figures.PLOT.read_text() == figures.plot(data)
    run = [sys.executable, str(ROOT / "benchmarks/plot_figures.py"), "--table"]
    assert subprocess.check_output(run, text=True, timeout=60).strip() == figures.table(data)
