"""Checkpoints, call by call: as clients of a network's file system make them, in which order, and with each one failing or
the last one that a process makes (test/file_client.c)."""

import errno
import hashlib
import os
import shutil
import subprocess
from collections import defaultdict

import pytest
from conftest import TOP, end, own_lines, run, start
from test_checkpoint import path_of, steps_in

ALL = os.environ.get("RUN_ALL") == "1"
SHAPES = {"large slices": "-L 3 -C 601", "a bucket a layer": "-L 6 -C 409 -K unit", "small slices": "-L 3 -C 601 -K 0.05",
          "stage 3": "-L 3 -C 601 -z 3", "bf16": "-L 3 -C 701 -P bf16", "stochastic": "-L 3 -C 901 -P bf16 -w 0"}
RUN = "-b 2 -d 12 -I split -R ordered"
PAGE = 65536


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """{variable: value} for a process with file_client.c."""
    library = tmp_path_factory.mktemp("client") / "file_client.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, TOP / "test/file_client.c", "-ldl"], check=True)
    return lambda **settings: {"LD_PRELOAD": str(library),
                               **{f"FILE_CLIENT_{key}": str(value) for key, value in settings.items()}}


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(flags, folder, ranks, env=None):
    return run(["./train_mlp", *f"{RUN} {flags}".split(), "-o", folder], ranks=ranks, env=env)


@pytest.mark.parametrize("shape", SHAPES)
def test_clients_with_caches_of_their_own(client, shape, tmp_path):
    """A client writes whole pages back: no rank undoes what another has written beside it."""
    flags = f"{SHAPES[shape]} -x 2 -n 2"
    train(flags, tmp_path / "1", 1)
    for ranks in (2, 3, 4):
        for page in (4096, PAGE)[ranks % 2 if not ALL else 0:][:2 if ALL else 1]:
            folder = tmp_path / f"{ranks}_{page}"
            train(flags + " -V 1", folder, ranks, client(CACHE=1, PAGE=page))
            assert sha256_of(path_of(folder, 2)) == sha256_of(path_of(tmp_path / "1", 2)), f"{ranks} ranks, pages of {page}"


def calls_in(log, name):
    """{process: [(call, offset, bytes, how)]} of the calls for a file, or the folder."""
    found = defaultdict(list)
    for line in log.read_text().splitlines():
        pid, call, of, offset, size, how = line.split(" ", 5)
        if of in (name, f"{name}.tmp", "folder"):
            found[int(pid)].append((call if of != "folder" else f"folder {call}", int(offset), int(size), how))
    return found


@pytest.mark.parametrize("shape", SHAPES if ALL else ["large slices", "small slices"])
def test_the_order_of_calls(client, shape, tmp_path):
    """On each rank data, then sync and close; header, sync; read back; name; folder. Descriptors that write do not read, no
    page is written by two ranks."""
    log, folder = tmp_path / "log", tmp_path / "run"
    train(f"{SHAPES[shape]} -x 2 -n 2", folder, 3, client(LOG=log))
    data = 8 + int.from_bytes(path_of(folder, 2).read_bytes()[:8], "little")
    assert data % PAGE == 0
    owner = {}
    for pid, calls in calls_in(log, path_of(folder, 2).name).items():
        if not any(call == "pwrite" for call, *_ in calls):   # mpirun
            continue
        assert {how for *_, how in calls} <= {"writes", "reads"}
        # a save comes after the check before step 1, whose last sync is that of its own few bytes
        names = [call for call, *_ in calls]
        first = [i for i, (call, offset, size, _) in enumerate(calls) if call == "pwrite" and size > 8][0]
        written = [(i, offset, size) for i, (call, offset, size, _) in enumerate(calls) if call == "pwrite" and i >= first]
        pieces = [(i, offset, size) for i, offset, size in written if offset >= data]
        assert names[pieces[-1][0] + 1:][:2] == ["fsync", "close"], "data is synced and closed"
        for _, offset, size in written:
            for page in range(offset // PAGE, (offset + size - 1) // PAGE + 1):
                assert owner.setdefault(page, pid) == pid, f"page {page} is written by two ranks"
        assert "pread" in names[pieces[-1][0]:], "it is read back"
        if "rename" in names:
            header = [i for i, offset, _ in written if offset == 0]
            assert len(header) == 1 and header[0] > pieces[-1][0] and names[header[0] + 1] == "fsync"
            assert names.index("rename") > header[0] + 1 + names[header[0] + 1:].index("pread")
            assert names[names.index("rename"):][:3] == ["rename", "folder open", "folder fsync"] or \
                names[names.index("rename"):][:2] == ["rename", "folder fsync"]
    assert len(set(owner.values())) == 3, "all ranks write"


# ----------------------------------------------------------------------------- one call fails, or is the last

FLAGS = f"-L 3 -C 601 -nk 2 -n 2 -y 1 {RUN}"
ERRORS = {"open": errno.EMFILE, "fallocate": errno.ENOSPC, "pwrite": errno.EIO, "pread": errno.EIO, "fsync": errno.EIO,
          "close": errno.EIO, "rename": errno.EACCES, "unlink": errno.EROFS}


@pytest.fixture(scope="module")
def two(client, tmp_path_factory):
    """(a run of two steps that is saved, the file of the same run after four, {rank: {call: how often from there on}})"""
    top = tmp_path_factory.mktemp("two")
    run(["./train_mlp", *f"{FLAGS} -x 2".split(), "-o", top / "run"], ranks=2)
    counts = {}
    for rank in range(2):
        shutil.copytree(top / "run", top / f"run{rank}")
        processes = disturbed(top / f"run{rank}", top / f"meet{rank}", rank, client(LOG=top / f"log{rank}"))
        assert processes == [0, 0]
        counts[rank] = defaultdict(int)
        for line in (top / f"log{rank}").read_text().splitlines():
            counts[rank][line.split()[1]] += 1
    return top / "run", sha256_of(path_of(top / "run0", 4)), counts


def disturbed(folder, meeting, victim, environment, out=None):
    """Two ranks go on to step 4; one of them in this environment. Returns their exit codes."""
    meeting.mkdir(parents=True)
    words = ["./train_mlp", "-pi", "fs", "-pf", meeting, "-pn", 2, *f"{FLAGS} -x 4".split(), "-o", folder]
    processes = [start([*words, "-pr", rank], environment if rank == victim else None) for rank in range(2)]
    texts = [end(process) for process in processes]
    if out is not None:
        out += texts
    return [process.returncode for process in processes]


def cases_of(counts):
    """(rank, call, which, what happens): all, or for each call of a rank an error at the last, a death at the middle."""
    for rank, calls in counts.items():
        for call, count in sorted(calls.items()):
            for n in range(1, count + 1):
                for what in (str(ERRORS[call]), "kill", "killed"):
                    if ALL or (n, what) in ((count, str(ERRORS[call])), (count // 2 + 1, "kill")):
                        yield rank, call, n, what


def test_every_call(client, two, tmp_path):
    """Whatever fails or dies at whatever call: nobody waits for ever, no file is torn, none is lost, and the run goes on to
    the same file."""
    base, wanted, counts = two
    endings = defaultdict(int)
    for number, (rank, call, n, what) in enumerate(cases_of(counts)):
        case, folder, texts = f"rank {rank}, {call} {n}, {what}", tmp_path / f"{number}", []
        shutil.copytree(base, folder)
        codes = disturbed(folder, tmp_path / f"meet{number}", rank, client(FAIL=f"{call}:{n}:{what}"), texts)
        said = [line for _, err in texts for line in own_lines(err, "train_mlp: ")]
        if what.startswith("kill"):
            # after the save the other may have ended well before
            assert codes[rank] == -9 and (codes[1 - rank] != 0 or 4 in steps_in(folder)), f"{case}: {codes} {said}"
        else:
            assert codes in ([0, 0], [1, 1]), f"{case}: {codes} {said}"
            assert len(said) == codes[0], f"{case}: {said}"
            assert not list(folder.glob("*.tmp")), case
        endings["killed" if what.startswith("kill") else "error" if codes[0] else "harmless"] += 1
        steps = steps_in(folder)
        assert steps and max(steps) >= 2, f"{case}: {steps}"
        again = run(["./train_mlp", *f"{FLAGS} -x 4".split(), "-o", folder])
        assert f"resumed from step {max(steps)}" in again.out and "passed over" not in again.out, f"{case}: {again.out}"
        assert sha256_of(path_of(folder, 4)) == wanted and not list(folder.glob("*.tmp")), case
        shutil.rmtree(folder)
    print(dict(endings))
    assert endings["killed"] >= 10 and endings["error"] >= 8, dict(endings)
