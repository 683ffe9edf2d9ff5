"""Plots a soak: each service's memory, and the descriptors of all, over the minutes."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

PATH = Path(__file__).parent.parent / "docs" / "soak.svg"
MIB = 1 << 20
# Equal results give an equal file, with searchable text.
STYLE: Any = {"svg.hashsalt": "shoal", "svg.fonttype": "none", "font.size": 9}


def plot(results: dict[str, Any], path: Path = PATH) -> None:
    """``results`` as written by the soak."""
    samples = results["samples"]
    minutes = [each["s"] / 60 for each in samples]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 8), layout="constrained")
        axes = figure.subplots(len(results["services"]) + 1, sharex=True)
        for axis, (name, figures) in zip(axes, results["services"].items(), strict=False):
            own_mib = [each["own_bytes"][name] / MIB for each in samples]
            axis.plot(minutes, own_mib, linewidth=1)
            slope = figures["own MB/hour in the second half"]
            axis.set_title(f"{name}, {slope:+.2f} MB/hour in the second half", loc="left")
            axis.set_ylabel("own MiB")
            axis.set_ylim(0, 1.2 * max(own_mib))
            axes[-1].plot(
                minutes, [each["descriptors"][name] for each in samples], linewidth=1, label=name
            )
        axes[-1].set_title("descriptors", loc="left")
        axes[-1].set_ylim(bottom=0)
        axes[-1].set_xlabel(f"minutes, at {results['requests ended/s']:.0f} requests/s")
        axes[-1].legend(ncols=len(results["services"]), fontsize="small")
        figure.savefig(path, metadata={"Date": None})
