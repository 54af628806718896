"""Builds the stages of a plan from a captured graph: what each computes, takes and gives.

Deciding the plan is left to ``solve``; the module that results is ``Stage``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx

from ..errors import InputError, PlanError
from ..plans import Plan, StagePlan
from ..tracing.calls import regions
from ..tracing.graphs.scope import attach, is_own
from . import rng
from .parts import Part, runs
from .recompute import Block
from .stage import RECOMPUTED, Section, Stage, StageForm

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["build", "renewed"]


def build(capture: Capture, plan: Plan) -> tuple[Stage, ...]:
    """One module per stage of ``plan``, holding the captured model's own submodules and parameters.

    Together the stages' ``state_dict`` has the model's keys: parameters and buffers that no op uses go to
    the stage that holds their nearest relatives.

    Raises :class:`PlanError` when the plan was made for another graph, leaves an op out, or lets a value
    flow to an earlier stage.
    """
    if plan.graph_digest != capture.ops.digest:
        raise PlanError(
            f"the plan was made for a {plan.model} whose graph is {plan.graph_digest}, but this "
            f"{capture.ops.model} captured as {capture.ops.digest}; plan again for this model"
        )
    flow = _Flow(capture, plan)
    stages = tuple(_stage(capture, plan, flow, s) for s in range(plan.n_stages))
    for stage in stages:
        attach(stage, capture.model, [n for n, s in flow.leftovers.items() if s == stage.index], {})
    return stages


def renewed(capture: Capture, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages; where ``capture`` has got further forms since they were built, others that have those too.

    A form that the plan has no place for raises :class:`InputError` when it is run.
    """
    is_new = any(len(forms) > stages[0].n_forms(flag) for flag, forms in capture.forms.items())
    return build(capture, stages[0]._plan) if is_new else stages


@dataclasses.dataclass(frozen=True, slots=True)
class _Wires:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Flow:
    """Which stage computes each op, and which values each stage takes and gives, over all forms."""

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.home = {**plan.stages_of}
        self.last = plan.n_stages - 1
        self._check_all_placed(capture)
        self.planned, self.leaves_more = capture.ops.by_name.keys(), capture.leaves_more
        every = distinct_graphs(capture)
        own = (f for forms in capture.own_forms.values() for f in forms if not f.for_sizes)
        planned = {id(f.graph): f.graph for f in own}
        nodes = [n for graph in planned.values() for n in graph.nodes]
        self.held = {(name, s) for n in nodes for name, s in self._state(capture, n)}
        self.leftovers = _leftovers(capture, self.held)
        self._place_unplanned(capture)
        self.order = {**capture.ops.position}
        inputs_of_all = (n.name for g in every for n in g.nodes if n.op == "placeholder")
        for name in (*self.home, *inputs_of_all):
            self.order.setdefault(name, len(self.order))
        is_last = all(self.last in self.home[name] for name in capture.ops.last)
        self.tail = frozenset(capture.ops.tail if is_last else ())
        self.unfit = [g for g in every if id(g) not in planned and not self._is_fit(capture, plan, g)]
        self.graphs = [g for g in every if g not in self.unfit]
        takes = [self._taken(stage) for stage in range(plan.n_stages)]
        gives: list[set[str]] = [set() for _ in plan.stages]
        for name in set().union(*takes).intersection(self.home):
            gives[self.home[name][0]].add(name)
        self.wires = tuple(
            _Wires(self._in_order(taken), self._in_order(given))
            for taken, given in zip(takes, gives, strict=True)
        )

    def _taken(self, stage: int) -> set[str]:
        """The values that a stage takes from others or from the call, in any form."""
        return {
            value.name
            for graph in self.graphs
            for node in self.nodes(graph, stage)
            for value in node.all_input_nodes
            if self._is_received(value, stage, node)
        }

    def _is_fit(self, capture: Capture, plan: Plan, graph: fx.Graph) -> bool:
        """Whether a form that is for other sizes or arguments can run under the plan; the others must."""
        state = {used for node in graph.nodes for used in self._state(capture, node)}
        if any(used not in self.held and self._adopted(used[0]) != {used[1]} for used in state):
            return False
        pairs = [(v.name, node.name) for node in graph.nodes for v in node.all_input_nodes]
        if any(self.home[a][0] > min(self.home[b]) for a, b in pairs if a in self.home and b in self.home):
            return False
        if any(a in self.tail and b in self.home and b not in self.tail for a, b in pairs):
            return False
        with contextlib.suppress(PlanError):
            for stage in plan.stages:
                nodes = [node for node in self.nodes(graph, stage.index) if node.op != "output"]
                list(runs(nodes, self.blocks(stage, nodes), capture.ops.order_edges))
            return True
        return False

    def _state(self, capture: Capture, node: fx.Node) -> Iterator[tuple[str, int]]:
        """What of the model a node uses, weights among it, and the stages where it does."""
        for stage in self.home.get(node.name, ()):
            yield from ((name, stage) for name in _used(capture, node))

    def _adopted(self, name: str) -> set[int]:
        """The stages that have weights at a path, or below it, which no op that is planned uses."""
        return {s for n, s in self.leftovers.items() if name in _with_parents(n)}

    def _place_unplanned(self, capture: Capture) -> None:
        """What forms compute that the plan does not know: where its weights are, or the last it takes is.

        Where it takes inputs alone, that is where the first is that takes it. What writes into memory is in
        one stage with all that touches it until then. Numbers that are made of inputs and numbers are made
        wherever they are taken: what is sent may not vary.
        """
        for graph in distinct_graphs(capture):
            calls = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
            new = {n.name: n for n in calls if n.name not in self.home and n.name not in self.planned}
            together = {name: [new[n] for n in _together(node) if n in new] for name, node in new.items()}
            earliest = self._earliest(capture, new.values(), together)
            free: list[fx.Node] = []
            for name, node in new.items():
                if name in earliest and not _is_of_numbers(node):
                    self.home[name] = (earliest[name],)
                elif node is together[name][0]:
                    free.append(node)
            moved = [bool(free)]
            while any(moved):  # what is written comes before the memory that takes it
                moved = [self._place_ahead(node, together[node.name], earliest) for node in reversed(free)]

    def _place_ahead(self, node: fx.Node, group: Collection[fx.Node], earliest: Mapping[str, int]) -> bool:
        """Place a node, with those beside it, where the first is that takes them; tells whether it moved."""
        users = {v for n in group for v in n.users}.difference(group)
        ahead = {s for v in users for s in self.home.get(v.name, (self.last,))}
        stages = sorted(ahead) or [earliest.get(node.name, self.last)]
        chosen = tuple(stages) if _is_of_numbers(node) else (stages[0],)
        is_new = self.home.get(node.name) != chosen
        self.home.update((n.name, chosen) for n in group)
        return is_new

    def _earliest(
        self, capture: Capture, new: Collection[fx.Node], together: Mapping[str, Sequence[fx.Node]]
    ) -> dict[str, int]:
        """By name of what no plan knows the stage that its weights are in, or the last that it takes."""
        found: dict[str, int] = {}
        is_new = True
        while is_new:
            is_new = False
            for node in new:
                behind = [self.home[v.name][0] for v in node.all_input_nodes if v.name in self.home]
                behind += [found[v.name] for v in node.all_input_nodes if v.name in found]
                adopted = [s for name in _used(capture, node) for s in self._adopted(name)]
                stage = max(adopted or behind, default=-1)
                if stage > found.get(node.name, -1):
                    group = together[node.name]
                    found.update((n.name, stage) for n in group)
                    is_new |= len(group) > 1
        return found

    def blocks(self, stage: StagePlan, nodes: Sequence[fx.Node]) -> list[set[str]]:
        """What runs again together; what no plan knows of joins the last that it takes."""
        blocks = [set(ops) for ops in stage.recomputed if not self.leaves_more(ops)]
        place = {node: i for i, node in enumerate(nodes)}
        for node in nodes if blocks else ():
            behind = [v for v in node.all_input_nodes if v in place]
            if node.name not in self.planned and behind and _together(node) == {node.name}:
                last = max(behind, key=place.__getitem__).name
                for block in (b for b in blocks if last in b):
                    block.add(node.name)
        return blocks

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.order.__getitem__))

    def sections(self, stage: StagePlan) -> list[Section]:
        """What one may run of a stage: all; where the model has a tail, the last stage before it, and it."""
        wires, is_last = self.wires[stage.index], stage.index == self.last
        outputs = () if is_last else wires.outputs
        whole = Section("", stage.index, stage.rank, wires.inputs, outputs, is_last)
        if not is_last or not self.tail:
            return [whole]
        taken, given = set(), set()
        for graph in self.graphs:
            ahead = {node.name for node in self.nodes(graph, stage.index, "body")}
            inside = list(self.nodes(graph, stage.index, "tail"))
            names = {node.name for node in inside}
            values = {v.name for node in inside for v in node.all_input_nodes if v.op != "get_attr"} - names
            taken |= values
            given |= values & ahead
        body = Section("body", stage.index, stage.rank, wires.inputs, self._in_order(given), False)
        tail = Section("tail", stage.index + 1, stage.rank, self._in_order(taken), (), True)
        return [whole, body, tail]

    def _check_all_placed(self, capture: Capture) -> None:
        missing = [op.name for op in capture.ops.compute if op.name not in self.home]
        if missing:
            raise PlanError(
                f"the plan places none of {len(missing)} ops in a stage: {', '.join(missing[:5])}; "
                "give each op of the graph to one stage"
            )

    def nodes(self, graph: fx.Graph, stage: int, section: str = "") -> Iterator[fx.Node]:
        """The nodes a stage runs, or a section of it, in order; for the last one the output node too."""
        found = [node for node in graph.nodes if self._runs(node, stage)]
        if section == "tail":
            yield from (node for node in found if node.op == "output" or node.name in self.tail)
            return
        if section == "body":
            kept: set[fx.Node] = set()
            for node in reversed(found):
                if node.op != "output" and (node.name not in self.tail or kept.intersection(node.users)):
                    kept.add(node)
            found = [node for node in found if node in kept]
        yield from found

    def _runs(self, node: fx.Node, stage: int) -> bool:
        if stage == self.last and (node.op == "output" or node.name in self.tail):
            return True
        return stage in self.home.get(node.name, ())

    def _is_received(self, value: fx.Node, stage: int, user: fx.Node) -> bool:
        if value.op == "placeholder":
            return True
        if value.op == "get_attr" or self._runs(value, stage):
            return False
        source = self.home[value.name][0]
        if source > stage:
            raise PlanError(
                f"{value.name} is computed in stage {source} but {user.name} in stage {stage} needs it; "
                f"move {user.name} to stage {source} or later, or {value.name} to stage {stage} or earlier"
            )
        return True


def _used(capture: Capture, node: fx.Node) -> list[str]:
    """What of the model a node uses, weights among it."""
    read = (str(v.target) for v in node.all_input_nodes if v.op == "get_attr")
    names = [n for n in read if n not in capture.constants and not is_own(n)]
    return [str(node.target), *names] if node.op == "call_module" else names


def _together(node: fx.Node) -> Collection[str]:
    """The node, and by name those that touch memory which it does, up to the last that writes into it."""
    return node.meta.get("together") or {node.name}


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a node gives a number, and takes numbers and inputs alone."""
    taken = node.all_input_nodes
    return _is_number(node) and all(v.op == "placeholder" or _is_number(v) for v in taken)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float))


def distinct_graphs(capture: Capture) -> list[fx.Graph]:
    """The graphs of all forms, once where one serves both modes."""
    graphs = (form.graph for forms in capture.forms.values() for form in forms)
    return list({id(graph): graph for graph in graphs}.values())


def _stage(capture: Capture, plan: Plan, flow: _Flow, index: int) -> Stage:
    targets: set[str] = set()
    title = f"stage {index} of {plan.n_stages} of {plan.model}, graph {plan.graph_digest}"

    def made(section: Section, training: bool, number: int, graph: fx.Graph) -> StageForm:
        if graph in flow.unfit:
            return StageForm(graph, "", _refused)
        part = _subgraph(capture, flow, graph, plan.stages[index], section, (training, number))
        for each in (part.graph, *part.blocks):
            targets.update(str(n.target) for n in each.nodes if n.op in ("get_attr", "call_module"))
        return _form(part, f"{section.name} of {title}" if section.name else title)

    def forms(section: Section) -> dict[bool, tuple[StageForm, ...]]:
        out = {True: tuple(made(section, True, x, form.graph) for x, form in enumerate(capture.forms[True]))}
        # where one graph serves both modes, one form does
        known = {id(form.graph): out[True][x] for x, form in enumerate(capture.forms[True])}
        out[False] = tuple(
            known[id(form.graph)] if id(form.graph) in known else made(section, False, x, form.graph)
            for x, form in enumerate(capture.forms[False])
        )
        return out

    sections = [(section, forms(section)) for section in flow.sections(plan.stages[index])]
    stage = Stage(capture.model, plan, sections, device=capture.device)
    attach(stage, capture.model, targets - {RECOMPUTED}, capture.constants)
    return stage


def _refused(*values: Any) -> NoReturn:
    raise InputError(
        "these inputs take the model's layers in another order than the plan has them; capture with an "
        "example like them and plan for it"
    )


def _form(part: Part, title: str) -> StageForm:
    form = StageForm.compile(regions.insert(part.graph), title)
    made, code = [], form.code
    for x, graph in enumerate(part.blocks):
        called = {node.target for node in graph.nodes}
        inner = StageForm.compile(regions.insert(graph), f"block {x}, run again in backward, of {title}")
        made.append(Block(inner.forward, not called.isdisjoint(rng.SEEDING), rng.reseed_all in called))
        code += inner.code
    return dataclasses.replace(form, code=code, blocks=tuple(made))


def _subgraph(
    capture: Capture, flow: _Flow, graph: fx.Graph, stage: StagePlan, section: Section, form: tuple[bool, int]
) -> Part:
    """The part of ``graph`` that a section runs, as a graph of its own, and those of its blocks."""
    part = Part(capture.ops, (section.name, *form))
    by_name = {node.name: node for node in graph.nodes}
    for name in section.inputs:
        part.take(name, by_name.get(name))
    end = graph.output_node()
    nodes = [node for node in flow.nodes(graph, stage.index, section.name) if node is not end]
    freed = frozenset[str]().union(*(node.meta.get("frees", ()) for node in nodes))
    for name in section.inputs:
        if name in freed:  # whoever gave it has it still, and other microbatches lie in the same memory
            part.keep(by_name[name])
    blocks = flow.blocks(stage, nodes)
    again = {name for ops in blocks for name in ops}
    for run in runs(nodes, blocks, capture.ops.order_edges):
        if run[0].name in again:
            part.add_block(run)
        else:
            part.add(run[0])
    if section.is_last:
        part.bring(end)
        part.graph.output(fx.map_arg(end.args[0], part.copies.__getitem__))
        return part
    # a value that only another form computes is given as None
    given = [part.copies.get(by_name[n]) if n in by_name else None for n in section.outputs]
    part.graph.output(tuple(given))
    return part


def _leftovers(capture: Capture, held: Collection[tuple[str, int]]) -> dict[str, int]:
    """Parameters and buffers that no op reads, and further names of tied ones, each with a stage.

    Those of a module that no op uses stay together. Their stage is the one of the weights whose names
    share most with theirs, of several those that the model has nearest to them.
    """
    model = capture.model
    everything = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    everything += [n for n, _ in model.named_buffers(remove_duplicate=False)]
    first = dict(sorted(held, key=lambda use: -use[1]))
    stage_of = {n: min(s) for n in everything if (s := [first[p] for p in _with_parents(n) if p in first])}
    place = {name: x for x, name in enumerate(everything)}
    read = {path for name in stage_of for path in _with_parents(name)}
    out: dict[str, int] = {}
    together: dict[str, list[str]] = {}
    for name in everything:
        if name not in stage_of:
            known = capture.ops.parameter.get(name)
            tied = [stage_of[n] for n in (known.names if known else ()) if n in stage_of]
            if tied:
                out[name] = tied[0]
            else:
                together.setdefault(next(p for p in _with_parents(name) if p not in read), []).append(name)
    for names in together.values():
        pairs = [(_shared(name, n), -abs(place[n] - place[name]), n) for name in names for n in stage_of]
        nearest = max(pairs, key=lambda pair: pair[:2], default=None)
        out.update(dict.fromkeys(names, stage_of[nearest[-1]] if nearest else 0))
    return out


def _with_parents(path: str) -> list[str]:
    """A dotted path and those of what holds it."""
    parts = path.split(".")
    return [".".join(parts[: x + 1]) for x in range(len(parts))]


def _shared(name: str, other: str) -> int:
    """How many leading path parts two names share."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
