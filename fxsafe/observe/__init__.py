"""Counters, the recorder and the watchdog: what fxsafe tells of the threads that trace, compile and wait.

Nothing here is paid for while nobody traces or waits. ``events`` holds the counts and the waits of the moment, and
tells whoever listens; ``recorder`` and ``watchdog`` listen while they are asked to.
"""
