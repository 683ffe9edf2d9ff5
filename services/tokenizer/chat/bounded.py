"""A limit on the processor time of chat templates; the load of the machine does not count.

Each round of a loop and each call checks the thread's clock, so at most one operation goes
unchecked; operators that make large values from small ones have limits of their own.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S = 2.0
MAX_REPEATED = 1 << 20  # items of a sequence that is repeated
MAX_EXPONENT = 256
MAX_PRODUCT_BITS = 1 << 16
MAX_PARTS = 1 << 16  # in the output of slice and batch

Filter = Callable[..., Any]


class TooMuchTime(Exception):
    """A template took more time than it may."""

    def __init__(self) -> None:
        super().__init__(f"it takes more than {MAX_RENDER_S:g} s of the processor's time")


class Clock(Extension):
    """Puts calls into templates at which ``BoundedEnvironment.call`` looks at the clock."""

    def tick(self) -> nodes.Expr:
        """Returns an expression that looks at the clock and is true."""
        return self.call_method("_tick")

    def _tick(self) -> bool:
        return True


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Each thread begins a rendering by ``begin``."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False)  # compiling computes nothing
        self.globals.pop("lipsum", None)
        self.filters["slice"] = _with_bounded_count(self.filters["slice"], 2, "slices")
        self.filters["batch"] = _with_bounded_count(self.filters["batch"], 1, "linecount")
        self._of_thread = threading.local()

    def begin(self) -> None:
        self._of_thread.end_s = time.thread_time() + MAX_RENDER_S

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """``tree`` with a clock check in each round of its loops, rounds skipped by the loop's test
        included."""
        clock = self.extensions[Clock.identifier]
        assert isinstance(clock, Clock)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(clock.tick(), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(clock.tick(), loop.test, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def call(
        self, context: Context, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        self._look()
        if getattr(function, "__func__", None) is Clock._tick:
            return True
        return super().call(context, function, *args, **kwargs)

    def _look(self) -> None:
        if time.thread_time() > getattr(self._of_thread, "end_s", 0.0):
            raise TooMuchTime

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._look()
        if operator == "**" and (abs(left) > MAX_EXPONENT or abs(right) > MAX_EXPONENT):
            raise SecurityError(f"** is for numbers up to {MAX_EXPONENT}")
        if operator == "*":
            _check_product(left, right)
            for items, num in ((left, right), (right, left)):
                if isinstance(items, Sequence) and isinstance(num, int):
                    _check_repeated(items, num)
        return super().call_binop(context, operator, left, right)


def _with_bounded_count(make_parts: Filter, place: int, name: str) -> Filter:
    """Returns the filter with a bound of its argument ``name``, which has ``place``."""

    def bounded(*args: Any, **options: Any) -> Any:
        count = args[place] if len(args) > place else options.get(name, 0)
        if count > MAX_PARTS:
            raise SecurityError(f"{name} is {count}; the limit is {MAX_PARTS}")
        return make_parts(*args, **options)

    return functools.wraps(make_parts)(bounded)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() + right.bit_length()
        if num_bits > MAX_PRODUCT_BITS:
            raise SecurityError(f"* makes a number of {num_bits} bits, of {MAX_PRODUCT_BITS}")


def _check_repeated(items: Sequence[Any], num: int) -> None:
    if len(items) * num > MAX_REPEATED:
        raise SecurityError(f"* makes {len(items) * num} items; the limit is {MAX_REPEATED}")
