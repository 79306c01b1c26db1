"""The charts of a run's page, as plain data for plotly.js.

Plotly reads a little HTML (<b>, <a href>) and TeX in every text: what users named goes through `plain` or `wrapped` and stays text.
Colours hold on light and dark ground, are told apart by colour-blind people, and never say anything alone.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from retain.report.tables import clean, cut, number

NEWEST, LEARNED, OLDER = "#d55e00", "#858d98", "#3d7fc4"
EARLIER = (("#0072b2", "circle"), ("#009e73", "square"), ("#cc79a7", "triangle-up"), ("#e69f00", "cross"), ("#56b4e9", "star"))
"""Colours of Okabe and Ito 2008 and a mark for each earlier task, where there are no more than these."""
MAX_TICKS = 12
MAX_VALUES = 12
"""Tasks up to which the matrix holds its values in writing."""
TICK_CELLS = 14
LEGEND_CELLS = 24
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", "size": 12}


def plain(text: str) -> str:
    """A text as plotly shows it letter by letter."""
    return html.escape(clean(text), quote=False).replace("$", "&#36;")


def wrapped(text: str) -> str:
    """A whole name for a hover box, in lines."""
    return "<br>".join(map(plain, textwrap.wrap(clean(text), 40)[:8]))


def charts(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The line chart and the matrix: each with the `id` of its element, `data`, `layout`, and the `style` of its element."""
    tasks, primary = summary["tasks"], summary["primary"]
    values = [[None if value is None else round(value, 6) for value in row] for row in summary["matrices"][primary]["values"]]
    return [_lines(tasks, primary, values), _matrix(tasks, primary, values)]


def _lines(tasks: Sequence[str], primary: str, values: list[list[float | None]]) -> dict[str, Any]:
    """The metric of every task from when it was learned, and the line of what each was when it was learned."""
    last, few = len(tasks) - 1, len(tasks) <= len(EARLIER) + 1
    data: list[dict[str, Any]] = []
    for task in range(last):
        colour, mark = EARLIER[task] if few else (OLDER, "circle")
        data.append(
            {
                "x": list(range(task, last + 1)),
                "y": [values[row][task] for row in range(task, last + 1)],
                "mode": "lines+markers" if few else "lines",
                "line": {"color": colour, "width": 2 if few else 1.3},
                "marker": {"symbol": mark, "size": 7},
                "opacity": 1
                if few
                else round(0.9 - 0.5 * task / last, 3),  # the oldest can have fallen furthest: they are clearest
                "name": plain(cut(clean(tasks[task]), LEGEND_CELLS)) if few else "earlier tasks, the older the darker",
                "legendgroup": str(task) if few else "earlier",
                "showlegend": few or task == 0,
                "customdata": [[wrapped(tasks[task]), wrapped(tasks[row])] for row in range(task, last + 1)],
                "hovertemplate": "<b>%{customdata[0]}</b><br>after %{customdata[1]}: %{y:.3f}<extra></extra>",
            }
        )
    names = [[wrapped(name)] for name in tasks]
    data.append(
        {
            "x": list(range(last + 1)),
            "y": [values[task][task] for task in range(last + 1)],
            "mode": "lines+markers",
            "line": {"color": LEARNED, "width": 1.5, "dash": "dot"},
            "marker": {"symbol": "diamond-open", "size": 11 if few else 7, "line": {"width": 1.5}},
            "name": "as just learned (the diagonal)",
            "customdata": names,
            "hovertemplate": "<b>%{customdata[0]}</b><br>as just learned: %{y:.3f}<extra></extra>",
        }
    )
    data.append(
        {
            "x": [last],
            "y": [values[last][last]],
            "mode": "markers+text",
            "marker": {"color": NEWEST, "size": 11},
            "text": [number(values[last][last])],
            "textposition": "middle right",
            "textfont": {"color": NEWEST, "size": 13, "weight": 700},
            "name": f"{plain(cut(clean(tasks[last]), LEGEND_CELLS))} (newest)",
            "customdata": names[last:],
            "hovertemplate": "<b>%{customdata[0]}</b><br>newest: %{y:.3f}<extra></extra>",
            "cliponaxis": False,
        }
    )
    known = [value for row in values for value in row if value is not None] or [0.0, 1.0]
    pad = max(0.08 * (max(known) - min(known)), 0.02)
    layout = {
        **_base(),
        "margin": {"l": 10, "r": 56, "t": 10, "b": 10},  # the newest value is written there
        "xaxis": {**_axis("after learning"), **_ticks(tasks), "range": [-0.4, last + (0.1 if last else 0.4)], "showgrid": False},
        "yaxis": {**_axis(primary), "range": [min(known) - pad, max(known) + 1.6 * pad], "tickformat": ".2~f", "nticks": 7},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "itemclick": False},
    }
    layout["legend"]["itemdoubleclick"] = False
    return {"id": "lines", "data": data, "layout": layout, "style": "height: 420px"}


def _matrix(tasks: Sequence[str], primary: str, values: list[list[float | None]]) -> dict[str, Any]:
    """R as a heatmap: rows after which task, the first on top; columns measured on which task."""
    count, few = len(tasks), len(tasks) <= MAX_VALUES
    names = [wrapped(name) for name in tasks]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": values,
        "colorscale": "Cividis",
        "xgap": 1 if count <= 60 else 0,
        "ygap": 1 if count <= 60 else 0,
        "customdata": [[[names[row], names[column]] for column in range(count)] for row in range(count)],
        "hovertemplate": "<b>%{customdata[1]}</b><br>after %{customdata[0]}: %{z:.3f}<extra></extra>",
        "hoverongaps": False,
        "showscale": len({value for row in values for value in row} - {None}) > 1,
        "colorbar": {
            "orientation": "h",
            "thickness": 10,
            "len": 1,
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
            "ypad": 2,
            "outlinewidth": 0,
            "nticks": 5,
            "tickformat": ".2~f",
            "tickfont": FONT,
        },
    }
    if few:
        trace |= {"texttemplate": "%{text}", "textfont": {"size": 12}}
        trace["text"] = [["" if column > row else number(values[row][column]) for column in range(count)] for row in range(count)]
    ticks = _ticks(tasks)
    layout = {
        **_base(),
        "xaxis": {**_axis("measured on"), **ticks, "range": [-0.5, count - 0.5], "showgrid": False, "ticks": ""},
        "yaxis": {**_axis("after learning"), **ticks, "range": [count - 0.5, -0.5], "showgrid": False, "ticks": ""},
    }
    label = 7 * max(cell_len(text) for text in ticks["ticktext"]) + 50
    cell = (46, 96, 34) if few else (0, 26, max(4.0, min(20.0, 640 / count)))
    style = f"min-width: {label + cell[0] * count}px; max-width: {label + cell[1] * count}px; height: {cell[2] * count + 120:.0f}px"
    return {"id": "matrix", "data": [trace], "layout": layout, "style": style}


def _base() -> dict[str, Any]:
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": FONT,
        "margin": {"l": 10, "r": 16, "t": 10, "b": 10},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": FONT},
        "dragmode": False,
    }


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": plain(title), "standoff": 12}, "automargin": True, "fixedrange": True, "zeroline": False}


def _ticks(tasks: Sequence[str]) -> dict[str, Any]:
    """Names of all tasks, or of every second, third ... one counted from the newest."""
    step = -(-len(tasks) // MAX_TICKS)
    shown = list(range(len(tasks) - 1, -1, -step))[::-1]
    texts = [plain(cut(clean(tasks[task]), TICK_CELLS)) for task in shown]
    return {
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": texts,
        "autotickangles": [0, -45, -90],
        "ticklabeloverflow": "allow",
    }
