"""How elements come to the host: as they are on CPU, through one bounded pinned buffer from CUDA."""

from typing import Any

import torch

from mfsdp_func.checkpoint.parts import bytes_of


class Staging:
    """Copies pieces of tensors to memory of their own on CPU.

    From CUDA on a stream of its own, that starts after what was queued when this was made, so that neither the default
    stream nor the step that goes on there waits for a copy.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._ready: dict[torch.device, Any] = {}
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def follow(self, device: torch.device) -> None:
        """Start after what is queued on the current stream of a CUDA device."""
        if device.type == "cuda" and device not in self._ready:
            self._ready[device] = torch.cuda.current_stream(device).record_event()

    @torch.no_grad()
    def on_cpu(self, view: torch.Tensor) -> torch.Tensor:
        """A contiguous CPU tensor whose storage holds just the elements of `view`: on CPU, in the memory of `view` itself."""
        tensor = view.detach()
        if tensor.is_cuda:
            return self._from_cuda(tensor)
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        return (
            torch.frombuffer(bytes_of(tensor), dtype=tensor.dtype).view(tensor.shape)
            if tensor.nbytes
            else tensor.clone()
        )

    def _from_cuda(self, tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        with torch.cuda.device(device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            self.follow(device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready[device])
                flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
                if self._pinned.numel() < flat.numel():
                    self._pinned = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
                landed = self._pinned[: flat.numel()]
                landed.copy_(flat, non_blocking=True)
                self._stream.synchronize()
        return landed.clone().view(tensor.dtype).view(tensor.shape)
