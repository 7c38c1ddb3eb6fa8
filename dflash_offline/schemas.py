"""JSON Schemas of every file that is written and read, generated from the models that write and read them.

python -m dflash_offline.schemas           writes schemas/*.schema.json
python -m dflash_offline.schemas --check   exits with 1 where a file is not what the code says
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from pydantic import TypeAdapter

MODELS = {
    "extract": ("dflash_offline.config", "ExtractRecipe"),
    "train": ("dflash_offline.config", "TrainRecipe"),
    "manifest": ("dflash_offline.cache.manifest", "Manifest"),
    "receipt": ("dflash_offline.cache.receipts", "Receipt"),
    "state": ("dflash_offline.cache.state", "State"),
    "environment": ("dflash_offline.environment", "Environment"),
    "run-log-entry": ("dflash_offline.train.metrics", "RunLogEntry"),
    "order-wave": ("dflash_offline.train.order_log", "Wave"),
}


def schema_files() -> dict[str, str]:
    """Content of every schema by file name."""
    files = {}
    for name, (module, attribute) in MODELS.items():
        kind = getattr(importlib.import_module(module), attribute)
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(kind).json_schema()}
        files[f"{name}.schema.json"] = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return files


def schemas_folder() -> Path:
    """Folder of the schemas: inside the package in a wheel, beside it in a checkout."""
    inside = Path(__file__).parent / "_data" / "schemas"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "schemas"


def out_of_step(folder: Path) -> list[str]:
    """Names of schemas in ``folder`` that are missing or not what the code says."""
    return [
        name
        for name, content in schema_files().items()
        if not (folder / name).is_file() or (folder / name).read_text() != content
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the schemas; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("--folder", type=Path, default=schemas_folder())
    options = parser.parse_args(arguments)
    if options.check:
        differing = out_of_step(options.folder)
        for name in differing:
            print(f"{name} is not what the code says: run `make schemas`")
        return 1 if differing else 0
    options.folder.mkdir(exist_ok=True)
    for name, content in schema_files().items():
        (options.folder / name).write_text(content)
        print(options.folder / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
