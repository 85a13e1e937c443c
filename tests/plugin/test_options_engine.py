"""What the table calls elastic beside a plain decoder, one option at a time on a real production engine."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from rose.coserve.records import Phase
from rose.policy.compat import Support
from tests.engine_launcher import EngineServer
from tests.plugin.ask_doctor import ask_about
from tests.plugin.logits_for_tests import NEVER
from tests.plugin.stand_in import eventually
from tests.plugin.test_serving_engine import Agent
from tests.tiny_model import write_tiny_adapter, write_tiny_model
from tests.tiny_quantized import FORMATS, quantize
from tests.tiny_shapes import write_shape, write_weights

pytestmark = [pytest.mark.engine, pytest.mark.conformance, pytest.mark.timeout(240)]

OPTIONS = [
    "moe",
    "kv_events",
    "prompt_embeds",
    "logits_processors",
    "api_servers",
    "lora",
    "speculative",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "fp8_kv",
    "mla",
    *FORMATS,
]
HEADS = ("eagle", "eagle3")
LATENT = ("mla", "mtp")
"""Models with latent attention."""
DRAFTERS = ("draft_model", *HEADS, "mtp")
ROWS = {"moe": ["decoder"], "kv_events": ["decoder"]} | {one: ["speculative"] for one in DRAFTERS}
ROWS |= {"mtp": ["speculative", "mla"], **{key: ["weight_formats"] for key in FORMATS}}
"""Of options that are not named as theirs, or touch more than one."""
ADAPTERS = ("", "first", "second")
""""": the model itself."""
HIDDEN = 96
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CHUNK_BLOCKS = 32
SEATS = 16
"""Requests at once: of four blocks each, twice what one chunk holds."""
Answer = tuple[list[str], list[float]]


def tokens(first: int, count: int = 300) -> list[int]:
    """A prompt of its own; 300 tokens are two whole blocks, which the prefix cache keeps."""
    return [5 + (first + 7 * i) % 200 for i in range(count)]


def embedded(first: int, count: int = 300) -> str:
    generator = torch.Generator().manual_seed(first)
    file = io.BytesIO()
    torch.save((torch.randn(count, HIDDEN, generator=generator) * 0.15).to(torch.bfloat16), file)
    return base64.b64encode(file.getvalue()).decode()


class Production:
    """One engine with one option, and the requests that use the option."""

    def __init__(self, option: str, server: EngineServer, events: Path, args: list[str]) -> None:
        self.option = option
        self.server = server
        self.events = events
        self.args = args

    def prompt(self, first: int, count: int = 300) -> dict[str, Any]:
        if self.option == "prompt_embeds":
            return {"prompt_embeds": embedded(first, count)}
        adapter = ADAPTERS[first % len(ADAPTERS)] if self.option == "lora" else ""
        return {"prompt": tokens(first, count)} | ({"model": adapter} if adapter else {})

    @property
    def chunk_pages(self) -> int:
        """What its memory comes and goes in: 18 KiB for a latent block of a layer are whole pages no sooner."""
        return 9 if self.option in LATENT else 1

    def loan(self, pages: int) -> int:
        """What is lent where so much is asked for."""
        return pages // self.chunk_pages * self.chunk_pages

    def ask(self, prompt: dict[str, Any], max_tokens: int = 16) -> dict[str, Any]:
        body = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 2} | prompt
        answer = self.server.post("/v1/completions", {"model": str(self.server.model_dir)} | body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        return choice["logprobs"]

    def answers(self) -> list[Answer]:
        """The same prompts, each computed anew and then out of the prefix cache."""
        assert self.server.post("/reset_prefix_cache").status_code == 200
        asked = [self.ask(self.prompt(first)) for first in (0, 0, 4, 4)]
        return [(one["tokens"], one["token_logprobs"]) for one in asked]


@pytest.fixture(scope="module", params=OPTIONS)
def production(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Production]:
    option: str = request.param
    folder = tmp_path_factory.mktemp("engine")
    events = folder / "events"
    (folder / "node").mkdir(mode=0o700)
    args = write_engine(folder, option)
    env = {"ROSE_DIR": str(folder / "node"), "ROSE_GUARD": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with EngineServer(folder / "model", role="serving", env=env, args=args) as server:
        yield Production(option, server, events, args)


def drafter(method: str, folder: Path) -> list[str]:
    """A drafter of the model's own shape, so that its layers are more of the same in the KV cache; MTP: a layer of the model's own."""
    if method == "mtp":
        return [
            '--speculative-config={"method":"mtp","num_speculative_tokens":3}',
            f"--kv-cache-memory-bytes={144 << 20}",
        ]
    if method in HEADS:
        written = write_shape(folder / method, "llama") / "config.json"
        # Which layers an EAGLE 3 head reads: vLLM's own choice wants more than there are.
        reads = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if method == "eagle3" else {}
        written.write_text(json.dumps(json.loads(written.read_text()) | reads))
    else:
        write_tiny_model(folder / method, hidden_size=HIDDEN)
    config = {"method": method, "model": str(folder / method), "num_speculative_tokens": 3}
    load = ["--load-format=dummy"] if method in HEADS else []
    return [*load, f"--speculative-config={json.dumps(config)}"]


def write_engine(folder: Path, option: str) -> list[str]:
    """Model and adapters of an engine with this option; its arguments."""
    if option in (*LATENT, *HEADS):
        write_shape(folder / "model", option if option in LATENT else "llama")
        if option == "mtp":
            write_weights(folder / "model")
    elif option in FORMATS:
        write_shape(folder / "model", "llama")
        write_weights(folder / "model")
        quantize(folder / "model", option)
    else:
        write_tiny_model(folder / "model", hidden_size=HIDDEN, num_experts=4 if option == "moe" else 0)
    for seed, name in enumerate(ADAPTERS):
        if name:
            write_tiny_adapter(folder / name, seed=seed, hidden_size=HIDDEN)
    events = folder / "events"
    kv_events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{events}"}
    args = {
        "moe": [],
        "kv_events": [f"--kv-events-config={json.dumps(kv_events)}"],
        "prompt_embeds": ["--enable-prompt-embeds"],
        "logits_processors": ["--logits-processors=tests.plugin.logits_for_tests:Never"],
        "api_servers": ["--api-server-count=2"],
        "lora": [
            "--enable-lora",
            "--max-loras=1",  # so that some of a burst wait for a slot
            "--lora-modules",
            *(f"{name}={folder / name}" for name in ADAPTERS if name),
        ],
        "speculative": [f"--speculative-config={json.dumps(NGRAM)}"],
        **({option: drafter(option, folder)} if option in DRAFTERS else {}),
        "fp8_kv": ["--kv-cache-dtype=fp8"],
        **{one: [] for one in FORMATS},
        "mla": ["--load-format=dummy", f"--kv-cache-memory-bytes={144 << 20}"],
    }[option]
    return [*args, f"--max-num-seqs={SEATS}"]


@pytest.fixture
def agent(production: Production) -> Iterator[Agent]:
    agent = Agent(production.server.rose_dir)
    eventually(lambda: agent.lease().phase == Phase.READY, "serving is ready")
    yield agent
    agent.write(lend_pages=0, held=0)
    agent.until_lent(0)
    lease = agent.lease()
    agent.close()
    assert (lease.phase, lease.errors) == (Phase.READY, 0)
    assert "Traceback" not in production.server.log_path.read_text(errors="replace")


def test_answers_are_the_same_whatever_is_lent(production: Production, agent: Agent) -> None:
    assert agent.lease().support == Support.ELASTIC
    alone = production.answers()
    assert alone[0] != alone[2]
    for pages in (12, 0, agent.total - 1):
        agent.write(lend_pages=pages)
        agent.until_lent(production.loan(pages))
        assert production.answers() == alone


@pytest.mark.parametrize(
    "production",
    ["lora", "speculative", *DRAFTERS, "fp8_kv", "mla", *FORMATS],
    indirect=True,
    scope="module",
)
def test_answers_while_memory_is_lent_are_those_of_vllm_without_the_plugin(
    production: Production, agent: Agent
) -> None:
    model, env = production.server.model_dir, {"VLLM_PLUGINS": "", "VLLM_SERVER_DEV_MODE": "1"}
    with EngineServer(model, env=env, args=production.args) as stock:
        expected = Production(production.option, stock, production.events, production.args).answers()
    assert expected[0] != expected[2]  # what comes first reaches the last token
    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(production.loan(agent.total - 1))

    assert production.answers() == expected


def test_a_burst_takes_lent_memory_back(production: Production, agent: Agent) -> None:
    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(production.loan(agent.total - 1))
    board = agent.dir.serving_board()
    before = board.read()
    assert before is not None

    with concurrent.futures.ThreadPoolExecutor(SEATS) as pool:
        prompts = [production.prompt(20 + index, 440) for index in range(SEATS)]
        for done in [pool.submit(production.ask, prompt, 60) for prompt in prompts]:
            done.result(timeout=120)

    after = board.read()
    assert after is not None
    assert after.pressure_seq > before.pressure_seq


def test_the_doctor_had_said_so(production: Production, agent: Agent) -> None:
    answer = ask_about(production.server)

    lease = agent.lease()
    assert (answer["support"], answer["problem"]) == (Support(lease.support).label, "")
    if production.option not in DRAFTERS:  # whose layers only the start tells
        assert answer["total_pages"] == lease.total_pages
        assert answer["lendable_pages"] == agent.total - production.chunk_pages  # all but chunk 0
    assert [one["row"] for one in answer["rows"]] == ROWS.get(production.option, [production.option])


@pytest.mark.parametrize("production", ["lora"], indirect=True, scope="module")
def test_each_adapter_answers_as_itself_while_memory_is_lent(production: Production, agent: Agent) -> None:
    def answers() -> list[list[float]]:
        same = tokens(0)
        return [
            production.ask({"prompt": same} | ({"model": name} if name else {}))["token_logprobs"]
            for name in ADAPTERS
        ]

    alone = answers()
    assert len({tuple(one) for one in alone}) == len(ADAPTERS)
    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(agent.total - 1)
    assert answers() == alone


@pytest.mark.parametrize("production", ["speculative", *DRAFTERS], indirect=True, scope="module")
def test_drafts_are_verified_and_come_out_while_memory_is_lent(production: Production, agent: Agent) -> None:
    def counted(name: str) -> float:
        page = production.server.get("/metrics").text
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(production.loan(agent.total - 1))
    drafted, accepted = counted("draft_tokens"), counted("accepted_tokens")

    for first in range(5):
        production.ask(production.prompt(first), 100)

    assert counted("draft_tokens") > drafted
    # A head or a layer of seeded noise guesses nothing.
    assert counted("accepted_tokens") > accepted or production.option in (*HEADS, "mtp")


@pytest.mark.parametrize("production", ["logits_processors"], indirect=True, scope="module")
def test_the_processor_decides_while_memory_is_lent(production: Production, agent: Agent) -> None:
    agent.write(lend_pages=12)
    agent.until_lent(12)
    word = f"w{NEVER - 6}"

    said = production.ask(production.prompt(0, 100))

    # Log-probs are those before the processor: the model's first choice is known, and was not taken.
    assert word in [max(top, key=top.__getitem__).strip() for top in said["top_logprobs"]]
    assert word not in [token.strip() for token in said["tokens"]]


@pytest.mark.parametrize("production", ["kv_events"], indirect=True, scope="module")
def test_a_listener_hears_of_every_block_that_a_loan_takes_out_of_the_cache(
    production: Production, agent: Agent
) -> None:
    cached: set[Any] = set()
    numbers: list[int] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        # This end connects: one that binds subscribes only when it next looks at its socket, and misses what came before.
        socket.connect(f"ipc://{production.events}")

        def hear() -> int:
            while socket.poll(0):
                _, number, payload = socket.recv_multipart()
                numbers.append(int.from_bytes(number, "big"))
                for event in msgspec.msgpack.decode(payload)[1]:
                    if event["type"] == "BlockStored":
                        cached.update(event["block_hashes"])
                    elif event["type"] == "BlockRemoved":
                        cached.difference_update(event["block_hashes"])
                    else:
                        cached.clear()
            return len(cached)

        firsts = iter(range(40, 1000))
        eventually(lambda: production.ask(production.prompt(next(firsts)), 1) and hear(), "it is heard")
        assert production.server.post("/reset_prefix_cache").status_code == 200
        for _ in range(CHUNK_BLOCKS):
            production.ask(production.prompt(next(firsts)), 1)
        eventually(lambda: hear() == 2 * CHUNK_BLOCKS, "twice what one chunk holds is cached")

        agent.write(lend_pages=agent.total - 1)
        agent.until_lent(agent.total - 1)
        production.ask(production.prompt(next(firsts)), 1)  # events go out with a step

        eventually(lambda: 0 < hear() <= CHUNK_BLOCKS, "no more is said to be cached than one chunk holds")
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
