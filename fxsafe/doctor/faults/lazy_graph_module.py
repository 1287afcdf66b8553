"""make_fx and export get another kind of graph module while another thread compiles.

Dynamo says in a module global that graph modules are to be lazy, for the length of each compile.
"""

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.doctor.faults._kit import attempt, finish, held_compile

ADVICE = "do not trace or export while another thread compiles"


def kind() -> Any:
    return attempt(lambda: type(make_fx(lambda x: x + 1)(torch.ones(2))).__mro__[1].__name__)


alone = kind()
with held_compile():
    beside = kind()
finish(beside != alone, alone=alone, beside=beside)
