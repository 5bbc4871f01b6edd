"""The names of the algorithms in `trainer/algorithms/`: NAME is the function NAME of NAME.py there."""

from __future__ import annotations

from ..config.trainer import TrainerConfig


class AlgorithmKeys(TrainerConfig):
    names = {"credit": ("gdpo",), "baseline": ("maxrl",)}
