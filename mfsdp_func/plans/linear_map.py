"""What every movement is: a linear map between the tensors of ranks, as a value. Integers only."""

from abc import ABC, abstractmethod
from functools import cached_property

import torch

from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.value import Value


class LinearMap(Value, ABC):
    """What goes in and what comes out on each rank of a mesh, as this process (``mesh.rank``) sees it.

    For the objective that is the sum over ranks of their losses, the gradient of a map is its `transpose`.
    """

    mesh: Mesh

    @property
    def key(self) -> str:
        """The map as this rank runs it, as a string: what compiled code holds in place of it."""
        return self.identity

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """Of the elements, where the map says it."""
        return None

    @cached_property
    @abstractmethod
    def label(self) -> str:
        """How errors and traces call the map."""

    @cached_property
    @abstractmethod
    def transpose(self) -> "LinearMap":
        """The map back."""

    @cached_property
    @abstractmethod
    def input_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gives."""

    @cached_property
    @abstractmethod
    def output_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gets."""

    @cached_property
    @abstractmethod
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that this process gets."""

    @cached_property
    @abstractmethod
    def takes_part(self) -> bool:
        """Whether this process exchanges anything with others."""

    @abstractmethod
    def input_name(self, n: int) -> str:
        """How errors call the n-th tensor that this process gives."""

    def input_shape(self, n: int) -> tuple[int, ...]:
        """The shape in which errors ask for it; any shape of as many elements serves."""
        return (self.input_numels[n],)
