"""The report page of one run, or of several side by side, rendered from logs, manifests, receipts and evaluations.

Everything is inside one HTML file of some tens of kilobytes; charts are SVG, so it looks the same offline in ten years.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_offline.cache.files import remove_leftovers, write_atomic
from dflash_offline.errors import UsageError
from dflash_offline.report.cache_section import cache_cards, cache_table, error_table
from dflash_offline.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, line_chart
from dflash_offline.report.run_data import RunData, flatten


def write_report(runs: Path | Sequence[Path], out: Path | None = None, evaluation: Path | None = None) -> Path:
    """Write the HTML page of one run, or of several compared, and return its path.

    Args:
        runs: A run folder, or several.
        out: The page; default ``report.html`` in the (first) run folder.
        evaluation: JSON written by ``evaluate``, for one run; default ``evaluation.json`` in each run folder.

    Raises:
        UsageError: ``out`` is a folder.
        DFlashOfflineError: a folder holds no run log.
    """
    import jinja2

    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a folder: name the HTML file")
    paths = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(run) for run in runs]
    names = _names(paths)
    found = [
        RunData.read(path, evaluation if len(paths) == 1 else None, name)
        for path, name in zip(paths, names, strict=True)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html.jinja").render(
        title="DFlash drafter: " + names[0] if len(found) == 1 else f"{len(found)} DFlash drafters compared",
        runs=[{"name": run.name, "subtitle": _subtitle(run), "decodes": _decodes(run)} for run in found],
        tiles=_tiles(found[0]) if len(found) == 1 else [],
        comparison=_comparison(found) if len(found) > 1 else [],
        names=names,
        training=_cards(_training(found)),
        positions=_cards(_positions(found)),
        speed=_cards(_speed(found)),
        memory=[(_memory_name([run]), run.name, run.memory_words()) for run in found],
        counters=_side_by_side([run.counters() for run in found]),
        caches=_caches(found),
        differences=_differences(found),
        recipes=[(run.name, _rows(flatten(run.recipe))) for run in found],
        plot={"width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM},
        versions=_side_by_side([_versions(run) for run in found]),
    )
    out = out or paths[0] / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out.parent, out.name)
    write_atomic(out, page.encode("utf-8", "replace"))
    return out


def _names(paths: list[Path]) -> list[str]:
    """Folder names, with as many of the folders above as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    depth = next(n for n in range(1, 99) if len({p[-n:] for p in parts}) == len(set(parts)))
    return ["/".join(p[-depth:]) for p in parts]


def _subtitle(run: RunData) -> str:
    target = Path(run.cache.manifest.identity.target.model).name if run.cache is not None else ""
    start = run.start
    step = run.steps[-1].step if run.steps else 0
    progress = f"{run.state}, step {step:,} of {start.total_steps:,}" if start else run.state
    device = str(start.run.get("device", "")) if start else ""
    return " · ".join(part for part in (target, device, progress) if part)


def _facts(run: RunData) -> dict[str, str]:
    """The numbers that a reader looks for first."""
    facts: dict[str, str] = {}
    if (found := run.evaluation) is not None and found.get("acceptance_length") is not None:
        facts["acceptance length"] = f"{found['acceptance_length']:.2f}"
        if found.get("speed_up"):
            facts["speed-up over plain decoding"] = f"{found['speed_up']:.2f}×"
        lossless = found.get("lossless")
        facts["equal to plain greedy"] = "not checked" if lossless is None else "yes" if lossless else _near(found)
    if run.checks:
        facts["held-out loss"] = f"{run.checks[-1].loss:.3f}"
        facts["held-out accuracy"] = f"{run.checks[-1].accuracy:.3f}"
        facts["expected acceptance length"] = f"{run.checks[-1].expected_acceptance_length:.2f}"
    if run.steps:
        last = run.steps[-1]
        facts["training loss"] = f"{last.loss:.3f}"
        facts["steps"] = f"{last.step:,}"
        for key, name in (("tokens_per_second", "context tokens/s"), ("blocks_per_second", "draft blocks/s")):
            if (rate := _time_mean(run, key)) is not None:
                facts[name] = f"{rate:,.0f}"
        facts["anchors a token"] = f"{last.anchors_per_token:.2f}"
        if (share := _time_mean(run, "waiting_share")) is not None:
            facts["waiting for data"] = f"{share:.2%}"
    return facts


def _near(found: dict[str, Any]) -> str:
    share = found.get("identical_share") or 0.0
    return f"{share:.0%} of prompts" + (", rest near ties" if found.get("near_ties_only") else "")


def _time_mean(run: RunData, key: str) -> float | None:
    """Mean over the log's entries, weighted by their seconds."""
    pairs = [(e.run[key], e.run["seconds"]) for e in run.steps if e.run.get(key) is not None and e.run.get("seconds")]
    seconds = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / seconds if seconds else None


def _tiles(run: RunData) -> list[tuple[str, str]]:
    return list(_facts(run).items())


def _comparison(runs: list[RunData]) -> list[list[str]]:
    facts = [{"state": run.state, **_facts(run)} for run in runs]
    keys = list(dict.fromkeys(key for one in facts for key in one))
    return [[key, *(one.get(key, "–") for one in facts)] for key in keys]


# ---- charts ---------------------------------------------------------------------------------------------------------


def _cards(cards: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, chart) for name, chart in cards if chart is not None]


def _points(entries: list[Any], field: str, inside_run: bool = False) -> list[tuple[float, float]]:
    values = [(entry.step, entry.run.get(field) if inside_run else getattr(entry, field)) for entry in entries]
    return [(x, float(y)) for x, y in values if y is not None]


def _both(runs: list[RunData], field: str) -> list[Series]:
    """Training and held-out curves: two inks for one run; for several one ink a run, training pale."""
    if len(runs) == 1:
        return [
            Series("training", _points(runs[0].steps, field), 0),
            Series("held out", _points(runs[0].checks, field), 1, dots=True),
        ]
    training = [Series(f"{r.name}, training", _points(r.steps, field), i, faint=True) for i, r in enumerate(runs)]
    heldout = [Series(f"{r.name}, held out", _points(r.checks, field), i, dots=True) for i, r in enumerate(runs)]
    return training + heldout


def _each(runs: list[RunData], points: Callable[[RunData], list[tuple[float, float]]], dots: bool = False):
    return [Series(run.name, points(run), i, dots=dots) for i, run in enumerate(runs)]


def _training(runs: list[RunData]) -> list[tuple[str, Any]]:
    acceptance = "Expected acceptance length"
    return [
        ("Loss", line_chart("Loss", "step", _both(runs, "loss"), cut=True)),
        (acceptance, line_chart(acceptance, "step", _both(runs, "expected_acceptance_length"), y_label="tokens")),
        ("Accuracy of drafted tokens", line_chart("Accuracy", "step", _both(runs, "accuracy"), y_label="share")),
        (
            "Learning rate",
            line_chart("Learning rate", "step", _each(runs, lambda r: _points(r.steps, "learning_rate")), True),
        ),
        (
            "Gradient norm before clipping",
            line_chart(
                "Gradient norm", "step", _each(runs, lambda r: _points(r.steps, "gradient_norm")), True, cut=True
            ),
        ),
    ]


def _positions(runs: list[RunData]) -> list[tuple[str, Any]]:
    def heldout(run: RunData) -> list[tuple[float, float]]:
        source = run.checks or run.steps
        values = source[-1].accuracy_by_position if source else []
        return [(i, value) for i, value in enumerate(values, start=1) if value is not None]

    def decoding(run: RunData) -> list[tuple[float, float]]:
        values = (run.evaluation or {}).get("acceptance_by_position") or []
        return [(i, value) for i, value in enumerate(values, start=1) if value is not None]

    axis = "position in the block"
    measured = "held-out" if any(run.checks for run in runs) else "training"
    return [
        (
            f"Accuracy by position, {measured} anchors",
            line_chart("Accuracy by position", axis, _each(runs, heldout, True), True, "share"),
        ),
        (
            "Drafts 1 to this position all accepted in decoding",
            line_chart("Acceptance by position", axis, _each(runs, decoding, True), True, "share of rounds"),
        ),
    ]


def _speed(runs: list[RunData]) -> list[tuple[str, Any]]:
    def logged(key: str, scale: float = 1.0) -> list[Series]:
        return _each(runs, lambda run: [(x, y * scale) for x, y in _points(run.steps, key, True)])

    cards = [
        ("Context tokens a second", line_chart("Speed", "step", logged("tokens_per_second"), True, "tokens/s")),
        ("Draft blocks a second", line_chart("Blocks", "step", logged("blocks_per_second"), True, "blocks/s")),
        ("Waiting for data", line_chart("Waiting", "step", logged("waiting_share", 100), True, "% of the time")),
        (_memory_name(runs), line_chart("Memory", "step", logged("memory", 1e-9), True, "GB")),
    ]
    if len(runs) == 1:
        fills = [
            Series("tokens", _points(runs[0].steps, "token_fill")),
            Series("blocks", _points(runs[0].steps, "slot_fill")),
        ]
        cards.append(("How full the rows are", line_chart("Fill", "step", fills, True, "share")))
    return cards


def _memory_name(runs: list[RunData]) -> str:
    """A CPU run logs its process's peak, a GPU run what the allocator has reserved."""
    cpu = all(run.start is not None and run.start.run.get("device") == "cpu" for run in runs)
    return "Peak memory of the process" if cpu else "Reserved memory"


def _caches(runs: list[RunData]) -> list[dict[str, Any]]:
    """One entry a cache, with the runs that read it."""
    entries: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.cache is None:
            continue
        key = str(run.cache.path)
        if key not in entries:
            entries[key] = {
                "runs": [],
                "path": key,
                "table": cache_table(run.cache),
                "cards": _cards(cache_cards(run.cache)),
                "errors": error_table(run.cache),
            }
        entries[key]["runs"].append(run.name)
    return list(entries.values())


# ---- text -----------------------------------------------------------------------------------------------------------


def _decodes(run: RunData) -> list[dict[str, Any]]:
    """Decodes that have the form ``evaluate`` writes now; other ones, of older files, are left out."""
    decodes = (run.evaluation or {}).get("decodes") or []
    return [one for one in decodes if isinstance(one, dict) and isinstance(one.get("rounds"), list)]


def _side_by_side(columns: list[dict[str, Any]]) -> list[list[str]]:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return [[key, *(_cell(column[key]) if key in column else "–" for column in columns)] for key in keys]


def _differences(runs: list[RunData]) -> list[list[str]]:
    """Settings that are not the same in all runs."""
    if len(runs) < 2:
        return []
    rows = _side_by_side([flatten({k: v for k, v in run.recipe.items() if k != "run"}) for run in runs])
    return [row for row in rows if len(set(row[1:])) > 1]


def _versions(run: RunData) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if run.start is not None:
        counters = run.counters()
        found |= {k: v for k, v in flatten(run.start.run, "training: ").items() if k[10:] not in _bare(counters)}
    if run.cache is not None:
        found |= flatten(run.cache.manifest.provenance, "cache: ")
    found |= flatten((run.evaluation or {}).get("versions") or {}, "evaluation: ")
    return found


def _bare(counters: dict[str, Any]) -> set[str]:
    return {key.removeprefix("run.") for key in counters}


def _rows(data: dict[str, Any]) -> list[list[str]]:
    return [[key, _cell(value)] for key, value in data.items()]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
