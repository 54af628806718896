"""The layer table of the package's docstring holds: no import runs up, and torch stays out where it says."""

import ast
import functools
import pathlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import autopipe

ROOT = pathlib.Path(autopipe.__file__).parent
ROWS = re.findall(r"^(\S[\w ]*?)\s{2,}([\w, ]+?)\s{2,}(no torch|torch)$", autopipe.__doc__, re.M)
ROOMS = [
    (room.strip(), row, torch) for row, (_, rooms, torch) in enumerate(ROWS) for room in rooms.split(",")
]
ORDER = {room: i for i, (room, _, _) in enumerate(ROOMS)}
TORCH = {room: torch == "torch" for room, _, torch in ROOMS}
FILES = sorted(p for p in ROOT.rglob("*.py") if p not in (ROOT / "__init__.py", ROOT / "__main__.py"))


def sub_rooms(room: pathlib.Path) -> list[str]:
    """The sub-rooms in the table of a room's docstring, bottom first; none where it has no table."""
    doc = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    table = re.search(r"^=+ +=+\nroom .*\n=+ +=+\n((?:.+\n)+?)=+ +=+$", doc, re.M)
    return re.findall(r"^(\w+) ", table[1], re.M) if table else []


DIVIDED = {p.parent.name: sub_rooms(p.parent) for p in ROOT.glob("*/__init__.py") if sub_rooms(p.parent)}


def room_of(path: pathlib.Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def is_file(dotted: str) -> bool:
    path = ROOT.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def statements(tree: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement below, and whether an import of the file runs it."""
    is_type_checking = isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
    at_import = at_import and not (
        isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking
    )
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield node, at_import
            yield from statements(node, at_import)


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, int, bool]]:
    """(dotted module, line, at import time) of every import in a file; relative ones made absolute."""
    package = ("autopipe", *path.relative_to(ROOT).parts[:-1])
    found = []
    for node, at_import in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names = [f"{module}.{a.name}" if is_file(f"{module}.{a.name}") else module for a in node.names]
            found += [(name, node.lineno, at_import) for name in names]
    return found


def test_table_names_every_room():
    assert len(ROWS) >= 8
    assert {room_of(p) for p in FILES} <= set(ORDER)


def test_imports_run_down():
    wrong = []
    for path in FILES:
        room = room_of(path)
        for module, line, _ in imports(path):
            parts = module.split(".")
            is_of_a_room = parts[0] == "autopipe" and len(parts) > 1 and parts[1] in ORDER
            if is_of_a_room and parts[1] != room and ORDER[parts[1]] > ORDER[room]:
                wrong.append(f"{path}:{line}: {room} imports {parts[1]}, a later room")
    assert wrong == []


@pytest.mark.parametrize("room", sorted(DIVIDED))
def test_imports_run_down_between_sub_rooms(room):
    order = {name: i for i, name in enumerate(DIVIDED[room])}
    folders = {r for r in order if (ROOT / room / r).is_dir()}  # the others are single files
    assert {p.parent.name for p in (ROOT / room).glob("*/__init__.py")} == folders
    for path in (ROOT / room).rglob("*.py"):
        own = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        if own not in order:
            continue
        for module, line, _ in imports(path):
            parts = module.split(".")
            if parts[:2] != ["autopipe", room]:
                continue
            assert len(parts) > 2, f"{path}:{line}: {own} imports all of {room}"
            assert parts[2] == own or order.get(parts[2], len(order)) < order[own], (
                f"{path}:{line}: {room}/{own} imports {'.'.join(parts[2:])}, which comes later"
            )


def test_planning_rooms_import_no_torch():
    wrong = [
        f"{path}:{line}: imports {module}"
        for path in FILES
        if not TORCH.get(room_of(path), True)
        for module, line, _ in imports(path)
        if module.split(".")[0] in ("torch", "transformers")
    ]
    assert wrong == []


def test_no_import_cycles_within_rooms():
    import networkx as nx

    graph = nx.DiGraph()
    names = {".".join(("autopipe", *p.relative_to(ROOT).with_suffix("").parts)): p for p in FILES}
    for name, path in names.items():
        for module, _, at_import in imports(path):
            if module in names and at_import:
                graph.add_edge(name, module)
    assert not list(nx.simple_cycles(graph))


def test_modules_named_in_docstrings_exist():
    """What a module leaves to others, and where a room says that a change goes, is there after a renaming."""
    places = [p.relative_to(ROOT).with_suffix("").parts for p in FILES]
    known = {".".join(parts[i:]) for parts in [*places, *(p[:-1] for p in places)] for i in range(len(parts))}
    lost = []
    for path in FILES:
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        clauses = re.findall(r"left to ((?:[^.;:]|\.(?=\w))*)", text)
        clauses += re.findall(r"Where a change goes: (.*)", text)
        names = [name for clause in clauses for name in re.findall(r"``([a-z_][\w.]*)``", clause)]
        lost += [f"{path.relative_to(ROOT)}: {name}" for name in names if name not in known]
    assert lost == []


def test_what_docstrings_refer_to_by_its_full_path_exists():
    """Roles of Sphinx in the package, which no import and no type check follows."""
    lost = []
    for path in FILES:
        for name in re.findall(r":\w+:`~?(autopipe\.[\w.]+)`", path.read_text()):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                lost.append(f"{path.relative_to(ROOT)}: {name}")
    assert lost == []


def test_import_is_light():
    code = "import sys, autopipe; print([m for m in ('torch', 'sympy', 'networkx') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_planning_opens_without_torch():
    rooms = [
        room
        for room, torch in TORCH.items()
        if not torch and ((ROOT / room).exists() or (ROOT / f"{room}.py").exists())
    ]
    code = f"import sys, importlib; [importlib.import_module('autopipe.' + r) for r in {rooms!r}]; "
    code += "print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


def test_public_names():
    for name in autopipe.__all__:
        if (ROOT / f"{autopipe._ROOM_OF.get(name, 'errors')}.py").exists():
            assert getattr(autopipe, name) is not None
