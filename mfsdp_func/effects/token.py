"""Tokens: explicit values that order later work after an operation, and carry the gradient link between operations."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.effects.streams import AnyStream, Queued
from mfsdp_func.effects.torch_internals import outside_transforms


class Pending:
    """Work in flight of one operation, on CPU: it ends, once, when somebody waits for it.

    `finish` waits for the messages and unpacks them; `keep` holds what the work still reads until then.
    """

    def __init__(
        self,
        label: str,
        finish: Callable[[], None],
        keep: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        self.label = label
        self._finish: Callable[[], None] | None = finish
        self._keep: tuple[torch.Tensor, ...] = tuple(keep)
        self._outputs: tuple[torch.Tensor, ...] = tuple(outputs)
        self._error: BaseException | None = None
        # A token may be dropped while peers still read our memory: what is in flight stays referenced until it ends.
        self._kept_in = IN_FLIGHT.get()
        self._kept_in.add(self)

    @property
    def done(self) -> bool:
        """Whether somebody has waited for it."""
        return self._finish is None

    def wait(self, stream: AnyStream | None = None) -> None:
        """See `Token.wait`."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._kept_in.discard(self)
            try:
                with outside_transforms():  # it fills plain tensors, under a `torch.func` transform too
                    finish()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        self._keep = self._outputs = ()


IN_FLIGHT: ContextVar[set[Pending]] = ContextVar("mfsdp_func_in_flight", default=set())  # noqa: B039
"""What is in flight in this process; a simulated rank has a set of its own, which ends with it."""
_BEGUN: ContextVar[list[Pending | Queued] | None] = ContextVar("mfsdp_func_begun", default=None)


@contextmanager
def work_begun() -> Generator[list[Pending | Queued], None, None]:
    """Inside, list what calls leave in flight, whether or not somebody waits for it."""
    begun: list[Pending | Queued] = []
    before = _BEGUN.set(begun)
    try:
        yield begun
    finally:
        _BEGUN.reset(before)


def begin(work: Pending | Queued) -> tuple[Pending | Queued, ...]:
    """What a token holds of work that is in flight from here on."""
    if (begun := _BEGUN.get()) is not None:
        begun.append(work)
    return (work,)


@dataclass(frozen=True, eq=False)
class Token:
    """Orders later work after an operation, and links its gradient to that of the next one.

    A pytree with one child, `link`: a zero (float32, 0-D) that depends, for autograd, on the operation's inputs.
    Passing the token on with ``after=`` threads the link, so that a rank whose own dict was empty still runs the
    backward pass that its peers wait for. It passes through `torch.func` transforms and compiled regions, where no
    work is ever pending.

    >>> from mfsdp_func import GroupOwnerLayout, Mesh, build_for_row_atomic, gather, scatter
    >>> owners = GroupOwnerLayout(Mesh(1, rank=0), build_for_row_atomic([(2, 1)], 1), {0: 0})
    >>> matrices, token = gather({0: torch.ones(2)}, owner_layout=owners, async_op=True)
    >>> token.wait()  # now the matrices may be read
    >>> rows, token = scatter(matrices, owner_layout=owners, after=token)
    >>> token.link
    tensor(0.)
    """

    link: torch.Tensor
    pending: tuple[Pending | Queued, ...] = ()
    dtype: torch.dtype | None = None
    """Dtype of the operation's elements: what a rank that holds none takes the next operation's to be."""

    @classmethod
    def linked_to(cls, *tensors: torch.Tensor) -> "Token":
        """A token of no operation, whose link depends on `tensors`.

        For the first differentiated operation of a rank that holds nothing of a group: pass it with ``after=``.
        """
        # The sum of no elements: zero with a zero gradient, whatever the values.
        nothing = [tensor.reshape(-1)[:0].sum() for tensor in tensors if tensor.is_floating_point()]
        return cls(torch.stack([zero.float() for zero in nothing]).sum())

    def wait(self, stream: AnyStream | None = None) -> None:
        """Wait until the operation's results may be used; may be called any number of times.

        CPU: blocks until the results are there. CUDA: makes `stream` (default: the current one) wait for the
        operation, without blocking the host, and tells the allocator that the stream uses the results.

        Raises:
            RuntimeError: the operation's own error, at every call.
        """
        if self.pending and torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self.pending[0].label}: a token with work in flight came into a compiled region; call token.wait()"
                " before entering it"
            )
        for work in self.pending:
            work.wait(stream)


After: TypeAlias = Token | Iterable[Token]


def as_tokens(after: After) -> tuple[Token, ...]:
    """The tokens of an ``after=`` argument: one, or any number of them.

    Raises:
        TypeError: if it holds anything else.
    """
    if not isinstance(after, Iterable | Token):
        raise TypeError(f"after= takes a Token or an iterable of Tokens, got {type(after).__name__}")
    tokens = (after,) if isinstance(after, Token) else tuple(after)
    for token in tokens:
        if not isinstance(token, Token):
            raise TypeError(f"after= takes a Token or an iterable of Tokens, got {type(token).__name__}")
    return tokens


def _flatten(token: Token) -> tuple[list[torch.Tensor], object]:
    return [token.link], (token.pending, token.dtype)


def _flatten_with_keys(token: Token) -> tuple[list[tuple[Any, torch.Tensor]], object]:
    return [(pytree.GetAttrKey("link"), token.link)], (token.pending, token.dtype)


def _unflatten(
    children: Iterable[torch.Tensor], context: tuple[tuple[Pending | Queued, ...], torch.dtype | None]
) -> Token:
    (link,) = children
    return Token(link, *context)


pytree.register_pytree_node(
    Token,
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    serialized_type_name="mfsdp_func.Token",
    flatten_with_keys_fn=_flatten_with_keys,
)
