"""READMEs and docs are about this tree: paths, links, error texts, options and figures exist."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from moe_p2p.__main__ import COMMANDS, main
from moe_p2p.kv import footer
from moe_p2p.machine import transport
from moe_p2p.moe import votes
from moe_p2p.moe.config import LOCAL_FIELDS, AllToAllConfig
from moe_p2p.moe.gpu import launch_shape
from moe_p2p.weights import attempt, maxima

ROOT = Path(__file__).resolve().parents[2]
# Folders with a README that says what is there.
ROOMS = [
    *(f"moe_p2p/{name}" for name in ("engine", "fleet", "moe", "kv", "weights", "integrations")),
    *("benchmarks/bench", "kernels", "csrc/provider", "tests"),
]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/NOTES.md")
    ),
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / room / "README.md" for room in ROOMS),
    *sorted(ROOT.glob("contrib/**/README.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path in backticks: below a folder of the tree, or a file of the root.
FOLDERS = "csrc|kernels|moe_p2p|tests|docs|benchmarks|contrib"
PATH = re.compile(rf"^(?:(?:{FOLDERS})(?:/[\w.*{{}},-]+)*/?|[A-Z]\w+\.md)$")
MOST_README_LINES = 200
HEADINGS = [
    "What it is",
    "Objects, and who owns whom",
    "Files, in the order to read them",
    "Rules",
    "Tests, and what prints its state",
]
MOST_ROOM_LINES, WIDEST = 60, 120
EXAMPLE = "`waits for rank 2 (node 1, 1 of 2 immediates came)`"  # in docs/failure.md, of one text

# Other pages are of their time, or name what other packages have.
OTHER_PAGES = (
    "CHANGELOG",
    "NOTES",
    "deep_ep",
    "doors",
    "engines",
    "mooncake",
    "nixl_ep",
    "weights_frameworks",
)
OWN_PAGES = [p for p in PAGES if p.stem not in OTHER_PAGES and ROOT / "contrib" not in p.parents]
FILE = re.compile(r"[\w*]\.(py|cpp|h|cuh?|md)\b")
NAME = re.compile(r"[A-Za-z]\w*_\w+|[A-Za-z]*[a-z][A-Z]\w*")  # snake_case or camelCase
HALF = re.compile(r"\b([CD][RS]|PW)_\w|\b[wy]_k\d")  # of the proof in docs/protocol.md
FOREIGN = {
    *("FI_OPT_CUDA_API_PERMITTED", "FI_OPT_SHARED_MEMORY_PERMITTED", "fi_close", "fi_readmsg"),
    *("cudaFree", "ibv_post_send", "ib_write_bw", "ib_write_lat"),
    *("update_memory_buffers", "connect_ranks", "disconnect_ranks", "update_mask_buffer"),
    *("clean_mask_buffer", "num_experts_per_rank"),
}
VERBS, FABRIC = "csrc/provider/verbs/", "csrc/provider/libfabric/"
PROXY, QUEUE = "csrc/proxy/proxy_thread.cpp", "csrc/engine/nic_queue.h"
COPY, LOOPBACK = "csrc/platform/cuda_copy.cpp", "csrc/provider/loopback/copies.cpp"
ROWS, DOMAIN = "csrc/platform/row_copies.h", "csrc/provider/loopback/domain.cpp"
CHANNEL = "csrc/provider/loopback/channel.h"
STORE, CACHE = "moe_p2p/fleet/bootstrap.py", "moe_p2p/machine/kernel_cache.py"
CLOSE, KV, BENCH = "csrc/moe/all_to_all.cpp", "moe_p2p/kv/", "benchmarks/bench/"
# Page, words around a number, and the constant that the number is: file, definition, its unit.
NUMBERS = [
    ("gpu", r"up to (\d+) KiB are carried by a", COPY, r"Kernel = (\d+) << 10", 1),
    ("gpu", r"up to (\d+) KiB are carried by one", ROWS, r"kMostBytes = (\d+) << 10", 1),
    ("gpu", r"after (\d+) ms, and may", DOMAIN, r"kLentTimeout{(\d+)}", 1),
    ("failure", r"it is given back \| (\d+) ms", DOMAIN, r"kLentTimeout{(\d+)}", 1),
    ("gpu", r"or (\d+) ms have passed", CHANNEL, r"kEndOfGpuWorkNs = (\d+)'000'000", 1),
    ("failure", r"to lent memory \| (\d+) ms", CHANNEL, r"kEndOfGpuWorkNs = (\d+)'000'000", 1),
    ("protocol", r"naps of (\d+) µs", PROXY, r"kNap = .*\((\d+)\)", 1),
    ("protocol", r"take longer than (\d+) ms", PROXY, r"kPatience = .*\((\d+)\)", 1),
    ("failure", r"naps of (\d+) µs", PROXY, r"kNap = .*\((\d+)\)", 1),
    ("failure", r"`PollerCall` \| (\d+) s", PROXY, r"kAnswerTimeout = .*\((\d+)\)", 1),
    ("failure", r"; (\d+) s after a failure", CLOSE, r"kFailedPatience{(\d+)}", 1),
    ("failure", r"in the store \| (\d+) s", STORE, r"_PATIENCE_S = (\S+)", 1),
    ("failure", r"_CACHE` \| (\d+) s", CACHE, r"_LOCK_WAIT_S = (\S+)", 1),
    ("failure", r"at every (\d+) ms", f"{KV}worker.py", r" SLOW_S = .*?, (\S+)", 1e-3),
    ("failure", r"old queue pair (\d+) s", f"{VERBS}peers.cpp", r"kEndOfLane{(\d+)}", 1e3),
    ("failure", r"handed in \| ([\d.]+) s", f"{VERBS}drain.cpp", r"kLastReceive{(\d+)}", 1e3),
    ("failure", r"reconnect (\d+) s", f"{FABRIC}sender.cpp", r"kReconnect = .*\((\d+)\)", 1e3),
    ("failure", r"at close \| ([\d.]+) s", f"{FABRIC}domain.cpp", r"kDrain = .*\((\d+)\)", 1e3),
    ("failure", r"answered \| ([\d.]+) s", f"{FABRIC}domain.cpp", r"kDrain = .*\((\d+)\)", 1e3),
    ("failure", r"answer \| (\d+) s", f"{FABRIC}domain.cpp", r"kAnswer = .*\((\d+)\)", 1e3),
    ("failure", r"(\d+) ms to take the", f"{FABRIC}domain.cpp", r"kConnected = .*\((\d+)\)", 1),
    ("failure", r"memory is given back \| (\d+) s", LOOPBACK, r"kDrainTimeout = .*\((\d+)\)", 1),
    ("providers", r"message of (\d+) KiB", f"{VERBS}socket.cpp", r"MessageBytes = (\d+)", 1024),
    ("providers", r"and (\d+) such", f"{VERBS}sessions.cpp", r"kMaxPending = (\d+)", 1),
    ("transfer_engine", r"at most (\d+) writes of a lower", QUEUE, r"kQuantum = (\d+)", 1),
    ("transfer_engine", r"at most (\d+) KiB in flight", QUEUE, r"kLowerBytes = (\d+) << 10", 1),
    ("transfer_engine", r"writes of at most (\d+) KiB", QUEUE, r"kLowerPiece = (\d+) << 10", 1),
    ("transfer_engine", r"a turn for (\d+) ms", QUEUE, r"kPatience{(\d+)}", 1),
    ("tuning", r"up to (\d+) tokens a rank", f"{BENCH}contestants.py", r"_TOKENS = \(\s*(\d+)", 1),
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "CHANGELOG"], ids=name_of)
def test_lines_of_prose_are_at_most_120_columns(page: Path) -> None:
    lines = prose(page).splitlines()
    wide = [each for each in lines if len(each) > WIDEST and not each.lstrip().startswith("|")]
    assert not wide


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is(room: str) -> None:
    text = (ROOT / room / "README.md").read_text()
    lines = text.splitlines()
    assert re.findall(r"^##+ (.*)$", text, re.MULTILINE) == HEADINGS
    assert len(lines) <= MOST_ROOM_LINES
    assert max(map(len, lines)) <= WIDEST
    paths = [one for one in re.findall(r"`([^`\s]+)`", text) if FILE.search(one) or one[-1] == "/"]
    missing = [one for one in paths if not [*(ROOT / room).glob(one), *ROOT.glob(one)]]
    assert not missing
    assert len(paths) > 10


def test_a_room_names_all_of_its_modules() -> None:
    for room in ROOMS:
        if room.startswith("moe_p2p/"):
            text = (ROOT / room / "README.md").read_text()
            folders = ("", "moe/", "kv/", "weights/") if room.endswith("integrations") else ("",)
            modules = {
                folder + path.name
                for folder in folders
                for path in (ROOT / room / folder).glob("*.py")
                if path.name != "__init__.py"
            }
            assert modules <= set(re.findall(r"`([\w/]+\.py)`", text)), room


def test_immediates_are_divided_as_the_table_says() -> None:
    text = (ROOT / "moe_p2p/engine/README.md").read_text()
    spaces = {
        re.sub(r"`(\w+)`, `(.+)`", r"\2:\1", each[3]): (number(each[0]), number(each[1]))
        for each in rows(text, "from")
    }
    found = re.search(r"kKeyedBit = 1u << (\d+);", (ROOT / "csrc/engine/imm_counter.h").read_text())
    assert found
    keyed, kv_bit = 1 << int(found[1]), footer._KV_BIT
    last = kv_bit | (footer.MAX_SLOTS - 1) << footer._EPOCH_BITS | (1 << footer._EPOCH_BITS) - 1
    sent = [attempt.immediate(attempt.Keys(job, 1)) for job in range(5)]
    merged = [maxima.immediate(n, phase) for n in (0, -1) for phase in (maxima.UP, maxima.DOWN)]
    assert spaces == {
        "csrc/engine/imm_counter.h:ImmKey": (keyed, 2 * keyed),
        "moe_p2p/kv/footer.py:immediate": (kv_bit, last + 1),
        "moe_p2p/moe/votes.py:FIRST_IMM": (max(merged) + 1, kv_bit),
        "moe_p2p/weights/maxima.py:immediate": (min(merged), max(merged) + 1),
        "moe_p2p/weights/attempt.py:FIRST_IMM": (attempt.FIRST_IMM, min(merged)),
        "": (0, attempt.FIRST_IMM),
    }
    assert max(merged) + 1 == votes.FIRST_IMM
    assert all(attempt.FIRST_IMM <= each < min(merged) for each in sent)


def number(text: str) -> int:
    """Of "2^29 + 3 * 2^20"."""
    return sum(
        math.prod(2 ** int(one[2:]) if one[:2] == "2^" else int(one) for one in term.split(" * "))
        for term in text.split(" + ")
    )


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


def sources() -> dict[Path, str]:
    files = (path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.*"))
    ends = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh", ".yaml"}
    return {
        path: path.read_text() for path in files if path.suffix in ends and path != Path(__file__)
    }


def test_names_in_backticks_are_in_the_code() -> None:
    words = {word for text in sources().values() for word in re.findall(r"\w+", text)}
    num_names = 0
    for page in OWN_PAGES:
        quoted = [one for one in re.findall(r"`([^`]+)`", prose(page)) if not FILE.search(one)]
        names = {name for one in quoted for name in NAME.findall(HALF.sub("", one))} - FOREIGN
        assert names <= words, f"{name_of(page)}: {names - words}"
        num_names += len(names)
    assert num_names > 200


def test_members_in_backticks_and_comments_are_of_their_class() -> None:
    ends = {".h", ".cpp", ".cu", ".cuh"}
    texts = [text for path, text in sources().items() if path.suffix in ends]
    code = [re.sub(r"//.*", "", text) for text in texts]
    prose_of_code = " ".join(found for text in texts for found in re.findall(r"//(.*)", text))
    members = set(re.findall(r"\b([A-Z]\w+)::(\w+)", prose_of_code))
    for page in OWN_PAGES:
        members |= set(re.findall(r"(\w+)::(\w+)`", prose(page)))
    for owner, member in members:
        declares = re.compile(
            rf"\b(class|struct|namespace|enum) (?:\[\[\w+\]\] )?{owner}\b[^;]*?{{.*?\b{member}\b",
            re.DOTALL,
        )
        near = [text for text in code if owner in text and member in text]
        assert any(f"{owner}::{member}" in text or declares.search(text) for text in near), (
            f"{owner}::{member}"
        )
    assert len(members) > 60


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number[0]}-{number[3]}")
def test_numbers_are_those_of_the_code(number: tuple[str, str, str, str, float]) -> None:
    page, words, path, definition, unit = number
    on_page = re.search(words, " ".join((ROOT / f"docs/{page}.md").read_text().split()))
    in_code = re.search(definition, (ROOT / path).read_text())
    assert on_page, words
    assert in_code, definition
    assert float(on_page[1]) * unit == pytest.approx(float(in_code[1]))


def test_numbers_that_choose_kernels_are_those_of_the_code() -> None:
    gpu = (ROOT / "docs/gpu.md").read_text()
    long, short = launch_shape.BULK_STEP, launch_shape.FEW_BULK_STEP
    few = max(sms for sms in range(1, 1024) if launch_shape.few(sms))
    ranks = max(n for n in range(1, 1024) if launch_shape.can_go_in_bulk(n, n, few))
    assert f"steps of at most {long} tokens ({short} where longer steps go in bulk)" in gpu
    assert f"at most {few} multiprocessors, one node of at most {ranks} ranks" in gpu
    # Steps whose rows flag themselves or not, by num_sms: there ranks have to agree on it.
    steps = [
        step
        for step in range(1, 2 * long)
        if len({launch_shape.flags_itself(step, masks=False, bulk=bulk) for bulk in (True, False)})
        > 1
    ]
    options, config = (ROOT / "docs/options.md").read_text(), AllToAllConfig.__doc__ or ""
    assert f"`chunk_tokens` is {steps[0]} to {steps[-1]}, all ranks give at most {few}" in options
    assert f"{steps[0]} to {steps[-1]} tokens, all ranks have at most {few}" in config


def test_settings_that_may_differ_between_ranks_stand_there() -> None:
    (row,) = (names for names in rows((ROOT / "docs/options.md").read_text(), "field")
              if names[0] == "`transport_settings`")  # fmt: skip
    (listed,) = re.findall(r"([^.]*) may differ between ranks", row[2])
    named = "".join(f"{name}=1," for name in re.findall(r"`(\w+)`", listed))
    assert named
    config = AllToAllConfig(
        num_experts=1, hidden_dim=8, topk=1, max_tokens=1, transport_settings=f"{named}seed=7"
    )
    assert config.agreed()["transport_settings"] == "seed=7"
    assert set(re.findall(r"(\w+)=", named)) == {*transport._OF_ONE_HOST, "proxy_cpu"}


def test_variables_of_the_environment_stand_there() -> None:
    listed = {
        name
        for row in rows((ROOT / "docs/options.md").read_text(), "variable")
        for name in re.findall(r"`(\w+)`", row[0])
    }
    read = set(re.findall(r"\bMOE_P2P_\w+", (ROOT / "moe_p2p/env.py").read_text()))
    assert read
    assert {name for name in listed if name.startswith("MOE_P2P_")} == read


def commands() -> list[str]:
    """Of fences and backticks, without comments."""
    found = []
    for page in PAGES:
        if page.name in {"CHANGELOG.md", "NOTES.md"}:
            continue  # of their time
        text = page.read_text().replace("\\\n", " ")
        lines = "\n".join(FENCE.findall(text)).splitlines()
        lines += [one.replace("\n", " ") for one in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
        found += [re.split(r"\s#|\)", line)[0] for line in lines if "-m moe_p2p " in f"{line} "]
    return sorted({line.split("-m moe_p2p ")[1].strip() for line in found if "-m moe_p2p " in line})


class ParsedError(Exception):
    """Raised where a command would begin."""


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*arguments: Any) -> NoReturn:
        parse(*arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(ParsedError):
        main(shlex.split(command))


def test_there_are_commands() -> None:
    assert {command.split()[0] for command in commands()} == set(COMMANDS)


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
    assert subprocess.check_output(run, text=True, timeout=250).strip() == figures.table(data)


def test_measured_figures_stand_on_one_page_with_command_and_build() -> None:
    build = r"\b(?=[a-f]*\d)[0-9a-f]{7}\b"
    command = r"`[^`]*(?:python|pytest|bench|build|\.py)\b[^`]*`|private loop|README names"
    for page in ROOT.glob("docs/*.md"):
        if page.name != "figures.md":
            assert not re.search(rf"commits? {build}", page.read_text()), name_of(page)
    sections = re.split(r"^#+ .*$", (ROOT / "docs/figures.md").read_text(), flags=re.MULTILINE)
    measured = [text for text in sections[2:] if "\n|---" in text]
    assert len(measured) > 10
    for text in measured[:-1]:  # the last one is predicted
        assert re.search(build, text), text
        assert re.search(command, text.replace("\n", " ")), text


def test_figures_of_the_readme_are_on_the_page_of_figures() -> None:
    systems = {row[0]: row for row in rows((ROOT / "README.md").read_text(), "tokens a rank")}
    found = rows((ROOT / "docs/figures.md").read_text(), "tokens")
    pairs = [row for row in found if re.fullmatch(r"\d+(, in one chunk)?", row[0])]
    assert len(pairs) == len(systems)
    for tokens, pair, *_, floor in pairs:
        of_readme = systems[f"{int(tokens.split(',')[0]):,}"]
        assert (of_readme[1].removesuffix(".0"), of_readme[2]) == (floor, pair)


def test_memory_in_tuning_is_that_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(
        r"Memory at (\d+) ranks, (\d+) tokens, two steps in flight: ([\d.]+) MiB a GPU; at (\d+) "
        r"nodes of (\d+), (\d+) MiB",
        (ROOT / "docs/tuning.md").read_text(),
    )
    assert found
    one, tokens, few, nodes, local, many = found.groups()
    sizes = ["--experts", "256", "--hidden", "7168", "--topk", "8", "--tokens", tokens]
    for ranks, of_node, size in ((int(one), one, few), (int(nodes) * int(local), local, many)):
        assert main(["plan", "--ranks", str(ranks), "--ranks-per-node", of_node, *sizes]) == 0
        total = re.search(r"^total +([\d.]+) MiB", capsys.readouterr().out, re.MULTILINE)
        assert total
        assert round(float(total[1]), len(size.partition(".")[2])) == float(size)
