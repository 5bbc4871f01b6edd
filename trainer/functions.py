"""Loads the functions that `trainer.credit`, `baseline`, `loss` and `context_loss` name: a feature's or a user's.

They run in the trainer's process. A function's error is reported on one line, with the setting and the line number.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ..core.config.section import feature_sections
from ..core.config.trainer import TrainerConfig
from ..core.errors import ConfigError
from ..core.features import load_plugin


@cache
def load(setting: str, own: str) -> Callable[..., Any]:
    """Return the function that `own` names. Raise ConfigError if it cannot be loaded.

    `own` is FILE.py:NAME, PLUGIN:NAME, or a NAME in `functions` of a feature's section (NAME.py in its folder).
    """
    file, _, name = own.rpartition(":")
    if not file:
        section = next(one for one in feature_sections().values() if any(name in of for of in one.functions.values()))
        return getattr(import_module(f"{section.__module__.rpartition('.')[0]}.{name}"), name)
    if not file.endswith(".py"):
        where, module = f"the plugin {file}", load_plugin(file)
    else:
        where = path = str(Path(file).expanduser().absolute())
        known_as = f"lightning_hook_{sha256(path.encode()).hexdigest()[:12]}"
        spec = spec_from_file_location(known_as, path)
        if spec is None or spec.loader is None or not Path(path).is_file():
            raise ConfigError(f"{setting}: there is no file {path}")
        module = sys.modules[known_as] = module_from_spec(spec)  # dataclasses look there
        with faults(setting, own, known_as):
            spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{setting}: {where} has no function {name}")
    return function


def own_functions(config: TrainerConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that name a FILE.py:NAME or PLUGIN:NAME, with that name."""
    credits = [("credit", name) for name in config.credits.values()]
    for setting, name in (*credits, ("loss", config.loss), ("context_loss", config.context_loss)):
        if name is not None and ":" in name:
            yield f"trainer.{setting}", name


def check_functions(config: TrainerConfig) -> None:
    """Raise ConfigError if one of the user's functions cannot be loaded. Called before a model is loaded."""
    for setting, name in own_functions(config):
        load(setting, name)


@contextmanager
def faults(setting: str, own: str, module: str | None = None) -> Iterator[None]:
    """Turn an error of the user's function in this block into a ConfigError. `module`: the module being loaded."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        read_from = module or str(getattr(load(setting, own), "__module__", ""))
        path = getattr(sys.modules.get(read_from), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        file = "" if ".py:" in own else f"{path}, "  # a plugin's
        where = f" ({file}line {lines[-1]})" if lines else ""
        message = " ".join(str(error).split())[:500]
        raise ConfigError(f"{setting} {own}: it raised {type(error).__name__}: {message}{where}") from error
