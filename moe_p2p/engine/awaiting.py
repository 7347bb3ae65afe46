"""How requests of an engine are awaited in asyncio: one descriptor for each event loop.

An engine has one of these. A loop that awaits a request for the first time gets a queue of finished
requests (csrc/engine/finished_queue.h) and adds its descriptor as a reader; no thread is made.
"""

from __future__ import annotations

import asyncio
import os
import threading

import torch

from moe_p2p.library import call

_ops = torch.ops.moe_p2p


class _LoopQueue:
    """The queue of one event loop. Its methods run in that loop."""

    def __init__(self, engine: int, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.loop = loop
        self._engine = engine
        self._waiting: dict[int, list[asyncio.Future[bool]]] = {}
        # Its own descriptor: the engine may close, and the number be used again, before the loop
        # has removed the reader.
        self._fd = os.dup(int(call(_ops.engine_queue_fd.default, engine, number)))
        loop.add_reader(self._fd, self._take)

    async def ended(self, request: int, limit_s: float) -> bool:
        """True when the request has ended, or the engine was closed; False after limit_s."""
        future: asyncio.Future[bool] = self.loop.create_future()
        waiting = self._waiting.setdefault(request, [])
        waiting.append(future)
        timer = self.loop.call_later(limit_s, _set, future, False)
        try:
            call(_ops.engine_watch.default, self._engine, self.number, request)
            return await future
        finally:
            timer.cancel()
            waiting.remove(future)
            if not waiting and self._waiting.get(request) is waiting:
                del self._waiting[request]

    def _take(self) -> None:
        try:
            ended = call(_ops.engine_take.default, self._engine, self.number, 0.0).tolist()
        except RuntimeError:  # the engine is closed
            self.close()
            return
        for request in ended:
            for future in self._waiting.get(request, []):
                _set(future, True)

    def close(self) -> None:
        if self._fd < 0:
            return
        self.loop.remove_reader(self._fd)
        self.release()
        for futures in self._waiting.values():
            for future in futures:
                _set(future, True)

    def release(self) -> None:
        """For a loop that is closed, which has dropped its reader."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)


def _set(future: asyncio.Future[bool], ended: bool) -> None:
    if not future.done():
        future.set_result(ended)


class Awaiting:
    """The queues of one engine's event loops."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._queues: dict[asyncio.AbstractEventLoop, _LoopQueue] = {}

    async def ended(self, request: int, limit_s: float) -> bool:
        return await self._queue(asyncio.get_running_loop()).ended(request, limit_s)

    def _queue(self, loop: asyncio.AbstractEventLoop) -> _LoopQueue:
        with self._lock:
            if loop not in self._queues:
                self._queues[loop] = _LoopQueue(self._engine, self._free_number(), loop)
            return self._queues[loop]

    def _free_number(self) -> int:
        """The queue of a loop that has been closed since, else a new one."""
        for loop, queue in self._queues.items():
            if loop.is_closed():
                del self._queues[loop]
                queue.release()
                return queue.number
        return int(call(_ops.engine_queue.default, self._engine))

    def close(self) -> None:
        """After the engine: wakes tasks that await its requests. Any thread."""
        with self._lock:
            queues = list(self._queues.values())
            self._queues.clear()
        for queue in queues:
            if queue.loop.is_closed():
                queue.release()
            else:  # not at once: the loop is another thread's, or this method runs in it
                try:
                    queue.loop.call_soon_threadsafe(queue.close)
                except RuntimeError:  # closed in between
                    queue.release()
