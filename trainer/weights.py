"""The weights that are trained (LoRA adapters on a frozen model, or the full model), and their files for vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from ..core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..core.config.trainer import TrainerConfig
from ..core.errors import ConfigError, LightningError
from .checkpoint import atomic_directory
from .step.processes import Processes

Weights = dict[str, Tensor]

# Parts of a layer that get no LoRA unless named. vLLM serves adapters of few of them.
LEFT_ALONE = frozenset(
    {"experts", "shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp", "router", "gate"}
)
ADAPTER_OF = re.compile(r"\.lora_[^.]*\.([^.]+)")  # the name of a parameter's adapter
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}  # nats between two implementations, by rounding alone
MARKER = "COMPLETE"


class TrainedWeights:
    """Sets of weights that are trained separately, by `names`: each LoRA adapter, or the full model as the only set.

    A sample's `adapter` says which set it trains. `model` is the bare language model. A weight that several modules
    share counts once. If the sets are `sharded`, each process has a part of them, and all processes must call these
    methods together; `keeps` says whether this process keeps and writes what is gathered.
    """

    def __init__(self, model: Any, config: TrainerConfig, policy: PolicyConfig, processes: Processes) -> None:
        """`model` has LoRA layers unless `trainer.weights` is full."""
        self._model, self._processes, self._dtype = model, processes, compute_dtype(config)
        self.model: PreTrainedModel = model
        self.names: tuple[str, ...] = (DEFAULT_ADAPTER,)
        self._is_lora = config.weights == "lora"
        self._base: PreTrainedModel | None = None  # a frozen copy of the full model, where one is needed
        if self._is_lora:
            self.model = model.get_base_model()
            parts = {part for name, _ in model.named_parameters() for part in name.split(".")}
            for name in sorted(policy.adapters):  # an optimizer's state goes by position
                if name in parts or name in "lora_":  # PEFT finds an adapter's weights by its name among the parts
                    problem = f"{name!r} is also the name of a part of the model; choose another name"
                    raise ConfigError(f"policy.adapters: {problem}")
                model.add_adapter(name, deepcopy(model.peft_config[DEFAULT_ADAPTER]))
                self.names += (name,)
            for parameter in self.parameters():
                parameter.requires_grad_(True)
        elif config.kl_coef or config.kl_metric:
            self._base = load_model(str(policy.model), self._dtype).requires_grad_(False)

    @property
    def sharded(self) -> bool:
        return self._processes.sharded and not self._is_lora

    @property
    def keeps(self) -> bool:
        return self._processes.rank == 0

    def prepare(self, place: Callable[[Any], Any]) -> Any:
        """Move all models to their device with `place`. Return the one that is trained."""
        if self._base is not None:
            self._base = place(self._base)
        self._model = place(self._model)
        if not self._is_lora:
            self.model = self._model
        return self._model

    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these sets (default: all), whichever adapter is active."""
        named = self._model.named_parameters()
        if not self._is_lora:
            return [parameter for _, parameter in named]
        return [p for name, p in named if (of := ADAPTER_OF.search(name)) and of[1] in (names or self.names)]

    def activate(self, name: str) -> None:
        """Make the model use this set."""
        if self._is_lora and self._model.active_adapter != name:
            self._model.set_adapter(name)

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Yield the model as it was before any training: with adapters off, or the frozen copy."""
        if self._is_lora:
            with self._model.disable_adapter():
                yield self.model
        else:
            assert self._base is not None, "trainer.kl_coef and trainer.kl_metric load it"
            yield self._base

    def live(self, name: str) -> Weights:
        """Return the weights of a set (not copies) by their names in files."""
        if self._is_lora:
            adapter: Weights = get_peft_model_state_dict(self._model, adapter_name=name)
            return adapter
        return {key: parameter.detach() for key, parameter in self.model.named_parameters()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every weight, by `set: name`."""
        return {f"{own}: {key}": tuple(w.shape) for own in self.names for key, w in self.live(own).items()}

    def weights(self, name: str = DEFAULT_ADAPTER) -> Weights:
        """Return copies of a set's full weights; nothing in a process that only helps to gather them."""
        return gathered(self.live(name), self.keeps or not self.sharded, lambda _, weight: weight.clone())

    def all_weights(self) -> dict[str, Weights]:
        return {name: self.weights(name) for name in self.names}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Weights]) -> None:
        """Replace the weights of these sets. If they are sharded, only process 0 needs the values."""
        for name, own in weights.items():
            live = self.live(name)
            for key, value in own.items():
                live[key].copy_(self._part(value, live[key]))

    def _part(self, value: Tensor, like: Tensor) -> Tensor:
        """This process's part of process 0's `value`, sharded as `like` is; other processes may pass a meta tensor."""
        if not self.sharded or not value.dim():
            return value
        value = torch.empty_like(value, device=like.device) if value.is_meta else value.to(like.device)
        if isinstance(like, DTensor):
            return distribute_tensor(value, like.device_mesh, like.placements)
        dist.broadcast(value, src=0)
        return value

    def copy(self, name: str) -> Weights:
        """Return a copy of this process's part of a set, in CPU memory."""
        return {key: local(weight).to("cpu", copy=True) for key, weight in self.live(name).items()}

    @contextmanager
    def exchanged(self, name: str, copy: Weights) -> Iterator[None]:
        """Exchange the weights of a set with those in `copy` while the block runs."""

        @torch.no_grad()
        def exchange() -> None:
            for key, weight in self.live(name).items():  # one at a time: a second copy of a full model may not fit
                present = local(weight).to("cpu", copy=True)
                local(weight).copy_(copy[key])
                copy[key].copy_(present)

        exchange()
        try:
            yield
        finally:
            exchange()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state for a checkpoint. A full model's is keyed by name, since sharding changes the order."""
        packed: dict[str, Any] = optimizer.state_dict()
        if self._is_lora:
            return packed
        own, keep = self._ordered(optimizer), self.keeps or not self.sharded
        return {own[i][0]: gathered(moments, keep) for i, moments in packed["state"].items()}

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Give the optimizer the moments from a checkpoint."""
        moments = state.get("state", {})
        if not self._is_lora:
            moments = {
                i: {key: self._part(value, parameter) for key, value in state[name].items()}
                for i, (name, parameter) in enumerate(self._ordered(optimizer))
                if name in state
            }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})

    def _ordered(self, optimizer: Any) -> list[tuple[str, nn.Parameter]]:
        """The optimizer's parameters with their names, in the order of its state dict."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [(names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]]

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write what vLLM loads. `directory` appears atomically, with a marker file; no weight in memory changes.

        With `merged` it is a full model, into which any adapter `default` is merged. Otherwise it is the adapter
        `default`, with each other adapter in a sub-directory; without adapters this raises LightningError.
        """
        if not merged and not self._is_lora:
            raise LightningError("with trainer.weights: full, there is no adapter to write")
        state = None
        if merged:  # every process helps to gather it
            state = merged_state(self.model, keep=self.keeps) if self._is_lora else self._full_state()
        if not self.keeps:
            return
        with atomic_directory(directory) as temporary:
            (self.model if merged else self._model).save_pretrained(str(temporary), state_dict=state)
            if merged:
                tokenizer.save_pretrained(str(temporary))
                # transformers writes the dtype of the model in memory.
                config = temporary / "config.json"
                about = json.loads(config.read_text()) | {"dtype": str(self._dtype).removeprefix("torch.")}
                config.write_text(json.dumps(about, indent=2) + "\n")
            (temporary / MARKER).touch()

    def _full_state(self) -> Weights:
        """Return all weights, gathered. Tied weights are included once, as transformers saves them."""
        named = self.model.named_parameters
        again = {name for name, _ in named(remove_duplicate=False)} - {name for name, _ in named()}
        state = {name: weight for name, weight in self.model.state_dict().items() if name not in again}
        return gathered(state, self.keeps, lambda _, w: w.to(self._dtype) if w.is_floating_point() else w)


def gathered(
    tensors: Mapping[str, Tensor], keep: bool = True, change: Callable[[str, Tensor], Tensor] = lambda _, weight: weight
) -> Weights:
    """Gather sharded tensors, apply `change` to each, and return them. Without `keep`, return nothing.

    Every process has to take part. Gathered tensors are in CPU memory.
    """
    found: Weights = {}
    for name, part in tensors.items():
        weight = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            found[name] = change(name, weight) if weight is part else change(name, weight).cpu()
    return found


def local(weight: Tensor) -> Tensor:
    """Return the part of a weight that is in this process."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def merged_state(base: PreTrainedModel, *, keep: bool = True) -> Weights:
    """Return the state dict of `base` without PEFT, with W + BA·scale for each weight under a LoRA layer."""
    deltas = {
        f"{name}.base_layer.weight": layer.get_delta_weight(DEFAULT_ADAPTER)
        for name, layer in base.named_modules()
        if isinstance(layer, LoraLayer)
    }

    def merge(name: str, weight: Tensor) -> Tensor:
        return (weight.float() + deltas[name].float()).to(weight.dtype) if name in deltas else weight

    state = {name: weight for name, weight in base.state_dict().items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): weight for name, weight in gathered(state, keep, merge).items()}


def lora_config(config: TrainerConfig, model: PreTrainedModel) -> LoraConfig:
    """Return PEFT's configuration for the adapters of `model`."""
    targets = config.lora_targets
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=language_targets(model) if targets == "language" else targets,
    )


def language_targets(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear modules in the language model's layers, except in experts and routers.

    If no other linear module shares the last part of a name, only the last parts are returned. Raises ConfigError if
    there are no such modules.
    """
    modules, decoder = dict(model.named_modules()), model.get_decoder()
    language = next((f"{name}." for name, module in modules.items() if module is decoder and name), "")
    linear = {name: name.split(".") for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    chosen = {
        name
        for name, parts in linear.items()
        if name.startswith(language) and any(map(str.isdigit, parts)) and not LEFT_ALONE & {*parts}
    }
    if not chosen:
        raise ConfigError(
            f"trainer.lora_targets: no linear layers were found in {type(model).__name__}; list the modules to adapt"
        )
    last = {linear[name][-1] for name in chosen}
    return sorted(last if all(name in chosen for name, parts in linear.items() if parts[-1] in last) else chosen)


def load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with its own architecture on the CPU; the trainer moves the model to its device."""
    names = AutoConfig.from_pretrained(path).architectures or [""]
    architecture = getattr(transformers, names[0], AutoModelForCausalLM)
    model = architecture.from_pretrained(path, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def compute_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype that the model computes in and that weights for vLLM have."""
    if config.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def weight_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype to load the model in. Trained weights are float32: bfloat16 would lose small updates."""
    return torch.float32 if config.weights == "full" else compute_dtype(config)


def uses_autocast(config: TrainerConfig) -> bool:
    """Return whether the model is computed in bfloat16 under autocast."""
    return compute_dtype(config) == torch.bfloat16 and (torch.cuda.is_available() or config.weights == "full")


def tolerance(config: TrainerConfig, policy: PolicyConfig) -> float:
    """Return the largest mean difference of log-probabilities that rounding explains, in nats."""
    return policy.verify_tolerance or TOLERANCE[compute_dtype(config)]
