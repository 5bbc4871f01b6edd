"""A taskset for verifiers: word problems of two operations, with a calculator as a tool."""

import random
import re

import verifiers.v1 as vf

KINDS = (
    ("{name} has {a} {thing}, gets {b} more and gives {c} away. How many {thing} are left?", "{a} + {b} - {c}"),
    ("{name} buys {b} boxes of {a} {thing} and finds {c} more. How many {thing} are there?", "{a} * {b} + {c}"),
    ("{name} has {a} {thing}, and {c} friends bring {b} more each. How many {thing} are there?", "{a} + {b} * {c}"),
)


class Problem(vf.TaskData):
    answer: int


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Compute an expression of whole numbers with + - * and brackets, such as (3 + 4) * 5."""
        return str(value(expression))


def value(expression: str) -> int | str:
    if not re.fullmatch(r"[0-9+*() -]{1,40}", expression) or "**" in expression:
        return "error: only whole numbers, + - * and brackets"
    try:
        return int(eval(expression))
    except (SyntaxError, TypeError):
        return "error: this is not an expression"


class WordProblemConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class WordProblem(vf.Task[Problem, vf.State, WordProblemConfig]):
    @classmethod
    def toolsets(cls, config: WordProblemConfig) -> list[Calculator]:
        return [Calculator(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(re.findall(r"-?\d+", trace.last_reply) == [str(self.data.answer)])

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordProblemsConfig(vf.TasksetConfig):
    problems: int = 1000
    task: WordProblemConfig = WordProblemConfig()


class WordProblems(vf.Taskset[WordProblem, WordProblemsConfig]):
    def load(self) -> list[WordProblem]:
        source = random.Random(0)
        return [WordProblem(problem(source), self.config.task) for _ in range(self.config.problems)]


def problem(source: random.Random) -> Problem:
    wording, expression = source.choice(KINDS)
    numbers = {"a": source.randint(11, 60), "b": source.randint(3, 40), "c": source.randint(2, 9)}
    names = {"name": source.choice(("Ann", "Ben", "Cem")), "thing": source.choice(("books", "coins", "pens"))}
    return Problem(
        system_prompt="Solve the problem with the calculator, then answer with just the number.",
        prompt=wording.format(**names, **numbers),
        answer=int(value(expression.format(**numbers))),
    )


if __name__ == "__main__":
    Calculator.run()

__all__ = ["WordProblems"]
