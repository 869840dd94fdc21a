"""Pre-flight of public models: how long it takes, and what it says of a 70B Llama on 256 to 2,048 ranks.

    python examples/benchmarks/preflight.py                         # prints both tables
    python examples/benchmarks/preflight.py --readme examples/benchmarks/README.md --pictures examples/benchmarks/

Needs `transformers`, and matplotlib for the pictures. Nothing is downloaded: models are built from their
configurations on the meta device. Each time is that of a fresh process after its imports.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from report import put_lines, table

import mfsdp_func as mf


class Model(NamedTuple):
    """A configuration of `transformers`, as its makers published it."""

    label: str
    config: str
    values: dict[str, int]
    finer_rows: tuple[str, ...] = ()


LLAMA_70B = Model(
    "Llama 70B",
    "LlamaConfig",
    {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
)
QWEN3_235B = Model(
    "Qwen3-235B-A22B",
    "Qwen3MoeConfig",
    {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
    ("*.experts.*",),
)
MODELS = {model.config: model for model in (LLAMA_70B, QWEN3_235B)}
MARKS = "<!-- preflight -->", "<!-- end of preflight -->"
RANKS = (256, 512, 1024, 2048)


def seconds_of(model: Model, ranks: int) -> tuple[float, float, int]:
    """Seconds and CPU seconds from the configuration to the printed answer, after imports; and the number of matrices."""
    import transformers

    getattr(transformers, model.config.replace("Config", "ForCausalLM"))  # imports the code of the model
    start, busy = time.perf_counter(), time.process_time()
    result = mf.preflight(model.config, ranks, changes=model.values, finer_rows=model.finer_rows)
    text = str(result)
    took, busy = time.perf_counter() - start, time.process_time() - busy
    if not text:
        raise ValueError("nothing was printed")
    return took, busy, result.parts.matrices


def time_rows(ranks: int = 2048, repeats: int = 3) -> list[dict[str, Any]]:
    """Medians over fresh processes."""
    rows: list[dict[str, Any]] = []
    for model in MODELS.values():
        command = [sys.executable, __file__, "--time", model.config, "--ranks", str(ranks)]
        found = [subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout for _ in range(repeats)]
        took, busy = (median(float(out.split()[n]) for out in found) for n in range(2))
        matrices = int(found[0].split()[2])
        row = {"model": model.label, "ranks": ranks, "matrices": matrices, "wall (s)": took, "CPU (s)": busy}
        rows.append(row)
    return rows


def answers(model: Model = LLAMA_70B, ranks: tuple[int, ...] = RANKS) -> list[mf.Preflight]:
    """One axis, and replicas with one node per copy of the parameters, at each number of ranks."""
    meshes = [mesh for size in ranks for mesh in ((size,), (size // 8, 8))]
    return [mf.preflight(model.config, mesh, changes=model.values) for mesh in meshes]


def figure_rows(results: list[mf.Preflight]) -> list[dict[str, Any]]:
    """A line of figures for each answer."""
    rows: list[dict[str, Any]] = []
    for result in results:
        gather = result.operation("optimizer gather")
        if gather is None:
            raise ValueError(f"{result.parts.model.label} has no matrices")
        rows.append(
            {
                "mesh": "x".join(map(str, result.settings.mesh)),
                "owner load, max / mean": result.imbalance,
                "bound": result.imbalance_bound,
                "busiest owner [Tflop]": max(result.parts.loads) / 1e12,
                "gather, all ranks [GB]": gather.nbytes / 1e9,
                "between nodes": f"{gather.between:.1%}",
                "peers of a rank, at most": int(gather.peers.max()),
                "messages of a rank, at most": int(gather.sent_messages.sum(0).max()),
                "memory [GB]": result.peak / 1e9,
                "optimizer in the model of time (s)": sum(
                    result.timing.seconds[f"optimizer {way}"] for way in ("gather", "scatter")
                )
                + result.timing.compute["optimizer"],
            }
        )
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, help="a Markdown file to write the tables into, between its marks")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where to draw preflight.png")
    parser.add_argument("--time", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2048, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time:
        print(*seconds_of(MODELS[options.time], options.ranks))
        return
    results = answers()
    lines = ["### Seconds of pre-flight, after imports", "", *table(time_rows()), ""]
    lines += [f"### {LLAMA_70B.label}: what pre-flight says", "", *table(figure_rows(results)), ""]
    if options.readme:
        put_lines(lines, options.readme, MARKS)
    if options.pictures:
        results[2].plot(options.pictures / "preflight.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
