"""What a forward pass keeps for its backward pass, and its floating-point operations: from one run without numbers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mfsdp_func.preflight.models import ModelShapes


@dataclass(frozen=True)
class Activations:
    """Of one rank's batch.

    Attributes:
        nbytes: of distinct storages that autograd saves, parameters left out.
        by_unit: the same, by the name of the unit that runs; "" for what is saved outside of units.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    nbytes: int
    by_unit: dict[str, int]
    flops: int


class _Flops(TorchDispatchMode):
    """Counts what `torch.utils.flop_counter` has a formula for."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


_FAKE = FakeTensorMode()


def _stand_ins(
    module: nn.Module, batch: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Fake token numbers, and fake tensors for all parameters and buffers, tied ones alike."""
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    with _FAKE:
        for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
            kind = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty(tensor.shape, dtype=kind, device="cpu")
                made[id(tensor)].requires_grad_(tensor.requires_grad)
            found[name] = made[id(tensor)]
        return torch.zeros(batch, dtype=torch.int64, device="cpu"), found


def measure_activations(model: ModelShapes, batch: tuple[int, int], dtype: torch.dtype) -> Activations:
    """Run the module's forward once without numbers, with a loss on its output, and look at what is saved.

    Its parameters are stood in for by fake tensors of `dtype` on the CPU, so that operators are chosen as there. A
    language model gets ``(sequences, tokens)`` of token numbers.

    Raises:
        ValueError: where only shapes are known, or the module does not run so with such a batch.
    """
    if model.module is None:
        raise ValueError("preflight: shapes have no forward pass; leave --batch out, or name a model")
    module: nn.Module = model.module
    module.train()
    tokens, tensors = _stand_ins(module, batch, dtype)
    parameters = {tensors[name].untyped_storage()._cdata for name, _ in module.named_parameters()}
    running: list[str] = []
    seen: dict[int, Any] = {}
    by_unit: dict[str, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in seen:
            seen[storage._cdata] = storage  # kept alive, so that no other gets its address
            name = running[-1] if running else ""
            by_unit[name] = by_unit.get(name, 0) + storage.nbytes()
        return tensor

    handles: list[Any] = []
    for unit in model.units:
        if not unit.held:
            sub = module.get_submodule(unit.name)
            handles.append(sub.register_forward_pre_hook(lambda *_, name=unit.name: running.append(name)))
            handles.append(sub.register_forward_hook(lambda *_: running.pop() and None))
    counter = _Flops()
    try:
        with _FAKE, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
            output = functional_call(module, tensors, (tokens,))
            scores = getattr(output, "logits", getattr(output, "last_hidden_state", output))
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
    except Exception as error:
        raise ValueError(
            f"preflight: {model.label} does not run without numbers on tokens of shape {batch}, so that its"
            f" activations are unknown; leave --batch out ({type(error).__name__}: {error})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Activations(sum(by_unit.values()), by_unit, counter.total)
