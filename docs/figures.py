"""Figures and tables of the documentation, drawn from docs/benchmarks/*.json and nothing else.

python docs/figures.py           writes docs/images/*.svg, and docs/benchmarks.md, which is not committed
python docs/figures.py --check   exits with 1 where a picture is not what the figures say

Each SVG carries its own card and both colour schemes, so it reads on light and dark pages and on GitHub.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
STYLE = """<style>
.card{fill:#ffffff;stroke:#d0d7de}.text{fill:#1f2328}.soft{fill:#59636e}.line{stroke:#d0d7de}
.best{fill:#0969da}.plain{fill:#54aeff}.other{fill:#8c959f}.box{fill:#f6f8fa;stroke:#8c959f}.arrow{stroke:#59636e}
.head{fill:#59636e}
@media (prefers-color-scheme:dark){.card{fill:#161b22;stroke:#30363d}.text{fill:#e6edf3}.soft{fill:#9198a1}
.line{stroke:#30363d}.best{fill:#4493f8}.plain{fill:#1f6feb}.other{fill:#6e7681}.box{fill:#21262d;stroke:#6e7681}
.arrow{stroke:#9198a1}.head{fill:#9198a1}}
text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif}
</style>"""


def result(benchmark: dict[str, Any], key: str) -> dict[str, Any]:
    """The entry of one key."""
    return next(entry for entry in benchmark["results"] if entry["key"] == key)


def headline() -> list[tuple[str, float, float, str]]:
    """(label, acceptance length, standard error, class) of the bars."""
    benchmark = json.loads((DOCS / "benchmarks" / "smollm2_tau.json").read_text())
    best, plain = result(benchmark, "tau_smollm2_best")["decoded"], result(benchmark, "tau_smollm2_ce")
    bars = [
        ("dflash-offline, best recipe", best, "best"),
        ("dflash-offline, plain DFlash recipe", plain["ours"], "plain"),
        ("SpecForge, plain DFlash recipe", plain["specforge"], "other"),
    ]
    return [(label, side["acceptance_length"], side["acceptance_length_se"], kind) for label, side, kind in bars]


def tau_chart() -> str:
    """Bars of the acceptance length on held-out prompts, with standard errors."""
    bars = headline()
    width, left, top, step, scale = 720, 260, 64, 44, 90.0
    height = top + step * len(bars) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Acceptance length: {"; ".join(f"{label} {value:.2f}" for label, value, _, _ in bars)}">',
        STYLE,
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        '<text class="text" x="20" y="28" font-size="16" font-weight="600">'
        "Acceptance length: tokens a round of the target</text>",
        '<text class="soft" x="20" y="48" font-size="12">SmolLM2-135M-Instruct, 200 held-out GSM8K prompts, greedy, '
        "7,273 training conversations; one H200</text>",
    ]
    for tick in range(5):
        x = left + tick * scale
        parts.append(f'<line class="line" x1="{x}" y1="{top}" x2="{x}" y2="{height - 30}"/>')
        parts.append(f'<text class="soft" x="{x}" y="{height - 12}" font-size="12" text-anchor="middle">{tick}</text>')
    for number, (label, value, error, kind) in enumerate(bars):
        y = top + number * step + 8
        end = left + value * scale
        parts.append(f'<text class="text" x="{left - 10}" y="{y + 19}" font-size="13" text-anchor="end">{label}</text>')
        parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{value * scale:.1f}" height="28" rx="3"/>')
        parts.append(
            f'<line class="arrow" x1="{end - error * scale:.1f}" y1="{y + 14}" x2="{end + error * scale:.1f}" '
            f'y2="{y + 14}" stroke-width="2"/>'
        )
        parts.append(
            f'<text class="text" x="{end + error * scale + 8:.1f}" y="{y + 19}" font-size="14" font-weight="600">'
            f"{value:.2f}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


STEPS = [
    ("regenerate", "own answers", "answers.jsonl"),
    ("prepare", "CPU, once", "tokens, plan"),
    ("extract", "target, once", "hidden states"),
    ("train", "drafter, often", "checkpoints"),
    ("export", "", "drafter folder"),
    ("evaluate", "decodes for real", "acceptance length"),
]


def data_way() -> str:
    """The way of the data: verbs above, the files that they leave below."""
    gap, wide = 156, 132
    width, height = 24 + gap * len(STEPS), 220
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(" → ".join(f"{verb} leaves {left}" for verb, _, left in STEPS))}">',
        STYLE,
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for number, (verb, note, left) in enumerate(STEPS):
        x = 20 + number * gap
        middle = x + wide / 2
        kind = "best" if verb in ("extract", "train") else "other"
        parts += [
            f'<rect class="box" x="{x}" y="28" width="{wide}" height="54" rx="6"/>',
            f'<rect class="{kind}" x="{x}" y="28" width="5" height="54" rx="2"/>',
            f'<text class="text" x="{middle}" y="52" font-size="15" font-weight="600" text-anchor="middle">'
            f"{verb}</text>",
            f'<text class="soft" x="{middle}" y="71" font-size="12" text-anchor="middle">{note}</text>',
            f'<line class="arrow" x1="{middle}" y1="84" x2="{middle}" y2="124" marker-end="url(#tip)"/>',
            f'<rect class="box" x="{x}" y="128" width="{wide}" height="40" rx="20"/>',
            f'<text class="text" x="{middle}" y="153" font-size="13" text-anchor="middle">{left}</text>',
        ]
        if number + 1 < len(STEPS):
            parts.append(
                f'<path class="arrow" fill="none" d="M{x + wide} 148C{x + gap} 148 {x + wide} 55 {x + gap - 3} 55" '
                'marker-end="url(#tip)"/>'
            )
    parts.append(
        f'<text class="soft" x="{width / 2}" y="200" font-size="12" text-anchor="middle">Everything between two steps '
        "is files with checksums: each step resumes, and none needs the process of another.</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def benchmarks_page() -> str:
    """Every measured figure of docs/benchmarks, with its machine, versions and notes."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `docs/figures.py` from `docs/benchmarks/*.json`; nothing is typed by hand. How each was run stands",
        "in the file's `command`; [the lab log](lab-log.md) says what was expected and what was learnt.",
    ]
    for path in sorted((DOCS / "benchmarks").glob("*.json")):
        benchmark = json.loads(path.read_text())
        if not isinstance(benchmark, dict) or not isinstance(benchmark.get("results"), list):
            continue
        lines += ["", f"## {path.stem}", "", f"{benchmark.get('device', '?')}, {benchmark.get('date', '?')[:10]}"]
        versions = ", ".join(f"{name} {version}" for name, version in benchmark.get("versions", {}).items())
        lines += [f"({versions}).", "", "| key | value | unit | sides |", "| --- | ---: | --- | --- |"]
        for entry in benchmark["results"]:
            sides = ", ".join(f"{name}: {_figure(value)}" for name, value in (entry.get("sides") or {}).items())
            value, unit = _figure(entry.get("value")), entry.get("unit", "")
            lines.append(f"| `{entry['key']}` | {value} | {unit} | {sides} |")
        lines += ["", *[f"- {note}" for note in benchmark.get("notes") or []]]
    return "\n".join(lines).rstrip() + "\n"


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


FILES = {
    "images/smollm2_tau.svg": tau_chart,
    "images/data_way.svg": data_way,
}


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    check = parser.parse_args(arguments).check
    files = FILES if check else {**FILES, "benchmarks.md": benchmarks_page}
    differing = [
        name for name, make in files.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != make()
    ]
    for name in differing:
        if check:
            print(f"docs/{name} is not what the figures say: run python docs/figures.py")
        else:
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(files[name]())
    return 1 if check and differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
