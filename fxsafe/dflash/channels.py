"""Bounded queues between threads that can be closed from anywhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Channel", "Closed"]

T = TypeVar("T")


class Closed(Exception):
    """The channel was closed: the trainer stops, and whoever waits leaves."""


class Channel(Generic[T]):
    """A bounded first-in first-out queue.

    ``queue.Queue`` has no close before Python 3.13, and a thread that waits in it cannot be told to leave.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._put_wait = self._get_wait = 0.0
        self._counted_from = 0.0
        self.moved_at = time.perf_counter()
        """when something was put or taken last"""

    def put(self, item: T) -> None:
        """Append, once there is room.

        Raises:
            Closed: before or while waiting.
        """
        with self._changed:
            started = time.perf_counter()
            while len(self._items) >= self._capacity and not self._closed:
                self._changed.wait()
            self._put_wait += time.perf_counter() - max(started, self._counted_from)
            if self._closed:
                raise Closed
            self._items.append(item)
            self.moved_at = time.perf_counter()
            self._changed.notify_all()

    def get(self, patience: float | None = None, impatient: Callable[[], None] | None = None) -> T:
        """Take the oldest, once there is one.

        Args:
            patience: seconds of waiting after which ``impatient`` is called, again and again.

        Raises:
            Closed: before or while waiting; what is left in the channel is dropped.
        """
        with self._changed:
            started = time.perf_counter()
            while not self._items and not self._closed:
                if not self._changed.wait(patience) and impatient is not None:
                    impatient()
            self._get_wait += time.perf_counter() - max(started, self._counted_from)
            if self._closed:
                raise Closed
            item = self._items.popleft()
            self.moved_at = time.perf_counter()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Wake everybody who waits; may be called again."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def take_waits(self) -> tuple[float, float]:
        """Seconds that puts and gets have waited since the last call, of those that no longer wait."""
        with self._changed:
            self._counted_from = time.perf_counter()
            waits = self._put_wait, self._get_wait
            self._put_wait = self._get_wait = 0.0
            return waits
