"""`DBuffer`: one flat buffer over a mesh as a value, and the pure operations that change its placements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mfsdp_func.effects.call import Order
from mfsdp_func.effects.streams import AnyStream
from mfsdp_func.effects.token import After, Token
from mfsdp_func.operations.buffer_steps import check_dtype, check_flat, communicate, local_of, take_steps, viewed
from mfsdp_func.operations.dtensor import to_dtensor
from mfsdp_func.operations.spec_facts import fact_of
from mfsdp_func.plans.redistribution import Step, collective_step, redistribution, view_step
from mfsdp_func.values.buffer_spec import (
    BufferSpec,
    held_tensors,
    local_part,
    local_view,
)
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh, MeshLike
from mfsdp_func.values.placement import BlockAtomic, Partial, Placement, Replicate, RowAtomic, Shard, TensorAtomic
from mfsdp_func.values.ranges import Range


@dataclass(frozen=True, eq=False, repr=False)
class DBuffer:
    """A flat buffer over a mesh: what it is (`spec`), and the elements that this rank stores.

    A pytree whose one leaf is `local_buffer`, so `torch.func` transforms and optimizers map over it like over a
    tensor. Operations return new buffers; as methods they are waited for, as functions they return a token.

    Attributes:
        spec: mesh, placements and layout.
        local_buffer: 1-D, this rank's range of the buffer, padding included.

    >>> from mfsdp_func import Mesh, RowAtomic, build_for_row_atomic_unpadding
    >>> layout = build_for_row_atomic_unpadding([(3, 1), (1, 1)], 2)  # two rows on each rank
    >>> full = [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0]])]
    >>> buffer = DBuffer.distribute_tensors(full, Mesh(2, rank=1), [RowAtomic()], layout)
    >>> buffer.local_buffer, {i: view.tolist() for i, view in buffer.tensor_views().items()}
    (tensor([2., 3.]), {0: [[2.0]], 1: [[3.0]]})
    """

    spec: BufferSpec
    local_buffer: torch.Tensor

    @classmethod
    def from_local(
        cls,
        local_buffer: torch.Tensor,
        mesh: Mesh | MeshLike,
        placements: Sequence[Placement],
        layout: GlobalLayout,
        *,
        name: str = "",
    ) -> "DBuffer":
        """A buffer around this rank's storage, which is not copied. For `name` see `BufferSpec`.

        Raises:
            ValueError: if the storage is not 1-D of the right size, or placements do not fit; see `BufferSpec`.
            TypeError: if an integer buffer is to be averaged.
        """
        spec = BufferSpec(mesh, placements, layout, name)
        if not isinstance(local_buffer, torch.Tensor):
            raise TypeError(f"DBuffer.from_local: got a {type(local_buffer).__name__}, expected a 1-D torch.Tensor")
        if local_buffer.dim() != 1 or local_buffer.numel() != spec.local_numel:
            raise ValueError(
                f"DBuffer.from_local: rank {spec.mesh.get_rank()} gave a tensor of shape {tuple(local_buffer.shape)},"
                f" expected ({spec.local_numel},): its range {spec.local_range} of {spec}"
            )
        check_dtype(spec, local_buffer.dtype)
        return cls(spec, local_buffer)

    @classmethod
    def empty(
        cls,
        mesh: Mesh | MeshLike,
        placements: Sequence[Placement],
        layout: GlobalLayout,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "DBuffer":
        """A buffer of unspecified elements. Errors as `from_local`."""
        spec = BufferSpec(mesh, placements, layout)
        check_dtype(spec, dtype or torch.get_default_dtype())
        return cls(spec, torch.empty(spec.local_numel, dtype=dtype, device=device))

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        mesh: Mesh | MeshLike,
        placements: Sequence[Placement],
        layout: GlobalLayout,
    ) -> "DBuffer":
        """A buffer with this rank's part of full tensors that every rank has alike. No communication; differentiable.

        Args:
            tensors: one full tensor per tensor of the layout, or a dict of at least those that meet this rank's range.
            mesh: see `BufferSpec`.
            placements: `Replicate()` or shards; see `BufferSpec`.
            layout: see `BufferSpec`.

        Raises:
            ValueError: on a `Partial` placement, a missing tensor, one of another shape, or one too many.
            TypeError: on mixed dtypes.
        """
        return cls.distribute(tensors, BufferSpec(mesh, placements, layout))

    @classmethod
    def distribute(cls, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor], spec: BufferSpec) -> "DBuffer":
        """See `distribute_tensors`; for a spec that is there already."""
        return cls(spec, local_of(tensors, spec))

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the buffer."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self.spec.placements

    @property
    def layout(self) -> GlobalLayout:
        """Where tensors and segments lie."""
        return self.spec.layout

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.local_buffer.dtype

    def __repr__(self) -> str:
        return f"DBuffer({self.dtype}, {tuple(self.local_buffer.shape)}, {self.spec})"

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        raise TypeError(
            f"torch.distributed.checkpoint cannot save the DBuffer {fqn!r}: it would take one rank's elements for all; use"
            " mfsdp_func.checkpoint.save, whose files it reads"
        )

    def get_local_part(self, tensor_index: int) -> Range:
        """Which elements of a tensor this rank holds; empty where it holds none."""
        return fact_of(local_part, self.spec, tensor_index)

    def get_tensor_view(self, tensor_index: int) -> torch.Tensor:
        """This rank's part of a tensor, as a view: whole rows of shape ``(rows, *shape[1:])``, possibly zero of them.

        Flat, alike on all ranks, where the layout splits a row of this tensor.

        Raises:
            IndexError: if there is no such tensor.
        """
        check_flat("get_tensor_view", self.local_buffer)
        place, shape = fact_of(local_view, self.spec, tensor_index)
        return self.local_buffer[place.start : place.start + place.numel].view(shape)

    def tensor_views(self) -> dict[int, torch.Tensor]:
        """The parts of all tensors of which this rank holds an element, by tensor index."""
        return {i: self.get_tensor_view(i) for i in fact_of(held_tensors, self.spec)}

    def cast(self, dtype: torch.dtype) -> "DBuffer":
        """The buffer in another dtype; itself where it has that dtype.

        Raises:
            TypeError: if an integer buffer were to be averaged.
        """
        check_dtype(self.spec, dtype)
        return DBuffer(self.spec, self.local_buffer.to(dtype))

    def allgather(self, axis: str | int, *, deterministic: bool = False) -> "DBuffer":
        """Sharded -> `Replicate` along an axis; see the function of the same name."""
        return allgather(self, axis, deterministic=deterministic)[0]

    def allreduce(self, axis: str | int, *, deterministic: bool = False) -> "DBuffer":
        """`Partial` -> `Replicate` along an axis; see the function of the same name."""
        return allreduce(self, axis, deterministic=deterministic)[0]

    def reduce_scatter(self, axis: str | int, placement: Placement, *, deterministic: bool = False) -> "DBuffer":
        """`Partial` -> sharded along an axis; see the function of the same name."""
        return reduce_scatter(self, axis, placement, deterministic=deterministic)[0]

    def redistribute(self, placements: Sequence[Placement], *, deterministic: bool = False) -> "DBuffer":
        """Any placements that can be reached; see the function of the same name."""
        return redistribute(self, placements, deterministic=deterministic)[0]

    def get_dtensor(self, tensor_index: int) -> DTensor:
        """A tensor as a `DTensor` with its logical global shape; see `mfsdp_func.operations.dtensor.to_dtensor`."""
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError("get_dtensor: a DTensor is made outside compiled regions; use get_tensor_view inside")
        return to_dtensor(self.spec, tensor_index, self.get_tensor_view(tensor_index))

    def view(self, placements: Sequence[Placement]) -> "DBuffer":
        """`Replicate` -> sharded along one axis: a view of this rank's part. No communication; shares storage.

        Also relabels `Replicate` as ``Partial("avg")``. Its transpose is the `Partial` buffer with zeros around.

        Raises:
            ValueError: on any other change; see `BufferSpec`.
            NotImplementedError: if more than one axis changes.
        """
        return DBuffer(*viewed(self.spec, self.local_buffer, fact_of(view_step, self.spec, tuple(placements))))


def allgather(
    buffer: DBuffer,
    axis: str | int,
    *,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
    deterministic: bool = False,
) -> tuple[DBuffer, Token]:
    """Sharded -> `Replicate`: join the segments of all ranks along a mesh axis. Every rank of the mesh calls.

    The axis must be the outermost sharded one, so that what is joined is one range. Transpose: `reduce_scatter`, which
    is where `deterministic` counts. For `after`, `stream` and `async_op` see `gather`.

    Raises:
        ValueError: if the axis is not sharded, or another one must be gathered before it.

    >>> from mfsdp_func import RowAtomic, build_for_row_atomic_unpadding, simulate
    >>> layout = build_for_row_atomic_unpadding([(4, 1)], 2)
    >>> def program(mesh):
    ...     mine = torch.full((2,), float(mesh.get_rank()))
    ...     buffer = DBuffer.from_local(mine, mesh, [RowAtomic()], layout)
    ...     whole, token = allgather(buffer, 0)
    ...     return whole.local_buffer.tolist()
    >>> simulate(program, 2).results
    {0: [0.0, 0.0, 1.0, 1.0], 1: [0.0, 0.0, 1.0, 1.0]}
    """
    step = fact_of(collective_step, buffer.spec, "allgather", axis, None, deterministic)
    return _communicate(buffer, step, after, stream, async_op)


def reduce_scatter(
    buffer: DBuffer,
    axis: str | int,
    placement: Placement,
    *,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
    deterministic: bool = False,
) -> tuple[DBuffer, Token]:
    """`Partial` -> sharded: add the buffers of all ranks along a mesh axis, and keep this rank's segment of the sum.

    ``Partial("avg")`` divides by the size of the axis. float16 is added and divided in float32 and rounded once, on every
    carrier: the mean of 40,000 and 40,000 is 40,000; other dtypes are added as they are. With `deterministic` the sum is
    a fold in the order of the axis (halves in float32), bitwise alike on every carrier; it takes as much memory as the
    whole range once more.

    Raises:
        ValueError: if the axis is not `Partial`, or `placement` is no shard that may stand there; see `BufferSpec`.
        TypeError: on dtypes that cannot be added.

    >>> from mfsdp_func import Partial, RowAtomic, build_for_row_atomic_unpadding, simulate
    >>> layout = build_for_row_atomic_unpadding([(4, 1)], 2)
    >>> def program(mesh):
    ...     mine = torch.arange(4.0) * (1 + mesh.get_rank())
    ...     terms = DBuffer.from_local(mine, mesh, [Partial()], layout)
    ...     segment, token = reduce_scatter(terms, 0, RowAtomic())
    ...     return segment.local_buffer.tolist()
    >>> simulate(program, 2).results
    {0: [0.0, 3.0], 1: [6.0, 9.0]}
    """
    step = fact_of(collective_step, buffer.spec, "reduce_scatter", axis, placement, deterministic)
    return _communicate(buffer, step, after, stream, async_op)


def allreduce(
    buffer: DBuffer,
    axis: str | int,
    *,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
    deterministic: bool = False,
) -> tuple[DBuffer, Token]:
    """`Partial` -> `Replicate`: add the buffers of all ranks along a mesh axis. Its own transpose.

    For ``Partial("avg")`` and `deterministic` see `reduce_scatter`.

    Raises:
        ValueError: if the axis is not `Partial`.
        TypeError: on dtypes that cannot be added.
    """
    step = fact_of(collective_step, buffer.spec, "allreduce", axis, None, deterministic)
    return _communicate(buffer, step, after, stream, async_op)


def redistribute(
    buffer: DBuffer,
    placements: Sequence[Placement],
    *,
    after: After = (),
    stream: AnyStream | None = None,
    async_op: bool = False,
    deterministic: bool = False,
) -> tuple[DBuffer, Token]:
    """Reach any placements by the operations of the table, axis after axis; the last one may stay in flight.

    Sums come first (innermost axis first, where they end in shards), then gathers (outermost first), then views.

    Raises:
        ValueError: before any communication, on anything but itself -> ``Partial("sum")``.

    >>> from mfsdp_func import Partial, Replicate, build_for_row_atomic_unpadding, simulate
    >>> layout = build_for_row_atomic_unpadding([(2, 1)], 2)
    >>> def program(mesh):
    ...     terms = DBuffer.from_local(torch.ones(2), mesh, [Partial()], layout)
    ...     total, token = redistribute(terms, [Replicate()])
    ...     return total.local_buffer.tolist()
    >>> simulate(program, 2).results
    {0: [2.0, 2.0], 1: [2.0, 2.0]}
    """
    change = fact_of(redistribution, buffer.spec, tuple(placements), deterministic)
    spec, local, token = take_steps(buffer.spec, buffer.local_buffer, change, Order(after, stream, async_op))
    return DBuffer(spec, local), token


def _communicate(
    buffer: DBuffer, step: Step, after: After, stream: AnyStream | None, async_op: bool
) -> tuple[DBuffer, Token]:
    spec, local, token = communicate(buffer.spec, buffer.local_buffer, step, Order(after, stream, async_op))
    return DBuffer(spec, local), token


def _flatten(buffer: DBuffer) -> tuple[list[torch.Tensor], BufferSpec]:
    return [buffer.local_buffer], buffer.spec


def _flatten_with_keys(buffer: DBuffer) -> tuple[list[tuple[Any, torch.Tensor]], BufferSpec]:
    return [(pytree.GetAttrKey("local_buffer"), buffer.local_buffer)], buffer.spec


def _unflatten(children: Sequence[torch.Tensor], spec: BufferSpec) -> DBuffer:
    # No validation: transforms put placeholders of all kinds here.
    (local,) = children
    return DBuffer(spec, local)


pytree.register_pytree_node(
    DBuffer,
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    serialized_type_name="mfsdp_func.DBuffer",
    flatten_with_keys_fn=_flatten_with_keys,
)

# Sharded parameters and states can be loaded with ``torch.load(weights_only=True)``: values that run no code.
torch.serialization.add_safe_globals(
    [DBuffer, BufferSpec, GlobalLayout, Mesh, RowAtomic, BlockAtomic, TensorAtomic, Replicate, Partial, Shard]
)
