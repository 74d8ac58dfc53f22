"""transformers on the same weights, for bench: `python -m leafsum.runtime.bench.peer FOLDER DTYPE THREADS`."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from ...ranks.json_lines import Answer, serve_lines

EXPERT_CODES = ("grouped_mm", "eager")
"""transformers' ways to compute experts on a CPU; which is faster depends on dtype and processor."""

TRIAL: dict[str, Any] = {"prompt_ids": list(range(64)), "new_tokens": 4}


class Peer:
    """One model of transformers, which decodes greedily. No library is imported before this is made."""

    def __init__(self, folder: str, dtype: str, num_threads: int) -> None:
        # transformers is no dependency of leafsum: it is measured where it is installed.
        transformers = importlib.import_module("transformers")
        import torch

        torch.set_num_threads(num_threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._take_fastest_expert_code()

    def complete(self, prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        """One request. prompt_s: to its first token; decode_s: from there to its last."""
        torch = self.torch
        with torch.inference_mode():
            begin_s = time.perf_counter()
            found = self.model(torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
            token_ids = [int(found.logits[0, -1].argmax())]
            first_s = time.perf_counter()
            for _ in range(new_tokens - 1):
                found = self.model(
                    torch.tensor([token_ids[-1:]]), past_key_values=found.past_key_values, use_cache=True
                )
                token_ids.append(int(found.logits[0, -1].argmax()))
            last_s = time.perf_counter()
        return {"prompt_s": first_s - begin_s, "decode_s": last_s - first_s, "token_ids": token_ids}

    def _take_fastest_expert_code(self) -> None:
        """Each is tried twice, in turns; the second time counts."""
        taken_s: dict[str, float] = {}
        for code in EXPERT_CODES * 2:
            self.model.set_experts_implementation(code)
            found = self.complete(**TRIAL)
            taken_s[code] = found["prompt_s"] + found["decode_s"]
        self.model.set_experts_implementation(min(taken_s, key=lambda code: taken_s[code]))


def main() -> None:
    folder, dtype, num_threads = sys.argv[1:]

    def start() -> Answer:
        peer = Peer(folder, dtype, int(num_threads))
        return lambda question: peer.complete(**question)

    serve_lines(start)


if __name__ == "__main__":
    main()
