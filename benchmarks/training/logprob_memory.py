"""How much memory log-probs, entropies and their gradients take: in chunks, and all at once.

    python benchmarks/training/logprob_memory.py --json FILE                  # 16,384 tokens, a vocabulary of 151,936, hidden size 1,024
    python benchmarks/training/logprob_memory.py --whole --tokens 1024        # the reference, as far as memory goes

Bar: less than 3 GB in chunks.

Keys: ``peak_bytes`` is what the process grew by at its largest, from before hidden states and the output layer's weight were made: so
they and their gradients are in it (``inputs_bytes``, once each for values and gradients); ``logits_bytes``: all logits in fp32.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.report import Report
from rose.train.logprobs import token_log_probs
from rose.train.loss import entropy, restricted_log_softmax


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1_024)
    parser.add_argument("--whole", action="store_true", help="the reference: every logit at once")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.zeros(8, 8, requires_grad=True).exp().sum().backward()
    before = _peak_bytes()
    hidden_ND = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight_VD = torch.empty(args.vocabulary, args.hidden).normal_(std=0.02).requires_grad_()
    targets_N = torch.arange(args.tokens) % args.vocabulary
    temperature_N, free_N = torch.ones(args.tokens), torch.full((args.tokens,), -1)
    started_s = time.monotonic()
    if args.whole:
        log_probs_NV = restricted_log_softmax(hidden_ND @ weight_VD.T, temperature_N, None, free_N)
        log_prob_N, entropy_N = log_probs_NV.gather(1, targets_N.unsqueeze(1)), entropy(log_probs_NV)
    else:
        log_prob_N, entropy_N = token_log_probs(
            hidden_ND,
            weight_VD,
            None,
            targets_N=targets_N,
            temperature_N=temperature_N,
            allowed_KV=None,
            allowed_index_N=free_N,
        )
    (log_prob_N.sum() + 0.01 * entropy_N.sum()).backward()
    found = {
        "peak_bytes": _peak_bytes() - before,
        "inputs_bytes": 2 * 4 * (hidden_ND.numel() + weight_VD.numel()),
        "logits_bytes": 4 * args.tokens * args.vocabulary,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    named = {key: value for key, value in vars(args).items() if key != "json"}
    Report("logprob_memory").finish(found, {"arguments": named}, args.json)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
