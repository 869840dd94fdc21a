"""What may go wrong on a rank: values for ``simulate(..., faults=[...])``.

>>> from mfsdp_func import faults
>>> faults.Stall(rank=3, at=2, seconds=10.0)
Stall(rank=3, at=2, seconds=10.0)
"""

from mfsdp_func.effects.faults import Corrupt, Fault, InjectedFault, Kill, Raise, Stall

__all__ = ["Corrupt", "Fault", "InjectedFault", "Kill", "Raise", "Stall"]
