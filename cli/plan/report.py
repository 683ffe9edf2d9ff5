"""Prints a plan."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

GIB, MIB = 1 << 30, 1 << 20


def show(found: dict[str, Any], console: Console) -> None:
    console.print(_requests(found["requests"]))
    console.print(_facts(_model(found["model"]) | _settings(found)))
    machines = found["machines"]
    if len(machines) == 1:
        console.print(_facts(_machine(machines[0], found["settings"])))
    else:
        console.print(_machines(machines))
    if len(machines) > 1:
        price = "; price: of a million tokens of answers" if _have_prices(machines) else ""
        console.print(f"TTFT and TPOT: 95th percentiles in ms{price}.")
    if any(each.get("num_cards") for each in machines):
        console.print(
            "GPUs are estimated from their makers' figures and an assumed efficiency, not measured;"
            " a worker on several GPUs needs tensor parallelism."
        )


def _facts(facts: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(min_width=len("first token"))  # as wide as the longest row name
    for name, text in facts.items():
        table.add_row(name, text)
    return table


def _requests(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['num']} requests", title_justify="left", box=SIMPLE)
    for name in ("", "mean", "P50", "P95", "P99", "longest"):
        table.add_column(name, justify="right" if name else "left")
    kinds = {"prompt": "prompt_tokens", "answer": "output_tokens", "both": "total_tokens"}
    for name, key in kinds.items():
        table.add_row(f"{name}, tokens", *(f"{each:,.0f}" for each in found[key].values()))
    if "per_s" in found:
        mean, p95, most = found["per_s"].values()
        table.add_row("a second", f"{mean:.2f}", "", f"{p95:.0f}", "", f"{most:.0f}")
    if found["num_bound"]:
        text = "with an unknown answer length: as long as allowed"
        table.caption = f"{found['num_bound']} {text}"
    return table


def _model(model: dict[str, Any]) -> dict[str, str]:
    total, active = model["parameters"], model["active_parameters"]
    some = f", {_billions(active)} active" if active < total else ""
    return {
        "model": f"{model['name']}: {_billions(total)} parameters{some}",
        "weights": bytes_of(model["weights_bytes"]),
        "KV cache": f"{model['kv_bytes_per_token']:,} bytes a token",
    }


def _settings(found: dict[str, Any]) -> dict[str, str]:
    settings = found["settings"]
    flags = [f"--max-model-len {settings['max_model_len']}"]
    if settings["quantization"] != "none":
        flags.append(f"--quantization {settings['quantization']}")
    if settings["lm_head_quantization"] != "none":
        flags.append(f"--lm-head-quantization {settings['lm_head_quantization']}")
    if settings["embedding_quantization"] != "none":
        flags.append(f"--embedding-quantization {settings['embedding_quantization']}")
    if settings["kv_cache_dtype"] != "auto":
        flags.append(f"--kv-cache-dtype {settings['kv_cache_dtype']}")
    num = settings["num_too_long"]
    share = f" ({num} requests are longer)" if num else ""
    return {"settings": " ".join(flags) + share}


def _machine(found: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    name = found["name"]
    if found.get("num_cards", 0) > 1:
        name = f"{found['num_cards']} × {name} for a worker"
    facts = {"on": name}
    if "kv_cache_tokens" in found:
        facts |= _memory(found, settings)
    if "step_ms" in found:
        facts["a step"] = (
            " · ".join(f"{rows}: {ms:.2f} ms" for rows, ms in found["step_ms"].items())
            + " (sequences: time, half of max-model-len in the KV cache)"
        )
    if "played" in found:
        facts |= _played(found)
    if "problem" in found:
        facts["problem"] = found["problem"]
    elif "played" not in found:
        facts["speed"] = (
            "unknown: steps are measured where the weights are, unless --no-measure is given;"
            " --measured and --card need no weights"
        )
    return facts


def _memory(found: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    concurrency, num_seqs, states = found["concurrency"], found["num_seqs"], ""
    if found["num_states"] is not None:
        states = (
            f", states of {num_seqs} sequences and {found['num_states']} copies"
            f" {bytes_of(found['state_bytes'])}"
        )
    added = "".join(f", {what} {bytes_of(num)}" for what, num in found["added_bytes"].items())
    return {
        "memory": f"{bytes_of(found['memory_bytes'])} may be used: weights"
        f" {bytes_of(found['weights_bytes'])}, a step {bytes_of(found['step_bytes'])}{added},"
        " KV cache"
        f" {bytes_of(found['kv_cache_bytes'])} = {found['kv_cache_tokens']:,} tokens{states}",
        "at once": f"{concurrency['p50']:.1f} requests of the median length,"
        f" {concurrency['p95']:.1f} of the 95th percentile,"
        f" {concurrency['longest']:.1f} of {settings['max_model_len']:,} tokens;"
        f" --max-num-seqs {num_seqs}",
    }


def _played(found: dict[str, Any]) -> dict[str, str]:
    played = found["played"]
    facts = {}
    if found["workers"]:
        facts["workers"] = f"{found['workers']}, with {played['num_open']:.1f} requests at once"
    if played["num_refused"]:
        facts["left out"] = f"{played['num_refused']} requests that no worker can take"
    if played["good_share"] is not None:
        facts["targets"] = f"met by {played['good_share']:.1%}"
    facts["tokens/s"] = (
        f"{number_of(played['output_tokens_per_s'])} of answers,"
        f" {number_of(played['prompt_tokens_per_s'])} of prompts"
    )
    for name, key in (("first token", "ttft_ms"), ("per token", "tpot_ms")):
        if played[key]:
            times = played[key]
            p50, p95, p99 = (number_of(times[each]) for each in ("p50", "p95", "p99"))
            facts[name] = f"P50 {p50} ms, P95 {p95}, P99 {p99}"
    if played["num_preemptions"]:
        facts["warning"] = f"{played['num_preemptions']} preemptions: the KV cache is small"
    if "price_per_million_output_tokens" in found:
        facts["price"] = (
            f"{number_of(found['price_per_million_output_tokens'])} for a million tokens of answers"
        )
    return facts


def _machines(machines: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE, caption="a worker: its cards, KV cache, requests of P95 at once")
    heads = ["card", "cards", "KV tokens", "at once", "workers", "tokens/s", "TTFT", "TPOT"]
    has_prices = _have_prices(machines)
    for name in heads + ["price"] * has_prices:
        table.add_column(name, justify="left" if name == "card" else "right", no_wrap=True)
    for each in machines:
        cells = _row(each) if "played" in each else ["does not fit"]
        table.add_row(each["name"], *cells[: len(heads) - 1 + has_prices])
    return table


def _have_prices(machines: list[dict[str, Any]]) -> bool:
    return any("price_per_million_output_tokens" in each for each in machines)


def _row(found: dict[str, Any]) -> list[str]:
    played = found["played"]
    price = found.get("price_per_million_output_tokens")
    return [
        str(found["num_cards"]),
        f"{found['kv_cache_tokens'] / 1000:,.0f}k",
        f"{found['concurrency']['p95']:.0f}",
        str(found["workers"] or "–"),
        f"{played['output_tokens_per_s']:,.0f}",
        *(number_of(played[key]["p95"]) if played[key] else "–" for key in ("ttft_ms", "tpot_ms")),
        "–" if price is None else number_of(price),
    ]


def bytes_of(num: int) -> str:
    return f"{num / GIB:,.2f} GiB" if num >= GIB else f"{num / MIB:,.1f} MiB"


def number_of(value: float) -> str:
    """With two digits or more."""
    if value < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _billions(num: int) -> str:
    return f"{num / 1e9:.1f}B" if num >= 1e8 else f"{num / 1e6:.1f}M"
