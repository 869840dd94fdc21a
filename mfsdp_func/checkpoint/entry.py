"""One named value of a state, and what a rank has of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mfsdp_func.checkpoint.boxes import Box, boxes_of, split_boxes
from mfsdp_func.values.ranges import Range


class GroupNames(NamedTuple):
    """The parameters of one buffer.

    Attributes:
        names: tensor index -> parameter.
        shapes: their logical shapes; empty where the layout's are all that is known.
        ties: parameter -> its further names.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...] = ()
    ties: Mapping[str, tuple[str, ...]] = {}


@dataclass(frozen=True, eq=False)
class Entry:
    """One named value, and what this rank has of it.

    Attributes:
        name: in the file.
        leaf: position of the value among the leaves of the state.
        value: the tensor with this rank's elements (flat for a part), or the plain value itself.
        shape: the logical shape; None for a plain value.
        part: which elements this rank has, in row-major order; None where `box` says it.
        box: what this rank has of a tensor cut along its dims.
        writes: whether this rank writes its elements; False on all replicas but one.
        shared: whether all ranks are expected to hold the value alike.
        loose: whether `shape` is a layout's, which may write a parameter's shape otherwise.
        aliases: further names.
        index: of the tensor in its buffer; -1 where it is in none.
    """

    name: str
    leaf: int
    value: Any
    shape: torch.Size | None
    part: Range | None = None
    box: Box | None = None
    writes: bool = True
    shared: bool = False
    loose: bool = False
    aliases: tuple[str, ...] = ()
    index: int = -1

    @property
    def is_tensor(self) -> bool:
        """Whether there is a tensor, not a plain value."""
        return self.shape is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.value.dtype

    def pieces(self, shape: torch.Size | None = None, most: int | None = None) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of this rank's elements, with views of them.

        Args:
            shape: of the tensor in the file; by default its own.
            most: number of elements that a box may have.
        """
        whole = shape if shape is not None else self.shape or torch.Size(())
        if not whole.numel():
            return [(Box((0,) * len(whole), tuple(whole)), self.value.reshape(whole))]
        if self.box is None:
            part = self.part or Range(0, 0)
            boxes, start, flat = boxes_of(whole, part), part.start, self.value.view(-1)
        else:
            boxes, start, flat = [(self.box, Range(0, self.box.numel))], 0, self.value.reshape(-1)
            boxes = boxes if self.box.numel else []
        if most is not None:
            boxes = split_boxes(boxes, most)
        return [(box, flat[r.start - start : r.end - start].view(box.sizes)) for box, r in boxes]
