"""Rendezvous server of a launcher, providing barriers between program instances; `runtime.processes` contains the
clients.

An instance sends its token first; a connection that starts otherwise is closed. Then both sides send JSON, one object a
line. An instance sends `{"index": 1, "place": "...", "payload": ...}` when it reaches a barrier. The answer is
`{"payload": [...]}`, with the payloads of all instances, as soon as all have reached it; or `{"problem": "..."}`, as
soon as one cannot. An instance that is about to end sends whether it has failed, and gets no answer.
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
    """Message of an instance that waits at a barrier, and the stream for its answer."""

    barrier: str
    payload: Any
    answer: Any


class RendezvousServer:
    """Server for barriers of one program's instances.

    Args:
        timeout: seconds that an instance waits for the others.
        address: the host name to listen at; `""` for all networks of this machine.
        token: the secret that instances send first.
        failed: function called with the index of an instance that is about to end after a failure.

    Attributes:
        problems: reasons of failed barriers, the first one first.
        leaving: instances that are about to end, in the order of their messages.
        any_arrived: whether any instance has reached a barrier.
    """

    def __init__(self, count: int, timeout: float, address: str, token: str, failed: Callable[[int], None]) -> None:
        self._count, self._timeout, self._failed = count, timeout, failed
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._exit_codes: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        self.problems: list[str] = []
        self.leaving: list[int] = []
        self.any_arrived = False
        rendezvous, greeting = self, f"{token}\n".encode()

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a broken line
                    if not secrets.compare_digest(self.rfile.readline(len(greeting)), greeting):
                        return  # not an instance of this program
                    for text in self.rfile:
                        message = json.loads(text)
                        rendezvous._arrive(
                            int(message["index"]), _Waiting(message["place"], message["payload"], self.wfile)
                        )

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = max(count, 5)  # all may connect at once; a refused one tries again a second later

        self._server = Server((address, 0), Connection)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def note_exit(self, index: int, code: int) -> None:
        """Record an instance's exit code."""
        with self._lock:
            self._exit_codes[index] = code
            self._waiting.pop(index, None)
            self._answer_if_decided()

    def _arrive(self, index: int, waiting: _Waiting) -> None:
        with self._lock:
            self.any_arrived = True
            if waiting.barrier == LEAVING:
                self.leaving.append(index)
                if waiting.payload:
                    self._failed(index)
                return
            self._waiting[index] = waiting
            self._answer_if_decided()

    def _answer_if_decided(self) -> None:
        """Answer waiting instances once the barrier is complete or impossible."""
        barriers = {waiting.barrier for waiting in self._waiting.values()}
        if barriers == {ENDING}:
            if len(self._waiting) + len(self._exit_codes) == self._count:
                self._answer({"payload": []})
        elif barriers and self._exit_codes:
            ended = ", ".join(f"instance {i} has ended with exit code {code}" for i, code in self._exit_codes.items())
            self._fail(f"{ended}, and will not come.")
        elif len(self._waiting) == self._count:
            if len(barriers) == 1:
                self._answer({"payload": [self._waiting[i].payload for i in range(self._count)]})
            else:
                self._fail(
                    "others wait elsewhere; all instances have to do the same. "
                    + " ".join(f"Instance {i} is at {each.barrier}." for i, each in sorted(self._waiting.items()))
                )
        self._update_timer()

    def _update_timer(self) -> None:
        """Start the timer with the first waiting instance; stop it after the last answer."""
        if self._waiting and self._timer is None:
            self._timer = threading.Timer(self._timeout, self._time_out)
            self._timer.daemon = True
            self._timer.start()
        elif not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        with self._lock:
            missing = [i for i in range(self._count) if i not in self._waiting and i not in self._exit_codes]
            if threading.current_thread() is not self._timer or not missing:
                return
            names = f"instance{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            self._timer = None
            self._fail(
                f"{names} did not come within {self._timeout:g} seconds. Each instance has to come there; "
                "`poprun --timeout` sets how long the others wait."
            )

    def _fail(self, problem: str) -> None:
        at = ", ".join(sorted({waiting.barrier for waiting in self._waiting.values()}))
        self.problems.append(f"Instances waited at {at}: {problem}")
        self._answer({"problem": problem})

    def _answer(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode() + b"\n"
        for waiting in self._waiting.values():
            with contextlib.suppress(OSError):  # the connection may be closed
                waiting.answer.write(text)
        self._waiting.clear()
