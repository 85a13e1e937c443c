#!/usr/bin/env python
"""Every shape of model that vLLM builds here x every feature that can be switched on here, each a real production engine beside a
real node agent and rollout engine: does it end refused, compute-only or elastic, as docs/compatibility.md says, and as `rose doctor` says of
its command line?   (`make conformance`)

Which rows of the table a shape and a feature touch is written down below; what they allow together is the table's own judgement
(``rose.policy.compat``).

- *refused*: production's lease says ``off`` and names the row, and so does its log; it has none of the files by which memory would be
  lent; the agent, told to lend, says that production does not share; a rollout engine that has heard of that holds nothing; production
  answers as before.
- *compute-only*: production keeps all its memory while rollouts generate in a fixed budget of their own; its greedy tokens and
  log-probs are those that it gave alone.
- *elastic*: memory is lent, by the kernel's figure; tokens and log-probs are the same while rollouts generate in it; ``off`` brings
  all of it back, and ``on`` lends it again.

The doctor is asked what the server was started with; its word, and the row that it names, have to be what the plugin then did.

What vLLM itself does not start, or answer, or answers differently the second time, with the same arguments and without the plugin is named as such.  One engine after the other, about
a quarter of a minute each; the result is written after each.

    python benchmarks/conformance.py --resume           # goes on behind what out/conformance.json has
    python benchmarks/conformance.py --only "moe x"     # cells that begin so
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402

from benchmarks.lib.engine_kinds import FEATURES, PLAIN  # noqa: E402
from benchmarks.lib.report import Report, machine, write  # noqa: E402
from rose.coserve.records import Phase, ServingLease  # noqa: E402
from rose.policy.compat import Row, Support, judge, row, row_of_number, together  # noqa: E402
from rose.shared_memory import SharedMemorySweep  # noqa: E402
from tests.engine_launcher import EngineServer, EngineStartError  # noqa: E402
from tests.pair.memory import TOTAL_PAGES, writer_of  # noqa: E402
from tests.pair.pair import HELD_PAGES, PRODUCTION_ARGS, Pair  # noqa: E402
from tests.plugin.ask_doctor import NOT_TOLD, ask_about  # noqa: E402
from tests.tiny_shapes import SHAPE_ARGS, SHAPES, image_url, write_shape, write_weights  # noqa: E402

NAME = "conformance"
SHAPE_ROWS = {
    "qwen3": "decoder",
    "llama": "decoder",
    "moe": "decoder",
    "gemma3": "kv_groups",
    "gpt_oss": "kv_groups",
    "chunked": "kv_kind",
    "sliding": "kv_kind",
    "mla": "mla",
    "mtp": "mla",
    "qwen3_next": "hybrid",
    "granite": "hybrid",
    "lfm2": "hybrid",
    "mamba2": "hybrid",
    "jamba": "state_kind",
    "mamba": "state_kind",
    "encoder_decoder": "encoder_decoder",
    "idefics3": "multimodal",
    "multimodal": "modalities",
    "pooling": "pooling",
}
OF_BOTH = {
    ("idefics3", "offload"): "modalities",  # with a connector vLLM takes the encoder's outputs as inputs
    ("idefics3", "connector"): "modalities",
    (
        "qwen3_next",
        "draft_model",
    ): "drafts",  # vLLM drafts with the model's own layer then, which nobody tried
}
"""Rows that follow from a shape and a feature together, as vLLM makes its configuration of them."""
MAX_MODEL_LEN = 512
DUMMY = frozenset({"encoder_decoder", "mamba", "jamba", "multimodal", "pooling"})
"""Shapes of which vLLM makes the weights up.  These are so small that what comes early in a prompt hardly reaches its answer; the others have
weights of their own, large enough that it does: else a lost block would not be seen.  All of these but ``pooling`` are refused."""
SHORT = {"encoder_decoder": 128}
"""Context lengths of shapes that have no more."""
FIXED_PAGES = 8
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 3, 100, 16
TOLERANCE = 1e-3
PATIENCE_S = 120.0
DIFFERENT = {"other tokens than alone", "log-probs differ"}
"""How :class:`Matrix` says that, before any number."""
LENDERS = ("serving.board", "serving.chunks", "serving.rank0")
"""Files that production has only if it takes part."""
IS_OFF = "ROSE is off, serving goes on as without it: "
NOT_SHARED = "serving does not share: "


@dataclass(frozen=True, kw_only=True)
class Cell:
    shape: str
    feature: str

    @property
    def name(self) -> str:
        return f"{self.shape} x {self.feature}"

    @property
    def rows(self) -> list[Row]:
        both = OF_BOTH.get((self.shape, self.feature))
        names = [SHAPE_ROWS[self.shape], FEATURES[self.feature][0], *([both] if both else [])]
        return [row(name) for name in [*names, *together(names)]]

    @property
    def expected(self) -> Support:
        return judge("serving", [one.name for one in self.rows])[0]

    def args(self, model: Path) -> list[str]:
        feature = [one.replace("MODEL", str(model)) for one in FEATURES[self.feature][1]]
        made_up = ["--load-format=dummy"] if self.shape in DUMMY else []
        length = f"--max-model-len={SHORT.get(self.shape, MAX_MODEL_LEN)}"
        return [*made_up, *SHAPE_ARGS.get(self.shape, ()), *feature, length]


@dataclass(kw_only=True)
class Outcome:
    """``got``: what was in force, or ``vLLM does not start it``; ``wrong``: what is not as it has to be.

    ``doctor``: what `rose doctor` said; "" where it was not asked, because the server did not start.
    """

    name: str
    expected: str
    got: str = ""
    row: str = ""
    doctor: str = ""
    doctor_row: str = ""
    seconds: float = 0.0
    held_pages: int = 0
    rollout_tokens: int = 0
    logprob_diff: float = 0.0
    wrong: list[str] = field(default_factory=list)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Words:
    """What is said of a production that is refused, by itself, the agent and a rollout engine."""

    lease: ServingLease
    log: str
    """Production's."""
    shared: list[str]
    """Files of :data:`LENDERS` that a process of it writes."""
    status: dict[str, Any]
    """The agent's."""
    held_pages: int


def signs_of_a_loan(words: Words, because: Row) -> list[str]:
    """What is not as it has to be beside a production that is refused by this row."""
    lease, waits_for = words.lease, words.status["engine"]["waits_for"] or ""
    lent = lease.total_pages or lease.reserved_pages or lease.lent_pages
    signs = {
        f"its lease says {lease}": lease.phase != Phase.OFF or lent,
        f"its log does not say that ROSE is off by {because.name}": f"{IS_OFF}{because.feature}"
        not in words.log,
        f"it writes {', '.join(words.shared)}": words.shared,
        f"the agent waits for {waits_for!r}": not waits_for.startswith(f"{NOT_SHARED}{because.feature}"),
        f"the agent lends {words.status['lending']['lend_pages']} pages": words.status["lending"][
            "lend_pages"
        ],
        f"a rollout engine holds {words.held_pages} pages": words.held_pages,
    }
    return [sign for sign, is_there in signs.items() if is_there]


def against_the_doctor(outcome: Outcome, answer: Mapping[str, Any]) -> list[str]:
    """Note what the doctor said of an engine that runs; what of it is not what happened."""
    outcome.doctor = answer["support"] or ""
    outcome.doctor_row = answer["rows"][0]["row"] if answer["rows"] else ""
    if outcome.row == "state_kind" and outcome.got == Support.REFUSED.label and NOT_TOLD in answer["notes"]:
        return []  # only the start tells which kind it is, and that is what the doctor says
    if answer["problem"] or outcome.doctor != outcome.got:
        return [f"the doctor says {answer['problem'] or outcome.doctor} of what is {outcome.got}"]
    if outcome.doctor_row != outcome.row:
        return [f"the doctor says it is {outcome.got} by {outcome.doctor_row}, not by {outcome.row}"]
    return []


def tell_apart(answers: Sequence[tuple[Any, Sequence[float]]]) -> bool:
    """Are answers to different prompts different, and numbers?"""
    said = {tuple(numbers) for _, numbers in answers}
    return len(said) == len(answers) and all(math.isfinite(one) for numbers in said for one in numbers)


def cells() -> list[Cell]:
    """All of them: first every shape as it is, then every feature of the plainest, then the rest."""
    every = [Cell(shape=shape, feature=feature) for feature in FEATURES for shape in SHAPE_ROWS]
    return sorted(every, key=lambda one: (one.feature != PLAIN, one.shape != "qwen3"))


class Matrix:
    """Cells on one agent and one rollout engine; production is another in each."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    async def run(self, cell: Cell) -> Outcome:
        pair, began_s = self.pair, time.monotonic()
        outcome = Outcome(name=cell.name, expected=cell.expected.label)
        model = write_shape(pair.folder / "models" / cell.shape, cell.shape)
        if cell.shape not in DUMMY and not list(model.glob("*.safetensors")):
            await asyncio.to_thread(write_weights, model)
        try:
            await pair.until(lambda: pair.set_mode("off", max_lend_pages=TOTAL_PAGES), "the agent listens")
            await pair.become(model, cell.args(model))
        except EngineStartError as error:
            await self._explain(model, cell, outcome, error)
        else:
            try:
                await self._look(cell, outcome)
            except httpx.HTTPStatusError as error:
                await self._explain(model, cell, outcome, error)
            except (TimeoutError, httpx.HTTPError, KeyError) as error:
                outcome.wrong.append(f"{type(error).__name__}: {str(error)[:500]}")
            if DIFFERENT & {one.split(" by ")[0] for one in outcome.wrong} and await asyncio.to_thread(
                differs_by_itself, model, cell
            ):
                outcome.why = "stock vLLM answers the same prompt differently the second time"
                outcome.wrong = [one for one in outcome.wrong if one.split(" by ")[0] not in DIFFERENT]
        outcome.seconds = round(time.monotonic() - began_s, 1)
        return outcome

    async def _explain(
        self, model: Path, cell: Cell, outcome: Outcome, error: EngineStartError | httpx.HTTPStatusError
    ) -> None:
        """Whose fault is it that it does not start, or answers with an error?"""

        def ask_stock() -> tuple[str, str]:
            args = [*PRODUCTION_ARGS, *cell.args(model)]
            try:
                with EngineServer(model, env={"VLLM_PLUGINS": ""}, args=args) as stock:
                    try:
                        ask(stock.url, str(model), cell, 0)
                    except httpx.HTTPStatusError as refused:  # 500: its log says more
                        log = stock.log_path.read_text(errors="replace")
                        said = (
                            last_error(log)
                            if refused.response.is_server_error
                            else refused.response.text[:300]
                        )
                        return "vLLM does not answer", said
                    except httpx.HTTPError:
                        return "vLLM does not answer", last_error(stock.log_path.read_text(errors="replace"))
            except EngineStartError as failed:
                return "vLLM does not start it", last_error(str(failed))
            return "", ""

        got, outcome.why = await asyncio.to_thread(ask_stock)
        outcome.got = got or outcome.got or "not started"
        if not got:
            outcome.wrong.append(f"without the plugin only: {last_error(str(error))}")

    async def _look(self, cell: Cell, outcome: Outcome) -> None:
        pair = self.pair
        await pair.until(self._has_spoken, "production says what it shares", PATIENCE_S)
        lease = pair.lease()
        assert lease is not None
        support = Support(lease.support)
        outcome.got, outcome.row = support.label, row_of_number(lease.row).name
        if support != cell.expected:
            outcome.wrong.append(f"{support.label} instead of {cell.expected.label}")
        allowed = {one.name for one in cell.rows if one.serving == cell.expected}
        if outcome.row not in allowed:
            outcome.wrong.append(f"by the row {outcome.row}, not {' or '.join(sorted(allowed))}")
        assert pair.server is not None
        outcome.wrong += against_the_doctor(outcome, await asyncio.to_thread(ask_about, pair.server))
        alone = await self._answers(cell)
        if not tell_apart(alone):
            outcome.wrong.append("it says the same to different prompts, or no number: nothing is compared")
        if support == Support.REFUSED:
            await self._refused(cell, outcome, alone)
        elif support == Support.COMPUTE_ONLY:
            await self._compute_only(cell, outcome, alone)
        else:
            await self._elastic(cell, outcome, alone)

    def _has_spoken(self) -> bool:
        lease = self.pair.lease()
        return lease is not None and lease.phase in (Phase.READY, Phase.OFF)

    async def _refused(self, cell: Cell, outcome: Outcome, alone: list[Any]) -> None:
        """Nothing is lent, by everybody's word who would have a part in it, when they have heard ``on``."""
        pair = self.pair
        await pair.until(lambda: pair.set_mode("on", max_lend_pages=TOTAL_PAGES), "the agent listens")
        await pair.until(self._agent_has_met, "the agent says that production does not share", PATIENCE_S)
        await pair.until(self._engine_has_heard, "a rollout engine, if there is one, hears on", PATIENCE_S)
        outcome.wrong += signs_of_a_loan(self._words(), row(outcome.row))
        await self._same(cell, outcome, alone, rollouts=False)

    def _agent_has_met(self) -> bool:
        status = self.pair.status()
        return status is not None and (status["engine"]["waits_for"] or "").startswith(NOT_SHARED)

    def _engine_has_heard(self) -> bool:
        """There is none, or it has read what the agent wrote after ``on``."""
        pair, node = self.pair, self.pair.files.node()
        try:
            told, held = node.read(), pair.rollout()
            return held is None or (told is not None and held.acked_epoch == told.epoch)
        finally:
            node.close()

    def _words(self) -> Words:
        pair, held = self.pair, self.pair.rollout()
        assert pair.server is not None
        return Words(
            lease=pair.lease() or ServingLease(),
            log=pair.server.log_path.read_text(errors="replace"),
            shared=[one for one in LENDERS if writer_of(pair.production_pids(), pair.dir / one) is not None],
            status=pair.status() or {},
            held_pages=held.reserved_pages if held is not None else 0,
        )

    async def _compute_only(self, cell: Cell, outcome: Outcome, alone: list[Any]) -> None:
        pair = self.pair
        await pair.until(lambda: pair.set_mode("on", max_lend_pages=FIXED_PAGES), "the agent listens")
        await pair.until(lambda: self._held() == FIXED_PAGES, "rollouts have their budget", PATIENCE_S)
        await self._same(cell, outcome, alone)
        lease = pair.lease()
        if lease is None or lease.lent_pages or lease.reserved_pages != lease.total_pages:
            outcome.wrong.append(f"its memory was lent: {lease}")
        await pair.until(pair.off, "off is heard")
        await pair.until(lambda: not self._held(), "rollouts hold nothing", PATIENCE_S)

    async def _elastic(self, cell: Cell, outcome: Outcome, alone: list[Any]) -> None:
        pair = self.pair
        for _ in range(2):
            pair.memory.worst_pages = 0.0
            await pair.until(lambda: pair.set_mode("on"), "the agent listens")
            await pair.until(pair.is_lent, "memory is lent", PATIENCE_S)
            await pair.until(
                lambda: 0 < pair.memory.serving_pages <= TOTAL_PAGES - HELD_PAGES,
                "it really goes",
                PATIENCE_S,
            )
            await self._same(cell, outcome, alone)
            await pair.until(pair.off, "off is heard")
            await pair.until(pair.all_back, "all memory is back", PATIENCE_S)
            if pair.memory.worst_pages > TOTAL_PAGES:
                outcome.wrong.append(f"{pair.memory.worst_pages} of {TOTAL_PAGES} pages at once")
        await self._same(cell, outcome, alone, rollouts=False)

    def _held(self) -> int:
        held = self.pair.rollout()
        return held.reserved_pages if held is not None else 0

    async def _same(self, cell: Cell, outcome: Outcome, alone: list[Any], rollouts: bool = True) -> None:
        """The answers are those that it gave alone; ``rollouts``: while these make tokens."""
        pair, before = self.pair, self.pair.rollouts.tokens
        outcome.held_pages = max(outcome.held_pages, self._held())
        compared = 0
        until_s, pause_s = time.monotonic() + PATIENCE_S, 0.0
        while not compared or (rollouts and pair.rollouts.tokens == before):
            await asyncio.sleep(pause_s)  # on a single core rollouts get no more of it than production leaves
            pause_s = min(max(0.05, 2 * pause_s), 2.0)
            answers = await self._answers(cell)
            compared += 1
            if [tokens for tokens, _ in answers] != [tokens for tokens, _ in alone]:
                outcome.wrong.append("other tokens than alone")
                return
            for (_, said), (_, first) in zip(answers, alone, strict=True):
                difference = max((abs(a - b) for a, b in zip(said, first, strict=True)), default=0.0)
                outcome.logprob_diff = max(outcome.logprob_diff, difference)
            if outcome.logprob_diff > TOLERANCE:
                outcome.wrong.append(f"log-probs differ by {outcome.logprob_diff:.2g}")
                return
            if time.monotonic() > until_s:
                outcome.wrong.append("rollouts made no token beside it")
                return
        outcome.rollout_tokens += pair.rollouts.tokens - before

    async def _answers(self, cell: Cell) -> list[tuple[Any, list[float]]]:
        return await asyncio.to_thread(
            lambda: [ask(self.pair.url, str(self.pair.model), cell, one) for one in range(NUM_PROMPTS)]
        )


def differs_by_itself(model: Path, cell: Cell) -> bool:
    """Does stock vLLM answer otherwise when it is asked again?  What its prefix cache holds then may have been computed in other steps."""
    shutil.rmtree(
        model / "kv", ignore_errors=True
    )  # what a connector has kept: the first answers are computed
    with EngineServer(model, env={"VLLM_PLUGINS": ""}, args=[*PRODUCTION_ARGS, *cell.args(model)]) as stock:
        first, again = (
            [ask(stock.url, str(model), cell, one) for one in range(NUM_PROMPTS)] for _ in range(2)
        )
    if [tokens for tokens, _ in first] != [tokens for tokens, _ in again]:
        return True
    pairs = zip(first, again, strict=True)
    return any(
        abs(a - b) > TOLERANCE for (_, one), (_, other) in pairs for a, b in zip(one, other, strict=True)
    )


def ask(url: str, model: str, cell: Cell, number: int) -> tuple[Any, list[float]]:
    """A greedy answer and its log-probs; of a pooling model a vector."""
    ids = [5 + (13 * number + 7 * i) % 200 for i in range(PROMPT_TOKENS)]
    if cell.shape == "pooling":
        answer = httpx.post(f"{url}/v1/embeddings", json={"model": model, "input": ids}, timeout=60.0)
        answer.raise_for_status()
        return "vector", answer.json()["data"][0]["embedding"]
    body = {
        "model": model,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    if cell.shape == "idefics3":
        words = " ".join(f"w{one}" for one in ids)
        content = [
            {"type": "image_url", "image_url": {"url": image_url(number)}},
            {"type": "text", "text": words},
        ]
        chat = body | {"logprobs": True, "messages": [{"role": "user", "content": content}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60.0)
        answer.raise_for_status()
        said = answer.json()["choices"][0]["logprobs"]["content"]
        return [one["token"] for one in said], [one["logprob"] for one in said]
    prompt = (
        {"prompt_embeds": embedded(cell.shape, number)}
        if cell.feature == "prompt_embeds"
        else {"prompt": ids}
    )
    answer = httpx.post(f"{url}/v1/completions", json=body | prompt, timeout=60.0)
    answer.raise_for_status()
    said = answer.json()["choices"][0]["logprobs"]
    return said["tokens"], said["token_logprobs"]


def embedded(shape: str, number: int) -> str:
    import torch

    generator = torch.Generator().manual_seed(number)
    file = io.BytesIO()
    values = torch.randn(PROMPT_TOKENS, SHAPES[shape]["hidden_size"], generator=generator) * 0.15
    torch.save(values.to(torch.bfloat16), file)
    return base64.b64encode(file.getvalue()).decode()


def last_error(log: str) -> str:
    """What a server's log says last of why it ended, or why it did not answer."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and " WARNING " not in line]
    named = re.findall(r"\b(?:\w*Error|error): .*\S", "\n".join(lines))
    return (named or lines or [""])[-1][:300]


def load(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    return [Outcome(**one) for one in json.loads(path.read_text())["details"]["cells"]]


def save(path: Path, done: Sequence[Outcome], commits: Sequence[str]) -> None:
    write(path, NAME, summarise(done), {"commits": list(commits), "cells": [asdict(one) for one in done]})


def summarise(done: Sequence[Outcome]) -> dict[str, Any]:
    got = Counter(one.got for one in done)
    return {
        "cells": len(done),
        "cells_planned": len(cells()),
        **{f"got.{name.replace(' ', '_')}": count for name, count in sorted(got.items())},
        "wrong": sum(bool(one.wrong) for one in done),
        "doctor_asked": sum(bool(one.doctor) for one in done),
        "doctor_right": sum(one.doctor == one.got for one in done if one.doctor),
        "logprob_diff_max": max((one.logprob_diff for one in done), default=0.0),
        "rollout_tokens": sum(one.rollout_tokens for one in done),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/conformance.json"))
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the result file has and is right"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell later than that")
    parser.add_argument("--only", action="append", help="cells that begin so")
    args = parser.parse_args()
    try:
        return asyncio.run(_main(args))
    except KeyboardInterrupt:
        print(f"stopped; --resume goes on behind the cells in {args.json}", file=sys.stderr)
        return 130


async def _main(args: argparse.Namespace) -> int:
    until_s = time.monotonic() + args.minutes * 60.0
    report = Report(NAME)
    done = [one for one in load(args.json) if not one.wrong] if args.resume else []
    before = json.loads(args.json.read_text())["details"]["commits"] if done else []
    commits = list(dict.fromkeys([*before, str(machine()["commit"])]))
    had = {one.name for one in done}
    wanted = [cell for cell in cells() if cell.name not in had]
    if args.only:
        wanted = [cell for cell in wanted if cell.name.startswith(tuple(args.only))]
    with SharedMemorySweep():
        async with Pair(args.json.parent / "conformance-logs", seed=0, busy=False) as pair:
            matrix = Matrix(pair)
            for number, cell in enumerate(wanted):
                if time.monotonic() > until_s:
                    break
                done.append(await matrix.run(cell))
                save(args.json, done, commits)
                one = done[-1]
                verdict = "; ".join(one.wrong) or "as the table says"
                print(
                    f"{number + 1:4} of {len(wanted)}  {one.name:34} {one.got} by {one.row or '-'}, "
                    f"{one.seconds:.0f} s: {one.why or verdict}",
                    flush=True,
                )
    summary = summarise(done)
    report.table(("figure", "value"), summary.items(), title=NAME)
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
