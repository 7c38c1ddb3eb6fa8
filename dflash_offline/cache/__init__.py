"""The cache of hidden states on disk: its plan, manifest, encodings, shards, receipts, lock and checks.

``schemas/FORMAT.md`` describes the files; docs/design.md says why they are so.
"""

from dflash_offline.cache.create import check_cache_folder, clean_leftovers, create_cache
from dflash_offline.cache.encodings import ENCODING_NAMES, get_encoding
from dflash_offline.cache.files import DamagedFile
from dflash_offline.cache.lock import CacheLock, LockHeld
from dflash_offline.cache.manifest import Identity, Manifest, identity_differences, provenance_differences
from dflash_offline.cache.plan import Plan, make_plan, padding_waste, shard_batches
from dflash_offline.cache.receipts import Receipt
from dflash_offline.cache.state import SetAside, State
from dflash_offline.cache.store import Cache, DamagedShard

__all__ = [
    "ENCODING_NAMES",
    "Cache",
    "CacheLock",
    "DamagedFile",
    "DamagedShard",
    "Identity",
    "LockHeld",
    "Manifest",
    "Plan",
    "Receipt",
    "SetAside",
    "State",
    "check_cache_folder",
    "clean_leftovers",
    "create_cache",
    "get_encoding",
    "identity_differences",
    "make_plan",
    "padding_waste",
    "provenance_differences",
    "shard_batches",
]
