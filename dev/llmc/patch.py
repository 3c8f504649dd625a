#!/usr/bin/env python3
"""Patches a checkout of llm.c, or of a fork of it, to use llmc_zero.

    dev/llmc/patch.py DIR                 patch; a second time changes nothing
    dev/llmc/patch.py DIR --check         say what would be done, and whether it can be; write nothing
    dev/llmc/patch.py DIR --revert        take it back; edits of your own stay
    dev/llmc/patch.py DIR --no-mend NAME  leave a mend of llm.c's own faults out (NAME,NAME; all of them: all)
    dev/llmc/patch.py DIR --drop-own-code replace what a fork has changed inside of the functions that are replaced
    dev/llmc/patch.py DIR --mends-only    only the mends: plain llm.c without these faults, to compare with
    dev/llmc/patch.py DIR --files         the files of DIR that any of these reads or writes, one a line

Every place to change is found by names that stand there (functions, variables), and has to be found exactly once: else
nothing is written, and the message names what is missing. DIR/llmc_zero gets the headers, the adapter gpt2.cuh with
its parts, the record of what was changed (patch.json, unpatched/), and in third_party/ a copy of xxHash and JSON for
Modern C++, so that the machine that compiles needs neither. Programs of DIR that are not patched come out as before: what
is changed in headers that they use, too, is behind #if defined(ZERO_MENDS), which the patched trainer alone defines.

Exit code: 0 done (or, with --check, possible), 1 an anchor is missing or a file cannot be written, 2 wrong usage, 3 this
DIR can be patched, but the machine has no xxHash or no JSON.
"""

import argparse
import difflib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True   # a folder of byte code would be a change to this checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))
from edits import EDITS, OPTIONAL, OWN
from mends import MENDS, OWN_MENDS
from plan import MENDED, Plan
from source import Missing

TOP = Path(__file__).resolve().parent.parent.parent
FOLDER = "llmc_zero"
RECORD = f"{FOLDER}/patch.json"


class Problem(Exception):
    """What ends this program, in words."""
    exit_code = 1


class NoHeaders(Problem):
    exit_code = 3


def sha(data):
    return hashlib.sha256(data).hexdigest()


def read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}") from None


def own_headers():
    """What DIR/llmc_zero gets: {name: bytes}."""
    paths = [*sorted((TOP / "llmc_zero").glob("*.cuh")), *sorted((TOP / "dev/llmc").glob("*.cuh"))]
    return {**{path.name: path.read_bytes() for path in paths}, **third_party()}


def third_party():
    """xxHash and JSON for Modern C++, wherever a compiler would find them: some versions of either are several files."""
    files, missing = {}, []
    places = [*filter(None, os.environ.get("CPATH", "").split(":")), TOP / "build/headers", TOP / ".venv/include",
              *filter(None, [os.environ.get("CONDA_PREFIX") and os.environ["CONDA_PREFIX"] + "/include"]),
              "/usr/local/include", "/usr/include"]
    for name, others, package in (("xxhash.h", ["xxh3.h"], "libxxhash-dev"),
                                  ("nlohmann/json.hpp", ["nlohmann/**/*.hpp"], "nlohmann-json3-dev")):
        place = next((Path(place) for place in places if (Path(place) / name).is_file()), None)
        if place is None:
            missing.append(f"{name} (Debian's {package})")
            continue
        for path in [place / name, *(path for pattern in others for path in sorted(place.glob(pattern)))]:
            files[f"third_party/{path.relative_to(place)}"] = read(path)
    if missing:
        raise NoHeaders(f"{' and '.join(missing)}: not found in {', '.join(map(str, places))}. Checkpoints need it: "
                        "install it, or run dev/deps.sh, which needs no root, or name a folder that has it in CPATH. "
                        "Nothing was changed.")
    return files


# ---------------------------------------------------------------------------- what to change

def plan_file(path, data, edits, mends):
    """Applies edits and mends to one file: (bytes, changes, {mend: already there}, [missing], [lost])."""
    plan = Plan(data.decode("latin-1"), shared=path not in OWN)   # latin-1 keeps every byte
    done, missing = {}, []
    for item in [*edits, *mends]:
        plan.item = item
        try:
            done[item.name] = bool(plan.has(item.name)) or item.apply(plan) == MENDED
        except Missing as error:
            missing.append(f"{path}: {'mend' if item in mends else 'edit'} '{item.name}': {error}")
        except (IndexError, ValueError):
            missing.append(f"{path}: {'mend' if item in mends else 'edit'} '{item.name}': "
                           "a function there has fewer or more arguments than were expected")
    lost = [f"{path}: {text}" for text in plan.lost]
    try:
        text, changes = plan.result()
    except Missing as error:
        return data, [], done, [*missing, f"{path}: {error}"], lost
    return text.encode("latin-1"), changes, done, missing, lost


class Work:
    """The patch of a folder: which files change and how. Nothing is written here."""

    def __init__(self, folder, originals, left_out, mends_only):
        self.mends = [m for m in MENDS if m.name not in left_out and (mends_only or not m.covered)]
        self.edits = [] if mends_only else EDITS
        if any(file not in OWN for m in self.mends for file in m.files):
            self.edits = [OWN_MENDS, *self.edits]
        self.files, self.missing, self.lost, self.done = {}, [], [], {}
        paths = dict.fromkeys([e.file for e in self.edits] + [f for m in self.mends for f in m.files])
        for path in paths:
            data = originals.get(path)
            if data is None and (folder / path).exists():
                data = read(folder / path)
            if data is None:
                if path not in OPTIONAL:
                    self.missing.append(f"{path}: no such file in {folder}")
                continue
            result, changes, done, missing, lost = plan_file(
                path, data, [e for e in self.edits if e.file == path], [m for m in self.mends if path in m.files])
            self.missing += missing
            self.lost += lost
            for name, there in done.items():
                self.done[name] = self.done.get(name, True) and there
            if changes:
                self.files[path] = (data, result, changes)

    def record(self, headers):
        return {"version": 1, "headers": {name: sha(data) for name, data in headers.items()},
                "files": {path: {"unpatched": sha(data), "patched": sha(result),
                                 "changes": [list(change) for change in changes]}
                          for path, (data, result, changes) in self.files.items()}}


# ---------------------------------------------------------------------------- what was changed

class Patched:
    """What an earlier run left in a folder; empty if there was none."""

    def __init__(self, folder):
        self.folder, self.record = folder, None
        if (folder / RECORD).exists():
            try:
                self.record = json.loads(read(folder / RECORD))
                parts = self.record["files"], self.record["headers"]
                if self.record["version"] != 1 or not all(isinstance(part, dict) for part in parts):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise Problem(f"{folder / RECORD} cannot be read: restore llm.c from its repository") from None
        elif (folder / FOLDER).exists():
            raise Problem(f"{folder / FOLDER} is there, and was not made by this tool: move it away first")

    def headers(self):
        """Headers that are as this tool wrote them, and those that somebody has changed since."""
        same, changed = [], []
        for name, digest in (self.record or {}).get("headers", {}).items():
            path = self.folder / FOLDER / name
            if path.exists():
                (same if sha(read(path)) == digest else changed).append(name)
        return same, changed

    def originals(self):
        """{path: bytes without our changes}; what was edited since by others stays edited."""
        return {path: self.original(path, entry)
                for path, entry in (self.record or {"files": {}})["files"].items()}

    def original(self, path, entry):
        now = read(self.folder / path)
        saved = self.folder / FOLDER / "unpatched" / path
        if not saved.exists():
            raise Problem(f"{saved} is gone, so {path} cannot be reverted: restore it from its repository")
        before = read(saved)
        if sha(now) == entry["patched"]:
            return before
        if sha(now) == entry["unpatched"] or self.taken_back():
            return now   # by hand; at another version, perhaps (git stash, git pull)
        return take_back(path, before.decode("latin-1"), now.decode("latin-1"), entry["changes"]).encode("latin-1")

    def taken_back(self):
        """Whether the trainer is as if it had never been patched: then the other files are, too."""
        trainer = self.folder / "train_gpt2.cu"
        changed = "train_gpt2.cu" in self.record["files"] and self.record["headers"]
        return bool(changed) and trainer.exists() and b"zero_gpt2_" not in read(trainer)


def take_back(path, before, now, changes):
    """Undoes our changes in a file that others have edited too. before: unpatched; now: as it is."""
    pieces, at, spans = [], 0, []
    for name, start, end, text in changes:
        pieces.append(before[at:start])
        begin = sum(map(len, pieces))
        pieces.append(text)
        spans.append((name, begin, begin + len(text), before[start:end]))
        at = end
    patched = "".join([*pieces, before[at:]])
    blocks = []   # equal lines of both, as (offset in patched, offset in now, length)
    a, b = patched.splitlines(keepends=True), now.splitlines(keepends=True)
    starts_a, starts_b = [0], [0]
    for lines, starts in ((a, starts_a), (b, starts_b)):
        for line in lines:
            starts.append(starts[-1] + len(line))
    for i, j, size in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        blocks.append((starts_a[i], starts_b[j], starts_a[i + size] - starts_a[i]))
    for name, begin, end, old in reversed(spans):
        for start_a, start_b, size in blocks:
            if start_a <= begin and end <= start_a + size:
                at = start_b + begin - start_a
                now = now[:at] + old + now[at + end - begin:]
                break
        else:
            line = patched[:begin].count("\n") + 1
            raise Problem(f"{path}: what edit '{name}' wrote (line {line} of the patched file) was changed since: "
                          f"undo that, or restore the file from its repository")
    return now


# ---------------------------------------------------------------------------- writing

def write_all(folder, files, remove=()):
    """Writes {path: bytes} and removes paths: all of it, or nothing."""
    targets = {path: (folder / path).resolve() for path in files}
    for path, target in targets.items():
        parent = target.parent
        while not parent.exists():
            parent = parent.parent
        if target.exists() and not (target.stat().st_mode & 0o200 and os.access(target, os.W_OK)):
            raise Problem(f"{folder / path} is read-only: nothing was changed; chmod u+w it first")
        if not (parent.stat().st_mode & 0o200 and os.access(parent, os.W_OK)):
            raise Problem(f"{parent} is read-only: nothing was changed; chmod u+w it first")
    targets.update({path: folder / path for path in remove})
    staged, old, made = {}, {}, []
    try:
        for path, data in files.items():
            target = targets[path]
            for parent in reversed(target.parents):
                if not parent.exists():
                    parent.mkdir()
                    made.append(parent)
            handle, staged[path] = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            if target.exists():
                shutil.copymode(target, staged[path])
            else:
                os.chmod(staged[path], 0o644)
        for path, target in targets.items():
            old[path] = (target.read_bytes(), target.stat().st_mode) if target.exists() else None
            if path in staged:
                os.replace(staged[path], target)
                del staged[path]
            else:
                target.unlink(missing_ok=True)
    except BaseException as error:   # an interruption by the keyboard, too
        for path, before in old.items():
            if before is None:
                targets[path].unlink(missing_ok=True)
            elif path not in staged:
                targets[path].write_bytes(before[0])
                os.chmod(targets[path], before[1])
        for temporary in staged.values():
            Path(temporary).unlink(missing_ok=True)
        for parent in reversed(made):
            parent.rmdir()
        if not isinstance(error, OSError):
            raise
        raise Problem(f"{error.filename or folder}: {error.strerror}: nothing was changed") from None
    for path in remove:
        for parent in (folder / path).parents:
            if parent == folder or not parent.exists() or any(parent.iterdir()):
                break
            parent.rmdir()


# ---------------------------------------------------------------------------- commands

def show(work, left_out, mends_only):
    for e in work.edits:
        print(f"  edit  {e.name:<16} {e.file:<24} {e.what}")
    for m in MENDS:
        state = ("left out" if m.name in left_out else "part of edit '" + m.covered + "'"
                 if m.covered and not mends_only else "not needed: mended already" if work.done.get(m.name)
                 else ", ".join(m.files))
        print(f"  mend  {m.name:<16} {state:<24} {m.reason}")


def patch(folder, left_out, mends_only, check, drop_own_code=False):
    patched = Patched(folder)
    originals = patched.originals()
    work = Work(folder, originals, left_out, mends_only)
    if check:
        show(work, left_out, mends_only)
    if work.missing:
        raise Problem("\n".join(
            [*work.missing, "Nothing was changed. This llm.c is not built as the patch expects: look for what took the "
             "place of the names above, and adapt dev/llmc/edits.py; a mend can be left out with --no-mend NAME."]))
    if work.lost and not drop_own_code:
        raise Problem("\n".join([*work.lost, "Nothing was changed. What this code does would be lost: do it elsewhere, and "
                                 "patch with --drop-own-code."]))
    headers = {} if mends_only else own_headers()
    same, kept = patched.headers()
    record = work.record(headers)
    for name in kept:   # somebody's own changes to a header stay, in a patch that needs no headers too
        record["headers"][name] = patched.record["headers"][name]
    files = {f"{FOLDER}/{name}": data for name, data in headers.items() if name not in kept}
    for path, (data, _, _) in work.files.items():   # before the files that need them to be reverted
        files[f"{FOLDER}/unpatched/{path}"] = data
    files[RECORD] = (json.dumps(record, indent=1) + "\n").encode()
    for path, (_, result, _) in work.files.items():
        files[path] = result
    gone = []
    for path, data in originals.items():   # files that an earlier patch changed and this one does not
        if path not in work.files:
            files[path] = data
            gone.append(f"{FOLDER}/unpatched/{path}")
    gone += [f"{FOLDER}/{name}" for name in same if name not in headers]
    new = {path: data for path, data in files.items()
           if not (folder / path).exists() or (folder / path).read_bytes() != data}
    for name in kept:
        print(f"{FOLDER}/{name} was changed by hand: left as it is")
    if check:
        print(f"{folder}: " + ("patched" if not new and not gone else "can be patched"))
        return
    if not new and not gone:
        print(f"{folder}: patched already; nothing was changed")
        return
    write_all(folder, new, gone)
    for path, (_, _, changes) in work.files.items():
        names = dict.fromkeys(change.edit for change in changes)
        print(f"{path}: {len(changes)} changes: {', '.join(names)}")
    there = [m.name for m in work.mends if work.done.get(m.name)]
    if there:
        print(f"mended already: {', '.join(there)}")
    if left_out:
        print(f"left out: {', '.join(sorted(left_out))}")
    print(f"{folder}: patched" + (" (mends only)" if mends_only else f"; {FOLDER}/ holds the headers"))


def revert(folder, check):
    patched = Patched(folder)
    if patched.record is None:
        print(f"{folder}: not patched; nothing was changed")
        return
    originals = patched.originals()
    same, changed = patched.headers()
    if check:
        print(f"{folder}: can be reverted: {', '.join(originals)}")
        return
    remove = [f"{FOLDER}/{name}" for name in same] + [f"{FOLDER}/unpatched/{path}" for path in originals] + [RECORD]
    write_all(folder, {path: data for path, data in originals.items()
                       if (folder / path).read_bytes() != data}, remove)
    for name in changed:
        print(f"{FOLDER}/{name} was changed by hand: left where it is")
    print(f"{folder}: reverted: {', '.join(originals)}")


def files(folder):
    """What a copy of the folder must have so that it can be patched and reverted as the folder can."""
    record = Patched(folder).record or {"files": {}, "headers": {}}
    changed = {*(e.file for e in EDITS), *(file for m in MENDS for file in m.files), *record["files"]}
    paths = {RECORD, *changed, *(f"{FOLDER}/unpatched/{path}" for path in changed),
             *(f"{FOLDER}/{name}" for name in record["headers"])}
    print("\n".join(path for path in sorted(paths) if (folder / path).is_file()))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--revert", action="store_true")
    parser.add_argument("--mends-only", action="store_true")
    parser.add_argument("--drop-own-code", action="store_true")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--no-mend", metavar="NAME", action="append", nargs="?", const="all", default=[])
    args = parser.parse_args(arguments)
    names = {m.name for m in MENDS}
    left_out = set()
    for value in args.no_mend:
        words = value.split(",")
        if args.folder is None and not set(words) <= names | {"all"}:
            args.folder, words = value, ["all"]   # --no-mend DIR
        for word in words:
            if word not in names | {"all"}:
                parser.error(f"--no-mend {word}: there is no such mend; there are: {', '.join(sorted(names))}, all")
        left_out |= names if "all" in words else set(words)
    if args.folder is None:
        parser.error("DIR is missing: the folder of llm.c")
    if args.revert and (args.mends_only or left_out):
        parser.error("--revert takes everything back")
    folder = Path(args.folder)
    try:
        if not folder.is_dir():
            raise Problem(f"{folder} is not a folder")
        if args.files:
            files(folder)
        elif args.revert:
            revert(folder, args.check)
        else:
            patch(folder, left_out, args.mends_only, args.check, args.drop_own_code)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)   # | head
    sys.exit(main())
