"""Asynchronous post-training of a tiny language model in NumPy: groups of answers, versions, staleness.

    python examples/post_training.py

The model knows eleven tokens, the digits and an end, and learns to count: after the prompt 6, the answer is 7 8 9 END.
Workers write groups: several answers to one prompt, of different lengths, as one item. The learner compares the answers
of a group with each other (GRPO), and gets no groups whose version is too old. Actors and learner never wait for
each other, except for room in the queue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any

import numpy as np

import reverb_writer as rw

END, MAX_TOKENS = 10, 14
NUM_WORKERS, NUM_ANSWERS, BATCH_SIZE, NUM_UPDATES = 2, 16, 8, 200
MAX_AGE, LEARNING_RATE, CLIP = 20, 4.0, 0.2
TABLES = [rw.TableConfig.queue("groups", 2 * BATCH_SIZE), rw.TableConfig.variables("weights")]


def log_softmax(logits: Any) -> Any:
    """Return log-probabilities over the last axis."""
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def answer(logits: Any, prompt: int, rng: np.random.Generator) -> tuple[list[int], list[float]]:
    """Sample an answer, token by token, until the end; return its tokens and their log-probabilities."""
    tokens: list[int] = []
    log_probs: list[float] = []
    token = prompt
    while token != END and len(tokens) < MAX_TOKENS:
        scores = log_softmax(logits[token])
        token = int(rng.choice(len(scores), p=np.exp(scores)))
        tokens.append(token)
        log_probs.append(float(scores[token]))
    return tokens, log_probs


def reward_of(prompt: int, tokens: list[int]) -> float:
    """Return the share of the right answer with which the answer begins."""
    right = [*range(prompt + 1, 10), END]
    num_right = next(
        (at for at, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1]), len(tokens)
    )
    return min(num_right, len(right)) / len(right)


def work(address: str, seed: int) -> None:
    """Write groups of answers of the newest weights until the learner ends the run."""
    rng = np.random.default_rng(seed)
    with (
        rw.Variables(address, "weights") as variables,
        rw.ItemWriter(address, "groups", max_in_flight_items=4, until=lambda: variables.finished) as writer,
        contextlib.suppress(rw.errors.FinishedError),
    ):
        weights = variables.latest()
        while not variables.finished:
            weights = variables.poll(weights)
            prompt = int(rng.integers(10))
            answers = [answer(weights["logits"], prompt, rng) for _ in range(NUM_ANSWERS)]
            writer.write(
                {
                    "tokens": np.concatenate([tokens for tokens, _ in answers]),  # [sum of lengths], end to end
                    "log_probs": np.concatenate([log_probs for _, log_probs in answers]),
                    "lengths": [len(tokens) for tokens, _ in answers],  # [answers]
                    "rewards": [reward_of(prompt, tokens) for tokens, _ in answers],
                    "prompt": prompt,
                    "version": int(weights["version"]),
                }
            )


def learn(address: str, num_updates: int = NUM_UPDATES) -> tuple[list[float], list[int]]:
    """Train; return the mean reward of each batch, and the ages of all groups in versions."""
    logits, rewards, ages = np.zeros((END + 1, END + 1)), [], []
    with (
        rw.Variables(address, "weights") as variables,
        rw.ReplayDataset(address, "groups", BATCH_SIZE, collate="pad", max_age=MAX_AGE) as dataset,
    ):
        for version in range(num_updates):
            variables.publish({"logits": logits, "version": version})
            dataset.version = version
            groups = next(dataset).data
            gradient = np.zeros_like(logits)
            ages += (version - groups["version"]).tolist()
            for group in range(BATCH_SIZE):
                gradient += gradient_of({name: leaf[group] for name, leaf in groups.items()}, logits)
            logits = logits + LEARNING_RATE * gradient / BATCH_SIZE
            rewards.append(float(groups["rewards"].mean()))
        variables.finish()
    return rewards, ages


def gradient_of(group: dict[str, Any], logits: Any) -> Any:
    """Return the gradient of a group's clipped objective: answers that are better than the group's mean gain."""
    advantages = (group["rewards"] - group["rewards"].mean()) / (group["rewards"].std() + 1e-6)
    lengths = group["lengths"]
    num_tokens = lengths.sum()  # the rest of the row is padding
    tokens, old = group["tokens"][:num_tokens], group["log_probs"][:num_tokens]
    before = np.roll(tokens, 1)
    before[np.cumsum(lengths) - lengths] = group["prompt"]  # before the first token of each answer
    log_probs = log_softmax(logits[before])
    ratio = np.exp(log_probs[np.arange(num_tokens), tokens] - old)  # corrects for older weights
    advantages = np.repeat(advantages, lengths)
    is_kept = np.where(advantages > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
    slope = (np.eye(END + 1)[tokens] - np.exp(log_probs)) * (is_kept * ratio * advantages / num_tokens)[:, None]
    gradient = np.zeros_like(logits)
    np.add.at(gradient, before, slope)
    return gradient


def main() -> None:
    """Start a server and the workers, and train."""
    spawn = multiprocessing.get_context("spawn")
    with rw.LocalServer(TABLES) as server:
        workers = [spawn.Process(target=work, args=(server.address, seed)) for seed in range(NUM_WORKERS)]
        for worker in workers:
            worker.start()
        rewards, ages = learn(server.address)
        for worker in workers:
            worker.join()
    print(f"Mean reward of the first batches {np.mean(rewards[:10]):.2f}, of the last {np.mean(rewards[-10:]):.2f}.")
    print(f"Groups were {np.mean(ages):.1f} versions old on average, and up to {max(ages)}.")


if __name__ == "__main__":
    main()
