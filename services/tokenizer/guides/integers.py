"""Integers of any size as expressions: llguidance's own are doubles, and then 64 bits."""

MAX_EXACT = 1 << 53  # up to here each integer is a double


def is_large(value: object) -> bool:
    return isinstance(value, int) and abs(value) > MAX_EXACT


def integers(low: int | None, high: int | None) -> str:
    """An expression for the integers from ``low`` to ``high``, as JSON writes them; None: without
    end. At least one."""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(f"-({_naturals(least, None if low is None else -low)})")
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return "|".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """Those of each number of digits; of numbers between, all."""
    parts = ["0"] if low == 0 else []
    low = max(low, 1)
    if high is not None and high < low:
        return "|".join(parts)
    first, last = str(low), "" if high is None else str(high)
    size = len(first)
    if len(last) == size:
        return "|".join([*parts, _between(first, last)])
    parts.append(_between(first, "9" * size))
    if not last:
        return "|".join([*parts, f"[1-9][0-9]{{{size},}}"])
    if len(last) > size + 1:
        parts.append(f"[1-9][0-9]{{{size},{len(last) - 2}}}")
    parts.append(_between("1" + "0" * (len(last) - 1), last))
    return "|".join(parts)


def _between(first: str, last: str) -> str:
    """The numbers from ``first`` to ``last``, which have the same number of digits."""
    size = len(first)
    if size == 0:
        return ""
    if first[0] == last[0]:
        rest = _between(first[1:], last[1:])
        return f"{first[0]}({rest})" if "|" in rest else first[0] + rest
    low, high = int(first[0]), int(last[0])
    parts, others = [], size - 1
    if first[1:].strip("0"):
        parts.append(f"{low}({_between(first[1:], '9' * others)})")
        low += 1
    if last[1:].strip("9"):
        parts.append(f"{high}({_between('0' * others, last[1:])})")
        high -= 1
    if low <= high:
        parts.append(f"[{low}-{high}]" + (f"[0-9]{{{others}}}" if others else ""))
    return "|".join(parts)
