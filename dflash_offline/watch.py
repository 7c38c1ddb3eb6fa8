"""A live view of a running stage, from its files alone: another terminal, another host on the same disk, or a log.

On a terminal the view is redrawn in place; elsewhere (a pipe, a batch log) each refresh that brings news is one plain
line. The watch ends when the job has ended: finished, stopped or interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.errors import UsageError
from dflash_offline.extract.progress import duration, quantity

if TYPE_CHECKING:
    from rich.console import Console, Group

ENDED = {"finished", "interrupted", "complete", "stopped"}
_BAR = 40


def watch(
    path: Path,
    interval: float = 2.0,
    console: Console | None = None,
    refreshes: int | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Show a cache's extraction or a run's training until it has ended.

    Args:
        path: A cache or a run folder.
        interval: Seconds between refreshes.
        console: Where to; default: standard output.
        refreshes: At most so many; default: without end.
        clock: Unix time.
        sleep: Waits between refreshes.

    Returns:
        The last status, as ``status --json`` gives it.

    Raises:
        UsageError: the folder is neither, or the interval is not above 0.
    """
    from rich.console import Console
    from rich.live import Live

    if interval <= 0:
        raise UsageError(f"--interval {interval:g}: give seconds above 0")
    console = console or Console()
    read = read_status(path)
    status = read(clock())
    count = 1
    if not console.is_terminal:
        said = ""
        while True:
            if (line := status_line(status)) != said:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                said = line
            if stage_of(status) in ENDED or count == refreshes:
                return status
            sleep(interval)
            status, count = read(clock()), count + 1
    with Live(view(status, clock()), console=console, auto_refresh=False) as live:
        while stage_of(status) not in ENDED and count != refreshes:
            sleep(interval)
            status, count = read(clock()), count + 1
            live.update(view(status, clock()), refresh=True)
    return status


def show(path: Path, console: Console | None = None, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Print the view once; arguments, return value and errors as those of :func:`watch`."""
    from rich.console import Console

    console = console or Console()
    status = read_status(path)(now := clock())
    console.print(view(status, now), soft_wrap=True)
    return status


def read_status(path: Path) -> Callable[[float], dict[str, Any]]:
    """How to read the status of this folder at a time (unix seconds)."""
    if (path / "recipe.json").is_file():
        from dflash_offline.train.run_folder import run_status

        return lambda _now: run_status(path)
    from dflash_offline.cache.status import cache_status

    return lambda now: cache_status(path, now)


def stage_of(status: dict[str, Any]) -> str:
    """``running``, ``finished`` or ``interrupted`` of a run; ``preparing``, ``extracting``, … of a cache.

    A cache that is prepared and held by nobody has not begun: the watch waits for it. One that is being prepared by
    nobody has been stopped.
    """
    if "state" in status:
        return status["state"]
    if status["stage"] == "preparing" and not status["running"]:
        return "stopped"
    return status["stage"]


def status_line(status: dict[str, Any]) -> str:
    """A status in one line."""
    return " · ".join([stage_of(status), *(f"{name} {text}" for name, text in _facts(status))])


def view(status: dict[str, Any], now: float) -> Group:
    """A status as the live view shows it: title, bar, numbers, and a table of workers."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    stage = stage_of(status)
    done, total = _progress(status)
    colour = {"finished": "green", "complete": "green", "interrupted": "yellow", "stopped": "yellow"}.get(stage, "cyan")
    title = Text.assemble((stage, f"bold {colour}"), "  ", status.get("run") or status["cache"])
    parts: list[Any] = [title]
    if "encoding" in status:
        layers = ", ".join(map(str, status["target_layer_ids"]))
        parts.append(Text(f"{status['target']}, layers {layers}, {status['encoding']}", "dim"))
    if total:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=total, completed=done, width=_BAR), f"{100 * done / total:.1f} %")
        parts.append(bar)
    numbers = Table.grid(padding=(0, 2))
    for name, text in _facts(status):
        numbers.add_row(Text(name, "dim"), Text(text))
    parts.append(numbers)
    if workers := status.get("workers"):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("worker", "shards", "tokens/s", "last shard"):
            table.add_column(name, justify="left" if name == "worker" else "right")
        for name, one in sorted(workers.items()):
            rate, last = one["tokens_per_second"], one["last_finished_at"]
            ago = f"{duration(max(now - last, 0))} ago" if last else "–"
            table.add_row(Text(name), f"{one['shards']:,}", quantity(rate) if rate else "–", ago)
        parts.append(table)
    for failure in status.get("failures", [])[-3:]:
        parts.append(Text(f"{failure['file']}: {failure['error']}", "red"))
    if damage := status.get("state_damage"):
        parts.append(Text(damage, "red"))
    for holder in status.get("running") or []:
        parts.append(Text(f"{holder['role']} is running: process {holder['pid']} on {holder['host']}", "dim"))
    parts.append(Text(time.strftime("%H:%M:%S", time.localtime(now)), "dim"))
    return Group(*parts)


def _progress(status: dict[str, Any]) -> tuple[int, int]:
    if "state" in status:
        return status["step"], status["total_steps"]
    tokens = status.get("tokens")
    return (tokens["done"], tokens["total"]) if tokens else (0, 0)


def _facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    if "state" in status:
        return _run_facts(status)
    return _cache_facts(status) if "shards" in status else []


def _run_facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [("step", f"{status['step']:,}/{status['total_steps']:,}")]
    if status.get("loss") is not None:
        facts += [
            ("loss", f"{status['loss']:.3f}"),
            ("accuracy", f"{status['accuracy']:.3f}"),
            ("expected acceptance length", f"{status['expected_acceptance_length']:.2f}"),
        ]
    if status.get("tokens_per_second") is not None:
        facts.append(("tokens/s", quantity(status["tokens_per_second"])))
    if status.get("heldout_loss") is not None:
        held = f"loss {status['heldout_loss']:.3f}, {status['heldout_expected_acceptance_length']:.2f} accepted"
        facts.append(("held out", f"{held} at step {status['heldout_step']:,}"))
    if status.get("checkpoint"):
        facts.append(("checkpoint", Path(status["checkpoint"]).name))
    return facts


def _cache_facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    shards, tokens, size, rate = (status[key] for key in ("shards", "tokens", "bytes", "tokens_per_second"))
    facts = [
        ("shards", f"{shards['done']:,}/{shards['total']:,}"),
        ("tokens", f"{quantity(tokens['done'])}/{quantity(tokens['total'])}"),
    ]
    if rate["recent"] or rate["mean"]:
        now = f"{quantity(rate['recent'])} now, " if rate["recent"] else ""
        facts.append(("tokens/s", f"{now}{quantity(rate['mean'] or 0)} mean"))
    if size["ratio_to_bf16"]:
        facts.append(
            ("written", f"{size['hidden_states'] / 1e9:.3g} GB, {size['ratio_to_bf16']:.2f} times smaller than bf16")
        )
        facts.append(("disk", f"{size['expected_in_all'] / 1e9:.3g} GB in all, {size['free_on_disk'] / 1e9:.3g} free"))
    if status["eta_seconds"] is not None:
        facts.append(("left", duration(status["eta_seconds"])))
    for name, count in (("dropped", status["samples"]["dropped"]), ("set aside", shards["set_aside"])):
        if count:
            facts.append((name, f"{count:,}"))
    if status["failures"]:
        facts.append(("failures", f"{len(status['failures']):,}"))
    return facts
