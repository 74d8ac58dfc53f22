"""transformers on the same weights, for bench: `python -m leafsum.runtime.bench.peer FOLDER THREADS`."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from typing import Any

from ...ranks.json_lines import Answer, serve_lines

DTYPES = ("float32", "bfloat16")
EXPERT_CODES = ("grouped_mm", "eager")
"""transformers' ways to compute experts on a CPU; which is faster depends on dtype, processor and rows."""

TRIAL_PROMPT_TOKENS = {"prompt_s": 128, "decode_s": 16}
TRIAL_NEW_TOKENS = 8
HOPELESS = 2.0
"""A way that takes so many times the least gets no further try."""

FURTHER_TRIES = 3
"""In turns, and the least counts: a neighbour on the machine is not to choose."""


class Peer:
    """One model of transformers in every dtype, which decodes greedily. Imports no library before this is made."""

    def __init__(self, folder: str, num_threads: int) -> None:
        # transformers is no dependency of leafsum: it is measured where it is installed.
        transformers = importlib.import_module("transformers")
        import torch

        torch.set_num_threads(num_threads)
        self.torch = torch
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.models = {dtype: load(folder, dtype=getattr(torch, dtype)).eval() for dtype in DTYPES}

    def answer(self, prompts: list[list[int]], new_tokens: int, way: str = "") -> dict[str, Any]:
        """Without a way, the one that is fastest at such work; else the work done in it."""
        return self.complete(prompts, new_tokens, way) if way else {"way": self.fastest(prompts, new_tokens)}

    def complete(self, prompts: list[list[int]], new_tokens: int, way: str) -> dict[str, Any]:
        """Prompts of one length, side by side. prompt_s: to their first tokens; decode_s: from there to their last.

        `way` is "DTYPE, CODE". token_ids: of every prompt.
        """
        torch = self.torch
        dtype, code = way.split(", ")
        model = self.models[dtype]
        model.set_experts_implementation(code)
        with torch.inference_mode():
            begin_s = time.perf_counter()
            found = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            drawn = [found.logits[:, -1].argmax(-1).tolist()]
            first_s = time.perf_counter()
            for _ in range(new_tokens - 1):
                last = torch.tensor(drawn[-1])[:, None]
                found = model(last, past_key_values=found.past_key_values, use_cache=True)
                drawn.append(found.logits[:, -1].argmax(-1).tolist())
            last_s = time.perf_counter()
        token_ids = [list(ids) for ids in zip(*drawn, strict=True)]
        return {"prompt_s": first_s - begin_s, "decode_s": last_s - first_s, "token_ids": token_ids}

    def fastest(self, prompts: list[list[int]], new_tokens: int) -> str:
        """Every dtype with every code does a little of the work: once to warm up and, unless hopeless, again."""
        figure = "decode_s" if new_tokens > 1 else "prompt_s"
        trial = [ids[: TRIAL_PROMPT_TOKENS[figure]] for ids in prompts], min(new_tokens, TRIAL_NEW_TOKENS)

        def time_s(way: str) -> float:
            taken_s: float = self.complete(*trial, way)[figure]
            return taken_s

        first_s = {way: time_s(way) for way in map(", ".join, itertools.product(DTYPES, EXPERT_CODES))}
        hopeful = [way for way in first_s if first_s[way] <= HOPELESS * min(first_s.values())]
        further_s = [{way: time_s(way) for way in hopeful} for _ in range(FURTHER_TRIES)]
        return min(hopeful, key=lambda way: min(taken_s[way] for taken_s in further_s))


def main() -> None:
    folder, num_threads = sys.argv[1:]

    def start() -> Answer:
        peer = Peer(folder, int(num_threads))
        return lambda question: peer.answer(**question)

    serve_lines(start)


if __name__ == "__main__":
    main()
