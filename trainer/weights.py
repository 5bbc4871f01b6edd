"""The weights that a trainer trains, LoRA adapters on a frozen model or the full model, and their files for vLLM."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from ..core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..core.config.trainer import TrainerConfig
from ..core.errors import ConfigError, LightningError
from .checkpoint import atomic_directory

Weights = dict[str, Tensor]

# Parts of a layer that get no LoRA unless named. vLLM serves adapters of few of them.
LEFT_ALONE = frozenset(
    {"experts", "shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp", "router", "gate"}
)

_LORA = "lora_"

# How far apart rounding alone takes the mean log-probability of two implementations.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
MARKER = "COMPLETE"


class Spread(Protocol):
    """How weights are spread over processes: a part of `step.processes.Processes`."""

    rank: int
    sharded: bool

    def gather(self, weight: Tensor) -> Tensor: ...
    def part(self, weight: Tensor, like: Tensor) -> Tensor: ...
    def local(self, weight: Tensor) -> Tensor: ...


class Trained(ABC):
    """Sets of weights that are trained apart, by `names`. Samples say by their `adapter` which they train.

    If they are `sharded`, each process has a part of them, and all processes must call these methods together.
    """

    names: tuple[str, ...]
    model: PreTrainedModel

    def __init__(self, spread: Spread) -> None:
        self._spread = spread

    @property
    def sharded(self) -> bool:
        return False

    @abstractmethod
    def prepare(self, place: Callable[[Any], Any]) -> Any:
        """Move all models to their device by `place`; return the one that TRL trains."""

    @abstractmethod
    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these sets, by default of all."""

    def undoable(self, name: str) -> list[nn.Parameter]:
        """Return the parameters whose gradients a pass sets aside, to undo it if memory runs out; may be none."""
        return self.parameters(name)

    @abstractmethod
    def activate(self, name: str) -> None:
        """Make the model use this set."""

    @abstractmethod
    def live(self, name: str) -> Weights:
        """Return the weights of a set themselves, not copies, by the names that they have in files."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[PreTrainedModel]:
        """Yield the model as it was before any training."""

    @abstractmethod
    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write what vLLM loads: with `merged` a full model, else adapters."""

    @abstractmethod
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint."""

    @abstractmethod
    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Give the optimizer the state from a checkpoint."""

    @property
    def writes(self) -> bool:
        """Return whether this process keeps and writes the weights that are gathered."""
        return self._spread.rank == 0

    def weights(self, name: str = DEFAULT_ADAPTER) -> Weights:
        """Return copies of a set's unsharded weights; nothing in a process that only helps to gather them."""
        found = {}
        for key, weight in self.live(name).items():
            gathered = self._spread.gather(weight)
            if self.writes or not self.sharded:
                found[key] = gathered.clone() if gathered is weight else gathered.cpu()
        return found

    def all_weights(self) -> dict[str, Weights]:
        return {name: self.weights(name) for name in self.names}

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shape of every unsharded weight, by set and name."""
        return {name: {key: tuple(weight.shape) for key, weight in self.live(name).items()} for name in self.names}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Weights]) -> None:
        """Replace the weights of these sets. If they are sharded, only process 0 need have the values."""
        for name, own in weights.items():
            live = self.live(name)
            for key, value in own.items():
                live[key].copy_(self._spread.part(value, live[key]))

    def copy(self, name: str) -> Weights:
        """Return a copy of this process's part of a set, in the machine's own memory."""
        return {key: self._spread.local(weight).to("cpu", copy=True) for key, weight in self.live(name).items()}

    @contextmanager
    def exchanged(self, name: str, copy: Weights) -> Iterator[None]:
        """Use the weights of a `copy` while the block runs. The copy holds the present ones meanwhile."""
        self._exchange(name, copy)
        try:
            yield
        finally:
            self._exchange(name, copy)

    @torch.no_grad()
    def _exchange(self, name: str, copy: Weights) -> None:
        """One weight at a time: a second copy of a full model may not fit."""
        for key, weight in self.live(name).items():
            local = self._spread.local(weight)
            present = local.to("cpu", copy=True)
            local.copy_(copy[key])
            copy[key].copy_(present)


def lora_config(config: TrainerConfig, model: PreTrainedModel) -> LoraConfig:
    """Return PEFT's configuration of the adapters of `model`."""
    targets = config.lora_targets
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=language_targets(model) if targets == "language" else targets,
    )


def language_targets(model: PreTrainedModel) -> list[str]:
    """Return the linear modules in the layers of the language model, without experts, routers and other towers.

    They are named by their last part where that means no other module of the model. ConfigError if there are none.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    language = _dotted_name(model, model.get_decoder())
    chosen = {name for name in linear if name.startswith(language) and _is_in_a_layer(name)}
    if not chosen:
        raise ConfigError(
            f"trainer.lora_targets: no attention or MLP was found in {type(model).__name__}; name its modules"
        )
    last = {_last(name) for name in chosen}
    if all(name in chosen for name in linear if _last(name) in last):
        return sorted(last)
    return sorted(chosen)


def _dotted_name(model: nn.Module, part: nn.Module) -> str:
    """The name of a part, with a dot after it."""
    name = next((name for name, module in model.named_modules() if module is part), "")
    return f"{name}." if name else ""


def _is_in_a_layer(name: str) -> bool:
    parts = name.split(".")
    return any(part.isdigit() for part in parts) and not LEFT_ALONE & set(parts)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


class Adapters(Trained):
    """The adapters of `model`: its first one, `default`, and one for each of `names`. All are trainable."""

    def __init__(self, model: PeftModel, names: Iterable[str], spread: Spread) -> None:
        super().__init__(spread)
        self._model = model
        base = model.get_base_model()
        assert isinstance(base, PreTrainedModel)
        self.model = base
        # Sorted, because an optimizer's state goes by position.
        self.names = (DEFAULT_ADAPTER, *sorted(names))
        for name in self.names[1:]:
            _check_name(name, model)
            model.add_adapter(name, deepcopy(model.peft_config[DEFAULT_ADAPTER]))
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def prepare(self, place: Callable[[Any], Any]) -> Any:
        self._model = place(self._model)
        return self._model

    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these adapters, by default of all, whichever is active."""
        chosen = names or self.names
        return [p for name, p in self._model.named_parameters() if _adapter_in(name) in chosen]

    def activate(self, name: str) -> None:
        if self._model.active_adapter != name:
            self._model.set_adapter(name)

    def live(self, name: str) -> Weights:
        """Return an adapter's weights under PEFT's names."""
        found: Weights = get_peft_model_state_dict(self._model, adapter_name=name)
        return found

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Yield the model with the adapters off."""
        with self._model.disable_adapter():
            yield self.model

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write the adapters, or the full model with the default adapter merged in."""
        if merged:
            save_merged(self._model, tokenizer, directory, gather=self._spread.gather, writes=self.writes)
        elif self.writes:
            save_adapter(self._model, directory)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)


def _adapter_in(parameter: str) -> str | None:
    """The adapter that a parameter belongs to: the part after lora_A or lora_B. None for the base model's."""
    parts = parameter.split(".")
    return next((after for part, after in pairwise(parts) if part.startswith(_LORA)), None)


def _check_name(name: str, model: PeftModel) -> None:
    """Refuse the name of a part of the model: PEFT finds an adapter's weights by its name among the parts of theirs."""
    parts = {part for parameter, _ in model.named_parameters() for part in parameter.split(".")}
    if name in parts or name in _LORA:
        raise ConfigError(f"policy.adapters: {name!r} is also the name of a part of the model; choose another name")


class FullModel(Trained):
    """The weights of `model`, as one set. A weight that several modules share counts once.

    `base` is a frozen copy of the model before training, where one is needed. Files are written in `dtype`.
    """

    names = (DEFAULT_ADAPTER,)

    def __init__(
        self, model: PreTrainedModel, base: PreTrainedModel | None, spread: Spread, dtype: torch.dtype
    ) -> None:
        super().__init__(spread)
        self.model = model
        self._base = base
        self._dtype = dtype

    @property
    def sharded(self) -> bool:
        return self._spread.sharded

    def prepare(self, place: Callable[[Any], Any]) -> Any:
        if self._base is not None:
            self._base = place(self._base)
        self.model = place(self.model)
        return self.model

    def parameters(self, *names: str) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def undoable(self, name: str) -> list[nn.Parameter]:
        """Return none: the gradients of all weights are not kept twice."""
        return []

    def activate(self, name: str) -> None:
        """Do nothing: there is one set."""

    def live(self, name: str) -> Weights:
        return {key: parameter.detach() for key, parameter in self.model.named_parameters()}

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Yield the frozen copy."""
        assert self._base is not None, "trainer.kl_coef and trainer.kl_metric load it"
        yield self._base

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write the full model; LightningError if adapters are asked for."""
        if not merged:
            raise LightningError("with trainer.weights: full there is no adapter to write")
        save_model(self.model, tokenizer, directory, self._dtype, gather=self._spread.gather, writes=self.writes)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state by the names of weights: over ranks their order is another one."""
        named = self._packed_names(optimizer)
        found: dict[str, Any] = {}
        for place, moments in optimizer.state_dict()["state"].items():
            gathered = {key: self._spread.gather(value) for key, value in moments.items()}
            if self.writes or not self.sharded:
                found[named[place]] = {key: v.cpu() if self.sharded else v for key, v in gathered.items()}
        return found

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        packed = optimizer.state_dict()
        packed["state"] = {
            place: {
                key: self._spread.part(value, parameters[name]) if value.dim() else value
                for key, value in state[name].items()
            }
            for place, name in enumerate(self._packed_names(optimizer))
            if name in state
        }
        optimizer.load_state_dict(packed)

    def _packed_names(self, optimizer: Any) -> list[str]:
        """The names of the optimizer's parameters, in the order that its state dict counts them in."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def compute_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype that the model is computed in, and that vLLM is given its weights in."""
    name = {"auto": "bfloat16" if torch.cuda.is_available() else "float32"}.get(config.dtype, config.dtype)
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def tolerance(config: TrainerConfig, policy: PolicyConfig) -> float:
    """Return the largest mean difference of log-probabilities that rounding explains, in nats."""
    return policy.verify_tolerance or TOLERANCE[compute_dtype(config)]


def weight_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype of the model's weights. Trained ones are float32: bfloat16 would round small updates away."""
    return torch.float32 if config.weights == "full" else compute_dtype(config)


def uses_autocast(config: TrainerConfig) -> bool:
    """Return whether the model is computed in bfloat16 under autocast."""
    return compute_dtype(config) == torch.bfloat16 and (torch.cuda.is_available() or config.weights == "full")


def load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model on the CPU; the trainer moves it to its one device.

    A device map would spread it over all GPUs, or over the CPU if their memory is short.
    """
    from trl.trainer.utils import create_model_from_path  # takes seconds

    model = create_model_from_path(path, dtype=dtype, device_map=None, trust_remote_code=False)
    assert isinstance(model, PreTrainedModel)
    return model


def peft_config(config: TrainerConfig, model: PreTrainedModel) -> LoraConfig | None:
    """Return PEFT's configuration of the adapters; None if there are none."""
    return lora_config(config, model) if config.weights == "lora" else None


def trained(model: PreTrainedModel, config: TrainerConfig, policy: PolicyConfig, spread: Spread) -> Trained:
    """Return the trained weights of `model`, which has LoRA layers if there is a `peft_config`."""
    if config.weights == "lora":
        return Adapters(model, policy.adapters, spread)
    base = None
    if config.kl_coef or config.kl_metric:
        base = load_model(str(policy.model), compute_dtype(config)).requires_grad_(False)
    return FullModel(model, base, spread, compute_dtype(config))


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters in PEFT's format. `directory` appears atomically, with a marker file.

    The adapter `default` is in `directory` itself, each other one in a sub-directory of its name.
    """
    with atomic_directory(directory) as temporary:
        write_adapter(model, temporary)
        (temporary / MARKER).touch()


def write_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters in PEFT's format into a directory."""
    model.save_pretrained(str(directory))


def write_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write base + LoRA as an ordinary model into a directory."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    _write_model(base, _merged_state(base, lambda weight: weight, keep=True), tokenizer, directory)


def save_merged(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    gather: Callable[[Tensor], Tensor] = lambda weight: weight,
    writes: bool = True,
) -> None:
    """Write base + LoRA as an ordinary checkpoint, atomically. The weights in memory do not change.

    If the base is sharded, every process calls this with a `gather` that unshards a weight, and only one `writes`.
    """
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    _write_atomically(base, _merged_state(base, gather, keep=writes), tokenizer, directory, writes=writes)


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    dtype: torch.dtype,
    *,
    gather: Callable[[Tensor], Tensor],
    writes: bool,
) -> None:
    """Write a full model in `dtype` as an ordinary checkpoint. Otherwise like `save_merged`.

    A weight that two modules share is written once, as transformers does.
    """
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    state = {}
    for name, part in model.state_dict().items():
        if name not in again:
            weight = gather(part)
            if writes:
                weight = weight.to(dtype) if weight.is_floating_point() else weight
                state[name] = weight if weight is part else weight.cpu()
    _write_atomically(model, state, tokenizer, directory, writes=writes, dtype=dtype)


def _write_atomically(
    model: PreTrainedModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    writes: bool,
    dtype: torch.dtype | None = None,
) -> None:
    if not writes:
        return
    with atomic_directory(directory) as temporary:
        _write_model(model, state, tokenizer, temporary)
        if dtype is not None:  # transformers writes the dtype of the model in memory
            config = temporary / "config.json"
            about = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(about, indent=2) + "\n")
        (temporary / MARKER).touch()


def _write_model(
    base: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    base.save_pretrained(str(directory), state_dict=state)
    tokenizer.save_pretrained(str(directory))


@torch.no_grad()
def _merged_state(base: PreTrainedModel, gather: Callable[[Tensor], Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The state dict that `base` would have without PEFT, with W + BA·scale for each weight under a LoRA layer.

    With `keep=False` it only helps the other processes to gather theirs, and returns nothing.
    """
    deltas = {
        f"{name}.base_layer.weight": layer.get_delta_weight("default")
        for name, layer in base.named_modules()
        if isinstance(layer, LoraLayer)
    }
    merged = {}
    for name, part in base.state_dict().items():
        if ".lora_" in name:
            continue
        weight = gather(part)
        if not keep:
            continue
        delta = deltas.get(name)
        changed = weight if delta is None else (weight.float() + delta.float()).to(weight.dtype)
        merged[name.replace(".base_layer.", ".")] = changed if part is weight else changed.cpu()
    return merged
