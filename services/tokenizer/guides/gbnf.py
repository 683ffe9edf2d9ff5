"""Converts grammars in GBNF, the format of llama.cpp, to the Lark of llguidance.

A rule without references, or with references to terminals only, becomes a terminal, which
llguidance matches as a whole and as far as possible: without terminals each character would be a
step of its parser.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

from services.tokenizer.guides.lark import literal
from services.tokenizer.guides.limits import MAX_RULES, check_limit, invalid

Token = tuple[str, str]  # its kind and its text

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:\\.|[^"\\\n])*)"
    |(?P<chars>\[(?:\\.|[^\]\\])*\])
    |(?P<repeat>[*+?]|\{\s*+\d++\s*+(?:,\s*+\d*+\s*+)?\})
    |(?P<operator>[|()])
    |(?P<any>\.)""",
    re.VERBOSE,
)
_NOTHING = literal("")
_IS_GBNF = re.compile(r"^[ \t]*+[A-Za-z0-9_-]++\s*+::=", re.MULTILINE)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00[01][0-9a-fA-F]{5}))|\\?.", re.DOTALL
)
_CONTROL = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}


def is_gbnf(grammar: str) -> bool:
    return _IS_GBNF.search(grammar) is not None


def gbnf_to_lark(grammar: str, param: str) -> str:
    """Raises InvalidRequest for invalid GBNF, naming the line."""
    rules = _rules(grammar, param)
    check_limit(param, "rules", len(rules), MAX_RULES)
    if "root" not in rules:
        raise invalid(param, "the grammar has no rule root, which is where GBNF begins")
    terminals = _terminals(rules, param) - {"root"}
    names = {
        name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)
    }
    names["root"] = "start"
    try:
        return "\n".join(
            f"{names[name]}: {' '.join(_written(each, names) for each in tokens) or _NOTHING}"
            for name, tokens in rules.items()
        )
    except UnicodeError:
        raise invalid(param, "an escape in the grammar is no character") from None


def _rules(grammar: str, param: str) -> dict[str, list[Token]]:
    rules: dict[str, list[Token]] = {}
    body: list[Token] = []
    for kind, text in _tokens(grammar, param):
        if kind != "define":
            body.append((kind, text))
            continue
        if not body or body[-1][0] != "name":
            raise invalid(param, "::= does not follow a name in the grammar")
        _, name = body.pop()
        if name in rules:
            raise invalid(param, f"the rule {name[:60]} is there twice")
        rules[name] = body = []
    return rules


def _tokens(grammar: str, param: str) -> Iterator[Token]:
    end = 0
    while end < len(grammar):
        match = _TOKEN.match(grammar, end)
        if match is None:
            line = grammar.count("\n", 0, end) + 1
            raise invalid(param, f"line {line} of the grammar is no GBNF: {grammar[end:][:30]!r}")
        end = match.end()
        if match.lastgroup != "skip":
            assert match.lastgroup is not None
            yield match.lastgroup, match[match.lastgroup]


def _terminals(rules: dict[str, list[Token]], param: str) -> set[str]:
    """The rules that lead to no rule that leads back to itself."""
    needs = {name: {text for kind, text in rules[name] if kind == "name"} for name in rules}
    for name, needed in needs.items():
        if unknown := sorted(needed - rules.keys()):
            raise invalid(param, f"the rule {name[:60]} needs {unknown[0][:60]}, which is no rule")
    users = defaultdict(list)
    for name, needed in needs.items():
        for each in needed:
            users[each].append(name)
    missing = {name: len(needed) for name, needed in needs.items()}
    found = [name for name, num in missing.items() if num == 0]
    for name in found:  # grows as it goes
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                found.append(user)
    return set(found)


def _written(token: Token, names: dict[str, str]) -> str:
    kind, text = token
    match kind:
        case "name":
            return names[text]
        case "text":
            characters = "".join(map(_character, _CHARACTER.finditer(text)))
            return literal(characters.encode("utf-16", "surrogatepass").decode("utf-16"))
        case "chars":
            return f"/[{_class(text[1:-1])}]/"
        case "any":
            return r"/(.|\n)/"
        case "repeat":
            return re.sub(r"\s", "", text)
    return text


def _class(text: str) -> str:
    """The text in the brackets of a character class, with each character written as an escape."""
    sign, text = ("^", text[1:]) if text.startswith("^") else ("", text)
    matches = list(_CHARACTER.finditer(text))
    inner = range(1, len(matches) - 1)
    return sign + "".join(
        "-" if match[0] == "-" and index in inner else f"\\x{{{ord(_character(match)):x}}}"
        for index, match in enumerate(matches)
    )


def _character(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _CONTROL.get(match[0], match[0][-1])
