"""From conversations in any supported shape to the same conversations answered by the target; resumable anywhere."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_offline.config import DataConfig, TargetConfig
from dflash_offline.conversations.rows import RowDropped, RowReader
from dflash_offline.conversations.sources import (
    hash_texts,
    iterate_chunks,
    open_sources,
    parse_slice,
    selected_rows,
)
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError
from dflash_offline.extract.signals import StopSignals
from dflash_offline.regenerate.journal import Journal
from dflash_offline.regenerate.rewrite import Rewrite, read_conversation
from dflash_offline.regenerate.settings import AnswerSettings, FetchSettings, shaping_settings

logger = logging.getLogger(__name__)

FAILED = "no-answer"


def regenerate(
    data: DataConfig,
    out: Path | str,
    *,
    answers: AnswerSettings | None = None,
    fetch: FetchSettings | None = None,
    target: TargetConfig | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Have the target write every assistant turn of a corpus anew; the same call goes on where it stopped.

    Args:
        data: the corpus, as in a recipe; ``source``, ``rows``, ``format``, ``columns`` and hub settings are used.
        out: a ``.jsonl`` file that ``data.source`` of a recipe can name: a row a line, in the order of the source.
        answers: model, sampling, lengths.
        fetch: servers, concurrency, retries. With ``servers`` the answers come from there.
        target: without servers, the target to load with transformers.
        progress: show a progress bar.

    Returns:
        ``out``, ``rows`` (selected), ``answered`` and ``dropped`` (of all starts), ``reasons`` (of the dropped),
        ``failed`` (no answer came; the same call tries them again), ``cut_off`` (answers that reached max_tokens, of
        this call), ``completion_tokens`` and ``seconds`` (of this call).

    Raises:
        UsageError: neither or both of servers and target, or ``out`` was made with other settings.
        DFlashOfflineError: the servers stopped answering or refuse everything, or more rows than
            ``fetch.max_dropped_share`` gave no answer.
        Interrupted: a signal came; the same call goes on.
    """
    answers, fetch, out = answers or AnswerSettings(), fetch or FetchSettings(), Path(out)
    if bool(fetch.servers) == (target is not None):
        raise UsageError("give either a server (--server URL) or a target to load here (--target MODEL)")
    api_key = os.environ.get(fetch.api_key_env) or None
    if target is not None:
        if answers.extra_body:
            raise UsageError("--extra-body is for servers: a target loaded here does not know it")
        answers = answers.model_copy(update={"model": answers.model or _target_name(target)})
    else:
        _require_client()
        if answers.model is None:
            from dflash_offline.regenerate.server import served_model

            answers = answers.model_copy(update={"model": served_model(fetch, api_key)})
    sources = open_sources(data)
    wanted = selected_rows(parse_slice(data.rows), sum(source.count() for source in sources))
    if not len(wanted):
        raise UsageError("data.rows selects no row of the source")
    content = hash_texts([source.content_sha256() for source in sources])
    backend = "server" if target is None else f"transformers, {target.dtype}"
    began = time.monotonic()
    with StopSignals() as signals, Journal(out, shaping_settings(data, content, answers, backend)) as journal:
        state = _State(journal, answers, fetch, signals, len(wanted), progress)
        work = _conversations(data, sources, wanted, state)
        with state.bar:
            if target is None:
                asyncio.run(_from_servers(work, state, api_key))
            else:
                _from_target(work, state, target)
        if signals.count:
            raise Interrupted(
                f"{len(journal.places):,} of {len(wanted):,} rows are answered; run the same command again to go on"
            )
        summary = state.summary(out, time.monotonic() - began)
        if not state.failed:
            journal.finish({key: value for key, value in summary.items() if key not in ("out", "seconds")})
    _judge(summary, fetch, state.last_failure, journal.dropped_path)
    return summary


class _State:
    """Counts of one call, and the journal they belong to."""

    def __init__(
        self,
        journal: Journal,
        answers: AnswerSettings,
        fetch: FetchSettings,
        signals: StopSignals,
        rows: int,
        progress: bool,
    ) -> None:
        from tqdm import tqdm

        self.journal, self.answers, self.fetch, self.signals = journal, answers, fetch, signals
        self.rows = rows
        self.failed = self.failed_in_a_row = self.cut_off = self.completion_tokens = 0
        self.last_failure = ""
        self.bar = tqdm(total=rows, desc="regenerate", unit="row", disable=not progress, file=sys.stderr)
        self.bar.update(len(journal.places) + len(journal.dropped))

    @property
    def stopping(self) -> bool:
        return self.signals.count > 0

    def finish(self, item: Rewrite) -> None:
        self.journal.add(item.result(str(self.answers.model)))
        self.failed_in_a_row = 0
        self.cut_off += "length" in item.finish_reasons
        self.completion_tokens += item.completion_tokens
        self.bar.update(1)

    def drop(self, row: int, row_id: str | None, drop: RowDropped) -> None:
        self.journal.drop(row, row_id, drop.reason, drop.detail)
        self.bar.update(1)

    def fail(self, error: Exception) -> None:
        """Count a row without an answer.

        Raises:
            DFlashOfflineError: so many failed one after another that the servers must be gone.
        """
        self.failed += 1
        self.failed_in_a_row += 1
        self.last_failure = str(error)
        if self.failed_in_a_row >= self.fetch.give_up_after:
            raise DFlashOfflineError(
                f"{self.failed_in_a_row} rows one after another got no answer; the last: {error}\n"
                f"  {len(self.journal.places):,} rows are kept: bring the server back and run the same command again"
            )

    def summary(self, out: Path, seconds: float) -> dict[str, Any]:
        return {
            "out": str(out),
            "model": self.answers.model,
            "rows": self.rows,
            "answered": len(self.journal.places),
            "dropped": len(self.journal.dropped),
            "reasons": dict(Counter(self.journal.dropped.values()).most_common()),
            "failed": self.failed,
            "cut_off": self.cut_off,
            "completion_tokens": self.completion_tokens,
            "seconds": round(seconds, 3),
        }


def _conversations(data: DataConfig, sources: Any, wanted: range, state: _State) -> Iterator[Rewrite]:
    """Rows that still need answers; unusable ones are dropped on the way."""
    reader = RowReader.from_config(data)
    for chunk in iterate_chunks(sources, wanted):
        for number, row in chunk.rows():
            if state.journal.settled(number):
                continue
            try:
                conversation = read_conversation(reader, row)
            except RowDropped as drop:
                state.drop(number, reader.row_id(row), drop)
                continue
            yield Rewrite(number, reader.row_id(row), conversation, state.answers.on_length)


async def _from_servers(work: Iterator[Rewrite], state: _State, api_key: str | None) -> None:
    """Answer every conversation, ``concurrency`` of them at once; on a signal those in flight are given up."""
    from dflash_offline.regenerate.server import AnswerFailed, ChatServers

    async def rewrite(item: Rewrite, servers: ChatServers) -> None:
        try:
            while (messages := item.next_request()) is not None:
                item.accept(await servers.answer(item.row, item.turn, messages, item.source.tools))
        except RowDropped as drop:
            state.drop(item.row, item.row_id, drop)
        except AnswerFailed as error:
            state.fail(error)
        else:
            state.finish(item)

    async with ChatServers(state.answers, state.fetch, api_key) as servers:
        running: set[asyncio.Task[None]] = set()
        try:
            more = True
            while (more or running) and not state.stopping:
                while more and len(running) < state.fetch.concurrency:
                    item = next(work, None)
                    more = item is not None
                    if item is not None:
                        running.add(asyncio.create_task(rewrite(item, servers)))
                if running:
                    done, running = await asyncio.wait(running, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _from_target(work: Iterator[Rewrite], state: _State, target: TargetConfig) -> None:
    """Answer with a target loaded here; batches are refilled turn by turn and kept of one size."""
    from dflash_offline.regenerate.local import LocalTarget

    item = next(work, None)
    if item is None:
        return  # nothing left: the target need not be loaded
    local = LocalTarget(target, state.answers)
    waiting = [item]
    while not state.stopping:
        while len(waiting) < state.fetch.concurrency and (item := next(work, None)) is not None:
            waiting.append(item)
        if not waiting:
            return
        going = []
        for item, answer in zip(waiting, local.answer(waiting), strict=True):
            try:
                if isinstance(answer, RowDropped):
                    raise answer
                item.accept(answer)
            except RowDropped as drop:
                state.drop(item.row, item.row_id, drop)
                continue
            if item.next_request() is None:
                state.finish(item)
            else:
                going.append(item)
        waiting = going


def _judge(summary: dict[str, Any], fetch: FetchSettings, last_failure: str, dropped_path: Path) -> None:
    if summary["failed"]:
        raise DFlashOfflineError(
            f"{summary['failed']:,} of {summary['rows']:,} rows got no answer ({last_failure}); the others are in "
            f"{summary['out']}. Run the same command again: it asks for the missing ones only"
        )
    share = summary["dropped"] / summary["rows"]
    if share > fetch.max_dropped_share or not summary["answered"]:
        raise DFlashOfflineError(
            f"{summary['dropped']:,} of {summary['rows']:,} rows were dropped ({summary['reasons']}), more than "
            f"--max-dropped-share {fetch.max_dropped_share}; {dropped_path} says why of each. Mend the data or the "
            "settings, or raise the limit"
        )


def _target_name(target: TargetConfig) -> str:
    path = Path(target.model).expanduser()
    return path.resolve().name if path.exists() else target.model


def _require_client() -> None:
    import importlib.util

    if importlib.util.find_spec("httpx2") is None:
        raise UsageError("asking a server needs the package httpx2: pip install 'dflash-offline[regenerate]'")
