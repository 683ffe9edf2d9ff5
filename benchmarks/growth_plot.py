"""The picture of growth: what a step costs, and how long first tokens take."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.soak_plot import STYLE

PATH = Path(__file__).parent.parent / "docs" / "growth.svg"
TITLES = {
    "workers": "by workers, 10 running on each",
    "running": "by sequences on each of 30 workers",
    "waiting": "by sequences that wait",
    "long": "by long prompts that wait",
}


def plot(results: dict[str, Any], path: Path = PATH) -> None:
    """``results`` are those that the benchmark writes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 9), layout="constrained")
        axes = figure.subplots(3, 2).flatten()
        for axis, (name, title) in zip(axes, TITLES.items(), strict=False):
            _plot_costs(axis, results["costs by"][name], title)
        _plot_first_tokens(axes[4], results)
        _plot_shares(axes[5], results)
        figure.savefig(path, metadata={"Date": None})


def _plot_costs(axis: Axes, rows: dict[Any, Any], title: str) -> None:
    nums = [int(num) for num in rows]
    for name in ("CPU us/step", "plan us, median", "plan us, 99 %"):
        axis.plot(nums, [row[name] for row in rows.values()], marker=".", linewidth=1, label=name)
    axis.set_title(title, loc="left", fontsize="medium")
    axis.set_xscale("symlog")
    axis.set_yscale("log")
    axis.set_ylabel("us")
    axis.legend(fontsize="small")


def _plot_first_tokens(axis: Axes, results: dict[str, Any]) -> None:
    for name in ("first token ms, median", "first token ms, 99 %"):
        for num_cells, (nums, values) in _by_cells(results, name).items():
            label = f"{name[15:]}, {num_cells} cell{'s' * (num_cells > 1)}"
            axis.plot(nums, values, marker=".", linewidth=1, label=label)
    axis.set_title(
        "first token, 60 % of the slots in use, steps of 25 ms", loc="left", fontsize="medium"
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("workers")
    axis.set_ylabel("ms")
    axis.legend(fontsize="small")


def _plot_shares(axis: Axes, results: dict[str, Any]) -> None:
    for num_cells, (nums, values) in _by_cells(results, "share of each core").items():
        label = f"{num_cells} cell{'s' * (num_cells > 1)}"
        axis.plot(nums, values, marker=".", linewidth=1, label=label)
    axis.axhline(1, color="gray", linewidth=0.5)
    axis.set_title("of a core, for each scheduler", loc="left", fontsize="medium")
    axis.set_xscale("log")
    axis.set_xlabel("workers")
    axis.legend(fontsize="small")


def _by_cells(results: dict[str, Any], name: str) -> dict[int, tuple[list[int], list[float]]]:
    """By the number of cells: numbers of workers, and what was measured with each."""
    lines: dict[int, tuple[list[int], list[float]]] = {}
    for each in results["first tokens"]:
        nums, values = lines.setdefault(each["cells"], ([], []))
        nums.append(each["workers"])
        values.append(each[name])
    return lines
