"""What the report knows of one run, read from its folder, its cache and its evaluation; missing parts are None."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.cache.files import read_json_object
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.train.metrics import EndEntry, EvaluateEntry, StartEntry, StepEntry, read_run_log
from dflash_offline.train.run_folder import read_run_recipe, run_status

if TYPE_CHECKING:
    from dflash_offline.cache import Cache

logger = logging.getLogger(__name__)
EVALUATION = "evaluation.json"
MOST_RECEIPTS = 512
FLAT_SHARE = 0.01
_COUNTER = re.compile(r"compil|counter|graph|autograd|dynamo|inductor|cache_(miss|hit|bypass)", re.I)


@dataclass(frozen=True)
class RunData:
    """One run as the report shows it.

    Attributes:
        path: The run folder.
        name: In titles and legends.
        recipe: Content of ``recipe.json``.
        entries: The run log.
        state: ``finished``, ``running`` or ``interrupted``.
        cache: Its cache, or None where it was moved or deleted.
        evaluation: What ``evaluate`` wrote, or None.
    """

    path: Path
    name: str
    recipe: dict[str, Any]
    entries: list[Any]
    state: str
    cache: Cache | None
    evaluation: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path, evaluation: Path | None = None, name: str | None = None) -> RunData:
        """Read a run folder.

        Raises:
            DFlashOfflineError: it holds no run log, or the evaluation is not JSON.
        """
        entries = read_run_log(path)
        recipe = _recipe(path)
        file = evaluation or path / EVALUATION
        evaluated = read_json_object(file, "run `dflash-offline evaluate` again") if file.exists() else None
        finished = any(isinstance(entry, EndEntry) for entry in entries)
        try:
            state = "finished" if finished else run_status(path)["state"]
        except (DFlashOfflineError, KeyError, OSError):
            state = "finished" if finished else "not finished"
        return cls(path, name or path.name, recipe, entries, state, _open_cache(recipe), evaluated)

    def _of(self, kind: type) -> list[Any]:
        return [entry for entry in self.entries if isinstance(entry, kind)]

    @property
    def steps(self) -> list[StepEntry]:
        """Its step entries."""
        return self._of(StepEntry)

    @property
    def checks(self) -> list[EvaluateEntry]:
        """Its evaluations on held-out anchors."""
        return self._of(EvaluateEntry)

    @property
    def start(self) -> StartEntry | None:
        """The last start."""
        starts = self._of(StartEntry)
        return starts[-1] if starts else None

    def memory_words(self) -> str:
        """Whether memory was flat since the last start, its first entry left out (allocations of the first steps)."""
        place = max((i for i, entry in enumerate(self.entries) if isinstance(entry, StartEntry)), default=0)
        values = [
            (entry.step, entry.run["memory"])
            for entry in self.entries[place:]
            if isinstance(entry, StepEntry) and entry.run.get("memory") is not None
        ][1:]
        if len(values) < 2:
            return "too few entries to tell whether it is flat"
        (first, low), (last, high) = values[0], max(values, key=lambda item: item[1])
        gain, share = high - low, (high - low) / max(low, 1)
        if gain <= 0:
            return f"flat: {low / 1e9:,.3f} GB from step {first:,} to step {values[-1][0]:,}"
        word = "nearly flat" if share <= FLAT_SHARE else "not flat"
        most = next(step for step, value in values if value - low >= 0.99 * gain)
        by = f", 99 % of it by step {most:,}" if most < last else ""
        return f"{word}: {gain / 1e6:,.1f} MB ({share:.1%}) more at step {last:,} than at step {first:,}{by}"

    def counters(self) -> dict[str, Any]:
        """Compile counters of the last start, whatever names they have there."""
        if self.start is None:
            return {}
        flat = flatten(self.start.model_dump(exclude={"kind"}))
        return {key: value for key, value in flat.items() if _COUNTER.search(key)}


def _recipe(run: Path) -> dict[str, Any]:
    try:
        return read_run_recipe(run)
    except DFlashOfflineError as error:  # the log tells most of it
        logger.warning("the report leaves out the settings: %s", error)
        return {}


def _open_cache(recipe: dict[str, Any]) -> Cache | None:
    from dflash_offline.cache import Cache

    path = recipe.get("cache")
    try:
        return Cache.open(Path(path)) if path else None
    except (DFlashOfflineError, OSError) as error:  # the run's own part is still shown
        logger.warning("the report leaves out the cache: %s", error)
        return None


def layer_errors(cache: Cache) -> tuple[list[dict[str, float]], int]:
    """Statistics of each kept layer over the receipts, means weighted by tokens, and how many receipts were read.

    Of a cache with many shards ``MOST_RECEIPTS`` evenly spread ones are read.
    """
    from dflash_offline.cache.files import DamagedFile

    done = sorted(cache.book.summary()["shard"].to_pylist())
    chosen = (
        done if len(done) <= MOST_RECEIPTS else [done[i * len(done) // MOST_RECEIPTS] for i in range(MOST_RECEIPTS)]
    )
    receipts = []
    for shard in chosen:
        try:
            receipts.append(cache.book.get(shard))
        except DamagedFile:  # queued again meanwhile
            continue
    receipts = [one for one in receipts if one.layers and one.tokens]
    tokens = sum(one.tokens for one in receipts)
    rows = []
    for place in range(len(receipts[0].layers) if receipts else 0):
        layers = [(one.layers[place], one.tokens) for one in receipts]
        row = {
            name: sum(getattr(layer, name) * count for layer, count in layers) / tokens
            for name in ("error_mean", "error_mean_without_peaks")
        }
        for name in ("error_worst", "error_worst_without_peaks", "abs_max"):
            row[name] = max(getattr(layer, name) for layer, _ in layers)
        rows.append(row)
    return rows, len(receipts)


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted keys; None is left out."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
