"""Saving while training goes on: files are written by a thread, which uses no collective."""

import os
import shutil
import threading
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mfsdp_func.checkpoint.consensus import agree, all_ranks, attempt, together
from mfsdp_func.checkpoint.entry import Entry
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.publishing import Job, await_records, publish
from mfsdp_func.checkpoint.saving import Progress, plan, report_failure, write
from mfsdp_func.checkpoint.staging import Staging
from mfsdp_func.optim.torch_optimizer import TorchOptimizer, storages_written_in_place
from mfsdp_func.values.mesh import Mesh, MeshLike

_HASH_MOST = 1024 * 1024
"""Replicated values up to so many bytes are compared before `save_async` returns, others by the thread."""


class SaveHandle:
    """A save that is going on. Every rank calls `wait`, in the order of its saves."""

    def __init__(self, job: Job, progress: Progress | None, timeout: float) -> None:
        self._job, self._progress, self._timeout = job, progress, timeout
        self._staging = Staging()
        for entry in job.entries:
            if entry.is_tensor:
                self._staging.follow(entry.value.device)
        held = (*job.entries, *job.late)
        self._versions = [(entry, entry.value._version) for entry in held if entry.is_tensor]
        self._written, self._stopped = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._publish_error: BaseException | None = None
        self._outcome: BaseException | None = None
        self._waited = False
        self._thread = threading.Thread(target=self._run, name=f"checkpoint to {job.path.name}")
        self._thread.start()

    def _run(self) -> None:
        _, error = attempt(lambda: write(self._job, self._progress, self._staging, self._check))
        self._versions = []  # lets go of the state
        if error is not None:
            self._errors.append(error)
            report_failure(self._job, error)
        self._written.set()
        if self._job.is_first and error is None:
            _, self._publish_error = attempt(self._publish)

    def _check(self) -> None:
        changed = [entry.name for entry, version in self._versions if entry.value._version != version]
        if changed:
            raise CheckpointError(
                f"checkpoint to {self._job.path}: {changed[0]!r} ({len(changed)} in all) was written while it was being"
                " saved, so that the file holds a mixture. Make new tensors in a step, as functional ones do, or use save",
                changed,
            )

    def _publish(self) -> None:
        await_records(self._job, self._timeout, self._stopped.is_set)
        publish(self._job)

    def done(self) -> bool:
        """Whether this rank has nothing left to do but `wait`."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there, on all ranks. Every rank calls; communicates a few KiB.

        Raises:
            CheckpointError: alike on all ranks, at each call, with nothing left at the path: a file could not be
                written, or a tensor was written while it was saved.
        """
        if not self._waited:
            self._waited = True
            _, self._outcome = attempt(self._finish)
        if self._outcome is not None:
            raise self._outcome

    def _finish(self) -> None:
        job, what = self._job, f"checkpoint to {self._job.path}"
        self._written.wait()
        try:
            agree(job.mesh, what, self._errors[0] if self._errors else None)
            self._thread.join()
            agree(job.mesh, what, self._publish_error)
        except BaseException:  # an interrupt too
            self._stopped.set()
            self._thread.join()
            if job.is_first:
                shutil.rmtree(job.folder, ignore_errors=True)
            raise


def save_async(
    path: str | os.PathLike[str],
    state: Any,
    *,
    names: Any = None,
    mesh: Mesh | MeshLike | None = None,
    progress: Progress | None = None,
    timeout: float = 1800.0,
) -> SaveHandle:
    """Begin to write a checkpoint, and return. Every rank calls, and later calls `wait` of what it returns.

    Ranks agree on a few KiB here; a thread then writes without any collective, and rank 0 publishes when it finds the
    records of all ranks in the (shared) folder, be `wait` called or not.

    Nothing is copied on CPU: the thread reads the state itself, which is immutable in a functional step. So the old
    state stays in memory until it is written, beside the new one that the next steps make. From CUDA, elements pass
    through one pinned buffer of at most 64 MiB, on a stream of its own. A write into the state meanwhile is found by the
    tensors' version counters; what a `TorchOptimizer` works on is written in place by design, and is refused.

    Args:
        path: see `save`.
        state: see `save`.
        names: see `save`.
        mesh: see `save`.
        progress: see `Progress`; called by the thread.
        timeout: seconds that rank 0 waits for the records of others after its own.

    Raises:
        CheckpointError: alike on all ranks; see `save`, and above.
    """
    ranks = all_ranks(mesh)
    together(ranks, f"checkpoint to {os.path.abspath(path)}", lambda: _refuse_in_place(state))
    job = plan(path, state, names, ranks, hash_most=_HASH_MOST)
    kept = tuple(_without_inference(entry) for entry in job.entries)
    return SaveHandle(replace(job, entries=kept, late=tuple(map(_without_inference, job.late))), progress, timeout)


def _refuse_in_place(state: Any) -> None:
    written = storages_written_in_place()
    for path, leaf in pytree.tree_flatten_with_path(state)[0]:
        local = leaf.to_local() if isinstance(leaf, DTensor) else getattr(leaf, "local", leaf)
        in_place = isinstance(local, torch.Tensor) and not local.is_meta and local.untyped_storage()._cdata in written
        if in_place or isinstance(leaf, TorchOptimizer):
            raise CheckpointError(
                f"save_async: {pytree.keystr(path)} belongs to a TorchOptimizer, whose steps write into it while it is being"
                " saved; use save, or the functional step"
            )


def _without_inference(entry: Entry) -> Entry:
    """Tensors made in inference mode count no versions: they are copied."""
    if entry.is_tensor and entry.value.is_inference():
        with torch.inference_mode(False):
            return replace(entry, value=entry.value.clone())
    return entry
