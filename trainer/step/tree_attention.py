"""Attention over a prefix tree, as an attention implementation of transformers. A node sees itself and its ancestors.

On a GPU it is FlexAttention, with a mask by blocks of nodes and one kernel for all tree sizes. On a CPU it is PyTorch's
flash kernel, block by block (`attention_plan`). If that lacks what the model needs (capped scores, values of another
width), it is a plain masked softmax. Importing this module registers it; `use_tree_attention` switches a model over.
Without a tree it is SDPA, or the plain softmax if scores are capped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...core.errors import ConfigError
from ..rows.prefix_tree import PrefixTree

NAME = "prefix_tree"
_UNSUPPORTED = ("s_aux", "position_bias")  # arguments that some models give to their attention

# Private, because public attention returns no log-sum-exp on a CPU. pyproject.toml bounds torch to tested versions.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

RUN = 256  # longer ones are cut: within a causal block the kernels save little of what they could
SQUARE = 192  # nodes of the largest subtree that is one block: near the cheapest plan, on trees of many shapes
FLEX_BLOCK = 128  # nodes of FlexAttention's blocks; trees are padded to full ones


@dataclass(frozen=True)
class TreeMask:
    """The attention mask of a tree, in a form for each implementation. Each form is built when first used."""

    tree: PrefixTree
    device: torch.device

    @cached_property
    def visible(self) -> Tensor:
        """Return (N, N), true where a row's node sees a column's node: itself or an ancestor."""
        return self._among(0, len(self.tree))

    @cached_property
    def blocks(self) -> list[tuple[Block, Tensor | None]]:
        """Return the plan's blocks. Those of kind `tree` come with an additive mask (1, 1, n, n) of 0 and -inf."""
        found: list[tuple[Block, Tensor | None]] = []
        for block in attention_plan(self.tree):
            added = self._among(*block.keys).float().log()[None, None] if block.kind == "tree" else None
            found.append((block, added))
        return found

    @cached_property
    def block_mask(self) -> BlockMask:
        return block_mask(self._ends)

    @cached_property
    def _ends(self) -> Tensor:
        return torch.from_numpy(self.tree.ends).to(self.device)

    def _among(self, start: int, stop: int) -> Tensor:
        nodes = torch.arange(start, stop, device=self.device)
        return (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < self._ends[None, start:stop])


def use_tree_attention(model: PreTrainedModel) -> None:
    """Make `model` use this attention. Raises ConfigError if the model's own attention cannot be replaced."""
    if model.config._attn_implementation == NAME:
        return
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ConfigError(f"policy.model: {type(model).__name__} has its own attention, which cannot be replaced")


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    tree_mask: TreeMask | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Map (1, heads, N, D) queries and (1, key heads, N, D) keys and values of tree nodes to (1, N, heads, D).

    With a tree there is no dropout: the policy is trained as it sampled.
    """
    if tree_mask is None and softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if wanted := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise ConfigError(f"policy.model: its attention needs arguments that are not supported: {', '.join(wanted)}")
    if torch.is_autocast_enabled(query.device.type):  # which does this for the attention that it knows
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if tree_mask is not None and _has_flex_attention(query.device):
        return flex(query, key, value, tree_mask.block_mask, scaling, softcap).transpose(1, 2), None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if tree_mask is None or softcap is not None or value.shape[-1] != query.shape[-1]:
        visible = tree_mask.visible if tree_mask else attention_mask
        if visible is None:  # causal, as SDPA has it
            n = query.shape[2]
            visible = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
        return _masked_softmax(query, key, value, visible, scaling, softcap).transpose(1, 2), None
    out: Tensor = _BlockAttention.apply(query, key, value, tree_mask.blocks, scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _has_flex_attention(device: torch.device) -> bool:
    """Whether FlexAttention has a backward pass on this device; on a CPU it has none."""
    return device.type == "cuda"


class _BlockAttention(torch.autograd.Function):
    """Attention of (1, H, N, D) queries, keys and values, with one kernel call per block in each direction.

    Each block is a softmax over a part of a query's keys. Weighted by the exponentials of their log-sum-exps, blocks
    add up to the softmax over all keys. From the output and log-sum-exp over all keys, the kernel's backward pass gives
    a block's share of the gradients, as in ring attention (https://arxiv.org/abs/2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[tuple[Block, Tensor | None]],
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        # Nodes come before heads in memory, as the caller needs them next. Sums over blocks are in float32.
        out = torch.zeros_like(query.transpose(1, 2), dtype=torch.float32).transpose(1, 2)
        lse = torch.full(query.shape[:-1], -torch.inf)
        blocks = [(block, None if added is None else added.to(query.dtype)) for block, added in blocks]
        for block, added in blocks:
            q, kv = slice(*block.queries), slice(*block.keys)
            part, part_lse = _flash(
                query[:, :, q], key[:, :, kv], value[:, :, kv], 0.0, block.kind == "causal", attn_mask=added,
                scale=scale,
            )  # fmt: skip
            total = torch.logaddexp(lse[:, :, q], part_lse)
            out[:, :, q].mul_((lse[:, :, q] - total).exp_()[..., None])
            out[:, :, q].addcmul_(part, (part_lse - total).exp_()[..., None])
            lse[:, :, q] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        found = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        for block, added in ctx.blocks:
            q, kv = slice(*block.queries), slice(*block.keys)
            parts = _flash_backward(
                gradients[0][:, :, q], query[:, :, q], key[:, :, kv], value[:, :, kv], out[:, :, q], lse[:, :, q], 0.0,
                block.kind == "causal", attn_mask=added, scale=ctx.scale,
            )  # fmt: skip
            for total, part, where in zip(found, parts, (q, kv, kv), strict=True):
                total[:, :, where] += part
        return *(x.to(query.dtype) for x in found), None, None


def _masked_softmax(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    """Attention of (B, H, N, D) queries by a full softmax, for what the block kernel and SDPA cannot do."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Not -inf, which would turn padding that sees nothing into NaN.
    weights = scores.float().masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1)
    return weights.to(value.dtype) @ value


class Block(NamedTuple):
    """An interval of queries against an interval of keys.

    In a block of kind `all` every query sees every key. In the others queries and keys are the same nodes: in `causal`
    each sees itself and those before it, in `tree` itself and its ancestors.
    """

    kind: Literal["all", "causal", "tree"]
    queries: tuple[int, int]
    keys: tuple[int, int]


def attention_plan(tree: PrefixTree) -> list[Block]:
    """Return blocks in which each node meets itself and each of its ancestors exactly once.

    In preorder the descendants of an unbranched run of nodes [a, b) are one interval [b, end). So their attention to
    the run is a plain rectangle without a mask: keys [a, b), queries [b, end). Within [a, b) attention is causal. A
    query's results from several blocks are merged by their log-sum-exp. Adjacent small subtrees share one square with a
    mask, because more kernel calls would cost more than they save.
    """
    ends = tree.ends
    run_ends = np.flatnonzero(np.diff(ends, append=-1)) + 1  # an only child's subtree ends where its parent's ends
    blocks, todo = list[Block](), [(0, len(tree))]
    while todo:
        start, stop = todo.pop()  # complete subtrees side by side
        while start < stop:
            end = int(ends[start])
            if end - start <= SQUARE:
                while end < stop and ends[end] - start <= SQUARE:
                    end = int(ends[end])
                blocks.append(Block("tree", (start, end), (start, end)))
            else:
                run = min(int(run_ends[np.searchsorted(run_ends, start, "right")]), start + RUN)
                blocks.append(Block("causal", (start, run), (start, run)))
                if run < end:
                    blocks.append(Block("all", (run, end), (start, run)))
                    todo.append((run, end))
            start = end
    return blocks


def block_mask(ends: Tensor) -> BlockMask:
    """Return FlexAttention's mask of a tree in preorder, without an (N, N) tensor. `ends` is as in `PrefixTree`.

    Node q sees node k if k <= q < ends[k]. Take a block of queries and an earlier block of keys: the first query sees
    some key if it sees the key that ends last; every query sees every key if the last one sees the key that ends first.
    """
    n, device = len(ends), ends.device
    by_block = nn.functional.pad(ends, (0, -n % FLEX_BLOCK), value=n).view(-1, FLEX_BLOCK)
    starts = torch.arange(0, n, FLEX_BLOCK, device=device)[:, None]
    earlier = starts > starts.T
    full = earlier & (by_block.amin(1) >= (starts + FLEX_BLOCK).clamp(max=n))
    partly = earlier & (by_block.amax(1) > starts) & ~full
    own = torch.eye(len(starts), dtype=torch.bool, device=device)
    return BlockMask.from_kv_blocks(
        *_lists(partly | own), *_lists(full), BLOCK_SIZE=FLEX_BLOCK, seq_lengths=(n, n),
        mask_mod=lambda batch, head, q, k: (k <= q) & (q < ends[k]),
    )  # fmt: skip


def flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Map (1, heads, N, D) queries and (1, key heads, N, D) keys and values to (1, heads, N, D)."""
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # the kernels share keys among 2, 4, 8 … queries
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out: Tensor = _compiled_flex()(
        query, key, value, score_mod=None if softcap is None else _capped(softcap), block_mask=mask, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Compile FlexAttention once. At the second tree size, torch compiles a kernel that fits all sizes."""
    return torch.compile(flex_attention)


def _lists(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block sees, and the indices of all key blocks, the seen ones first."""
    order = seen.int().argsort(dim=1, descending=True, stable=True)
    return seen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _capped(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
