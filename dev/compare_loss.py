#!/usr/bin/env python3
"""Compares two training logs step by step, and draws them.

    dev/compare_loss.py A B [--tol T] [--png FILE] [--names A B] [--title TEXT]

A and B are main.log files (or the folders that hold them) of train_mlp or of llm.c. Each line is a step and
any number of key:value pairs,

    s:3 trl:0.123456789 lr:0.01 norm:1.23456789
    s:250 eval:0.2985

and the lines of several keys may be mixed. Where a step has the same key twice (a resumed run writes again
what it runs again) the last one counts.

What is compared: trl (the training loss), norm, tel (the validation loss) and eval, each where both logs have
it; a key that only one log has is named and not compared. trl must be in both. The difference of two values
a and b is relative, |a - b| / max(|a|, |b|), and 0 if they are equal. NaN equals NaN and infinity equals
infinity of the same sign; NaN or infinity against anything else is an infinite difference. --tol 0 (the
default) asks that every printed number is the same.

Exit code: 0 all differences are within T; 1 one is beyond, or the logs have not the same steps;
2 a log cannot be read or the two have no step in common.
"""

import argparse
import math
import os
import re
import sys

COMPARED = {"trl": "loss", "norm": "norm", "tel": "validation loss", "eval": "eval"}
LINE = re.compile(r"s:(\d+)((?:\s+[A-Za-z_]\w*:\S+)+)\s*")


class Unreadable(Exception):
    pass


def read_log(path):
    """{key: {step: value}} of one log, steps ascending."""
    if os.path.isdir(path):
        path = os.path.join(path, "main.log")
    series = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                match = LINE.fullmatch(line)
                if not match:
                    raise Unreadable(f"{path}:{number}: not a line of a log (s:STEP key:value ...): "
                                     f"{line.strip()[:60]!r}")
                for pair in match[2].split():
                    key, text = pair.split(":", 1)
                    try:
                        series.setdefault(key, {})[int(match[1])] = float(text)
                    except ValueError:
                        raise Unreadable(f"{path}:{number}: {key} is not a number: {text!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not series.get("trl"):
        raise Unreadable(f"{path}: no training loss (trl:) in it")
    return {key: dict(sorted(values.items())) for key, values in series.items()}


def difference(a, b):
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def some(steps):
    """The first few of a set of steps, in words."""
    steps = sorted(steps)
    return ", ".join(map(str, steps[:5])) + (f", ... ({len(steps)} in all)" if len(steps) > 5 else "")


def compare(name_a, a, name_b, b, tolerance):
    """Prints the comparison; returns True if all is within the tolerance and the steps are the same."""
    same = True
    for key, title in COMPARED.items():
        if key not in a and key not in b:
            continue
        if key not in a or key not in b:
            print(f"{title:16} only in {name_a if key in a else name_b}: not compared")
            continue
        for name, mine, other in ((name_a, a[key], b[key]), (name_b, b[key], a[key])):
            if other.keys() - mine.keys():
                print(f"{title:16} missing in {name}: step {some(other.keys() - mine.keys())}")
                same = False
        common = [step for step in a[key] if step in b[key]]
        if not common:
            if key == "trl":
                raise Unreadable(f"{name_a} and {name_b} have no step in common")
            continue
        worst = max(common, key=lambda step: difference(a[key][step], b[key][step]))
        largest = difference(a[key][worst], b[key][worst])
        beyond = sum(difference(a[key][step], b[key][step]) > tolerance for step in common)
        if largest == 0:
            print(f"{title:16} {len(common)} steps compared, all equal")
        else:
            print(f"{title:16} {len(common)} steps compared, {beyond} beyond {tolerance:g}, "
                  f"largest difference {largest:.3g} at step {worst}: "
                  f"{a[key][worst]!r} and {b[key][worst]!r}")
        same = same and beyond == 0
    return same


def draw(path, title, name_a, a, name_b, b):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (curves, differences) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained")
    few = "o" if len(a) < 3 else None
    wide = {"color": "#1f77b4", "linewidth": 3.5, "alpha": 0.55, "marker": few}
    dashes = {"color": "#d62728", "linewidth": 1.2, "linestyle": "--", "marker": few}
    curves.plot(list(a), list(a.values()), label=name_a, **wide)
    curves.plot(list(b), list(b.values()), label=name_b, **dashes)
    curves.set_ylabel("training loss")
    curves.legend()
    curves.grid(alpha=0.3)
    common = [step for step in a if step in b]
    values = [difference(a[step], b[step]) for step in common]
    finite = [value for value in values if math.isfinite(value)]
    differences.plot(common, values, color="black", linewidth=1.2, marker=few)
    differences.set_ylabel("relative difference")
    differences.set_xlabel("step")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    differences.grid(alpha=0.3)
    if finite and max(finite) > 0:
        differences.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    else:
        differences.set_ylim(-1, 1)
        differences.set_yticks([0])
    infinite = len(values) - len(finite)
    largest = f"largest {max(finite):.2g}" if finite and max(finite) > 0 else "zero at every step"
    differences.set_title(largest + (f"; infinite at {infinite} steps" if infinite else ""), fontsize=10)
    figure.suptitle(title or f"Training loss, {len(common)} steps")
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def short_names(path_a, path_b):
    """What the two logs are called in messages: the shortest tails of their paths that differ."""
    if os.path.basename(path_a) == os.path.basename(path_b) == "main.log":
        path_a, path_b = os.path.dirname(path_a) or ".", os.path.dirname(path_b) or "."
    a, b = os.path.basename(os.path.normpath(path_a)), os.path.basename(os.path.normpath(path_b))
    return (a, b) if a != b else (path_a, path_b)


def tolerance(text):
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="a main.log, or the folder that holds it")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--tol", type=tolerance, default=0.0, metavar="T",
                        help="largest relative difference that is still the same (0)")
    parser.add_argument("--png", metavar="FILE", help="draw both losses and their difference")
    parser.add_argument("--names", nargs=2, metavar=("A", "B"), help="what to call them (from their paths)")
    parser.add_argument("--title", metavar="TEXT", help="what stands above the picture")
    options = parser.parse_args(arguments)
    name_a, name_b = options.names or short_names(options.a, options.b)
    try:
        a, b = read_log(options.a), read_log(options.b)
        same = compare(name_a, a, name_b, b, options.tol)
        if options.png:
            draw(options.png, options.title, name_a, a["trl"], name_b, b["trl"])
            print(f"drawn: {options.png}")
    except (Unreadable, OSError, ImportError, ValueError) as error:
        print(f"compare_loss: {error}", file=sys.stderr)
        return 2
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
