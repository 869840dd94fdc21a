"""Random sessions: a mesh, groups of tensors of any dtype, and calls in any order, each against dense numbers.

Everything is drawn from one seed, alike on all ranks; each rank knows what all hold, and so what it must get.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.func import grad, vmap

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests import buffers
from tests.meshes import MeshFacts

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
RAW = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
)
KINDS = ("padded", "unpadded", "balanced", "tensor", "handmade")

Tensors = dict[int, torch.Tensor]


def draw_mesh(rng: random.Random, world: int) -> MeshFacts:
    """One to three axes over any of the ranks, in any order."""
    shape = [rng.randint(1, world)]
    while len(shape) < 3 and rng.random() < 0.5:
        shape.insert(rng.randint(0, len(shape)), rng.randint(1, max(1, world // math.prod(shape))))
    return tuple(shape), tuple(rng.sample(range(world), math.prod(shape)))


class Group(NamedTuple):
    """Owners, and the whole tensors."""

    owners: mf.GroupOwnerLayout
    full: Tensors
    dtype: torch.dtype

    def shards(self) -> Tensors:
        """This rank's part of each participating tensor, flat."""
        local = self.owners.layout.get_local_range(self.owners.mesh, self.owners.placements)
        held = self.owners.layout.tensors_in(local)
        return {i: self.full[i].reshape(-1)[part.start : part.end] for i, part in sorted(held) if i in self.full}

    def is_own(self, i: int) -> bool:
        """Whether this rank owns a tensor, or stands for its owner among its replicas."""
        mesh, owner = self.owners.mesh, self.owners.tensor_to_owner[i]
        axes = [axis for axis, p in enumerate(self.owners.placements) if p != mf.Replicate()]
        return all(mesh.coordinate()[axis] == mesh.coordinate(owner)[axis] for axis in axes)

    def owned(self) -> Tensors:
        """The tensors that this rank owns."""
        return {i: tensor for i, tensor in self.full.items() if self.is_own(i)}


def numbers(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, or any bits."""
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    if dtype in FLOATS or dtype in COMPLEX:
        found = torch.randint(-8, 9, shape, generator=generator).to(dtype)
        return found * (1 - 2j) if dtype in COMPLEX else found
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def draw_group(rng: random.Random, mesh: Mesh, dtype: torch.dtype, name: str) -> Group:
    """Any layout of a few tensors, and any owners, who may hold nothing."""
    replicas = rng.randint(0, mesh.ndim) if rng.random() < 0.3 else 0
    kind, count = rng.choice(KINDS), math.prod(mesh.shape[replicas:])
    placement = buffers.shard_of(kind)
    placements = (mf.Replicate(),) * replicas + (placement,) * (mesh.ndim - replicas)
    layout = buffers.layout_of(kind, count)
    chosen = [i for i, shape in enumerate(layout.tensor_shapes) if shape.numel() and rng.random() < 0.8]
    owners = {i: rng.choice(mesh.ranks) for i in chosen}
    full = {i: numbers(rng, tuple(layout.tensor_shapes[i]), dtype) for i in owners}
    return Group(mf.GroupOwnerLayout(mesh, layout, owners, placements, name), full, dtype)


def disguised(rng: random.Random, tensors: Tensors) -> Tensors:
    """The same elements in other memory: strided, offset, conjugated, negated, or all views of one storage."""
    how = rng.choice(["plain", "strided", "offset", "lazy", "one storage"])
    if how == "one storage" and tensors:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        pieces = flat.split([tensor.numel() for tensor in tensors.values()])
        return {i: piece.view(tensors[i].shape) for i, piece in zip(tensors, pieces, strict=True)}
    return {i: _disguise(how, tensor) for i, tensor in tensors.items()}


def _disguise(how: str, tensor: torch.Tensor) -> torch.Tensor:
    if how in ("strided", "offset"):
        step, skip = (2, 0) if how == "strided" else (1, 3)
        room = tensor.new_empty(step * tensor.numel() + skip)[skip::step]
        return room.copy_(tensor.reshape(-1))
    if how == "lazy" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    if how == "lazy" and tensor.dtype in FLOATS:
        return torch._neg_view(-tensor)
    return tensor.clone()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, of stride 1 even where it has one element."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)


def check_equal(found: Mapping[int, torch.Tensor], expected: Tensors, what: str) -> None:
    """The same keys and the same bits."""
    if list(found) != sorted(expected):
        raise AssertionError(f"{what}: tensors {list(found)}, expected {sorted(expected)}")
    for i, tensor in expected.items():
        a, b = (_plain(t) for t in (found[i], tensor))
        if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            raise AssertionError(f"{what}: tensor {i} is {a}, expected {b}")


class Session:
    """One session on one rank."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh, self.rng = mesh, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.dtype = self.rng.choice((*FLOATS, *COMPLEX, *RAW))
        self.groups = [draw_group(self.rng, mesh, self.dtype, f"group {n}") for n in range(self.rng.randint(1, 3))]
        self.pending: list[tuple[mf.Token, Callable[[], None]]] = []

    def run(self, steps: int) -> Counter[str]:
        """That many calls, and waits for what is in flight."""
        calls = [self.gather, self.scatter, self.coalesced, self.in_place, self.walk, self.derivative, self.batch]
        for _ in range(steps):
            call = self.rng.choice(calls)
            call()
            self.counts[call.__name__] += 1
            while self.pending and self.rng.random() < 0.5:
                self._settle()
        while self.pending:
            self._settle()
        return self.counts

    def _settle(self) -> None:
        token, check = self.pending.pop(0)
        token.wait()
        check()

    def _draw(self, tensors: Tensors) -> Tensors:
        """Disguised by draws of this rank's own: ranks need not lie alike."""
        return disguised(random.Random(self.rng.random() + self.mesh.get_rank()), tensors)

    def _later(self, token: mf.Token, check: Callable[[], None], in_flight: bool) -> None:
        if in_flight:
            self.pending.append((token, check))
        else:
            check()

    def gather(self) -> None:
        group, in_flight = self.rng.choice(self.groups), self.rng.random() < 0.5
        source = self._draw(group.shards())
        full, token = mf.gather(source, owner_layout=group.owners, dtype=group.dtype, async_op=in_flight)
        self._later(token, lambda: check_equal(full, group.owned(), "gather"), in_flight)

    def scatter(self) -> None:
        group, in_flight, own = self.rng.choice(self.groups), self.rng.random() < 0.5, self.rng.random() < 0.5
        expected = {i: part for i, part in group.shards().items() if own or not group.is_own(i)}
        source = self._draw(group.owned())
        parts, token = mf.scatter(
            source, owner_layout=group.owners, include_own=own, dtype=group.dtype, async_op=in_flight
        )
        self._later(token, lambda: check_equal(parts, expected, "scatter"), in_flight)

    def coalesced(self) -> None:
        groups = self.rng.choices(self.groups, k=self.rng.randint(1, 3))
        alike = [g for g in groups if g.owners.placements == groups[0].owners.placements]
        layouts = [group.owners for group in alike]
        found, token = mf.gather_coalesced(
            [self._draw(group.shards()) for group in alike], owner_layouts=layouts, dtype=self.dtype
        )
        again, _ = mf.scatter_coalesced(found, owner_layouts=layouts, dtype=self.dtype, after=token)
        for group, full, parts in zip(alike, found, again, strict=True):
            check_equal(full, group.owned(), "gather_coalesced")
            check_equal(parts, group.shards(), "scatter_coalesced")

    def in_place(self) -> None:
        group = self.rng.choice(self.groups)
        own = self.rng.random() < 0.5
        expected = group.owned() if own else {i: t for i, t in group.shards().items() if not group.is_own(i)}
        rooms = self._draw(
            {i: torch.empty_like(t).view(torch.uint8).zero_().view(t.dtype) for i, t in expected.items()}
        )
        operation = mf.inplace.gather if own else mf.inplace.scatter
        operation(self._draw(group.shards() if own else group.owned()), rooms, owner_layout=group.owners)
        check_equal(dict(sorted(rooms.items())), expected, operation.__name__)

    def walk(self) -> None:
        """A buffer through any placements that can be reached, there and on; movement bit for bit."""
        kind = self.rng.choice(KINDS)
        layout = buffers.layout_of(kind, self.mesh.size())
        every = buffers.all_placements(self.mesh.ndim, buffers.shard_of(kind))
        old = self.rng.choice(every)
        for _ in range(2):
            reachable = [new for new in every if buffers.is_reachable(old, new)]
            new = self.rng.choice(reachable)
            buffer, in_flight = buffers.source_of(self.mesh, old, layout), self.rng.random() < 0.5
            found, token = mf.redistribute(buffer, new, async_op=in_flight, deterministic=self.rng.random() < 0.5)
            expected, added = buffers.expected_of(self.mesh, old, new, layout)

            def check(found: mf.DBuffer = found, expected: mf.DBuffer = expected, added: bool = added) -> None:
                a, b = buffers.tensors_of(found), buffers.tensors_of(expected)
                torch.testing.assert_close(a, b, rtol=1e-12 if added else 0, atol=1e-12 if added else 0)

            self._later(token, check, in_flight)
            old = new

    def _loss(self, group: Group) -> Callable[[Tensors], torch.Tensor]:
        def loss(source: Tensors) -> torch.Tensor:
            token = mf.Token.linked_to(*source.values(), torch.zeros(()))
            full, token = mf.gather(source, owner_layout=group.owners, dtype=torch.float64, after=token)
            cubes = {i: tensor**3 for i, tensor in full.items()}
            parts, token = mf.scatter(cubes, owner_layout=group.owners, dtype=torch.float64, after=token)
            return sum((part.sum() for part in parts.values()), token.link)

        return loss

    def _real_shards(self, group: Group) -> Tensors | None:
        """In float64, and one more leaf, for ranks that hold nothing."""
        if group.dtype not in FLOATS:
            return None
        return {i: shard.double() for i, shard in group.shards().items()}

    def derivative(self) -> None:
        group = self.rng.choice(self.groups)
        source = self._real_shards(group)
        by_function = self.rng.random() < 0.5
        if source is None:
            return
        expected = {i: 3 * shard**2 for i, shard in source.items()}
        anchored = source | {-1: torch.zeros(1, dtype=torch.float64)}  # a leaf for ranks that hold nothing
        if by_function:
            found = grad(self._loss(group))(anchored)
        else:
            leaves = {i: shard.clone().requires_grad_() for i, shard in anchored.items()}
            self._loss(group)(leaves).backward()
            found = {i: leaf.grad for i, leaf in leaves.items()}
        for i, gradient in expected.items():
            torch.testing.assert_close(found[i], gradient)

    def batch(self) -> None:
        group = self.rng.choice(self.groups)
        source = self._real_shards(group)
        scales = [self.rng.randint(-3, 3) for _ in range(self.rng.randint(1, 3))]
        differentiated = self.rng.random() < 0.5
        if source is None:
            return
        batch = {i: torch.stack([scale * shard for scale in scales]) for i, shard in source.items()}
        batch[-1] = torch.zeros(len(scales), 1, dtype=torch.float64)
        found: Any = vmap(grad(self._loss(group)) if differentiated else self._loss(group))(batch)
        if differentiated:
            for i, shard in source.items():
                torch.testing.assert_close(found[i], torch.stack([3 * (scale * shard) ** 2 for scale in scales]))
        else:
            totals = [sum(((s * shard) ** 3).sum() for shard in source.values()) for s in scales]
            expected = torch.stack([torch.as_tensor(number, dtype=torch.float64) for number in totals])
            torch.testing.assert_close(
                found.double(), expected
            )  # of a rank that holds nothing, the link alone: float32


def session(mesh: Mesh, seed: int, steps: int = 12) -> Counter[str]:
    """Run one session; the number of calls of each kind."""
    return Session(mesh, seed).run(steps)
