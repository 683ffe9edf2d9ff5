"""The script of a recorded session: an assistant's replies to three prompts about a small project.

Each reply is one request of a client. Actions become calls of the client's own tools.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = tuple[str, str]
"""A tool's name and its arguments as JSON."""
Toolset = dict[str, Callable[..., tuple[str, dict[str, Any]]]]
"""A client's tool for each action."""


@dataclass(frozen=True, slots=True)
class Reply:
    """``actions`` have a name and arguments; a reply without them ends the turn."""

    thought: str
    text: str
    actions: tuple[tuple[str, ...], ...] = ()


FILES = {
    "README.md": "# Pond\n\nCounts the fish of a pond: `python -m pond`.\n",
    "pond/__init__.py": "",
    "pond/count.py": (
        "def count(fish: list[str]) -> dict[str, int]:\n"
        '    """The number of fish of each kind."""\n'
        "    numbers: dict[str, int] = {}\n"
        "    for kind in fish:\n"
        "        numbers[kind] = numbers.get(kind, 1) + 1\n"
        "    return numbers\n"
    ),
    "pond/__main__.py": (
        "import sys\n\nfrom pond.count import count\n\n"
        "for kind, number in count(sys.argv[1:]).items():\n"
        '    print(f"{kind}: {number}")\n'
    ),
    "notes/names.txt": "".join(f"fish {number}: né “{number * 7}”\n" for number in range(90)),
}
CHANGED = "pond/count.py"
"""A file that the user changes after each reply."""
WRONG, RIGHT = "numbers.get(kind, 1) + 1", "numbers.get(kind, 0) + 1"
TEST = 'from pond.count import count\n\nassert count(["koi", "ide", "koi"]) == {"koi": 2}\n'

SESSION: list[tuple[str, list[Reply]]] = [
    (
        "The counts of fish are one too high. Find the reason and mend it.",
        [
            Reply("First the files, then the code.", "I look around.", (("run", "ls -R ."),)),
            Reply("", "", (("read", "README.md"), ("read", "pond/count.py"))),
            Reply("The first fish counts twice: `get(kind, 1)`.", "", (("run", "git log -3"),)),
            Reply(
                "The default has to be 0.\n\nNothing else uses it.",
                "The default of `get` is 1; it has to be 0:\n\n```python\nget(kind, 0)\n```",
                (("edit", "pond/count.py", WRONG, RIGHT),),
            ),
            Reply("", "Now a run.", (("run", "python3 -m pond koi koi ide"),)),
            Reply("Two koi, one ide. Right.", "", (("run", "git diff --stat"),)),
            Reply("", "", (("run", "true"), ("run", "printf '\\t%s\\n' \"a\" 'b' | cat -A"))),
            Reply("That is all.", "The first fish of a kind counted twice. Counts are right now."),
        ],
    ),
    (
        "Add a test of it, with café-names from notes/names.txt too.",
        [
            Reply("The names first.", "", (("read", "notes/names.txt"),)),
            Reply("", "A test of its own file.", (("write", "tests/count.py", TEST),)),
            Reply("", "", (("run", "python3 tests/count.py"),)),
            Reply("It fails: ide is missing.", "", (("read", "tests/count.py"),)),
            Reply(
                "",
                "The expectation lacks `ide`.",
                (("edit", "tests/count.py", '{"koi": 2}', '{"koi": 2, "ide": 1}'),),
            ),
            Reply("", "", (("run", "PYTHONPATH=. python3 tests/count.py && echo passed"),)),
            Reply("Passed.", "", (("run", "git status --short"),)),
            Reply("", "The test passes – it covers both kinds."),
        ],
    ),
    (
        "Is anything left to do?",
        [
            Reply("A look at the rest.", "", (("run", "cat pond/__main__.py"),)),
            Reply("", "", (("run", "python3 -m pond"), ("read", "pond/__main__.py"))),
            Reply("An empty list prints nothing.", "", (("run", "ls missing || true"),)),
            Reply("", "One more check.", (("run", "git diff"),)),
            Reply("", "", (("run", "wc -l pond/*.py notes/names.txt"),)),
            Reply("Nothing is left.", "Nothing is left: code, test and notes agree."),
        ],
    ),
]

CLAUDE_CODE: Toolset = {
    "read": lambda path: ("Read", {"file_path": path}),
    "run": lambda command: ("Bash", {"command": command, "description": "Looks at the pond"}),
    "edit": lambda path, old, new: (
        "Edit",
        {"replace_all": False, "file_path": path, "old_string": old, "new_string": new},
    ),
    "write": lambda path, text: ("Write", {"file_path": path, "content": text}),
}
CODEX: Toolset = {
    "read": lambda path: ("exec_command", {"cmd": f"cat {path}"}),
    "run": lambda command: ("exec_command", {"cmd": command, "yield_time_ms": 1000}),
    "edit": lambda path, old, new: ("exec_command", {"cmd": patch(path, old, new)}),
    "write": lambda path, text: (
        "exec_command",
        {"cmd": f"mkdir -p tests && cat > {path} <<'END'\n{text}END"},
    ),
}
OPENCODE: Toolset = {
    "read": lambda path: ("read", {"filePath": path}),
    "run": lambda command: ("bash", {"command": command, "description": "Looks at the pond"}),
    "edit": lambda path, old, new: (
        "edit",
        {"filePath": path, "oldString": old, "newString": new},
    ),
    "write": lambda path, text: ("write", {"content": text, "filePath": path}),
}


def patch(path: str, old: str, new: str) -> str:
    """Codex's shell command for an edit; the lines around it are the same in both files."""
    before = {WRONG: f"        numbers[kind] = {WRONG}"}.get(old, TEST.splitlines()[-1])
    after = before.replace(old, new)
    return (
        f"apply_patch <<'END'\n*** Begin Patch\n*** Update File: {path}\n@@\n"
        f"-{before}\n+{after}\n*** End Patch\nEND"
    )
