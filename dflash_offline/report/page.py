"""The report of a training run, rendered from its log, the cache's manifest and receipts, and an evaluation.

Everything is inside one HTML file of some tens of kilobytes; charts are SVG, so it looks the same offline in ten years.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.report.charts import Series, bar_chart, line_chart
from dflash_offline.train.metrics import EndEntry, EvaluateEntry, StartEntry, StepEntry, read_run_log

if TYPE_CHECKING:
    from dflash_offline.cache import Cache


def write_report(run: Path, out: Path | None = None, evaluation: Path | None = None) -> Path:
    """Write the HTML page of a run and return its path.

    Args:
        run: The run folder.
        out: The page; default ``report.html`` in the run folder.
        evaluation: JSON written by ``evaluate``; default ``evaluation.json`` in the run folder, if there is one.

    Raises:
        DFlashOfflineError: the folder holds no run log.
    """
    import jinja2

    entries = read_run_log(run)
    recipe = json.loads((run / "recipe.json").read_text())
    evaluation = evaluation or run / "evaluation.json"
    evaluated = json.loads(evaluation.read_text()) if evaluation.is_file() else None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    cache = _open_cache(recipe)
    page = environment.get_template("page.html.jinja").render(
        title=f"DFlash drafter: {run.name}",
        subtitle=_subtitle(entries, cache),
        tiles=_tiles(entries, cache, evaluated),
        sections=_sections(entries, cache, evaluated),
        decodes=(evaluated or {}).get("decodes", []),
        tables=_tables(entries, recipe, cache, evaluated),
    )
    out = out or run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".tmp-{out.name}")
    temporary.write_text(page)
    os.replace(temporary, out)
    return out


def _open_cache(recipe: dict[str, Any]) -> Cache | None:
    from dflash_offline.cache import Cache
    from dflash_offline.errors import DFlashOfflineError

    path = recipe.get("recipe", recipe).get("cache")
    try:
        return Cache.open(Path(path)) if path else None
    except DFlashOfflineError:  # the cache may have been moved or deleted since; the run's own part is still shown
        return None


def _of(entries: list[Any], kind: type) -> list[Any]:
    return [entry for entry in entries if isinstance(entry, kind)]


def _subtitle(entries: list[Any], cache: Cache | None) -> str:
    starts = _of(entries, StartEntry)
    device = starts[-1].run.get("device", "") if starts else ""
    target = cache.manifest.identity.target.model if cache is not None else ""
    return " · ".join(
        part for part in (Path(target).name, device, "finished" if _of(entries, EndEntry) else "") if part
    )


def _tiles(entries: list[Any], cache: Cache | None, evaluated: dict[str, Any] | None) -> list[tuple[str, str]]:
    steps, checks = _of(entries, StepEntry), _of(entries, EvaluateEntry)
    tiles = []
    if evaluated:
        tiles.append(("acceptance length", f"{evaluated['acceptance_length']:.2f}"))
        if evaluated.get("speed_up"):
            tiles.append(("speed-up over plain", f"{evaluated['speed_up']:.2f}×"))
        tiles.append(("equal to plain greedy", "yes" if evaluated.get("lossless") else "see table"))
    if checks:
        tiles.append(("held-out loss", f"{checks[-1].loss:.3f}"))
        tiles.append(("expected acceptance length", f"{checks[-1].expected_acceptance_length:.2f}"))
    if steps:
        tiles.append(("steps", f"{steps[-1].step:,}"))
        if rate := steps[-1].run.get("tokens_per_second"):
            tiles.append(("context tokens/s", f"{rate:,.0f}"))
    if cache is not None:
        tiles.append(("samples cached", f"{cache.manifest.layout.num_samples:,}"))
    return tiles


def _sections(entries: list[Any], cache: Cache | None, evaluated: dict[str, Any] | None) -> list[tuple[str, list]]:
    steps, checks = _of(entries, StepEntry), _of(entries, EvaluateEntry)

    def curve(name: str, source: list[Any], field: str, inside_run: bool = False) -> Series:
        values = [(e.step, (e.run if inside_run else e.model_dump()).get(field)) for e in source]
        return Series(name, [(x, float(y)) for x, y in values if y is not None])

    training = [
        ("Loss", line_chart("Loss", "step", [curve("training", steps, "loss"), curve("held out", checks, "loss")])),
        (
            "Expected acceptance length",
            line_chart(
                "Expected acceptance length",
                "step",
                [
                    curve("training", steps, "expected_acceptance_length"),
                    curve("held out", checks, "expected_acceptance_length"),
                ],
            ),
        ),
        ("Learning rate", line_chart("Learning rate", "step", [curve("learning rate", steps, "learning_rate")], True)),
        (
            "Gradient norm",
            line_chart("Gradient norm", "step", [curve("before clipping", steps, "gradient_norm")], True),
        ),
    ]
    if checks:
        by_position = [(str(i), value) for i, value in enumerate(checks[-1].accuracy_by_position, start=1)]
        training.append(
            (
                "Held-out accuracy by position in the block",
                bar_chart("Accuracy by position", "offset", [(k, v) for k, v in by_position if v is not None]),
            )
        )
    if evaluated and evaluated.get("acceptance_by_position"):
        bars = [(str(i), value) for i, value in enumerate(evaluated["acceptance_by_position"], start=1)]
        training.append(
            ("Share of rounds that accepted this position", bar_chart("Acceptance by position", "offset", bars))
        )
    machine = [
        ("Context tokens per second", _run_chart(curve, steps, "tokens_per_second", "context tokens/s")),
        ("Share of time waiting for data", _run_chart(curve, steps, "waiting_share", "share")),
        ("Reserved memory, bytes", _run_chart(curve, steps, "memory", "bytes")),
        (
            "How full the rows are",
            line_chart(
                "Fill", "step", [curve("tokens", steps, "token_fill"), curve("blocks", steps, "slot_fill")], zero=True
            ),
        ),
    ]
    sections = [("Training", training), ("Machine", machine)]
    if cache is not None:
        sections.append(("Cache", _cache_charts(cache)))
    return [(heading, [(name, chart) for name, chart in cards if chart is not None]) for heading, cards in sections]


def _run_chart(curve, steps: list[Any], field: str, name: str):
    return line_chart(name, "step", [curve(name, steps, field, True)], zero=True)


def _cache_charts(cache: Cache) -> list[tuple[str, Any]]:
    import numpy as np

    lengths = np.asarray(cache.samples.length)
    edges = np.unique(np.linspace(0, lengths.max() + 1, 25).astype(int))
    counts, edges = np.histogram(lengths, bins=edges)
    cards = [
        (
            "Length of samples, tokens",
            bar_chart("Lengths", "tokens", [(f"{e}", int(c)) for e, c in zip(edges, counts, strict=False)]),
        )
    ]
    receipts = list(cache.receipts().values())
    if receipts:
        errors = np.array([[layer.error_mean for layer in one.layers] for one in receipts]).mean(0)
        names = [str(i) for i in cache.manifest.identity.target_layer_ids]
        if errors.any():
            cards.append(
                (
                    "Encoding error by layer, relative L2",
                    bar_chart("Encoding error", "target layer", list(zip(names, errors.tolist(), strict=False))),
                )
            )
    return cards


def _tables(
    entries: list[Any], recipe: dict[str, Any], cache: Cache | None, evaluated: dict[str, Any] | None
) -> list[tuple[str, list[list[str]]]]:
    tables = []
    if evaluated:
        kept = {k: v for k, v in evaluated.items() if not isinstance(v, list | dict)}
        tables.append(("Evaluation", [[k.replace("_", " "), _cell(v)] for k, v in kept.items()]))
    if cache is not None:
        identity = cache.manifest.identity.model_dump()
        tables.append(("Cache", [["path", str(cache.path)], *_flat(identity)]))
    tables.append(("Recipe", _flat(recipe)))
    starts = _of(entries, StartEntry)
    if starts:
        tables.append(("Last start", _flat(starts[-1].model_dump(exclude={"kind"}))))
    return tables


def _flat(data: dict[str, Any], prefix: str = "") -> list[list[str]]:
    rows = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows.extend(_flat(value, f"{name}."))
        elif value is not None:
            rows.append([name, _cell(value)])
    return rows


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
