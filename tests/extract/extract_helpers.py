"""Running extraction in this process and in others, and comparing what it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_offline.cache import Cache
from dflash_offline.config import ExtractRecipe

REPOSITORY = Path(__file__).parents[2]
CONVERSATIONS = REPOSITORY / "tests" / "data" / "smollm2_gsm8k.jsonl.gz"


def load(recipe: ExtractRecipe, cache: Cache) -> Any:
    """The recipe's target, capturing the cache's layers, on one thread."""
    import torch

    from dflash_offline.target import load_target

    torch.set_num_threads(1)
    return load_target(recipe.target, "cpu", cache.manifest.identity.target_layer_ids)


class Run:
    """``dflash-offline extract`` in a process of its own, with its log."""

    def __init__(
        self, recipe: ExtractRecipe, folder: Path, limit_file_size: int | None = None, options: list[str] | None = None
    ) -> None:
        self.recipe_file = folder / "extract.json"
        self.log_file = folder / "extract.log"
        self.recipe_file.write_text(recipe.model_dump_json())
        program = (
            "import sys, json, resource, dflash_offline.cli as cli; from dflash_offline.config import *; "
            "limit = int(sys.argv[2]); "
            "limit and resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)); "
            "cli.load_recipe = lambda name, kind, overrides: validate_recipe(json.load(open(name)), kind); "
            "sys.argv[1:] = ['extract', sys.argv[1], '--json', *sys.argv[3:]]; cli.main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.recipe_file), str(limit_file_size or 0), *(options or [])],
            stdout=subprocess.PIPE,
            stderr=self.log_file.open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait(self, timeout: float = 240) -> int:
        self.output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def answer(self) -> dict[str, Any]:
        return json.loads(self.output)

    def worker_pids(self) -> list[int]:
        """Living worker processes, by the kernel's own account."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            pids = [int(pid) for pid in children.read_text().split()]
            worker = b"dflash_offline.extract.worker"
            return [pid for pid in pids if worker in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:
            return []

    def wait_for(self, condition: Callable[[], Any], timeout: float = 240) -> Any:
        """Poll until the condition holds or the process has ended; its last value."""
        deadline = time.monotonic() + timeout
        while not (value := condition()) and self.process.poll() is None:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.005)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)


def receipts_on_disk(cache: Path) -> int:
    return sum(1 for _ in (cache / "receipts").glob("0*.json"))


def fingerprint(cache: Path) -> dict[str, str]:
    """sha256 of every file of a cache, receipts without their ``run`` section; locks and logs left out."""
    found = {}
    for file in sorted(cache.rglob("*")):
        name = str(file.relative_to(cache))
        if not file.is_file() or name.startswith(("locks/", "logs/")) or name in ("manifest.json",):
            continue
        data = file.read_bytes()
        if name.startswith("receipts/"):
            content = json.loads(data)
            del content["run"], content["self_sha256"]
            data = json.dumps(content, sort_keys=True).encode()
        found[name] = hashlib.sha256(data).hexdigest()
    return found
