"""The same training in one process: whole tensors, `backward`, textbook clipping and Muon, PyTorch's AdamW."""

from collections.abc import Callable, Iterable

import gpt
import torch


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of Keller Jordan's quintic iteration, as written in his post of 2024; shape (m, n)."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def train(
    params: gpt.Params,
    blocks_of: Callable[[str, str], int],
    batches: Iterable[list[torch.Tensor]],
    rates: Callable[[int], tuple[float, float]],
    clip: float,
    config: gpt.Config,
) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """Train the matrices with Muon (momentum 0.95, Nesterov), all else with AdamW, both without weight decay.

    Args:
        params: the first parameters; not changed.
        blocks_of: (unit, name) -> into how many blocks of rows Muon takes that tensor apart; 0 where AdamW trains it.
        batches: for each step the batches that the ranks see; the gradient is the mean of theirs.
        rates: step -> learning rates of Muon and of AdamW.
        clip: the largest norm of all gradients together.
        config: of the model.

    Returns:
        The last parameters, and the loss of every step.
    """
    leaves = {
        unit: {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
        for unit, tensors in params.items()
    }
    named = [(unit, name, leaf) for unit, tensors in leaves.items() for name, leaf in tensors.items()]
    matrices = [(leaf, count) for unit, name, leaf in named if (count := blocks_of(unit, name))]
    momenta = [torch.zeros_like(matrix) for matrix, _ in matrices]
    adamw = torch.optim.AdamW([leaf for unit, name, leaf in named if not blocks_of(unit, name)], weight_decay=0.0)
    losses: list[float] = []
    for step, of_ranks in enumerate(batches):
        of_batches = [gpt.loss(leaves, tokens, config) for tokens in of_ranks]
        for loss in of_batches:
            loss.backward()
        for _, _, leaf in named:
            leaf.grad /= len(of_ranks)
        norm = torch.stack([leaf.grad.double().square().sum() for _, _, leaf in named]).sum().sqrt()
        for _, _, leaf in named:
            leaf.grad *= clip / max(clip, norm)
        muon_rate, adamw.param_groups[0]["lr"] = rates(step)
        with torch.no_grad():
            for (matrix, count), momentum in zip(matrices, momenta, strict=True):
                momentum += 0.05 * (matrix.grad - momentum)
                direction = 0.05 * matrix.grad + 0.95 * momentum
                for block, part in zip(matrix.chunk(count), direction.chunk(count), strict=True):
                    block -= muon_rate * max(1, part.shape[0] / part.shape[1]) ** 0.5 * newton_schulz(part)
        adamw.step()
        for _, _, leaf in named:
            leaf.grad = None
        losses.append(sum(float(loss.detach()) for loss in of_batches) / len(of_batches))
    return {unit: {name: leaf.detach() for name, leaf in tensors.items()} for unit, tensors in leaves.items()}, losses
