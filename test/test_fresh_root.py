"""dev/fresh_root.sh: what comes in and what does not, and that the host is as it was, however it ends."""

import contextlib
import http.server
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from conftest import TOP, run, slow

CACHE = Path(os.environ.get("FRESH_ROOT_CACHE") or Path.home() / ".cache/llmc_zero-fresh-root")
pytestmark = [slow, pytest.mark.timeout(1800), pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a root")]


def mounts():
    return sorted(line.split(" ", 5)[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())


def processes(words):
    """How many have exactly this command line."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):   # it has ended
            found += path.read_bytes() == "".join(word + "\0" for word in words.split()).encode()
    return found


@pytest.fixture(autouse=True)
def the_host_stays_as_it_was():
    before = mounts()
    yield
    assert mounts() == before


def fresh(*words, **options):
    return run(["dev/fresh_root.sh", *words], timeout=1500, check=False, **options)


def test_what_comes_in(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "mine").write_text("here")
    env = {"PYTHONDONTWRITEBYTECODE": "1", "CPATH": "/elsewhere", "MAKEFLAGS": "-j3", "LC_ALL": "C.UTF-8",
           "no_proxy": "here", "PIP_RETRIES": "4", "PIP_FIND_LINKS": str(wheels)}
    inside = (f'env; echo "$1 $PWD"; git log -1 --format=%H; cat {wheels}/mine; echo\n'
              f'ls /proc /sys /dev/shm >/dev/null && rm -rf {wheels} /proc/self/../mine; ps=$(ls /proc | grep -c "^[0-9]"); '
              f'echo processes $ps; touch mine /dev/shm/mine; exit 7')
    result = fresh("sh", "-c", inside, "sh", "a  b", env=env)
    assert result.code == 7, result.err
    lines = result.out.splitlines()
    names = {line.split("=")[0] for line in lines if "=" in line}
    assert {"PIP_RETRIES=4", "no_proxy=here", "HOME=/root", "a  b /root/llmc_zero", "here"} <= set(lines)
    allowed = {"HOME", "PATH", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "LLMC_ZERO_WHEELS"}
    assert all(name in allowed or name.startswith("PIP_") or name.lower().endswith("_proxy") for name in names), names
    assert subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=TOP, text=True).strip() in lines
    assert int(next(line for line in lines if line.startswith("processes ")).split()[1]) < 10    # none of the host's
    assert (wheels / "mine").read_text() == "here"      # could not be removed from inside
    assert not (TOP / "mine").exists() and not Path("/dev/shm/mine").exists()
    assert not (CACHE / "run").exists()


def test_arguments_that_are_missing():
    assert fresh().code == 125


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_signals(number):
    words = f"sleep 98765.{os.getpid()}{int(number)}"
    process = subprocess.Popen(["dev/fresh_root.sh", "sh", "-c", f"{words} & {words}"], cwd=TOP)
    while not processes(words) and process.poll() is None:
        time.sleep(0.1)
    assert process.poll() is None
    os.kill(process.pid, number)
    assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    while number == signal.SIGKILL and processes(words):    # the kernel ends them, soon
        time.sleep(0.1)
    assert not processes(words)
    if number == signal.SIGKILL:    # the next run finds the root of this one, and removes it
        assert (CACHE / "run/root").exists()
        assert fresh("true").code == 0
    assert not (CACHE / "run").exists()


class Archive(http.server.BaseHTTPRequestHandler):
    """An archive that answers each request with `answer`, or drops it if that is None."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.answer is not None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.answer)))
            self.end_headers()
            self.wfile.write(self.server.answer)

    def log_message(self, *words):
        pass


@pytest.fixture
def archive():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Archive)
    server.asked, server.answer = [], None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def elsewhere(tmp_path, archive):
    return {"FRESH_ROOT_CACHE": str(tmp_path / "cache"), "http_proxy": None, "CPATH": "/elsewhere",
            "FRESH_ROOT_MIRROR": f"http://127.0.0.1:{archive.server_address[1]}/debian"}


def test_no_archive(tmp_path, archive):
    result = fresh("sh", "-c", "env; pwd; exit 3", env=elsewhere(tmp_path, archive))
    assert result.code == 3
    assert len(archive.asked) == 3 and archive.asked[0].endswith("/InRelease")
    assert "CPATH" not in result.out and f"{tmp_path}/cache/run/llmc_zero" in result.out
    assert result.err.splitlines()[-1].startswith("fresh_root: ATTENTION: NOT IN A FRESH ROOT")
    assert not (tmp_path / "cache/run").exists()


def test_a_root_that_cannot_be_made(tmp_path, archive):
    archive.answer = b"this is no release of Debian\n"
    result = fresh("echo", "it ran", env=elsewhere(tmp_path, archive))
    assert result.code == 125 and "debootstrap cannot make a root" in result.err
    assert result.out == ""
    assert not list((tmp_path / "cache").glob("*.tar*")) and not (tmp_path / "cache/run").exists()
