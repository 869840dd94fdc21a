"""Every operation twice in one function, on unlike groups: as one rank runs it, and on all ranks at once, densely.

Group ``"a"`` is cut unevenly and both ranks own tensors of it. Of group ``"b"`` one rank holds all and the other owns
all (`gather`, `scatter`), or one rank's segment is empty (buffers). Before and after an operation stands something
nonlinear, so that second derivatives are not zero.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh

SHAPES = ((5, 4), (2, 6), (3,), (6, 2))
DTYPE = torch.float64
ROWS, WHOLE, TENSORS = mf.RowAtomic(), mf.Replicate(), mf.TensorAtomic()

Values = Any
"""A rank's input or output: nested dicts of tensors or buffers, and the tensor "anchor" in inputs."""


class Operation(NamedTuple):
    """One row of the matrix.

    Attributes:
        inputs: the input of every rank, in mesh order.
        build: a rank's mesh -> its function from an input to an output and a token.
        dense: inputs of all ranks and a mesh -> outputs of all ranks, with plain tensor operations only.
    """

    inputs: Callable[[Mesh], list[Values]]
    build: Callable[[Mesh], Callable[[Values], tuple[Values, mf.Token]]]
    dense: Callable[[list[Values], Mesh], list[Values]]


def before(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0.5 * tensor * tensor


def after(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * tensor * tensor


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


# Owner compute.


def owner_layouts(mesh: Mesh) -> dict[str, mf.GroupOwnerLayout]:
    first, second = mesh.ranks
    uneven = mf.build_for_row_atomic_unpadding(SHAPES, 2)
    one_sided = mf.GlobalLayout([(2, 3), (4,)], [0, 6], 10, [0, 0])
    return {
        "a": mf.GroupOwnerLayout(mesh, uneven, {0: second, 1: first, 3: second}, name="a"),
        "b": mf.GroupOwnerLayout(mesh, one_sided, {0: first, 1: first}, name="b"),
    }


def full_tensors(owners: mf.GroupOwnerLayout) -> dict[int, torch.Tensor]:
    return {i: numbers(*owners.layout.tensor_shapes[i], seed=i) for i in owners.tensor_to_owner}


def parts_of(owners: mf.GroupOwnerLayout, rank: int) -> dict[int, Any]:
    held = owners.layout.tensors_in(owners.layout.get_rank_range(owners.mesh, [ROWS], rank))
    return {i: part for i, part in sorted(held) if i in owners.tensor_to_owner}


def shards(tensors: Mapping[int, torch.Tensor], owners: mf.GroupOwnerLayout, rank: int) -> dict[int, torch.Tensor]:
    return {i: tensors[i].reshape(-1)[part.start : part.end] for i, part in parts_of(owners, rank).items()}


def owned(tensors: Mapping[int, torch.Tensor], owners: mf.GroupOwnerLayout, rank: int) -> dict[int, torch.Tensor]:
    return {i: tensors[i] for i, owner in owners.tensor_to_owner.items() if owner == rank}


def owner_inputs(mesh: Mesh, choose: Callable[..., dict[int, torch.Tensor]]) -> list[Values]:
    layouts = owner_layouts(mesh)
    return [
        {name: choose(full_tensors(owners), owners, rank) for name, owners in layouts.items()}
        | {"anchor": numbers(1, seed=rank)}
        for rank in mesh.ranks
    ]


def on_owners(operation: Callable[..., Any]) -> Callable[[Mesh], Callable[[Values], tuple[Values, mf.Token]]]:
    def build(mesh: Mesh) -> Callable[[Values], tuple[Values, mf.Token]]:
        layouts = owner_layouts(mesh)

        def run(values: Values) -> tuple[Values, mf.Token]:
            token, results = mf.Token.linked_to(values["anchor"]), {}
            for name, owners in layouts.items():
                source = {i: before(tensor) for i, tensor in values[name].items()}
                found, token = operation(source, owner_layout=owners, dtype=DTYPE, after=token)
                results[name] = {i: after(tensor) for i, tensor in found.items()}
            return results, token

        return run

    return build


def on_owners_coalesced(operation: Callable[..., Any]) -> Callable[[Mesh], Callable[[Values], tuple[Values, mf.Token]]]:
    """Both groups in one exchange; and the second exchange moves them again, in the other order."""

    def build(mesh: Mesh) -> Callable[[Values], tuple[Values, mf.Token]]:
        layouts = owner_layouts(mesh)

        def run(values: Values) -> tuple[Values, mf.Token]:
            token, results = mf.Token.linked_to(values["anchor"]), {}
            for names in (("b", "a"), ("a", "b")):
                sources = [{i: before(tensor) for i, tensor in values[name].items()} for name in names]
                owners = [layouts[name] for name in names]
                found, token = operation(sources, owner_layouts=owners, dtype=DTYPE, after=token)
                for name, group in zip(names, found, strict=True):
                    for i, tensor in group.items():
                        moved = after(tensor)
                        results[name, i] = 0.5 * moved + results.get((name, i), 0)
            return {name: {i: results[name, i] for key, i in results if key == name} for name in layouts}, token

        return run

    return build


def dense_gather(inputs: list[Values], mesh: Mesh) -> list[Values]:
    results: list[Values] = [{} for _ in mesh.ranks]
    for name, owners in owner_layouts(mesh).items():
        full = {}
        for i in owners.tensor_to_owner:
            pieces = [before(values[name][i]).reshape(-1) for values in inputs if i in values[name]]
            full[i] = after(torch.cat(pieces).view(owners.layout.tensor_shapes[i]))
        for result, rank in zip(results, mesh.ranks, strict=True):
            result[name] = owned(full, owners, rank)
    return results


def dense_scatter(inputs: list[Values], mesh: Mesh) -> list[Values]:
    results: list[Values] = [{} for _ in mesh.ranks]
    for name, owners in owner_layouts(mesh).items():
        full = {i: after(before(tensor)) for values in inputs for i, tensor in values[name].items()}
        for result, rank in zip(results, mesh.ranks, strict=True):
            rows = {i: (-1, *owners.layout.tensor_shapes[i][1:]) for i in owners.tensor_to_owner}
            result[name] = {i: part.view(rows[i]) for i, part in shards(full, owners, rank).items()}
    return results


# Buffers: each group as layout, placement before, placement after, and how.

Change = tuple[mf.GlobalLayout, Any, Any]


def layouts() -> tuple[mf.GlobalLayout, mf.GlobalLayout]:
    return (
        mf.build_for_row_atomic_unpadding(SHAPES, 2),
        mf.build_for_tensor_atomic(((2, 3), (4,)), 2, tensor_owners=(0, 0)),
    )


def buffer_inputs(changes: dict[str, Change]) -> Callable[[Mesh], list[Values]]:
    def inputs(mesh: Mesh) -> list[Values]:
        found: list[Values] = []
        for rank in mesh.ranks:
            values: Values = {"anchor": numbers(1, seed=rank)}
            for name, (layout, old, _) in changes.items():
                spec = mf.BufferSpec(mesh.with_rank(rank), [old], layout)
                values[name] = mf.DBuffer(spec, numbers(spec.local_numel, seed=rank + 7))
            found.append(values)
        return found

    return inputs


def run_on_buffers(
    changes: dict[str, Change], operation: Callable[..., tuple[mf.DBuffer, mf.Token]]
) -> Callable[[Values], tuple[Values, mf.Token]]:
    news = {name: new for name, (_, _, new) in changes.items()}

    def run(values: Values) -> tuple[Values, mf.Token]:
        token, results = mf.Token.linked_to(values["anchor"]), {}
        for name, new in news.items():
            source = mf.DBuffer(values[name].spec, before(values[name].local_buffer))
            found, token = operation(source, new, token)
            results[name] = mf.DBuffer(found.spec, after(found.local_buffer))
        return results, token

    return run


def dense_on_buffers(changes: dict[str, Change]) -> Callable[[list[Values], Mesh], list[Values]]:
    def dense(inputs: list[Values], mesh: Mesh) -> list[Values]:
        results: list[Values] = [{} for _ in mesh.ranks]
        for name, (layout, old, new) in changes.items():
            sources = [before(values[name].local_buffer) for values in inputs]
            for k, rank in enumerate(mesh.ranks):
                if isinstance(old, mf.Partial):
                    whole = sum(sources) / (len(sources) if old.reduce_op == "avg" else 1)
                else:
                    whole = sources[k] if old == WHOLE else torch.cat(sources)
                segment = layout.get_segment(k, 2)
                piece = whole if new == WHOLE or isinstance(new, mf.Partial) else whole[segment.start : segment.end]
                spec = mf.BufferSpec(mesh.with_rank(rank), [new], layout)
                results[k][name] = mf.DBuffer(spec, after(piece))
        return results

    return dense


def on_buffers(
    first: tuple[Any, Any], second: tuple[Any, Any], operation: Callable[..., tuple[mf.DBuffer, mf.Token]]
) -> Operation:
    uneven, empty = layouts()
    changes = {"a": (uneven, *first), "b": (empty, *second)}
    return Operation(buffer_inputs(changes), lambda mesh: run_on_buffers(changes, operation), dense_on_buffers(changes))


def allgather(buffer: mf.DBuffer, new: Any, token: mf.Token) -> tuple[mf.DBuffer, mf.Token]:
    return mf.allgather(buffer, 0, after=token)


def reduce_scatter(buffer: mf.DBuffer, new: Any, token: mf.Token) -> tuple[mf.DBuffer, mf.Token]:
    return mf.reduce_scatter(buffer, 0, new, after=token)


def allreduce(buffer: mf.DBuffer, new: Any, token: mf.Token) -> tuple[mf.DBuffer, mf.Token]:
    return mf.allreduce(buffer, 0, after=token)


def view(buffer: mf.DBuffer, new: Any, token: mf.Token) -> tuple[mf.DBuffer, mf.Token]:
    return buffer.view([new]), token


def redistribute(buffer: mf.DBuffer, new: Any, token: mf.Token) -> tuple[mf.DBuffer, mf.Token]:
    return mf.redistribute(buffer, [new], after=token, deterministic=True)


SUM, AVERAGE = mf.Partial("sum"), mf.Partial("avg")

OPERATIONS: dict[str, Operation] = {
    "gather": Operation(lambda mesh: owner_inputs(mesh, shards), on_owners(mf.gather), dense_gather),
    "scatter": Operation(lambda mesh: owner_inputs(mesh, owned), on_owners(mf.scatter), dense_scatter),
    "gather_coalesced": Operation(
        lambda mesh: owner_inputs(mesh, shards), on_owners_coalesced(mf.gather_coalesced), dense_gather
    ),
    "scatter_coalesced": Operation(
        lambda mesh: owner_inputs(mesh, owned), on_owners_coalesced(mf.scatter_coalesced), dense_scatter
    ),
    "allgather": on_buffers((ROWS, WHOLE), (TENSORS, WHOLE), allgather),
    "reduce_scatter": on_buffers((AVERAGE, ROWS), (SUM, TENSORS), reduce_scatter),
    "allreduce": on_buffers((AVERAGE, WHOLE), (SUM, WHOLE), allreduce),
    "view": on_buffers((WHOLE, ROWS), (WHOLE, TENSORS), view),
    "redistribute": on_buffers((ROWS, AVERAGE), (SUM, TENSORS), redistribute),
}
