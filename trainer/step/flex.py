"""FlexAttention over a prefix tree, for GPUs: its mask by blocks of nodes, and one kernel for all sizes of trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.sdpa_attention import repeat_kv

# FlexAttention works in blocks of so many nodes. Trees are padded to full blocks.
FLEX_BLOCK = 128


def block_mask(ends: Tensor) -> BlockMask:
    """Return the mask of a tree in preorder, (N,). Two blocks of nodes cost one number, and no pair of nodes does.

    Node q sees node k if k <= q < ends[k]. Of an earlier block of keys, the first query of a block sees some key if it
    sees the one whose subtree ends last; all queries see all keys if the last one sees the key whose ends first.
    """
    n, device = len(ends), ends.device
    by_block = nn.functional.pad(ends, (0, -n % FLEX_BLOCK), value=n).view(-1, FLEX_BLOCK)
    starts = torch.arange(0, n, FLEX_BLOCK, device=device)[:, None]
    earlier = starts > starts.T
    full = earlier & (by_block.amin(1) >= (starts + FLEX_BLOCK).clamp(max=n))
    partly = earlier & (by_block.amax(1) > starts) & ~full
    own = torch.eye(len(starts), dtype=torch.bool, device=device)
    return BlockMask.from_kv_blocks(
        *_lists(partly | own), *_lists(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=_ancestor_or_self(ends),
        seq_lengths=(n, n),
    )  # fmt: skip


def flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Map (1, heads, N, D) queries and (1, key heads, N, D) keys and values to (1, heads, N, D)."""
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # the kernels share keys among 2, 4, 8 … queries
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out: Tensor = _compiled()(
        query, key, value, score_mod=None if softcap is None else _capped(softcap), block_mask=mask, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out


@cache
def _compiled() -> Callable[..., Any]:
    """Compile once: the second size of a tree makes it a kernel for all sizes."""
    return torch.compile(flex_attention)


def _lists(seen: Tensor) -> tuple[Tensor, Tensor]:
    """(B, B) -> how many blocks of keys each block of queries sees, (1, 1, B), and first of all these, (1, 1, B, B)."""
    order = seen.int().argsort(dim=1, descending=True, stable=True)
    return seen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _ancestor_or_self(ends: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether the query is in the key's subtree, [key, ends[key])."""

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return mask_mod


def _capped(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
