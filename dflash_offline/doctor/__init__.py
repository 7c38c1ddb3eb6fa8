"""``doctor``: check what a recipe needs before hours are spent on it, and say how to mend each finding.

Facts are gathered first (`facts`), rules over them are pure functions (`rules`), so that a bug report's JSON can be
judged on another machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_offline.doctor.facts import Facts, gather_facts
from dflash_offline.doctor.rules import Finding, findings

__all__ = ["Facts", "Finding", "diagnose", "findings", "gather_facts"]

MARKS = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


def diagnose(recipe: str | None = None, cache: Path | None = None, compare: Path | None = None) -> dict[str, Any]:
    """Findings about this machine for a recipe and a cache, the environment record, and what changed since another.

    Args:
        recipe: an extract.toml, a train.toml, their folder, or a shipped name.
        cache: a cache folder; default: the recipe's.
        compare: a run folder, a cache, or a file of an earlier record.

    Returns:
        ``ok`` (no error was found), ``findings``, ``environment`` and, with ``compare``, ``changes``.

    Raises:
        UsageError: the recipe is not valid, or there is nothing to compare with.
    """
    from dflash_offline.environment import environment_differences, read_environment

    then = read_environment(compare) if compare is not None else None
    facts = gather_facts(recipe, cache)
    found = findings(facts)
    answer: dict[str, Any] = {
        "ok": all(finding.level != "error" for finding in found),
        "findings": [finding.model_dump() for finding in found],
        "environment": facts.environment.model_dump(),
    }
    if then is not None:
        answer["changes"] = environment_differences(then, facts.environment)
        answer["compared_with"] = then.recorded_at
    return answer


def report_lines(answer: dict[str, Any]) -> list[str]:
    """The answer of :func:`diagnose` for people, one finding a line and how to mend it below."""
    lines = []
    for finding in answer["findings"]:
        lines.append(f"{MARKS[finding['level']]} {finding['check']}: {finding['message']}")
        if finding["mend"]:
            lines.append(f"        mend: {finding['mend']}")
    if "changes" in answer:
        lines.append(f"since {answer['compared_with']}: " + ("no changes" if not answer["changes"] else ""))
        lines += [f"  {line}" for line in answer["changes"]]
    levels = [finding["level"] for finding in answer["findings"]]
    lines.append(
        f"{levels.count('error')} errors, {levels.count('warning')} warnings, {levels.count('ok')} checks fine"
    )
    return lines
