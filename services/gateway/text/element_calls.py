"""Calls whose arguments are elements, which may be in each other; they become JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.text.context import CallContext
from services.gateway.text.raw_values import RawArguments, new_value
from services.gateway.text.source import Broken, Waiting
from services.gateway.text.value_types import Types, json_of, json_string
from shared.dialects.formats import ElementsLayout

_TEXT = ({"string"}, {"string", "null"})  # types of values that come as they are


@dataclass(slots=True)
class _Element:
    """An open element; ``children`` are the names and the JSON of those in it."""

    name: str
    schema: Any
    types: frozenset[str]
    pieces: list[str] = field(default_factory=list)
    children: list[tuple[str, str]] = field(default_factory=list)


class ElementCalls:
    """Several functions may be in one section: each is a call."""

    def __init__(self, context: CallContext, layout: ElementsLayout) -> None:
        self._context = context
        self._source = context.source
        self._write = context.out.arguments
        self._layout = layout
        self._function_open = context.markers(layout.function_open)
        self._function_close = context.markers(layout.function_close)
        self._name_close = context.markers(layout.name_close)
        self._tag_open = context.markers(layout.tag_open)
        self._tag_close = context.markers(layout.tag_close)

    def read(self) -> Waiting[None]:
        while True:
            if not (yield from self._source.try_take(self._function_open)):
                raise Broken
            name = yield from self._context.read_name()
            if not (yield from self._source.try_take(self._name_close)):
                raise Broken
            self._context.start_call(name)
            yield from self._read_arguments(name)
            self._source.record()
            yield from self._source.skip_blanks()
            if not (yield from self._source.at(self._function_open)):
                self._context.out.content(self._source.recorded())
                return
            self._source.recorded()

    def _read_arguments(self, name: str) -> Waiting[None]:
        schema = self._context.functions.get(name)
        arguments, types = RawArguments(self._context, name), Types(schema)
        while True:
            yield from self._source.skip_blanks()
            is_closed = yield from self._source.try_take(self._function_close)
            if is_closed or (yield from self._source.at(self._context.stops)):
                arguments.end()
                return
            self._source.record()
            if not (yield from self._source.try_take(self._tag_open)):
                raise Broken
            key = yield from self._read_tag()
            if key.startswith("/") or not key:
                raise Broken
            self._source.recorded()
            arguments.begin(key)
            child = types.child(schema, key)
            yield from self._read_value(types, _Element(key, child, types.of(child)))

    def _read_tag(self) -> Waiting[str]:
        pieces: list[str] = []
        while text := (yield from self._source.until(self._tag_close)):
            pieces.append(text)
        if not (yield from self._source.try_take(self._tag_close)):
            raise Broken
        return "".join(pieces)

    def _read_value(self, types: Types, element: _Element) -> Waiting[None]:
        if set(element.types) in _TEXT:
            yield from self._copy_text(element)
        else:
            yield from self._read_tree(types, element)

    def _copy_text(self, element: _Element) -> Waiting[None]:
        """A string as it comes; tags of other names are text."""
        value = new_value(self._write, "", element.types)
        while True:
            text, marker = yield from self._source.read(self._tag_open)
            if text:
                value.add(text)
            elif marker is None:
                value.cut()
                raise Broken
            elif (tag := (yield from self._read_tag())) == f"/{element.name}":
                value.end()
                return
            else:
                value.add(f"{marker}{tag}{self._layout.tag_close}")

    def _read_tree(self, types: Types, element: _Element) -> Waiting[None]:
        """A value that may have elements in it, written when it has ended."""
        open_elements = [element]
        while open_elements:
            here = open_elements[-1]
            text, marker = yield from self._source.read(self._tag_open)
            if text:
                here.pieces.append(text)
            elif marker is None:
                raise Broken
            elif (tag := (yield from self._read_tag())) == f"/{here.name}":
                self._close(open_elements)
            elif tag.startswith("/") or set(here.types) in _TEXT:
                here.pieces.append(f"{marker}{tag}{self._layout.tag_close}")
            else:
                is_item = tag == self._layout.item and "object" not in here.types
                child = types.child(here.schema, None if is_item else tag)
                open_elements.append(_Element(tag, child, types.of(child)))

    def _close(self, open_elements: list[_Element]) -> None:
        closed = open_elements.pop()
        json = self._json_of(closed)
        if open_elements:
            open_elements[-1].children.append((closed.name, json))
        else:
            self._write(json)

    def _json_of(self, element: _Element) -> str:
        if not element.children:
            text = "".join(element.pieces)
            empty = {"array": "[]", "object": "{}"}.get("".join(element.types), "")
            return empty if empty and not text.strip() else json_of(text, element.types)
        items = [json for name, json in element.children if name == self._layout.item]
        if "object" not in element.types and len(items) == len(element.children):
            return f"[{', '.join(items)}]"
        return _object(element.children)


def _object(members: list[tuple[str, str]]) -> str:
    """An object; of members of one name there is a list."""
    by_name: Mapping[str, list[str]] = {name: [] for name, _ in members}
    for name, json in members:
        by_name[name].append(json)
    written = (
        f"{json_string(name)}: {each[0] if len(each) == 1 else '[' + ', '.join(each) + ']'}"
        for name, each in by_name.items()
    )
    return f"{{{', '.join(written)}}}"
