"""Random numbers drawn while another thread compiles are drawn a second time afterwards.

A compile puts the global random state back as it found it, under threads that have moved on.
"""

import random

import torch

from fxsafe.doctor.faults._kit import finish, held_compile

ADVICE = "give each thread a torch.Generator and random.Random of its own, or compile before threads draw numbers"


torch.manual_seed(0)
random.seed(0)
with held_compile():
    first = torch.rand(4).tolist(), random.random()
second = torch.rand(4).tolist(), random.random()
finish(first[0] == second[0] or first[1] == second[1], first=first, second=second)
