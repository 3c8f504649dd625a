#!/usr/bin/env python3
"""`make demo`: the recipe in every stage of sharding, beside PyTorch's numbers; then two training curves.

    .venv/bin/python dev/demo.py [--ranks N]

Runs ./train_mlp with its defaults, which are the job of PyTorch's recipe for ZeroRedundancyOptimizer (20
layers of 2000 x 2000, 2 ranks, one step of Adam), with -z 0 to -z 3, and prints one table. Then trains a
small MLP off and sharded, compares the logs to the last digit and draws build/demo/loss.png; and with
-R ordered on 1, 2 and 3 ranks, which must be one run. All that it writes is in build/demo.
Exit code 1 if anything that has to be equal is not, or if the memory is not what sharding promises.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

import compare_loss
import launch

FOLDER = launch.TOP / "build/demo"
POINTS = ("peak MB: model created", "gradients there", "before the update", "after the update")

# Peaks in MB at the four points and the recipe's sum of the parameters; off, sharded over 2 ranks.
PYTORCH = {
    "recipe's\nown output": (((335, 656, 992, 1697), (335, 656, 992, 1361)), (-3453.6123, -3453.6123)),
    "PyTorch 2.11\nH200": (((335, 656, 1050, 2057), (335, 656, 1050, 1553)), (-3453.5693, -3453.5693)),
    "PyTorch 1.13\nCPU": (((358, 679, 990, 1679), (389, 648, 981, 1365)), (-3453.5347, -3453.5347)),
}
REFERENCE_SUM = -3453.53   # PyTorch on a CPU
ANY_RANKS = ["-L", "3", "-C", "64", "-b", "4", "-d", "48", "-I", "split", "-x", "50", "-l", "1e-3", "-R", "ordered"]
SMALL = ["-L", "3", "-C", "64", "-b", "16", "-I", "split", "-x", "200", "-l", "1e-3"]


def train(ranks, name, flags):
    """Runs ./train_mlp with -o build/demo/NAME; returns what its summary.json says."""
    folder = FOLDER / name
    args = ["./train_mlp", *flags, "-o", folder.relative_to(launch.TOP)]
    print(f"$ mpirun -np {ranks} {shlex.join(map(str, args))}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    done = subprocess.run(launch.command(ranks, args), cwd=launch.TOP, env=launch.environment(), text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\ndemo: train_mlp ended with exit code {done.returncode}")
    print(f"  {time.monotonic() - start:.1f} s; output in build/demo/{name}/output.txt", flush=True)
    return json.loads((folder / "summary.json").read_text())


TITLES = ("sharding off", "optimizer state sharded", "gradients too", "parameters too")
PEAKS = (1290, 970, 845, 715)   # MB after the update that 2 ranks may need


def table_of(ranks, runs):
    """runs: a summary for each stage. PyTorch's numbers are of 2 ranks, off and with the optimizer state sharded."""
    peers = PYTORCH if ranks == 2 else {}
    table = Table(title=f"The recipe: 80,040,000 parameters, fp32, Adam, {ranks} ranks, one step")
    table.add_column("")
    for name in ("llmc_zero\nthis machine", *peers):
        table.add_column(name, justify="right")
    for stage, mine in enumerate(runs):
        theirs = peers.values() if stage < 2 else ()
        table.add_row(f"[bold]{TITLES[stage]}, -z {stage}")
        for point, name in enumerate(POINTS):
            table.add_row("  " + name, f"{mine['peak_mb'][point]:.0f}", *(str(peaks[stage][point]) for peaks, _ in theirs))
        table.add_row("  params sum", f"{mine['params_sum']:.4f}", *(f"{sums[stage]:.4f}" for _, sums in theirs))
        table.add_row("  params hash", str(mine["params_hash"]))
        state = f"{mine['optimizer_state_mb']:.2f}"
        if stage > 0:
            state += f" ({mine['optimizer_state_mb'] / runs[0]['optimizer_state_mb']:.4f} of off)"
        table.add_row("  m and v, MB a rank", state, end_section=True)
    return table


def check(ranks, runs):
    """What has to hold after the runs of the recipe, one for each stage: a list of (sentence, True or False)."""
    checks = []
    for stage in range(1, 4):
        # stages 2 and 3 have a bucket a unit: at more than two ranks NCCL adds in another order there
        base = 0 if stage == 1 or ranks <= 2 else 2
        if stage != base:
            checks += [(f"{name}: -z {stage} = -z {base}", all(runs[stage][key] == runs[base][key] for key in keys))
                       for name, keys in (("parameter hash and sum", ("params_hash", "params_sum")),
                                          ("loss and norm", ("loss", "norm")))]
        ratio = runs[stage]["optimizer_state_mb"] / runs[0]["optimizer_state_mb"]
        checks.append((f"m and v with -z {stage}: 1/{ranks} of off, up to padding", 1 / ranks <= ratio < 1.001 / ranks))
    if ranks == 2:
        checks.append((f"parameter sum: within 0.5 of {REFERENCE_SUM}", abs(runs[0]["params_sum"] - REFERENCE_SUM) <= 0.5))
        checks += [(f"peak after the update: at most {limit} MB with -z {stage}", runs[stage]["peak_mb"][3] <= limit)
                   for stage, limit in enumerate(PEAKS)]
    return checks


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=range(1, 65), metavar="N")
    ranks = parser.parse_args().ranks

    runs = [train(ranks, f"recipe/stage{stage}", ["-z", str(stage)]) for stage in range(4)]
    print()
    Console(width=110).print(table_of(ranks, runs))
    checks = check(ranks, runs)
    for sentence, holds in checks:
        print(f"  {'yes' if holds else 'NO '}  {sentence}")

    print("\nA small MLP, 200 steps:")
    for name, stage in (("curve/off", "0"), ("curve/sharded", "1")):
        train(ranks, name, [*SMALL, "-z", stage])
    differs = compare_loss.main([str(FOLDER / "curve/off"), str(FOLDER / "curve/sharded"),
                                 "--png", str(FOLDER / "loss.png")])
    if differs or not all(holds for _, holds in checks):
        sys.exit("demo: FAILED: something above is not as it has to be")
    print("demo: sharding changed the memory and nothing else")

    print("\nOne run on 1, 2 and 3 ranks, 12 micro-batches a step:")
    hashes = [train(ranks, f"ranks/{ranks}", [*ANY_RANKS, "-z", str(ranks)])["run_hash"] for ranks in (1, 2, 3)]
    logs = {(FOLDER / f"ranks/{ranks}/main.log").read_bytes() for ranks in (1, 2, 3)}
    if len(set(hashes)) > 1 or len(logs) > 1:
        sys.exit(f"demo: FAILED: 1, 2 and 3 ranks have the run hashes {', '.join(hashes)} and {len(logs)} different logs")
    print(f"demo: 1, 2 and 3 ranks, one run hash: {hashes[0]}")


if __name__ == "__main__":
    main()
