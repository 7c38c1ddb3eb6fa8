"""Raw rows on their way from the reading process to the tokenising ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dflash_offline.errors import DFlashOfflineError


@dataclass(frozen=True)
class Chunk:
    """Some raw rows, cheap to send to another process.

    Attributes:
        origin: file or dataset they come from, for messages.
        numbers: row number of each, in the concatenation of all sources.
        lines: for JSONL, ``(line number from 1, bytes)`` of each row.
        table: for Parquet and datasets, the rows as an Arrow IPC stream.
        objects: for JSON arrays, the rows.
    """

    origin: str
    numbers: list[int]
    lines: list[tuple[int, bytes]] | None = None
    table: bytes | None = None
    objects: list[Any] | None = None

    @classmethod
    def from_table(cls, origin: str, numbers: list[int], table: pa.Table) -> Chunk:
        """A chunk of an Arrow table; the stream holds its rows only, where a pickled slice would hold all."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return cls(origin, numbers, table=sink.getvalue().to_pybytes())

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Row number and row (a dict when the row is well formed).

        Raises:
            DFlashOfflineError: a line is not JSON; the message names file and line.
        """
        if self.lines is not None:
            for number, (line_number, line) in zip(self.numbers, self.lines, strict=True):
                yield number, _parse_line(self.origin, line_number, line)
        elif self.table is not None:
            table = pa.ipc.open_stream(self.table).read_all()
            read = _arrow_reader(pa.struct(list(table.schema))) or (lambda row: row)
            yield from zip(self.numbers, map(read, table.to_pylist()), strict=True)
        else:
            yield from zip(self.numbers, self.objects or [], strict=True)


def _parse_line(origin: str, line_number: int, line: bytes) -> Any:
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf") if line_number == 1 else line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DFlashOfflineError(
            f"{origin}, line {line_number}: not valid JSON ({what}); the line begins {line[:60]!r}. "
            "Mend or remove that line: one row a line, nothing is skipped silently"
        ) from None


def _arrow_reader(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """How a value of this Arrow type becomes what the JSON would have been; None: it is that already.

    Arrow gives every struct all fields of its kind, so absent ones come back as None and are left out again; values
    of mixed types are stored as JSON text.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads if kind.extension_name == "arrow.json" else _arrow_reader(kind.storage_type)
    if pa.types.is_struct(kind):
        readers = {field.name: _arrow_reader(field.type) for field in kind}

        def read_struct(value: dict[str, Any]) -> dict[str, Any]:
            return {
                key: read(item) if (read := readers[key]) else item for key, item in value.items() if item is not None
            }

        return read_struct
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if read := _arrow_reader(kind.value_type):
            return lambda value: [None if item is None else read(item) for item in value]
    return None
