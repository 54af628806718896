"""Plans of language models of 70 to 671 billion parameters on 16 to 128 ranks, from a cold start.

``python -m benchmarks.solver.scale [MODEL STAGES LIMIT]``: without arguments every row of :data:`ROWS`, each
in a process of its own. The model is built on the meta device, captured, costed by estimate for an H200 and
planned by ``autopipe.plan`` with its defaults; where memory is limited (on 16 ranks to more than it has),
blocks may be computed again. CPU seconds are of the whole process, imports and the building of the model
included.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

ROWS = (
    ("llama-70b", 16, ""),
    ("llama-405b", 16, "300GB"),
    ("llama-405b", 64, "140GB"),
    ("llama-405b", 128, "140GB"),
    ("deepseek-v3", 16, "500GB"),
    ("deepseek-v3", 64, "140GB"),
    ("deepseek-v3", 128, "140GB"),
    ("transformer, 22,000 ops", 16, ""),
    ("transformer, 22,000 ops", 16, "0.8 of its share"),
)
LLAMA = {
    "llama-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    "llama-405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126},
}
N_ROWS, N_TOKENS, N_MICROBATCHES = 64, 2048, 32
NAMES = {
    "llama-70b": "Llama, 70B",
    "llama-405b": "Llama, 405B",
    "deepseek-v3": "DeepSeek-V3, 671B",
    "transformer, 22,000 ops": "transformer, the solver alone",
}
RESULTS = pathlib.Path(__file__).with_name("scale.json")


def planned(name: str, n_stages: int, limit: str) -> dict[str, Any]:
    """One row: what was planned, its certificate, and the CPU seconds of this process so far."""
    import torch
    import transformers

    import autopipe
    from autopipe.measure import device
    from autopipe.units import parse_bytes

    with torch.device("meta"):
        if name in LLAMA:
            heads = LLAMA[name]["hidden_size"] // 128
            config = transformers.LlamaConfig(
                **LLAMA[name], num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256
            )
            model = transformers.LlamaForCausalLM(config)
        else:
            model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config())
    ids = torch.zeros(N_ROWS, N_TOKENS, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"memory_limit": limit, "recompute": "auto"} if limit else {}
    h200 = device("H200")
    roomy = (
        dataclasses.replace(h200, memory_bytes=parse_bytes(limit) + h200.reserved_bytes) if limit else h200
    )
    plan = autopipe.plan(
        model.bfloat16(),
        n_stages,
        (ids,),
        {"labels": ids},
        costs="estimated",
        device=roomy,
        n_microbatches=N_MICROBATCHES,
        **options,
    )
    found = {"gap": plan.bounds.gap, "proved": plan.bounds.proved}
    steps = {"step_s": plan.step_s, "step_lower_s": plan.bounds.step_lower_s}
    return {"ops": sum(len(s.ops) for s in plan.stages), **found, **steps}


def solved(n_stages: int, limit: str) -> dict[str, Any]:
    """The same of a transformer opened into 22,000 ops, transfers hidden as by default; the solver alone.

    With a ``limit``, a stage of the first ranks has room for four fifths of its share: 1F1B keeps one
    microbatch more in flight on each rank than on the next.
    """
    from autopipe.solve import chain
    from autopipe.solve.stopping import timed_by_work

    from .families import Sketch, transformer

    sketch = Sketch(0)
    transformer(sketch, 1571)
    problem = dataclasses.replace(sketch.problem(n_stages), overlap=True)
    if limit:
        items = tuple(
            dataclasses.replace(i, static_bytes=weight, saved_bytes=1 + i.forward_ns // 10_000)
            for i, weight in zip(problem.items, sketch.weights, strict=True)
        )
        static, saved = (sum(getattr(i, name) for i in items) for name in ("static_bytes", "saved_bytes"))
        room = (static + n_stages * saved) * 4 // (5 * n_stages)
        stages = tuple(
            dataclasses.replace(s, limit_bytes=room, in_flight=n_stages - x)
            for x, s in enumerate(problem.stages)
        )
        problem = dataclasses.replace(problem, items=items, stages=stages)
    with timed_by_work():
        answer = chain(problem, time_limit_s=20.0)
    gap = answer.bottleneck_ns / answer.lower_ns - 1
    return {"ops": len(problem.items), "gap": gap, "proved": answer.proved}


def main() -> None:
    if len(sys.argv) > 1:
        name, n_stages, limit = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        row = solved(n_stages, limit) if "ops" in name else planned(name, n_stages, limit)
        row |= {"model": name, "stages": n_stages, "limit": limit, "cpu_s": time.process_time()}
        print(json.dumps(row))
        return
    rows = []
    for row_ in ROWS:
        command = [sys.executable, "-m", "benchmarks.solver.scale", *map(str, row_)]
        done = subprocess.run(command, check=True, timeout=600, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        print(_line(rows[-1]), flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    """A row as the README has it."""
    gap = "proved" if row["proved"] else f"{row['gap']:.2%}"
    named = NAMES.get(row["model"], row["model"])
    step = f"{row['step_s'] / row['step_lower_s'] - 1:.1%}" if "step_s" in row else ""
    of = f"| {named} | {row['stages']} | {row['limit']} | {row['ops']:,}"
    return f"{of} | {gap} | {step} | {row['cpu_s']:.1f} |"


if __name__ == "__main__":
    main()
