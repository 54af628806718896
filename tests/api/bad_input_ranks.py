"""Run on two ranks: each case must raise the same clear error on both, and leave the group usable."""

import torch
import torch.distributed as dist

import autopipe


def mlp(width: int = 8) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))


def raised(action) -> str:
    try:
        action()
    except autopipe.AutopipeError as error:
        names = [c.__name__ for c in type(error).__mro__ if issubclass(c, autopipe.AutopipeError)]
        return f"{' '.join(names)}: {error}"
    return "nothing"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    cases = {
        "other models": lambda: autopipe.split(mlp(8 + rank), 2, (x,), costs="estimated"),
        "one rank's model fails": lambda: autopipe.split(
            mlp(), 2, (torch.randn(6, 4 + rank),), costs="estimated"
        ),
        "too many stages": lambda: autopipe.split(mlp(), 50, (x,), costs="estimated"),
        "more ranks than stages": lambda: autopipe.split(mlp(), 1, (x,), costs="estimated"),
        "missing cost file": lambda: autopipe.split(mlp(), 2, (x,), costs="nowhere.json"),
        "world size": lambda: autopipe.split(mlp(), 3, (x,), n_ranks=3, costs="estimated").runtime(),
        "refused by the model": lambda: autopipe.split(mlp(), 2, (torch.randn(6, 5),), costs="estimated"),
    }
    for name, action in cases.items():
        print(f"{name}: {raised(action)}", flush=True)
    pipe = autopipe.split(mlp(), 2, (x,), costs="estimated")
    runtime = pipe.runtime(loss_fn=lambda output, target: (output - target).pow(2).mean())
    print(f"afterwards: {float(runtime.step(x, target=x).loss):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
