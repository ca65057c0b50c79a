"""Where the instances of a program wait for each other: the launcher's end of the lines of `runtime.processes`.

An instance says its token first; a line that begins otherwise is a stranger's, and is closed. Then a line carries JSON,
one object in each line of text. An instance says `{"index": 1, "place": "...", "said": ...}` when it has come to a
place. It is answered `{"said": [...]}`, with what all have said there, as soon as all are there; or
`{"problem": "..."}`, as soon as it is known that they will not be. That it is leaving is not answered; it then says
whether it has failed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.processes import ENDING, LEAVING


@dataclass
class _Waiting:
    """An instance at a place, and where it is to be answered."""

    place: str
    said: Any
    answer: Any


class Meetings:
    """The meetings of the instances of one program.

    Args:
        count: how many instances there are.
        timeout: for how many seconds one waits for the others.
        address: where to listen, by name; `""` for all the networks of this machine.
        token: what instances say first.
        failed: is called with the number of an instance that says that it is about to end because it has failed.

    Attributes:
        port: where instances reach it.
        problems: why instances did not meet, the first reason first.
        leaving: the instances that have said that they are about to end, in this order.
        anybody_came: whether an instance has come to any place.
    """

    def __init__(self, count: int, timeout: float, address: str, token: str, failed: Callable[[int], None]) -> None:
        self._count, self._timeout, self._failed = count, timeout, failed
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._ended: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        self.problems: list[str] = []
        self.leaving: list[int] = []
        self.anybody_came = False
        meetings, greeting = self, f"{token}\n".encode()

        class Line(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a broken line
                    if not secrets.compare_digest(self.rfile.readline(len(greeting)), greeting):
                        return  # to a stranger
                    for text in self.rfile:
                        come = json.loads(text)
                        meetings._came(int(come["index"]), _Waiting(come["place"], come["said"], self.wfile))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = max(count, 5)  # all may come at once; who is turned away tries again a second later

        self._server = Server((address, 0), Line)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()

    def ended(self, index: int, code: int) -> None:
        """Note that an instance has ended: it will come nowhere any more."""
        with self._lock:
            self._ended[index] = code
            self._waiting.pop(index, None)
            self._settle()

    def _came(self, index: int, waiting: _Waiting) -> None:
        with self._lock:
            self.anybody_came = True
            if waiting.place == LEAVING:
                self.leaving.append(index)
                if waiting.said:
                    self._failed(index)
                return
            self._waiting[index] = waiting
            self._settle()

    def _settle(self) -> None:
        """Answer those who wait, if it is known how it ends."""
        places = {waiting.place for waiting in self._waiting.values()}
        if places == {ENDING}:
            if len(self._waiting) + len(self._ended) == self._count:
                self._answer({"said": []})
        elif places and self._ended:
            ended = ", ".join(f"instance {i} has ended with exit code {code}" for i, code in self._ended.items())
            self._fail(f"{ended}, and will not come.")
        elif len(self._waiting) == self._count:
            if len(places) == 1:
                self._answer({"said": [self._waiting[i].said for i in range(self._count)]})
            else:
                self._fail(
                    "others wait elsewhere; all instances have to do the same. "
                    + " ".join(f"Instance {i} is at {each.place}." for i, each in sorted(self._waiting.items()))
                )
        self._watch()

    def _watch(self) -> None:
        """Have the time that somebody waits run from when the first one waits."""
        if self._waiting and self._timer is None:
            self._timer = threading.Timer(self._timeout, self._is_over)
            self._timer.daemon = True
            self._timer.start()
        elif not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_over(self) -> None:
        with self._lock:
            missing = [i for i in range(self._count) if i not in self._waiting and i not in self._ended]
            if threading.current_thread() is not self._timer or not missing:
                return
            names = f"instance{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            self._timer = None
            self._fail(
                f"{names} did not come within {self._timeout:g} seconds. Each instance has to come there; "
                "`poprun --timeout` sets how long the others wait."
            )

    def _fail(self, problem: str) -> None:
        at = ", ".join(sorted({waiting.place for waiting in self._waiting.values()}))
        self.problems.append(f"Instances waited at {at}: {problem}")
        self._answer({"problem": problem})

    def _answer(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode() + b"\n"
        for waiting in self._waiting.values():
            with contextlib.suppress(OSError):  # it has gone meanwhile
                waiting.answer.write(text)
        self._waiting.clear()
