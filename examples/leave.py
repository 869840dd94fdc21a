"""How a program of several ranks ends: all together, with everything written, and never by an abort.

A process that has used gloo must not end through the interpreter's exit: there gloo's thread may still drop a tensor
of the last operation, ask for the interpreter's lock and be ended in the middle of a destructor, which aborts the process
("terminate called without an active exception"); torchrun then ends the whole job with an error. So the last line of
a program is `leave()`.
"""

import os
import sys

import torch.distributed as dist


def leave(*, together: bool = True) -> None:
    """End this process with exit code 0, once all ranks have come here; returns where there is no process group.

    With `together` false, it waits for nobody: for ranks whose last communication was a barrier, where one goes on alone.

    Waits at most the process group's timeout for the slowest rank. What is registered with `atexit` does not run. A rank
    that raises never comes here: it ends with its traceback and an error, as ever, and torchrun ends the others.
    """
    if not dist.is_initialized():
        return
    if together:
        dist.barrier()
    if together and dist.get_backend() != "gloo":
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
