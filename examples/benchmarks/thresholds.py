"""Where one message per piece and one packed message cost the same: the figures behind the carrier's threshold.

``torchrun --nproc-per-node 2 thresholds.py`` prints, on gloo and the CPU, per size of a piece, the time of sending 64 of
them one by one and packed, each received into its place, and what a message costs beyond its bytes.
"""

from typing import Any

import torch
import torch.distributed as dist
from measure import leave, medians, ratio, time_rounds

SIZES = tuple(2**power for power in range(10, 21))
"""Bytes of one piece."""


def measure_thresholds(sizes: tuple[int, ...] = SIZES, pieces: int = 64, rounds: int = 15) -> list[dict[str, float]]:
    """Per size: seconds of direct and of packed messages, and the median ratio. Ranks 0 and 1 exchange, all call."""
    rank = dist.get_rank()
    rows: list[dict[str, float]] = []
    for nbytes in sizes:
        sent = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(pieces)]
        got = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(pieces)]
        group = dist.group.WORLD

        def direct(sent: list[torch.Tensor] = sent, got: list[torch.Tensor] = got, group: Any = group) -> None:
            if rank < 2:
                works = [group.recv([part], 1 - rank, 7) for part in got]
                works += [group.send([part], 1 - rank, 7) for part in sent]
                for work in works:
                    work.wait()

        def packed(sent: list[torch.Tensor] = sent, got: list[torch.Tensor] = got, group: Any = group) -> None:
            if rank < 2:
                room = torch.empty(sum(part.numel() for part in got), dtype=torch.uint8)
                works = [group.recv([room], 1 - rank, 8), group.send([torch.cat(sent)], 1 - rank, 8)]
                for work in works:
                    work.wait()
                torch._foreach_copy_(got, room.split([part.numel() for part in got]))

        seconds = time_rounds({"direct": direct, "packed": packed}, rounds)
        middle = medians(seconds)
        rows.append(
            {
                "nbytes": nbytes,
                "direct": middle["direct"],
                "packed": middle["packed"],
                "direct / packed": ratio(seconds, "direct", "packed"),
            }
        )
    return rows


def crossing(rows: list[dict[str, float]]) -> int | None:
    """The smallest size from which on direct messages are never slower than packed ones."""
    found = None
    for row in reversed(rows):
        if row["direct / packed"] > 1:
            break
        found = int(row["nbytes"])
    return found


def alpha_beta(rows: list[dict[str, float]], pieces: int = 64) -> tuple[float, float]:
    """Seconds per message and seconds per byte, from the smallest and the largest direct messages."""
    first, last = rows[0], rows[-1]
    beta = max(0.0, (last["direct"] - first["direct"]) / pieces / (last["nbytes"] - first["nbytes"]))
    return max(0.0, first["direct"] / pieces - beta * first["nbytes"]), beta


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    table = measure_thresholds()
    if dist.get_rank() == 0:
        for row in table:
            print(
                f"{int(row['nbytes']):>9} bytes: direct {row['direct'] * 1e3:8.2f} ms,"
                f" packed {row['packed'] * 1e3:8.2f} ms, ratio {row['direct / packed']:.2f}"
            )
        alpha, beta = alpha_beta(table)
        print(f"direct wins from {crossing(table)} bytes; a message costs {alpha * 1e6:.0f} us, {1e-9 / beta:.2f} GB/s")
    leave()
