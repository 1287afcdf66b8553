"""A torch._dynamo.config setting made in the main thread does not hold in other threads (2.12 and later).

pytorch#186537. The settings became context variables: each thread starts with the defaults.
"""

import torch._dynamo

from fxsafe.doctor.faults._kit import Task, finish

ADVICE = "fxsafe.settings.everywhere({...}) makes a setting hold in every thread, settings.inherit() in new ones"
name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
setattr(torch._dynamo.config, name, 77)
seen = Task(lambda: getattr(torch._dynamo.config, name)).result()
finish(seen != 77, setting=name, main_thread=77, other_thread=seen)
