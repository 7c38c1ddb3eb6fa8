"""Stage one: the target reads the corpus once and its hidden states go to the cache.

``prepare`` tokenises, plans and creates the cache (CPU only); ``extract`` runs the shard jobs of that plan with one
worker process per target replica and resumes by the receipts that are there. Flow: prepare → supervisor → worker
(selfcheck, then job → writer) → receipts.
"""

from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.run import extract

__all__ = ["extract", "prepare"]
