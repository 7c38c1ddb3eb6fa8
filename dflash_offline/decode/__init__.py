"""Speculative and plain decoding with a real target.

In reading order: ``sampling`` (logits to tokens, the rejection rule) → ``heads`` (embedding and head borrowed from the
target) → ``target_state`` (one sequence in the target, with undo) → ``generation`` (what came out, acceptance
figures) → ``speculative`` (one prompt) → ``ragged_cache``, ``drafter_context``, ``batched`` (many prompts at once)
→ ``prompts``, ``runner``, ``compare`` (what evaluation needs).
"""

from dflash_offline.decode.generation import Generation, acceptance_summary
from dflash_offline.decode.sampling import Sampling
from dflash_offline.decode.speculative import plain_generate, speculative_generate

__all__ = ["Generation", "Sampling", "acceptance_summary", "plain_generate", "speculative_generate"]
