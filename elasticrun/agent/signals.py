"""Signals to the agent: caught from the first moment, told to the loop when there is one.

torchrun installs its handlers with the first ranks, so a SIGTERM that comes earlier ends it without
any clean-up, and SIGUSR1 kills it while its ranks live on. Here the handlers stand before anything
can be waited for, and USR1 and USR2 are passed on to the ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

FORWARDED = ("SIGUSR1", "SIGUSR2")
"""Passed on to the ranks' process groups without further meaning, unless they are death signals."""


class SignalInbox:
    """Catches the death signals and the forwarded ones, in the order in which they come."""

    def __init__(self, death: Iterable[str]) -> None:
        self._death: set[int] = set()
        self._saved: dict[int, Any] = {}
        self._early: list[int] = []
        self._deliver: Callable[[int, bool], None] | None = None
        self._on_child: Callable[[], None] | None = None
        self.unknown: list[str] = []
        """Names that no handler could be installed for."""
        self._names = tuple(dict.fromkeys(name.strip() for name in death if name.strip()))

    def install(self) -> None:
        """Catch them from now on. Only a main thread can; elsewhere nothing is caught."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in self._names:
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                self.unknown.append(name)
                continue
            try:
                self._saved[number] = signal.signal(number, self._caught)
            except (OSError, ValueError):  # SIGKILL and SIGSTOP
                self.unknown.append(name)
                continue
            self._death.add(number)
        for name in FORWARDED:
            number = signal.Signals[name]
            if number not in self._saved:
                self._saved[number] = signal.signal(number, self._caught)
        self._saved[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child)

    def attach(self, deliver: Callable[[int, bool], None], on_child: Callable[[], None]) -> None:
        """Hand over what came so far and all that comes: `deliver(signum, is_death)`.

        Both are called in the main thread between two bytecodes, so they may only schedule."""
        self._deliver, self._on_child = deliver, on_child
        early, self._early = self._early, []
        for number in early:
            deliver(number, number in self._death)
        on_child()

    def detach(self, unheard: Iterable[int] = ()) -> None:
        """Keep what comes from now on, and these before it, for whoever attaches next."""
        self._deliver = self._on_child = None
        self._early[:0] = unheard

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._saved.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._saved.clear()
        self._deliver = self._on_child = None

    def _caught(self, number: int, _frame: object) -> None:
        if self._deliver is None:
            self._early.append(number)
        else:
            self._deliver(number, number in self._death)

    def _child(self, _number: int, _frame: object) -> None:
        if self._on_child is not None:
            self._on_child()
