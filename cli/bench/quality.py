"""``shoal bench quality``: the loss of quality by quantized weights or KV cache, in bits per byte
of a text and divergence from a reference's distributions of the next token. Uses the serving engine
and prompt logprobs of the whole vocabulary."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from cli.bench.divergence import Comparison, compare, summary
from cli.bench.lengths import MAX_LENGTH
from cli.bench.options import MAX_COUNT
from cli.bench.origin import origin, write
from cli.console import bar, console_for_people
from cli.flags import Parser, argument_type, result_file, whole
from shared.errors import ConfigError
from shared.model_folder import read_model_info
from shared.model_location import ModelLocation, locate_model
from shared.settings.load import load_settings
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ALL_TOKENS, ModelInfo

if TYPE_CHECKING:
    from cli.bench.pieces import ScoredPiece

PROGRAM = "shoal bench quality"
PACKAGES = ("shoal", "torch", "numpy", "tokenizers")
DENSE, *QUANTIZED = FORMS = get_args(WorkerConfig.model_fields["quantization"].annotation)
REFERENCE = "reference"
MIN_LENGTH = 16


def quality(arguments: list[str]) -> int:
    """Returns the exit code. Raises ConfigError."""
    load, rest = _parse(arguments)
    settings = load_settings(WorkerConfig, rest, PROGRAM, vars(load))
    found = measure(load, settings, Console(stderr=True, highlight=False))
    with console_for_people() as console:
        _show(found, console)
    if load.json is not None:
        write(origin("quality", arguments, PACKAGES) | found, load.json)
    return 0


def measure(load: Namespace, worker: WorkerConfig, console: Console) -> dict[str, Any]:
    """The effective settings and the figures, for JSON."""
    model = locate_model(worker.model)
    pieces = _cut_text(load, model)
    reference = model if load.reference is None else _find_reference(load, model)
    forms = load.quantization or (QUANTIZED if load.reference is None else [DENSE])
    of_weights = ("quantization", "lm_head_quantization", "embedding_quantization")
    as_it_is = dict.fromkeys(of_weights, DENSE)
    as_it_is |= {"kv_cache_dtype": "none", "activation_dtype": "auto"}
    kinds = {REFERENCE: {"model": str(reference.folder)} | as_it_is}
    kinds |= {form: {"model": str(model.folder), "quantization": form} for form in forms}
    limits = {"max_model_len": load.length, "max_num_seqs": 1}
    settings = worker.model_dump() | limits
    ours = {"instance", "quantization", *limits}
    num_bytes = sum(piece.num_bytes for piece in pieces)
    return {
        "settings": _given(load) | {"quantization": forms, "pieces": len(pieces)},
        "worker": worker.model_dump(mode="json", exclude_defaults=True, exclude=ours),
        "model": model.name,
        "reference": reference.name,
        "num_tokens": sum(len(piece.ids) - piece.num_given for piece in pieces),
        "num_bytes": num_bytes,
        "figures": {
            name: {"dtype": scorer.dtype, "weights_bytes": scorer.weights_bytes}
            | summary(scorer.comparisons, num_bytes)
            for name, scorer in _score(settings, kinds, pieces, console).items()
        },
    }


class Scorer:
    """A worker with these settings, and its comparisons with the reference so far."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from cli.bench.engine_loop import EngineLoop  # imports torch, which takes seconds

        self._loop = EngineLoop(WorkerConfig.model_validate(settings))
        self.dtype = self._loop.model.dtype
        self.weights_bytes = self._loop.weights_bytes  # of the engine built last
        self.comparisons: list[Comparison] = []

    def logprobs(self, piece: "ScoredPiece") -> np.ndarray:
        """[n, 1 + V] float32: each scored token's own logprob, then those of all ids."""
        from cli.bench.engine_loop import Job

        job = Job(piece.ids, 0, ALL_TOKENS)
        outputs = self._loop.outputs([job], 1, None)
        found = np.concatenate([arrays.values for _, (_, arrays) in outputs])
        return found.reshape(len(piece.ids) - 1, -1)[piece.num_given - 1 :]


def _score(
    settings: dict[str, Any],
    kinds: dict[str, dict[str, Any]],
    pieces: "list[ScoredPiece]",
    console: Console,
) -> dict[str, Scorer]:
    """Scores each kind, whose own settings override the common ones. All are in memory at once, so
    that the reference is computed once and no logprobs are stored."""
    scorers: dict[str, Scorer] = {}
    with bar(console, len(kinds) * len(pieces), "{task.fields[kind]}", kind="") as update:
        for name, own in kinds.items():
            update(kind=f"loading {name}")
            scorers[name] = Scorer(settings | own)
        for piece in pieces:
            truth = scorers[REFERENCE].logprobs(piece)
            for name, scorer in scorers.items():
                update(kind=name)
                found = truth if name == REFERENCE else scorer.logprobs(piece)
                scorer.comparisons.append(compare(truth, found))
                update(advance=1)
    return scorers


def _find_reference(load: Namespace, model: ModelLocation) -> ModelLocation:
    """Raises ConfigError if its ids differ from those of ``model``."""
    from cli.bench.pieces import load_tokenizer

    try:
        reference = locate_model(load.reference)
        sizes = [_check_length(load, each).vocab_size for each in (reference, model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"vocab_size is {sizes[0]}, and {sizes[1]} of {model.folder}")
        ids = [load_tokenizer(each.folder).get_vocab() for each in (reference, model)]
        if ids[0] != ids[1]:
            raise ConfigError(f"{reference.folder} has another vocabulary than {model.folder}")
    except ConfigError as error:
        raise ConfigError(f"--reference: {error}") from None
    return reference


def _cut_text(load: Namespace, model: ModelLocation) -> "list[ScoredPiece]":
    """Raises ConfigError."""
    from cli.bench.pieces import cut, load_tokenizer, read_text

    vocab_size = _check_length(load, model).vocab_size
    tokenizer = load_tokenizer(model.folder)
    pieces = cut(read_text(load.text), tokenizer, load.length, load.pieces)
    last_id = max(int(piece.ids.max()) for piece in pieces)
    if last_id >= vocab_size:
        raise ConfigError(f"model: the text has the id {last_id}, and vocab_size is {vocab_size}")
    return pieces


def _check_length(load: Namespace, model: ModelLocation) -> ModelInfo:
    """Raises ConfigError."""
    info = read_model_info(model.folder, [], None)
    if load.length > info.max_model_len:
        limit = f"max_position_embeddings = {info.max_model_len}"
        raise ConfigError(f"--length: {load.length} is more than {limit} of {model.folder}")
    return info


def _parse(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Splits the arguments into ours and the worker's. Raises ConfigError; ``--help`` exits."""
    parser = Parser(
        PROGRAM,
        usage=f"{PROGRAM} [--flag VALUE …]",
        description="Measures the loss of quality by the form of a model's weights: bits per byte"
        " of a text, the mean Kullback–Leibler divergence from a reference in nats,"
        " and the agreement of the most likely token with the reference. All forms are"
        " in memory at once. Takes all settings of the worker, for example --model and"
        " --dtype: shoal worker --help",
        epilog="Exit codes: 0; 2: a wrong flag, setting or file; 130: Ctrl-C.",
    )
    _add_load(parser.add_argument)
    return parser.parse_known_args(arguments)


def _add_load(add: Callable[..., Any]) -> None:
    text = f"of {', '.join(FORMS)}, with commas between (default: all but {DENSE}; with"
    text += f" --reference {DENSE}: the weights as they are)"
    add("--quantization", type=argument_type(_forms), metavar="FORMS", help=text)
    text = "model folder or name with the reference weights (default: --model)"
    add("--reference", metavar="MODEL", help=text)
    text = "UTF-8 (default: text held out of the embedded model's training, of Python's library"
    add("--text", type=Path, metavar="FILE", help=f"{text} and language reference)")
    text = "tokens of a piece of text (default: %(default)s)"
    add("--length", type=whole(MIN_LENGTH, MAX_LENGTH), default=512, metavar="N", help=text)
    text = "most pieces, spread over the text (default: %(default)s)"
    add("--pieces", type=whole(1, MAX_COUNT), default=40, metavar="N", help=text)
    add("--json", type=result_file, metavar="FILE", help="writes everything there")


def _forms(text: str) -> list[str]:
    forms = [*dict.fromkeys(text.split(","))]
    for form in forms:
        if form not in FORMS:
            raise ValueError(f"'{form}' is not one of {', '.join(FORMS)}")
    return forms


def _given(load: Namespace) -> dict[str, Any]:
    text = None if load.text is None else str(load.text)
    return {name: value for name, value in vars(load).items() if name != "json"} | {"text": text}


def _show(found: dict[str, Any], console: Console) -> None:
    facts = Table.grid(padding=(0, 3))
    facts.add_row("model", found["model"])
    facts.add_row("reference", f"{found['reference']}, {found['figures'][REFERENCE]['dtype']}")
    num_pieces, length = found["settings"]["pieces"], found["settings"]["length"]
    size = f"{found['num_tokens']} tokens, {found['num_bytes']} bytes"
    facts.add_row("text", f"{size}, in {num_pieces} pieces of {length}")
    console.print(facts)
    console.print(_figures(found["figures"]))


def _figures(found: dict[str, dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("weights")
    for name in ("MB", "bits per byte", "KL divergence", "same first choice"):
        table.add_column(name, justify="right")
    for name, each in found.items():
        cells = [f"{each['weights_bytes'] / 1e6:.1f}", f"{each['bits_per_byte']:.4f}"]
        if name != REFERENCE:
            cells += [f"{each['kl_divergence']:.5f}", f"{each['same_first_choice']:.2%}"]
        table.add_row(name, *cells)
    return table
