"""The page: one HTML file with text, tables and pictures, which needs no network, no script and no other file."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from mfsdp_func.preflight.advice import Advice
from mfsdp_func.preflight.pictures import PICTURES, svg_of
from mfsdp_func.preflight.result import Answer, gigabytes, labels_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 14px; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } .best { font-weight: 700; background: #e6f2e6; }
.verdict { font-size: 1.1rem; padding: .5rem .8rem; border-radius: 4px; display: inline-block; }
.yes { background: #e6f2e6; } .no { background: #f8dedc; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { color: #555; max-width: 34rem; } svg { max-width: 100%; height: auto; }
#timeline { grid-column: 1 / -1; } figure svg { display: block; }
code, pre { background: #f4f4f4; padding: .1rem .3rem; border-radius: 3px; overflow-x: auto; } pre { padding: .6rem; }
"""


def save_page(results: Sequence[Answer], path: str | Path, advice: Sequence[Advice] = ()) -> Path:
    """Write the page of one result, or of several beside one another.

    Raises:
        ValueError: where matplotlib is missing.
    """
    target = Path(path)
    parts = [_heading(results)]
    if len(results) > 1:
        parts.append(_comparison(results))
    if advice:
        rows = "".join(f"<li>{escape(str(each))}<br><code>{escape(each.command)}</code></li>" for each in advice)
        parts.append(f"<h2>What would make the worst line better</h2><ul>{rows}</ul>")
    heads = labels_of(results) if len(results) > 1 else [""]
    for result, head in zip(results, heads, strict=True):
        parts.append(_section(result, head))
    title = escape(f"Pre-flight: {results[0].parts.model.label}")
    target.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n",
        encoding="utf-8",
    )
    return target


def _heading(results: Sequence[Answer]) -> str:
    model = results[0].parts.model
    return (
        f"<h1>Pre-flight: {escape(model.label)}</h1><p><code>{escape(' '.join(model.words) or model.label)}</code></p>"
        f"<p>{model.numel:,} parameters in {model.tensors:,} tensors and"
        f" {len(model.groups):,} buffers. What one training step moves, stores and takes, computed from layouts and plans"
        " without running it. Bytes, messages and peers are those of the run; times are a model.</p>"
    )


def _comparison(results: Sequence[Answer]) -> str:
    columns = [{line.name: line for line in result.lines()} for result in results]
    rows: list[str] = []
    for name in dict.fromkeys(name for column in columns for name in column):
        found = [column.get(name) for column in columns]
        values = [line.value for line in found if line is not None]
        best = min(values) if len(set(values)) > 1 else None
        mark = ' class="best"'
        cells = "".join(
            "<td>-</td>" if line is None else f"<td{mark * (line.value == best)}>{escape(line.text)}</td>"
            for line in found
        )
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    heads = "".join(f"<th>{escape(label)}</th>" for label in labels_of(results))
    return f"<h2>Side by side</h2><table><tr><th>the better one is marked</th>{heads}</tr>{''.join(rows)}</table>"


def _section(result: Answer, head: str) -> str:
    settings, share = result.settings, result.peak / result.hardware.memory
    verdict, kind = ("It fits", "yes") if result.fits else ("It does not fit", "no")
    words = [
        f"<h2>{escape(f'Settings: {head}' if head else 'The run')}</h2>",
        f"<p>{settings.world:,} ranks as {'x'.join(map(str, settings.mesh))}, {settings.node} a node:"
        f" {settings.shards:,} ranks share one copy of the parameters"
        + (
            f", and there are {settings.world // settings.shards:,} such groups"
            if settings.shards < settings.world
            else ""
        )
        + f". Optimizer: {settings.optimizer}; layout: {settings.layout.value}; owners: {settings.owners}.</p>",
        f'<p class="verdict {kind}">{verdict}: {gigabytes(result.peak)} on the fullest rank, {share:.0%} of the'
        f" {gigabytes(result.hardware.memory)} of one {escape(result.hardware.name)}"
        + ("." if result.activations else "; activations are left out, for no batch was given.")
        + "</p>",
    ]
    words.append('<div class="pictures">')
    for name, (_, _, caption) in PICTURES.items():
        picture = svg_of(result, name)
        if picture is not None:
            words.append(f'<figure id="{name}">{picture}<figcaption>{escape(caption)}</figcaption></figure>')
    words += [
        "</div>",
        f"<details open><summary>All figures</summary><pre>{escape(str(result))}</pre></details>",
        f"<p>The command: <code>{escape(result.command)}</code></p>",
    ]
    return "\n".join(words)
