"""One small program per fault of PyTorch's under threads.

A program runs on its own (``python -m fxsafe.doctor.faults.NAME``), forces one exact interleaving with events, checks
values that a single thread would have got, prints ``RESULT {json}`` and exits 0 if torch behaved, 1 if the fault
showed and 2 if it cannot be tried here. None of them uses fxsafe to do so; ``fxsafe run -m`` puts it underneath.

The first line of a program's docstring is its title for people, its ``ADVICE`` what they can do without a patch.
"""
