"""Tell vLLM's cache about the models of the tests: ``python -m tests.model_infos``, about 20 s, once.

vLLM looks at a class of models in a process of its own, the first time on a machine, and keeps what it found.  That is some ten seconds of
a core each, and the tests have twenty; in one process it is the imports of their modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

ARCHITECTURES = (
    "BertModel",
    "DeepseekV2ForCausalLM",
    "Eagle3LlamaForCausalLM",
    "EagleLlamaForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Idefics3ForConditionalGeneration",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MistralForCausalLM",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "TransformersForCausalLM",
    "TransformersMoEForCausalLM",
)


def main() -> None:
    from vllm.model_executor.models import registry

    def here(look: Callable[[], Any]) -> Any:
        return look()

    with mock.patch.object(registry, "_run_in_subprocess", here):
        for name in ARCHITECTURES:
            registry.ModelRegistry.models[name].inspect_model_cls()


if __name__ == "__main__":
    main()
