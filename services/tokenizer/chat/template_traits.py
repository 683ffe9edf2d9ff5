"""What a chat template wants messages to look like, read from its syntax tree."""

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

_QUESTIONS = (nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not)


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """``knows_developer``: it names the role. ``takes_parts``: it goes through the parts of a
    message's content; ``takes_parts_alone``: it does so without asking whether it is a text.
    ``joins_arguments``: it writes the arguments of a call as they are, which are JSON then.
    ``knows_pairs``: it names the roles of a query and a document, which no chat has.
    """

    knows_developer: bool = False
    takes_parts: bool = False
    takes_parts_alone: bool = False
    joins_arguments: bool = False
    knows_pairs: bool = False


def traits_of(tree: nodes.Template) -> TemplateTraits:
    takes_parts = _takes_parts(tree)
    words = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return TemplateTraits(
        knows_developer="developer" in words,
        takes_parts=takes_parts,
        takes_parts_alone=takes_parts and not asks,
        joins_arguments=_joins_arguments(tree),
        knows_pairs={"query", "document"} <= words,
    )


def _takes_parts(tree: nodes.Template) -> bool:
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_field(_base(assign.node), "content"):
            names.add(assign.target.name)
    for loop in tree.find_all(nodes.For):
        items = _base(loop.iter)
        if _is_field(items, "content") or (isinstance(items, nodes.Name) and items.name in names):
            return True
    return False


def _base(node: nodes.Node | None) -> nodes.Node | None:
    """What filters and slices are applied to."""
    while True:
        if isinstance(node, nodes.Filter) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _is_field(node: nodes.Node | None, name: str) -> bool:
    """Whether it is ``….name`` or ``…['name']``."""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return False


def _joins_arguments(tree: nodes.Template) -> bool:
    """Whether it adds the arguments to a text, and nowhere looks into them."""
    uses = [use for use in _uses_of_arguments(tree) if not isinstance(use, _QUESTIONS)]
    joins = (nodes.Add, nodes.Concat, nodes.Output)
    return bool(uses) and all(isinstance(use, joins) for use in uses)


def _uses_of_arguments(node: nodes.Node) -> Iterator[nodes.Node]:
    for child in node.iter_child_nodes():
        if _is_field(child, "arguments") and not _asks_if_there(node):
            yield node
        yield from _uses_of_arguments(child)


def _asks_if_there(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Test) and node.name in {"defined", "none", "undefined"}
