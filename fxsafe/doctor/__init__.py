"""``fxsafe doctor``: which known faults this torch has, and whether fxsafe cures them here.

Every program in ``fxsafe.doctor.faults`` is run twice in processes of its own, without fxsafe and with it. Which fault
a patch claims to cure is said by the patch (``Patch.faults``), so that a new patch or a new program needs no change
here. This process imports no torch.
"""

from fxsafe.doctor.examination import examine

__all__ = ["examine"]
