"""Checkpoints, call by call: as clients of a network's file system make them, in which order, and with each one failing or
the last one that a process makes (test/file_client.c)."""

import errno
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict, namedtuple

import launch
import pytest
from conftest import TOP, end, own_lines, run, start
from test_checkpoint import bits, path_of, steps_in

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


CHILD = "import os, sys\nfor line in sys.stdin: print(eval(line), flush=True)"


class Client:
    """A process of its own, with the client, that is told what to do, a Python expression a line."""

    def __init__(self, path, environment):
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], env=launch.environment(environment), text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.path = path

    def open(self, flags):
        return self.do(f"(fd := os.open({str(self.path)!r}, os.{flags}))")

    def do(self, expression):
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.communicate()
        return self.process.returncode


def write_beside(path, environment, flags, second=4000, read_first=False):
    """Two clients open a file of zeros, write to different bytes of it and sync. Whether the bytes of each are there."""
    path.write_bytes(bytes(10000))
    clients = [Client(path, environment) for _ in range(2)]
    for client in clients:
        if read_first:
            client.open("O_RDONLY")
            client.do("os.pread(fd, 10, 0)")
        client.open(flags)
    for client, letter, offset in zip(clients, "ab", (0, second)):
        assert client.do(f"os.pwrite(fd, b'{letter}' * 50, {offset})") == "50"
    for client in clients:
        assert client.do("os.fsync(fd)") == "None" and client.do("os.close(fd)") == "None"
        assert client.end() == 0
    data = path.read_bytes()
    assert len(data) == 10000
    return [data[offset:offset + 50] == letter * 50 for letter, offset in ((b"a", 0), (b"b", second))]


def test_the_client_itself(client, tmp_path):
    """It loses what a client of NFS loses, and nothing else; it fails and kills where it is told to."""
    path, other = tmp_path / "step_1", tmp_path / "another"
    whole, lost = [True, True], [False, True]
    assert write_beside(path, {}, "O_RDWR") == whole
    assert write_beside(path, client(CACHE="nfs"), "O_RDWR") == lost
    assert write_beside(other, client(CACHE="nfs"), "O_RDWR") == whole
    assert write_beside(path, client(CACHE="nfs"), "O_RDWR", 4096) == whole
    assert write_beside(path, client(CACHE="nfs", PAGE=PAGE), "O_RDWR", 4096) == lost
    assert write_beside(path, client(CACHE="nfs", PAGE=PAGE), "O_WRONLY") == whole
    assert write_beside(path, client(CACHE="nfs"), "O_WRONLY", read_first=True) == lost
    assert write_beside(path, client(CACHE="whole"), "O_WRONLY") == lost
    assert write_beside(path, client(CACHE="nfs", LOSE=1), "O_WRONLY") == [False, False]

    path.write_bytes(b"old")   # what is read stays until the file is opened anew
    reader = Client(path, client(CACHE="nfs"))
    reader.open("O_RDONLY")
    assert reader.do("os.pread(fd, 3, 0)") == "b'old'"
    path.write_bytes(b"new")
    assert reader.do("os.pread(fd, 3, 0)") == "b'old'"
    reader.open("O_RDONLY")
    assert reader.do("os.pread(fd, 3, 0)") == "b'new'"
    assert reader.end() == 0

    for call, code, text in (("pwrite:2:28", 1, b"w"), ("pwrite:2:kill", -9, b"w"), ("pwrite:2:killed", -9, b"ww")):
        path.write_bytes(b"")
        writer = Client(path, client(FAIL=call, LOG=tmp_path / "log"))
        writer.open("O_WRONLY")
        assert writer.do("os.pwrite(fd, b'w', 0)") == "1"
        assert writer.do("os.pwrite(fd, b'w', 1)") == ""
        assert writer.end() == code and path.read_bytes() == text
    assert [line.split(" ", 1)[1] for line in (tmp_path / "log").read_text().splitlines()[:3]] == \
        ["open step_1 0 0 writes", "pwrite step_1 0 1 writes", "pwrite step_1 1 1 writes"]


@pytest.mark.parametrize("shape", SHAPES)
def test_clients_with_caches_of_their_own(client, shape, tmp_path):
    """A client writes whole pages back: no rank undoes what another has written beside it. Every file is whole, and that of
    one rank without a client."""
    flags = f"{SHAPES[shape]} -x 2 -n 2"
    train(flags, tmp_path / "1", 1)
    kinds = list(itertools.product((4096, PAGE), ("nfs", "whole")))
    for ranks in (2, 3, 4):
        for page, cache in kinds if ALL else [kinds[(ranks + len(shape)) % 4]]:
            folder, log = tmp_path / f"{ranks}_{page}_{cache}", tmp_path / "log"
            train(flags, folder, ranks, client(CACHE=cache, PAGE=page, LOG=log))
            assert sha256_of(path_of(folder, 2)) == sha256_of(path_of(tmp_path / "1", 2)), f"{ranks} ranks, {page}, {cache}"
            writers = {line.split()[0] for line in log.read_text().splitlines() if " pwrite step_" in line}
            assert len(writers) >= min(ranks, 3), log.read_text()   # a file of three pieces has three
            log.unlink()
            shutil.rmtree(folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_page_that_gets_lost(client, two, victim, tmp_path):
    """One page of what a rank writes does not arrive, and nobody says so: another rank reads it back and misses it. With
    -V 0 the file gets its name, and the next start passes it over."""
    base, wanted, _ = two
    for verify in (1, 0):
        folder, texts = tmp_path / f"{verify}", []
        shutil.copytree(base, folder)
        codes = disturbed(folder, tmp_path / f"meet{verify}", victim, client(CACHE="nfs", LOSE=40), texts,
                          f"-V {verify} -nk 2")
        said = [line for _, err in texts for line in own_lines(err, "train_mlp: ")]
        if verify:
            assert codes == [1, 1] and len(said) == 1 and "read back: " in said[0], said
            assert steps_in(folder) == [2] and not list(folder.glob("*.tmp"))
        else:
            assert codes == [0, 0] and steps_in(folder) == [2, 4], said
        again = run(["./train_mlp", *f"{FLAGS} -x 4".split(), "-o", folder])
        assert "resumed from step 2" in again.out and ("passed over" in again.out) == (not verify), again.out
        assert of_run(folder) == wanted


Call = namedtuple("Call", "pid call name offset bytes how")


def calls_in(log):
    """[Call] of all processes, in the order in which they began."""
    words = [line.split(" ", 5) for line in log.read_text().splitlines()]
    return [Call(pid, call, name, int(offset), int(size), how) for pid, call, name, offset, size, how in words]


def pages_of(call):
    return range(call.offset // PAGE, (call.offset + call.bytes - 1) // PAGE + 1)


@pytest.mark.parametrize("shape", SHAPES if ALL else ["large slices", "small slices"])
def test_the_order_of_calls(client, shape, tmp_path):
    """On each rank data, sync, close; then the header, sync; on each rank what others wrote is read; then the name, the
    folder, the end of the older file. Descriptors that write do not read, each page is written by one rank."""
    log, folder = tmp_path / "log", tmp_path / "run"
    train(f"{SHAPES[shape]} -x 2 -n 1 -nk 1", folder, 3, client(LOG=log))
    size = path_of(folder, 2).stat().st_size
    data = 8 + int.from_bytes(path_of(folder, 2).read_bytes()[:8], "little")
    assert data % PAGE == 0
    calls, temporary = calls_in(log), f"{path_of(folder, 2).name}.tmp"
    save = [(at, call) for at, call in enumerate(calls) if call.name == temporary]
    assert {(call.call, call.how) for _, call in save if call.call[0] == "p"} == {("pwrite", "writes"), ("pread", "reads")}
    assert {call.how for _, call in save} == {"writes", "reads"}
    (header, first), = [(at, call) for at, call in save if call.call == "pwrite" and call.offset == 0 and call.bytes > 8]
    (rename, _), = [(at, call) for at, call in save if call.call == "rename"]

    owner, read = {}, set()
    for _, call in save:
        for page in pages_of(call) if call.call == "pwrite" else ():
            assert owner.setdefault(page, call.pid) == call.pid, f"page {page} is written by two ranks"
    assert sorted(owner) == list(range((size - 1) // PAGE + 1)) and len(set(owner.values())) == 3
    for pid in set(owner.values()):
        own = [(at, call) for at, call in save if call.pid == pid]
        last = max(i for i, (_, call) in enumerate(own) if call.call == "pwrite" and call.offset >= data)
        assert [call.call for _, call in own[last + 1:last + 3]] == ["fsync", "close"]
        assert own[last + 2][0] < header, "the header comes when the data of all ranks is synced and closed"
        back = [(at, call) for at, call in own if call.call == "pread" and call.bytes > 8 and call.offset >= data]
        pages = {page for _, call in back for page in pages_of(call)}
        assert pages and all(owner[page] != pid for page in pages), "a rank reads what another has written"
        read |= pages
        closed = [at for at, call in own if call.call == "close" and call.how == "reads"]
        assert header < back[0][0] and back[-1][0] < closed[-1] < rename, "the name comes when all ranks have read"
    assert read == {page for page in owner if page >= data // PAGE}
    after = [(call.call, call.name) for call in calls[header + 1:] if call.pid == first.pid and call.name != "main.log"]
    assert after[0] == ("fsync", temporary)
    assert after[after.index(("rename", temporary)):][1:3] == [("open", "folder"), ("fsync", "folder")]
    old = path_of(folder, 1).name
    assert ("unlink", old) in after[after.index(("fsync", "folder")):]


# ----------------------------------------------------------------------------- one call fails, or is the last

FLAGS = f"-L 3 -C 601 -nk 1 -n 2 -y 1 {RUN}"
ERRORS = {"open": errno.EMFILE, "fallocate": errno.ENOSPC, "pwrite": errno.EIO, "pread": errno.EIO, "fsync": errno.EIO,
          "close": errno.EIO, "rename": errno.EACCES, "unlink": errno.EROFS, "ftruncate": errno.EIO, "fopen": errno.EACCES,
          "fflush": errno.ENOSPC, "fclose": errno.EIO}


def of_run(folder):
    """What must be as if nothing had happened: the last file, main.log, what summary.json says of the parameters."""
    return sha256_of(path_of(folder, 4)), *bits(folder)


@pytest.fixture(scope="module")
def two(client, tmp_path_factory):
    """(a run of two steps that is saved, of_run of the same after four, {rank: [(call, file) from there on]})"""
    top = tmp_path_factory.mktemp("two")
    run(["./train_mlp", *f"{FLAGS} -x 2".split(), "-o", top / "run"], ranks=2)
    calls = {}
    for rank in range(2):
        shutil.copytree(top / "run", top / f"run{rank}")
        assert disturbed(top / f"run{rank}", top / f"meet{rank}", rank, client(LOG=top / f"log{rank}")) == [0, 0]
        calls[rank] = [tuple(line.split()[1:3]) for line in (top / f"log{rank}").read_text().splitlines()]
        assert of_run(top / "run0") == of_run(top / f"run{rank}")
    return top / "run", of_run(top / "run0"), calls


def disturbed(folder, meeting, victim, environment, out=None, flags=""):
    """Two ranks go on to step 4; one of them in this environment. Returns their exit codes."""
    meeting.mkdir(parents=True)
    words = ["./train_mlp", "-pi", "fs", "-pf", meeting, "-pn", 2, *f"{FLAGS} -x 4 {flags}".split(), "-o", folder]
    processes = [start([*words, "-pr", rank], environment if rank == victim else None) for rank in range(2)]
    texts = [end(process) for process in processes]
    if out is not None:
        out += texts
    return [process.returncode for process in processes]


def cases_of(calls):
    """(rank, call, which, what happens, file). All: at each call of each rank an error, a death before it, one after it.
    Else for each kind of call and of file: an error at the last one, a death at the middle one."""
    for rank, made in calls.items():
        seen, kinds = defaultdict(int), defaultdict(list)
        for call, name in made:
            seen[call] += 1
            kinds[call, re.sub("[0-9]+", "N", name)].append((seen[call], name))
        for number, ((call, _), places) in enumerate(kinds.items()):
            error, death = str(ERRORS[call]), ("kill", "killed")[number % 2]
            few = {(places[-1][0], error), (places[len(places) // 2][0], death)}
            for (n, name), what in itertools.product(places, (error, "kill", "killed")):
                if ALL or (n, what) in few:
                    yield rank, call, n, what, name


def test_every_call(client, two, tmp_path):
    """Whatever fails or dies at whatever call: nobody waits for ever, one line says what failed, no file is torn, none is
    lost, and the run goes on to the same file, log and sums."""
    base, wanted, calls = two
    endings = defaultdict(int)
    for number, (rank, call, n, what, name) in enumerate(cases_of(calls)):
        case, folder, texts = f"rank {rank}, {call} {n} ({name}), {what}", tmp_path / f"{number}", []
        shutil.copytree(base, folder)
        codes = disturbed(folder, tmp_path / f"meet{number}", rank, client(FAIL=f"{call}:{n}:{what}"), texts)
        said = [line for _, err in texts for line in own_lines(err, "train_mlp: ")]
        if what.startswith("kill"):
            # after the save the other may have ended well before
            assert codes[rank] == -9 and (codes[1 - rank] != 0 or 4 in steps_in(folder)), f"{case}: {codes} {said}"
        else:
            assert codes in ([0, 0], [1, 1]), f"{case}: {codes} {said}"
            # the line of a step is no meeting of the ranks: the other one hears of it in its next one, from NCCL
            told = [line for line in said
                    if name != "main.log" or not re.search(rf"rank {rank} (is dead|has died|ended the run)", line)]
            assert len(told) == codes[0], f"{case}: {said}"
            assert not list(folder.glob("*.tmp")), case
            # a lock that cannot be had, what is closed after it was read or synced, what is left for the next to delete
            assert codes[0] or call in ("open", "close", "fclose", "unlink"), f"{case} is not said"
        endings["killed" if what.startswith("kill") else "error" if codes[0] else "harmless"] += 1
        steps = steps_in(folder)
        assert steps and max(steps) >= 2, f"{case}: {steps}"
        again = run(["./train_mlp", *f"{FLAGS} -x 4".split(), "-o", folder])
        assert f"resumed from step {max(steps)}" in again.out and "passed over" not in again.out, f"{case}: {again.out}"
        assert of_run(folder) == wanted and not list(folder.glob("*.tmp")), case
        shutil.rmtree(folder)
    print(dict(endings))
    assert endings["killed"] >= 25 and endings["error"] >= 20, dict(endings)
