"""Arithmetic with a tool: the agent may ask a calculator, then answers.

The agent's message is one line of two kinds, anywhere in its text; the first one counts::

    CALC 12*(3+4)        -> the next message is "= 84", or "error: ..."
    ANSWER 84            -> the end; reward 1 if it is right, else 0

Tasks are made from a seed, or come from a JSONL file (or a saved data set) with ``question`` (text) and ``answer``
(a number).

The calculator (:func:`calculate`) evaluates a small grammar of its own over whole numbers and fractions: no names, no calls, no
attributes, nothing of Python's ``eval``; length, depth and the size of numbers are bounded, so no input costs more than
microseconds.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rose.errors import ConfigError, TrainError
from rose.train.dataset import load_tasks
from rose.train.envs.base import Environment, Observation, Task

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 20
MAX_EXPONENT = 400
MAX_BITS = 256
"""Of a numerator or denominator; a product of two more is refused before it is computed twice."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMMAND = re.compile(r"\b(CALC|ANSWER)\b[ \t:=]*([^\n]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MathParams:
    """Which questions, and how long the agent may think."""

    path: str | None = None
    """JSONL of tasks, or a folder that ``datasets`` saved; None makes ``num_tasks`` from the seed."""
    num_tasks: int = 64
    num_terms: int = 3
    max_number: int = 20
    max_turns: int = 4
    held_out_fraction: float = 0.1
    """Of a file's tasks: the last ones are kept for evaluation."""
    seed: int = 0


class MathFamily:
    """See the module's docstring."""

    allowed_texts = None

    def __init__(self, params: MathParams) -> None:
        self._params = params
        if params.num_tasks < 1 or params.num_terms < 2 or params.max_number < 2 or params.max_turns < 1:
            raise ConfigError(
                "num_tasks and max_turns need 1 or more, num_terms and max_number 2", field="env.settings"
            )
        if not 0.0 <= params.held_out_fraction < 1.0:
            raise ConfigError("must lie in [0, 1)", field="env.settings.held_out_fraction")
        self._file_tasks: list[dict[str, Any]] | None = None
        if params.path is not None:
            self._file_tasks = load_tasks(params.path, {"question": str, "answer": (int, float, str)})

    def tasks(self) -> Sequence[Task]:
        if self._file_tasks is not None:
            return [self._task(one["question"], one["answer"]) for one in self._file_tasks[: self._split]]
        return self._make(random.Random(f"{self._params.seed}-train"), self._params.num_tasks, set())

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        if self._file_tasks is not None:
            held_out = self._file_tasks[self._split :][:count]
            return [self._task(one["question"], one["answer"]) for one in held_out]
        seen = {str(task["question"]) for task in self.tasks()}
        return self._make(random.Random(f"{self._params.seed}-held-out"), count, seen)

    def make(self) -> Environment:
        return MathEnv(self._params.max_turns)

    @property
    def _split(self) -> int:
        assert self._file_tasks is not None
        return max(1, round(len(self._file_tasks) * (1.0 - self._params.held_out_fraction)))

    def _make(self, rng: random.Random, count: int, seen: set[str]) -> list[Task]:
        tasks: list[Task] = []
        for _ in range(100 * count):
            if len(tasks) == count:
                return tasks
            text = str(rng.randint(1, self._params.max_number))
            for _ in range(self._params.num_terms - 1):
                text += f" {rng.choice('+-*')} {rng.randint(1, self._params.max_number)}"
            question = f"What is {text}?"
            if question not in seen:
                seen.add(question)
                tasks.append(self._task(question, str(calculate(text))))
        raise ConfigError(
            f"only {len(tasks)} different questions were found",
            field="env.settings.num_tasks",
            fix="ask for fewer, or raise num_terms or max_number",
        )

    def _task(self, question: str, answer: object) -> Task:
        number = number_of(str(answer))
        if number is None:
            raise ConfigError(f"answer {answer!r:.40} is not a number", field="env.settings.path")
        return {"env": "math_tools", "question": question, "answer": str(number)}


class MathEnv:
    """One question."""

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._answer: Fraction | None = None
        self._turns = self._num_calls = self._num_errors = 0

    async def reset(self, task: Task) -> Observation:
        if task.get("env") != "math_tools":
            raise TrainError(f"not a math_tools task: {task.get('env')!r}", field="task.env")
        self._answer = Fraction(str(task["answer"]))
        self._turns = self._num_calls = self._num_errors = 0
        prompt = f"{task['question']}\nSay CALC and an expression to compute it, or ANSWER and the number."
        return Observation(messages=({"role": "user", "content": prompt},))

    async def step(self, text: str) -> Observation:
        if self._answer is None:
            raise TrainError("step() before reset() or after the end of the episode", field="env")
        self._turns += 1
        command = _COMMAND.search(text)
        if command is not None and command[1] == "ANSWER":
            return self._end(right=_number(command[2]) == self._answer, truncated=False)
        if self._turns >= self._max_turns:
            return self._end(right=False, truncated=True)
        if command is None:
            self._num_errors += 1
            reply = "Say CALC and an expression, or ANSWER and the number."
        else:
            self._num_calls += 1
            try:
                reply = f"= {calculate(command[2])}"
            except ValueError as error:
                self._num_errors += 1
                reply = f"error: {error}"
        return Observation(messages=({"role": "user", "content": reply},))

    async def close(self) -> None:
        self._answer = None

    def _end(self, *, right: bool, truncated: bool) -> Observation:
        self._answer = None
        info = {
            "turns": self._turns,
            "calls": self._num_calls,
            "errors": self._num_errors,
            "truncated": truncated,
        }
        return Observation(done=True, reward=float(right), success=right, info=info)


def number_of(text: str) -> Fraction | None:
    """A number as a file has it: digits, a decimal fraction, an exponent within that of a float, or ``3/4``."""
    _, has_exponent, exponent = text.lower().partition("e")
    try:
        # Fraction computes the power of ten, whatever the exponent.
        if len(text) > MAX_EXPRESSION_CHARS or (has_exponent and abs(int(exponent)) > MAX_EXPONENT):
            return None
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def calculate(expression: str) -> Fraction:
    """Value of ``+ - * /`` and parentheses over numbers.

    Raises:
        ValueError: Anything else, a division by zero, or a result that is too large; the text is for the agent.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"more than {MAX_EXPRESSION_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("not an expression") from None
    return _value(tree.body, MAX_DEPTH)


def _value(node: ast.expr, depth: int) -> Fraction:
    if depth == 0:
        raise ValueError("too deeply nested")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if number != number or abs(number) > 1e30:
                raise ValueError("too large")
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth - 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, depth - 1), _value(right, depth - 1)
            if isinstance(op, ast.Div) and b == 0:
                raise ValueError("division by zero")
            result = _BINARY[type(op)](a, b)
            if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
                raise ValueError("too large")
            return result
    raise ValueError("only numbers, + - * / and parentheses")


def _number(text: str) -> Fraction | None:
    try:
        return calculate(text.strip().rstrip("."))
    except ValueError:
        return None
