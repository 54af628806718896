"""Runs ``python -m benchmarks.same``: attention calls and step times of model and pipe, interleaved.

Models are in ``models``, the recording of calls in ``calls``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import autopipe

from .calls import attention_calls
from .models import CASES


def step_s(run: Any, model: nn.Module, given: dict[str, Any]) -> float:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    run(**given).loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same")
    parser.add_argument("models", nargs="*", default=[*CASES])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    chosen = parser.parse_args()
    print(f"{'model':10}{'mask':8}{'calls':8}{'pipe / model':>14}")
    for name in chosen.models:
        case = CASES[name]
        for mask in case.masks:
            torch.manual_seed(0)
            model = case.make(chosen.width, 4)
            given = case.batch(2, chosen.length, mask, chosen.width)
            pipe = autopipe.split(model, 2, kwargs=given)
            with attention_calls() as plain:
                model(**given)
            with attention_calls() as ours:
                pipe(**given)
            pairs = [
                (step_s(pipe, model, given), step_s(model, model, given)) for _ in range(chosen.pairs + 1)
            ]
            ratio = statistics.median(a / b for a, b in pairs[1:])
            said = "equal" if plain == ours else "differ"
            print(f"{name:10}{mask:8}{said:8}{ratio:14.3f}", flush=True)


if __name__ == "__main__":
    main()
