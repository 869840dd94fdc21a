"""What may go wrong on a rank: values for ``simulate(..., faults=[...])``, and, on real ranks, for `injected`.

>>> from mfsdp_func import faults
>>> faults.Stall(rank=3, at=2, seconds=10.0)
Stall(rank=3, at=2, seconds=10.0)
"""

from mfsdp_func.effects.faults import Corrupt, Fault, InjectedFault, Kill, Raise, Stall
from mfsdp_func.effects.injection import Points, injected

__all__ = ["Corrupt", "Fault", "InjectedFault", "Kill", "Points", "Raise", "Stall", "injected"]
