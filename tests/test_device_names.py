"""No accelerator is named where any would do: "cuda" stands only where a figure or a file is NVIDIA's.

And nothing is left to the device that a user's ``torch.set_default_device`` names.
"""

import ast
import io
import pathlib
import tokenize

import autopipe

ROOM = pathlib.Path(autopipe.__file__).parent
MAKERS_OWN = {
    "accelerator.py": "the kinds that torch has an autocast for",
    "hardware.py": "which attention kernels a described device runs",
    "measure/meta_attention.py": "which attention kernels a described device runs",
    "measure/devices.py": "descriptions of NVIDIA's devices",
    "measure/timers.py": "what changes times on NVIDIA's devices alone",
    "runtime/step_result.py": "modules' method of that name, which a runtime does not have",
    "runtime/wire/group.py": "a switch of torch's backends, which has it in its name",
    "tracing/calls/regions.py": "switches of attention's kernels, which have it in their name",
    "tracing/patches/queries.py": "the switches of torch.backends.cuda, which code may ask for",
    "cli/options.py": "examples of torch devices",
    "cli/planning.py": "names of torch devices",
}
TORCHS = {"is_cuda", "__cuda_array_interface__"}
"""Attributes of tensors that torch calls so."""

FACTORIES = """arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn
randperm scalar_tensor tensor tril_indices triu_indices zeros"""
"""Functions of torch's that ask for the default device."""


def named(path):
    """The lines on which code, not prose, names it."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    for token in tokens:
        is_prose = token.type == tokenize.COMMENT or token.string.lstrip("rbuf").startswith(('"""', "'''"))
        if "cuda" in token.string.lower() and not is_prose and token.string.strip("\"'") not in TORCHS:
            yield token.start[0], token.line.strip()


def test_cuda_is_named_only_where_it_is_meant():
    found = {
        f"{path.relative_to(ROOM).as_posix()}:{line}: {text}"
        for path in ROOM.rglob("*.py")
        if path.relative_to(ROOM).as_posix() not in MAKERS_OWN
        for line, text in named(path)
    }
    assert not found, "use autopipe.accelerator: " + "; ".join(sorted(found))


def test_the_places_that_may_name_it_do():
    assert all(list(named(ROOM / place)) for place in MAKERS_OWN)


def unplaced(path):
    """The lines on which a tensor is made without a word on where."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    for call in calls:
        name = ast.unparse(call.func).removeprefix("torch.")
        is_factory = ast.unparse(call.func) == f"torch.{name}" and name in FACTORIES.split()
        if is_factory and not {"device", None} & {keyword.arg for keyword in call.keywords}:
            yield call.lineno


def test_whatever_is_made_says_where():
    found = {f"{p.relative_to(ROOM).as_posix()}:{line}" for p in ROOM.rglob("*.py") for line in unplaced(p)}
    assert not found, 'pass device="cpu", or that of what it goes with: ' + "; ".join(sorted(found))
