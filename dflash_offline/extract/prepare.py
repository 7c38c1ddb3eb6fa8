"""``prepare``: from a recipe to a cache that holds everything but hidden states.

Target and tokenizer → tokenised corpus → held-out split → shard plan → cache folder, its manifest last: killed
anywhere before that, the next call starts over; after it, the next call only compares. Comparing costs a look at file
sizes and times where nothing was touched since, else a hash of every source and weight file (2 GB/s), and never
tokenises again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import platform
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.config import ExtractRecipe
from dflash_offline.environment import package_versions

if TYPE_CHECKING:
    from dflash_offline.cache import Cache, Identity
    from dflash_offline.target import ResolvedTarget

logger = logging.getLogger(__name__)

LIBRARIES = (
    "dflash-offline",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "zarr",
    "flash-linear-attention",
    "causal-conv1d",
)
# Settings that say where things lie, how fast they are made, or when to refuse: they shape nothing in the cache.
_NOT_SHAPING = {"cache", "run"}
FEW_HELDOUT = 10  # samples, below which figures on them say little


def prepare(recipe: ExtractRecipe, progress: bool = True) -> Cache:
    """Make the cache that a recipe describes, or open it when it is there.

    Args:
        recipe: stage one.
        progress: show progress bars.

    Raises:
        UsageError: the recipe cannot be right, the path holds something else, or a cache of another identity; then
            the message lists every difference.
        LockHeld: another process is making or writing this cache.
        DFlashOfflineError: data or target cannot be used, or the disk is full.
    """
    from dflash_offline.cache import Cache, CacheLock, check_cache_folder

    path = Path(recipe.cache).expanduser()
    if not check_cache_folder(path):
        with CacheLock(path, role="prepare"):
            if not check_cache_folder(path):  # it may have been made while we waited
                return _create(path, recipe, progress)
    cache = Cache.open(path)
    stamp = quick_stamp(recipe)
    if stamp is None or stamp != cache.manifest.provenance.get("stamp"):
        _compare(cache, recipe)
    return cache


def _create(path: Path, recipe: ExtractRecipe, progress: bool) -> Cache:
    from dflash_offline.cache import create_cache, get_encoding, make_plan
    from dflash_offline.conversations import build_corpus, split_heldout
    from dflash_offline.target import resolve_target, write_target_folder

    began = time.monotonic()
    stamp = quick_stamp(recipe)
    resolved = resolve_target(recipe.target)
    layer_ids = resolved.layer_ids()
    encoding = get_encoding(recipe.layout.encoding)
    encoding.arrays(len(layer_ids), resolved.hidden_size, recipe.layout.shard_tokens)  # refuses what cannot be held
    tokenizer = resolved.tokenizer()
    facts: dict[str, Any] = {
        "num_layers": resolved.num_layers,
        "hidden_size": resolved.hidden_size,
        "vocab_size": resolved.vocab_size,
    }

    def fill_target_folder(folder: Path) -> None:
        facts["heads_info"] = write_target_folder(resolved, folder, tokenizer)

    # Beside the cache and of a fixed name: a killed preparation's is found and removed by the next one.
    scratch = path.resolve().with_name(f".{path.resolve().name}.preparing")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        corpus = build_corpus(
            recipe.data,
            tokenizer,
            scratch=scratch,
            workers=recipe.run.workers,
            progress=progress,
            vocab_size=resolved.vocab_size,
        )
        heldout = split_heldout(corpus.prompt_hash, recipe.data.heldout_share, recipe.data.seed)
        plan = make_plan(corpus.lengths, heldout, recipe.layout.shard_tokens, recipe.data.seed)
        identity = describe(recipe, resolved, tokenizer, corpus.dataset_fingerprint, corpus.fingerprint, plan.sha256)
        cache = create_cache(
            path,
            corpus=corpus,
            plan=plan,
            identity=identity,
            provenance=provenance(stamp, recipe),
            encoding=encoding,
            hidden_size=resolved.hidden_size,
            target_folder_writer=fill_target_folder,
            target=facts,
            progress=progress,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    layout = cache.manifest.layout
    logger.info(
        "prepared %s in %.1f s: %d samples, %d tokens, %d shards (%d held out)",
        path,
        time.monotonic() - began,
        layout.num_samples,
        layout.num_tokens,
        layout.num_shards,
        layout.num_heldout_shards,
    )
    if 0 < (kept := int(heldout.sum())) < FEW_HELDOUT:
        logger.warning(
            "only %d of %d samples are held out: acceptance length on them says little. A cache keeps its share; "
            "for a larger one prepare again, in another cache, with --set data.heldout_share=0.1 or more",
            kept,
            layout.num_samples,
        )
    return cache


def describe(
    recipe: ExtractRecipe,
    resolved: ResolvedTarget,
    tokenizer: Any,
    dataset_fingerprint: str,
    corpus_fingerprint: str,
    plan_sha256: str,
) -> Identity:
    """Identity of the cache that a recipe describes (see docs/design.md, "The cache")."""
    from dflash_offline.cache import Identity, get_encoding
    from dflash_offline.conversations import template_sha256, tokenizer_sha256

    target = resolved.identity()
    data = recipe.data
    return Identity.model_validate(
        {
            "target": {
                "model": target.model,
                "revision": target.revision,
                "config_sha256": target.config_sha256,
                "weights": target.weights,
                "dtype": target.dtype,
                "quantization": target.quantization,
            },
            "data": {
                "dataset_fingerprint": dataset_fingerprint,
                "corpus_fingerprint": corpus_fingerprint,
                "tokenizer_sha256": tokenizer_sha256(tokenizer),
                "template_sha256": template_sha256(tokenizer, data),
                "template_arguments": data.template_arguments,
                "max_length": data.max_length,
                "overflow": data.overflow,
                "loss_on": data.loss_on,
                "heldout_share": data.heldout_share,
                "split_seed": data.seed,
            },
            "target_layer_ids": resolved.layer_ids(),
            "encoding": {"name": recipe.layout.encoding, "params": get_encoding(recipe.layout.encoding).params()},
            "shard_tokens": recipe.layout.shard_tokens,
            "plan_sha256": plan_sha256,
        }
    )


def _compare(cache: Cache, recipe: ExtractRecipe) -> None:
    """Refuse a cache that is not the one a recipe describes, without tokenising.

    The plan is a function of the corpus, the split rule, the seed and the shard size, which are all compared.

    Raises:
        UsageError: with every difference, one a line.
    """
    from dflash_offline.cache.manifest import provenance_differences, refuse_other_identity
    from dflash_offline.conversations.corpus import corpus_fingerprint
    from dflash_offline.conversations.sources import hash_texts, open_sources
    from dflash_offline.target import resolve_target

    have = cache.manifest.identity
    resolved = resolve_target(recipe.target)
    tokenizer = resolved.tokenizer()
    contents = [source.content_sha256() for source in open_sources(recipe.data)]
    fingerprint = corpus_fingerprint(recipe.data, tokenizer, contents)
    asked = describe(recipe, resolved, tokenizer, hash_texts(contents), fingerprint, have.plan_sha256)
    refuse_other_identity(cache.path, have, asked)
    there = cache.manifest.provenance
    now = {"versions": library_versions(), "batch_tokens": recipe.run.batch_tokens}  # both may change last bits
    for line in provenance_differences({key: there.get(key) for key in now}, now):
        logger.warning("%s", line.replace("the recipe asks for", "now it is"))


def library_versions() -> dict[str, str]:
    """Installed versions of what may change bits, without importing any of it."""
    return {"python": platform.python_version(), **package_versions(LIBRARIES)}


def provenance(stamp: str | None, recipe: ExtractRecipe) -> dict[str, Any]:
    """Where and with what a cache was prepared; a difference later warns only."""
    return {
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "versions": library_versions(),
        "batch_tokens": recipe.run.batch_tokens,
        "stamp": stamp,
    }


def quick_stamp(recipe: ExtractRecipe) -> str | None:
    """A hash of the shaping settings, of versions, and of place, size and modification time of every file read.

    An equal stamp means that nothing was touched since, so that starting again needs no hashing and no tokenizer.
    None where something lies on the hub.
    """
    names = [recipe.target.model, *([recipe.target.tokenizer] if recipe.target.tokenizer else [])]
    names += [recipe.data.source] if isinstance(recipe.data.source, str) else recipe.data.source
    names += [recipe.data.chat_template] if recipe.data.chat_template else []
    files = []
    for name in names:
        path = Path(name).expanduser()
        found = [path] if path.exists() else [Path(item) for item in sorted(glob.glob(str(path), recursive=True))]
        if not found:
            return None
        for item in found:
            for file in sorted(item.rglob("*")) if item.is_dir() else [item]:
                if file.is_file():
                    status = file.stat()
                    files.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
    settings = recipe.model_dump(mode="json", exclude=_NOT_SHAPING)
    parts = {"settings": settings, "versions": library_versions(), "files": files, "batch": recipe.run.batch_tokens}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
