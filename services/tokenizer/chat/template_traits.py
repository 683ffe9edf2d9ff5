"""The form of messages that a chat template expects, read from its syntax tree."""

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

_QUESTIONS = (nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not)
_WRITES = (nodes.Add, nodes.Concat, nodes.Output)
_FIELDS_OF_TOOLS = {"description", "parameters", "properties"}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """``knows_developer``: it names the role. ``takes_parts``: it goes through the parts of a
    message's content; ``takes_parts_alone``: it does so without a check for a text.
    ``wants_null``: next to calls it takes null for the content, and no empty text.
    ``joins_arguments``: it writes the arguments of a call unchanged, so they must be JSON.
    ``knows_pairs``: it names the roles of a query and a document, which no chat has.
    ``takes_for_granted``: the fields of tools that it reads without a check for their presence.
    """

    knows_developer: bool = False
    takes_parts: bool = False
    takes_parts_alone: bool = False
    wants_null: bool = False
    joins_arguments: bool = False
    knows_pairs: bool = False
    takes_for_granted: frozenset[str] = frozenset()


def traits_of(tree: nodes.Template) -> TemplateTraits:
    takes_parts = _takes_parts(tree)
    words = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return TemplateTraits(
        knows_developer="developer" in words,
        takes_parts=takes_parts,
        takes_parts_alone=takes_parts and not asks,
        wants_null=_wants_null(tree),
        joins_arguments=_joins_arguments(tree),
        knows_pairs={"query", "document"} <= words,
        takes_for_granted=frozenset(_read_unasked(tree, frozenset())),
    )


def _takes_parts(tree: nodes.Template) -> bool:
    names = _names_of_content(tree)
    if _writes_content(tree, names):
        return False
    names.add("content")  # of a macro's argument
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _writes_content(node: nodes.Node, names: set[str]) -> bool:
    """True if it writes a content, or adds it to a text, without a check for a text."""
    if isinstance(node, nodes.If | nodes.CondExpr) and _asks_for_text(node.test):
        return False
    children = list(node.iter_child_nodes())
    if isinstance(node, _WRITES) and any(_is_content(child, names) for child in children):
        return True
    return any(_writes_content(child, names) for child in children)


def _asks_for_text(test: nodes.Node) -> bool:
    tests = [test, *test.find_all(nodes.Test)]
    return any(isinstance(each, nodes.Test) and each.name == "string" for each in tests)


def _names_of_content(tree: nodes.Template) -> set[str]:
    """The variables that hold a message's content and nothing else."""
    holds: dict[str, bool] = {}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            name = assign.target.name
            is_content = _is_field(_base(assign.node), "content")
            holds[name] = is_content and holds.get(name, True)
    return {name for name, is_content in holds.items() if is_content}


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    base = _base(node)
    return _is_field(base, "content") or (isinstance(base, nodes.Name) and base.name in names)


def _wants_null(tree: nodes.Template) -> bool:
    """True if it checks a content for none, and never for an empty text."""
    asks = any(
        test.name == "none" and _is_field(test.node, "content")
        for test in tree.find_all(nodes.Test)
    )
    return asks and not any(
        _is_field(compare.expr, "content")
        and any(
            isinstance(each.expr, nodes.Const) and each.expr.value == "" for each in compare.ops
        )
        for compare in tree.find_all(nodes.Compare)
    )


def _read_unasked(node: nodes.Node, asked: frozenset[str]) -> Iterator[str]:
    """The fields of tools that are read without a check for their presence; ``asked``: the fields
    that the surrounding tests check."""
    if isinstance(node, nodes.If | nodes.CondExpr):
        asked |= _asked_for(node.test)
    elif isinstance(node, nodes.And | nodes.Or):
        asked |= _asked_for(node)
    elif _asks_if_there(node) or (isinstance(node, nodes.Filter) and node.name == "default"):
        return
    name = _field_of(node)
    if name in _FIELDS_OF_TOOLS and name not in asked:
        yield name
    for child in node.iter_child_nodes():
        yield from _read_unasked(child, asked)


def _asked_for(test: nodes.Node) -> set[str]:
    """The fields that ``test`` asks for: ``….name``, ``….name is defined``, ``'name' in …``."""
    match test:
        case nodes.And() | nodes.Or():
            return _asked_for(test.left) | _asked_for(test.right)
        case nodes.Not() | nodes.Test():
            return _asked_for(test.node)
        case nodes.Compare(expr=nodes.Const(value=str(word))):
            return {word}
    name = _field_of(test)
    return set() if name is None else {name}


def _base(node: nodes.Node | None) -> nodes.Node | None:
    """The operand of filters and slices."""
    while isinstance(node, nodes.Filter) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _is_field(node: nodes.Node | None, name: str) -> bool:
    return _field_of(node) == name


def _field_of(node: nodes.Node | None) -> str | None:
    """The name in ``….name`` or ``…['name']``."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return None


def _joins_arguments(tree: nodes.Template) -> bool:
    """True if it adds the arguments to a text, and never reads their fields."""
    uses = [use for use in _uses_of_arguments(tree) if not isinstance(use, _QUESTIONS)]
    return bool(uses) and all(isinstance(use, _WRITES) for use in uses)


def _uses_of_arguments(node: nodes.Node) -> Iterator[nodes.Node]:
    for child in node.iter_child_nodes():
        if _is_field(child, "arguments") and not _asks_if_there(node):
            yield node
        yield from _uses_of_arguments(child)


def _asks_if_there(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Test) and node.name in {"defined", "none", "undefined"}
