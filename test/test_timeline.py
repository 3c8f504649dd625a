"""The trace of train_mlp -T and dev/timeline.py: what stands in it, and what is said of a broken one."""

import json
import sys

import pytest
from conftest import TOP, own_lines, run

sys.path.insert(0, str(TOP / "dev"))
import timeline


@pytest.fixture(scope="module", params=[1, 3])
def trace(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    run(["./train_mlp", "-z", str(request.param), "-L", "4", "-C", "64", "-b", "8", "-x", "3", "-K", "unit", "-l", "1e-3",
         "-T", str(file)], ranks=2, env={"CUDA_CPU_STREAMS": "threads"})
    return file


def test_trace_holds_every_kind_and_rows_nest(trace):
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    ranks = timeline.read_trace(str(trace))
    for rows in ranks.values():
        assert {"forward", "backward", "norm", "update"} <= {kind for kind, *_ in rows[0]}
        assert {"reduce", "gather"} <= {kind for kind, *_ in rows[1]}
        assert len(timeline.steps_of(rows)) == 3
    open_ends = {}
    for event in events:  # in the order of their begins; Perfetto drops what overlaps, be it by a nanosecond
        if event["ph"] != "X":
            continue
        begin, end = event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000
        assert begin == int(begin) and end == int(end) and 0 <= begin <= end
        ends = open_ends.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], f"{event['name']} overlaps the span before it"
        ends.append(end)


def test_picture(trace, tmp_path):
    picture = tmp_path / "picture.png"
    result = run([sys.executable, "dev/timeline.py", str(trace), "--png", str(picture), "--step", "2"])
    assert result.out.count("exposed ") == 6 and "of it under backward" in result.out
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 10000
    result = run([sys.executable, "dev/timeline.py", str(trace), "--png", str(picture), "--step", "4"], check=False)
    assert result.code == 2 and "step 4 of rank 0, which has steps 1 to 3" in result.err


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", '{"traceEvents": 3}', '[{"ph": "X"}]', "[3]",
                                  '[{"ph":"X","name":"","pid":0,"tid":0,"ts":1,"dur":1}]'])
def test_broken_traces_are_said_in_one_line(text, tmp_path):
    file = tmp_path / "trace.json"
    if text is not None:
        file.write_text(text)
    result = run([sys.executable, "dev/timeline.py", str(file)], check=False)
    assert result.code == 2 and len(own_lines(result.err, "timeline: ")) == 1 and "Traceback" not in result.err


def test_hidden_time_leaves_waits_out():
    compute = [("backward", "backward 1", 0.0, 10.0), ("wait", "wait 1", 4.0, 6.0)]
    assert timeline.under([("reduce", "reduce 1", 3.0, 12.0)], "reduce", compute, "backward") == 5.0
