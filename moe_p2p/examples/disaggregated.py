"""Prefill and decode in processes of their own, with a front end over HTTP.

    python -m moe_p2p.examples.disaggregated          a demonstration: some requests, and it ends
    python -m moe_p2p.examples.disaggregated --serve  and then
    curl -N -d '{"prompt": "hello", "max_tokens": 20}' http://127.0.0.1:PORT/generate

The demonstration sends requests to itself while a worker joins and a prefill worker is killed. Each
answer must equal what one process computes, and the checksums of all KV bytes must be right; exit
status 1 where one is not. It runs on the CPU, and on GPUs where there are any. --timeline FILE.png
draws who did what when (needs matplotlib).
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import itertools
import json
import multiprocessing
import queue
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_p2p.examples.small_model import MOST_TOKENS, SmallModel, generate
from moe_p2p.examples.workers import Job
from moe_p2p.examples.workers import main as worker_main
from moe_p2p.tools import launch
from moe_p2p.tools.draw import NO_MATPLOTLIB
from moe_p2p.tools.option_types import Parser, at_least_0, at_least_1, output_file
from moe_p2p.tools.output import writing

CHUNK = 32  # tokens of a prefill chunk
ATTEMPTS = 4
START_S = 120.0
END_S = 10.0  # after which workers that were asked to end are killed
QUIET_S = 60.0  # without a token, after which another attempt is made


@dataclass
class Process:
    role: str
    instance: str
    handle: BaseProcess
    pipe: Connection


class Router:
    """Starts workers, gives them jobs, and hands tokens to whoever asked for them."""

    def __init__(self) -> None:
        # Ctrl-C is for this process, which ends the others: they are forked with it blocked.
        launch.start_fork_server(worker_main.__module__)
        self.context = multiprocessing.get_context("forkserver")
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.numbers, self.requests = itertools.count(1), itertools.count(1)
        self.processes: dict[str, list[Process]] = {"prefill": [], "decode": []}
        self.starting: list[Process] = []
        self.answers: dict[int, queue.Queue[Any]] = {}
        self.events: list[tuple[str, str, int, float, float]] = []  # of the timeline
        self.wrong: list[str] = []  # transfers of wrong bytes: they are done again, too
        self.began, self.retries, self.turn = time.monotonic(), 0, itertools.count()
        self.closed = False

    def join(self, role: str) -> None:
        self.await_ready(self.start(role))

    def start(self, role: str) -> Process:
        """Several may start at a time: await_ready() comes after."""
        number = next(self.numbers)
        gpu = number % torch.cuda.device_count() if torch.cuda.is_available() else None
        ours, theirs = self.context.Pipe()
        handle = self.context.Process(
            target=worker_main,
            args=(role, f"{role}-{number}", self.store.port, gpu, theirs),
            daemon=True,
        )
        process = Process(role, f"{role}-{number}", handle, ours)
        try:
            with launch.signals_wait():
                handle.start()
            theirs.close()
        except BaseException:
            ours.close()  # so that it ends
            raise
        self.starting.append(process)
        return process

    def await_ready(self, process: Process) -> None:
        if not process.pipe.poll(START_S):
            raise RuntimeError(f"{process.instance} did not start within {START_S} s")
        self.starting.remove(process)
        self.processes[process.role].append(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        self._mark("joins", process.instance)

    def kill(self, process: Process) -> None:
        process.handle.kill()
        self._mark("is killed", process.instance)

    def _mark(self, what: str, instance: str) -> None:
        now = time.monotonic()
        self.events.append((what, instance, 0, now, now))

    def _listen(self, process: Process) -> None:
        while True:
            try:
                kind, request, value, begin, end = process.pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            if kind == "wrong":
                self.wrong.append(value)
                print(f"WRONG {value}", file=sys.stderr, flush=True)
            elif kind in ("token", "failed") and request in self.answers:
                self.answers[request].put((kind, value))
            elif kind not in ("token", "failed", "ready"):
                self.events.append((kind, process.instance, request, begin, end))
        self.processes[process.role].remove(process)

    def tokens(self, prompt: list[int], num_tokens: int) -> Any:
        """Yields tokens. What a lost worker did not finish is done again by others."""
        request, sent = next(self.requests), 0
        answer = self.answers[request] = queue.Queue()
        try:
            for attempt in range(ATTEMPTS):
                self._submit(request, attempt, prompt, num_tokens)
                while sent < num_tokens:
                    if self.closed:
                        raise RuntimeError("the server ends")
                    try:
                        kind, value = answer.get(timeout=QUIET_S)
                    except queue.Empty:
                        break
                    if kind == "failed" and value[0] == attempt:
                        break
                    if kind == "token" and value[0] == sent:  # an earlier attempt sent those before
                        sent += 1
                        yield value[1]
                if sent == num_tokens:
                    return
                self.retries += 1
            raise RuntimeError(f"request {request} failed {ATTEMPTS} times")
        finally:
            del self.answers[request]

    def _submit(self, request: int, attempt: int, prompt: list[int], num_tokens: int) -> None:
        pair, turn = [], next(self.turn)
        for role in ("prefill", "decode"):
            alive = [each for each in self.processes[role] if each.handle.is_alive()]
            if not alive:
                raise RuntimeError(f"there is no {role} worker")
            pair.append(alive[turn % len(alive)])
        names = [process.instance for process in pair]
        job = Job(request, attempt, names[0], names[1], prompt, num_tokens, CHUNK)
        for process in pair:
            try:
                process.pipe.send(job)
            except (BrokenPipeError, ConnectionResetError):
                self.answers[request].put(("failed", (attempt, "it ended just now")))

    def close(self) -> None:
        self.closed = True
        for answer in list(self.answers.values()):
            answer.put(("ended", None))
        for process in self.starting:
            process.pipe.close()  # so that it ends
        for process in [each for role in self.processes.values() for each in role]:
            with suppress(OSError):
                process.pipe.send(None)  # it closes what it holds
        children, until = multiprocessing.active_children(), time.monotonic() + END_S
        for child in children:
            child.join(max(until - time.monotonic(), 0))
        for child in children:
            child.kill()
            child.join()
        torch.ops.moe_p2p.remove_stale_memory.default()  # of workers that were killed


class Handler(BaseHTTPRequestHandler):
    """POST /generate: {"prompt": text, "max_tokens": n}; a line of JSON for each token."""

    router: Router
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            prompt, num_tokens = list(str(body["prompt"]).encode()), int(body.get("max_tokens", 16))
            if not prompt or num_tokens < 1 or len(prompt) + num_tokens > MOST_TOKENS:
                raise ValueError(
                    f"prompt and max_tokens must be 1 to {MOST_TOKENS} tokens together"
                )
        except (ValueError, KeyError, TypeError) as error:
            self.send_error(400, str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/jsonl")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for token in self.router.tokens(prompt, num_tokens):
                self._line({"token": token})
        except RuntimeError as error:
            self._line({"error": str(error)})
        self.wfile.write(b"0\r\n\r\n")

    def _line(self, what: dict[str, Any]) -> None:
        line = json.dumps(what).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        return


def ask(port: int, prompt: str, num_tokens: int) -> list[int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(
        "POST", "/generate", json.dumps({"prompt": prompt, "max_tokens": num_tokens})
    )
    lines = [json.loads(line) for line in connection.getresponse().read().splitlines()]
    wrong = [line["error"] for line in lines if "error" in line]
    if wrong:
        raise RuntimeError(wrong[0])
    return [line["token"] for line in lines]


def demonstrate(router: Router, port: int, num_requests: int) -> bool:
    """Returns whether all answers were right."""
    draw, model = random.Random(1), SmallModel("cuda" if torch.cuda.is_available() else "cpu")
    prompts = ["".join(chr(draw.randint(97, 122)) for _ in range(draw.randint(20, 90)))
               for _ in range(num_requests)]  # fmt: skip
    prompts_left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for prompt in prompts:
        prompts_left.put(prompt)
    right: list[str] = []
    wrong: list[str] = []
    begun, joined = itertools.count(1), threading.Event()

    def client() -> None:
        while not router.closed:
            try:
                prompt = prompts_left.get_nowait()
            except queue.Empty:
                return
            number = next(begun)
            if number == max(num_requests // 3, 1):
                router.join("prefill")  # the other clients go on
                joined.set()
            if number >= num_requests // 2:
                joined.wait(START_S)  # so that some requests meet all three
            if number == num_requests // 2 + 2 and not router.closed:
                router.kill(router.processes["prefill"][0])
            try:
                got = ask(port, prompt, 12)
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                wrong.append(f"{prompt!r}: {error}")
                continue
            want = generate(model, list(prompt.encode()), 12, CHUNK)
            (right if got == want else wrong).append(f"{prompt!r}: {got}, one process: {want}")
            names = [p.instance for role in router.processes.values() for p in role]
            done = f"{len(right) + len(wrong)} of {num_requests} done, {len(wrong)} wrong"
            show(f"{done}; {', '.join(names)}")

    # Ctrl-C in Thread.join() would leave clients in torch when the interpreter ends, which aborts.
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            for each in clients:
                each.result()
        except BaseException:
            router.close()  # so that they end
            raise
    print()
    for text in wrong:
        print(f"WRONG {text}", file=sys.stderr)
    print(f"{len(right)} requests equal one process, {router.retries} done again after a loss")
    return not wrong and not router.wrong


def show(text: str) -> None:
    """The progress line."""
    if sys.stdout.isatty():
        print(f"\r{text:<100}", end="", flush=True)
    else:
        print(text, flush=True)


def draw_timeline(router: Router, path: Path) -> None:
    """From the first request on; workers' starts before it are left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import patches, pyplot

    colours = {"prefill": "tab:blue", "decode": "tab:green", "transfer": "tab:orange"}  # on top
    began = min((event[3] for event in router.events if event[0] in colours), default=router.began)
    names = sorted({event[1] for event in router.events})
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.6 * len(names)))
    layers = [*colours, "joins", "is killed"]  # the last ones on top
    for kind, name, _, begin, end in sorted(router.events, key=lambda each: layers.index(each[0])):
        row, left = names.index(name), begin - began
        if kind in colours:
            height = 0.4 if kind == "transfer" else 0.8
            axes.barh(row, max(end - begin, 1e-3), height, left=left, color=colours[kind])
        elif left >= 0:
            axes.annotate(kind, (left, row + 0.45), ha="center", fontsize=8)
            axes.plot(left, row, "k|", markersize=18)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="seconds since the first request", xlim=(0, None), ylim=(-0.6, len(names)))
    axes.set_title(f"What {len(names)} workers did; requests done again: {router.retries}")
    axes.legend([patches.Patch(color=c) for c in colours.values()], colours, ncols=3,
                loc="upper center", bbox_to_anchor=(0.5, -0.25))  # fmt: skip
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = Parser(
        description=about,
        epilog=f"{more}\n\nDefaults in parentheses.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--serve", action="store_true", help="until Ctrl-C, without requests of its own"
    )
    parser.add_argument("--port", type=at_least_0, default=0, help="0: any that is free (0)")
    parser.add_argument("--requests", type=at_least_1, default=24, help="its own (24)")
    parser.add_argument(
        "--prefill", type=at_least_1, default=2, help="workers at the beginning (2)"
    )
    parser.add_argument("--decode", type=at_least_1, default=1, help="likewise (1)")
    parser.add_argument("--timeline", type=output_file, metavar="FILE", help="PNG to write (none)")
    options = parser.parse_args(arguments)
    if options.timeline and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--timeline: {NO_MATPLOTLIB}")
    try:
        server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    except (OSError, OverflowError) as error:
        parser.error(f"--port {options.port} cannot be served ({error}); name another one")
    router = Router()
    try:
        for role in ("prefill", "decode"):
            for _ in range(getattr(options, role)):
                show(f"starts {router.start(role).instance}")
        for process in [*router.starting]:
            router.await_ready(process)
            show(f"{process.instance} is there")
        Handler.router = router
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status = 0
        try:
            print(f"\nhttp://127.0.0.1:{server.server_port}/generate", flush=True)
            if options.serve:
                threading.Event().wait()
            elif not demonstrate(router, server.server_port, options.requests):
                status = 1
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        if options.timeline:
            draw_timeline(router, Path(options.timeline))
            print(f"wrote {options.timeline}")
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        router.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, launch.exit_by_signal)
    sys.exit(main())
