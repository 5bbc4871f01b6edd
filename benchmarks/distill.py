"""What a teacher, and what hints, are worth beside rewards: the demo's sums, on its model, at equal rollouts.

`python benchmarks/distill.py teacher DIRECTORY` makes a teacher: the demo's model, fine-tuned on the answers of the 80
sums to train on. `python benchmarks/distill.py rl|teacher-only|hints-only STEPS [TEACHER]` trains the model itself by
rewards, by the teacher's log-probabilities, or by comments that name the right answer. Steps are the trainer's own, on
8 sums with 8 answers each, at the demo's settings; what vLLM, the proxy and the store do is left out.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.proxy.config.policy import PolicyConfig
from lightning_proxy.proxy.guides.config import GuideKeys
from lightning_proxy.trainer.credit.baselines import group_baselines
from lightning_proxy.trainer.guides.hinted import WORDING, hinted_row
from lightning_proxy.trainer.step.rescoring import logprobs_of
from lightning_proxy.trainer.step.scoring import score as scored
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Guidance, Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "addition"))
from demo_agent import score
from tasks import split

TRAIN, HELD_OUT = ([(int(str(t["a"])), int(str(t["b"]))) for t in part] for part in split(0, 20))
GROUP, GROUPS, LONGEST, EPOCHS, ENOUGH = 8, 8, 16, 12, 0.9
Sum = tuple[int, int]


class Chat:
    """The demo's question about a sum, as tokens, and answers as text."""

    def __init__(self, model: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")

    def ids(self, asked: Sum, words: str = "{message}") -> list[int]:
        """The prompt's tokens; `words` go around the question, and may have a hint in them."""
        said = words.format(message=f"What is {asked[0]}+{asked[1]}? Answer with just the number.",
                            hint=f"The right answer is {sum(asked)}.")  # fmt: skip
        messages = [{"role": "user", "content": said}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def answers(self, model: Any, sums: list[Sum], *, greedy: bool = False) -> list[list[int]]:
        """One answer to each sum, with the token that ended it."""
        model.eval()
        given = self.tokenizer.pad({"input_ids": [self.ids(asked) for asked in sums]}, return_tensors="pt")
        end = self.tokenizer.eos_token_id
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        found = model.generate(**given, max_new_tokens=LONGEST, pad_token_id=end, eos_token_id=end, **how)
        rows = found[:, given["input_ids"].shape[1] :].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    def text(self, answer: list[int]) -> str:
        return str(self.tokenizer.decode(answer, skip_special_tokens=True))

    def right(self, model: Any) -> float:
        """The share of held-out sums that get exactly the right number, at temperature 1."""
        sums = HELD_OUT * 4
        given = zip(sums, self.answers(model, sums), strict=True)
        return sum(self.text(answer).strip() == str(sum(asked)) for asked, answer in given) / len(sums)


def make_teacher(directory: Path) -> None:
    """Fine-tune all weights on the right answers until most held-out sums are right, and save them."""
    source = prepare_model(cache_directory())
    chat, model = Chat(source), AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for epoch in range(EPOCHS):
        model.train()
        for place in torch.randperm(len(TRAIN)).split(16):
            rows = [(chat.ids(s), [*chat.tokenizer(str(sum(s)))["input_ids"], chat.tokenizer.eos_token_id])
                    for s in (TRAIN[int(i)] for i in place)]  # fmt: skip
            width = max(len(p) + len(a) for p, a in rows)
            ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in rows])
            labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows])
            optimizer.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
        right = chat.right(model)
        print(f"epoch {epoch + 1}: {right:.0%} of the held-out sums", flush=True)
        if right >= ENOUGH:
            break
    model.save_pretrained(directory)
    chat.tokenizer.save_pretrained(directory)


def learn(by: str, steps: int, teacher: Path | None) -> None:
    """Train by rewards (`rl`), by a teacher alone or by hints alone; print what is right as it rises."""
    source = prepare_model(cache_directory())
    chat = Chat(source)
    settings = {"learning_rate": 2e-4, "lora_rank": 16, "report_to": [], "dtype": "float32", "hints": "comments"}
    with tempfile.TemporaryDirectory() as directory:
        policy = PolicyConfig(model=str(source), directory=Path(directory))
        learner = LightningTrainer(GuideKeys.model_validate(settings), policy)
        guide = None if teacher is None else AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
        torch.manual_seed(0)
        began = time.monotonic()
        for step in range(1, steps + 1):
            tasks = [TRAIN[int(i)] for i in torch.randperm(len(TRAIN))[:GROUPS]]
            samples, reward = rollouts(chat, learner, tasks, rewarded=by == "rl")
            if by == "teacher-only":
                samples = taught(learner, samples, guide)
            elif by == "hints-only":
                samples = hinted(chat, learner, samples, tasks)
            metrics = learner.step(Batch(step, tuple(samples), (), compared=GROUP * GROUPS))
            held_out = f", held out {chat.right(learner.policy_model):.0%}" if step % 4 == 0 or step == steps else ""
            print(f"{by} step {step}, {step * GROUP * GROUPS} rollouts, {time.monotonic() - began:.0f} s: reward "
                  f"{reward:.2f}, guide_kl {metrics['guide_kl']:.2f}{held_out}", flush=True)  # fmt: skip


def rollouts(chat: Chat, learner: LightningTrainer, tasks: list[Sum], *, rewarded: bool) -> tuple[list[Sample], float]:
    """Rows of a step, with the advantages of their rewards if these count; and the mean reward."""
    sums = [task for task in tasks for _ in range(GROUP)]
    given, answers = [chat.ids(asked) for asked in sums], chat.answers(learner.policy_model, sums)
    rewards = [score(chat.text(answer), sum(asked)) for asked, answer in zip(sums, answers, strict=True)]
    said = learner.logprobs([[*ids, *answer] for ids, answer in zip(given, answers, strict=True)])
    samples = []
    for i, (ids, answer, logprobs) in enumerate(zip(given, answers, said, strict=True)):
        start, n, m = i - i % GROUP, len(ids), len(answer)
        baselines = group_baselines("grpo", rewards[start : start + GROUP]) if rewarded else None
        advantage = baselines[i - start].advantage(rewards[i]) if baselines else 0.0
        zeros, ones = (0.0,) * n, (1.0,) * (n + m)
        samples.append(Sample(f"{i}", f"{i // GROUP}", (*ids, *answer), (0,) * n + (1,) * m, (*zeros, *logprobs[n:]),
                              (*zeros, *(advantage,) * m), ones, ("c",)))  # fmt: skip
    return samples, sum(rewards) / len(rewards)


def taught(learner: LightningTrainer, samples: list[Sample], guide: Any) -> list[Sample]:
    """The rows with the teacher's log-probabilities."""
    with torch.no_grad():
        found = logprobs_of(samples, learner._cost, lambda rows: scored(guide, rows.tree, rows.samples))
    return [replace(s, guidance=(Guidance(tuple(said)),)) for s, said in zip(samples, found, strict=True)]


def hinted(chat: Chat, learner: LightningTrainer, samples: list[Sample], tasks: list[Sum]) -> list[Sample]:
    """The rows with the policy's own log-probabilities after a comment that names the right answer."""
    prompts = [chat.ids(tasks[i // GROUP], WORDING["comments"]) for i in range(len(samples))]
    starts = [sample.mask.index(1) for sample in samples]
    rows = [hinted_row(s, start, len(s.mask), p) for s, start, p in zip(samples, starts, prompts, strict=True)]
    found = []
    for sample, start, said in zip(samples, starts, learner.scores_of(rows), strict=True):
        values = (0.0,) * start + tuple(said[start - len(sample.mask) :])
        found.append(replace(sample, guidance=(Guidance(values),)))
    return found


def main() -> None:
    match sys.argv[1:]:
        case ["teacher", directory]:
            make_teacher(Path(directory))
        case [("rl" | "teacher-only" | "hints-only") as by, steps, *teacher]:
            learn(by, int(steps), Path(teacher[0]) if teacher else None)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
