#!/usr/bin/env python3
"""Says and draws what overlaps in a trace that `train_mlp -T FILE` wrote.

    dev/timeline.py TRACE.json [--png FILE] [--step K]

Prints for each rank and step: how long the compute stream stood still for collectives ("wait"), and how much of
the reduces' time lies under backward and of the gathers' under forward and backward. --png draws one step (the last
one, or K, counted from 1), a row for each rank and stream. A step begins with the first forward after an update.
Times are those of the device: two spans that overlap ran at the same time.

Exit code: 0, or 2 if the trace cannot be read.
"""

import argparse
import json
import sys

COLORS = {"forward": "#4c9f70", "backward": "#3b75af", "update": "#8c6bb1", "norm": "#c79fd9",
          "reduce": "#e08214", "gather": "#e8c547", "wait": "#d7301f", "other": "#aaaaaa"}
MEANING = {"wait": "wait: compute stands still", "reduce": "reduce gradients", "gather": "gather parameters"}


class Unreadable(Exception):
    pass


def read_trace(path):
    """{rank: {row: [(kind, name, begin_ms, end_ms), ...]}} in order of their begins."""
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
        events = events["traceEvents"] if isinstance(events, dict) else events
        ranks = {}
        for event in events:
            if event["ph"] != "X":
                continue
            begin, duration = float(event["ts"]) / 1e3, float(event["dur"]) / 1e3
            kind = event["name"].split()[0]
            rows = ranks.setdefault(int(event["pid"]), {0: [], 1: []})
            rows.setdefault(int(event["tid"]), []).append((kind, event["name"], begin, begin + duration))
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Unreadable(f"{path}: not a trace ({type(error).__name__}: {error})".replace("\n", " ")) from None
    if not ranks:
        raise Unreadable(f"{path}: no spans in it")
    for rows in ranks.values():
        for row in rows.values():
            row.sort(key=lambda span: (span[2], -span[3]))
    return ranks


def steps_of(rows):
    """Times at which the steps of a rank begin: a forward that follows an update (or is the first)."""
    starts, updated = [], True
    for kind, _, begin, _ in rows[0]:
        if kind == "forward" and updated:
            starts.append(begin)
        updated = kind == "update" or (updated and kind != "forward")
    return starts


def cut(rows, begin, end):
    return {row: [span for span in spans if begin <= span[2] < end] for row, spans in rows.items()}


def total(spans, kind):
    return sum(end - begin for k, _, begin, end in spans if k == kind)


def under(spans, kind, others, other_kind):
    """Milliseconds of `kind` that lie under spans of `other_kind`, less the waits inside those."""
    working = [(b, e) for k, _, b, e in others if k == other_kind]
    standing = [(b, e) for k, _, b, e in others if k == "wait"]
    shared = 0.0
    for k, _, begin, end in spans:
        if k != kind:
            continue
        for low, high in working:
            low, high = max(low, begin), min(high, end)
            if low < high:
                shared += high - low - sum(max(0.0, min(e, high) - max(b, low)) for b, e in standing)
    return shared


def report(ranks):
    for rank, rows in sorted(ranks.items()):
        starts = steps_of(rows) or [min(span[2] for row in rows.values() for span in row)]
        for step, begin in enumerate(starts, 1):
            part = cut(rows, begin, starts[step] if step < len(starts) else float("inf"))
            compute, communication = part[0], part[1]
            line = f"rank {rank} step {step}: exposed {total(compute, 'wait'):.2f} ms"
            for kind, others in (("reduce", ["backward"]), ("gather", ["forward", "backward"])):
                line += f"; {kind} {total(communication, kind):.2f} ms"
                for other in others:
                    line += f", {under(communication, kind, compute, other):.2f} of it under {other}"
            print(line)


def draw(path, ranks, step, trace):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes, spans = [], []
    for rank, rows in sorted(ranks.items()):
        starts = steps_of(rows)
        if not starts or not 1 <= (step or len(starts)) <= len(starts):
            raise Unreadable(f"{trace}: step {step or 1} of rank {rank}, which has steps 1 to {len(starts)}")
        first = (step or len(starts)) - 1
        part = cut(rows, starts[first], starts[first + 1] if first + 1 < len(starts) else float("inf"))
        for row, name in ((0, "compute"), (1, "communication")):
            lanes.append(f"rank {rank}  {name}")
            spans.append(part[row])
    zero = min(span[2] for lane in spans for span in lane)
    figure, axes = pyplot.subplots(figsize=(13, 1.2 + 0.42 * len(lanes)), layout="constrained")
    kinds = []
    for y, lane in enumerate(spans):
        for kind, _, begin, end in lane:
            kind = kind if kind in COLORS else "other"
            kinds.append(kind)
            thin = kind == "wait"
            axes.barh(y, end - begin, left=begin - zero, height=0.36 if thin else 0.8, color=COLORS[kind],
                      edgecolor="white", linewidth=0.4, zorder=3 if thin else 2)
        if y % 2 and y + 1 < len(spans):
            axes.axhline(y + 0.5, color="black", linewidth=0.6)
    last = max(span[3] for lane in spans for span in lane) - zero
    for y, lane in enumerate(spans): # the number of the layer or bucket, where there is room for it
        for kind, name, begin, end in lane:
            number = name.split()[1:]
            if number and end - begin > 0.022 * last and kind != "wait":
                axes.text((begin + end) / 2 - zero, y, number[0], ha="center", va="center", fontsize=7, zorder=4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, last)
    axes.set_xlabel("time, ms   (numbers: layer on the compute stream, bucket of parameters on the communication stream)")
    axes.legend(handles=[Patch(color=COLORS[k], label=MEANING.get(k, k)) for k in COLORS if k in kinds],
                ncols=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE.json")
    parser.add_argument("--png", metavar="FILE", help="draw one step")
    parser.add_argument("--step", type=int, metavar="K", help="which step to draw, from 1 (the last one)")
    options = parser.parse_args(arguments)
    try:
        ranks = read_trace(options.trace)
        report(ranks)
        if options.png:
            draw(options.png, ranks, options.step, options.trace)
            print(f"drawn: {options.png}")
    except (Unreadable, OSError, ImportError, ValueError) as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
