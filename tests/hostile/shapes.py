"""Bodies of any size that are slow to parse, by the reason."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, COUNT_ITEMS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT_TURNS = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"

Body = Callable[[int], bytes]


@dataclass(frozen=True)
class Shape:
    """The defect of a body for ``path``; ``body`` makes one of about the given size."""

    name: str
    path: str
    body: Body

    def __str__(self) -> str:
        return f"{self.path} with {self.name}"


def filled(begin: bytes, piece: bytes, end: bytes) -> Body:
    """``piece`` again and again."""
    return lambda num_bytes: begin + piece * (num_bytes // len(piece)) + end


def numbered(begin: bytes, piece: bytes, end: bytes) -> Body:
    """``piece`` with another number at its ``%d`` each time."""

    def body(num_bytes: int) -> bytes:
        count = num_bytes // (len(piece) + 5)
        return begin + b"".join(piece % number for number in range(count)) + end

    return body


def _chat(message: bytes) -> tuple[bytes, bytes]:
    """The parts of one message around a field."""
    return b'{"max_tokens":1,"messages":[{"role":"user",' + message, b"}]}"


def _shapes() -> Iterator[Shape]:
    yield from _of_chats()
    yield from _of_texts()
    yield from _of_items()
    yield from _of_turns()
    yield from _of_pairs()


def _of_chats() -> Iterator[Shape]:
    begin, end = _chat(b'"content":"a"')
    for name, piece, last in (
        ("empty lists", b"[],", b"[]"),
        ("empty objects", b"{},", b"{}"),
        ("lists of one", b"[0],", b"0"),
        ("digits", b"1,", b"1"),
        ("fractions", b"1.5e-7,", b"1"),
        ("words", b"null,true,", b"null"),
        ("texts", b'"",', b'""'),
        ("distinct objects", b'{"a":{}},', b"{}"),
    ):
        yield Shape(
            f"an unknown field of {name}",
            CHAT,
            filled(begin + b',"x":[' + piece, piece, last + b"]" + end),
        )
    yield Shape("unknown keys", CHAT, numbered(begin, b',"%d":1', end))
    yield Shape("one key many times", CHAT, filled(begin, b',"x":[]', end))
    yield Shape("fields of fields", CHAT, numbered(begin + b',"x":{"a":1', b',"%d":{}', b"}" + end))
    yield Shape(
        "nested lists",
        CHAT,
        lambda num: begin + b',"x":' + b"[" * (num // 2) + b"]" * (num // 2) + end,
    )
    yield Shape("unclosed lists", CHAT, filled(begin + b',"x":', b"[", end))
    yield Shape("a number of digits", CHAT, filled(begin + b',"x":1', b"1", end))
    yield Shape("a key of megabytes", CHAT, filled(begin + b',"', b"k", b'":1' + end))
    yield Shape("unknown texts of escapes", CHAT, filled(begin + b',"x":"', rb"\n", b'"' + end))
    call = b'{"function":{"name":"a"}}'
    calls = b'{"max_tokens":1,"messages":[{"role":"assistant","content":"a","tool_calls":['
    yield Shape("calls", CHAT, filled(calls, call + b",", call + b"]}]}"))
    arguments = b'{"function":{"name":"a","arguments":%b}}'
    yield Shape(
        "arguments of lists",
        CHAT,
        filled(calls + arguments[:-4] + b'{"a":[', b"[],", b"[]]}}}]}]}"),
    )
    yield Shape(
        "arguments that are JSON of lists",
        CHAT,
        filled(calls + arguments[:-4] + rb'"{\"a\":[', b"[],", rb'[]]}"}}]}]}'),
    )
    yield Shape(
        "calls with unknown fields",
        CHAT,
        filled(calls + b'{"function":{"name":"a"},"x":[', b"[],", b"[]]}]}]}"),
    )
    part = b'{"type":"text","text":""}'
    parts = b'{"max_tokens":1,"messages":[{"role":"user","content":['
    yield Shape("parts", CHAT, filled(parts, part + b",", part + b"]}]}"))
    yield Shape(
        "a part with an unknown field",
        CHAT,
        filled(parts + part[:-1] + b',"x":[', b"[],", b"[]]}]}]}"),
    )
    yield Shape("empty messages", CHAT, filled(b'{"messages":[', b"{},", b"{}]}"))
    message = b'{"role":"user","content":"a"}'
    yield Shape("short messages", CHAT, filled(b'{"messages":[', message + b",", message + b"]}"))
    padded = b'{"role":"user","content":"a","x":[' + b"[]," * 1000 + b"[]]}"
    yield Shape(
        "many messages with lists", CHAT, filled(b'{"messages":[', padded + b",", message + b"]}")
    )
    text = _chat(b'"content":"')
    yield Shape("a text of escapes", CHAT, filled(text[0], rb"\"", b'"' + text[1]))
    yield Shape("a text of surrogates", CHAT, filled(text[0], rb"\ud83d\ude00", b'"' + text[1]))
    yield Shape("a text of control characters", CHAT, filled(text[0], rb"\u0001", b'"' + text[1]))
    tool = b'{"type":"function","function":{"name":"a"}}'
    rest = b'{"messages":[{"role":"user","content":"a"}],'
    yield Shape("tools", CHAT, filled(rest + b'"tools":[', tool + b",", tool + b"]}"))
    yield Shape(
        "variables of a template",
        CHAT,
        numbered(rest + b'"chat_template_kwargs":{"a":1', b',"a%d":[]', b"}}"),
    )
    yield Shape("metadata", CHAT, numbered(rest + b'"metadata":{"a":"b"', b',"%d":"a"', b"}}"))
    yield Shape("fields", CHAT, numbered(rest[:-1], b',"x%d":1', b"}"))
    schema = (
        rest
        + b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":['
    )
    yield Shape("values of an enum", CHAT, filled(schema, b"1,", b"1]}}}}"))


def _of_texts() -> Iterator[Shape]:
    yield Shape("prompts", TEXT, filled(b'{"prompt":[', b'"a",', b'"a"]}'))
    yield Shape("prompts of ids", TEXT, filled(b'{"prompt":[', b"[1],", b"[1]]}"))
    yield Shape("a prompt of ids among others", TEXT, filled(b'{"prompt":[[', b"1,", b"1],[1]]}"))
    yield Shape("ids", TEXT, filled(b'{"prompt":[', b"1,", b"1]}"))
    yield Shape(
        "a wrong id at the end",
        TEXT,
        filled(b'{"truncate_prompt_tokens":-1,"prompt":[', b"1,", b"{}]}"),
    )
    yield Shape("biases", TEXT, numbered(b'{"prompt":"a","logit_bias":{"1":1', b',"%d":1', b"}}"))
    yield Shape("stop strings", TEXT, filled(b'{"prompt":"a","stop":[', b'"a",', b'"a"]}'))
    yield Shape("a text of escapes", TEXT, filled(b'{"prompt":"', rb"\t", b'"}'))
    yield Shape(
        "messages to count", TOKENIZE, filled(_chat(b'"content":"a","x":[')[0], b"[],", b"[]]}]}")
    )
    yield Shape("ids to write", DETOKENIZE, filled(b'{"tokens":[', b"1,", b"1]}"))
    yield Shape("ids that are none", DETOKENIZE, filled(b'{"tokens":[1,', b"[],", b"1]}"))


def _of_items() -> Iterator[Shape]:
    begin = b'{"max_output_tokens":16,"input":['
    item = begin + b'{"role":"user","content":"a","x":['
    yield Shape("an item with an unknown field", RESPONSES, filled(item, b"[],", b"[]]}]}"))
    yield Shape("unknown keys of an item", RESPONSES, numbered(item[:-6], b',"%d":1', b"}]}"))
    part = b'{"type":"input_text","text":""}'
    yield Shape(
        "parts",
        RESPONSES,
        filled(begin + b'{"role":"user","content":[', part + b",", part + b"]}]}"),
    )
    yield Shape(
        "a text of escapes",
        RESPONSES,
        filled(begin + b'{"role":"user","content":"', rb"\n", b'"}]}'),
    )
    yield Shape("items", RESPONSES, filled(begin, b'{"role":"user","content":"a"},', b"{}]}"))
    yield Shape("references", RESPONSES, numbered(begin, b'{"id":"msg_%d"},', b'{"id":"msg_x"}]}'))
    yield Shape(
        "items to count",
        COUNT_ITEMS,
        filled(b"{" + item[len(b'{"max_output_tokens":16,') :], b"{},", b"{}]}]}"),
    )


def _of_turns() -> Iterator[Shape]:
    begin = b'{"max_tokens":1,"messages":['
    turn = begin + b'{"role":"user","content":['
    block = b'{"type":"text","text":"a"}'
    yield Shape("blocks", MESSAGES, filled(turn, block + b",", block + b"]}]}"))
    yield Shape(
        "a block with an unknown field",
        MESSAGES,
        filled(turn + block[:-1] + b',"x":[', b"[],", b"[]]}]}]}"),
    )
    yield Shape(
        "a turn with an unknown field",
        MESSAGES,
        filled(begin + b'{"role":"user","content":"a","x":[', b"[],", b"[]]}]}"),
    )
    yield Shape(
        "a text of escapes",
        MESSAGES,
        filled(begin + b'{"role":"user","content":"', rb"\n", b'"}]}'),
    )
    use = b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":{"a":['
    yield Shape("the input of a call", MESSAGES, filled(begin + use, b"[],", b"[]]}}]}]}"))
    yield Shape(
        "a system of lists",
        MESSAGES,
        filled(b'{"max_tokens":1,"messages":[],"system":[', b"[],", b"[]]}"),
    )
    yield Shape(
        "turns to count",
        COUNT_TURNS,
        filled(
            b"{" + begin[len(b'{"max_tokens":1,') :], b'{"role":"user","content":"a"},', b"{}]}"
        ),
    )


def _of_pairs() -> Iterator[Shape]:
    yield Shape("inputs", EMBEDDINGS, filled(b'{"input":[', b'"a",', b'"a"]}'))
    yield Shape("inputs of ids", EMBEDDINGS, filled(b'{"input":[[', b"1,", b"1]]}"))
    yield Shape("texts", SCORE, filled(b'{"text_1":"a","text_2":[', b'"a",', b'"a"]}'))
    yield Shape("documents", RERANK, filled(b'{"query":"a","documents":[', b"[],", b'"a"]}'))
    yield Shape(
        "a document with an unknown field",
        RERANK,
        filled(b'{"query":"a","documents":[{"text":"a","x":[', b"[],", b"[]]}]}"),
    )


SHAPES = tuple(_shapes())
