"""The plan's arithmetic against training passes on tensors that have sizes and no values."""

import weakref
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_proxy.trainer.plan import FLOAT32, pass_memory, shape_of
from lightning_proxy.trainer.rows.prefix_tree import build_tree
from lightning_proxy.trainer.step import tree_attention
from lightning_proxy.trainer.step.scoring import fully_scored, score
from lightning_proxy.trainer.step.trainer import prepare_layers
from lightning_proxy.trainer.step.tree_attention import use_tree_attention
from lightning_proxy.trainer.weights import lora_config
from support.models import SIZES
from support.sections import TrainerConfig

# Fake tensors cannot be indexed on a device that PyTorch was not built for; sizes are the same on each.
DEVICE = torch.device("cpu")


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive on the device, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device == DEVICE:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class SavesWhatFlexSaves(torch.autograd.Function):
    """FlexAttention's memory: it keeps queries, keys, values, the output and a log-sum-exp, and no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, _, lse = ctx.saved_tensors
        torch.empty_like(lse)  # row sums of output times gradient
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def peak_of_a_pass(
    config: dict[str, Any], tokens: int, trainer: TrainerConfig, patch: pytest.MonkeyPatch, *, autocast: bool
) -> int:
    """Return the bytes that a pass over one row of so many tokens adds to weights (and adapter) at its peak.

    Without `autocast`, everything is float32, as on a CPU.
    """
    patch.setattr(tree_attention, "flex", lambda q, k, v, *_: SavesWhatFlexSaves.apply(q, k, v))
    patch.setattr(tree_attention.TreeMask, "block_mask", None)
    patch.setattr(tree_attention, "_has_flex_attention", lambda device: True)
    with torch.device("meta"):
        dtype = torch.bfloat16 if trainer.weights == "lora" and autocast else torch.float32
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
        adapted = get_peft_model(model, lora_config(trainer, model)) if trainer.weights == "lora" else model
    use_tree_attention(model)
    prepare_layers(model, trainer)
    adapted.train()
    from_numpy = torch.from_numpy
    with FakeTensorMode() as fake, Peak() as peak:
        patch.setattr(torch, "from_numpy", lambda array: fake.from_tensor(from_numpy(array)))
        _move(model)
        stays = peak.now
        sample = fully_scored(tuple(range(tokens + 1)), "default")
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            scores = score(model, build_tree([sample.token_ids[:-1]]), [sample])
        scores.logprobs.sum().backward()
        return peak.most - stays


def _move(model: nn.Module) -> None:
    """Give each parameter and buffer a fake tensor on the device in its place; shared ones stay shared."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in moved:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                moved[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if name in module._parameters else new
            setattr(module, name, moved[id(tensor)])


TOKENS = 8192
SOME = "Qwen2.5-1.5B"
ON_CPU, FULL = {"width": FLOAT32}, {"full": True}
CASES: list[tuple[str, bool, dict[str, Any]]] = [
    *((name, on, {}) for name in SIZES for on in (True, False)),
    *((SOME, on, what) for what in (ON_CPU, FULL) for on in (True, False)),
]
QUICK = ((SOME, True, {}), (SOME, True, FULL))


# Each takes half a minute, so most are for test-all.
@pytest.mark.parametrize(
    ("name", "checkpointing", "what"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_a_pass_takes_what_the_plan_says(
    name: str, checkpointing: bool, what: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(SIZES[name])
    assert shape is not None
    config = TrainerConfig(weights="full" if "full" in what else "lora", gradient_checkpointing=checkpointing)
    found = peak_of_a_pass(SIZES[name], TOKENS, config, monkeypatch, autocast=what is not ON_CPU)
    gradients = FLOAT32 * shape.parameters if "full" in what else 0
    planned = gradients + pass_memory(shape, TOKENS, checkpointing=checkpointing, **what)
    assert planned == pytest.approx(found, rel=0.15)
