"""Draws the pictures of the documentation, each for the light and for the dark theme, into a folder of SVG files.

    python docs/pictures.py docs/_static

Windows come from `WindowSpec`, the rate limiter from a run on a `LocalServer`, throughput from the tables of
explanation/performance.md.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MultipleLocator

import reverb_writer as rw

FIGURES = Path(__file__).parent / "explanation/performance.md"
THEMES = {
    "light": {
        "text": "#333",
        "faint": "#ccc",
        "ours": "#1f6fb2",
        "theirs": "#b26a1f",
        "good": "#2c8a57",
    },
    "dark": {
        "text": "#ddd",
        "faint": "#555",
        "ours": "#6cb2eb",
        "theirs": "#e0a15e",
        "good": "#6fcf97",
    },
}
Colours = dict[str, str]
UNITS = {"steps": "writing", "items": "reading"}
BALANCE = rw.SampleToInsertRatio(samples_per_insert=8, min_size=100, error_buffer=200)
RUN_S, PHASE_S, LOOK_S = 6.0, 1.5, 0.02


def new_figure(width: float, height: float, colours: Colours) -> tuple[Figure, Any]:
    """Return a figure of so many inches, and its axes."""
    figure = Figure((width, height), layout="constrained")
    axes = figure.subplots()
    dress(axes, colours)
    return figure, axes


def dress(axes: Any, colours: Colours) -> None:
    """Give axes the colours of a theme."""
    axes.set_facecolor("none")
    axes.tick_params(colors=colours["text"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["text"])
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(colours["text"])


def draw_windows(colours: Colours) -> Figure:
    """Draw the windows of an episode of 9 steps for each mode of its end."""
    num_steps, length, stride = 9, 4, 3
    modes = list(rw.EndOfEpisode)
    figure, axes = new_figure(7, 5.6, colours)
    top, ticks = 0, []
    for mode in modes:
        spec = rw.WindowSpec(length, stride, mode)
        rows = spec.windows(num_steps)
        covered = {step for start, stop in rows for step in range(start, stop)}
        for step in range(num_steps):
            colour = colours["faint"] if step in covered else "none"
            axes.add_patch(FancyBboxPatch((step + 0.1, top), 0.8, 0.5, "round,pad=0,rounding_size=0.1", fc=colour,
                                          ec=colours["faint"] if step in covered else colours["theirs"]))  # fmt: skip
        for row, (start, stop) in enumerate(rows):
            y = top + 0.85 + 0.4 * row
            axes.plot(
                [start + 0.1, min(stop, num_steps) - 0.1], [y, y], color=colours["ours"], lw=4, solid_capstyle="butt"
            )
            if stop > num_steps:
                axes.plot([num_steps, stop - 0.1], [y, y], color=colours["ours"], lw=4, ls=(0, (0.5, 0.5)))
        ticks.append(top + 0.25)
        top += 1.1 + 0.4 * len(rows)
    axes.set(xlim=(0, 12.2), ylim=(top, -0.2), xticks=np.arange(num_steps) + 0.5, xlabel="step of the episode")
    axes.set_xticklabels([*map(str, range(num_steps - 1)), "B"])
    axes.set_yticks(ticks, [mode.name for mode in modes])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left"]].set_visible(False)
    axes.set_title(
        f"sequence_length {length}, stride_length {stride}; dotted: padding; empty: in no window", fontsize=10
    )
    return figure


def pause(slow_phase: int) -> None:
    """Wait for longer in every second phase."""
    time.sleep(0.02 if int(time.monotonic() / PHASE_S) % 2 == slow_phase else 0.0005)


def act(client: rw.Client, over: threading.Event) -> None:
    """Insert items, slowly in even phases."""
    while not over.is_set():
        with contextlib.suppress(rw.errors.ReplayTimeoutError):  # the learner is slow: once more
            client.insert(np.zeros(1, np.float32), {"replay": 1.0}, timeout_s=0.5)
        pause(slow_phase=0)


def learn(client: rw.Client, over: threading.Event) -> None:
    """Sample items, slowly in odd phases."""
    with rw.ReplayDataset(client, "replay", batch_size=4, max_in_flight_batches=1) as dataset:
        while not over.is_set():
            if dataset.poll(timeout_s=0.2) is not None:
                pause(slow_phase=1)


def run_limiter() -> np.ndarray[Any, Any]:
    """Run an actor and a learner, fast and slow in turn; return rows of time, inserts and samples."""
    rows: list[tuple[float, int, int]] = []
    over = threading.Event()
    with (
        rw.LocalServer([rw.TableConfig("replay", rate_limiter=BALANCE)]) as server,
        rw.Client(server.address) as client,
    ):
        threads = [threading.Thread(target=work, args=(client, over)) for work in (act, learn)]
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < RUN_S:
            limiter = client.server_info()["replay"].rate_limiter
            rows.append((now, limiter.num_inserts, limiter.num_samples))
            time.sleep(LOOK_S)
        over.set()
        for thread in threads:
            thread.join()
    return np.array(rows)


def draw_limiter(rows: np.ndarray[Any, Any], colours: Colours) -> Figure:
    """Draw the balance within its band, and the samples for each insert so far."""
    seconds, inserts, samples = rows.T
    balance = BALANCE.balance
    figure = Figure((7, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    for axes in (upper, lower):
        dress(axes, colours)
    is_full = inserts >= balance.min_size
    upper.axhspan(balance.min_diff, balance.max_diff, color=colours["good"], alpha=0.2, lw=0)
    upper.plot(seconds, inserts * balance.samples_per_insert - samples, color=colours["ours"])
    upper.set(ylabel="diff", ylim=(0, balance.max_diff * 1.15))
    upper.text(seconds[-1], balance.max_diff, "max_diff: inserts wait", color=colours["good"], ha="right", va="bottom")
    upper.text(seconds[-1], balance.min_diff, "min_diff: samples wait", color=colours["good"], ha="right", va="top")
    lower.axhline(balance.samples_per_insert, color=colours["good"], ls="--", lw=1)
    lower.plot(seconds[is_full], samples[is_full] / inserts[is_full], color=colours["ours"])
    lower.set(ylabel="samples per insert", xlabel="seconds", ylim=(0, balance.samples_per_insert * 1.25))
    return figure


def read_throughput(text: str) -> dict[str, list[tuple[str, float, float]]]:
    """Read, of each table of rates, the rows that have a rate of ours and one of a peer."""
    row = re.compile(r"^\| ([^|]+) \| ([\d,]+)[^|]* \| ([\d,]+) [^|]*\|", re.MULTILINE)
    _, *tables = re.split(r"^\| work[^|]* \| ours, (\w+)/s \|", text.replace("`", ""), flags=re.MULTILINE)
    found = {
        f"{UNITS[unit]}, {unit} a second": [
            (name, *(float(rate.replace(",", "")) for rate in rates))
            for name, *rates in row.findall(rest.partition("\n\n")[0])
        ]
        for unit, rest in zip(tables[::2], tables[1::2], strict=True)
    }
    if not found or not all(found.values()):
        raise SystemExit(
            f"{FIGURES.name} needs tables `| work | ours, UNIT/s |` of rows `| work | rate | rate (...) |`."
        )
    return found


def draw_throughput(found: dict[str, list[tuple[str, float, float]]], colours: Colours) -> Figure:
    """Draw our rates and the peer's beside each other, a panel a table."""
    sizes = [len(rows) for rows in found.values()]
    figure = Figure((7, 0.5 * sum(sizes) + 1.5), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(found), height_ratios=sizes, sharex=True))
    largest = max(rate for rows in found.values() for _, rate, _ in rows)
    for axes, (title, work) in zip(panels, found.items(), strict=True):
        dress(axes, colours)
        rows = np.arange(len(work))
        ours, theirs = (np.array([one[i] for one in work]) for i in (1, 2))
        axes.barh(rows - 0.18, ours, 0.36, color=colours["ours"], label="reverb-writer")
        axes.barh(rows + 0.18, theirs, 0.36, color=colours["theirs"], label="TF-Agents, Reverb")
        for row, (rate, by) in enumerate(zip(ours, ours / theirs, strict=True)):
            axes.text(rate, row - 0.18, f" {by:.2g}x", color=colours["text"], va="center", fontsize=9)
        axes.set_yticks(rows, [name for name, _, _ in work])
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10, color=colours["text"])
        axes.set(xlim=(0, largest * 1.12))
        axes.xaxis.set_major_locator(MultipleLocator(100_000))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    panels[-1].legend(frameon=False, labelcolor=colours["text"], loc="lower right")
    return figure


def pictures() -> Iterator[tuple[str, Callable[[Colours], Figure]]]:
    """Yield each picture's name and what draws it."""
    rows, found = run_limiter(), read_throughput(FIGURES.read_text("utf-8"))
    yield "windows", draw_windows
    yield "rate-limiter", lambda colours: draw_limiter(rows, colours)
    yield "throughput", lambda colours: draw_throughput(found, colours)


def main(folder: Path) -> None:
    """Draw all pictures."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.family": "sans-serif"})
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures():
        for theme, colours in THEMES.items():
            path = folder / f"{name}-{theme}.svg"
            draw(colours).savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
