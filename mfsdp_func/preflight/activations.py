"""What a pass keeps for its backward pass, and its floating-point operations: from one run without numbers."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mfsdp_func.preflight.models import ModelShapes


class OfUnit(NamedTuple):
    """Bytes of one call of a unit.

    Attributes:
        name: of the unit.
        kept: of distinct storages that autograd saves first in this call, parameters left out.
        largest: the largest of them.
        inputs: of its floating-point arguments.
        outputs: of its floating-point results.
    """

    name: str
    kept: int
    largest: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Activations:
    """Of one rank's batch.

    Attributes:
        units: calls of units, in the order of the forward pass.
        outside: bytes that autograd saves outside of units (by the loss, say).
        again: bytes of the loss's backward pass that are saved when that is differentiated too, as `torch.func.grad` has it.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    units: tuple[OfUnit, ...]
    outside: int
    again: int
    flops: int

    @property
    def nbytes(self) -> int:
        """Of distinct storages that autograd saves in the forward pass."""
        return self.outside + sum(unit.kept for unit in self.units)


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
    saved = _Saved({tensors[name].untyped_storage()._cdata for name, _ in module.named_parameters()})
    handles: list[Any] = []
    for unit in model.units:
        if not unit.held:
            sub = module.get_submodule(unit.name)
            handles.append(sub.register_forward_pre_hook(partial(saved.begin, unit.name), with_kwargs=True))
            handles.append(sub.register_forward_hook(saved.end))
    counter = _Flops()
    try:
        with _FAKE, torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), counter:
            output = functional_call(module, tensors, (tokens,))
            scores = getattr(output, "logits", getattr(output, "last_hidden_state", output)).detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
            outside = saved.outside
            torch.autograd.grad(loss, scores, create_graph=True)
    except Exception as error:
        raise ValueError(
            f"preflight: {model.label} does not run without numbers on tokens of shape {batch}, so that its"
            f" activations are unknown; leave --batch out ({type(error).__name__}: {error})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Activations(tuple(saved.units), outside, saved.outside - outside, counter.total)


class _Saved:
    """Which storages autograd saves first in which call of a unit."""

    def __init__(self, parameters: set[int]) -> None:
        self.units: list[OfUnit] = []
        self.outside = 0
        self._parameters = parameters
        self._seen: dict[int, Any] = {}
        self._running: list[int] = []

    def begin(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(len(self.units))
        self.units.append(OfUnit(name, 0, 0, _floats_nbytes((args, kwargs)), 0))

    def end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        n = self._running.pop()
        self.units[n] = self.units[n]._replace(outputs=_floats_nbytes(output))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage  # kept alive, so that no other gets its address
            nbytes = storage.nbytes()
            if self._running:
                unit = self.units[self._running[-1]]
                self.units[self._running[-1]] = unit._replace(
                    kept=unit.kept + nbytes, largest=max(unit.largest, nbytes)
                )
            else:
                self.outside += nbytes
        return tensor


def _floats_nbytes(tree: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
