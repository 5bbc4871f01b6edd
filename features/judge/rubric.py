"""The rewarder `rubric`: weighted criteria, each asked apart with its reason. The reasons are the reward's comment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from ...core.config.rollouts import RewardsConfig
from ...core.config.section import Positive, Section
from ...core.errors import ConfigError
from .config import RewarderConfig
from .model import AsksModel, JudgeModel
from .process import Function
from .rewarder import GivenScore, Json, NoReward, together
from .texts import IS_DATA, fenced, mark_for, messages_of, written

SYSTEM = """You answer one question about what an agent did. {data}
Answer with one of {choices}. Say why in one or two sentences that name what you saw."""
SCALES = {"yes/no": {"yes": 1.0, "no": 0.0}, "0-4": {str(i): i / 4 for i in range(5)}}


class Criterion(Section):
    """A question to the model, or a `program` (FILE.py:NAME, beside the rubric) that returns 0 to 1."""

    name: Annotated[str, Field(min_length=1)]
    question: str | None = None
    program: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")] | None = None
    scale: Literal["yes/no", "0-4"] = "yes/no"
    weight: Positive = 1.0

    @model_validator(mode="after")
    def _is_one(self) -> Criterion:
        if (self.question is None) == (self.program is None):
            raise ValueError("a criterion has either a question or a program")
        return self


class Criteria(Section):
    criteria: Annotated[list[Criterion], Field(min_length=1)]


def read_criteria(file: Path) -> list[Criterion]:
    """Return the criteria of a rubric's file. Raise ConfigError."""
    try:
        return Criteria.model_validate(yaml.safe_load(file.read_text())).criteria
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        problem = f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}" if mark else type(error).__name__
        raise ConfigError(f"{file}: no YAML: {problem}; put texts with ? or : in quotes") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"{file}: {where or 'criteria'}: {wrong['msg'].removeprefix('Value error, ')}") from None


class Rubric(AsksModel):
    """Asks every criterion of `file`. The reward is the mean by weight, from 0 to 1."""

    def __init__(self, name: str, config: RewarderConfig, model: JudgeModel, rewards: RewardsConfig) -> None:
        super().__init__(name, config, model)
        assert config.file is not None
        file = config.file.expanduser()
        self._criteria = read_criteria(file)
        programs = (file.parent / one.program.rpartition(":")[0] for one in self._criteria if one.program)
        self.question = "".join([SYSTEM, *(each.read_text() for each in (file, *programs) if each.is_file())])
        self.questions = sum(one.question is not None for one in self._criteria)
        if config.model is None and self.questions:
            raise ConfigError(f"{self.label}: the questions of {file} need a model")
        self._programs = {
            one.name: Function(rewards.model_copy(update={"function": str(file.parent / one.program)}))
            for one in self._criteria if one.program
        }  # fmt: skip

    async def check(self) -> None:
        await together(program.check() for program in self._programs.values())

    async def scores(self, rollout: Json) -> list[GivenScore]:
        mark, happened = await asyncio.to_thread(self._written, rollout)
        answers = await together(self._answer(one, rollout, mark, happened) for one in self._criteria)
        found = zip(self._criteria, answers, strict=True)
        value = sum(one.weight * value for one, (value, _) in found) / sum(one.weight for one in self._criteria)
        return [GivenScore(value, "\n".join(said for _, said in answers))]

    async def close(self) -> None:
        await together([self._model.close(), *(program.close() for program in self._programs.values())])

    def _written(self, rollout: Json) -> tuple[str, str]:
        """A mark, and what happened between its lines; no question has the mark."""
        if not self.questions:
            return "", ""
        shown = messages_of(rollout, self._model.clean)
        mark = mark_for([*shown, [one.question or "" for one in self._criteria]])
        return mark, fenced(mark, "What happened", written(mark, shown, self._config.longest))

    async def _answer(self, one: Criterion, rollout: Json, mark: str, happened: str) -> tuple[float, str]:
        """The value of one criterion, and what is said of it."""
        if one.question is None:
            scores = await self._programs[one.name].scores(rollout)
            if len(scores) != 1 or not 0 <= scores[0].value <= 1:
                raise NoReward(f"{one.name}: its program returns no number from 0 to 1")
            return scores[0].value, f"{one.name}: {scores[0].value:g}"
        scale = SCALES[one.scale]
        system = SYSTEM.format(data=IS_DATA.format(mark=mark), choices=", ".join(scale))
        text = f"{happened}\n\nThe question: {one.question}"
        answer, reason = await self._model.choose(system, text, [*scale], [rollout["rollout_id"]])
        return scale[answer], f"{one.name} {answer}: {reason[:500]}"
