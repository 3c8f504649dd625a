"""train_mlp from the outside: against PyTorch, sharded against not, every stream mode, every wait dropped in turn."""

import json
import re
import shutil

import pytest
from conftest import LONG, TOP, run, slow
from train_lines import STREAM_MODES, check_ok, run_lines

ORACLE = json.loads((TOP / "test/data/torch_mlp.json").read_text())["runs"]
OPTIMIZERS = {"adam": "-U adam -l 0.01", "adamw": "-U adamw -l 0.01 -c 0.1", "adam_l2": "-U adam -l 0.01 -c 0.1",
              "sgd": "-U sgd -l 0.5 -M 0.9"}
TYPES = {"fp32": "-P fp32", "bf16-masters": "-P bf16 -w 1", "bf16-stochastic": "-P bf16 -w 0"}
SMALL = "-L 3 -C 130 -b 5 -l 1e-3"


def relative(a, b):
    return abs(a - b) / max(abs(a), abs(b), 1e-300)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_and_norms_of_pytorch(ranks, tmp_path):
    """All runs of the oracle with this many ranks, stages 0 and 1: ten steps, 5e-6 relative (numerics: PyTorch's fp32
    is within 1e-6 of float64)."""
    oracle = [o for o in ORACLE if o["ranks"] == ranks]
    assert oracle
    lines = [f"-z {stage} -L {o['layers']} -C {o['width']} -b {o['batch']} -d {o['batch'] * ranks * o['micro_steps']} -x 10 "
             f"{OPTIMIZERS[o['optimizer']]} -G {o['clip']} -I {o['data']}" for o in oracle for stage in (0, 1)]
    outcomes, printed = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    plain_sums = [float(x) for x in re.findall(r"plain sum of the parameters: (\S+)", printed)]
    assert len(plain_sums) == len(lines)
    for i, (line, outcome) in enumerate(zip(lines, outcomes)):
        o = oracle[i // 2]
        for name, ours, theirs in (("loss", outcome.column("trl"), o["losses"]),
                                   ("norm", outcome.column("norm"), o["norms"])):
            assert len(ours) == len(theirs) == 10
            worst = max(relative(a, b) for a, b in zip(ours, theirs))
            assert worst <= 5e-6, f"{line}: {name} differs by {worst:.2e} relative: {ours} against {theirs}"
        # the tenth update shows in the parameters alone
        assert abs(plain_sums[i] - o["final_sum"]) < 5e-4, (line, plain_sums[i], o["final_sum"])


def on_off_lines(kind, modes, plans):
    """Pairs (stage 0, stage 1) that must be the same to the bit, in every mode and plan; different data on each rank,
    clip active, two micro-steps."""
    return [f"{mode} -z {stage} {SMALL} -x 5 -I own -G 0.1 {kind} {plan}" for plan in plans for mode in modes
            for stage in (0, 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", TYPES)
def test_sharded_equals_unsharded(ranks, kind, tmp_path):
    plans = [f"{buckets} -d {10 * ranks}" for buckets in ("-K 0", "-K 0.05")]
    lines = on_off_lines(TYPES[kind], STREAM_MODES, plans)
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    for p in range(len(plans)):
        group = outcomes[p * len(lines) // len(plans):(p + 1) * len(lines) // len(plans)]
        assert len({outcome.bits() for outcome in group}) == 1, [outcome.bits() for outcome in group]
        assert group[0].log.count("\n") == 5
    norms = outcomes[0].column("norm")
    assert min(norms) > 0.1, "the clip must be active for this test to mean something"
    # Both stages share the reduce-scatter, so a run without it is held against both, too: to the bit where a sum of
    # two numbers leaves no choice of order, else to rounding.
    usual, _ = run_lines([f"-z 0 {SMALL} -x 5 -I own -G 0.1 {TYPES[kind]} {plan} -R allreduce" for plan in plans], ranks,
                         tmp_path / "allreduce")
    for outcome, usual_outcome in zip((outcomes[0], outcomes[-1]), usual):
        assert usual_outcome.error is None, usual_outcome.error
        if ranks <= 2:
            assert outcome.bits() == usual_outcome.bits()
        else:
            worst = max(relative(a, b) for a, b in zip(outcome.column("norm"), usual_outcome.column("norm")))
            assert worst < (1e-5 if kind == "fp32" else 3e-2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_overlap_units_and_optimizers_change_nothing(ranks, tmp_path):
    """-O 0 and 1, -K unit, Adam(W) with decay and SGD: on = off in each."""
    kinds = ["-U adamw -c 0.1", "-U adam -c 0.1 -P bf16", "-U sgd -l 0.1", "-U sgd -M 0 -l 0.1 -P bf16 -w 0",
             "-B1 0.8 -B2 0.95 -E 1e-6"]
    lines = [f"-z {stage} {SMALL} -x 4 -I own {kind} {plan} -O {overlap}"
             for kind in kinds for plan in ("-K unit", "-K 0.02", "-K 0")
             for overlap in (0, 1) for stage in (0, 1)]
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    for i in range(0, len(lines), 4):
        assert len({outcome.bits() for outcome in outcomes[i:i + 4]}) == 1, lines[i]
    for i in range(0, len(lines), 12):
        assert len({outcome.bits() for outcome in outcomes[i:i + 12]}) <= (1 if ranks <= 2 else 3), \
            "at one or two ranks the bucket plan cannot change a bit either"


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_fewer_weights_than_ranks(ranks, tmp_path):
    """Case A1: a net of 2 parameters (one weight, one bias); then sizes that do not divide."""
    lines = [f"-z {stage} -L {layers} -C {width} -b 2 -x 3 -I own -l 1e-2 {kind}" for kind in TYPES.values()
             for layers, width in ((1, 1), (2, 3), (1, 7)) for stage in (0, 1)]
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    for i in range(0, len(lines), 2):
        assert outcomes[i].bits() == outcomes[i + 1].bits(), lines[i]


def test_all_edges_are_counted():
    assert (TOP / "llmc_zero/collectives.cuh").read_text().count("cudaStreamWaitEvent(") == 11


@pytest.mark.parametrize("flags,edges", [
    ("-z 1", 6), ("-z 1 -O 0 -P bf16", 6), ("-z 0", 4), ("-z 0 -O 0 -U sgd", 4),
    ("-z 1 -A micro -d 20", 7), ("-z 0 -A micro -R ordered -d 20 -P bf16", 7), ("-z 2 -d 20", 7),
    ("-z 2 -O 0 -R ordered", 7), ("-z 3 -d 20", 7), ("-z 3 -R ordered -P bf16", 7)])
def test_every_wait_is_needed(flags, edges, tmp_path):
    """Drops each cudaStreamWaitEvent of ours at every execution; some rush mode must then change the numbers. Past the
    last one, nothing changes and the runtime says so."""
    flags = f"{flags} {SMALL} -x 4 -I own -K 0.05"
    modes = [mode for mode in STREAM_MODES if "rush" in mode]
    lines = [flags] + [f"CUDA_CPU_DROP_WAIT={n} {mode} {flags}" for n in range(1, edges + 2) for mode in modes]
    outcomes, printed = run_lines(lines, 2, tmp_path)
    assert outcomes[0].error is None
    for n in range(1, edges + 1):
        dropped = outcomes[1 + (n - 1) * len(modes):1 + n * len(modes)]
        assert any(outcome.bits() != outcomes[0].bits() for outcome in dropped), f"wait {n} can be dropped unseen"
    for outcome in outcomes[1 + edges * len(modes):]:
        assert outcome.bits() == outcomes[0].bits()
    assert f"no wait {edges + 1}" in printed and f"no wait {edges}\n" not in printed


def ordered_lines(kinds, plans, modes, ranks, micros):
    return [f"{mode} -z {stage} {SMALL} -x 4 -I own -G 0.05 -R ordered -A micro {kind} {plan} -d {5 * ranks * m}"
            for kind in kinds for m in micros for plan in plans for mode in modes for stage in (0, 1, 2, 3)]


ORDERED_KINDS = ("-P fp32", "-P bf16")
ORDERED_PLANS = ("-K 0", "-K unit", "-K 0.05")


def check_ordered(lines, ranks, groups, folder):
    """Equal bits in each of so many groups, and different ones between types."""
    outcomes, _ = run_lines(lines, ranks, folder)
    check_ok(outcomes, lines)
    size = len(lines) // groups
    bits = []
    for g in range(groups):
        group = outcomes[g * size:(g + 1) * size]
        assert len({outcome.bits() for outcome in group}) == 1, [o.summary["params_hash"] for o in group]
        bits.append(group[0].bits())
    assert len(set(bits)) == groups
    assert min(outcomes[0].column("norm")) > 0.05, "the clip must be active"
    return bits


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ordered_gives_the_same_bits_in_every_stage(ranks, tmp_path):
    """A tenth of the matrix below: each stage, plan, type and number of micro-steps appears, and so does each mode."""
    lines = []
    for kind in ORDERED_KINDS:
        every = ordered_lines((kind,), ORDERED_PLANS, STREAM_MODES, ranks, (4,))
        lines += [line for i, line in enumerate(every) if (i % 20) % 4 == (i // 4) % 4 and (i // 20 + i) % 2 == 0]
    check_ordered(lines, ranks, len(ORDERED_KINDS), tmp_path)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micros", [1, 4])
def test_ordered_matrix(ranks, micros, tmp_path):
    for overlap in (0, 1):
        lines = ordered_lines(ORDERED_KINDS, ORDERED_PLANS, STREAM_MODES + ["CUDA_CPU_STREAMS=rush:3"], ranks, (micros,))
        lines = [line + f" -O {overlap}" for line in lines]
        check_ordered(lines, ranks, len(ORDERED_KINDS), tmp_path / str(overlap))


def test_ordered_does_not_depend_on_the_ring(tmp_path):
    """A ring in another order, or exact sums in NCCL: the bits of -R ordered stay, those of -R nccl do not."""
    rings = ["", "CUDA_CPU_NCCL_RING=2,0,3,1", "CUDA_CPU_NCCL_RING=3,2,1,0", "CUDA_CPU_NCCL=exact"]
    lines = [f"{ring} -z {stage} {SMALL} -x 4 -I own -P bf16 -R {reduction} -A micro -d 40 -K 0.05"
             for reduction in ("ordered", "nccl") for ring in rings for stage in (0, 1, 2, 3)]
    outcomes, _ = run_lines(lines, 4, tmp_path)
    check_ok(outcomes, lines)
    half = len(lines) // 2
    assert len({outcome.bits() for outcome in outcomes[:half]}) == 1
    assert len({outcome.bits() for outcome in outcomes[half:]}) > 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_nccl_gives_the_same_bits_in_every_stage_at_the_same_buckets(ranks, tmp_path):
    """And -A micro with -R nccl; Adam(W), SGD, stochastic rounding."""
    kinds = ["-U adamw -c 0.1", "-U sgd -M 0 -l 0.1 -P bf16 -w 0", "-U sgd -l 0.1 -P bf16"]
    lines = [f"-z {stage} {SMALL} -x 3 -I own -A micro {kind} {plan} -d {10 * ranks} -O {overlap}" for kind in kinds
             for plan in ("-K unit",) for overlap in (0, 1) for stage in (0, 1, 2, 3)]
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    for i in range(0, len(lines), 8):
        assert len({outcome.bits() for outcome in outcomes[i:i + 8]}) == 1, lines[i]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_stages_2_and_3_of_few_weights(ranks, tmp_path):
    """Case A1 in all stages: fewer weights than ranks, one layer only (no unit to prefetch), and two."""
    lines = [f"-z {stage} -L {layers} -C {width} -b 2 -x 3 -I own -l 1e-2 -R ordered -A micro {kind}"
             for kind in TYPES.values() for layers, width in ((1, 1), (2, 3), (1, 7)) for stage in (0, 1, 2, 3)]
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    for i in range(0, len(lines), 4):
        assert len({outcome.bits() for outcome in outcomes[i:i + 4]}) == 1, lines[i]


def test_a_build_without_the_reduction_fails(tmp_path):
    """test_sharded_equals_unsharded must notice if gradients are not summed over ranks: the same lines, in a build where
    the reduce-scatter, or every reduction, does nothing."""
    compiler, flags = (TOP / "build/flags").read_text().strip().split(" ", 1)
    flags, libraries = flags.split(" -lcublasLt", 1)
    program = tmp_path / "train_program"
    build = (f"{compiler} {flags.replace('-O3', '-O0')} -include test/no_reduction.h test/train_program.cu "
             f"-o {program} -lcublasLt{libraries}")
    run(["bash", "-c", build], timeout=LONG)
    lines = on_off_lines(TYPES["fp32"], STREAM_MODES[:1], ["-d 20"])
    lines.append(lines[0] + " -R allreduce")
    whole, _ = run_lines(lines, 2, tmp_path / "whole", program=program)
    assert len({outcome.bits() for outcome in whole}) == 1 and whole[0].error is None, whole
    for without in ("reduce-scatter", "reduce-scatter all-reduce"):
        outcomes, _ = run_lines(lines, 2, tmp_path / without.replace(" ", "_"), program=program, env={"WITHOUT": without})
        bits = [outcome.bits() for outcome in outcomes]
        assert None in bits or len(set(bits)) > 1, f"{without}: {bits}"


def test_accumulation_and_ranks_are_equivalent(tmp_path):
    """Cases C1, C2, C8, K1: 8 samples a step as (ranks x batch x micro-steps), in each stage; SGD and a clip make a wrong
    factor show."""
    kinds = ["-U sgd -l 0.05 -M 0.9", "-U adamw -l 1e-3 -c 0.1 -G 0.2"]
    reference = {}
    for ranks, batch, total in ((1, 8, 8), (1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 2, 8), (3, 1, 9)):
        lines = [f"-z {stage} -L 3 -C 33 -I split -x 6 -b {batch} -d {total} {kind}" for kind in kinds
                 for stage in (0, 1, 2, 3)]
        outcomes, _ = run_lines(lines, ranks, tmp_path / f"{ranks}-{batch}-{total}")
        check_ok(outcomes, lines)
        for i, outcome in enumerate(outcomes):
            if total != 8:
                continue
            first = reference.setdefault(i, outcome)
            for name in ("trl", "norm"):
                worst = max(relative(a, b) for a, b in zip(first.column(name), outcome.column(name)))
                assert worst < 1e-5, f"{lines[i]} on {ranks} ranks: {name} off by {worst:.1e}"
            assert relative(first.summary["params_sum"], outcome.summary["params_sum"]) < 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nothing_moves_at_learning_rate_zero(ranks, tmp_path):
    """Case C4: the same batch and lr 0: loss and norm the same at each step, sharded or not."""
    lines = [f"-z {stage} {SMALL} -l 0 -x 5 -I own -d {10 * ranks} {kind}" for kind in TYPES.values()
             for stage in (0, 1, 2, 3)]
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    for outcome in outcomes:
        assert len(set(outcome.column("norm"))) == 1 and len(set(outcome.column("trl"))) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_that_blows_up_stops_in_words(ranks, tmp_path):
    """Cases D1, D3: gradients that are not finite skip on all ranks, are said, and end the run after the limit."""
    lines = [f"-z {stage} {SMALL} -I own -U sgd -l 1e25 -x 100" for stage in (0, 1, 2, 3)]
    outcomes, printed = run_lines(lines, ranks, tmp_path)
    for outcome in outcomes:
        said = "20 steps in a row were skipped (limit 20), the last because a gradient is not finite"
        assert outcome.error and said in outcome.error
    assert "skipped: a gradient is not finite" in printed


def test_a_step_is_skipped_for_the_true_reason(tmp_path):
    """Case N6: gradients of 1e31 are finite, but Adam cannot square them; clipped they make a step."""
    flags = "-L 3 -C 64 -b 4 -l 1e5 -x 30"
    (plain, clipped, tiny), printed = run_lines([flags, f"{flags} -G 1", f"{flags} -G 1e-44"], 2, tmp_path)
    assert "20 steps in a row were skipped" in plain.error
    assert "the last because the norm of the gradients is too large" in plain.error
    assert printed.count("skipped: the norm of the gradients is too large") >= 19
    assert "the last because the clipped gradients are too small for fp32" in tiny.error
    assert clipped.error is None and clipped.summary["skipped"] == 0 and 1e30 < clipped.column("norm")[1] < 1e32
    assert "not finite" not in printed


def test_twenty_equal_runs_are_equal(tmp_path):
    for kind in ("-z 1 -K 0.05", "-z 3 -R ordered -d 30"):
        lines = [f"{kind} {SMALL} -x 3 -I own -P bf16"] * 20
        outcomes, _ = run_lines(lines, 3, tmp_path / kind.split()[1])
        check_ok(outcomes, lines)
        assert len({outcome.bits() for outcome in outcomes}) == 1


def plan_rows(flags):
    out = run(["./train_mlp", "--plan"] + flags.split(), ranks=1).out
    return {(int(row[0]), int(row[1])): [float(x) for x in row[2:9]] for row in (line.split() for line in out.splitlines())
            if len(row) >= 9 and row[0] in ("0", "1", "2", "3")}


@pytest.mark.parametrize("kind", ["", "-P bf16 -R ordered", "-P bf16 -w 0 -A micro -K 0.05 -O 0",
                                  "-U sgd -R ordered -K unit"])
def test_memory_follows_the_plan(kind, tmp_path):
    """What is held in each stage is what --plan says, within 1%, activations included; state falls to 1/N up to padding."""
    flags = f"-L 4 -C 256 -b 4 {kind}"
    rows = plan_rows(flags)
    assert len(rows) == 4 * 11
    for ranks in (1, 2, 4):
        outcomes, _ = run_lines([f"-z {stage} {flags}" for stage in (0, 1, 2, 3)], ranks, tmp_path / str(ranks))
        for stage, outcome in enumerate(outcomes):
            params, grads, state, scratch, outside, total, _ = rows[stage, ranks]
            assert relative(outcome.summary["optimizer_state_mb"], state) < 1e-2 or state == 0
            assert relative(outcome.summary["peak_mb"][0], params + scratch) < 1e-2
            assert relative(outcome.summary["peak_mb"][1], params + grads + scratch) < 1e-2
            assert relative(outcome.summary["peak_mb"][3], total - outside) < 1e-2
        for outcome in outcomes[1:]:
            assert relative(outcome.summary["optimizer_state_mb"] * ranks, outcomes[0].summary["optimizer_state_mb"]) < 1e-2


def test_the_largest_model_of_the_plan_fits(tmp_path):
    """--plan's last column: so many layers fit into --memory, one more does not."""
    for given, memory in ((1, 520), (2, 1220)):
        flags = f"-C 64 -b 4 --memory {memory}"
        for (stage, ranks), row in plan_rows(flags).items():
            if ranks == given:
                totals = [plan_rows(f"-L {int(row[6]) + more} {flags}")[stage, ranks][5] for more in (0, 1)]
                assert row[6] > 0 and totals[0] <= memory < totals[1], (stage, ranks, row, totals)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe itself, on two ranks, in each stage."""
    folder = tmp_path_factory.mktemp("recipe")
    for stage in (0, 1, 2, 3):
        run(["./train_mlp", "-z", str(stage), "-o", str(folder / f"z{stage}")], ranks=2, timeout=LONG)
    yield [(json.loads((folder / f"z{stage}/summary.json").read_text()), (folder / f"z{stage}/main.log").read_text())
           for stage in (0, 1, 2, 3)]
    shutil.rmtree(folder)


def test_recipe_sum_and_memory(recipe):
    (off, off_log), (on, on_log), (grads, _), (params, _) = recipe
    assert grads["params_sum"] == params["params_sum"] == on["params_sum"]
    assert grads["peak_mb"][3] <= 845 and params["peak_mb"][3] <= 715
    assert off["params_sum"] == on["params_sum"] and off["params_hash"] == on["params_hash"] and off_log == on_log
    assert abs(on["params_sum"] + 3453.53) < 0.5
    assert relative(on["loss"], 0.989549041) < 5e-6
    assert on["peak_mb"][3] <= 970 and off["peak_mb"][3] <= 1290
    assert 320.1 < on["peak_mb"][0] < 322 and 640.3 < on["peak_mb"][1] < 643
    assert relative(2 * on["optimizer_state_mb"], off["optimizer_state_mb"]) < 1e-4
